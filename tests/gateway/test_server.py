"""The gateway's dialects, spoken by the vendors' own SDKs and by hand, before an endpoint that says what it is told."""

import asyncio
import base64
import gzip
import io
import json
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from anthropic import AuthenticationError as AnthropicUnauthorized
from anthropic import BadRequestError as AnthropicBadRequest
from openai import AsyncOpenAI
from openai import BadRequestError as OpenAIBadRequest
from PIL import Image
from processes import eventually
from vision_help import picture

from agentrl.chat.base import Said
from agentrl.errors import UserError
from agentrl.gateway import bounds
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
        self.context = 1 << 20
        self.calls: list[Call] = []
        self.error: Exception | None = None
        self.losses: list[str] = []
        self.refusals: list[str] = []
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

    def too_long(self, why: str) -> GatewayError:
        self.refusals.append(why)
        return GatewayError(why, 400, "context_length_exceeded")

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


@pytest.mark.quick_cases(2)
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


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_of_a_namespace_are_offered_by_their_names_and_called_with_it(stream: bool) -> None:
    """As Codex offers its tools for sub-agents."""
    endpoint = Scripted(TOOLS)
    add: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
    group: Any = {"type": "namespace", "name": "math", "description": "Sums.", "tools": [add]}
    other: Any = {**add, "name": "other"}
    asked: dict[str, Any] = {"model": "any", "input": "hi", "tools": [other, group]}
    async with served(endpoint) as (url, key), AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as openai:
        if stream:
            events = [event async for event in await openai.responses.create(stream=True, **asked)]
            items = [event.item for event in events if event.type == "response.output_item.done"]
        else:
            items = (await openai.responses.create(**asked)).output
        history: Any = [{"role": "user", "content": "hi"}, *(item.model_dump(exclude_none=True) for item in items)]
        result = {"type": "function_call_output", "call_id": "call_0_0", "output": "2"}
        await openai.responses.create(model="any", tools=[other, group], input=[*history, result])
        with pytest.raises(OpenAIBadRequest, match="'add' of a namespace is offered twice"):
            await openai.responses.create(model="any", tools=[add, group], input="hi")
    assert [item.to_dict()["namespace"] for item in items if item.type == "function_call"] == ["math"]
    assert [tool["function"]["name"] for tool in endpoint.calls[0].tools] == ["other", "add"]
    assert [message["role"] for message in endpoint.calls[1].messages] == ["user", "assistant", "tool"]


async def test_a_system_message_between_the_others_stays_there() -> None:
    """As Claude Code sends reminders."""
    endpoint = Scripted(TEXT)
    talk = [{"role": "user", "content": "hi"}, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    async with served(endpoint) as (url, key), AsyncAnthropic(base_url=url, api_key=key) as anthropic:
        await anthropic.messages.create(messages=talk, model="any", max_tokens=5, system="Help.")  # type: ignore[arg-type]
    assert endpoint.calls[0].messages == (
        {"role": "system", "content": "Help."}, {"role": "user", "content": "hi"},
        {"role": "system", "content": "Be brief."},
    )  # fmt: skip


def without_thoughts(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


@pytest.mark.quick_cases(2)
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


@pytest.mark.quick_cases(1)
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


HELLO = {"role": "user", "content": "hi"}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"n": 2}), ("chat/completions", {"stop": ["x", ""]}), ("chat/completions", {"messages": 3}),
    ("chat/completions", {"messages": [{"role": "robot", "content": ""}]}), ("chat/completions", {"max_tokens": 0}),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("chat/completions", {"messages": [{"role": "system", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}),
    ("chat/completions", {"response_format": {"type": "grammar"}}),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}),
    ("chat/completions", {"tool_choice": {"type": "custom"}}), ("responses", {"tool_choice": "file_search"}),
    ("messages", {"output_config": {"format": {"type": "xml"}}}),
    ("chat/completions", {"tool_choice": "required"}),
    ("chat/completions", {"tools": [{"type": "function"}]}), ("chat/completions", {"top_logprobs": 3}),
    ("responses", {"input": [{"type": "computer_call"}]}), ("responses", {"previous_response_id": "resp_x"}),
    ("responses", {"text": {"format": {"type": "json_schema"}}}), ("responses", {"tools": [{"type": "web_search"}]}),
    ("messages", {"stop_sequences": [3]}), ("messages", {"messages": [{"role": "developer", "content": ""}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("messages", {"tool_choice": {"type": "tool", "name": "x"}}), ("messages/count_tokens", {"messages": "x"}),
    ("chat/completions", {"stream": "false"}), ("chat/completions", {"parallel_tool_calls": 0}),
    ("chat/completions", {"logprobs": 1}), ("chat/completions", {"stream_options": {"include_usage": "yes"}}),
    ("responses", {"previous_response_id": 5}), ("responses", {"stream": 1}), ("completions", {"stream": "true"}),
    ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change"), REFUSED, ids=[f"{p} {json.dumps(c)[:40]}" for p, c in REFUSED])
async def test_what_cannot_be_served_is_refused_in_the_dialects_own_form(path: str, change: dict[str, Any]) -> None:
    endpoint = Scripted(TEXT)
    body = {"model": "any", "messages": [HELLO], "max_tokens": 5, **change}
    if path in ("responses", "completions"):
        body = {"model": "any", "input" if path == "responses" else "prompt": "hi", **change}
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


NO_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "add"}}]}),
    ("responses", {"tool_choice": "none", "tools": [{"type": "function", "name": "add"}]}),
    ("messages", {"tool_choice": {"type": "none"}, "tools": [{"name": "add", "input_schema": SCHEMA}]}),
]


@pytest.mark.parametrize(("path", "change"), NO_CALLS, ids=[path for path, _ in NO_CALLS])
async def test_tools_that_may_not_be_called_stay_in_the_prompt(path: str, change: dict[str, Any]) -> None:
    endpoint = Scripted(TEXT)
    body = {**({"input": "hi"} if path == "responses" else {"messages": [HELLO], "max_tokens": 5}), **change}
    async with served(endpoint) as (url, key), aiohttp.ClientSession(headers={"x-api-key": key}) as session:
        for asked in (body, {**body, "tool_choice": None}):
            async with session.post(f"{url}/v1/{path}", json=asked) as response:
                assert response.status == 200
    assert [call.may_call for call in endpoint.calls] == [False, True]
    assert [call.tools[0]["function"]["name"] for call in endpoint.calls] == ["add", "add"]


UNKNOWN = [
    ("POST", "/v1/nothing", 404), ("GET", "/", 404), ("GET", "/v1/messages/batches", 404),
    ("GET", "/v1/chat/completions", 405), ("GET", "/v1/messages", 405), ("DELETE", "/v1/models/tiny", 405),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "status"), UNKNOWN)
async def test_an_unknown_path_or_method_is_an_error_of_the_dialect(method: str, path: str, status: int) -> None:
    async with served(Scripted(TEXT)) as (url, key), aiohttp.ClientSession(headers={"x-api-key": key}) as session:
        async with session.request(method, url + path) as response:
            found = await response.json()
            assert (response.status, "Allow" in response.headers) == (status, status == 405)
        async with session.request(method, url + path, headers={"anthropic-version": "1"}) as response:
            assert (await response.json())["type"] == "error"
    assert path in found["error"]["message"]
    assert (found.get("type") == "error") == path.startswith("/v1/messages")


async def test_models_and_counts_by_the_vendors_sdks() -> None:
    endpoint = Scripted(TEXT)
    async with (
        served(endpoint) as (url, key),
        AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as openai,
        AsyncAnthropic(base_url=url, api_key=key) as anthropic,
    ):
        assert (await openai.models.retrieve("org/a-model")).id == "org/a-model"
        assert (await anthropic.models.retrieve("tiny")).display_name == "tiny"
        assert [model.id async for model in await anthropic.models.list()] == ["tiny"]
        assert (await openai.responses.input_tokens.count(model="any", input="hi")).input_tokens == 101
        with pytest.raises(OpenAIBadRequest, match="expected an array"):
            await openai.responses.input_tokens.count(model="any", input=7)  # type: ignore[arg-type]
    async with AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as stranger, served(endpoint) as (url, _):
        stranger.base_url = url
        with pytest.raises(AnthropicUnauthorized, match="authentication_error"):
            await stranger.models.list()


PROMPTS: list[tuple[Any, Any]] = [
    ("1 + 1 =", "1 + 1 ="), (["1 + 1 ="], "1 + 1 ="), ([5, 6], (5, 6)), ([[5, 6]], (5, 6)), (["a", "b"], None),
    ([], None), ("", None), ([5, "a"], None), ([-1], None), ([True], None), ([1 << 40], None), (None, None),
]  # fmt: skip


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "taken"), PROMPTS, ids=[str(p) for p, _ in PROMPTS])
async def test_completions_by_the_openai_sdk(prompt: Any, taken: Any, stream: bool) -> None:
    endpoint = Scripted(TEXT, Finish.LENGTH)
    asked: dict[str, Any] = {"model": "any", "prompt": prompt, "max_tokens": 9, "logprobs": 0, "stream": stream}
    async with served(endpoint) as (url, key), AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as openai:
        if taken is None:
            with pytest.raises(OpenAIBadRequest, match="prompt"):
                await openai.completions.create(**asked)
            return
        found = await openai.completions.create(**asked)
        (whole,) = [one async for one in found] if stream else [found]
        with pytest.raises(OpenAIBadRequest, match="echo: True is not served"):
            await openai.completions.create(**{**asked, "echo": True})
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason) == (TEXT["content"], "length")
    assert (choice.logprobs.tokens, choice.logprobs.text_offset) == (["He", "y"], [0, 2])
    assert (endpoint.calls[0].prompt, endpoint.calls[0].max_tokens) == (taken, 9)


OBJECT: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
PLAIN: Any = {
    "tools": [{"type": "function", "function": {"name": "add"}}, {"type": "function", "function": {"name": "b"}}]
}
FLAT: Any = {"tools": [{"type": "function", "name": "add"}, {"type": "function", "name": "b"}]}
THEIRS: Any = {"tools": [{"name": "add", "input_schema": {}}, {"name": "b", "input_schema": {}}]}
SCHEMA_OF_CHAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT, "strict": True}}
SCHEMA_OF_OTHERS: Any = {"type": "json_schema", "name": "x", "schema": OBJECT}
BOTH_TOOLS = ("add", "b")
FORCED: list[tuple[str, dict[str, Any], Any]] = [
    ("chat/completions", {**PLAIN, "tool_choice": "required"}, BOTH_TOOLS),
    ("chat/completions", {**PLAIN, "tool_choice": {"type": "function", "function": {"name": "b"}}}, ("b",)),
    ("chat/completions", {**PLAIN, "tool_choice": "auto"}, ()),
    ("responses", {**FLAT, "tool_choice": "required"}, BOTH_TOOLS),
    ("responses", {**FLAT, "tool_choice": {"type": "function", "name": "b"}}, ("b",)),
    ("messages", {**THEIRS, "tool_choice": {"type": "any"}}, BOTH_TOOLS),
    ("messages", {**THEIRS, "tool_choice": {"type": "tool", "name": "b"}}, ("b",)),
    ("chat/completions", {"response_format": {"type": "json_object"}}, {"type": "object"}),
    ("chat/completions", {"response_format": SCHEMA_OF_CHAT}, OBJECT),
    ("responses", {"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
    ("responses", {"text": {"format": SCHEMA_OF_OTHERS}}, OBJECT),
    ("messages", {"output_config": {"format": SCHEMA_OF_OTHERS}}, OBJECT),
]


@pytest.mark.parametrize(("path", "change", "wanted"), FORCED, ids=[f"{p} {json.dumps(c)[-60:]}" for p, c, _ in FORCED])
async def test_a_forced_answer_is_read_in_each_dialect(path: str, change: dict[str, Any], wanted: Any) -> None:
    endpoint = Scripted(TEXT)
    body = {**({"input": "hi"} if path == "responses" else {"messages": [HELLO], "max_tokens": 5}), **change}
    async with (
        served(endpoint) as (url, key),
        aiohttp.ClientSession(headers={"x-api-key": key}) as session,
        session.post(f"{url}/v1/{path}", json=body) as response,
    ):
        assert response.status == 200, await response.text()
    (call,) = endpoint.calls
    if isinstance(wanted, tuple):
        assert (call.must_call, call.schema) == (wanted, None)
    else:
        assert (call.must_call, json.loads(call.schema or "")) == ((), wanted)


async def test_null_asks_for_nothing() -> None:
    """SDKs write out what was left to its default."""
    endpoint = Scripted(TEXT)
    nulls = dict.fromkeys(("max_completion_tokens", "stream", "stop", "tools", "parallel_tool_calls", "stream_options"))
    async with served(endpoint) as (url, key), aiohttp.ClientSession(headers={"x-api-key": key}) as session:
        body = {"messages": [HELLO], "max_tokens": 7, **nulls}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
    (call,) = endpoint.calls
    assert (call.max_tokens, call.one_call, call.stream) == (7, False, False)


CHAT = "chat/completions"
BY_FIELD: list[tuple[str, dict[str, Any], str | None]] = [
    ("messages", {"output_format": {"type": "json_schema", "schema": {}}}, "use output_config.format"),
    ("messages", {"thinking": {"type": "disabled"}}, None), ("messages", {"thinking": {"type": "adaptive"}}, None),
    ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, None),
    ("messages", {"mcp_servers": []}, None), ("messages", {"mcp_servers": [{"name": "x"}]}, "offer their tools"),
    ("messages", {"container": "c"}, "offer a tool"), ("messages", {"container": None}, None),
    ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "compact the conversation"),
    ("messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, None),
    (CHAT, {"parallel_tool_calls": False}, None), (CHAT, {"parallel_tool_calls": True}, None),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "the run's chat template"),
    (CHAT, {"chat_template_kwargs": {}}, None),
    (CHAT, {"continue_final_message": True}, "the run's chat template"),
    (CHAT, {"guided_json": {}}, "response_format"), (CHAT, {"guided_regex": "a"}, "response_"),
    (CHAT, {"structured_outputs": {"json": {}}}, "ask for a form by response_format"),
    (CHAT, {"modalities": ["text"]}, None), (CHAT, {"modalities": ["audio"]}, "writes text"),
    (CHAT, {"best_of": 2}, "send a request"), (CHAT, {"best_of": 1}, None),
    (CHAT, {"n": True}, "send a request"), (CHAT, {"n": 1}, None),
    (CHAT, {"min_p": 0.1, "repetition_penalty": 1.1}, None),
    (CHAT, {"function_call": {"name": "f"}}, "use tools"), (CHAT, {"function_call": "auto"}, None),
    (CHAT, {"nonsense": 1}, "unknown here"), (CHAT, {"nonsense": None}, None),
    ("responses", {"max_tool_calls": 1}, None),
    ("responses", {"include": ["message.output_text.logprobs"]}, "no log-probs"),
    ("responses", {"include": ["reasoning.encrypted_content"]}, None), ("responses", {"background": True}, "wait for"),
    ("responses", {"conversation": "c"}, "use previous_response_id"),
    ("responses", {"parallel_tool_calls": False}, None),
    ("responses", {"input": [{"type": "item_reference", "id": "msg_other-1"}]}, "'msg_other-1' is unknown"),
    ("responses", {"input": [{"type": "item_reference", "id": "file_1"}]}, "send the item itself"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "why"), BY_FIELD, ids=[f"{p} {json.dumps(c)[:50]}" for p, c, _ in BY_FIELD])
async def test_a_field_that_changes_the_answer_is_served_or_refused(
    path: str, change: dict[str, Any], why: str | None
) -> None:
    endpoint = Scripted(TEXT)
    body = {"input": "hi", **change} if path == "responses" else {"messages": [HELLO], "max_tokens": 5, **change}
    async with (
        served(endpoint) as (url, key),
        aiohttp.ClientSession(headers={"x-api-key": key}) as session,
        session.post(f"{url}/v1/{path}", json=body) as response,
    ):
        found = await response.json()
    assert response.status == (200 if why is None else 400), found
    if why is not None:
        assert next(iter(change)) in found["error"]["message"]
        assert why in found["error"]["message"]
        return
    (call,) = endpoint.calls
    ((name, value),) = list(change.items())[:1]
    one = "parallel" in json.dumps(change) and value is not True
    assert call.one_call == one
    assert call.ignored == (("max_tool_calls",) if name == "max_tool_calls" else ())
    assert (name in call.asked) == (name in ("thinking", "min_p"))


NESTED: list[tuple[str, dict[str, Any], Any]] = [
    ("messages", {"output_config": {"effort": "low"}}, {"output_config.effort": "low"}),
    ("messages", {"output_config": {"effort": None}}, ()),
    ("messages", {"output_config": {"style": "x"}}, "output_config.style: this field is unknown"),
    ("messages", {"output_config": 3}, "output_config: expected an object"),
    ("messages", {"tools": [{**THEIRS["tools"][0], "cache_control": {}, "odd": 1}]}, ("tools[].cache_", "tools[].odd")),
    ("messages", {"tools": [{**THEIRS["tools"][0], "input_examples": [{"a": 1}]}]}, "write them into the description"),
    ("messages", {"tools": [{**THEIRS["tools"][0], "allowed_callers": ["direct"], "defer_loading": False}]}, ()),
    ("messages", {"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True}]}]}, ("messages[].is_error",)),
    ("responses", {"text": {"verbosity": "low", "x_mine": 1}}, ("text.verbosity", "text.x_mine")),
    ("responses", {"text": {"form": {}}}, "text.form: this field is unknown"),
    ("responses", {"text": []}, "text: expected an object"),
    ("responses", {"tools": [{**FLAT["tools"][0], "defer_loading": True}]}, "tools[].defer_loading: True is not"),
    (CHAT, {"stream_options": {"include_obfuscation": False}}, ("stream_options.include_ob",)),
    (CHAT, {"stream_options": {"continuous_usage_stats": True}}, "a stream ends with the token counts"),
    (CHAT, {"messages": [{**HELLO, "name": "Ann"}]}, ("messages[].name",)),
    (CHAT, {"messages": [HELLO, {"role": "tool", "content": "", "name": "add"}]}, ()),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "wanted"), NESTED, ids=[f"{p} {json.dumps(c)[:60]}" for p, c, _ in NESTED])
async def test_a_field_of_a_field_is_served_counted_or_refused(path: str, change: dict[str, Any], wanted: Any) -> None:
    """wanted: a part of the refusal, what is recorded, or how the names of what is ignored begin."""
    endpoint = Scripted(TEXT)
    body = {"input": "hi", **change} if path == "responses" else {"messages": [HELLO], "max_tokens": 5, **change}
    async with (
        served(endpoint) as (url, key),
        aiohttp.ClientSession(headers={"x-api-key": key}) as session,
        session.post(f"{url}/v1/{path}", json=body) as response,
    ):
        found = await response.json()
    if isinstance(wanted, str):
        assert (response.status, wanted in found["error"]["message"]) == (400, True), found
        return
    assert response.status == 200, found
    (call,) = endpoint.calls
    assert call.asked == (wanted if isinstance(wanted, dict) else {})
    begun = () if isinstance(wanted, dict) else wanted
    assert [name.startswith(one) for name, one in zip(call.ignored, begun, strict=True)] == [True] * len(begun)


async def test_a_strict_tool_is_counted_and_a_legacy_call_is_a_call() -> None:
    endpoint = Scripted(TEXT)
    strict = {"type": "function", "function": {"name": "add", "strict": True, "parameters": SCHEMA}}
    messages: Any = [
        HELLO, {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "1"},
    ]  # fmt: skip
    async with served(endpoint) as (url, key), AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as openai:
        await openai.chat.completions.create(model="m", messages=messages, tools=[strict])
    (call,) = endpoint.calls
    assert call.ignored == ("tools[].strict",)
    assert call.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reference_to_an_item_stands_for_the_item(stream: bool) -> None:
    """As SDKs send them that rely on answers being stored."""
    endpoint = Scripted({**BOTH, "content": "Let me see."}, Finish.TOOLS)
    async with served(endpoint) as (url, key), AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as openai:
        if stream:
            async with openai.responses.stream(model="any", input="hi") as streamed:
                found: Any = await streamed.get_final_response()
        else:
            found = await openai.responses.create(model="any", input="hi")
        outputs: Any = [{"type": "function_call_output", "call_id": c["id"], "output": "2"} for c in CALLS]
        for items in ([item.model_dump() for item in found.output],
                      [{"type": "item_reference", "id": item.id} for item in found.output]):  # fmt: skip
            await openai.responses.create(model="any", input=[HELLO, *items, *outputs])  # type: ignore[list-item]
    assert len(found.output) == 4
    assert endpoint.calls[1].messages == endpoint.calls[2].messages
    assert len(endpoint.calls[2].messages[1]["tool_calls"]) == 2


@pytest.mark.parametrize("path", ["responses", "responses/input_tokens"])
async def test_what_a_body_names_counts_as_what_it_holds(path: str) -> None:
    """A few bytes may stand for a whole conversation, as often as they are written."""
    endpoint = Scripted({"role": "assistant", "content": "a" * 30_000})
    endpoint.context, endpoint.images = 1000, False
    item = {"type": "item_reference", "id": "msg_t-1"}
    async with served(endpoint) as (url, key), aiohttp.ClientSession(headers={"x-api-key": key}) as session:

        async def asked(path: str, **body: Any) -> tuple[int, str]:
            async with session.post(f"{url}/v1/{path}", json=body) as response:
                return response.status, ((await response.json()).get("error") or {}).get("message", "")

        assert await asked("responses", input="hi") == (200, "")
        assert (await asked(path, input=[HELLO, item, HELLO]))[0] == 200
        assert (await asked(path, previous_response_id="resp_t-1", input="so?"))[0] == 200
        calls = len(endpoint.calls)
        for body in (
            {"input": [HELLO, item, HELLO, item, HELLO]}, {"previous_response_id": "resp_t-1", "input": [item, HELLO]},
        ):  # fmt: skip
            status, why = await asked(path, **body)
            assert (status, "characters are longer than any conversation of 1000 tokens" in why) == (400, True), why
    assert len(endpoint.calls) == calls
    assert [call.size > 30_000 for call in endpoint.calls] == [False, True, True][: len(endpoint.calls)]


GARBAGE = [b"", b"\xff\x00", b"[1]", b"null", b"{", b'{"messages": ' + b"[" * 100_000]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_garbage_is_an_error_of_the_dialect(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "BODY_BYTES", 1 << 20)
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


def talk(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"max_tokens": 5, "messages": messages, **more}).encode()


def in_place(body: bytes, path: str) -> bytes:
    if path != "responses":
        return body
    return body.replace(b'"messages"', b'"input"', 1).replace(b"max_tokens", b"max_output_tokens", 1)


HOSTILE = {
    "characters": (talk({"role": "user", "content": "a " * 405_000}), "characters are longer than any conver"),
    "bytes": (talk(HELLO, metadata={"a": "b" * 1_200_000}), "bytes is longer than any conversation of 20000 tokens"),
    "messages": (talk(*[HELLO] * 5000), "5000 messages; at most 4096 are served"),
    "values": (b'{"messages":[' + b"[]," * 80_000 + b"[]]}", "more than 200000 values"),
    "keys": (b"{" + b",".join([b'"k":0'] * 110_000) + b'}', "more than 200000 values"),
    "quotes": (b"[" + b'"",' * 210_000, "more than 200000 values"),
    "depth": (b'{"messages":' + b"[" * 65, "deeper than 64"),
    "depth of a tool": (talk(HELLO, tools=json.loads('[{"function":' * 40 + "1" + "}]" * 40)), "deeper than 64"),
    "depth behind quotes": (b'{"a":"\\"[{","messages":' + b"[{" * 40, "deeper than 64"),
}  # fmt: skip


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "messages/count_tokens"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_body_that_no_context_could_hold_is_refused_before_it_is_rendered(name: str, path: str) -> None:
    endpoint = Scripted(TEXT)
    endpoint.context, endpoint.images = 20_000, False
    body, why = HOSTILE[name]
    async with (
        served(endpoint) as (url, key),
        aiohttp.ClientSession(headers={"x-api-key": key}) as session,
        session.post(f"{url}/v1/{path}", data=in_place(body, path)) as response,
    ):
        found = await response.json()
    assert response.status == 400, found
    assert why in found["error"]["message"]
    assert not endpoint.calls
    assert bool(endpoint.refusals) == (name in ("characters", "bytes", "messages"))


COMPRESSED = {
    "gzip": ("gzip", gzip.compress(talk(HELLO)), 200),
    "deflate": ("deflate", zlib.compress(talk(HELLO)), 200),
    "identity": ("identity", talk(HELLO), 200),
    "no gzip": ("gzip", b"no gzip", 400),
    "cut gzip": ("gzip", gzip.compress(talk(HELLO))[:-12], 400),
    "no deflate": ("deflate", b"\x00", 400),
    "bomb": ("gzip", gzip.compress(b" " * 50_000_000), 413),
    "unknown": ("br", talk(HELLO), 415),
}


@pytest.mark.parametrize("name", COMPRESSED)  # gzip holds the time: an id of the bytes would differ by process
async def test_a_compressed_body_is_read_as_far_as_it_may_be_long(name: str) -> None:
    coding, body, status = COMPRESSED[name]
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    async with served(Scripted(TEXT)) as (url, key), aiohttp.ClientSession(headers={"x-api-key": key}) as session:
        for path in ("chat/completions", "messages"):
            async with session.post(f"{url}/v1/{path}", data=body, headers=headers) as response:
                found = await response.json()
            assert response.status == status, found
            assert ("error" in found) == (status != 200)


@pytest.mark.slow
async def test_a_body_that_comes_byte_by_byte_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "READ_SECONDS", 0.05)
    async with served(Scripted(TEXT)) as (url, key):
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        head = f"POST /v1/messages HTTP/1.1\r\nHost: h\r\nx-api-key: {key}\r\nContent-Length: 9\r\n\r\n{{"
        writer.write(head.encode())
        async with asyncio.timeout(60):
            assert b"408" in await reader.readline()
        writer.close()


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/messages", "v1/messages/count_tokens", "mcp"])
async def test_a_rollout_that_ends_while_a_body_comes_is_over(path: str) -> None:
    gateway = Gateway()
    await gateway.start()
    with gateway.serving(Scripted(TEXT)) as key:
        reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
        head = f"POST /{path} HTTP/1.1\r\nHost: h\r\nx-api-key: {key}\r\nContent-Length: 2\r\n\r\n{{"
        writer.write(head.encode())
        await asyncio.sleep(0.05)
    writer.write(b"}")
    async with asyncio.timeout(60):
        assert b" 401 " in await reader.readline()
    writer.close()
    await gateway.close()


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


@pytest.mark.quick_cases(6)
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


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_client_that_leaves_is_noticed(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the answer, whole or streamed, and after the first comment of a stream."""
    endpoint = Scripted(TEXT, seconds=0.2)
    async with served(endpoint) as (url, key):
        for stream, comment in ((False, 10.0), (True, 10.0), (True, 0.02)):
            monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", comment)
            async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
                await left(endpoint, session, f"{url}/v1/{path}", stream, reads=comment < 1)
        await eventually(lambda: len(endpoint.losses) == 3)
    assert sorted(endpoint.losses) == ["t-1", "t-2", "t-3"]
    assert not caplog.records


async def test_a_client_that_leaves_in_the_middle_of_a_text_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", 0.02)
    endpoint = Scripted(TEXT, seconds=0.3)
    endpoint.spoken = [("content", "Hello"), ("content", ", you")]
    async with served(endpoint) as (url, key):
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as session:
            await left(endpoint, session, f"{url}/v1/chat/completions", True, reads=True)
        endpoint.heard.set()
        async with asyncio.timeout(60):
            while len(endpoint.losses) < 1:
                endpoint.heard.set()
                await asyncio.sleep(0.01)
    assert endpoint.losses == ["t-1"]


async def left(endpoint: Scripted, session: aiohttp.ClientSession, url: str, stream: bool, reads: bool) -> None:
    """Close the connection once the call is there and before its answer. reads: once something of that came."""
    before = len(endpoint.calls)
    body = {"input": "hi"} if url.endswith("responses") else {"messages": [HELLO], "max_tokens": 5}
    body |= {"stream": stream}

    async def post() -> None:
        async with session.post(url, json=body) as response:
            await response.content.read(4)
            response.close()

    work = asyncio.ensure_future(post())
    if not reads:
        await eventually(lambda: len(endpoint.calls) > before)
        work.cancel()
    await asyncio.gather(work, return_exceptions=not reads)


async def test_a_client_that_closes_after_the_last_event_has_received_it(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Scripted(TEXT)
    async with served(endpoint) as (url, key), aiohttp.ClientSession(headers={"x-api-key": key}) as session:
        for _ in range(10):
            body = {"messages": [], "stream": True}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                await response.content.readuntil(b"[DONE]")
                response.close()
        async with session.get(f"{url}/v1/models") as response:
            assert response.status == 200
    assert len(endpoint.calls) == 10
    assert not endpoint.losses
    assert not caplog.records


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


async def test_who_is_elsewhere_reaches_it_by_its_public_url_and_a_key() -> None:
    gateway = Gateway(host="0.0.0.0", public_url="http://host.of.containers:{port}/model")
    await gateway.start()
    try:
        port = gateway.sandbox_url.removeprefix("http://127.0.0.1:")
        assert gateway.url == f"http://host.of.containers:{port}/model"
        with gateway.serving(Scripted(TEXT)) as key:
            async with aiohttp.ClientSession() as session:
                for given, status in ((key, 200), ("", 401), ("any", 401)):
                    url, headers = f"http://127.0.0.1:{port}/v1/models", {"x-api-key": given}
                    async with session.get(url, headers=headers) as response:
                        assert response.status == status
    finally:
        await gateway.close()
    for loopback in (Gateway(), Gateway(host="localhost")):
        with loopback.serving(Scripted(TEXT), key=""):
            pass
    for elsewhere in (gateway, Gateway(public_url="http://a:1")):
        with pytest.raises(UserError, match="everybody may call the model: give a key"):
            elsewhere.serving(Scripted(TEXT), key="").__enter__()


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
