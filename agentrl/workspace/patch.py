"""`Patch`: what a rollout changed in its workspace, bounded, as people read it."""

import difflib
from collections.abc import Sequence
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
    before = await _before(workspace, [c.path for c in shown if c.kind is not ChangeKind.ADDED])
    parts, room = list[str](), TEXT
    for change in shown:
        now = "" if change.kind is ChangeKind.DELETED else await _text(workspace, change.path)
        then = before.get(change.path, "")
        if now is None or then is None or room <= 0:
            continue
        lines = difflib.unified_diff(
            then.splitlines(keepends=True), now.splitlines(keepends=True), f"a{change.path}", f"b{change.path}", n=2
        )
        text = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)[:room]
        parts.append(text)
        room -= len(text)
    return Patch(kept, len(changes) > CHANGES, "".join(parts))


async def _before(workspace: Workspace, paths: Sequence[str]) -> dict[str, str | None]:
    """The texts of files as they were; None for what is no text, or too long."""
    if not paths:
        return {}
    fresh = await workspace.fresh()
    try:
        return {path: await _text(fresh, path) for path in paths}
    finally:
        await fresh.close()


async def _text(workspace: Workspace, path: str) -> str | None:
    try:
        data = await workspace.read(path, limit=_FILE + 1)
        return None if len(data) > _FILE or b"\0" in data else data.decode()
    except (ArgumentError, UnicodeDecodeError):
        return None
