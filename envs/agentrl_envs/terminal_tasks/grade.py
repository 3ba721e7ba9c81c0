"""What a job's end state is worth, from bytes that were taken out of the workspace: nothing that the agent left behind
is run, but in a fresh workspace, against what the agent never saw."""

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.errors import PathError
from agentrl.workspace.workspace import Workspace
from agentrl_envs.terminal_tasks.job import Job

SECONDS = 10.0
"""For one hidden command."""
_OUTPUT = 1 << 16


@dataclass(frozen=True, slots=True)
class Grade:
    """Checks that were met, of those that were not met at the beginning; and whether all are met."""

    fraction: float
    """Of the former."""
    passed: bool
    """All of them, and those that were met at the beginning."""


async def grade(job: Job, workspace: Workspace) -> Grade:
    """Judge a workspace whose processes have ended. Raises WorkspaceError."""
    found = await _contents(workspace, tuple(job.goal))
    begun = {path: text.encode() for path, text in job.files.items()}
    met = {path: _met(found, path, wanted) for path, wanted in job.goal.items()}
    kept = {path for path, wanted in job.goal.items() if _met(begun, path, wanted)}
    results = [met[path] for path in job.goal if path not in kept]
    if job.hidden:
        results += await _tried(job, workspace)
    return Grade(sum(results) / len(results), all(results) and all(met[path] for path in kept))


async def _tried(job: Job, workspace: Workspace) -> list[bool]:
    """Which of the hidden commands print what they should, in a fresh workspace."""
    try:
        captured = await workspace.pack(job.captured)
    except PathError:  # more than there may be
        return [False] * len(job.hidden)
    fresh = await workspace.fresh()
    try:
        await fresh.unpack(captured)
        tried = [await fresh.exec(hidden.command, seconds=SECONDS, output=_OUTPUT) for hidden in job.hidden]
    except PathError:
        return [False] * len(job.hidden)
    finally:
        await fresh.close()
    return [
        done.ok and done.stdout.decode(errors="replace").rstrip() == hidden.expected.rstrip()
        for done, hidden in zip(tried, job.hidden, strict=True)
    ]


async def _contents(workspace: Workspace, paths: tuple[str, ...]) -> dict[str, bytes | None]:
    """What stands at some paths: bytes of a file, None for what is no file; what is not there is left out."""
    if not paths:
        return {}
    names = {workspace.absolute(path).lstrip("/"): path for path in paths}
    try:
        with tarfile.open(fileobj=io.BytesIO(await workspace.pack(paths))) as tar:
            members = [member for member in tar if member.name in names]
            return {names[member.name]: _content(tar, member) for member in members}
    except (PathError, tarfile.TarError):  # more than there may be, or names that no tar can hold
        return dict.fromkeys(paths)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | None:
    file = tar.extractfile(member) if member.isreg() else None
    return file.read() if file is not None else None


def _met(found: Mapping[str, bytes | None], path: str, wanted: tuple[str, ...] | None) -> bool:
    if wanted is None or path not in found:
        return wanted is None and path not in found
    data = found[path]
    return data is not None and data.decode(errors="replace").rstrip() in [text.rstrip() for text in wanted]
