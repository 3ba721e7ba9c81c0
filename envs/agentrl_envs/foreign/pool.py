"""`Pool`: the processes of one foreign environment, and which of them serves which rollout."""

import asyncio
import json
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from agentrl.containment.threads import DaemonThreads
from agentrl.errors import UserError
from agentrl.jsonable import Json
from agentrl_envs.foreign.process import MAIN, Foreign, ForeignError, ForeignProcess

_shared: "dict[str, Pool]" = {}  # those that are open, by what they run
_opening = threading.Lock()


class Pool:
    """At most `most` processes at once. One that died is replaced when the next rollout begins; one in which a call
    hangs takes no further rollout, and is ended when its others are over. start_seconds: until the adapter is imported
    and has described itself, and for each call of the adapter itself."""

    def __init__(self, foreign: Foreign, most: int, start_seconds: float) -> None:
        self.foreign = foreign
        self._most, self._seconds = most, start_seconds
        self._lock = threading.Lock()
        self._rollouts: dict[ForeignProcess, int] = {}
        self._waiting: deque[Future[None]] = deque()
        self._numbers = MAIN
        self._starts = DaemonThreads(f"foreign-{foreign.name}", most)
        self._first: ForeignProcess | None = None
        self._closed = False
        self._users = 0

    @classmethod
    def shared(cls, foreign: Foreign, most: int, start_seconds: float) -> "Pool":
        """The pool of `foreign`: an environment and the agent that plays it have one. Each closes it, and the last of
        them ends its processes."""
        key = json.dumps([foreign.python, foreign.module, foreign.args, foreign.variables, foreign.alone], default=str)
        with _opening:
            pool = _shared.get(key)
            if pool is None or pool._closed:
                pool = _shared[key] = cls(foreign, most, start_seconds)
            pool._users += 1
            pool._most = max(pool._most, most)
            return pool

    def describe(self) -> dict[str, Any]:
        """What the adapter says of itself. Raises UserError."""
        described: dict[str, Any] = self._result(self._for_tasks().ready, "describe")
        return described

    def ask(self, call: str, *given: Json) -> Any:
        """The value of a method of the adapter itself. Blocks; raises UserError."""
        process = self._for_tasks()
        self._result(process.ready, "describe")
        return self._result(process.ask(call, MAIN, *given), call)

    def _for_tasks(self) -> ForeignProcess:
        """The process that is asked for tasks, started anew where it is gone; it serves rollouts, too, unless each has
        its process to itself."""
        with self._lock:
            if self._closed:
                raise UserError(f"environment {self.foreign.name} is closed")
            if self._first is None or self._first.over:
                live = None if self.foreign.alone else next((one for one in self._rollouts if not one.over), None)
                self._first = live or self._start()
                if not self.foreign.alone:
                    self._rollouts.setdefault(self._first, 0)
            return self._first

    def _result(self, future: "Future[Any]", call: str) -> Any:
        try:
            return future.result(self._seconds)
        except TimeoutError:
            raise UserError(
                f"{self.foreign.name}: {call}() did not return within {self._seconds:g} s (env.args.start_seconds)"
            ) from None
        except ForeignError as error:
            raise UserError(f"{error} ({self.foreign.python})") from None

    def _start(self) -> ForeignProcess:
        try:
            return ForeignProcess(self.foreign)
        except OSError as error:
            raise ForeignError(f"{self.foreign.python} cannot be started: {error.strerror}") from None

    async def take(self) -> tuple[ForeignProcess, int]:
        """A process for a rollout, and the number of its episode there. Raises ForeignError."""
        while (process := await self._chosen()) is None:
            await self._wait()
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(process.ready)), self._seconds)
        except TimeoutError:
            self.give_back(process)
            await process.end_in_thread()
            raise ForeignError(
                f"{self.foreign.name}: its process was not ready within {self._seconds:g} s (env.args.start_seconds)"
            ) from None
        except BaseException:
            self.give_back(process)
            raise
        with self._lock:
            self._numbers += 1
            return process, self._numbers

    async def _chosen(self) -> ForeignProcess | None:
        """See `_choose`, which runs in a thread, since it may start a process."""
        choosing = asyncio.wrap_future(self._starts.submit(self._choose))
        try:
            return await asyncio.shield(choosing)
        except asyncio.CancelledError:
            choosing.add_done_callback(self._give_up)
            raise

    def _give_up(self, choosing: "asyncio.Future[ForeignProcess | None]") -> None:
        if not choosing.cancelled() and choosing.exception() is None and (process := choosing.result()) is not None:
            self.give_back(process)

    def _choose(self) -> ForeignProcess | None:
        """The process with the fewest rollouts, or one that is new; None where all are taken."""
        with self._lock:
            if self._closed:
                raise ForeignError(f"{self.foreign.name} is closed")
            for process in [one for one in self._rollouts if one.over]:
                del self._rollouts[process]
            free = {one: count for one, count in self._rollouts.items() if not one.hangs}
            if self.foreign.alone:
                free = {one: count for one, count in free.items() if count == 0}
            if free and (min(free.values()) == 0 or len(self._rollouts) >= self._most):
                process = min(free, key=lambda one: free[one])
            elif len(self._rollouts) < self._most:
                process = self._start()
            else:
                return None
            self._rollouts[process] = self._rollouts.get(process, 0) + 1
            return process

    async def _wait(self) -> None:
        """Wait until a rollout has ended."""
        waiting: Future[None] = Future()
        with self._lock:
            self._waiting.append(waiting)
        try:
            await asyncio.wait_for(asyncio.wrap_future(waiting), 1.0)
        except TimeoutError:
            return
        finally:
            with self._lock:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)

    def give_back(self, process: ForeignProcess) -> bool:
        """Note that a rollout is over. Whether its process is to be ended now, since a call hangs in it."""
        with self._lock:
            if process in self._rollouts:
                self._rollouts[process] -= 1
            ends = process.hangs and not self._rollouts.get(process)
            if ends:
                self._rollouts.pop(process, None)
            waiting = self._waiting.popleft() if self._waiting else None
        if waiting is not None and waiting.set_running_or_notify_cancel():
            waiting.set_result(None)
        return ends

    async def close(self) -> None:
        """Kill them all, whatever they do, where nobody else uses them."""
        with _opening:
            self._users -= 1
            if self._users > 0:
                return
        with self._lock:
            self._closed = True
            processes = [*self._rollouts, *([self._first] if self._first is not None else [])]
            self._rollouts.clear()
        await asyncio.gather(*(process.end_in_thread() for process in processes))
        self._starts.shutdown(wait=False)
