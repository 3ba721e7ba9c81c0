"""Servers for the tests of the engine `sglang`: the real one, and one over the local engine that fails on demand."""

import asyncio
import json
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from paths import ROOT
from serving import serving

from agentrl.constraint import Constraint, Shape
from agentrl.engine.base import ConstraintError, GenerationFinish, Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.servers.adapters import AdapterNeeds
from agentrl.engine.servers.client import Sessions
from agentrl.engine.servers.launch import launch_command
from agentrl.engine.servers.server import Server
from agentrl.engine.sglang.command import SGLANG, SglangPlan
from agentrl.models import embedded_path
from agentrl.models.load import load_model
from agentrl.models.routing import ServedExperts
from agentrl.recipe.sections.model import ModelSection

GREEDY = Sampling(24, temperature=0.0)
PROMPT = [40, 41, 42, 43, 44]
PIECE = 4
ADAPTER = AdapterNeeds(4, frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")))
"""What the session's server has room for."""
UPDATE_PATHS = (
    "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update",
    "/continue_generation", "/weights_checker",
)  # fmt: skip
STAND_INS = ROOT / "scripts" / "sglang_cpu" / "stand_ins"


def tiny() -> tuple[Any, Any]:
    """The embedded model and its tokenizer."""
    return load_model(ModelSection())


def real_plan(flags: dict[str, Any] | None = None, adapter: AdapterNeeds | None = None) -> SglangPlan:
    """The embedded model on the real server of AGENTRL_SGLANG_VENV, with the stand-ins as they are here."""
    return SglangPlan(
        command=launch_command(None, None, SGLANG), model_path=str(embedded_path()), dtype="float32",
        flags={"max-total-tokens": 16384, **(flags or {})}, max_batch=64, token_bytes=2048, context=1024, cpu=True,
        env={"PYTHONPATH": str(STAND_INS)}, adapter=adapter,
    )  # fmt: skip


@contextmanager
def real_server(folder: Path, plan: SglangPlan) -> Iterator[str]:
    """One real server, its URL, while the block runs."""
    sessions = Sessions()
    server = Server(plan, 0, folder / "sglang.log", sessions)

    async def start() -> None:
        try:
            await server.start(600.0, lambda line: None)
        finally:
            await sessions.close()

    asyncio.run(start())
    try:
        yield server.url
    finally:
        server.kill()


@dataclass(eq=False)
class StandIn:
    """Speaks SGLang's API over a local engine, and fails as `faults` says: an entry for each /generate that streams.

    A fault is `(kind, n)`: what goes wrong after n pieces of PIECE tokens. asked: prompts in the order they came.
    """

    model: Any
    tokenizer: Any = None
    faults: "deque[tuple[str, int] | None]" = field(default_factory=deque)
    incremental: bool = True
    version: str = "default"
    vocabulary: int = 1024
    architecture: str = "Qwen3ForCausalLM"
    model_path: str = "stand-in"
    shift: float = 0.0  # added to the log-probs of a prompt, until weights are sent
    dead: bool = False  # every request is refused
    dtype: str = ""  # that it tells; empty: none
    late: float = 0.0  # seconds that it takes to answer /model_info
    experts: bool = False  # it was started with --enable-return-routed-experts
    takes_weights: bool = False  # any update, without a change of what it samples
    taken: dict[str, Any] = field(default_factory=dict)  # path of an update -> the body that came last
    calls: "Counter[str]" = field(default_factory=Counter)
    asked: list[list[int]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    url: str = ""

    async def __aenter__(self) -> "StandIn":
        self._engine = LocalEngine(self.model, max_batch=32, routing_replay=self.experts)
        self._held = asyncio.Event()
        self._serving = serving(self._routes(), middlewares=[self._count])
        self.url = await self._serving.__aenter__()
        return self

    def _routes(self) -> dict[str, Any]:
        return {
            "GET /health": self._ok,
            "GET /model_info": self._model_info,
            "GET /server_info": self._server_info,
            "POST /v1/tokenize": self._tokenize,
            "POST /generate": self._generate,
            "POST /abort_request": self._abort,
            "POST /update_weight_version": self._set_version,
            **{f"POST {path}": self._taken for path in UPDATE_PATHS if self.takes_weights},
        }

    def go_on(self) -> None:
        """End what hangs."""
        self._held.set()

    async def __aexit__(self, *error: object) -> None:
        self.go_on()
        await self._engine.close()
        await self._serving.__aexit__(None, None, None)

    @web.middleware
    async def _count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls[request.path] += 1
        if self.dead:
            request.transport.abort()
            raise web.HTTPServiceUnavailable
        return await handler(request)

    async def _taken(self, request: web.Request) -> web.Response:
        self.taken[request.path] = await request.json()
        return web.json_response({"success": True, "ranks": [{"checksums": {"a": "1"}}]})

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.late)
        info = {
            "model_path": self.model_path, "served_model_name": "stand-in", "is_generation": True,
            "weight_version": self.version, "architectures": [self.architecture],
        }  # fmt: skip
        return web.json_response(info)

    async def _server_info(self, request: web.Request) -> web.Response:
        info = {"version": "stand-in", "max_req_input_len": 1018, "incremental_streaming_output": self.incremental}
        return web.json_response({**info, "tp_size": 1, **({"dtype": self.dtype} if self.dtype else {})})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = self.tokenizer.encode(body["prompt"], add_special_tokens=False) if self.tokenizer else None
        return web.json_response({"tokens": tokens})

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _abort(self, request: web.Request) -> web.Response:
        self._engine.abort((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids = body["input_ids"]
        if any(not 0 <= i < self.vocabulary for i in ids):
            raise AssertionError("an id outside the vocabulary would have killed the real server")
        if any(i >= self.vocabulary for i in body.get("token_ids_logprob") or []):
            return web.json_response({"error": {"message": "out-of-vocabulary token id"}}, status=400)
        if not body.get("stream"):
            return web.json_response(self._probe(ids, body))
        self.asked.append(ids)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._stream(request, body, self.faults.popleft() if self.faults else None)
        finally:
            self.running -= 1

    def _probe(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "weight_version": self.version}
        if body.get("logprob_start_len") == 0:
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
            found = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            meta["input_token_logprobs"] = [[None, ids[0], None]]
            meta["input_token_logprobs"] += [
                [lp + self.shift, i, None] for lp, i in zip(found.tolist(), ids[1:], strict=True)
            ]
        return {"output_ids": [0], "meta_info": meta}

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: tuple[str, int] | None
    ) -> web.StreamResponse:
        kind, after = fault or ("", 0)
        if kind == "status":
            return web.json_response({"error": {"message": "told to fail"}}, status=after)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        pieces = await self._pieces(body)
        for number, piece in enumerate(pieces):
            if kind and number == after:
                if kind == "hang":
                    await self._held.wait()
                    return response
                if kind == "cut":
                    request.transport.abort()
                    return response
                if kind == "die":
                    self.dead = True
                    request.transport.abort()
                    return response
                piece = self.spoil(piece, kind)
            await response.write(b"data: " + piece + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def spoil(self, piece: bytes, kind: str) -> bytes:
        return _spoilt(piece, kind)

    def experts_of(self, made: Any) -> np.ndarray:
        """What the real servers tell: of every layer, and of one without a router whatever lies there."""
        served = ServedExperts.of(self.model)
        found = np.full((len(made.experts), served.of_model, served.each), 3)
        found[:, list(served.layers)] = made.experts
        return found

    def _sampler(self, body: dict[str, Any]) -> LocalEngine:
        return self._engine

    async def _pieces(self, body: dict[str, Any]) -> list[bytes]:
        given = body["sampling_params"]
        sampling = Sampling(
            given["max_new_tokens"], temperature=given["temperature"], top_p=given["top_p"],
            top_k=max(0, given["top_k"]), stop_ids=tuple(given["stop_token_ids"]), seed=1,
        )  # fmt: skip
        made = await self._sampler(body).generate(body["input_ids"], sampling, body["rid"])
        pairs = [[lp, i, None] for lp, i in zip(made.logprobs, made.ids, strict=True)]
        pieces = []
        for start in range(0, max(1, len(made.ids)), PIECE):
            end = min(start + PIECE, len(made.ids))
            last, shown = end == len(made.ids), start if self.incremental else 0
            meta: dict[str, Any] = {
                "finish_reason": {"type": made.finish.value} if last else None, "weight_version": self.version,
                "completion_tokens": end, "output_token_logprobs": pairs[shown:end],
            }  # fmt: skip
            if last:
                meta["weight_versions"] = [{"version": self.version, "start": 0, "end": end}]
            if last and self.experts and body.get("return_routed_experts"):
                meta["routed_experts"] = b64encode(self.experts_of(made).astype(np.int32).tobytes()).decode()
            pieces.append(json.dumps({"output_ids": made.ids[shown:end], "meta_info": meta}).encode())
        return pieces


def _spoilt(piece: bytes, kind: str) -> bytes:
    if kind == "no_json":
        return piece[: len(piece) // 2]
    found = json.loads(piece)
    meta = found["meta_info"]
    if kind == "few_logprobs":
        meta["output_token_logprobs"].pop()
    elif kind == "other_ids":
        meta["output_token_logprobs"][-1][1] += 1
    elif kind == "lost_piece":
        meta["completion_tokens"] += PIECE
    elif kind == "null_logprob":
        meta["output_token_logprobs"][-1][0] = None
    elif kind == "error":
        found = {"error": {"message": "told to fail", "code": 500}}
    else:
        raise AssertionError(f"no fault {kind!r}")
    return json.dumps(found).encode()


TEXT = "A baker has 3 trays with 4 buns each and sells 5. How many buns are left?"


def prompts(tokenizer: Any, count: int) -> list[list[int]]:
    return [tokenizer.encode(f"{TEXT} {i * 37}") for i in range(count)]


async def all_of(engine: Any, ids: list[list[int]], sampling: Sampling) -> list[Any]:
    return await asyncio.gather(*(engine.generate(p, sampling, f"{i}") for i, p in enumerate(ids)))


def logprobs_of(model: Any, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0].float() / temperature
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return rows.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


async def check_constrained(engine: Any, tokenizer: Any) -> None:
    """A server keeps to constraints in its own words, is left out of training with them, and says what it cannot."""
    text: Any = {"type": "string", "maxLength": 6}
    schema: Any = {"type": "object", "properties": {"a": text}, "required": ["a"], "additionalProperties": False}
    whole = Constraint((Shape("", json.dumps(schema), ""),))
    shapes = [
        Shape(f'<tool_call>\n{{"name": "{n}", "arguments": ', json.dumps(schema), "}\n</tool_call>") for n in "ab"
    ]
    (prompt,) = prompts(tokenizer, 1)
    for index, constraint in enumerate((whole, Constraint(tuple(shapes)), None)):
        told: list[int] = []
        sampling = Sampling(100, stop_ids=(2,), constraint=constraint)
        made = await engine.generate(prompt, sampling, f"c{index}", on_tokens=told.extend)
        assert (made.trainable, made.allowed, told) == (constraint is None, None, made.ids)
        said = tokenizer.decode(made.ids[:-1])
        if constraint is not None:
            assert made.finish is GenerationFinish.STOP
            called = json.loads(said.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            assert set(called.get("arguments", called)) == {"a"}
            assert (called.get("name") in ("a", "b")) == (index == 1)
    broken = Constraint((Shape("", '{"type": "string", "pattern": "("}', ""),))
    with pytest.raises(ConstraintError):
        await engine.generate(prompt, Sampling(20, stop_ids=(2,), constraint=broken), "broken")
