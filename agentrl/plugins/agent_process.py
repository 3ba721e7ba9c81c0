"""`AgentProcesses`: an agent in processes of its own, each of which does many rollouts at once; and their program.

What holds conversations costs more than the calls that it makes (the `openai` SDK 5.6 ms of CPU a call), and may exit,
hang or crash: here it costs the engine nothing. A process that ends fails its rollouts, and another takes its place.
"""

import asyncio
import itertools
import pickle
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.containment.threads import in_thread
from agentrl.containment.worker_process import SIZE, WorkerProcess, beginning, begun, connected, framed
from agentrl.errors import contained, describe
from agentrl.plugins.agent import Agent, AgentClient, FunctionAgent, Outcome, make_agent
from agentrl.plugins.types import Content, InfrastructureError, Json, Task
from agentrl.recipe.sections.agent import AgentSection

PING_SECONDS = 1.0
"""Between two questions whether a process still answers."""
START_PINGS = 300
"""Questions that a process may leave without an answer while it imports the agent."""
HELD_PINGS = 60
"""Questions without an answer after which a process is killed: code that does not await holds up its event loop."""
END_SECONDS = 1.0
"""What a rollout that was cancelled may take to end, its thread included; where it takes longer, its process takes no
other one."""
LARGEST = 64 << 20
"""Bytes of what an agent returns."""
_TOOLS = 64  # calls of tools that a rollout has under way at once
_Message = tuple[str, int, Any]  # what it is, of which rollout, and what belongs to it


def agent_of_recipe(section: AgentSection, inside: bool = False) -> Agent:
    """The agent of a recipe, in processes of its own where the recipe says so. inside: as of `make_agent`. Raises
    UserError."""
    made = make_agent(section, inside)
    return AgentProcesses(made, section) if section.processes else made


class AgentProcesses(Agent):
    """The agent of `section`. made: the same in this process, which is only closed."""

    def __init__(self, made: Agent, section: AgentSection) -> None:
        self.name, self._made, self._section = made.name, made, section
        self._live: list[_Process] = []
        self._held: dict[int, tuple[Outcome, _Process, int]] = {}  # what is still to be released, by its identity
        self._closed = False

    async def solve(self, task: Task, client: AgentClient) -> object:
        """Do the task in the process that does the fewest. Raises InfrastructureError, one line: what the agent raised,
        or how its process ended."""
        try:
            given = pickle.dumps((task, replace(client, call_tool=_absent, workspace=None)))
        except Exception as error:
            raise InfrastructureError(
                f"the task cannot be sent to a process ({type(error).__name__}: {error}): keep what cannot be pickled "
                f"out of a task's data, or leave agent.processes out"
            ) from error
        process = self._process()
        number, found = await process.solve(given, client)
        if type(self._made).release is Agent.release:
            return found
        outcome = found if isinstance(found, Outcome) else Outcome(returned=found)
        self._held[id(outcome)] = outcome, process, number
        return outcome

    def _process(self) -> "_Process":
        if self._closed:
            raise InfrastructureError(f"agent {self.name} is closed")
        self._live = [process for process in self._live if not process.over]
        fresh = [process for process in self._live if not process.retired]
        if len(fresh) < self._section.processes and all(process.rollouts for process in fresh):
            fresh.append(_Process({"section": self._section.model_dump(mode="json")}))
            self._live.append(fresh[-1])
        return min(fresh, key=lambda process: len(process.rollouts))

    async def release(self, outcome: Outcome) -> None:
        """Let the process that came to an outcome free what it held, unless that has ended."""
        if (held := self._held.pop(id(outcome), None)) is not None:
            _, process, number = held
            await process.release(number)

    async def close(self) -> None:
        """Kill the processes, whatever they do."""
        self._closed = True
        await asyncio.gather(*(process.close() for process in self._live))
        await self._made.close()


async def _absent(name: str, arguments: Mapping[str, Json] | str) -> Content:
    raise InfrastructureError("an agent's tools are called in the process that it runs in")


@dataclass(slots=True, eq=False)
class _Rollout:
    client: AgentClient
    done: "asyncio.Future[Any]"
    tools: "set[asyncio.Task[None]]" = field(default_factory=set)


class _Process:
    """A process and its rollouts. retired: it takes no further one, and is killed when its last has ended."""

    def __init__(self, facts: dict[str, Json]) -> None:
        self._worker = WorkerProcess("agentrl.plugins.agent_process")
        self._numbers = itertools.count()
        self._writer: asyncio.StreamWriter | None = None
        self._unanswered = 0
        self._why = ""
        self._end: asyncio.Future[None] | None = None
        self.rollouts: dict[int, _Rollout] = {}
        self._releases: dict[int, asyncio.Future[str | None]] = {}
        self.retired = False
        self.over = False
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._read(beginning(**facts))), asyncio.create_task(self._ping())]

    async def solve(self, given: bytes, client: AgentClient) -> tuple[int, object]:
        """The rollout's number here, and what the agent returned."""
        number, rollout = next(self._numbers), _Rollout(client, asyncio.get_running_loop().create_future())
        self.rollouts[number] = rollout
        begun = False
        try:
            await asyncio.wait({self._ready, rollout.done}, return_when=asyncio.FIRST_COMPLETED)
            begun = True
            self._send("solve", number, given)
            await asyncio.wait({rollout.done})
            return number, rollout.done.result()
        except asyncio.CancelledError:
            if not begun or rollout.done.done():
                raise
            return number, await self._cancelled(number, rollout)
        finally:
            del self.rollouts[number]
            for tool in rollout.tools:
                tool.cancel()
            if rollout.done.done() and not rollout.done.cancelled():
                rollout.done.exception()  # it is known, or of no interest any more
            if self.retired and not self.rollouts:
                await self.close()

    async def release(self, number: int) -> None:
        """Let the agent release what a rollout came to. Raises InfrastructureError: what it raised."""
        if self.over:
            return
        done = self._releases[number] = asyncio.get_running_loop().create_future()
        try:
            self._send("release", number, None)
            if (line := await done) is not None:
                raise InfrastructureError(line)
        finally:
            del self._releases[number]

    async def _cancelled(self, number: int, rollout: _Rollout) -> object:
        """What an agent returns that catches its cancellation, as one in this process may."""
        self._send("cancel", number, None)
        ended = False
        try:
            await asyncio.wait({rollout.done}, timeout=END_SECONDS)
            ended = rollout.done.done()
        finally:
            self.retired = self.retired or not ended
        if not ended:
            raise asyncio.CancelledError
        return rollout.done.result()

    def _send(self, what: str, number: int, value: object) -> None:
        if self._writer is not None and not self.over:
            self._writer.write(framed(pickle.dumps((what, number, value))))

    async def _read(self, first: bytes) -> None:
        """Serve what the process says, until it ends."""
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._worker.channel)
            self._writer.write(framed(first))
            while True:
                self._take(pickle.loads(await _message(reader)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except BaseException as error:  # noqa: BLE001 - boundary: strangers' code shares the socket
            self._why = f"what its process sent cannot be read: {describe(contained(error), place=False)}"
            self._worker.kill()
        await self._lost()

    def _take(self, message: _Message) -> None:
        what, number, value = message
        if what == "pong":
            self._unanswered = 0
        elif what == "ready" and not self._ready.done():
            self._unanswered = 0
            self._ready.set_result(None)
        elif what == "broken":
            self._why = value
        elif what == "hangs":
            self.retired = True
            if not self.rollouts:
                self._tasks.append(asyncio.create_task(self.close()))
        elif what == "released":
            if (releasing := self._releases.get(number)) is not None and not releasing.done():
                releasing.set_result(value)
        elif (rollout := self.rollouts.get(number)) is not None and not rollout.done.done():
            if what == "tool":
                task = asyncio.create_task(self._call_tool(rollout, number, *value))
                rollout.tools.add(task)
                task.add_done_callback(rollout.tools.discard)
            elif what == "done":
                self._done(rollout, value)
            elif what == "cancelled":
                rollout.done.cancel()
            else:
                rollout.done.set_exception(InfrastructureError(value))

    def _done(self, rollout: _Rollout, value: bytes) -> None:
        try:
            rollout.done.set_result(pickle.loads(value))
        except BaseException as error:  # noqa: BLE001 - boundary: unpickling runs strangers' code
            line = f"what it returned cannot be read here: {describe(contained(error))}"
            rollout.done.set_exception(InfrastructureError(line))

    async def _call_tool(
        self, rollout: _Rollout, number: int, call: int, name: str, arguments: Mapping[str, Json] | str
    ) -> None:
        try:
            self._send("tool", number, (call, await rollout.client.call_tool(name, arguments), None))
        except BaseException as error:  # noqa: BLE001 - boundary: the agent is told, as it would be here
            self._send("tool", number, (call, "", describe(contained(error))))

    async def _ping(self) -> None:
        """Kill the process when it no longer answers, or has ended while something that it started holds its socket."""
        while not self.over:
            await asyncio.sleep(PING_SECONDS)
            if self._worker.over:
                with suppress(OSError):
                    self._worker.channel.shutdown(socket.SHUT_RDWR)
            elif self._unanswered >= (HELD_PINGS if self._ready.done() else START_PINGS):
                self._why = (
                    f"an agent held up its process for {HELD_PINGS * PING_SECONDS:g} s by code that does not await, "
                    f"and it was killed: write such an agent without `async`, and it runs in a thread"
                )
                if not self._ready.done():
                    self._why = f"its process did not start within {START_PINGS * PING_SECONDS:g} s"
                self._worker.kill()
            self._unanswered += 1
            self._send("ping", 0, None)

    async def _lost(self) -> None:
        self.over = True
        await self.close(self._why or await in_thread(self._worker.how_it_ended, END_SECONDS))

    async def close(self, why: str = "its process was ended") -> None:
        """Kill it, and fail what it still does."""
        self.over = self.retired = True
        for rollout in self.rollouts.values():
            if not rollout.done.done():
                rollout.done.set_exception(InfrastructureError(why))
        for releasing in self._releases.values():
            if not releasing.done():
                releasing.set_result(None)  # what it held is gone with it
        if self._end is None:
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            if self._writer is not None:
                self._writer.close()
            self._end = asyncio.ensure_future(in_thread(self._worker.end))
        await asyncio.shield(self._end)


async def _message(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(SIZE), "big")
    if size > 2 * LARGEST:
        raise InfrastructureError(f"a message of {size} bytes")
    return await reader.readexactly(size)


@dataclass(slots=True)
class _Server:
    """The program: the agent, and the rollouts that it does."""

    agent: Agent
    writer: asyncio.StreamWriter
    rollouts: dict[int, "asyncio.Task[None]"] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # to be released
    calls: dict[int, "asyncio.Future[Content]"] = field(default_factory=dict)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def take(self, what: str, number: int, value: Any) -> None:
        if what == "ping":
            self.send("pong", 0, None)
        elif what == "solve":
            self.rollouts[number] = task = asyncio.create_task(self.solve(number, value))
            task.add_done_callback(lambda _: self.rollouts.pop(number, None))
        elif what == "release":
            self.rollouts[number] = task = asyncio.create_task(self.release(number))
            task.add_done_callback(lambda _: self.rollouts.pop(number, None))
        elif what == "cancel" and number in self.rollouts:
            self.cancelled.add(number)
            self.rollouts[number].cancel()
        elif what == "tool":
            call, text, error = value
            if (waiting := self.calls.pop(call, None)) is not None and not waiting.done():
                if error is None:
                    waiting.set_result(text)
                else:
                    waiting.set_exception(InfrastructureError(error))

    def send(self, what: str, number: int, value: object) -> None:
        self.writer.write(framed(pickle.dumps((what, number, value))))

    async def solve(self, number: int, given: bytes) -> None:
        try:
            task, client = pickle.loads(given)
            at_once = asyncio.Semaphore(_TOOLS)

            async def call_tool(name: str, arguments: Mapping[str, Json] | str) -> Content:
                async with at_once:
                    return await self.call_tool(number, name, arguments)

            found = await self.agent.solve(task, replace(client, call_tool=call_tool))
            if type(self.agent).release is not Agent.release:
                self.outcomes[number] = found if isinstance(found, Outcome) else Outcome(returned=found)
            self.send("done", number, _pickled(found))
        except BaseException as error:  # noqa: BLE001 - boundary: an agent may raise anything
            if not isinstance(error, asyncio.CancelledError):
                self.send("failed", number, describe(error))
            elif number in self.cancelled:
                self.send("cancelled", number, None)
                await self.look_for_threads()
            else:
                self.send("failed", number, "it cancelled itself")
        finally:
            self.cancelled.discard(number)

    async def look_for_threads(self) -> None:
        """Say so where a rollout that was cancelled left a thread that does not end."""
        if isinstance(self.agent, FunctionAgent) and self.agent.abandoned.total:
            await asyncio.sleep(END_SECONDS)
            if self.agent.abandoned.total:
                self.send("hangs", 0, None)

    async def release(self, number: int) -> None:
        line = None
        try:
            await self.agent.release(self.outcomes.pop(number))
        except BaseException as error:  # noqa: BLE001 - boundary: an agent may raise anything
            line = describe(error)
        self.send("released", number, line)

    async def call_tool(self, number: int, name: str, arguments: Mapping[str, Json] | str) -> Content:
        call = next(self.numbers)
        self.calls[call] = asyncio.get_running_loop().create_future()
        try:
            self.send("tool", number, (call, name, arguments))
            return await self.calls[call]
        finally:
            self.calls.pop(call, None)


def _pickled(found: object) -> bytes:
    try:
        value = pickle.dumps(found)
    except Exception as error:
        raise InfrastructureError(
            f"what it returned cannot be sent from its process ({type(error).__name__}: {error}): return text, "
            f"numbers, lists and dicts, or leave agent.processes out"
        ) from error
    if len(value) > LARGEST:
        raise InfrastructureError(f"it returned {len(value) >> 20} MiB; at most {LARGEST >> 20} MiB are kept")
    return value


async def _serve() -> None:
    reader, writer = await asyncio.open_connection(sock=connected())
    first = await _message(reader)
    try:
        agent = begun(first, lambda facts: make_agent(AgentSection.model_validate(facts["section"])))
    except BaseException as error:  # noqa: BLE001 - the boundary of the process: a module may raise anything
        line = f"it cannot be imported in a process of its own: {describe(error)}"
        writer.write(framed(pickle.dumps(("broken", 0, line))))
        await writer.drain()
        return
    server = _Server(agent, writer)
    server.send("ready", 0, None)
    with suppress(asyncio.IncompleteReadError):
        while True:
            server.take(*pickle.loads(await _message(reader)))


if __name__ == "__main__":
    asyncio.run(_serve())
