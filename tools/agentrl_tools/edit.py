"""An editor of text files in the request's workspace, close to the string-replace editors that models know."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl import ArgumentError, Session, ToolResponse
from agentrl.errors import PathError
from agentrl.plugins.types import Json
from agentrl.workspace.workspace import FileKind, Workspace
from agentrl_tools.screen import cut_middle
from agentrl_tools.workspace_tool import WorkspaceTool

MAX_FILE = 1 << 20
"""Bytes of a file that can be edited."""
_UNDONE = 20  # former states of all files that a request can go back to
_SHOWN = 4  # lines shown before and after a change
_DEPTH = 2
_LISTED = 500
_LISTED_LINES = 8

Lines = list[str]


@dataclass(frozen=True, slots=True)
class _Former:
    """A file before a change. data: None where there was none."""

    path: str
    data: bytes | None


class Edit(WorkspaceTool):
    """output: characters of a view; of longer ones the middle is left out."""

    name = "edit"
    description = (
        "Views, creates and edits text files. `view` shows a file with line numbers, or a folder; `create` writes a "
        "whole file; `str_replace` replaces `old_str`, which must occur exactly once; `insert` adds lines after "
        "`insert_line`; `undo` takes the last change of a file back."
    )

    def __init__(self, output: int = 16_000) -> None:
        self.output = output
        text: dict[str, Json] = {"type": "string"}
        self.parameters = {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo"]},
                "path": {**text, "description": "of a file or folder"},
                "file_text": {**text, "description": "create: what the file is to hold"},
                "old_str": {**text, "description": "str_replace: the text to replace, with its indentation"},
                "new_str": {**text, "description": "str_replace: what takes its place; insert: the lines to add"},
                "insert_line": {"type": "integer", "minimum": 0, "description": "insert: 0 is before the first line"},
                "view_range": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "minItems": 2,
                    "maxItems": 2,
                    "description": "view: first and last line; a last one of -1 is the end of the file",
                },
            },
            "required": ["command", "path"],
        }

    async def create(self, session: Session, **create_kwargs: Json) -> None:
        self.workspace(session)
        session.state = []

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        """Do one of the commands. Raises ArgumentError, one line for the model."""
        command, path = arguments["command"], arguments["path"]
        if "\0" in path or not path:
            raise ArgumentError("`path` is empty or holds a NUL character")
        file = _File(self.workspace(session), path, session.state)
        if command == "view":
            return ToolResponse(await self._view(file, arguments.get("view_range")))
        if command == "undo":
            return ToolResponse(await file.undo())
        if command == "create":
            await file.write(_needed(arguments, "file_text"))
            return ToolResponse(f"{path} is written")
        change = self._insert if command == "insert" else self._replace
        return ToolResponse(await change(file, await file.lines(), arguments))

    async def _replace(self, file: "_File", lines: Lines, arguments: Mapping[str, Json]) -> str:
        text = "\n".join(lines)
        old = _needed(arguments, "old_str").replace("\r\n", "\n")
        new = arguments.get("new_str", "").replace("\r\n", "\n")
        at = _place(text, old, file.path)
        changed = text[:at] + new + text[at + len(old) :]
        await file.write(changed)
        first = text.count("\n", 0, at) + 1
        return self._excerpt(file.path, changed.split("\n"), first, first + new.count("\n"))

    async def _view(self, file: "_File", view_range: Sequence[int] | None) -> str:
        kind = (await file.workspace.listing(file.path, depth=0))[0].kind
        if kind is FileKind.FOLDER:
            if view_range:
                raise ArgumentError(f"{file.path} is a folder: leave `view_range` out")
            return self._bounded(await _folder(file.workspace, file.path))
        lines = await file.lines()
        first, last = view_range or (1, -1)
        count = _count(lines)
        last = max(1, count) if last == -1 else last
        if not 1 <= first <= last or first > max(1, count):
            raise ArgumentError(f"view_range {[first, last]}: give two lines between 1 and {count}")
        return self._bounded(_numbered(lines[first - 1 : last], first))

    def _bounded(self, text: str) -> str:
        cut = cut_middle(text, self.output)
        if cut is None:
            return text or "[empty]"
        left = text.count("\n") - cut[0].count("\n") - cut[1].count("\n")
        return f"{cut[0].rstrip(chr(10))}\n[... {left} lines are left out: view them by `view_range` ...]\n{cut[1]}"

    async def _insert(self, file: "_File", lines: Lines, arguments: Mapping[str, Json]) -> str:
        at, text = _needed(arguments, "insert_line"), _needed(arguments, "new_str")
        count = _count(lines)
        if at > count:
            raise ArgumentError(f"insert_line is {at}, and {file.path} has {count} lines")
        new = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
        changed = [*lines[:at], *new, *lines[at:]]
        await file.write("\n".join(changed))
        return self._excerpt(file.path, changed, at + 1, at + len(new))

    def _excerpt(self, path: str, lines: Lines, first: int, last: int) -> str:
        begin = max(1, first - _SHOWN)
        shown = _numbered(lines[begin - 1 : last + _SHOWN], begin)
        return f"{path} is changed. It now reads:\n{self._bounded(shown)}"

    async def release(self, session: Session, **kwargs: Json) -> None:
        session.state = None


class _File:
    """A path of a request, and what can be undone there."""

    def __init__(self, workspace: Workspace, path: str, formers: list[_Former]) -> None:
        self.workspace, self.path, self._formers = workspace, path, formers
        self._windows = False

    async def lines(self) -> Lines:
        """Its lines without their ends. Raises ArgumentError where it is no text."""
        data = await self._read()
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ArgumentError(f"{self.path} is no text: byte {error.start} is not UTF-8") from None
        self._windows = "\r\n" in text and text.count("\r\n") == text.count("\n")
        return (text.replace("\r\n", "\n") if self._windows else text).split("\n")

    async def _read(self) -> bytes:
        """All that it holds. Raises ArgumentError where that is more than `undo` keeps, PathError."""
        data = await self.workspace.read(self.path, limit=MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ArgumentError(f"{self.path} has more than {MAX_FILE} bytes: too large to edit or replace")
        return data

    async def write(self, text: str) -> None:
        """Write it whole, in the ends of lines that it had. Raises ArgumentError where what it held is too large."""
        try:
            former = await self._read()
        except PathError:
            former = None
        data = (text.replace("\n", "\r\n") if self._windows else text).encode(errors="replace")
        await self.workspace.write(self.path, data)
        self._formers.append(_Former(self.workspace.absolute(self.path), former))
        del self._formers[:-_UNDONE]

    async def undo(self) -> str:
        """Take its last change back. Raises ArgumentError where there is none."""
        path = self.workspace.absolute(self.path)
        index = next((i for i in range(len(self._formers) - 1, -1, -1) if self._formers[i].path == path), None)
        if index is None:
            raise ArgumentError(f"there is no change of {self.path} to undo")
        former = self._formers.pop(index)
        if former.data is None:
            await self.workspace.exec(["rm", "-f", "--", path], seconds=10.0)
            return f"{self.path} is removed again"
        await self.workspace.write(path, former.data)
        return f"the last change of {self.path} is undone"


def _needed(arguments: Mapping[str, Json], name: str) -> Json:
    if arguments.get(name) is None:
        raise ArgumentError(f"`{arguments['command']}` needs `{name}`")
    return arguments[name]


def _count(lines: Lines) -> int:
    """How many there are, but for the empty one after the last end of line."""
    return len(lines) - 1 if lines[-1] == "" else len(lines)


def _numbered(lines: Sequence[str], first: int) -> str:
    """Lines with their numbers, as `cat -n` prints them; the empty one after the last end of line is none."""
    shown = lines[:-1] if len(lines) > 1 and lines[-1] == "" else lines
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(shown, first))


async def _folder(workspace: Workspace, path: str) -> str:
    found = await workspace.listing(path, depth=_DEPTH, limit=_LISTED)
    shown = [f"{info.path}/" if info.kind is FileKind.FOLDER else info.path for info in found if not _hidden(info.path)]
    more = [f"[only the first {_LISTED} are shown]"] if len(found) == _LISTED else []
    return "\n".join([*shown, *more]) or "[an empty folder]"


def _hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _place(text: str, old: str, path: str) -> int:
    """Where `old` stands. Raises ArgumentError, which says where something like it stands, or all places."""
    if not old:
        raise ArgumentError("`old_str` is empty: to add lines, `insert` them")
    at = text.find(old)
    if at < 0:
        raise ArgumentError(f"`old_str` is not in {path}{_nearest(text, old)}")
    if text.find(old, at + 1) >= 0:
        raise ArgumentError(
            f"`old_str` is in {path} more than once, at lines {_lines_of(text, old)}: add lines around it until it is "
            f"unique"
        )
    return at


def _lines_of(text: str, old: str) -> str:
    numbers: list[str] = []
    at = text.find(old)
    while at >= 0 and len(numbers) < _LISTED_LINES:
        numbers.append(str(text.count("\n", 0, at) + 1))
        at = text.find(old, at + 1)
    return ", ".join(numbers) + (" and others" if at >= 0 else "")


def _nearest(text: str, old: str) -> str:
    """The lines that are most like those looked for."""
    lines, wanted = text.split("\n"), old.strip("\n").split("\n")
    anchor = max(wanted, key=lambda line: len(line.strip()))
    close = difflib.get_close_matches(anchor.strip(), {line.strip() for line in lines[:20_000] if line.strip()}, n=1)
    if not close:
        return ": nothing in it is like that; view the file"
    at = max(0, next(i for i, line in enumerate(lines) if line.strip() == close[0]) - wanted.index(anchor))
    return f"; the nearest lines are\n{_numbered(lines[at : at + min(len(wanted), 20)], at + 1)}"
