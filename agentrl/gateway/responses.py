"""The dialect of OpenAI's Responses API."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentrl.gateway.call import Call, Completion, Finish, GatewayError
from agentrl.gateway.chat_completions import (
    ASKED,
    arguments_text,
    array,
    count,
    event,
    mapping,
    openai_error,
    pieces,
    refuse,
    text_of,
    tool_call,
    tool_schema,
)
from agentrl.plugins.types import Json, Message

Previous = Callable[[str], tuple[Message, ...]]


class Responses:
    """`POST /v1/responses`. previous: returns the conversation that ends with a response that was given before."""

    history = "input"

    def __init__(self, previous: Previous) -> None:
        self._previous = previous

    def parse(self, body: Mapping[str, Any]) -> Call:
        """Return the call. Raises GatewayError for what cannot be served."""
        refuse(body, {"background": None, "conversation": None, "prompt": None, "top_logprobs": None})
        form = mapping(mapping(body.get("text"), "text").get("format"), "text.format")
        if form.get("type", "text") != "text":
            raise GatewayError("text.format: only text is served")
        messages: list[Message] = []
        if isinstance(body.get("previous_response_id"), str):
            messages += self._previous(body["previous_response_id"].removeprefix("resp_"))
        if body.get("instructions"):
            messages = [m for m in messages if m["role"] != "system"]
            messages.insert(0, {"role": "system", "content": text_of(body["instructions"], "instructions")})
        return Call(
            messages=(*messages, *_input(body.get("input"))),
            tools=_tools(body),
            max_tokens=count(body.get("max_output_tokens"), "max_output_tokens"),
            stream=bool(body.get("stream")),
            model=str(body.get("model", "")),
            asked={key: body[key] for key in (*ASKED, "reasoning") if body.get(key) is not None},
        )

    def render(self, found: Completion, call: Call) -> dict[str, Any]:
        """Return the answer as an object."""
        cut = found.finish is Finish.LENGTH
        return {
            "id": f"resp_{found.id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": None,
            "metadata": {},
            "model": call.model,
            "output": _output(found),
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [{**tool["function"], "type": "function", "strict": False} for tool in call.tools],
            "top_p": None,
            "usage": {
                "input_tokens": found.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": found.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": found.prompt_tokens + found.completion_tokens,
            },
        }

    def events(self, found: Completion, call: Call) -> Iterator[bytes]:
        """Yield the answer as server-sent events."""
        whole = self.render(found, call)
        opened = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        listed: list[tuple[str, dict[str, Any]]] = [("created", {"response": opened})]
        listed.append(("in_progress", {"response": opened}))
        for index, item in enumerate(whole["output"]):
            listed += _item_events(index, item)
        ended = "incomplete" if found.finish is Finish.LENGTH else "completed"
        listed.append((ended, {"response": whole}))
        for number, (kind, data) in enumerate(listed):
            name = f"response.{kind}"
            yield event({"type": name, "sequence_number": number, **data}, name)

    def error(self, error: GatewayError) -> dict[str, Any]:
        """Return the body of an error."""
        return openai_error(error)


def _input(given: Any) -> Iterator[Message]:
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    waiting: Message | None = None  # an assistant's message, as long as calls of it may follow
    for i, one in enumerate(array(given or (), "input")):
        where, item = f"input.{i}", mapping(one, f"input.{i}")
        kind = item.get("type", "message")
        if kind in ("reasoning", "item_reference"):
            continue
        if kind == "function_call":
            waiting = waiting or {"role": "assistant", "content": ""}
            call = tool_call(str(item.get("call_id", "")), item.get("name"), item.get("arguments"), where)
            waiting = {**waiting, "tool_calls": [*waiting.get("tool_calls", ()), call]}
            continue
        if kind == "message" and item.get("role") == "assistant":
            if waiting is not None:
                yield waiting
            waiting = {"role": "assistant", "content": text_of(item.get("content"), f"{where}.content")}
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        if kind == "function_call_output":
            output = text_of(item.get("output"), f"{where}.output")
            yield {"role": "tool", "content": output, "tool_call_id": str(item.get("call_id", ""))}
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            role = "user" if item["role"] == "user" else "system"
            yield {"role": role, "content": text_of(item.get("content"), f"{where}.content")}  # type: ignore[typeddict-item]
        else:
            raise GatewayError(f"{where}: an item of type {kind!r} and role {item.get('role')!r} is not served")
    if waiting is not None:
        yield waiting


def _tools(body: Mapping[str, Any]) -> tuple[dict[str, Json], ...]:
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise GatewayError("tool_choice: only auto and none are served; the model chooses")
    tools = []
    for i, given in enumerate(array(body.get("tools") or (), "tools")):
        tool = mapping(given, f"tools.{i}")
        if tool.get("type") != "function":
            raise GatewayError(f"tools.{i}: a tool of type {tool.get('type')!r} is not served; offer functions")
        tools.append(tool_schema(tool.get("name"), tool.get("description"), tool.get("parameters"), i))
    return () if choice == "none" else tuple(tools)


def _output(found: Completion) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    message = found.message
    if message.get("reasoning_content"):
        thought = {"type": "summary_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "id": f"rs_{found.id}", "summary": [thought]})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        text = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": []}
        state = {"id": f"msg_{found.id}", "status": "completed", "role": "assistant"}
        items.append({"type": "message", **state, "content": [text]})
    for i, call in enumerate(calls):
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{found.id}_{i}",
                "call_id": call.get("id", ""),
                "name": function["name"],
                "arguments": arguments_text(function["arguments"]),
                "status": "completed",
            }
        )
    return items


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    place = {"output_index": index}
    empty: dict[str, dict[str, Any]] = {
        "message": {"content": [], "status": "in_progress"},
        "function_call": {"arguments": ""},
    }
    yield "output_item.added", {**place, "item": {**item, **empty.get(item["type"], {})}}
    inside = {**place, "item_id": item["id"]}
    if item["type"] == "message":
        part = item["content"][0]
        at = {**inside, "content_index": 0}
        yield "content_part.added", {**at, "part": {**part, "text": ""}}
        for piece in pieces(part["text"]):
            yield "output_text.delta", {**at, "delta": piece, "logprobs": []}
        yield "output_text.done", {**at, "text": part["text"], "logprobs": []}
        yield "content_part.done", {**at, "part": part}
    elif item["type"] == "function_call":
        yield "function_call_arguments.delta", {**inside, "delta": item["arguments"]}
        yield "function_call_arguments.done", {**inside, "name": item["name"], "arguments": item["arguments"]}
    yield "output_item.done", {**place, "item": item}
