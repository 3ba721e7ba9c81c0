"""A model behind the gateway for people."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from chat_help import HERMES, make_tokenizer
from fakes import CharChat, ScriptedEngine
from openai import AsyncOpenAI, AuthenticationError, BadRequestError
from tiny_models import qwen3

from agentrl.chat.load import load_chat
from agentrl.engine.local.engine import LocalEngine
from agentrl.gateway.call import Call, Feed, Origin
from agentrl.gateway.server import Gateway
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.env import RewardsSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout import serve as serve_module
from agentrl.rollout.serve import ServedModel, serve

USER: Any = [{"role": "user", "content": "2+2?"}]


async def asked(endpoint: ServedModel, key: str, own: str, **body: Any) -> str:
    """What the model answers a client that sends the key `own`."""
    gateway = Gateway()
    await gateway.start()
    try:
        with gateway.serving(endpoint, key):
            async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=own, max_retries=0) as openai:
                found = await openai.chat.completions.create(**{"model": "any", "messages": USER, **body})
    finally:
        await gateway.close()
    return str(found.choices[0].message.content)


def model(script: Any = ("four",)) -> tuple[ServedModel, ScriptedEngine]:
    engine = ScriptedEngine(script)
    return ServedModel(engine, CharChat(), RolloutSection(temperature=0.5, max_turn_tokens=50)), engine  # type: ignore[arg-type]


async def test_a_call_samples_as_it_asks_else_as_the_recipe_says() -> None:
    served, engine = model(lambda _, turn: "four")
    assert await asked(served, "", "whatever") == "four"
    assert await asked(served, "", "whatever", temperature=0.0, top_p=0.9, seed=7, max_tokens=20) == "four"
    first, second = engine.samplings
    assert (first.temperature, first.top_p, first.max_tokens) == (0.5, 1.0, 50)
    assert (second.temperature, second.top_p, second.max_tokens, second.seed) == (0.0, 0.9, 20, 7)
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"seed": -3}):
        with pytest.raises(BadRequestError, match=f"{next(iter(wrong))}: expected a number from"):
            await asked(served, "", "whatever", **wrong)


async def test_a_key_is_asked_for_where_there_is_one() -> None:
    served, _ = model()
    with pytest.raises(AuthenticationError):
        await asked(served, "mine", "another")
    assert await asked(served, "mine", "mine") == "four"


async def test_conversations_are_forgotten_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "KEPT_TOKENS", 20)
    served, engine = model(lambda _, turn: "a longer answer")
    for _ in range(4):
        await asked(served, "", "k")
    assert len(engine.known) == 4
    assert sum(engine.finished.values()) >= 3
    assert len(served.tree.nodes) == 1


async def test_conversations_are_forgotten_under_a_load_that_never_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "KEPT_TOKENS", 40)
    engine = ScriptedEngine(lambda _, turn: "a longer answer", seconds=0.05)
    served = ServedModel(engine, CharChat(), RolloutSection(max_turn_tokens=50))  # type: ignore[arg-type]

    async def caller(number: int) -> None:
        await asyncio.sleep(0.02 * number)
        for turn in range(6):
            await asyncio.create_task(served.complete(Call((*USER, *USER, *USER)), Origin(b"%d %d" % (number, turn))))

    await asyncio.gather(*map(caller, range(3)))
    assert len(engine.known) == 18
    assert len(served.tree.nodes) < 9


def embedded() -> ServedModel:
    """A small model of random weights, which says all kinds of things: broken characters, calls, thoughts."""
    tokenizer = make_tokenizer(HERMES, ("<think>", "</think>"))
    model = qwen3(vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=0.2, pad_token_id=0)
    engine = LocalEngine(model, max_batch=8)
    chat = load_chat(tokenizer, model_path="nowhere", kind="bridge", tools=())
    return ServedModel(engine, chat, RolloutSection(temperature=0.0, max_turn_tokens=40))


@pytest.mark.slow
async def test_a_streamed_answer_is_what_a_whole_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """By each vendor's SDK, from the embedded engine, as it samples."""
    served, gateway = embedded(), Gateway()
    took: list[int] = []
    add = Feed.add
    monkeypatch.setattr(Feed, "add", lambda feed, ids: (took.append(len(ids)), add(feed, ids)))
    await gateway.start()
    try:
        with gateway.serving(served, ""):
            async with (
                AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any") as openai,
                AsyncAnthropic(base_url=gateway.url, api_key="any") as anthropic,
            ):
                for question in ("2+2?", "漢字?"):
                    talk: Any = [{"role": "user", "content": question}]
                    whole = await openai.chat.completions.create(model="any", messages=talk)
                    wanted = whole.choices[0].message.content or ""
                    async with openai.chat.completions.stream(model="any", messages=talk) as chat:
                        said = "".join([e.delta async for e in chat if e.type == "content.delta"])
                    assert said == wanted
                    async with openai.responses.stream(model="any", input=question) as response:
                        said = "".join([e.delta async for e in response if e.type == "response.output_text.delta"])
                    assert said == wanted
                    async with anthropic.messages.stream(model="any", max_tokens=40, messages=talk) as message:
                        assert "".join([text async for text in message.text_stream]) == wanted
    finally:
        await gateway.close()
        await served.engine.close()
    assert max(took) == 1
    assert len(took) > 100


@pytest.mark.slow
async def test_the_embedded_model_answers_until_it_is_told_to_end() -> None:
    lines: list[str] = []
    recipe = Recipe(rewards=RewardsSection(weights={"of_a_tool": 2.0}))
    work = asyncio.create_task(serve(recipe, None, "127.0.0.1", 0, "mine", lines.append))
    async with asyncio.timeout(120):
        while not any(line.startswith("API key") for line in lines):
            await asyncio.sleep(0.05)
            assert not work.done(), work.result()
    url = next(line for line in lines if line.startswith("OPENAI")).split()[0].removeprefix("OPENAI_BASE_URL=")
    async with AsyncOpenAI(base_url=url, api_key="mine") as openai:
        found = await openai.chat.completions.create(model="any", messages=USER, temperature=0, max_tokens=8)
    assert 0 < found.usage.completion_tokens <= 8
    work.cancel()
    await asyncio.wait_for(work, 120)


FUNCTION: Any = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}}
ADD: Any = {"name": "add", "arguments": '{"a": [1, {"b": null}]}'}
IMAGE = "data:image/png;base64,AAAA"
ASKED: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": "m", "stream": False, "stream_options": {"include_usage": True}, "temperature": 1, "top_p": 1,
        "seed": 1, "top_k": 1, "max_tokens": 5, "max_completion_tokens": 5, "n": 1, "stop": None, "logprobs": True,
        "tool_choice": "auto", "response_format": {"type": "text"}, "metadata": {"a": "b"},
        "parallel_tool_calls": True, "tools": [{"type": "function", "function": FUNCTION}], "user": "u",
        "logit_bias": {}, "functions": [],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]}, {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": ADD}]},
            {"role": "tool", "tool_call_id": "c", "name": "add", "content": "1"},
            {"role": "assistant", "content": None, "function_call": ADD},
            {"role": "function", "name": "add", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "refusal", "refusal": "no"}]},
        ],
    },
    "/v1/responses": {
        "model": "m", "instructions": "i", "max_output_tokens": 5, "text": {"format": {"type": "text"}},
        "tools": [{"type": "function", "strict": False, **FUNCTION}], "tool_choice": "auto",
        "reasoning": {"effort": "low"}, "store": False, "include": [], "truncation": "disabled",
        "previous_response_id": "resp_serve-0", "stream": False, "prompt": None,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": []}, {"type": "item_reference", "id": "msg_serve-0"},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "id": "f"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
        ],
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "temperature": 1, "stream": False,
        "tools": [{"name": "add", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "stop_sequences": [],
        "metadata": {"user_id": "u"},
        "top_k": 1,
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}]},
            {"role": "user", "content": [{"type": "text", "text": "more"}]},
        ],
    },
    "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
        "name": "add", "arguments": {"a": 1}, "protocolVersion": "x"}},
}  # fmt: skip
ASKED["/v1/messages/count_tokens"] = ASKED["/v1/messages"]
WRONG: list[Any] = [
    None, True, 0, -1, 1 << 70, 1e308, float("nan"), float("inf"), "", "\ud800", "x" * 300, [], {}, [[]], [None],
    {"a": {}}, {"type": "x"}, {"type": "image_url", "image_url": IMAGE},
    {"type": "image", "source": {"type": "base64", "data": "AA"}},
    [{"role": "user", "content": "u"}], "user", "auto", "\x00",
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place within a body."""
    yield at
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield from places(one, (*at, key))


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A body with another value at a place; `...` takes the place away."""
    if not at:
        return new
    copy = value.copy()
    if len(at) == 1 and new is ...:
        del copy[at[0]]
    else:
        copy[at[0]] = changed(copy[at[0]], at[1:], new)
    return copy


def strict(text: bytes) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text.decode("utf-8"), parse_constant=refuse)


@pytest.mark.slow
@pytest.mark.parametrize("path", ASKED)
async def test_whatever_stands_in_a_body_is_answered_in_the_dialect(path: str) -> None:
    """Each value of a body in turn is replaced by wrong ones; what is refused is the fault of the request."""
    served, _ = model(lambda _, turn: "four")
    gateway, statuses = Gateway(), Counter[int]()
    await gateway.start()
    wrong = [(at, new) for at in places(ASKED[path]) for new in (*WRONG, ...) if at or new is not ...]
    wrong = Random(0).sample(wrong, len(wrong) // 3)
    bodies = [ASKED[path], *(changed(ASKED[path], at, new) for at, new in wrong)]
    with gateway.serving(served, "mine"):
        async with aiohttp.ClientSession(headers={"x-api-key": "mine"}) as session:
            async with session.post(f"{gateway.url}/v1/responses", json={"input": "hi"}) as response:
                assert response.status == 200
            for body in bodies:
                async with session.post(f"{gateway.url}{path}", data=json.dumps(body).encode()) as response:
                    text = await response.read()
                assert statuses or response.status == 200, text
                statuses[response.status] += 1
                assert response.status in (200, 202, 400), (body, text)
                if response.content_type == "application/json":
                    found = strict(text)
                    assert (response.status == 400) <= bool(found.get("error")), (body, found)
                    assert len(text) < 3000
    await gateway.close()
    assert statuses[200] > 5
    assert statuses[400] > 5


async def status_of(url: str, host: str | None = None, body: bytes | None = b'{"messages": []}', **headers: str) -> int:
    given = {"Host": host} if host is not None else {}
    given |= {key.replace("_", "-"): value for key, value in headers.items()}
    async with (
        aiohttp.ClientSession(headers=given) as session,
        session.request("GET" if body is None else "POST", url, data=body) as response,
    ):
        assert "Access-Control-Allow-Origin" not in response.headers
        assert (await response.json())["error" if response.status != 200 else "data"]
        return response.status


async def test_pages_of_others_reach_nothing_where_no_key_is_asked_for() -> None:
    """By a name of theirs for this machine, or by what a browser sends without asking first."""
    served, engine = model()
    json_type = {"Content_Type": "application/json"}
    for own in ("", "mine"):
        gateway = Gateway()
        await gateway.start()
        with gateway.serving(served, own):
            port = gateway.url.rpartition(":")[2]
            for path in ("chat/completions", "responses", "messages", "messages/count_tokens", "models"):
                url, body = f"{gateway.url}/v1/{path}", None if path == "models" else b"{}"
                good = 200 if path == "models" else 400
                for host in ("attacker.example", f"attacker.example:{port}", "127.0.0.1.attacker.example"):
                    assert await status_of(url, host, body, **json_type) == (401 if own else 403)
                    assert await status_of(url, host, body, **json_type, x_api_key="mine") == (good if own else 403)
                for host in (f"localhost:{port}", "LOCALHOST", "127.0.0.1:1", f"[::1]:{port}"):
                    assert await status_of(url, host, body, **json_type, x_api_key="mine") == good
                for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
                    wanted = good if own or path == "models" else 415
                    assert await status_of(url, None, body, Content_Type=kind, x_api_key="mine") == wanted
        await gateway.close()
    assert not engine.samplings


LATER = b"(later)"
CHUNKED = b"POST /v1/messages HTTP/1.1\r\nHost: h\r\nx-api-key: mine\r\nTransfer-Encoding: chunked\r\n"
BROKEN = [
    b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/models HTTP/1.1\r\nHost\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n", CHUNKED + b"\r\n1\r\n{\r\n",
    CHUNKED + b"\r\n1\r\n{\r\n" + LATER + b"zz\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: h\r\nx-api-key: mine\r\nContent-Length: 9\r\n\r\n{",
    b"POST /v1/messages HTTP/1.1\r\nHost: h\r\nx-api-key: \xe9\xff\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /nothing HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n" + LATER + b"zz\r\n",
    b"POST /nothing HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    b"GET http://[ HTTP/1.1\r\nHost: h\r\n\r\n", b"GET /v1/models HTTP/1.1\r\nHost: \xe9\r\n\r\n",
]  # fmt: skip


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
async def test_what_is_no_http_is_answered_and_prints_nothing(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway()
    await gateway.start()
    with gateway.serving(model()[0], "mine"):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        for part in data.split(LATER):
            writer.write(part)
            await asyncio.sleep(0.05)
        writer.write_eof()
        async with asyncio.timeout(60):
            found = await reader.read()
        writer.close()
    await gateway.close()
    assert found == b"" or (found.startswith(b"HTTP/1.") and 400 <= int(found.split()[1]) < 500), found
    assert not caplog.records
