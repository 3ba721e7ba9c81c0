"""The dialect of Anthropic's Messages API."""

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.gateway.call import Call, Completion, Finish, GatewayError
from agentrl.gateway.chat_completions import (
    UNREADABLE,
    array,
    count,
    encode,
    event,
    mapping,
    pieces,
    text_of,
    tool_call,
    tool_schema,
)
from agentrl.plugins.types import Json, Message

_ASKED = ("temperature", "top_p", "top_k", "thinking")
_STOP = {Finish.STOP: "end_turn", Finish.LENGTH: "max_tokens", Finish.TOOLS: "tool_use"}
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class AnthropicMessages:
    """`POST /v1/messages`."""

    history = "messages"

    def parse(self, body: Mapping[str, Any]) -> Call:
        """Return the call. Raises GatewayError for what cannot be served."""
        if body.get("stop_sequences"):
            raise GatewayError("stop_sequences: not served here")
        messages: list[Message] = []
        if body.get("system"):
            messages.append({"role": "system", "content": text_of(body["system"], "system")})
        for i, one in enumerate(array(body.get("messages"), "messages")):
            messages += _messages(mapping(one, f"messages.{i}"), f"messages.{i}")
        return Call(
            messages=tuple(messages),
            tools=_tools(body),
            max_tokens=count(body.get("max_tokens"), "max_tokens"),
            stream=bool(body.get("stream")),
            model=str(body.get("model", "")),
            asked={key: body[key] for key in _ASKED if body.get(key) is not None},
        )

    def render(self, found: Completion, call: Call) -> dict[str, Any]:
        """Return the answer as an object."""
        return {
            "id": f"msg_{found.id}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": list(_blocks(found)),
            "stop_reason": _STOP[found.finish],
            "stop_sequence": None,
            "usage": {"input_tokens": found.prompt_tokens, "output_tokens": found.completion_tokens},
        }

    def events(self, found: Completion, call: Call) -> Iterator[bytes]:
        """Yield the answer as server-sent events."""
        whole = self.render(found, call)
        usage = whole["usage"]
        begun = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        yield _event("message_start", {"message": begun})
        for index, block in enumerate(whole["content"]):
            yield from _block_events(index, block)
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", {"delta": delta, "usage": {"output_tokens": usage["output_tokens"]}})
        yield _event("message_stop", {})

    def error(self, error: GatewayError) -> dict[str, Any]:
        """Return the body of an error."""
        kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return event({"type": name, **data}, name)


def _messages(one: Mapping[str, Any], where: str) -> Iterator[Message]:
    """Yield what one message of the API holds: results of tools are messages of their own here."""
    role, content = one.get("role"), one.get("content")
    if role not in ("user", "assistant"):
        raise GatewayError(f"{where}.role: {role!r} is neither user nor assistant")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts: list[str] = []
    calls: list[Any] = []
    for i, part in enumerate(array(content, f"{where}.content")):
        at = f"{where}.content.{i}"
        block = mapping(part, at)
        match block.get("type"):
            case "text":
                texts.append(str(block.get("text", "")))
            case "thinking" | "redacted_thinking" if role == "assistant":
                continue
            case "tool_use" if role == "assistant":
                given = mapping(block.get("input"), f"{at}.input")
                calls.append(tool_call(str(block.get("id", "")), block.get("name"), given, at))
            case "tool_result" if role == "user":
                result = text_of(block.get("content"), f"{at}.content")
                yield {"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id", ""))}
            case kind:
                raise GatewayError(f"{at}: a block of type {kind!r} is not served in a message of {role}")
    if role == "assistant":
        message: Message = {"role": "assistant", "content": "".join(texts)}
        if calls:
            message["tool_calls"] = calls
        yield message
    elif texts:
        yield {"role": "user", "content": "".join(texts)}


def _tools(body: Mapping[str, Any]) -> tuple[dict[str, Json], ...]:
    choice = mapping(body.get("tool_choice"), "tool_choice").get("type", "auto")
    if choice not in ("auto", "none"):
        raise GatewayError("tool_choice: only auto and none are served; the model chooses")
    tools = []
    for i, given in enumerate(array(body.get("tools") or (), "tools")):
        tool = mapping(given, f"tools.{i}")
        if tool.get("type", "custom") != "custom":
            raise GatewayError(f"tools.{i}: a tool of type {tool.get('type')!r} is not served; offer functions")
        tools.append(tool_schema(tool.get("name"), tool.get("description"), tool.get("input_schema"), i))
    return () if choice == "none" else tuple(tools)


def _blocks(found: Completion) -> Iterator[dict[str, Any]]:
    message = found.message
    calls = message.get("tool_calls", [])
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    if message["content"] or not calls:
        yield {"type": "text", "text": message["content"] or ""}
    for call in calls:
        given = call["function"]["arguments"]
        arguments = given if isinstance(given, dict) else {UNREADABLE: given}
        yield {"type": "tool_use", "id": call.get("id", ""), "name": call["function"]["name"], "input": arguments}


def _block_events(index: int, block: dict[str, Any]) -> Iterator[bytes]:
    place = {"index": index}
    match block["type"]:
        case "text":
            begun, kind, key, text = {**block, "text": ""}, "text_delta", "text", block["text"]
        case "thinking":
            begun, kind, key, text = {**block, "thinking": ""}, "thinking_delta", "thinking", block["thinking"]
        case _:
            begun, kind, key, text = {**block, "input": {}}, "input_json_delta", "partial_json", encode(block["input"])
    yield _event("content_block_start", {**place, "content_block": begun})
    for piece in pieces(text):
        yield _event("content_block_delta", {**place, "delta": {"type": kind, key: piece}})
    yield _event("content_block_stop", place)
