"""The dialect of OpenAI's Responses API."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from agentrl.gateway.bounds import characters_in
from agentrl.gateway.call import Call, Completion, Finish, GatewayError
from agentrl.gateway.chat_completions import (
    arguments_text,
    array,
    content_of,
    count,
    event,
    flag,
    mapping,
    must_call,
    openai_error,
    schema_of,
    text_of,
    tool_call,
    tools_of,
)
from agentrl.gateway.fields import RESPONSES, asked_of, check_fields, check_tools, shown
from agentrl.gateway.stream import Writer
from agentrl.plugins.types import Json, Message

_ITEM = re.compile(r"(?P<kind>msg|rs|fc)_(?P<id>[A-Za-z0-9-]{1,200})(_(?P<index>\d{1,4}))?", re.ASCII)
Previous = Callable[[str], tuple[Message, ...]]


class Responses:
    """`POST /v1/responses`. previous: returns the conversation that ends with a response that was given before."""

    history = "input"
    instructions = "instructions"

    def __init__(self, previous: Previous) -> None:
        self._previous = previous
        self._named = 0  # characters of what the call names

    def parse(self, body: Mapping[str, Json]) -> Call:
        """The call. Raises GatewayError for what cannot be served."""
        ignored = check_fields(body, RESPONSES)
        given, namespaces = _without_groups(body.get("tools"))
        tools, choice = tools_of({"tools": given}, body.get("tool_choice"), _parts), body.get("tool_choice")
        form = mapping(mapping(body.get("text"), "text").get("format"), "text.format")
        messages: list[Message] = []
        if (previous := body.get("previous_response_id")) is not None:
            messages += self._previous(text_of(previous, "previous_response_id").removeprefix("resp_"))
            self._named += characters_in(messages)
        if body.get("instructions"):
            messages = [m for m in messages if m["role"] != "system"]
            messages.insert(0, {"role": "system", "content": text_of(body["instructions"], "instructions")})
        messages += self._input(body.get("input"))
        return Call(
            messages=tuple(messages),
            named=self._named,
            tools=tools,
            namespaces=namespaces,
            may_call=choice != "none",
            schema=schema_of(form, "text.format"),
            must_call=must_call(_chosen(choice) if isinstance(choice, dict) else choice, tools),
            max_tokens=count(body.get("max_output_tokens"), "max_output_tokens"),
            stream=flag(body.get("stream"), "stream"),
            model=str(body.get("model", "")),
            asked=asked_of(body, RESPONSES),
            one_call=not flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True),
            ignored=(*ignored, *check_tools(given, RESPONSES)),
        )

    def _input(self, given: Json) -> Iterator[Message]:
        if isinstance(given, str):
            yield {"role": "user", "content": given}
            return
        items: list[tuple[str, Mapping[str, Json]]] = []
        for i, one in enumerate(array(given or (), "input")):
            where = f"input.{i}"
            item = mapping(one, where)
            if item.get("type") != "item_reference":
                items.append((where, item))
            elif (named := self._referred(item.get("id"), where)) is not None:
                self._named += characters_in(named)
                items.append((where, named))
        yield from _messages(items)

    def _referred(self, name: Json, where: str) -> Mapping[str, Json] | None:
        """The item of an earlier answer that a reference names; None for one that says nothing by itself: a
        thought, or a further part of a message. Raises GatewayError."""
        unknown = GatewayError(f"{where}: the item {shown(name)} is unknown here; send the item itself")
        match = _ITEM.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise unknown
        try:
            answer = self._previous(match["id"])[-1]
        except GatewayError:
            raise unknown from None
        kind, index = match["kind"], int(match["index"] or 0)
        calls = answer.get("tool_calls", ())
        if answer["role"] != "assistant" or (kind == "fc" and index >= len(calls)):
            raise unknown
        if kind == "fc":
            return {"type": "function_call", "call_id": calls[index].get("id", ""), **calls[index]["function"]}
        if kind == "rs" or index:
            return None
        return {"type": "message", "role": "assistant", "content": answer["content"]}

    def render(self, found: Completion, call: Call) -> dict[str, Json]:
        """The answer as an object."""
        return _ended(found, call, int(time.time()), _output(found, call.namespaces))

    def writer(self, call: Call) -> Writer:
        """What writes an answer as server-sent events."""
        return _ResponseWriter(call)

    def error(self, error: GatewayError) -> dict[str, Json]:
        """The body of an error."""
        return openai_error(error)


def _messages(items: Iterable[tuple[str, Mapping[str, Json]]]) -> Iterator[Message]:
    """Yield the messages of items. items: each after its place."""
    waiting: Message | None = None  # an assistant's message, as long as calls of it may follow
    for where, item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
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
            output = content_of(item.get("output"), f"{where}.output")
            yield {"role": "tool", "content": output, "tool_call_id": str(item.get("call_id", ""))}
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            role = "user" if item["role"] == "user" else "system"
            read = content_of if role == "user" else text_of
            yield {"role": role, "content": read(item.get("content"), f"{where}.content")}  # type: ignore[typeddict-item]
        else:
            raise GatewayError(f"{where}: an item of type {shown(kind)}, role {shown(item.get('role'))} is not served")
    if waiting is not None:
        yield waiting


def _without_groups(tools: Json) -> tuple[list[Json], dict[str, str]]:
    """Tools with those of each `namespace` in its place, and the namespaces of these by their names, which the model
    calls them by. Raises GatewayError for a name that is not alone."""
    flat: list[Json] = []
    namespaces: dict[str, str] = {}
    for i, one in enumerate(array(tools or (), "tools")):
        group = mapping(one, f"tools.{i}")
        if group.get("type") != "namespace":
            flat.append(group)
            continue
        for j, tool in enumerate(array(group.get("tools") or (), f"tools.{i}.tools")):
            flat.append(mapping(tool, f"tools.{i}.tools.{j}"))
            namespaces[str(flat[-1].get("name"))] = str(group.get("name", ""))
    counts = Counter(str(tool.get("name")) for tool in flat)
    if twice := sorted(name for name in namespaces if counts[name] > 1):
        raise GatewayError(f"tools: {shown(twice[0])} of a namespace is offered twice; give each a name of its own")
    return flat, namespaces


def _chosen(choice: Mapping[str, Json]) -> tuple[Json]:
    if choice.get("type") != "function":
        raise GatewayError(f"tool_choice: a choice of type {shown(choice.get('type'))} is not served")
    return (choice.get("name"),)


def _parts(tool: Mapping[str, Json], where: str) -> tuple[Json, Json, Json]:
    if tool.get("type") != "function":
        raise GatewayError(f"{where}: a tool of type {shown(tool.get('type'))} is not served; offer functions")
    return tool.get("name"), tool.get("description"), tool.get("parameters")


def _response(completion_id: str, call: Call, created: int, **more: Json) -> dict[str, Json]:
    return {
        "id": f"resp_{completion_id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "incomplete_details": None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": call.model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [{**tool["function"], "type": "function", "strict": False} for tool in call.tools],
        "top_p": None,
        "usage": None,
        **more,
    }


def _ended(found: Completion, call: Call, created: int, output: list[dict[str, Json]]) -> dict[str, Json]:
    cut = found.finish is Finish.LENGTH
    usage = {
        "input_tokens": found.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": found.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": found.prompt_tokens + found.completion_tokens,
    }
    state = {"status": "incomplete" if cut else "completed", "output": output, "usage": usage}
    details = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
    return _response(found.id, call, created, **state, **details)


def _output(found: Completion, namespaces: Mapping[str, str]) -> list[dict[str, Json]]:
    message, items = found.message, []
    if message.get("reasoning_content"):
        items.append(_reasoning(f"rs_{found.id}", message["reasoning_content"]))
    if message["content"] or not message.get("tool_calls"):
        items.append(_message(f"msg_{found.id}", str(message["content"] or "")))
    return [*items, *_calls(found, namespaces)]


def _reasoning(name: str, text: str) -> dict[str, Json]:
    return {"type": "reasoning", "id": name, "summary": [{"type": "summary_text", "text": text}]}


def _message(name: str, text: str) -> dict[str, Json]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": name, "status": "completed", "role": "assistant", "content": [part]}


def _calls(found: Completion, namespaces: Mapping[str, str]) -> Iterator[dict[str, Json]]:
    for i, call in enumerate(found.message.get("tool_calls", ())):
        function = call["function"]
        group = namespaces.get(function["name"])
        yield {
            **({} if group is None else {"namespace": group}),
            "type": "function_call",
            "id": f"fc_{found.id}_{i}",
            "call_id": call.get("id", ""),
            "name": function["name"],
            "arguments": arguments_text(function["arguments"]),
            "status": "completed",
        }


class _ResponseWriter(Writer):
    """One item after the other; what is said and what is thought are items of their own."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._created, self._number = int(time.time()), 0
        self._items: list[dict[str, Json]] = []  # those that are whole
        self._open = ""  # the kind of the item that is open
        self._text: list[str] = []  # its text

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        opened = {"response": _response(self.completion_id, self.call, self._created)}
        yield self._event("created", opened)
        yield self._event("in_progress", opened)

    def piece(self, kind: str, text: str) -> Iterator[bytes]:
        if kind != self._open:
            yield from self._stop()
            yield from self._start(kind)
        self._text.append(text)
        if kind == "content":
            yield self._event("output_text.delta", {**self._place(), "delta": text, "logprobs": []})
        else:
            yield self._event("reasoning_summary_text.delta", {**self._place(), "delta": text})

    def close(self, found: Completion) -> Iterator[bytes]:
        texts = any(item["type"] == "message" for item in self._items) or self._open == "content"
        if not texts and not found.message.get("tool_calls"):
            yield from self._stop()
            yield from self._start("content")
        yield from self._stop()
        for item in _calls(found, self.call.namespaces):
            yield from self._call(item)
        whole = _ended(found, self.call, self._created, self._items)
        yield self._event(whole["status"], {"response": whole})

    def _item(self, text: str) -> dict[str, Json]:
        """The item that is open, with `text`. Its id is that of an answer which is sent whole, where it is the
        first of its kind."""
        kind = "message" if self._open == "content" else "reasoning"
        count = sum(item["type"] == kind for item in self._items)
        name = f"{self.completion_id}_{count}" if count else self.completion_id
        return _message(f"msg_{name}", text) if kind == "message" else _reasoning(f"rs_{name}", text)

    def _place(self) -> dict[str, Json]:
        index = "content_index" if self._open == "content" else "summary_index"
        return {"output_index": len(self._items), "item_id": self._item("")["id"], index: 0}

    def _start(self, kind: str) -> Iterator[bytes]:
        self._open, self._text = kind, []
        item = self._item("")
        empty = {"content": [], "status": "in_progress"} if kind == "content" else {"summary": []}
        yield self._event("output_item.added", {"output_index": len(self._items), "item": {**item, **empty}})
        part, name = _part(item)
        yield self._event(f"{name}.added", {**self._place(), "part": part})

    def _stop(self) -> Iterator[bytes]:
        if not self._open:
            return
        text, place = "".join(self._text), self._place()
        item = self._item(text)
        part, name = _part(item)
        if self._open == "content":
            yield self._event("output_text.done", {**place, "text": text, "logprobs": []})
        else:
            yield self._event("reasoning_summary_text.done", {**place, "text": text})
        yield self._event(f"{name}.done", {**place, "part": part})
        yield self._done(item)
        self._open = ""

    def _call(self, item: dict[str, Json]) -> Iterator[bytes]:
        index, arguments = len(self._items), item["arguments"]
        yield self._event("output_item.added", {"output_index": index, "item": {**item, "arguments": ""}})
        inside = {"output_index": index, "item_id": item["id"]}
        yield self._event("function_call_arguments.delta", {**inside, "delta": arguments})
        yield self._event("function_call_arguments.done", {**inside, "name": item["name"], "arguments": arguments})
        yield self._done(item)

    def _done(self, item: dict[str, Json]) -> bytes:
        self._items.append(item)
        return self._event("output_item.done", {"output_index": len(self._items) - 1, "item": item})

    def _event(self, kind: str, data: Mapping[str, Json]) -> bytes:
        name, number = f"response.{kind}", self._number
        self._number += 1
        return event({"type": name, "sequence_number": number, **data}, name)


def _part(item: Mapping[str, Json]) -> tuple[dict[str, Json], str]:
    """The only part of a message or a thought, and what its events are called."""
    if item["type"] == "message":
        return item["content"][0], "content_part"
    return item["summary"][0], "reasoning_summary_part"
