"""The dialect of OpenAI's Chat Completions API."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from agentrl.gateway.bounds import check_shape
from agentrl.gateway.call import Call, Completion, GatewayError
from agentrl.gateway.fields import CHAT_COMPLETIONS, asked_of, check_fields, check_tools, shown
from agentrl.gateway.stream import Writer
from agentrl.plugins.types import Content, Json, Message

UNREADABLE = "unreadable_arguments"
"""The key under which a dialect whose arguments are objects holds what the model wrote, where that is none."""
encode = json.JSONEncoder(ensure_ascii=False).encode
"""A value as JSON text."""
_SPEAKERS = ("system", "developer", "user", "assistant")
Role = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip


class ChatCompletions:
    """`POST /v1/chat/completions`."""

    history = "messages"
    instructions = ""

    def parse(self, body: Mapping[str, Json]) -> Call:
        """The call. Raises GatewayError for what cannot be served."""
        ignored = check_fields(body, CHAT_COMPLETIONS)
        tools, choice = tools_of(body, body.get("tool_choice"), _parts), body.get("tool_choice")
        form = mapping(body.get("response_format"), "response_format")
        if form.get("type") == "json_schema":
            form = {**mapping(form.get("json_schema"), "response_format.json_schema"), "type": "json_schema"}
        return Call(
            messages=tuple(message_of(one, i) for i, one in enumerate(array(body.get("messages"), "messages"))),
            tools=tools,
            may_call=choice != "none",
            schema=schema_of(form, "response_format"),
            must_call=must_call(_chosen(choice) if isinstance(choice, dict) else choice, tools),
            max_tokens=count(_first(body, "max_completion_tokens", "max_tokens"), "max_tokens"),
            stream=flag(body.get("stream"), "stream"),
            usage_in_stream=usage_asked(body),
            stop=strings(body.get("stop"), "stop"),
            logprobs=flag(body.get("logprobs"), "logprobs"),
            model=str(body.get("model", "")),
            asked=asked_of(body, CHAT_COMPLETIONS),
            one_call=not flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True),
            ignored=(*ignored, *check_tools(body.get("tools"), CHAT_COMPLETIONS), *_names_in(body["messages"])),
        )

    def render(self, found: Completion, call: Call) -> dict[str, Json]:
        """The answer as an object."""
        return {
            **_head(found.id, call, "chat.completion"),
            "choices": [
                {
                    "index": 0,
                    "message": written(found.message),
                    "finish_reason": str(found.finish),
                    "logprobs": _logprobs(found) if call.logprobs else None,
                }
            ],
            "usage": usage(found),
        }

    def writer(self, call: Call) -> Writer:
        """What writes an answer as server-sent events."""
        return _ChatWriter(call)

    def error(self, error: GatewayError) -> dict[str, Json]:
        """The body of an error."""
        return openai_error(error)


class _ChatWriter(Writer):
    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        self._head = _head(self.completion_id, self.call, "chat.completion.chunk")
        yield self._chunk({"role": "assistant", "content": ""})

    def piece(self, kind: str, text: str) -> Iterator[bytes]:
        yield self._chunk({"content" if kind == "content" else "reasoning_content": text})

    def close(self, found: Completion) -> Iterator[bytes]:
        for i, one in enumerate(written(found.message).get("tool_calls", ())):
            yield self._chunk({"tool_calls": [{"index": i, **one}]})
        logprobs = {"logprobs": _logprobs(found)} if self.call.logprobs else {}
        yield self._chunk({}, str(found.finish), **logprobs)
        if self.call.usage_in_stream:
            yield event({**self._head, "choices": [], "usage": usage(found)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, Json], finish: str | None = None, **more: object) -> bytes:
        return event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]})


def _head(completion_id: str, call: Call, kind: str) -> dict[str, Json]:
    return {"id": f"chatcmpl-{completion_id}", "object": kind, "created": int(time.time()), "model": call.model}


def openai_error(error: GatewayError) -> dict[str, Json]:
    """The body of an error, as both of OpenAI's APIs have it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def message_of(item: Json, index: int) -> Message:
    """A message of the API in our form. Raises GatewayError."""
    where = f"messages.{index}"
    one = mapping(item, where)
    given = one.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise GatewayError(f"{where}.role: {shown(given)} is none of {', '.join(_ROLES)}")
    read = content_of if role in ("user", "tool") else text_of
    message: Message = {"role": role, "content": read(one.get("content"), f"{where}.content")}
    if role == "tool":
        message["tool_call_id"] = str(one.get("tool_call_id", ""))
        if isinstance(one.get("name"), str):
            message["name"] = one["name"]
    if role == "assistant" and one.get("tool_calls"):
        calls = array(one["tool_calls"], f"{where}.tool_calls")
        message["tool_calls"] = [_call_of(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]
    elif role == "assistant" and one.get("function_call"):
        call = mapping(one["function_call"], f"{where}.function_call")
        message["tool_calls"] = [tool_call("", call.get("name"), call.get("arguments"), f"{where}.function_call")]
    if role == "assistant" and one.get("audio"):
        raise GatewayError(f"{where}.audio: the model reads text; send the transcript as content")
    return message


def _call_of(given: Json, where: str) -> Json:
    one = mapping(given, where)
    function = mapping(one.get("function"), f"{where}.function")
    return tool_call(str(one.get("id", "")), function.get("name"), function.get("arguments"), where)


def tool_call(name_id: str, name: Json, arguments: Json, where: str) -> Json:
    """A call of a tool in our form: its arguments parsed where they are a JSON object. Its name may be empty: a
    model may write that."""
    if not isinstance(name, str):
        raise GatewayError(f"{where}: a call has no name")
    if isinstance(arguments, dict) and set(arguments) == {UNREADABLE}:
        arguments = arguments[UNREADABLE]
    if isinstance(arguments, str):
        check_shape(arguments.encode("utf-8", "surrogatepass"), where)
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {"type": "function", "id": name_id, "function": {"name": name, "arguments": arguments or {}}}


def text_of(content: Json, where: str) -> str:
    """A content as text: of parts, their texts one after the other. Raises GatewayError for other parts."""
    found = content_of(content, where)
    if not isinstance(found, str):
        raise GatewayError(f"{where}: images are served in messages of users and of tools alone")
    return found


def content_of(content: object, where: str) -> Content:
    """A content of either of OpenAI's APIs; see `joined`. Raises GatewayError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = enumerate(array(content, where))
    return joined(part_of(mapping(part, f"{where}.{i}"), f"{where}.{i}") for i, part in parts)


def joined(parts: Iterable[str | dict[str, Json]]) -> Content:
    """A content of texts and images in their order: one text where there is no image."""
    found: list[dict[str, Json]] = []
    for part in parts:
        if not isinstance(part, str):
            found.append(part)
        elif found and found[-1]["type"] == "text":
            found[-1]["text"] += part
        else:
            found.append({"type": "text", "text": part})
    if any(part["type"] != "text" for part in found):
        return found
    return str(found[0]["text"]) if found else ""


def part_of(part: Mapping[str, Json], where: str) -> str | dict[str, Json]:
    """A part of a content: a text, or an image in our form. Raises GatewayError for other parts."""
    kind = part.get("type")
    if kind in ("image_url", "input_image"):
        given = part.get("image_url")
        return image_part(given.get("url") if isinstance(given, dict) else given, where)
    text = part.get("text", part.get("refusal"))
    if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
        raise GatewayError(f"{where}: a part of type {shown(kind)} is not served; the model reads text and images")
    return text


def image_part(url: object, where: str) -> dict[str, Json]:
    """An image in our form. Raises GatewayError where it does not come with the request."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise GatewayError(f"{where}: an image must come as base64 within the request (data:image/png;base64,...)")
    return {"type": "image", "image": url}


def tools_of(
    body: Mapping[str, Json], choice: Json, parts: Callable[[Mapping[str, Json], str], tuple[Json, Json, Json]]
) -> tuple[dict[str, Json], ...]:
    """The tools that are offered. choice: of the body. parts: returns name, description and parameters of a tool
    and its place. Raises GatewayError."""
    tools = []
    for i, given in enumerate(array(body.get("tools") or (), "tools")):
        tools.append(tool_schema(*parts(mapping(given, f"tools.{i}"), f"tools.{i}"), i))
    return tuple(tools)


def _chosen(choice: Mapping[str, Json]) -> tuple[Json]:
    if choice.get("type") != "function":
        raise GatewayError(f"tool_choice: a choice of type {shown(choice.get('type'))} is not served")
    return (mapping(choice.get("function"), "tool_choice.function").get("name"),)


def must_call(choice: Json, tools: Sequence[dict[str, Json]]) -> tuple[str, ...]:
    """Of which tools one must be called. choice: the word of the API, or the name of one tool in a tuple. Raises
    GatewayError."""
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        if not names:
            raise GatewayError("tool_choice: a call is required, but no tools are offered")
        return names
    if not isinstance(choice, tuple):
        raise GatewayError(f"tool_choice: {shown(choice)} is none of auto, none, required and a tool")
    if choice[0] not in names:
        raise GatewayError(f"tool_choice: the tool {shown(choice[0])} is not offered")
    return choice


def schema_of(form: Mapping[str, Json], where: str) -> str | None:
    """The schema of an answer, as JSON text; None for text. form: its `type` and `schema`. Raises
    GatewayError."""
    match form.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return '{"type": "object"}'
        case "json_schema" if isinstance(form.get("schema"), dict):
            return encode(form["schema"])
        case "json_schema":
            raise GatewayError(f"{where}: its schema is no object")
        case kind:
            raise GatewayError(f"{where}: the type {shown(kind)} is none of text, json_object, json_schema")


def _parts(tool: Mapping[str, Json], where: str) -> tuple[Json, Json, Json]:
    function = mapping(tool.get("function"), f"{where}.function")
    return function.get("name"), function.get("description"), function.get("parameters")


def tool_schema(name: Json, description: Json, parameters: Json, index: int) -> dict[str, Json]:
    """A tool in the form of prompts."""
    if not isinstance(name, str) or not name:
        raise GatewayError(f"tools.{index}: a tool has no name")
    shape = dict(mapping(parameters, f"tools.{index}.parameters")) or {"type": "object", "properties": {}}
    described = description if isinstance(description, str) else ""
    return {"type": "function", "function": {"name": name, "description": described, "parameters": shape}}


def written(message: Message) -> dict[str, Json]:
    """An assistant's message as the API has it: arguments as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    found: dict[str, Json] = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    if message.get("reasoning_content"):
        found["reasoning_content"] = message["reasoning_content"]
    return {**found, "tool_calls": calls} if calls else found


def arguments_text(arguments: Json) -> str:
    """The arguments of a call as JSON text; what cannot be read as it was written."""
    return arguments if isinstance(arguments, str) else encode(arguments)


def event(data: Mapping[str, Json], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {encode(data)}\n\n".encode("utf-8", "replace")


def usage(found: Completion) -> dict[str, int]:
    """The token counts of an answer."""
    prompt, answer = found.prompt_tokens, found.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _logprobs(found: Completion) -> dict[str, Json]:
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
        for text, value in found.tokens
    ]
    return {"content": content, "refusal": None}


def _names_in(messages: Sequence[Mapping[str, Json]]) -> tuple[str, ...]:
    """The name of what is ignored in messages: who of several users or agents speaks."""
    return ("messages[].name",) if any(one.get("name") and one["role"] in _SPEAKERS for one in messages) else ()


def mapping(value: object, where: str) -> Mapping[str, Json]:
    """An object, {} for none. Raises GatewayError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise GatewayError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def array(value: object, where: str) -> Sequence[Json]:
    """An array. Raises GatewayError."""
    if not isinstance(value, list | tuple):
        raise GatewayError(f"{where}: expected an array, got {type(value).__name__}")
    return value


STOPS, STOP_CHARACTERS = 32, 1000
"""Most strings that may end an answer, and most characters of each."""


def strings(value: Json, where: str) -> tuple[str, ...]:
    """The strings that end an answer: of one, of an array, of nothing. Raises GatewayError."""
    given = (value,) if isinstance(value, str) else array(value or (), where)
    if len(given) > STOPS:
        raise GatewayError(f"{where}: {len(given)} strings were given, at most {STOPS} are served")
    for one in given:
        if not isinstance(one, str) or not 0 < len(one) <= STOP_CHARACTERS:
            raise GatewayError(f"{where}: expected texts of 1 to {STOP_CHARACTERS} characters")
    return tuple(dict.fromkeys(given))


def flag(value: Json, where: str, default: bool = False) -> bool:
    """True or false, `default` for null. Raises GatewayError: what is neither may have been meant as the other one."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise GatewayError(f"{where}: expected true or false, got {shown(value)}")
    return value


def usage_asked(body: Mapping[str, Json]) -> bool:
    """Whether a stream ends with the token counts. Raises GatewayError."""
    return flag(mapping(body.get("stream_options"), "stream_options").get("include_usage"), "stream_options")


def _first(body: Mapping[str, Json], *names: str) -> Json:
    """The first of these fields that asks for something."""
    return next((body[name] for name in names if body.get(name) is not None), None)


def count(value: Json, where: str) -> int | None:
    """A positive whole number, or None. Raises GatewayError."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise GatewayError(f"{where}: expected a whole number above 0, got {shown(value)}")
    return value
