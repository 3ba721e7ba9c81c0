"""`Lane`: the one thread that all synchronous code of one object runs in, in order.

So a slow method holds up its own request alone, an object is never entered twice at once, and what is bound to a thread
(a database connection) stays in it. A call that its request no longer waits for ends by itself; the next one waits for
it, `close` too.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Job = tuple["Future[Any]", Callable[[], Any]]


class Lane:
    """The thread starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The function's result. When this is cancelled before its turn came, it is not called."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: function(*args, **kwargs)))
        return await asyncio.wrap_future(future)

    def end(self) -> None:
        """No call comes any more: the thread ends after those that wait."""
        if self._thread is not None:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - whoever waits for the call gets it
                future.set_exception(error)
            else:
                future.set_result(result)
