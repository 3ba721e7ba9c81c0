"""Whether this process stood still for a while: stopped by SIGSTOP or a debugger, or its machine asleep.

Deadlines pass meanwhile, connections break and a tool's own limits fire, and none of that is the model's doing. A
thread ticks; where its ticks stay away, and the process computed nothing, it stood still. Code that merely holds up the
event loop lets the thread tick on, and code that holds the interpreter's lock computes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICK = 0.25
"""Seconds between the ticks."""

STILL = 5.0
"""Seconds without a tick that count."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # which also counts while the machine sleeps
_log = logging.getLogger("agentrl.rollout")


class Pulse:
    """One for the process. It ticks while somebody is inside of `felt`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tell: dict[Callable[[], None], asyncio.AbstractEventLoop] = {}
        self._end = threading.Event()
        self._stops = 0
        self._start()

    @contextmanager
    def ticking(self, tell: Callable[[], None]) -> Iterator[None]:
        """Tick while the block runs. tell: called in the event loop that runs now, soon after the process goes on.
        Nested and concurrent uses are fine."""
        with self._lock:
            if not self._tell:
                self._start()
                self._end = threading.Event()
                threading.Thread(target=self._run, args=(self._end,), name="agentrl-pulse", daemon=True).start()
            self._tell[tell] = asyncio.get_running_loop()
        try:
            yield
        finally:
            with self._lock:
                del self._tell[tell]
                if not self._tell:
                    self._end.set()

    def stops(self) -> int:
        """How often the process stood still so far, this moment included."""
        with self._lock:
            wall, busy = time.clock_gettime(_CLOCK) - self._wall, time.process_time() - self._busy
            if wall > STILL and busy < wall / 2:
                self._stops += 1
                _log.warning("this process stood still for %.0f s: what was being sampled begins again", wall)
                for tell, loop in self._tell.items():
                    loop.call_soon_threadsafe(tell)
            self._start()
            return self._stops

    def _start(self) -> None:
        self._wall, self._busy = time.clock_gettime(_CLOCK), time.process_time()

    def _run(self, end: threading.Event) -> None:
        while not end.wait(TICK):
            self.stops()


PULSE = Pulse()
