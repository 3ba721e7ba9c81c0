"""A teacher behind HTTP: what it is asked, what is read of its answers, and what goes wrong.

A stand-in computes the answers with the embedded model, in the form in which vLLM 0.32 and SGLang 0.5 gave them;
`tests/engine/sglang/test_exact.py` asks the real SGLang. The vLLM of CI serves adapters, and its CPU backend fails at
log-probs of prompts beside these.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from aiohttp import web
from serving import serving
from sglang_help import tiny
from teacher_help import check_teacher

from agentrl.errors import UserError


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    return tiny()


@dataclass
class StandIn:
    """broken: answers that are errors, before the others. shifted: its tokens mean what the next ones do here."""

    model: Any
    tokenizer: Any
    kind: str
    broken: int = 0
    shifted: bool = False
    mute: bool = False
    asked: list[Any] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    @property
    def routes(self) -> dict[str, Any]:
        own = {"sglang": {"POST /generate": self._sglang, "GET /get_model_info": self._told}}
        vllm = {"POST /v1/completions": self._completions, "GET /v1/models": self._models}
        about = {"GET /version": self._told} if self.kind == "vllm" else {}
        return own.get(self.kind, {**vllm, **about})

    async def _told(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "the-teacher"}]})

    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        return found

    def _text(self, index: int) -> str:
        return str(self.tokenizer.decode([index + self.shifted]))

    async def _failed(self, request: web.Request, name: str) -> web.Response | None:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if max(body[name]) >= 1024:
            return web.json_response({"message": "token id 1024 is out of the vocabulary"}, status=400)
        if self.broken:
            self.broken -= 1
            return web.json_response({"message": "busy"}, status=503)
        return web.json_response({"choices": [{}], "meta_info": {}}) if self.mute else None

    async def _sglang(self, request: web.Request) -> web.Response:
        if (failed := await self._failed(request, "input_ids")) is not None:
            return failed
        body = self.asked[-1]
        ids, first, k = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        log_p = self._logprobs(ids)
        entries: list[Any] = []
        top: list[Any] = []
        for at in range(first, len(ids)):
            known = None if at == first else float(log_p[at - 1, ids[at]])
            entries.append([known, ids[at], self._text(ids[at]) if body["return_text_in_logprobs"] else None])
            best = log_p[at - 1].topk(max(k, 1))
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            top.append(None if known is None else [[value, index, None] for value, index in pairs])
        meta = {"input_token_logprobs": entries, **({"input_top_logprobs": top} if k else {})}
        return web.json_response({"text": "x", "meta_info": meta})

    async def _completions(self, request: web.Request) -> web.Response:
        if (failed := await self._failed(request, "prompt")) is not None:
            return failed
        body = self.asked[-1]
        assert (body["model"], body["max_tokens"]) == ("the-teacher", 1)
        ids, choice = body["prompt"], {"index": 0, "text": "x", "prompt_logprobs": None, "logprobs": None}
        log_p = self._logprobs(ids)
        own = [None, *(float(log_p[at - 1, ids[at]]) for at in range(1, len(ids)))]
        if body.get("echo"):
            choice["logprobs"] = {
                "tokens": [*map(self._text, ids), "x"], "token_logprobs": [*own, -0.5], "text_offset": []
            }  # fmt: skip
        else:
            choice["prompt_logprobs"] = [None, *(self._entry(log_p[at - 1], ids[at], body["prompt_logprobs"])
                                                 for at in range(1, len(ids)))]  # fmt: skip
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": len(ids)}})

    def _entry(self, log_p: torch.Tensor, index: int, k: int) -> dict[str, Any]:
        """The likeliest tokens by their ids, and the prompt's own."""
        named = dict.fromkeys([index, *log_p.topk(k).indices.tolist()])
        return {str(i): {"logprob": float(log_p[i]), "rank": 1, "decoded_token": self._text(i)} for i in named}


async def asked(stand_in: StandIn, **section: Any) -> None:
    async with serving(stand_in.routes) as url:
        await asyncio.to_thread(check_teacher, (stand_in.model, stand_in.tokenizer), **{"path": url, **section})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "form"),
    [("sglang", "sampled"), ("sglang", "top_k"), ("vllm", "sampled"), ("vllm", "top_k"), ("openai", "sampled")],
)
async def test_each_kind_says_how_likely_given_tokens_are(kind: str, form: str, parts: Any) -> None:
    """By itself it is found out which kind it is; a server that is busy is asked again."""
    stand_in = StandIn(*parts, kind, broken=1)
    await asked(stand_in, form=form, top_k=4)
    assert len(stand_in.asked) == 1 + 1 + 3  # the probe, twice, and three samples


async def test_the_key_is_that_of_the_variable(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHERS_KEY", "a-key")
    await asked(stand_in := StandIn(*parts, "vllm"), key_from="TEACHERS_KEY")
    assert set(stand_in.keys) == {"Bearer a-key"}
    monkeypatch.delenv("TEACHERS_KEY")
    with pytest.raises(UserError, match=r"^teacher\.key_from: the environment variable TEACHERS_KEY is not set$"):
        await asked(stand_in, key_from="TEACHERS_KEY")


@pytest.mark.parametrize(
    ("kind", "fault", "line"),
    [
        ("vllm", {"shifted": True}, r"http\S+ has another tokenizer: token \d+ is '.*' there and '.*' here"),
        ("sglang", {"shifted": True}, r"http\S+ has another tokenizer"),
        ("openai", {"shifted": True}, r"http\S+ has another tokenizer"),
        ("sglang", {"broken": 9}, r"http\S+/generate: it answers 503: busy \(2 attempts\)"),
        ("vllm", {"mute": True}, r"it does not take the policy's tokens: http\S+: its answer holds no log-probs"),
    ],
)
async def test_what_a_teacher_cannot_do_is_one_line(kind: str, fault: dict[str, Any], line: str, parts: Any) -> None:
    with pytest.raises(UserError, match=rf"^teacher: {line}") as error:
        await asked(StandIn(*parts, kind, **fault), retries=1)
    assert "\n" not in str(error.value)


async def test_a_server_that_is_not_there_is_one_line(parts: Any) -> None:
    with pytest.raises(UserError, match=r"^teacher: http://127.0.0.1:9/get_model_info: cannot connect"):
        await asked(StandIn(*parts, "vllm"), path="http://127.0.0.1:9")
