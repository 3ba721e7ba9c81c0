"""Servers for the tests of the engine `vllm`: how the real one is launched, and one over the local engine that speaks
the same protocol (as recorded from vLLM 0.32.0) and fails on demand."""

import copy
import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file
from sglang_help import ADAPTER, PIECE, StandIn

from agentrl.engine.base import Sampling
from agentrl.engine.servers.launch import launch_command
from agentrl.engine.vllm.command import VLLM, VllmPlan
from agentrl.models import embedded_path


def real_plan(flags: Mapping[str, Any] | None = None) -> VllmPlan:
    """The embedded model on the real server of AGENTRL_VLLM_VENV."""
    return VllmPlan(
        command=launch_command(None, None, VLLM), model_path=str(embedded_path()), dtype="float32", flags=flags or {},
        max_batch=64, token_bytes=2048, context=1024, cpu=True, adapter=ADAPTER,
    )  # fmt: skip


NOTED = (
    "/pause", "/resume", "/reset_prefix_cache", "/sleep", "/wake_up", "/release_kv_cache_memory",
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/shutdown_weight_transfer_engine", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip
"""Paths whose calls are only written down."""


@dataclass(eq=False)
class VllmStandIn(StandIn):
    """broken: loading weights fails from now on, as a real server's does once an update has failed. loaded: folders
    that it was told to load. packs_again: whether it was started with our extension."""

    model_path: str = field(default_factory=lambda: str(embedded_path()))
    logprobs_mode: str = "processed_logprobs"
    broken: bool = False
    packs_again: bool = True
    loaded: list[str] = field(default_factory=list)
    posted: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)

    def _routes(self) -> dict[str, Any]:
        return {
            "GET /health": self._ok,
            "GET /server_info": self._server_info,
            **{f"GET {path}": self._told for path in ("/version", "/weight_info", "/v1/models")},
            "POST /tokenize": self._tokenize,
            "POST /inference/v1/generate": self._generate,
            "POST /abort_requests": self._abort,
            "POST /update_weight_version": self._set_version,
            "POST /collective_rpc": self._rpc,
            "POST /weight_checker": self._checksums,
            **{f"POST {path}": self._note for path in NOTED},
        }

    async def _told(self, request: web.Request) -> web.Response:
        told: dict[str, Any] = {
            "/version": {"version": "0.32.0"}, "/weight_info": {"weight_version": self.version},
            "/v1/models": {"data": [{"root": self.model_path}]},
        }  # fmt: skip
        return web.json_response(told[request.path])

    async def _note(self, request: web.Request) -> web.Response:
        self.posted.append((request.path_qs, await request.json()))
        return web.json_response({"success": True})

    async def _server_info(self, request: web.Request) -> web.Response:
        assert request.query["config_format"] == "json"
        config = {
            "model_config": {
                "max_model_len": 1024, "logprobs_mode": self.logprobs_mode, "skip_tokenizer_init": False,
                "dtype": "torch.float32", "quantization": None,
            },
            "lora_config": None, "parallel_config": {"data_parallel_size": 1, "world_size": 1},
            "device_config": {"device": "cpu"}, "weight_transfer_config": None,
        }  # fmt: skip
        return web.json_response({"vllm_config": config, "vllm_env": {"VLLM_BATCH_INVARIANT": False}})

    async def _abort(self, request: web.Request) -> web.Response:
        for rid in (await request.json())["request_ids"]:
            self._engine.abort(rid.removeprefix("generate-tokens-"))
        return web.json_response({"status": "aborted", "aborted": 1})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "agentrl_reload"
        if not self.packs_again:
            message = "Worker failed with error 'Worker has no attribute agentrl_reload'"
            return web.json_response({"error": {"message": message}}, status=500)
        folder = Path(body["kwargs"]["weights_path"])
        self.loaded.append(str(folder))
        if self.broken:
            return web.json_response({"error": {"message": "Worker failed with error ''"}}, status=500)
        state = self.model.state_dict()
        with torch.no_grad():
            for file in folder.glob("*.safetensors"):
                for name, tensor in load_file(file).items():
                    state[name].copy_(tensor)
        await self._engine.update_weights(0)
        return web.json_response({"results": [None]})

    async def _checksums(self, request: web.Request) -> web.Response:
        """Linear layers are packed: their parameters are empty."""
        found = {}
        for name, tensor in self.model.named_parameters():
            data = b"" if "_proj" in name else tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[f"dp0:pp0:pcp0:tp0:{name}"] = hashlib.sha256(data).hexdigest()
        return web.json_response({"checksums": found})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        given = body["sampling_params"]
        if any(not 0 <= i < self.vocabulary for i in [*body["token_ids"], *given.get("allowed_token_ids", [])]):
            message = "allowed_token_ids contains out-of-vocab token id! (parameter=allowed_token_ids, value=[1024])"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        if not body.get("stream"):
            return web.json_response(self._probe(body["token_ids"], given))
        self.asked.append(body["token_ids"])
        return await self._stream(request, body, self.faults.popleft() if self.faults else None)

    def _probe(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"choices": [{"index": 0, "token_ids": [0], "finish_reason": "length"}]}
        if body.get("prompt_logprobs") == 0:
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
            found = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            pairs = zip(ids[1:], found.tolist(), strict=True)
            answer["prompt_logprobs"] = [None, *({str(i): {"logprob": lp + self.shift, "rank": 1}} for i, lp in pairs)]
        return answer

    async def _pieces(self, body: dict[str, Any]) -> list[bytes]:
        given = body["sampling_params"]
        assert given["ignore_eos"]
        assert given["logprobs"] == 0
        sampling = Sampling(
            given["max_tokens"], temperature=given["temperature"], stop_ids=tuple(given["stop_token_ids"]), seed=1
        )
        made = await self._engine.generate(body["token_ids"], sampling, body["request_id"])
        entries = [{"token_id": i, "logprob": lp} for lp, i in zip(made.logprobs, made.ids, strict=True)]
        pieces = []
        for start in range(0, max(1, len(made.ids)), PIECE):
            end = min(start + PIECE, len(made.ids))
            last = end == len(made.ids)
            choice = {
                "index": 0, "token_ids": made.ids[start:end], "logprobs": {"content": entries[start:end]},
                "finish_reason": made.finish.value if last else None,
                "weight_versions": [{"version": self.version, "start": 0, "end": end}] if last else None,
            }  # fmt: skip
            if last and self.experts:
                np.save(file := BytesIO(), self.experts_of(made).astype(np.uint8))
                choice["routed_experts"] = b64encode(file.getvalue()).decode()
            pieces.append(json.dumps({"request_id": body["request_id"], "choices": [choice]}).encode())
        return pieces

    def spoil(self, piece: bytes, kind: str) -> bytes:
        if kind == "no_json":
            return piece[: len(piece) // 2]
        found = json.loads(piece)
        entries = found["choices"][0]["logprobs"]["content"]
        if kind == "few_logprobs":
            entries.pop()
        elif kind == "other_ids":
            entries[-1]["token_id"] += 1
        elif kind == "null_logprob":
            entries[-1]["logprob"] = None
        elif kind == "clamped_logprob":
            entries[-1]["logprob"] = -9999.0
        elif kind == "unknown_end":
            found["choices"][0]["finish_reason"] = "repetition"
        elif kind == "error":
            found = {"error": {"message": "told to fail", "code": 500}}
        else:
            raise AssertionError(f"no fault {kind!r}")
        return json.dumps(found).encode()
