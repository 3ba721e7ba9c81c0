"""The gateway's dialects, spoken by the vendors' own SDKs and by hand, before an endpoint that says what it is told."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from anthropic import BadRequestError as AnthropicBadRequest
from openai import AsyncOpenAI
from openai import BadRequestError as OpenAIBadRequest
from PIL import Image
from processes import eventually
from vision_help import picture

from agentrl.chat.base import Said
from agentrl.gateway import server as server_module
from agentrl.gateway.call import Call, Completion, Feed, Finish, GatewayError, Origin
from agentrl.gateway.server import Gateway
from agentrl.images import STORE
from agentrl.plugins.types import Message

THOUGHT = 1 << 24


class Letters:
    """Reads ids that are characters, those of thoughts above THOUGHT."""

    def add(self, ids: Sequence[int]) -> list[Said]:
        pieces = groupby(ids, lambda i: "reasoning" if i >= THOUGHT else "content")
        return [Said(kind, "".join(chr(i % THOUGHT) for i in piece)) for kind, piece in pieces]


class Scripted:
    """Answers every call with `message`, and keeps the calls."""

    def __init__(self, message: Message, finish: Finish = Finish.STOP, seconds: float = 0.0) -> None:
        self.message, self.finish, self.seconds = message, finish, seconds
        self.images = True
        self.calls: list[Call] = []
        self.error: Exception | None = None
        self.losses: list[str] = []
        self.spoken: list[tuple[str, str]] = []
        """Pieces that are certain before the answer is whole; after each it waits until it was `heard`."""
        self.heard = asyncio.Event()

    async def complete(self, call: Call, origin: Origin, feed: Feed | None = None) -> Completion:
        self.calls.append(call)
        name = f"t-{len(self.calls)}"
        if feed is not None and self.spoken:
            feed.begin(name, 7, Letters())
            for kind, text in self.spoken:
                feed.add([ord(c) + THOUGHT * (kind == "reasoning") for c in text])
                await self.heard.wait()
                self.heard.clear()
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return Completion(name, self.message, self.finish, 7, 3, [("He", -0.5), ("y", -0.25)] if call.logprobs else ())

    def count(self, call: Call) -> int:
        return 100 + len(call.messages)

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]

    async def call_tool(self, name: str, arguments: Any) -> Any:
        text = f"{name} of {json.dumps(arguments)}"
        if arguments != {"a": 2}:
            return text
        url = f"data:image/png;base64,{encoded(1)}"
        return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]

    def previous(self, completion_id: str) -> tuple[Message, ...]:
        if completion_id != "t-1":
            raise GatewayError(f"{completion_id} is unknown")
        return (*self.calls[0].messages, self.message)

    def lost(self, completion: Completion) -> None:
        self.losses.append(completion.id)


CALLS: Any = [
    {"type": "function", "id": "call_0_0", "function": {"name": "add", "arguments": {"a": 1, "text": "é\n"}}},
    {"type": "function", "id": "call_0_1", "function": {"name": "add", "arguments": "{broken"}},
]
TEXT: Message = {"role": "assistant", "content": "Hello, you there; this is a longer text with äöü."}
TOOLS: Message = {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS[:1]}
BOTH: Message = {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning_content": "hm"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@asynccontextmanager
async def served(endpoint: Scripted) -> AsyncIterator[tuple[str, str]]:
    gateway = Gateway(model="tiny")
    await gateway.start()
    try:
        with gateway.serving(endpoint) as key:
            yield gateway.url, key
    finally:
        await gateway.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("message", [TEXT, TOOLS, BOTH], ids=["text", "tools", "both"])
async def test_chat_completions_by_the_openai_sdk(message: Message, stream: bool) -> None:
    calls = message.get("tool_calls", [])
    endpoint = Scripted(message, Finish.TOOLS if calls else Finish.STOP)
    asked: dict[str, Any] = {
        "model": "any", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 9,
        "temperature": 0.1,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
    }  # fmt: skip
    async with served(endpoint) as (url, key), AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as openai:
        if stream:
            text, names, arguments, finish, usage = "", [], {}, None, None
            options: Any = {"include_usage": True}
            async for chunk in await openai.chat.completions.create(stream=True, stream_options=options, **asked):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    finish = choice.finish_reason or finish
                    for one in choice.delta.tool_calls or ():
                        names.append(one.function.name)
                        arguments[one.index] = arguments.get(one.index, "") + one.function.arguments
            given = list(arguments.values())
        else:
            found = await openai.chat.completions.create(logprobs=True, **asked)
            text, finish, usage = found.choices[0].message.content or "", found.choices[0].finish_reason, found.usage
            given = [one.function.arguments for one in found.choices[0].message.tool_calls or ()]
            names = [one.function.name for one in found.choices[0].message.tool_calls or ()]
            assert [one.logprob for one in found.choices[0].logprobs.content] == [-0.5, -0.25]
        models = [model.id async for model in openai.models.list()]
    assert models == ["tiny"]
    assert text == message["content"]
    assert finish == ("tool_calls" if calls else "stop")
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)
    assert names == ["add"] * len(calls)
    assert given == [json.dumps({"a": 1, "text": "é\n"}, ensure_ascii=False), "{broken"][: len(calls)]
    (call,) = endpoint.calls
    assert call.messages == ({"role": "user", "content": "hi"},)
    assert call.tools[0]["function"] == {"name": "add", "description": "", "parameters": SCHEMA}
    assert (call.max_tokens, call.asked) == (9, {"temperature": 0.1})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("message", [TEXT, TOOLS, BOTH], ids=["text", "tools", "both"])
async def test_responses_by_the_openai_sdk(message: Message, stream: bool) -> None:
    endpoint = Scripted(message)
    tool: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
    asked: dict[str, Any] = {"model": "any", "input": "hi", "instructions": "Be brief.", "tools": [tool]}
    async with served(endpoint) as (url, key), AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as openai:
        if stream:
            text, found = "", None
            async for event in await openai.responses.create(stream=True, **asked):
                text += event.delta if event.type == "response.output_text.delta" else ""
                found = event.response if event.type == "response.completed" else found
            assert found is not None
            assert text == message["content"]
        else:
            found = await openai.responses.create(**asked)
        outputs: Any = [
            {"type": "function_call_output", "call_id": c["id"], "output": "2"} for c in message.get("tool_calls", [])
        ]
        await openai.responses.create(
            model="any", previous_response_id=found.id, input=outputs or "more", tools=[tool], instructions="Be brief."
        )
        whole: Any = [
            {"role": "user", "content": "hi"},
            *found.output,
            *(outputs or [{"role": "user", "content": "more"}]),
        ]
        await openai.responses.create(
            model="any",
            tools=[tool],
            instructions="Be brief.",
            input=[one if isinstance(one, dict) else one.model_dump() for one in whole],
        )
    assert found.output_text == message["content"]
    assert [item.name for item in found.output if item.type == "function_call"] == ["add"] * len(
        message.get("tool_calls", [])
    )
    kept, sent = (call.messages for call in endpoint.calls[1:])
    assert [without_thoughts(m) for m in kept] == [without_thoughts(m) for m in sent]
    assert [m["role"] for m in kept][:3] == ["system", "user", "assistant"]


def without_thoughts(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("message", [TEXT, TOOLS, BOTH], ids=["text", "tools", "both"])
async def test_messages_by_the_anthropic_sdk(message: Message, stream: bool) -> None:
    calls = message.get("tool_calls", [])
    endpoint = Scripted(message, Finish.TOOLS if calls else Finish.LENGTH)
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    talk: list[Any] = [{"role": "user", "content": "hi"}]
    options: Any = {"model": "any", "max_tokens": 5, "tools": tools, "system": [{"type": "text", "text": "Be brief."}]}
    async with served(endpoint) as (url, key), AsyncAnthropic(base_url=url, api_key=key) as anthropic:
        if stream:
            async with anthropic.messages.stream(messages=talk, **options) as streamed:
                found = await streamed.get_final_message()
        else:
            found = await anthropic.messages.create(messages=talk, **options)
        talk.append({"role": "assistant", "content": [block.model_dump() for block in found.content]})
        results = [
            {"type": "tool_result", "tool_use_id": c["id"], "content": [{"type": "text", "text": "2"}]} for c in calls
        ]
        talk.append({"role": "user", "content": [*results, {"type": "text", "text": "more"}]})
        await anthropic.messages.create(messages=talk, **options)
        counted = await anthropic.messages.count_tokens(model="any", messages=talk, tools=tools)
    assert counted.input_tokens == 100 + len(talk) + len(calls)
    assert found.stop_reason == ("tool_use" if calls else "max_tokens")
    assert found.usage.output_tokens == 3
    assert "".join(block.text for block in found.content if block.type == "text") == message["content"]
    asked = endpoint.calls[1].messages
    assert [m["role"] for m in asked] == ["system", "user", "assistant", *["tool"] * len(calls), "user"]
    assert without_thoughts(asked[2]) == without_thoughts(message)


def encoded(seed: int, **options: Any) -> str:
    """A picture as base64; `options` change its file, and not its pixels."""
    return as_base64(picture(seed), **options)


def as_base64(image: Image.Image, **options: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, **{"format": "PNG", **options})
    return base64.b64encode(buffer.getvalue()).decode()


def asked_in_chat(first: str, other: str) -> tuple[str, dict[str, Any]]:
    def image(data: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "low"}}

    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    return "chat/completions", {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "s"}, {"type": "text", "text": "ee"}, image(first)]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [image(other), {"type": "text", "text": "so"}]},
        ]
    }


def asked_in_responses(first: str, other: str) -> tuple[str, dict[str, Any]]:
    def image(data: str) -> dict[str, Any]:
        return {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"}

    output = [image(other), {"type": "input_text", "text": "so"}]
    return "responses", {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "see"}, image(first)]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": output},
        ]
    }


def asked_in_messages(first: str, other: str) -> tuple[str, dict[str, Any]]:
    def image(data: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    result = {"type": "tool_result", "tool_use_id": "c", "content": [image(other), {"type": "text", "text": "so"}]}
    return "messages", {
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "see"}, image(first)]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]},
            {"role": "user", "content": [result]},
        ],
    }


async def sent_by_sdk(url: str, key: str, path: str, asked: dict[str, Any]) -> None:
    """Send a body as the vendor's SDK sends it. Raises the SDK's own BadRequestError."""
    if path == "messages":
        async with AsyncAnthropic(base_url=url, api_key=key) as anthropic:
            await anthropic.messages.create(model="any", **asked)
            await anthropic.messages.count_tokens(model="any", messages=asked["messages"])
        return
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as openai:
        made = openai.responses if path == "responses" else openai.chat.completions
        await made.create(model="any", **asked)


ASKED = [asked_in_chat, asked_in_responses, asked_in_messages]


@pytest.mark.parametrize("asked", ASKED)
async def test_images_are_known_by_their_pixels(asked: Any) -> None:
    endpoint = Scripted(TEXT)
    async with served(endpoint) as (url, key):
        await sent_by_sdk(url, key, *asked(encoded(1), encoded(2)))
        await sent_by_sdk(url, key, *asked(encoded(1, compress_level=0), encoded(2, format="BMP")))
    first, again = (call.messages for call in endpoint.calls)
    assert first == again
    assert first[0]["content"] == [{"type": "text", "text": "see"}, {"type": "image", "image": STORE.put(picture(1))}]
    assert first[2]["content"] == [{"type": "image", "image": STORE.put(picture(2))}, {"type": "text", "text": "so"}]
    assert first[2]["tool_call_id"] == "c"


BROKEN = [
    (as_base64(Image.new("1", (5000, 4000))), "5000 x 4000 pixels; at most"),
    (encoded(2)[:400], "image 1 of a message of role 'tool': it is damaged"), ("AAAA", "it is no image"),
    ("%%", "not base64"), ("", "it is no image"), (base64.b64encode(b"/etc/passwd").decode(), "it is no image"),
]  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
async def test_images_that_cannot_be_taken_are_refused_in_the_dialects_own_form(asked: Any) -> None:
    endpoint = Scripted(TEXT)
    refused = (OpenAIBadRequest, AnthropicBadRequest)
    async with served(endpoint) as (url, key):
        for data, why in BROKEN:
            with pytest.raises(refused, match=why):
                await sent_by_sdk(url, key, *asked(encoded(1), data))
        for wrong in ("https://example.org/a.png", "/etc/passwd", STORE.put(picture(1))):
            path, body = asked(encoded(1), encoded(2))
            text = json.dumps(body).replace(f"data:image/png;base64,{encoded(2)}", wrong)
            text = text.replace(json.dumps({"type": "base64", "media_type": "image/png", "data": encoded(2)}),
                                json.dumps({"type": "url", "url": wrong}))  # fmt: skip
            with pytest.raises(refused, match="an image must come as base64"):
                await sent_by_sdk(url, key, path, json.loads(text))
    assert not endpoint.calls


@pytest.mark.parametrize("asked", ASKED)
async def test_a_model_that_does_not_see_refuses_images(asked: Any) -> None:
    endpoint = Scripted(TEXT)
    endpoint.images = False
    async with served(endpoint) as (url, key):
        with pytest.raises((OpenAIBadRequest, AnthropicBadRequest), match="this model does not see"):
            await sent_by_sdk(url, key, *asked(encoded(1), encoded(2)))
    assert not endpoint.calls


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"n": 2}), ("chat/completions", {"stop": ["x"]}), ("chat/completions", {"messages": 3}),
    ("chat/completions", {"messages": [{"role": "robot", "content": ""}]}), ("chat/completions", {"max_tokens": 0}),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("chat/completions", {"messages": [{"role": "system", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}),
    ("chat/completions", {"response_format": {"type": "json_object"}}),
    ("chat/completions", {"tool_choice": "required"}),
    ("chat/completions", {"tools": [{"type": "function"}]}), ("chat/completions", {"top_logprobs": 3}),
    ("responses", {"input": [{"type": "computer_call"}]}), ("responses", {"previous_response_id": "resp_x"}),
    ("responses", {"text": {"format": {"type": "json_schema"}}}), ("responses", {"tools": [{"type": "web_search"}]}),
    ("messages", {"stop_sequences": ["x"]}), ("messages", {"messages": [{"role": "system", "content": ""}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("messages", {"tool_choice": {"type": "any"}}), ("messages/count_tokens", {"messages": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change"), REFUSED, ids=[f"{p} {json.dumps(c)[:40]}" for p, c in REFUSED])
async def test_what_cannot_be_served_is_refused_in_the_dialects_own_form(path: str, change: dict[str, Any]) -> None:
    endpoint = Scripted(TEXT)
    talk = [{"role": "user", "content": "hi"}]
    body = {"model": "any", "messages": talk, "input": "hi", "max_tokens": 5, **change}
    async with (
        served(endpoint) as (url, key),
        aiohttp.ClientSession(headers={"x-api-key": key}) as session,
        session.post(f"{url}/v1/{path}", json=body) as response,
    ):
        found = await response.json()
    assert response.status == 400
    assert found["error"]["type"] == "invalid_request_error"
    assert next(iter(change)).split("_")[0] in found["error"]["message"].replace("unknown", "previous")
    assert (found.get("type") == "error") == path.startswith("messages")
    assert not endpoint.calls


GARBAGE = [b"", b"\xff\x00", b"[1]", b"null", b"{", b'{"messages": ' + b"[" * 100_000]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_garbage_is_an_error_of_the_dialect(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "BODY_BYTES", 1 << 20)
    endpoint = Scripted(TEXT)
    async with served(endpoint) as (url, key), aiohttp.ClientSession(headers={"x-api-key": key}) as session:
        for body in [*GARBAGE, b" " * (2 << 20)]:
            async with session.post(f"{url}/v1/{path}", data=body) as response:
                found = await response.json()
            assert response.status == (413 if len(body) > 1 << 20 else 400), (body[:20], found)
            assert found["error"]["message"]
        async with session.post(f"{url}/v1/nothing", data=b"") as response:
            assert response.status == 404
    assert not endpoint.calls


async def test_an_error_of_the_endpoint_is_told_also_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", 0.02)
    endpoint = Scripted(TEXT, seconds=0.1)
    async with served(endpoint) as (url, key), aiohttp.ClientSession(headers={"x-api-key": key}) as session:
        for error, said in ((GatewayError("too long"), "too long"), (ValueError("a bug"), "a bug")):
            endpoint.error = error
            body = {"messages": [], "stream": True, "max_tokens": 5}
            async with session.post(f"{url}/v1/messages", json=body) as response:
                text = await response.text()
            assert text.startswith(": keep-alive\n\n")
            assert "event: error\n" in text
            assert said in text


async def heard_in_chat(url: str, key: str) -> AsyncIterator[tuple[str, str]]:
    talk: Any = [{"role": "user", "content": "hi"}]
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as openai,
        openai.chat.completions.stream(model="any", messages=talk) as stream,
    ):
        async for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                delta = event.chunk.choices[0].delta
                yield "reasoning", getattr(delta, "reasoning_content", None) or ""
                yield "content", delta.content or ""
        final = await stream.get_final_completion()
    yield "whole", final.choices[0].message.content or ""
    yield "calls", json.dumps([c.function.arguments for c in final.choices[0].message.tool_calls or ()])


async def heard_in_responses(url: str, key: str) -> AsyncIterator[tuple[str, str]]:
    kinds = {"response.output_text.delta": "content", "response.reasoning_summary_text.delta": "reasoning"}
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as openai,
        openai.responses.stream(model="any", input="hi") as stream,
    ):
        async for event in stream:
            if event.type in kinds:
                yield kinds[event.type], event.delta
        final = await stream.get_final_response()
    yield "whole", final.output_text
    yield "calls", json.dumps([item.arguments for item in final.output if item.type == "function_call"])


async def heard_in_messages(url: str, key: str) -> AsyncIterator[tuple[str, str]]:
    asked: Any = {"model": "any", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    async with (
        AsyncAnthropic(base_url=url, api_key=key) as anthropic,
        anthropic.messages.stream(**asked) as stream,
    ):
        async for event in stream:
            if event.type in ("text", "thinking"):
                yield ("content", event.text) if event.type == "text" else ("reasoning", event.thinking)
        final = await stream.get_final_message()
    yield "whole", "".join(block.text for block in final.content if block.type == "text")
    inputs = [block.input for block in final.content if block.type == "tool_use"]
    yield "calls", json.dumps([i.get("unreadable_arguments") or json.dumps(i, ensure_ascii=False) for i in inputs])


SPOKEN = [
    (TEXT, [("content", "Hello, you"), ("content", " there; ")]),
    (TEXT, [("content", TEXT["content"])]),
    (TOOLS, [("content", "Let me")]),
    ({**BOTH, "content": "So."}, [("reasoning", "h"), ("reasoning", "m"), ("content", "S")]),
    ({**BOTH, "content": "So."}, [("content", "S"), ("reasoning", "h"), ("content", "o")]),
    (BOTH, [("reasoning", "hm")]),
]


@pytest.mark.parametrize("hear", [heard_in_chat, heard_in_responses, heard_in_messages])
@pytest.mark.parametrize(("message", "spoken"), SPOKEN, ids=[str(i) for i in range(len(SPOKEN))])
async def test_text_comes_while_it_is_sampled(message: Any, spoken: Any, hear: Any) -> None:
    """Each piece is waited for before the next one is sampled; what is left comes with the end."""
    endpoint = Scripted(message)
    endpoint.spoken, texts, came = spoken, {"content": "", "reasoning": ""}, 0
    async with served(endpoint) as (url, key), asyncio.timeout(60):
        async for kind, text in hear(url, key):
            texts[kind] = texts.get(kind, "") + text
            if came < len(spoken) and texts[spoken[came][0]].endswith(spoken[came][1]):
                came += 1
                endpoint.heard.set()
    assert came == len(spoken)
    assert (texts["content"], texts["reasoning"]) == (message["content"], message.get("reasoning_content", ""))
    assert texts["whole"] == message["content"]
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    given = [a if isinstance(a, str) else json.dumps(a, ensure_ascii=False) for a in arguments]
    assert json.loads(texts["calls"]) == given


async def test_an_answer_that_is_another_than_was_sent_ends_in_an_error() -> None:
    endpoint = Scripted(TEXT)
    endpoint.spoken = [("content", "Another")]
    body = {"messages": [], "stream": True, "max_tokens": 5}
    async with (
        served(endpoint) as (url, key),
        aiohttp.ClientSession(headers={"x-api-key": key}) as session,
        session.post(f"{url}/v1/messages", json=body) as response,
    ):
        text = ""
        async with asyncio.timeout(60):
            while "Another" not in text:
                text += (await response.content.readany()).decode()
        endpoint.heard.set()
        text += await response.text()
    assert "is not the beginning of the whole" in text.partition("event: error\n")[2]


async def test_a_client_that_leaves_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", 0.02)
    endpoint = Scripted(TEXT, seconds=0.3)
    async with served(endpoint) as (url, key):
        for stream in (False, True):
            async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
                await left(endpoint, session, url, stream)
        async with asyncio.timeout(60):
            while len(endpoint.losses) < 2:
                await asyncio.sleep(0.01)
    assert sorted(endpoint.losses) == ["t-1", "t-2"]


async def test_a_client_that_leaves_in_the_middle_of_a_text_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", 0.02)
    endpoint = Scripted(TEXT, seconds=0.3)
    endpoint.spoken = [("content", "Hello"), ("content", ", you")]
    async with served(endpoint) as (url, key):
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
            await left(endpoint, session, url, True)
        endpoint.heard.set()
        async with asyncio.timeout(60):
            while len(endpoint.losses) < 1:
                endpoint.heard.set()
                await asyncio.sleep(0.01)
    assert endpoint.losses == ["t-1"]


async def left(endpoint: Scripted, session: aiohttp.ClientSession, url: str, stream: bool) -> None:
    """Close the connection once the call is there and before its answer, or in the middle of a stream."""
    before = len(endpoint.calls)

    async def post() -> None:
        async with session.post(f"{url}/v1/chat/completions", json={"messages": [], "stream": stream}) as response:
            await response.content.read(4)
            response.close()

    work = asyncio.ensure_future(post())
    if not stream:
        await eventually(lambda: len(endpoint.calls) > before)
        work.cancel()
    await asyncio.gather(work, return_exceptions=not stream)


async def test_the_end_of_a_rollout_ends_its_calls() -> None:
    endpoint = Scripted(TEXT, seconds=30)
    gateway = Gateway()
    await gateway.start()
    try:
        with gateway.serving(endpoint) as key:
            openai = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
            work = asyncio.ensure_future(
                openai.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
            )
            async with asyncio.timeout(60):
                while not endpoint.calls:
                    await asyncio.sleep(0.01)
        with pytest.raises(Exception, match="the rollout is over"):
            await asyncio.wait_for(work, 60)
        await openai.close()
    finally:
        await gateway.close()


async def test_tools_by_the_mcp_sdk() -> None:
    import httpx2
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client

    async with served(Scripted(TEXT)) as (url, key):
        http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"})
        async with (
            http,
            streamable_http_client(f"{url}/mcp", http_client=http) as (reading, writing, *_),
            ClientSession(reading, writing) as session,
        ):
            await session.initialize()
            listed = await session.list_tools()
            assert [(tool.name, tool.description) for tool in listed.tools] == [("add", "Adds.")]
            found = await session.call_tool("add", {"a": 1})
            assert found.content[0].text == 'add of {"a": 1}'
            found = await session.call_tool("add", {"a": 2})
            assert [block.type for block in found.content] == ["text", "image"]
            assert (found.content[1].data, found.content[1].mime_type) == (encoded(1), "image/png")
            with pytest.raises(Exception, match="no tool named 'ad'"):
                await session.call_tool("ad", {})
