"""The dialect of Anthropic's Messages API."""

from collections.abc import Iterator, Mapping, Sequence

from agentrl.gateway.call import Call, Completion, Finish, GatewayError
from agentrl.gateway.chat_completions import (
    UNREADABLE,
    array,
    count,
    encode,
    event,
    flag,
    image_part,
    joined,
    mapping,
    must_call,
    part_of,
    schema_of,
    strings,
    text_of,
    tool_call,
    tools_of,
)
from agentrl.gateway.fields import ANTHROPIC_MESSAGES, asked_of, check_fields, check_tools, shown
from agentrl.gateway.stream import Writer
from agentrl.plugins.types import Content, Json, Message

_STOP = {Finish.STOP: "end_turn", Finish.LENGTH: "max_tokens", Finish.TOOLS: "tool_use"}
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip


class AnthropicMessages:
    """`POST /v1/messages`."""

    history = "messages"
    instructions = "system"

    def parse(self, body: Mapping[str, Json]) -> Call:
        """The call. Raises GatewayError for what cannot be served."""
        ignored = check_fields(body, ANTHROPIC_MESSAGES)
        choice = mapping(body.get("tool_choice"), "tool_choice")
        tools = tools_of(body, choice.get("type"), _parts)
        form = mapping(mapping(body.get("output_config"), "output_config").get("format"), "output_config.format")
        messages: list[Message] = []
        if body.get("system"):
            messages.append({"role": "system", "content": text_of(body["system"], "system")})
        for i, one in enumerate(array(body.get("messages"), "messages")):
            messages += _messages(mapping(one, f"messages.{i}"), f"messages.{i}")
        return Call(
            messages=tuple(messages),
            tools=tools,
            may_call=choice.get("type") != "none",
            schema=schema_of(form, "output_config.format"),
            must_call=must_call(_chosen(choice), tools),
            max_tokens=count(body.get("max_tokens"), "max_tokens"),
            stream=flag(body.get("stream"), "stream"),
            stop=strings(body.get("stop_sequences"), "stop_sequences"),
            model=str(body.get("model", "")),
            asked=asked_of(body, ANTHROPIC_MESSAGES),
            one_call=flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use"),
            ignored=(*ignored, *check_tools(body.get("tools"), ANTHROPIC_MESSAGES), *_errors_in(body["messages"])),
        )

    def render(self, found: Completion, call: Call) -> dict[str, Json]:
        """The answer as an object."""
        usage = {"input_tokens": found.prompt_tokens, "output_tokens": found.completion_tokens}
        return _message(found.id, call, list(_blocks(found)), _ended(found), usage)

    def writer(self, call: Call) -> Writer:
        """What writes an answer as server-sent events."""
        return _MessageWriter(call)

    def error(self, error: GatewayError) -> dict[str, Json]:
        """The body of an error."""
        kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


def _event(name: str, data: Mapping[str, Json]) -> bytes:
    return event({"type": name, **data}, name)


def _messages(one: Mapping[str, Json], where: str) -> Iterator[Message]:
    """Yield what one message of the API holds: results of tools are messages of their own here."""
    role, content = one.get("role"), one.get("content")
    if role == "system":  # between the others, as Claude Code sends them
        yield {"role": "system", "content": text_of(content, f"{where}.content")}
        return
    if role not in ("user", "assistant"):
        raise GatewayError(f"{where}.role: {shown(role)} is none of user, assistant and system")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts: list[str | dict[str, Json]] = []
    calls: list[Json] = []
    for i, part in enumerate(array(content, f"{where}.content")):
        at = f"{where}.content.{i}"
        block = mapping(part, at)
        match block.get("type"):
            case "text":
                parts.append(str(block.get("text", "")))
            case "image" if role == "user":
                parts.append(_image(block, at))
            case "thinking" | "redacted_thinking" if role == "assistant":
                continue
            case "tool_use" if role == "assistant":
                given = mapping(block.get("input"), f"{at}.input")
                calls.append(tool_call(str(block.get("id", "")), block.get("name"), given, at))
            case "tool_result" if role == "user":
                result = _result(block.get("content"), f"{at}.content")
                yield {"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id", ""))}
            case kind:
                raise GatewayError(f"{at}: a block of type {shown(kind)} is not served in a message of {role}")
    if role == "assistant":
        message: Message = {"role": "assistant", "content": joined(parts)}
        if calls:
            message["tool_calls"] = calls
        yield message
    elif parts:
        yield {"role": "user", "content": joined(parts)}


def _errors_in(messages: Sequence[Mapping[str, Json]]) -> tuple[str, ...]:
    """The name of what is ignored in messages: that a tool's result is an error, beside what it says."""
    blocks = (block for one in messages if isinstance(one["content"], list) for block in one["content"])
    return ("messages[].is_error",) if any(block.get("is_error") for block in blocks) else ()


def _result(content: object, where: str) -> Content:
    """What a tool said: text, or texts and images."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str | dict[str, Json]] = []
    for i, one in enumerate(array(content, where)):
        block = mapping(one, f"{where}.{i}")
        read = _image if block.get("type") == "image" else part_of
        parts.append(read(block, f"{where}.{i}"))
    return joined(parts)


def _image(block: Mapping[str, Json], where: str) -> dict[str, Json]:
    source = mapping(block.get("source"), f"{where}.source")
    data = source.get("data") if source.get("type") == "base64" else None
    return image_part(f"data:{source.get('media_type')};base64,{data}" if isinstance(data, str) else None, where)


def _chosen(choice: Mapping[str, Json]) -> Json:
    """A choice as `must_call` takes it."""
    kind = choice.get("type")
    return "required" if kind == "any" else (choice.get("name"),) if kind == "tool" else kind


def _parts(tool: Mapping[str, Json], where: str) -> tuple[Json, Json, Json]:
    if tool.get("type", "custom") != "custom":
        raise GatewayError(f"{where}: a tool of type {shown(tool.get('type'))} is not served; offer functions")
    return tool.get("name"), tool.get("description"), tool.get("input_schema")


def _message(
    completion_id: str, call: Call, content: list[Json], ended: Mapping[str, Json], usage: Mapping[str, int]
) -> dict[str, Json]:
    return {
        "id": f"msg_{completion_id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        **ended,
        "usage": usage,
    }


_RUNNING = {"stop_reason": None, "stop_sequence": None}


def _ended(found: Completion) -> dict[str, Json]:
    """Why the answer ended, and at which string."""
    if found.stop is not None and found.finish is Finish.STOP:
        return {"stop_reason": "stop_sequence", "stop_sequence": found.stop}
    return {"stop_reason": _STOP[found.finish], "stop_sequence": None}


def _blocks(found: Completion) -> Iterator[dict[str, Json]]:
    message = found.message
    if message.get("reasoning_content"):
        yield {**_EMPTY["reasoning"], "thinking": message["reasoning_content"]}
    if message["content"] or not message.get("tool_calls"):
        yield {**_EMPTY["content"], "text": message["content"] or ""}
    yield from _tool_uses(found)


def _tool_uses(found: Completion) -> Iterator[dict[str, Json]]:
    for call in found.message.get("tool_calls", ()):
        given = call["function"]["arguments"]
        arguments = given if isinstance(given, dict) else {UNREADABLE: given}
        yield {"type": "tool_use", "id": call.get("id", ""), "name": call["function"]["name"], "input": arguments}


_EMPTY = {"content": {"type": "text", "text": ""}, "reasoning": {"type": "thinking", "thinking": "", "signature": ""}}
_DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}


class _MessageWriter(Writer):
    """One content block after the other; what is said and what is thought are blocks of their own."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._blocks = 0
        self._open = ""  # the kind of the last block, while it is open
        self._texts = False

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        yield _event("message_start", {"message": _message(self.completion_id, self.call, [], _RUNNING, usage)})

    def piece(self, kind: str, text: str) -> Iterator[bytes]:
        if kind != self._open:
            yield from self._stop()
            yield from self._start(kind, _EMPTY[kind])
        name, key = _DELTAS[kind]
        yield self._delta({"type": name, key: text})

    def close(self, found: Completion) -> Iterator[bytes]:
        if not self._texts and not found.message.get("tool_calls"):
            yield from self._stop()
            yield from self._start("content", _EMPTY["content"])
        yield from self._stop()
        for block in _tool_uses(found):
            yield from self._start("call", {**block, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": encode(block["input"])})
            yield from self._stop()
        yield _event("message_delta", {"delta": _ended(found), "usage": {"output_tokens": found.completion_tokens}})
        yield _event("message_stop", {})

    def _start(self, kind: str, block: Mapping[str, Json]) -> Iterator[bytes]:
        self._open, self._texts = kind, self._texts or kind == "content"
        yield _event("content_block_start", {"index": self._blocks, "content_block": block})

    def _delta(self, delta: Mapping[str, Json]) -> bytes:
        return _event("content_block_delta", {"index": self._blocks, "delta": delta})

    def _stop(self) -> Iterator[bytes]:
        if self._open:
            yield _event("content_block_stop", {"index": self._blocks})
            self._open, self._blocks = "", self._blocks + 1
