"""The provider `harbor`: whatever environment a Harbor installation has, driven in that installation's interpreter.

Harbor's environments run programs and carry files; all else is done by scripts inside. A snapshot is what differs from
the image, kept on this machine.
"""

import asyncio
import base64
import contextlib
import json
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.errors import PathError, UserError
from agentrl.workspace.provider import Capabilities, Network, WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import (
    MIB,
    OUTPUT,
    ChangeKind,
    ExecResult,
    Snapshot,
    Terminal,
    Workspace,
    WorkspaceError,
    command_words,
)
from agentrl_tools.workspaces import inside
from agentrl_tools.workspaces.scripted import END, ROOT, SPOOL, STOPS, ScriptedWorkspace

_RUNNER = Path(__file__).with_name("harbor_runner.py")
_LONG_SECONDS = 900.0  # an environment that is built and started
_KILL_SECONDS = 30.0
_LINE = 300
_ANSWER = 1 << 27  # bytes of a line
_MOST_WORDS = 60_000  # bytes of a command, which becomes one argument with our own script
_MARGIN = 60  # seconds that Harbor waits longer than we do


@dataclass(frozen=True, slots=True)
class _Kept:
    """A snapshot."""

    spec: WorkspaceSpec
    """What it was made from."""
    tar: Path
    """Files that were changed."""
    deleted: tuple[str, ...]
    """Paths that are gone."""


class HarborProvider(WorkspaceProvider):
    """python: the interpreter of a virtual environment with Harbor. environment: a type of its environments (`docker`,
    `podman`, `daytona`, ...), or `module:Class`. image: what is opened where a recipe names none. options: further
    arguments of its class. offline: its environments have no network by what `options` say, so that Harbor is not
    asked to take it away. deadline: seconds in which it must answer an ordinary call."""

    name = "harbor"
    capabilities = Capabilities(images=True, build=True, everything=True, users=True)

    def __init__(
        self,
        python: str,
        environment: str = "docker",
        image: str = "",
        *,
        options: Mapping[str, Any] | None = None,
        offline: bool = False,
        deadline: float = 120.0,
    ) -> None:
        if not deadline > 0:
            raise UserError("workspace.args.deadline: seconds above 0")
        self._python, self._environment, self._image = python, environment, image
        self._options, self._offline, self.deadline = dict(options or {}), offline, deadline
        self._run, self._count, self._name = "", 0, secrets.token_hex(4)
        self._runner: _RunnerProcess | None = None
        self._offline_able = True
        self._open: set[HarborWorkspace] = set()
        self._snapshots: dict[str, _Kept] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-harbor-")

    async def start(self, run: str) -> None:
        self._run = run
        self._runner = _RunnerProcess(self._python, self._environment, self._options)
        await self._runner.start()
        try:
            asked = self._asked("probe", WorkspaceSpec(self._image or "none", network=Network(everything=True)))
            able = await self._runner.call("networks", self.deadline, **asked)
        except WorkspaceError as error:
            await self.close()
            raise UserError(f"workspace.provider 'harbor': {error}") from None
        self._offline_able = "no-network" in able
        self.capabilities = replace(
            type(self).capabilities, hosts="allowlist" in able and not self._offline, everything=not self._offline
        )

    def check(self, spec: WorkspaceSpec) -> None:
        super().check(spec)
        if self._runner is not None and spec.network.none and not (self._offline or self._offline_able):
            raise UserError(
                f"workspace.provider 'harbor' cannot do: network: none ({self._environment!r} of Harbor does "
                "not take it away); set workspace.network to `all`, or args.offline where args.options do it"
            )

    def _asked(self, name: str, spec: WorkspaceSpec) -> dict[str, Any]:
        """An environment in the runner's words."""
        mode = "allowlist" if spec.network.hosts else "public" if spec.network.everything else "no-network"
        image = "" if spec.build else spec.image or self._image
        return {
            "name": name, "image": image, "build": spec.build, "hosts": list(spec.network.hosts), "env": spec.env,
            "network": "public" if self._offline else mode,
            "memory_mb": max(1, spec.limits.memory // MIB), "storage_mb": max(1, spec.limits.disk // MIB),
        }  # fmt: skip

    async def open(self, spec: WorkspaceSpec, snapshot: Snapshot | None = None) -> "HarborWorkspace":
        self.check(spec)
        kept = None
        if snapshot is not None:
            kept = self._snapshots.get(snapshot.name)
            if kept is None:
                raise WorkspaceError(f"there is no snapshot {snapshot.name} any more")
            spec = replace(spec, image=kept.spec.image, build=kept.spec.build)
        return await self.opened(spec, kept)

    async def opened(self, spec: WorkspaceSpec, kept: _Kept | None) -> "HarborWorkspace":
        """Open one. Raises WorkspaceError, UserError."""
        self.check(spec)
        if not (spec.image or spec.build or self._image):
            raise UserError("workspace.image: the provider 'harbor' has no default; name an image")
        self._count += 1
        name = f"agentrl-{self._name}-{self._count}"
        workspace = HarborWorkspace(self, name, spec, kept)
        self._open.add(workspace)
        try:
            await self.call("open", _LONG_SECONDS, **self._asked(name, spec))
            await workspace.begin()
        except BaseException as error:
            await workspace.close()
            if isinstance(error, _RefusedError):
                raise UserError(f"workspace.provider 'harbor': {error}") from None
            raise
        return workspace

    async def call(self, call: str, patience: float, **words: Any) -> Any:
        """Have the runner do a call. Raises WorkspaceError."""
        if self._runner is None:
            raise WorkspaceError("the provider 'harbor' is closed")
        return await self._runner.call(call, patience, **words)

    async def keep(self, workspace: "HarborWorkspace", spec: WorkspaceSpec, before: _Kept | None) -> Snapshot:
        """Keep what differs from the image. Raises WorkspaceError."""
        changes = await workspace.all_changes()
        gone = {change.path for change in changes if change.kind is ChangeKind.DELETED}
        there = [change.path for change in changes if change.kind is not ChangeKind.DELETED]
        name = secrets.token_hex(8)
        tar = Path(self._folder.name) / f"{name}.tar"
        tar.write_bytes(await workspace.pack(there))
        self._snapshots[name] = _Kept(spec, tar, tuple(sorted(gone)))
        return Snapshot(self.name, name)

    async def forget(self, snapshot: Snapshot) -> None:
        if kept := self._snapshots.pop(snapshot.name, None):
            kept.tar.unlink(missing_ok=True)

    def temporary(self) -> Path:
        """The path of a file on this machine that is not there yet."""
        return Path(self._folder.name) / secrets.token_hex(8)

    def closed(self, workspace: "HarborWorkspace") -> None:
        """Note that one is closed."""
        self._open.discard(workspace)

    async def close(self) -> None:
        await asyncio.gather(*(workspace.close() for workspace in list(self._open)))
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.close()
        self._snapshots.clear()
        self._folder.cleanup()


class _RefusedError(WorkspaceError):
    """Harbor takes no environment of the kind that was asked for."""


class _RunnerProcess:
    """The process that has Harbor."""

    def __init__(self, python: str, environment: str, options: Mapping[str, Any]) -> None:
        self._words = [os.path.expanduser(python), str(_RUNNER), environment, json.dumps(options)]
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count, self._end, self._errors = 0, "", tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`

    async def start(self) -> None:
        """Raises UserError: there is no such interpreter."""
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        env["PATH"] = f"{Path(self._words[0]).parent}:{env.get('PATH', os.defpath)}"  # what is installed beside Harbor
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=self._errors,
                env=env, limit=_ANSWER, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"workspace.args.python: {self._words[0]}: {error.strerror}; name the interpreter of a "
                            "virtual environment with Harbor") from None  # fmt: skip
        self._reading = asyncio.ensure_future(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                said = json.loads(line)
                waiting = self._waiting.pop(said["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(said)
            self._end = f"its process has ended: {self._last_words()}"
        except (ValueError, TypeError, KeyError) as error:
            self._end = f"its process says what is no answer: {error}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WorkspaceError(f"Harbor is gone: {self._end}"))

    def _last_words(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        said = os.pread(self._errors.fileno(), 4096, max(0, size - 4096)).decode(errors="replace")
        return " ".join(said.split())[-_LINE:]

    async def call(self, call: str, patience: float, **words: Any) -> Any:
        """What a call comes to. Raises WorkspaceError."""
        if self._process is None or self._process.stdin is None or self._end:
            raise WorkspaceError(f"Harbor is gone: {self._end}")
        self._count += 1
        number = self._count
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(patience):
                self._process.stdin.write(json.dumps({"id": number, "call": call, **words}).encode() + b"\n")
                await self._process.stdin.drain()
                said = await answer
        except TimeoutError:
            raise WorkspaceError(f"Harbor failed to {call}: no answer within {patience:g} s") from None
        except OSError as error:
            raise WorkspaceError(f"Harbor is gone: {error}") from None
        finally:
            self._waiting.pop(number, None)
        if "error" not in said:
            return said.get("value")
        kind = _RefusedError if said.get("kind") == "refused" and call == "open" else WorkspaceError
        raise kind(f"Harbor failed to {call}: {' '.join(str(said['error']).split())[-_LINE:]}")

    async def close(self) -> None:
        """End it; it stops what it has open."""
        if self._process is not None and self._reading is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _KILL_SECONDS)
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            self._reading.cancel()
        self._errors.close()


_SCRIPT = r"""
exec 4>&1 2>/dev/null; code=$( {{ {{ ( {0}
) 3>&- 4>&-; echo $? >&3; }} | base64 >&4; }} 3>&1 ); printf '%s%s' {1} "$code"
"""
"""Runs a script, and prints its output as text, a mark and its exit code."""

_STARTS = r"""
chmod 711 "$1"; shift; stops=$1; shift; : >"$stops"; chmod 644 "$stops"
( setsid "$@" >>"$stops" 2>/dev/null </dev/null & )
tries=0; while [ ! -s "$stops" ] && [ $tries -lt 50 ]; do sleep 0.1; tries=$((tries + 1)); done; head -n 1 "$stops"
"""
"""Starts the watch of the limits, which leaves what it says in a file, the first line its process."""

_EXEC = r"""
stdin=$1 descriptors=$2 blocks=$3 processes=$4 folder=$5 most=$6 mark=$7 name=$8 stops=$9; shift 9
before=$(wc -l <"$stops"); dir=$(mktemp -d) && mkfifo "$dir/o" "$dir/e" || exit 126
( cd -- "$folder" ) 2>/dev/null || { printf '%sfolder' "$mark"; rm -rf "$dir"; exit 0; }
for out in o e; do
sh -c 'echo $$ >"$1.pid"; exec cat "$1"' sh "$dir/$out" 2>/dev/null |
{ head -c "$most" >"$dir/$out.head"; tail -c "$((most + 1))" >"$dir/$out.tail"; : >"$dir/$out.done"; } &
done
( exec 3>&2 2>/dev/null; ulimit -c 0; ulimit -n "$descriptors"; ulimit -f "$blocks"
ulimit -u "$processes" || ulimit -p "$processes"; cd -- "$folder"; export AGENTRL_CALL="$name"
exec 2>&3 3>&-; exec setsid "$@" ) <"$stdin" >"$dir/o" 2>"$dir/e"
code=$? tries=0
while [ ! -e "$dir/o.done" ] || [ ! -e "$dir/e.done" ]; do sleep 0.02; tries=$((tries + 1))
[ $tries -eq 15 ] && kill $(cat "$dir/o.pid" "$dir/e.pid") 2>/dev/null; [ $tries -gt 200 ] && break; done
printf '%s%s %s' "$mark" "$code" "$(tail -n "+$((before + 1))" "$stops" | tail -n 1)"
for out in o.head o.tail e.head e.tail; do printf '%s' "$mark"; base64 "$dir/$out"; done
printf '%s' "$mark"; rm -rf "$dir"
"""
"""Runs a program, and prints its exit code, a limit that was passed, and the beginning and end of both outputs. What it
left in the background is not waited for."""

_TERMINAL = r"""
rows=$1 columns=$2 descriptors=$3 blocks=$4 home=$5 processes=$6 name=$7; shift 7
command -v script >/dev/null || exit 40
dir=$(mktemp -d) && mkfifo "$dir/in" && : >"$dir/out" || exit 1
cat >"$dir/shell" <<END
tty >'$dir/tty'; ulimit -u '$processes' 2>/dev/null || ulimit -p '$processes' 2>/dev/null
export AGENTRL_CALL='$name' TERM="\${TERM:-xterm}"; set -- '$rows' '$columns' '$descriptors' '$blocks' '$home'
stty rows "\$1" cols "\$2" 2>/dev/null; ulimit -c 0; ulimit -n "\$3"; ulimit -f "\$4"; cd -- "\$5"
for shell in /bin/bash /usr/bin/bash; do [ -x "\$shell" ] && exec "\$shell"; done; exec /bin/sh -i
END
begin='echo $$ >"$0/pid"; exec 3<>"$0/in"; exec script -q -f -c "sh $0/shell" /dev/null <&3 >"$0/out" 2>&1'
( setsid env "$@" sh -c "$begin" "$dir" </dev/null >/dev/null 2>&1 & )
printf '%s' "$dir"
"""
"""Starts a shell on a terminal that `script` makes: its input is a FIFO, its output a file."""

_SAID = r"""
tries=$4; while [ "$(wc -c <"$1/out")" -le "$2" ] && kill -0 "$(cat "$1/pid" 2>/dev/null)" 2>/dev/null &&
[ $tries -gt 0 ]; do sleep 0.1; tries=$((tries - 1)); done
state=ended; kill -0 "$(cat "$1/pid" 2>/dev/null)" 2>/dev/null && state=lives
printf '%s ' "$state"; tail -c "+$(($2 + 1))" "$1/out" | head -c "$3" | base64
"""
"""What a terminal said behind so many bytes, waited for in tenths of a second, and whether its shell lives."""


class HarborWorkspace(ScriptedWorkspace):
    """provider: whose it is. kept: the snapshot that it is opened from."""

    service = "Harbor's environment"

    def __init__(self, provider: HarborProvider, name: str, spec: WorkspaceSpec, kept: _Kept | None) -> None:
        super().__init__(name, spec, provider.deadline)
        self._provider, self._kept = provider, kept
        self._first: dict[str, str] = {}
        self._first_began = 0.0
        self._entries: dict[str, str] = {}
        self._stops_file = f"{SPOOL}/stops"
        self._closing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Prepare it. Raises WorkspaceError."""
        await self._prepare()
        await self._script('mkdir -p -- "$1" && chown "$2" -- "$1"', self.home, f"{self._owner[0]}:{self._owner[1]}")
        await self._begin()
        self._entries = {path: entry.kind for path, entry in (await self.entries()).items()}
        self._first, self._first_began = self._entries, self._began
        if self._kept is not None:
            if self._kept.deleted:
                spool = await self._brought(
                    b"\0".join(path.encode(errors="surrogateescape") for path in self._kept.deleted)
                )
                await self._script('xargs -0 -a "$1" rm -rf --', spool)
            await self.unpack(await asyncio.to_thread(self._kept.tar.read_bytes))
            await self._begin()
            self._entries = {path: entry.kind for path, entry in (await self.entries()).items()}
        code, said = await self._script(_STARTS, SPOOL, self._stops_file, *self._watch_words())
        if code or not said.strip().isdigit():
            raise WorkspaceError(f"workspace {self.id}: its limits cannot be watched")
        self._watch_pid = said.decode().strip()
        self._end_in_time()

    async def _before(self) -> dict[str, str]:
        return self._entries

    async def all_changes(self) -> Sequence[Any]:
        """What differs from the image, whatever snapshot it was opened from. Raises WorkspaceError."""
        entries, began = self._entries, self._began
        self._entries, self._began = self._first, self._first_began
        try:
            return await self.diff(1 << 30)
        finally:
            self._entries, self._began = entries, began

    async def _call(self, call: str, patience: float, **words: Any) -> Any:
        self._check()
        try:
            return await self._provider.call(call, patience, name=self.id, **words)
        except WorkspaceError:
            self._check()  # it was closed meanwhile
            raise

    async def _ran(self, script: str, words: Sequence[str], user: str, seconds: float) -> tuple[int, str]:
        """Run a script, by Harbor: its exit code and standard output."""
        command = shlex.join(["/bin/sh", "-c", script, "sh", *words])
        try:
            command.encode()
        except UnicodeEncodeError:
            raise PathError("Harbor carries no paths or words that are not UTF-8") from None
        limit = int(seconds) + _MARGIN
        said = await self._call("exec", limit, command=command, user=user or self._spec.user, seconds=limit)
        return int(said["code"]), str(said["stdout"])

    async def _script(
        self, script: str, *words: str, user: str = ROOT, seconds: float = 0.0, most: int = 64 * MIB
    ) -> tuple[int, bytes]:
        mark = secrets.token_hex(8)
        _, said = await self._ran(_SCRIPT.format(script, mark), words, user, seconds or self._deadline)
        encoded, _, code = said.partition(mark)
        if not code.isdigit():
            raise WorkspaceError(f"workspace {self.id}: a script did not end: {' '.join(said.split())[-_LINE:]}")
        return int(code), base64.b64decode(encoded)[:most]

    async def end_processes(self) -> None:
        code, _ = await self._ran(END, (self._begun_with, self._watch_pid), ROOT, self._deadline)
        if code:
            raise WorkspaceError(f"workspace {self.id}: its processes cannot be ended")

    async def _brought(self, data: bytes) -> str:
        local = self._provider.temporary()
        path = f"{SPOOL}/{local.name}"
        try:
            await asyncio.to_thread(local.write_bytes, data)
            await self._call("upload", self._patience(len(data)), local=str(local), remote=path)
        finally:
            local.unlink(missing_ok=True)
        return path

    async def _fetched(self, path: str, most: int) -> bytes:
        local = self._provider.temporary()
        code, size = await self._script('wc -c <"$1"', path)
        if code or int(size) > most:
            raise PathError(f"more than {most // MIB} MiB")
        try:
            await self._call("download", self._patience(most), remote=path, local=str(local))
            return await asyncio.to_thread(local.read_bytes)
        except OSError as error:
            raise self.failed("read a file", error) from None
        finally:
            local.unlink(missing_ok=True)
            self._later(self._removed(path))

    async def _removed(self, path: str) -> None:
        await self._script('rm -f "$1"', path)

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        seconds: float = 60.0,
        stdin: bytes = b"",
        output: int = OUTPUT,
    ) -> ExecResult:
        words = command_words(command, _MOST_WORDS, env)
        command_words(["".join(words)], _MOST_WORDS)  # all of them become one argument
        given = "/dev/null"
        if stdin:
            given = await self._brought(stdin)
            await self._script('chmod 644 "$1"', given)
        mark, name, limits = secrets.token_hex(16), secrets.token_hex(8), self._spec.limits
        folder, began = self.absolute(cwd or "."), time.monotonic()
        sizes = map(str, (limits.descriptors, max(1, limits.disk // 512), limits.processes))
        variables = [f"{key}={value}" for key, value in (env or {}).items()]
        line = [given, *sizes, folder, str(output - output // 2), mark, name, self._stops_file]
        line += ["env", *variables, *words] if variables else words
        running = asyncio.ensure_future(self._ran(_EXEC, line, user or "", seconds + 2 * _KILL_SECONDS))
        try:
            await asyncio.wait({running}, timeout=seconds)
            timed_out = not running.done()
            if timed_out:
                await self._script(inside.KILL, f"{inside.MARK}={name}", seconds=_KILL_SECONDS)
                await asyncio.wait({running}, timeout=_KILL_SECONDS)
            if not running.done():
                await self.end_processes()  # it shed its mark
            _, said = await running
        except asyncio.CancelledError:
            self._later(self.run_on_call(inside.KILL, name))
            raise
        finally:
            running.cancel()
        return await self._result(said.split(mark)[1:], folder, timed_out, output, time.monotonic() - began)

    async def _result(
        self, parts: Sequence[str], folder: str, timed_out: bool, output: int, seconds: float
    ) -> ExecResult:
        if parts and parts[0] == "folder":
            raise PathError(f"{folder}: no such folder")
        if len(parts) != 6:  # what runs programs was killed with all
            code, said = await self._script('tail -n +2 "$1" | tail -n 1', self._stops_file)
            stopped = STOPS.get(said.decode(errors="replace").strip(), "") if code == 0 else ""
            return ExecResult(124 if timed_out else 137, timed_out=timed_out, stopped=stopped, seconds=seconds)
        ended, _, why = parts[0].partition(" ")
        heads = [base64.b64decode(part) for part in parts[1:5]]
        first, last = output - output // 2, output // 2
        outs = []
        for head, tail in (heads[:2], heads[2:]):
            whole = len(tail) <= first
            outs.append(
                head + tail if whole and len(tail) <= last else head + b"\n... some bytes left out ...\n" + tail[-last:]
            )
        truncated = any(len(tail) > last for tail in (heads[1], heads[3]))
        return ExecResult(
            124 if timed_out else int(ended),
            outs[0],
            outs[1],
            truncated,
            timed_out,
            STOPS.get(why.strip(), ""),
            seconds,
        )

    async def terminal(self, *, rows: int = 40, columns: int = 120, env: dict[str, str] | None = None) -> Terminal:
        name, limits = secrets.token_hex(8), self._spec.limits
        sizes = map(str, (rows, columns, limits.descriptors, max(1, limits.disk // 512)))
        variables = [f"{key}={value}" for key, value in {"TERM": "xterm", **(env or {})}.items()]
        words = (*sizes, self.home, str(limits.processes), name, *variables)
        code, said = await self._script(_TERMINAL, *words, user="")
        if code == 40:
            raise PathError("a terminal needs the program `script` in the image")
        if code or not said:
            raise WorkspaceError(f"workspace {self.id}: no terminal can be opened")
        return HarborTerminal(self, said.decode(errors="surrogateescape"), name)

    async def run(self, script: str, *words: str, seconds: float = 0.0) -> tuple[int, bytes]:
        """Run a script of ours. Raises WorkspaceError."""
        return await self._script(script, *words, seconds=seconds)

    async def run_on_call(self, script: str, name: str) -> None:
        """Run a script of ours on what a call started. Raises WorkspaceError."""
        await self._script(script, f"{inside.MARK}={name}")

    async def snapshot(self) -> Snapshot:
        self._check()
        return await self._provider.keep(self, self._spec, self._kept)

    async def fresh(self, *, image: str = "", build: str = "") -> Workspace:
        spec = self._spec.for_grader(image, build)
        return await self._provider.opened(spec, None if image or build else self._kept)

    async def close(self) -> None:
        self._why = self._why or "it is closed"
        if self._timer is not None:
            self._timer.cancel()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        with contextlib.suppress(WorkspaceError):  # the runner stops it as it ends
            await self._provider.call("stop", self._deadline, name=self.id)
        self._provider.closed(self)


class HarborTerminal(Terminal):
    """A shell on a terminal that `script` has."""

    def __init__(self, workspace: HarborWorkspace, folder: str, name: str) -> None:
        self._workspace, self._folder, self._name = workspace, folder, name
        self._offset, self._ended, self._closed = 0, False, False

    def _check(self) -> None:
        if self._closed:
            raise WorkspaceError("the terminal is closed")

    async def send(self, data: bytes) -> None:
        self._check()
        if self._ended:
            raise WorkspaceError("the shell has ended")
        script = 'kill -0 "$(cat "$1/pid")" 2>/dev/null || exit 1; printf %s "$2" | base64 -d >"$1/in"'
        code, _ = await self._workspace.run(script, self._folder, base64.b64encode(data).decode())
        if code:
            self._ended = True
            raise WorkspaceError("the shell has ended")

    async def read(self, seconds: float, most: int = 1 << 16) -> bytes | None:
        self._check()
        if self._ended:
            return None
        words = (self._folder, str(self._offset), str(most), str(round(seconds * 10)))
        _, said = await self._workspace.run(_SAID, *words, seconds=seconds + _KILL_SECONDS)
        state, _, encoded = said.partition(b" ")
        data = base64.b64decode(encoded)
        self._offset += len(data)
        self._ended = not data and state == b"ended"
        return None if self._ended else data

    async def interrupt(self) -> None:
        await self.send(b"\x03")
        await self._workspace.run_on_call(inside.INTERRUPT, self._name)

    async def resize(self, rows: int, columns: int) -> None:
        self._check()
        await self._workspace.run('stty rows "$2" cols "$3" <"$(cat "$1/tty")"', self._folder, str(rows), str(columns))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(WorkspaceError):  # then it ends with the workspace
            await self._workspace.run_on_call(inside.KILL, self._name)
            await self._workspace.run('kill -9 "$(cat "$1/pid")" 2>/dev/null; rm -rf "$1"', self._folder)
