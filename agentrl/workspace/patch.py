"""`Patch`: what a rollout changed in its workspace, bounded, as people read it."""

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
_AROUND = 2
"""Lines before and after what differs."""


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
        changes: list[Json] = [[change.kind.value, printed(change.path), change.size] for change in self.changes]
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
        text = difference(then, now, printed(change.path))[:room]
        parts.append(text)
        room -= len(text)
    return Patch(kept, len(changes) > CHANGES, "".join(parts))


def difference(then: str, now: str, path: str) -> str:
    """What differs between two texts, as one hunk of a unified difference, from the first line that does to the last.
    Its time grows with the texts, which are a stranger's; that of the shortest difference grows with their square."""
    old, new = then.splitlines(), now.splitlines()
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    end = 0
    while end < min(len(old), len(new)) - same and old[-1 - end] == new[-1 - end]:
        end += 1
    first, removed, added = max(0, same - _AROUND), old[same : len(old) - end], new[same : len(new) - end]
    before, after = old[first:same], old[len(old) - end :][:_AROUND]
    around = len(before) + len(after)
    head = f"@@ -{first + 1},{around + len(removed)} +{first + 1},{around + len(added)} @@"
    signed = (" ", before), ("-", removed), ("+", added), (" ", after)
    lines = [f"--- a{path}", f"+++ b{path}", head, *(f"{sign}{line}" for sign, part in signed for line in part)]
    return "\n".join(lines) + "\n"


def printed(path: str) -> str:
    """A path as UTF-8 can hold it: names are bytes, which may be no text."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


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
