"""`Patch`: what a rollout changed in its workspace, bounded, as people read it."""

import difflib
from dataclasses import dataclass

from agentrl.errors import ArgumentError
from agentrl.jsonable import Json
from agentrl.workspace.workspace import Change, ChangeKind, FileKind, Workspace

CHANGES = 200
"""Changes that are kept."""
TEXT = 20_000
"""Characters of all differences."""
_FILE = 64 << 10
"""Bytes of a file whose difference is shown."""
_FILES = 20


@dataclass(frozen=True, slots=True)
class Patch:
    """The changes, and the difference of those that are short texts."""

    changes: tuple[Change, ...]
    """By path, at most CHANGES."""
    more: bool
    """Whether there were more."""
    text: str
    """A unified difference, at most TEXT characters."""

    def json(self) -> dict[str, Json]:
        """As a trajectory keeps it: `changes` (kind, path, bytes), `more`, `diff`."""
        changes: list[Json] = [[change.kind.value, change.path, change.size] for change in self.changes]
        return {"changes": changes, "more": self.more, "diff": self.text}


async def patch_of(workspace: Workspace) -> Patch:
    """What differs from what a workspace was opened from. Raises WorkspaceError."""
    changes = await workspace.diff(CHANGES + 1)
    kept = tuple(changes[:CHANGES])
    shown = [c for c in kept if c.file is FileKind.FILE and c.size <= _FILE][:_FILES]
    changed = [c.path for c in shown if c.kind is not ChangeKind.ADDED]
    before = await workspace.original(changed, _FILE + 1) if changed else {}
    parts, room = list[str](), TEXT
    for change in shown:
        now = "" if change.kind is ChangeKind.DELETED else await _read(workspace, change.path)
        then = _text(before[change.path]) if change.path in before else ""
        if now is None or then is None or room <= 0:
            continue
        lines = difflib.unified_diff(
            then.splitlines(keepends=True), now.splitlines(keepends=True), f"a{change.path}", f"b{change.path}", n=2
        )
        text = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)[:room]
        parts.append(text)
        room -= len(text)
    return Patch(kept, len(changes) > CHANGES, "".join(parts))


async def _read(workspace: Workspace, path: str) -> str | None:
    try:
        return _text(await workspace.read(path, limit=_FILE + 1))
    except ArgumentError:
        return None


def _text(data: bytes) -> str | None:
    """A short file's content; None for what is no text, or too long."""
    try:
        return None if len(data) > _FILE or b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None
