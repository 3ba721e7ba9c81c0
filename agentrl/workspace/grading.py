"""Grading after the agent is gone: a fresh workspace, the files that it left, tests that it never saw.

Nothing of the agent's runs while the tests are there, unless the tests run it. A grader whose tests do so puts that
into `run`: it is executed first, in a workspace without tests, and its output and files are all that the tests see.
What the machinery does wrong raises WorkspaceError; all else is in the `Grade`.
"""

import io
import json
import math
import posixpath
import shlex
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from agentrl.errors import PathError, WorkspaceError
from agentrl.workspace.archive import packed
from agentrl.workspace.capture import Capture, Guard, Protection, capture
from agentrl.workspace.workspace import ExecResult, FileKind, Workspace

REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""Where a grader's tests write a reward."""
RUN = "/logs/run"
"""A folder with `exit_code`, `stdout` and `stderr` of what was run before the tests."""
CLEAN = {
    "LD_PRELOAD": "", "LD_AUDIT": "", "BASH_ENV": "", "ENV": "", "PYTHONSTARTUP": "", "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
"""Environment of what a grader runs, besides the image's."""
_REWARD_SIZE = 1 << 16
_SECONDS = 60.0  # for the grader's own small programs
_AT_ONCE = 500  # paths of one command


@dataclass(frozen=True, slots=True)
class Grade:
    """What a grader came to."""

    exit_code: int = -1
    """Of the tests; -1 where they were not run."""
    output: str = ""
    """What they printed."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What the tests wrote; a number alone is called `reward`. Empty where there is a fault."""
    captured: tuple[str, ...] = ()
    """Paths that were taken from the agent."""
    tampering: tuple[str, ...] = ()
    """What was left behind since it would have decided for the tests, as `kind: path`."""
    fault: str = ""
    """Why there is no reward, in words: too many files, out of time, a reward that is no file."""


@dataclass(frozen=True, slots=True)
class Grading:
    """How a task is graded."""

    command: str
    """A script for `sh`, which runs the tests."""
    tests: bytes = b""
    """A tar of what it needs, relative to /."""
    run: str = ""
    """A script for `sh` that runs what the agent made, before the tests are there; empty: none."""
    rewards: tuple[str, ...] = REWARDS
    """Files that the tests write, in folders that are empty before."""
    captured: tuple[str, ...] | None = None
    """Absolute paths that are taken from the agent. None: all that it changed."""
    image: str = ""
    """An image of the tests' own; empty: the agent's."""
    build: str = ""
    """A folder with a Dockerfile that it is made from."""
    protection: Protection = field(default_factory=Protection)
    """What is not, besides the paths of the tests and of the rewards."""
    cwd: str | None = None
    """Where the scripts run. None: the workspace's home."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the scripts, besides `CLEAN`."""
    user: str | None = None
    """Who runs them, where the provider has users."""
    seconds: float = 600.0
    """Time of each of the two."""

    def guarded(self) -> Protection:
        """All that is protected."""
        with tarfile.open(fileobj=io.BytesIO(self.tests or packed({}))) as tar:
            inside = ["/" + posixpath.normpath(member.name).lstrip("/") for member in tar if not member.isdir()]
        folders = [RUN, *(posixpath.dirname(path) for path in self.rewards)]
        return replace(self.protection, paths=(*self.protection.paths, *inside, *folders))


@asynccontextmanager
async def restored(workspace: Workspace, grading: Grading, *, tests: bool) -> AsyncIterator[tuple[Workspace, Capture]]:
    """A fresh workspace with the files that were captured from `workspace`, whose processes are gone, and with the
    tests where they are asked for. It is closed at the end. Raises WorkspaceError."""
    other = tests and bool(grading.image or grading.build)
    fresh = await (workspace.fresh(image=grading.image, build=grading.build) if other else workspace.fresh())
    try:
        protection = grading.guarded()
        guard = Guard(protection, fresh.absolute(grading.cwd or fresh.home), await _programs(fresh))
        taken = await capture(workspace, guard, protection, grading.captured)
        if tests and grading.tests:
            await _unpack(fresh, grading.tests)
        yield fresh, replace(taken, excess=taken.excess or await _restore(fresh, taken))
    finally:
        await fresh.close()


async def grade(workspace: Workspace, grading: Grading) -> Grade:
    """Grade what an agent left in a workspace, whose processes have been ended. Raises WorkspaceError."""
    if not grading.run:
        return await _checked(workspace, grading)
    async with restored(workspace, grading, tests=False) as (stage, taken):
        if taken.excess:
            return Grade(captured=taken.paths, tampering=taken.tampering, fault=taken.excess)
        result = await _exec(stage, grading.run, grading)
        await stage.end_processes()
        files = {"exit_code": b"%d\n" % result.exit_code, "stdout": result.stdout, "stderr": result.stderr}
        outcome = packed({f"{RUN}/{name}": data for name, data in files.items()})
        grade_ = await _checked(stage, grading, outcome)
    return replace(grade_, tampering=tuple(sorted({*taken.tampering, *grade_.tampering})))


async def _checked(workspace: Workspace, grading: Grading, outcome: bytes = b"") -> Grade:
    """Run the tests. outcome: a tar of what was run before."""
    async with restored(workspace, grading, tests=True) as (fresh, taken):
        grade_ = Grade(captured=taken.paths, tampering=taken.tampering, fault=taken.excess)
        if grade_.fault:
            return grade_
        for folder in {posixpath.dirname(path) for path in grading.rewards}:
            await _own(fresh, f"rm -rf -- {shlex.quote(folder)} && mkdir -p -- {shlex.quote(folder)}")
        if outcome:
            await _unpack(fresh, outcome)
        result = await _exec(fresh, grading.command, grading)
        await fresh.end_processes()
        grade_ = replace(grade_, exit_code=result.exit_code, output=result.text())
        if result.timed_out or result.stopped:
            return replace(grade_, fault=result.stopped or f"the tests did not end in {grading.seconds:g} s")
        return await _with_rewards(fresh, grading, grade_)


async def _with_rewards(fresh: Workspace, grading: Grading, grade_: Grade) -> Grade:
    for path in grading.rewards:
        try:
            found = await fresh.listing(path, depth=0)
            if found[0].kind is not FileKind.FILE:
                raise ValueError(f"is a {found[0].kind} instead of a file")
            return replace(grade_, rewards=_numbers(await fresh.read(path, limit=_REWARD_SIZE)))
        except PathError:
            continue
        except ValueError as error:
            return replace(grade_, fault=f"{path}: {error}")
    return replace(grade_, fault="the tests wrote no reward")


def _numbers(text: bytes) -> dict[str, float]:
    """Finite numbers of a reward file: one, or several by name as JSON. Raises ValueError."""
    try:
        numbers = {"reward": float(text)}
    except ValueError:
        value = json.loads(text)
        if not isinstance(value, dict) or not all(isinstance(number, int | float) for number in value.values()):
            raise ValueError(f"holds {text[:60]!r}, which is neither a number nor numbers by name") from None
        numbers = {name: float(number) for name, number in value.items()}
    if not all(math.isfinite(number) for number in numbers.values()):
        raise ValueError(f"holds {text[:60]!r}, which is not finite")
    return numbers


async def _exec(workspace: Workspace, script: str, grading: Grading) -> ExecResult:
    env = {**CLEAN, **grading.env}
    return await workspace.exec(script, cwd=grading.cwd, env=env, user=grading.user, seconds=grading.seconds)


async def _programs(fresh: Workspace) -> dict[str, frozenset[str]]:
    """Names of the image's programs by folder of PATH."""
    result = await _own(fresh, 'IFS=:; for d in $PATH; do [ -d "$d" ] && echo "/$d" && ls -A "$d"; done; true')
    folders: dict[str, set[str]] = {}
    names: set[str] = set()
    for line in result.stdout.decode(errors="replace").splitlines():
        if line.startswith("/"):
            names = folders.setdefault(posixpath.normpath("/" + line.lstrip("/")), set())
        else:
            names.add(line)
    return {folder: frozenset(names) for folder, names in folders.items()}


async def _restore(fresh: Workspace, taken: Capture) -> str:
    """Bring a capture into a fresh workspace. Why its paths or its size forbid that, in words: the agent's fault.
    Raises WorkspaceError."""
    for start in range(0, len(taken.replaced), _AT_ONCE):
        await _own(fresh, ["rm", "-rf", "--", *taken.replaced[start : start + _AT_ONCE]])
    try:
        await fresh.unpack(taken.tar)
    except PathError as error:
        return str(error)
    return ""


async def _unpack(fresh: Workspace, tar: bytes) -> None:
    try:
        await fresh.unpack(tar)
    except PathError as error:
        raise WorkspaceError(f"the tests cannot be brought into a workspace: {error}") from error


async def _own(fresh: Workspace, command: list[str] | str) -> ExecResult:
    """Run one of the grader's own commands. Raises WorkspaceError where it fails."""
    result = await fresh.exec(command, cwd="/", env=CLEAN, seconds=_SECONDS)
    if not result.ok:
        raise WorkspaceError(f"a grader's workspace cannot run {command!r:.60}: {result.text()[:200]!r}")
    return result
