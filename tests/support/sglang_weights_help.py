"""For the tests of weight transfer: models to send, what they would say, and a server that fails on demand."""

import asyncio
import base64
import io
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from safetensors.torch import load_file
from serving import serving

from agentrl.models.load import load_model
from agentrl.recipe.sections.model import ModelSection
from agentrl.weights.channel import WeightChannel
from agentrl.weights.sglang import SglangServer
from agentrl.weights.source import NamedTensor, WeightSource

PROMPT = list(range(50, 80))
TENSORS = [(f"layer.{i}", torch.full((10,), float(i))) for i in range(6)]
BUCKET = 80  # bytes: two tensors


def tiny() -> Any:
    """The embedded model, float32."""
    return load_model(ModelSection(dtype="float32"))[0]


def altered(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """The embedded model with other weights."""
    model = tiny()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return model.to(dtype)


async def ask(session: aiohttp.ClientSession, url: str, tokens: int = 16, prompt: Sequence[int] = PROMPT) -> Any:
    """The server's answer, greedy: output_ids and meta_info."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
    async with session.post(url + "/generate", json=body) as answer:
        return await answer.json()


def check_answer(answer: Any, spans: Sequence[tuple[Any, int, int]], prompt: Sequence[int] = PROMPT) -> None:
    """Every token is what the model of its span (model, start, end) says greedily after all before it, and so are the
    log-probs, to 1e-4."""
    ids = answer["output_ids"]
    said = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    for model, start, end in spans:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0].float()
        logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1][start:end]
        assert logprobs.argmax(-1).tolist() == ids[start:end]
        torch.testing.assert_close(said[start:end], logprobs.max(-1).values, atol=1e-4, rtol=0)


def spans_of(answer: Any) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]


def opened(payload: str) -> dict[str, torch.Tensor]:
    """The tensors that a payload of shared memory names."""
    content = pickle.loads(base64.b64decode(payload))
    flat = content["flattened_tensor"]
    return {p.name: flat[p.start_idx : p.end_idx].view(p.dtype).reshape(p.shape) for p in content["metadata"]}


def by_value(payload: str) -> dict[str, torch.Tensor]:
    """The tensors that a payload holds itself, read as the real server does: no other thing is made of it."""
    found: dict[str, torch.Tensor] = _Restricted(io.BytesIO(base64.b64decode(payload))).load()
    return found


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        assert (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict"))
        return super().find_class(module, name)


class Weights(WeightSource):
    """A list of tensors; `before(i)` is called ahead of tensor `i`."""

    repeatable = True

    def __init__(self, tensors: Sequence[NamedTensor], before: Any = lambda i: None) -> None:
        self._tensors, self._before = list(tensors), before

    def __iter__(self) -> Iterator[NamedTensor]:
        for i, item in enumerate(self._tensors):
            self._before(i)
            yield item


def channel_to(servers: Sequence[Any], session: Any, transport: Any, timeout: float = 20.0) -> WeightChannel:
    return WeightChannel([SglangServer(s.url, session, timeout) for s in servers], transport, check_every=0)


class FaultyServer:
    """Answers every call about weights with success, except as `faults` says: path -> (n, what), where the n-th call
    (from 0) answers status `what`, or never (None)."""

    def __init__(self, faults: dict[str, tuple[int, int | None]] | None = None) -> None:
        self.faults = dict(faults or {})
        self.calls: list[str] = []
        self.adapters: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}  # what was loaded last
        self.takes_adapters = True
        self.machines = 1
        self.room: int | None = None
        self.version = "default"
        self.paused = False
        self.open = False
        self.released: set[str] = set()
        self.url = ""
        self._counts: Counter[str] = Counter()

    def restart(self) -> None:
        """Be a new process at the same address."""
        self.version, self.paused, self.open, self.released, self.adapters = "default", False, False, set(), {}

    async def __aenter__(self) -> "FaultyServer":
        self._serving = serving({"* /{path:.*}": self._answer})
        self.url = await self._serving.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._serving.__aexit__(None, None, None)

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.calls.append(path)
        nth, self._counts[path] = self._counts[path], self._counts[path] + 1
        when, what = self.faults.get(path, (-1, 0))
        if nth == when:
            if what is None:
                await asyncio.sleep(60)
            return web.json_response({"success": False, "message": "no luck"}, status=what or 500)
        return self._do(path, await request.json() if request.can_read_body else {})

    def _do(self, path: str, body: Any) -> web.Response:
        if path == "/server_info":
            info = {
                "device": "cpu",
                "dtype": "float32",
                "tp_size": 2,
                "nnodes": self.machines,
                "version": "0",
                "enable_lora": self.takes_adapters,
                "max_loaded_loras": self.room,
            }
            return web.json_response(info)
        if path == "/model_info":
            return web.json_response({"weight_version": self.version})
        if path == "/begin_weight_update" and self.open:
            return web.json_response({"success": False, "message": "a session is already open"}, status=400)
        if path in ("/begin_weight_update", "/end_weight_update"):
            self.open = path.startswith("/begin")
            self.tensors = {} if self.open else self.tensors
        elif path == "/release_memory_occupation":
            assert self.paused, "the real server would end itself"
            assert not self.released & set(body["tags"]), "the real server would end itself"
            self.released |= set(body["tags"])
        elif path == "/resume_memory_occupation":
            assert self.released >= set(body["tags"]), "the real server would end itself"
            self.released -= set(body["tags"])
        elif path in ("/pause_generation", "/continue_generation"):
            self.paused = path.startswith("/pause")
        elif path == "/update_weights_from_tensor":
            self.tensors |= {k: t.clone() for k, t in opened(body["serialized_named_tensors"][0]).items()}
        elif path == "/update_weights_from_disk":
            for file in Path(body["model_path"]).glob("*.safetensors"):
                self.tensors |= load_file(file)
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/load_lora_adapter":
            assert body["lora_name"] not in self.adapters
            self.adapters[body["lora_name"]] = load_file(body["lora_path"] + "/adapter_model.safetensors")
        elif path == "/load_lora_adapter_from_tensors":
            first, second = body["serialized_named_tensors"]
            assert (first == second, body["config_dict"]["peft_type"]) == (True, "LORA")
            self.adapters[body["lora_name"]] = by_value(first)
        elif path == "/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif path == "/weights_checker":
            return web.json_response({"success": True, "ranks": [{"checksums": {"a": "1"}}, {"checksums": {}}]})
        return web.json_response({"success": True, "message": "done"})
