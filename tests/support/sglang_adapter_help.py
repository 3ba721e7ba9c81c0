"""A stand-in for a server that takes weights and adapters, and samples by them."""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from sglang_help import StandIn, tiny
from sglang_weights_help import by_value, opened

from agentrl.engine.local.engine import LocalEngine
from agentrl.models.lora import CONFIG, PREFIX, WEIGHTS, adapter_parameters, add_adapter
from agentrl.recipe.sections.model import LoraSection


@dataclass(eq=False)
class AdapterStandIn(StandIn):
    """adapters: name -> an engine over the base with that adapter merged into it."""

    adapters: dict[str, LocalEngine] = field(default_factory=dict)
    rank: int = 8

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)

    def _routes(self) -> dict[str, Any]:
        done = ("pause_generation", "continue_generation", "begin_weight_update", "end_weight_update")
        return {
            **super()._routes(),
            **{f"POST /{path}": self._done for path in done},
            "POST /update_weights_from_tensor": self._load,
            "POST /weights_checker": self._checksums,
            "POST /load_lora_adapter": self._load_adapter,
            "POST /load_lora_adapter_from_tensors": self._load_adapter_tensors,
            "POST /unload_lora_adapter": self._unload_adapter,
        }

    def restart(self) -> None:
        """It is another process now, with the weights that it was launched with, whatever those are."""
        self.adapters.clear()
        self.version, self.dead = "default", False

    async def _done(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        state = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in opened(body["serialized_named_tensors"][0]).items():
                state[name].copy_(tensor)
        await self._engine.update_weights(0)
        return web.json_response({"success": True})

    async def _checksums(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "ranks": [{"checksums": {}}]})

    async def _server_info(self, request: web.Request) -> web.Response:
        info = {"version": "stand-in", "max_req_input_len": 1018, "incremental_streaming_output": True, "tp_size": 1}
        lora = {"enable_lora": True, "max_lora_rank": self.rank, "lora_target_modules": ["all"]}
        return web.json_response({**info, **lora, "device": "stand-in"})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        folder = Path(body["lora_path"])
        config = json.loads((folder / CONFIG).read_text())
        return self._take(body["lora_name"], config, load_file(folder / WEIGHTS))

    async def _load_adapter_tensors(self, request: web.Request) -> web.Response:
        body = await request.json()
        return self._take(body["lora_name"], body["config_dict"], by_value(body["serialized_named_tensors"][0]))

    def _take(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> web.Response:
        assert name not in self.adapters
        merged = copy.deepcopy(self.model)
        state = merged.state_dict()
        with torch.no_grad():
            for layer in {key.partition(".lora_")[0] for key in tensors}:
                a, b = (tensors[f"{layer}.lora_{letter}.weight"] for letter in "AB")
                state[f"{layer.removeprefix(PREFIX)}.weight"].add_(b @ a, alpha=config["lora_alpha"] / config["r"])
        self.adapters[name] = LocalEngine(merged, max_batch=32)
        return web.json_response({"success": True})

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json()).get("lora_path")
        if name is None or name in self.adapters:
            return await super()._generate(request)
        error = {"message": f"Got LoRA adapter that has never been loaded: {name}", "code": 400}
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + str({"error": error}).replace("'", '"').encode() + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response

    def _sampler(self, body: dict[str, Any]) -> LocalEngine:
        name = body.get("lora_path")
        return self._engine if name is None else self.adapters[name]

    def _probe(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        own = self.model
        self.model = self._sampler(body)._model
        try:
            return super()._probe(ids, body)
        finally:
            self.model = own


def adapted(**changes: Any) -> Any:
    torch.set_num_threads(1)
    model = tiny()[0]
    add_adapter(model, LoraSection(**{"rank": 4, "alpha": 8, **changes}), "base")
    return model


def stir(model: Any, seed: int) -> None:
    """A step of the trainer."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
