"""`Lane`: the one thread that all synchronous code of one object runs in, in order.

So a slow method holds up its own request alone, an object is never entered twice at once, and what is bound to a thread
(a database connection) stays in it. A call that its request no longer waits for ends by itself; the next one waits for
it, `close` too.
"""

import asyncio
import functools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from agentrl.threads import Abandoned, Call


class Lane:
    """The thread starts with the first call. abandoned: counts the calls that hang, in all lanes of an environment."""

    def __init__(self, name: str, abandoned: Abandoned) -> None:
        self._name, self._abandoned = name, abandoned
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The function's result. When this is cancelled before its turn came, it is not called."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        call = Call(functools.partial(function, *args, **kwargs), self._abandoned)
        self._calls.put(call)
        return await asyncio.wrap_future(call)

    def end(self) -> None:
        """No call comes any more: the thread ends after those that wait."""
        if self._thread is not None:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
