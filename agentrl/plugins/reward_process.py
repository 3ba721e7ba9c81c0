"""`Processes`: a reward in processes of its own, which can be killed whatever its code does; and their program."""

import asyncio
import json
import pickle
import threading
from contextlib import suppress
from typing import Any, BinaryIO

from agentrl.containment.threads import DaemonThreads
from agentrl.containment.worker_process import SIZE, WorkerProcess, beginning, begun, connected, framed, stream_of
from agentrl.errors import describe
from agentrl.plugins.reward import GroupReward, Reward, make_reward
from agentrl.plugins.types import InfrastructureError
from agentrl.recipe.sections.env import RewardSection


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

    async def ask(self, given: object) -> Any:
        """What the reward says of a sample, or of the samples of a group. A cancellation kills the process.

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
            process.ask(beginning(**self._begin))
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

    async def score(self, given: object) -> Any:
        return await self._processes.ask(given)

    async def close(self) -> None:
        self._processes.close()
        await self._made.close()


class _ProcessReward(_InProcesses, Reward):
    """The reward of one sample, in processes."""


class _ProcessGroupReward(_InProcesses, GroupReward):
    """The reward of a group, in processes."""


def in_processes(made: Reward | GroupReward, section: RewardSection, where: str) -> Reward | GroupReward:
    """The reward `made`, scored by `section.processes` processes. where: of its arguments, for an error."""
    return (_ProcessReward if isinstance(made, Reward) else _ProcessGroupReward)(made, section, where)


class _Request:
    """given: what is to be scored. It knows its process as long as that works on it."""

    def __init__(self, given: object) -> None:
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


class _Process(WorkerProcess):
    def __init__(self, name: str) -> None:
        super().__init__("agentrl.plugins.reward_process")
        self._name = name
        self._stream = stream_of(self.channel)

    def ask(self, payload: bytes) -> Any:
        try:
            _write(self._stream, payload)
            reply = _read(self._stream)
        except OSError:
            reply = None
        if reply is None:
            raise InfrastructureError(f"{self._name}: {self.how_it_ended()}")
        found = json.loads(reply)
        if "error" in found:
            raise InfrastructureError(f"{self._name}: {found['error']}")
        return found["value"]

    def end(self) -> None:
        super().end()
        with suppress(OSError):  # a request that was cut short is still buffered
            self._stream.close()


def _write(stream: BinaryIO, payload: bytes) -> None:
    stream.write(framed(payload))
    stream.flush()


def _read(stream: BinaryIO) -> bytes | None:
    """The next message; None where the stream ends."""
    size = stream.read(SIZE)
    payload = stream.read(int.from_bytes(size, "big")) if len(size) == SIZE else b""
    return payload or None


def main() -> None:
    """Serve until requests end."""
    stream = stream_of(connected())
    first = _read(stream)
    if first is None:
        return
    try:
        made = begun(first, lambda facts: make_reward(RewardSection.model_validate(facts["section"]), facts["where"]))
    except BaseException as error:  # noqa: BLE001 - the boundary of the process: a module may raise anything
        _write(stream, _error(f"it cannot be imported in a process of its own: {describe(error)}"))
        return
    _write(stream, b'{"value": null}')
    with asyncio.Runner() as runner:
        while (payload := _read(stream)) is not None:
            _write(stream, _answer(runner, made, payload))


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


if __name__ == "__main__":
    main()
