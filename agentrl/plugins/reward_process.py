"""`Processes`: a reward in processes of its own, which can be killed whatever its code does; and their program.

A process imports the reward by its name in the recipe, so that nothing but samples is pickled. It has the environment,
the import path and the seed of this process.
"""

import asyncio
import fcntl
import json
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

from agentrl.errors import describe
from agentrl.plugins.reward import GroupReward, Reward, make_reward
from agentrl.plugins.types import InfrastructureError, Json
from agentrl.recipe.schema import RewardSection
from agentrl.threads import DaemonThreads

_SIZE = 8  # bytes before each message, which hold its length


class Processes:
    """At most `section.processes` at once; each starts when it is first needed, and after one was killed."""

    def __init__(self, name: str, section: RewardSection, where: str) -> None:
        self._name = name
        self._begin = {"section": section.model_dump(mode="json"), "where": where}
        self._threads = DaemonThreads(f"reward-{name}", section.processes)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._live: set[_Process] = set()
        self._closed = False

    async def ask(self, given: Any) -> Any:
        """Return what the reward says of a sample, or of the samples of a group. A cancellation kills the process.

        Raises InfrastructureError, one line: what the reward raised, or why it could not be asked.
        """
        request = _Request(given)
        try:
            return await self._threads.call(self._answer, request)
        except asyncio.CancelledError:
            request.kill()
            raise

    def _answer(self, request: "_Request") -> Any:
        try:
            payload = pickle.dumps(request.given)
        except Exception as error:
            raise InfrastructureError(
                f"{self._name}: the sample cannot be sent to a process ({type(error).__name__}: {error}): keep what "
                f"cannot be pickled out of a task's data, or leave `processes` out"
            ) from error
        process = self._take()
        try:
            return process.ask(payload) if request.begin(process) else None
        finally:
            request.end()
            self._give_back(process)

    def _take(self) -> "_Process":
        with self._lock:
            if self._closed:
                raise InfrastructureError(f"{self._name} is closed")
            if self._idle:
                return self._idle.pop()
            process = _Process(self._name)
            self._live.add(process)
        try:
            process.begin({**self._begin, "path": sys.path, "seed": _seed()})
        except BaseException:
            self._give_back(process)
            raise
        return process

    def _give_back(self, process: "_Process") -> None:
        with self._lock:
            if process.over or self._closed:
                self._live.discard(process)
                process.end()
            else:
                self._idle.append(process)

    def close(self) -> None:
        """Kill them all, whatever they do."""
        with self._lock:
            self._closed = True
            for process in self._live:
                process.kill()
            for process in self._idle:
                process.end()
            self._idle.clear()
        self._threads.shutdown()


class _InProcesses:
    """A reward whose `score` runs in processes; `made` is the same reward in this process, which only gets closed."""

    def __init__(self, made: Reward | GroupReward, section: RewardSection, where: str) -> None:
        self.name, self._made, self._processes = made.name, made, Processes(made.name, section, where)

    async def score(self, given: Any) -> Any:
        return await self._processes.ask(given)

    async def close(self) -> None:
        self._processes.close()
        await self._made.close()


class _ProcessReward(_InProcesses, Reward):
    """The reward of one sample, in processes."""


class _ProcessGroupReward(_InProcesses, GroupReward):
    """The reward of a group, in processes."""


def in_processes(made: Reward | GroupReward, section: RewardSection, where: str) -> Reward | GroupReward:
    """Return the reward `made`, scored by `section.processes` processes. where: of its arguments, for an error."""
    return (_ProcessReward if isinstance(made, Reward) else _ProcessGroupReward)(made, section, where)


class _Request:
    """given: what is to be scored. It knows its process as long as that works on it."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._killed = False

    def begin(self, process: "_Process") -> bool:
        with self._lock:
            self._process = None if self._killed else process
            return not self._killed

    def end(self) -> None:
        with self._lock:
            self._process = None

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()


class _Process:
    def __init__(self, name: str) -> None:
        self._name = name
        requests, self._requests = _pipe("wb")
        replies, self._replies = _pipe("rb")
        alive, self._alive = _pipe("wb")  # its end closes with this process, however that ends
        theirs = (requests, replies, alive)
        command = [sys.executable, "-m", "agentrl.plugins.reward_process", *map(str, theirs)]
        try:
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=theirs, start_new_session=True)
        finally:
            for end in theirs:
                os.close(end)

    @property
    def over(self) -> bool:
        return self._child.poll() is not None

    def begin(self, message: dict[str, Json]) -> None:
        """Let it import the reward. Raises InfrastructureError where it cannot."""
        self.ask(json.dumps(message).encode())

    def ask(self, payload: bytes) -> Any:
        try:
            _write(self._requests, payload)
            reply = _read(self._replies)
        except OSError:
            reply = None
        if reply is None:
            code = self._child.wait()
            how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
            raise InfrastructureError(f"{self._name}: its process ended by {how}")
        found = json.loads(reply)
        if "error" in found:
            raise InfrastructureError(f"{self._name}: {found['error']}")
        return found["value"]

    def kill(self) -> None:
        """Kill its process group; a caller that waits for the reply gets an error."""
        with suppress(ProcessLookupError):  # the whole session: what the reward started goes with it
            os.killpg(self._child.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._child.wait()
        for stream in (self._requests, self._replies, self._alive):
            with suppress(OSError):  # a request that was cut short is still buffered
                stream.close()


def _pipe(mode: str) -> tuple[int, IO[bytes]]:
    """Return the end for the other process, and ours."""
    reading, writing = os.pipe()
    theirs, ours = (reading, writing) if mode == "wb" else (writing, reading)
    return theirs, os.fdopen(ours, mode)


def _write(stream: IO[bytes], payload: bytes) -> None:
    stream.write(len(payload).to_bytes(_SIZE, "big") + payload)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """Return the next message; None where the stream ends."""
    size = stream.read(_SIZE)
    payload = stream.read(int.from_bytes(size, "big")) if len(size) == _SIZE else b""
    return payload or None


def _seed() -> int | None:
    """Return the seed of the run, which is torch's here."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.initial_seed())


def main() -> None:
    """Serve until requests end. Arguments: the descriptors of requests, replies, and of a pipe that closes when
    the other process ends."""
    requests, replies, alive = map(int, sys.argv[1:])
    _end_with(alive)
    incoming, outgoing = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
    first = _read(incoming)
    if first is None:
        return
    begin = json.loads(first)
    sys.path[:] = begin["path"]
    try:
        made = _import(begin)
    except BaseException as error:  # noqa: BLE001 - the boundary of the process: a module may raise anything
        _write(outgoing, _error(f"it cannot be imported in a process of its own: {describe(error)}"))
        return
    _write(outgoing, b'{"value": null}')
    with asyncio.Runner() as runner:
        while (payload := _read(incoming)) is not None:
            _write(outgoing, _answer(runner, made, payload))


def _import(begin: dict[str, Any]) -> Reward | GroupReward:
    if begin["seed"] is not None:
        random.seed(begin["seed"])
    made = make_reward(RewardSection.model_validate(begin["section"]), begin["where"])
    if begin["seed"] is not None:
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(begin["seed"] % 2**32)
        if (torch := sys.modules.get("torch")) is not None:
            torch.manual_seed(begin["seed"])
    return made


def _answer(runner: asyncio.Runner, made: Reward | GroupReward, payload: bytes) -> bytes:
    try:
        given = pickle.loads(payload)
    except BaseException as error:  # noqa: BLE001 - the boundary of the process
        return _error(f"the sample cannot be read in a process of its own: {describe(error)}")
    try:
        value = runner.run(_scored(made, given))
        return json.dumps({"value": list(value) if isinstance(made, GroupReward) else value}, default=float).encode()
    except BaseException as error:  # noqa: BLE001 - the boundary of the process
        return _error(describe(error))


async def _scored(made: Reward | GroupReward, given: Any) -> Any:
    return await made.score(given)


def _error(line: str) -> bytes:
    return json.dumps({"error": line}).encode()


def _end_with(alive: int) -> None:
    """End when `alive` closes: by a signal of the kernel's, which needs nothing of an interpreter that is busy."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([alive], [], [], 0)[0]:
        sys.exit()


if __name__ == "__main__":
    main()
