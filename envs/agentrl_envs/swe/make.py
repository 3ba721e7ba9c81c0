"""Make tasks for `swe`: `python -m agentrl_envs.swe.make [--packages NAME ...] DIR`, and `--check DIR`.

Source distributions come from the index that pip uses; a package may be a folder, too. Their tests and doctests run in
workspaces, and the arguments of each call of a function are noted; what the function gives for them, and for
variations of them, is what is expected, where it is the same in every process. A mutation of the function which at
least two calls notice is a task, once the grader has graded it both ways: the solution earns 1, nothing 0. What is left
out is counted. DIR holds the sources and their licences; nothing of it is ours to pass on.
"""

import argparse
import ast
import asyncio
import email
import importlib.util
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentrl_tools.workspaces.bwrap import BwrapProvider

from agentrl.errors import UserError
from agentrl.jsonable import Json
from agentrl.plugins.types import Session, Task
from agentrl.workspace.provider import WorkspaceLimits, WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import MIB, Snapshot, Workspace
from agentrl_envs.swe.environment import REPLAY, SOURCE, TASKS, WORK, Swe, script
from agentrl_envs.swe.mutations import Mutation, functions, mutations

PACKAGES = Path(__file__).with_name("packages.txt")
"""Names on the index, a line each: pure Python, with functions that need nothing else."""
_PROJECT = "/home/user/project"
_LIMITS = WorkspaceLimits(memory=1024 * MIB, disk=256 * MIB, processes=128)
_RECORD_SECONDS, _CALL_SECONDS = 90, 3.0
_FUNCTIONS, _PER_FUNCTION, _PER_PACKAGE, _TRIED = 40, 2, 24, 8
_CALLS, _LEAST = 24, 4
_OTHER = {"tests", "test", "testing", "docs", "doc", "examples", "example", "benchmarks", "tools", "scripts", "bench"}
_ALONE = {"setup", "conftest", "noxfile", "tasks", "fabfile", "conf"}
_OUTPUT = 256 << 20
_SEEDS = ("1", "2", "3", "4")  # of hashes: two items of a set stand in the same order for half of them
_CHEAP = 5.0  # seconds of a grading that is done twice
_COPIES = (Path(__file__).parent / "inside/copies.py").read_text(encoding="utf-8")


class Source:
    """An unpacked source distribution. root: what is imported lies in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "src" if any((folder / "src").glob("*/__init__.py")) else folder
        info = next((path for path in (folder / "PKG-INFO", *folder.glob("*/PKG-INFO")) if path.is_file()), None)
        facts = email.message_from_string(info.read_text(encoding="utf-8", errors="replace") if info else "")
        self.name = (facts["Name"] or folder.name).lower()
        self.version = facts["Version"] or "0"
        named = [line.rpartition("::")[2].strip() for line in facts.get_all("Classifier", []) if "License ::" in line]
        self.license = " ".join((facts["License-Expression"] or ", ".join(named) or facts["License"] or "").split())[
            :80
        ]
        self.tests = next((path for name in ("tests", "test") if (path := folder / name).is_dir()), None)
        self.tests = self.tests or next(iter(sorted(self.root.glob("*/tests"))), None)
        if self.tests is None and any(folder.glob("test*.py")):
            self.tests = folder

    def files(self) -> dict[str, bytes]:
        """The files of the package by their path below `root`, without its tests."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            parts = path.relative_to(self.root).parts
            alone = len(parts) == 1 and (path.suffix != ".py" or path.stem in _ALONE or path.stem.startswith("test"))
            package = len(parts) > 1 and (self.root / parts[0] / "__init__.py").is_file()
            ours = not alone and (package or len(parts) == 1) and not _OTHER & set(parts[:-1])
            if ours and path.is_file() and not path.is_symlink():
                found["/".join(parts)] = path.read_bytes()
        return found

    def licences(self) -> str:
        """The texts of its licence files."""
        names = ("LICEN[CS]E*", "COPYING*", "NOTICE*")
        paths = [path for name in names for path in sorted(self.folder.glob(name)) if path.is_file()]
        return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def unpacked(package: str, scratch: Path) -> Source:
    """A source distribution from the index, a file or a folder. Raises UserError."""
    given = Path(package)
    if given.is_dir():
        return Source(given)
    if not hasattr(tarfile, "data_filter"):
        raise UserError(f"{package} cannot be unpacked with this Python: 3.11.4 is the first that does it safely")
    archive = given if given.is_file() else _downloaded(package, scratch)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
    except tarfile.TarError as error:
        raise UserError(f"{archive.name} is no source distribution: {error}") from error
    return Source(next(path for path in scratch.iterdir() if path.is_dir()))


def _downloaded(package: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(scratch)]
    done = subprocess.run([*command, package], capture_output=True, text=True, timeout=600, check=False)
    archive = next(scratch.glob("*.tar.gz"), None)
    if archive is None:
        lines = (done.stderr.strip() or "no .tar.gz").splitlines()
        raise UserError(f"{package}: pip has no source distribution: {lines[-1][:200]}")
    return archive


COPY = "functions of which the image has a copy"
UNSTEADY = "functions whose results differ between processes"
UNSOLVED = "tasks whose solution does not earn 1"
UNTOUCHED = "tasks that are solved by nothing"


@dataclass(frozen=True, slots=True)
class Made:
    """What became of a package."""

    tasks: int
    """How many were written."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How many of what were not, by the reason."""

    def __str__(self) -> str:
        told = ", ".join(f"{count} {what}" for what, count in sorted(self.left_out.items()))
        return f"{self.tasks} tasks" + (f"; left out: {told}" if told else "")


async def make_tasks(provider: WorkspaceProvider, source: Source, top: Path) -> Made:
    """Write the tasks of a package to a folder below `top`."""
    files, left_out = source.files(), Counter[str]()
    rng = random.Random(f"{source.name} {source.version}")
    calls = _by_function(await _recorded(provider, source), files, rng)
    workspace = await provider.open(WorkspaceSpec(limits=_LIMITS))
    try:
        await workspace.unpack(_tar(files))
        for where in await _copied(workspace, files, calls):
            del calls[where]
            left_out[COPY] += 1
        expected, unsteady = await _expected(workspace, calls, rng)
        left_out[UNSTEADY] += unsteady
        rows = await _noticed(workspace, files, expected, rng)
    finally:
        await workspace.close()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / f"{source.name}-{source.version}"
        folder.mkdir()
        (folder / SOURCE).write_bytes(_tar(files))
        (folder / "LICENSE").write_text(f"{source.license}\n\n{source.licences()}", encoding="utf-8")
        _write(source, folder, rows)
        wrong = await graded(provider, scratch) if rows else {}
        left_out.update(wrong.values())
        rows = [row for n, row in enumerate(rows) if f"{folder.name}/{n}" not in wrong]
        if rows:
            _write(source, folder, rows)
            shutil.copytree(folder, top / folder.name, dirs_exist_ok=True)
    return Made(len(rows), +left_out)


def _write(source: Source, folder: Path, rows: Sequence[Mapping[str, Json]]) -> None:
    facts = {"package": source.name, "version": source.version, "license": source.license}
    lines = [json.dumps({"id": f"{folder.name}/{n}", **facts, **row}) for n, row in enumerate(rows)]
    (folder / TASKS).write_text("\n".join(lines) + "\n", encoding="utf-8")


Call = list[str]
Where = tuple[str, str, str]
"""File, module and name of a function."""


async def _recorded(provider: WorkspaceProvider, source: Source) -> list[Call]:
    workspace = await provider.open(WorkspaceSpec(limits=_LIMITS))
    try:
        whole = {path.relative_to(source.folder).as_posix(): path.read_bytes() for path in source.folder.rglob("*")
                 if path.is_file() and not path.is_symlink()}  # fmt: skip
        await workspace.unpack(_tar(whole, _PROJECT))
        for name in ("record.py", "replay.py"):
            await workspace.unpack(script(name))
        root = f"{_PROJECT}/{source.root.relative_to(source.folder).as_posix()}".removesuffix("/.")
        tests = f"{_PROJECT}/{source.tests.relative_to(source.folder).as_posix()}" if source.tests else ""
        command = ["python3", "/opt/agentrl/record.py", root, tests, str(_RECORD_SECONDS), "/opt/agentrl"]
        env = {"PYTHONPATH": _libraries()}
        result = await workspace.exec(command, env=env, seconds=_RECORD_SECONDS + 30, output=_OUTPUT)
        return json.loads(result.stdout) if result.ok else []
    except ValueError:
        return []
    finally:
        await workspace.close()


def _libraries() -> str:
    """The folder that has pytest; empty where there is none."""
    spec = importlib.util.find_spec("pytest")
    return str(Path(spec.origin).parents[1]) if spec is not None and spec.origin else ""


def _by_function(calls: list[Call], files: dict[str, bytes], rng: random.Random) -> dict[Where, list[Call]]:
    """Calls of functions that the files define, of some functions where there are many."""
    found: dict[Where, list[Call]] = {}
    for file, module, function, positional, named in sorted(calls):
        path = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if file in files and module == path and function in _functions(files[file]):
            found.setdefault((file, module, function), []).append([module, function, positional, named])
    chosen = [where for where, given in found.items() if len(given) >= 2]
    return {where: found[where] for where in rng.sample(chosen, min(len(chosen), _FUNCTIONS))}


def _functions(source: bytes) -> dict[str, Json]:
    try:
        return functions(source.decode())
    except (SyntaxError, ValueError):
        return {}


async def _copied(workspace: Workspace, files: Mapping[str, bytes], wheres: Iterable[Where]) -> set[Where]:
    """Functions that the image has in another place, as a package of the distribution or of pip's own: an answer. All
    of them where it has a package of that name, of whatever version."""
    wheres = list(wheres)
    named: dict[str, dict[str, str]] = {}
    for file, _, function in wheres:
        source = files[file].decode()
        text = ast.get_source_segment(source, functions(source)[function]) or ""
        named.setdefault(Path(file).name, {})[function] = text
    packages = sorted({file.partition("/")[0].removesuffix(".py") for file in files})
    libraries = _libraries()  # which a workspace shows to this program alone, unless they are the distribution's
    without = [WORK, *([libraries] if libraries and not libraries.startswith("/usr/") else [])]
    asked = json.dumps({"files": named, "packages": packages, "without": without}).encode()
    result = await workspace.exec(["python3", "-I", "-c", _COPIES], stdin=asked, seconds=300, output=_OUTPUT)
    if not result.ok:
        raise UserError(f"the workspace's image cannot be searched for copies: {result.text().strip()[-200:]}")
    found = {tuple(json.loads(line)) for line in result.stdout.splitlines()}
    if any(what == "package" for what, *_ in found):
        return set(wheres)
    return {where for where in wheres if ("function", Path(where[0]).name, where[2]) in found}


async def _expected(
    workspace: Workspace, calls: dict[Where, list[Call]], rng: random.Random
) -> tuple[dict[Where, list[tuple[Call, str]]], int]:
    """What functions give, where that can be written; and how many were left out since a call gave something else in
    another process. All calls of these are left out: those that were the same were so by chance."""
    given = {}
    for where, seen in calls.items():
        base = rng.sample(seen, min(len(seen), _CALLS))
        more = [[*call[:2], *varied(call[2], call[3], rng)] for call in base for _ in range(2)]
        unique = {tuple(call): call for call in [*base, *more]}
        given[where] = list(unique.values())
    jobs = [_job(calls) for calls in given.values()]
    plays = [await _replayed(workspace, jobs, {"PYTHONHASHSEED": seed}) for seed in _SEEDS]
    plays.append(await _replayed(workspace, jobs, {}))  # as the grader does it, isolated
    expected, unsteady = {}, 0
    for (where, asked), first, *others in zip(given.items(), *plays, strict=True):
        if first is None or any(play != first for play in others):
            unsteady += first is not None
            continue
        same = [(call, result) for call, result in zip(asked, first, strict=True) if result != "?"]
        values = [pair for pair in same if not pair[1].startswith("!")]
        errors = [pair for pair in same if pair[1].startswith("!")]
        if len({result for _, result in values}) >= 2 and len(values) >= _LEAST:
            expected[where] = [*values[:_CALLS], *errors[: _CALLS // 4]]
    return expected, unsteady


async def _noticed(
    workspace: Workspace, files: dict[str, bytes], expected: dict[Where, list[tuple[Call, str]]], rng: random.Random
) -> list[dict[str, Json]]:
    """The mutations that at least two calls notice."""
    tried: list[tuple[Where, Mutation]] = []
    for where in expected:
        source = files[where[0]].decode()
        found = mutations(source, functions(source)[where[2]])
        tried += [(where, one) for one in rng.sample(found, min(len(found), _TRIED))]
    jobs = [_job([call for call, _ in expected[where]], where[0], one.applied(files[where[0]].decode()))
            for where, one in tried]  # fmt: skip
    rows: dict[Where, list[dict[str, Json]]] = {}
    for (where, one), results in zip(tried, await _replayed(workspace, jobs, {}), strict=True):
        wanted = [result for _, result in expected[where]]
        differ = [i for i, (a, b) in enumerate(zip(results or (), wanted, strict=False)) if a != b]
        kept = rows.setdefault(where, [])
        if results is None or len(differ) < 2 or len(kept) >= _PER_FUNCTION:
            continue
        if any(row["mutation"]["kind"] == one.kind for row in kept):
            continue
        shown = min(differ, key=lambda i: len(wanted[i]) + len(expected[where][i][0][2]))
        sound = files[where[0]][one.start : one.end].decode()
        kept.append({
            "file": where[0], "mutation": asdict(one), "sound": sound, "shown": shown, "broken": results[shown],
            "calls": [call for call, _ in expected[where]], "expected": wanted,
        })  # fmt: skip
    flat = [row for kept in rows.values() for row in kept]
    return rng.sample(flat, min(len(flat), _PER_PACKAGE))


def varied(positional: str, named: str, rng: random.Random) -> tuple[str, str]:
    """A call's arguments as literals, one of them changed; as they were where none can be."""
    values: list[Json] = ast.literal_eval(positional)
    places = [i for i, value in enumerate(values) if _can_vary(value)]
    if not places:
        return positional, named
    place = rng.choice(places)
    values[place] = vary(values[place], rng)
    return repr(values), named


def vary(value: Json, rng: random.Random) -> Json:
    """A value of the same type that is near to another one."""
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, 0))
    if isinstance(value, float):
        return rng.choice((value + 1.0, -value, value / 2))
    if isinstance(value, str | bytes):
        return rng.choice((value[1:], value[:-1], value[::-1], 2 * value, value.swapcase()))
    if isinstance(value, list | tuple) and value:
        items = list(value)
        place = rng.randrange(len(items))
        if _can_vary(items[place]) and rng.random() < 0.5:
            items[place] = vary(items[place], rng)
        else:
            del items[place]
        return type(value)(items)
    return value


def _can_vary(value: Json) -> bool:
    return isinstance(value, int | float | str | bytes | list | tuple) and not isinstance(value, bool) and bool(value)


def _job(calls: list[Call], file: str = "", text: str = "") -> dict[str, Json]:
    return {"file": file, "text": text, "calls": calls, "seconds": _CALL_SECONDS}


async def _replayed(workspace: Workspace, jobs: list[dict[str, Json]], env: dict[str, str]) -> list[list[str] | None]:
    """The results of each job; None where it did not come to an end."""
    asked = json.dumps({"root": WORK, "jobs": jobs}).encode()
    command = [word for word in REPLAY if not env or word != "-I"]  # which ignores the environment
    result = await workspace.exec(command, cwd="/", env=env, stdin=asked, seconds=900, output=_OUTPUT)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return [*lines, *[None] * (len(jobs) - len(lines))]


def _tar(files: dict[str, bytes], top: str = WORK) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, data in files.items():
            member = tarfile.TarInfo(f"{top}/{path}".lstrip("/"))
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


async def graded(provider: WorkspaceProvider, folder: str, at_once: int = 4) -> dict[str, str]:
    """What is wrong with the tasks of a folder, by the grader itself: each is graded as it is given and solved, twice
    where that is cheap, since every process hashes in its own way. Those that are right are left out."""
    env = Swe(folder)
    bound = asyncio.Semaphore(at_once)

    async def earned(task: Task, snapshot: Snapshot, solved: bool) -> float:
        workspace = await provider.open(WorkspaceSpec(), snapshot)
        try:
            if solved:
                await env.solve(task, workspace)
            session = Session(task.id, task, random.Random(0), time.monotonic() + 600, workspace=workspace)
            return (await env.calc_reward(session))["passed"]
        finally:
            await workspace.close()

    async def checked(task: Task) -> str:
        async with bound:
            base = await provider.open(WorkspaceSpec())
            try:
                await env.prepare(task, base)
                snapshot = await base.snapshot()
                for wrong, solved, wanted in ((UNTOUCHED, False, 0.0), (UNSOLVED, True, 1.0)):
                    began = time.monotonic()
                    if await earned(task, snapshot, solved) != wanted:
                        return wrong
                    if time.monotonic() - began < _CHEAP and await earned(task, snapshot, solved) != wanted:
                        return wrong
                await provider.forget(snapshot)
                return ""
            finally:
                await base.close()

    tasks = [task for split in ("train", "test") for task in env.tasks(split)]
    found = zip(tasks, await asyncio.gather(*map(checked, tasks)), strict=True)
    return {task.id: wrong for task, wrong in found if wrong}


async def copied(provider: WorkspaceProvider, folder: str) -> dict[str, str]:
    """Tasks of a folder whose function the provider's image has in another place."""
    env = Swe(folder)
    tasks = [task for split in ("train", "test") for task in env.tasks(split)]
    found: dict[str, str] = {}
    workspace = await provider.open(WorkspaceSpec())
    try:
        for place in sorted({task.data["folder"] for task in tasks}):
            wheres = {task.id: (task.data["file"], *task.data["calls"][0][:2]) for task in tasks
                      if task.data["folder"] == place}  # fmt: skip
            copies = await _copied(workspace, _untarred(Path(place) / SOURCE), set(wheres.values()))
            found |= {name: COPY for name, where in wheres.items() if where in copies}
    finally:
        await workspace.close()
    return found


def _untarred(path: Path) -> dict[str, bytes]:
    """The files of a task's package by their path below the folder in which they lie in a workspace."""
    top = f"{WORK}/".lstrip("/")
    with tarfile.open(path) as tar:
        opened = {member.name.removeprefix(top): tar.extractfile(member) for member in tar}
        return {name: file.read() for name, file in opened.items() if file is not None}


async def _main(given: argparse.Namespace) -> int:
    libraries = _libraries()
    provider = BwrapProvider(folders=[libraries] if libraries else [])
    await provider.start("swe")
    try:
        if given.check:
            env = Swe(given.folder)
            wrong = {**await graded(provider, given.folder), **await copied(provider, given.folder)}
            total = sum(len(env.tasks(split)) for split in ("train", "test"))
            lines = [f"{task}: one of the {what}" for task, what in wrong.items()]
            print("\n".join([*lines, f"{total - len(wrong)} of {total} tasks are as they must be"]))
            return 1 if wrong else 0
        total, left_out = 0, Counter[str]()
        for package in given.packages or PACKAGES.read_text(encoding="utf-8").split():
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    source = unpacked(package, Path(scratch))
                    made = await make_tasks(provider, source, Path(given.folder))
                    total += made.tasks
                    left_out.update(made.left_out)
                    print(f"{source.name} {source.version} ({source.license}): {made}", flush=True)
                except UserError as error:
                    print(error, file=sys.stderr, flush=True)
        print(f"all: {Made(total, left_out)}")
        return 0 if total else 2
    finally:
        await provider.close()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m agentrl_envs.swe.make", description="Make tasks for `swe`.")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--packages", nargs="*", help="names of the index, files or folders; by default some 80 names")
    parser.add_argument(
        "--check",
        action="store_true",
        help="try every task: nothing earns 0, the solution 1, twice; the image has no copy of it",
    )
    try:
        sys.exit(asyncio.run(_main(parser.parse_args())))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
