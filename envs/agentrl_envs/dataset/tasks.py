"""Convert rows to tasks: which columns hold the prompt, the answer and the arguments of tools.

A bad row raises an error that names it, and is never skipped. `<image>` and `<video>` in a prompt become content parts,
one for each image or video of the row, in their order.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from agentrl_tools.rewards.truth import field_of

from agentrl.data.rows import Row, Rows
from agentrl.errors import UserError, nearest
from agentrl.plugins.environment import LazyTasks
from agentrl.plugins.types import Message, Task, ToolKwargs

ANSWERS = ("reward_model.ground_truth", "ground_truth", "answer")
"""Where the answer is looked for when nobody says."""

CHECKED = 50_000
"""Rows of a split that are looked at before a run starts; those after them when they are drawn."""

_ROLES = ("system", "user", "assistant", "tool")
_HOOKS = tuple(field.name for field in fields(ToolKwargs))


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold what; dots lead into nested ones. answer: None where it is looked for in `ANSWERS`.

    row_tools: a task offers only the tools that its row names (column `tools`, else those of its tools_kwargs).
    """

    prompt: str
    """Column with the prompt."""
    answer: str | None
    system: str
    """System prompt for prompts that have none; empty for none."""
    images: str
    """Column with images."""
    videos: str
    """Column with videos."""
    row_tools: bool

    def truth(self, row: Row) -> Any:
        """Return the answer of a row; None where it has none."""
        for path in (self.answer,) if self.answer else ANSWERS:
            value = field_of(row, path)
            if value is not None:
                return value
        return None

    def messages(self, row: Row, where: str) -> list[Message]:
        """Return the opening, as chat messages. Raises UserError."""
        value = field_of(row, self.prompt)
        if value is None:
            at = "is empty" if self.prompt in row else f"is not there; the row has {', '.join(map(repr, row))}"
            raise UserError(f"{where}: field {self.prompt!r} (env.args.prompt) {at}")
        said = [_message(one, f"{where}, field {self.prompt!r}") for one in _listed(value)]
        if not said or not any(message["content"] for message in said):
            raise UserError(f"{where}: field {self.prompt!r} contains no text")
        if said[-1]["role"] == "assistant":
            raise UserError(f"{where}: field {self.prompt!r} ends with an assistant's turn: nothing is left to answer")
        if self.system and said[0]["role"] != "system":
            said.insert(0, {"role": "system", "content": self.system})
        return with_media(said, {"image": row.get(self.images), "video": row.get(self.videos)}, where)


class DatasetTasks(LazyTasks):
    """The tasks of a split, each made from its row when it is looked at."""

    def __init__(self, split: str, rows: Rows, columns: Columns) -> None:
        super().__init__(len(rows), self._task)
        self._split, self._rows, self._columns = split, rows, columns

    def _task(self, at: int) -> Task:
        row = self._rows[at]
        where = self._rows.where(at)
        messages = self._columns.messages(row, where)
        kwargs = _tools_kwargs(row, where)
        data = {**row, "messages": messages, "split": self._split}
        if (truth := self._columns.truth(row)) is not None:
            data["ground_truth"] = truth
        data.setdefault("question", _question(messages))
        tools = _row_tools(row, kwargs, where) if self._columns.row_tools else None
        return Task(f"{self._split}-{self._rows.number(at)}", data, tools, kwargs)

    def where(self, index: int) -> str:
        """Return the place of a row for people."""
        return self._rows.where(index)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [{"role": "user", "content": value}]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: holds {value!r:.60}; expected text, or a list of messages with 'role' and 'content'")
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        raise UserError(f"{where}: a message of role {role!r}{nearest(str(role), _ROLES)}")
    calls = value.get("tool_calls")
    if not isinstance(content, str | list) and not (content is None and calls):
        raise UserError(f"{where}: a message's content is {content!r:.60}; expected text")
    return {name: part for name, part in value.items() if part is not None or name == "content"}  # type: ignore[return-value]


def _question(messages: Sequence[Message]) -> str:
    """Return the text of the last user message."""
    content = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if part.get("type") == "text")


def _tools_kwargs(row: Row, where: str) -> dict[str, ToolKwargs]:
    """Return `tools_kwargs` of the row or of its `extra_info`: for each tool its create, execute, calc_reward and
    release kwargs. A table fills what a row lacks with nulls: those count as absent."""
    extra = row.get("extra_info") or {}
    place = "tools_kwargs" if row.get("tools_kwargs") is not None else "extra_info.tools_kwargs"
    given = _without_nulls(field_of(row, place)) or {}
    if not isinstance(given, Mapping):
        raise UserError(f"{where}, field {place!r}: expected an object by tool, got {given!r:.60}")
    needed = bool(row.get("need_tools_kwargs") or (isinstance(extra, Mapping) and extra.get("need_tools_kwargs")))
    if needed and not given:
        raise UserError(f"{where}: need_tools_kwargs is true, but there is nothing in {place!r}")
    return {name: _tool_kwargs(one, f"{where}, field '{place}.{name}'") for name, one in given.items()}


def _tool_kwargs(value: Any, where: str) -> ToolKwargs:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected an object with {', '.join(_HOOKS)}, got {value!r:.60}")
    for hook, kwargs in value.items():
        if hook not in _HOOKS:
            raise UserError(f"{where}: has no hook {hook!r}{nearest(hook, _HOOKS)}")
        if not isinstance(kwargs, Mapping):
            raise UserError(f"{where}.{hook}: expected an object of arguments, got {kwargs!r:.60}")
    return ToolKwargs(**value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return value


def _row_tools(row: Row, kwargs: Mapping[str, ToolKwargs], where: str) -> tuple[str, ...]:
    named = row.get("tools")
    if named is None:
        return tuple(kwargs)
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise UserError(f"{where}, field 'tools': expected a list of names of tools, got {named!r:.60}")
    return tuple(named)


_TAG = re.compile(r"<(image|video)>")


def with_media(messages: Sequence[Message], media: Mapping[str, Any], where: str) -> list[Message]:
    """Put images and videos where a prompt names them. media: what the row has for `image` and `video`: None, one, or a
    list. A tag of a kind that the row has none of stays text. Raises UserError when tags and media are not equally
    many."""
    left = {kind: list(_each_image(value)) for kind, value in media.items() if value is not None}
    had = {kind: len(values) for kind, values in left.items()}
    if not any(had.values()):
        return list(messages)
    tags = dict.fromkeys(had, 0)
    shaped: list[Message] = [{**message, "content": _parts(message["content"], left, tags)} for message in messages]
    for kind, count in had.items():
        if tags[kind] != count:
            raise UserError(f"{where}: has {count} {kind}s, and the prompt has {tags[kind]} <{kind}> tags for them")
    return shaped


def _each_image(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _parts(content: Any, left: dict[str, list[Any]], tags: dict[str, int]) -> Any:
    """Return a text cut at the tags of what the row has; anything else as it is."""
    if not isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    at = 0
    for match in _TAG.finditer(content):
        kind = match[1]
        if not left.get(kind) and not tags.get(kind):
            continue
        parts += [{"type": "text", "text": content[at : match.start()]}] if match.start() > at else []
        tags[kind] += 1
        if left[kind]:
            parts.append({"type": kind, kind: _medium(left[kind].pop(0))})
        at = match.end()
    if not parts:
        return content
    return parts + ([{"type": "text", "text": content[at:]}] if at < len(content) else [])


def _medium(value: Any) -> Any:
    """Return a path or address, or the bytes of a file: parquet holds `{bytes, path}`."""
    if isinstance(value, Mapping) and {"bytes", "path", "image"} & set(value):
        return next((value[name] for name in ("bytes", "image", "path") if value.get(name) is not None), None)
    return value
