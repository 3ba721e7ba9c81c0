"""Convert rows to tasks: which columns hold the prompt, the answer and the arguments of tools.

A bad row raises an error that names it, and is never skipped. `<image>` in a prompt becomes a content part, one for
each image of the row, in their order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_tools.rewards.truth import field_of

from agentrl.data.rows import Row, Rows
from agentrl.errors import UserError, nearest
from agentrl.plugins.environment import LazyTasks
from agentrl.plugins.types import Json, Message, Task, ToolKwargs

if TYPE_CHECKING:
    from agentrl.data.media import Images

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
    images: "Images"
    """How rows bring images."""
    videos: str
    """Column with videos, which nobody is shown."""
    row_tools: bool

    def truth(self, row: Row) -> Json:
        """The answer of a row; None where it has none."""
        for path in (self.answer,) if self.answer else ANSWERS:
            value = field_of(row, path)
            if value is not None:
                return value
        return None

    def messages(self, row: Row, where: str, folder: Path | None = None) -> list[Message]:
        """The opening, as chat messages. folder: of the row's file, for the paths of images. Raises
        UserError."""
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
        if row.get(self.videos) and any("<video>" in _text(message) for message in said):
            raise UserError(f"{where}: its prompt shows a video, which no model is shown here; leave such rows out")
        try:
            return self.images.placed(said, row, folder)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


class DatasetTasks(LazyTasks):
    """The tasks of a split, each made from its row when it is looked at."""

    def __init__(self, split: str, rows: Rows, columns: Columns) -> None:
        super().__init__(len(rows), self._task)
        self._split, self._rows, self._columns = split, rows, columns

    def _task(self, at: int) -> Task:
        row = self._rows[at]
        where = self._rows.where(at)
        messages = self._columns.messages(row, where, self._rows.folder(at))
        kwargs = _tools_kwargs(row, where)
        data = {**row, "messages": messages, "split": self._split}
        if (truth := self._columns.truth(row)) is not None:
            data["ground_truth"] = truth
        data.setdefault("question", _question(messages))
        tools = _row_tools(row, kwargs, where) if self._columns.row_tools else None
        return Task(f"{self._split}-{self._rows.number(at)}", data, tools, kwargs)

    def where(self, index: int) -> str:
        """The place of a row for people."""
        return self._rows.where(index)


def _listed(value: Json) -> Sequence[Json]:
    return value if isinstance(value, list | tuple) else [{"role": "user", "content": value}]


def _message(value: object, where: str) -> Message:
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
    """The text of the last user message."""
    return next((_text(m) for m in reversed(messages) if m["role"] == "user"), "")


def _text(message: Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content or () if isinstance(part, Mapping) and part.get("type") == "text"]
    return "".join(str(text) for text in texts if text is not None)


def _tools_kwargs(row: Row, where: str) -> dict[str, ToolKwargs]:
    """`tools_kwargs` of the row or of its `extra_info`: for each tool its create, execute, calc_reward and
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


def _tool_kwargs(value: Json, where: str) -> ToolKwargs:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected an object with {', '.join(_HOOKS)}, got {value!r:.60}")
    for hook, kwargs in value.items():
        if hook not in _HOOKS:
            raise UserError(f"{where}: has no hook {hook!r}{nearest(hook, _HOOKS)}")
        if not isinstance(kwargs, Mapping):
            raise UserError(f"{where}.{hook}: expected an object of arguments, got {kwargs!r:.60}")
    return ToolKwargs(**value)


def _without_nulls(value: object) -> Json:
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


EXAMPLE = {
    "train": (("What is 12 * 7?", "84"), ("Which is larger, 0.9 or 0.11?", "0.9")),
    "test": (("What is 15 - 8?", "7"),),
}
"""A few rows, by which `agentrl try dataset` shows what the environment does with data: prompts, and what is right."""


def example_rows(split: str) -> list[dict[str, str]]:
    """The rows of `EXAMPLE` in `train` or `test`."""
    return [{"prompt": prompt, "answer": answer} for prompt, answer in EXAMPLE[split]]
