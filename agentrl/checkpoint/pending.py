"""`Pending`: work that goes on in a thread while the caller does other things."""

import threading
from collections.abc import Callable
from typing import Protocol


class PendingLike(Protocol):
    """What a controller asks of a save, wherever it is done: here, or in many workers."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def result(self) -> None:
        """Wait for its end; raises what it raised."""
        ...


class Pending:
    """Runs `work` at once: in a thread of its own, or (`asynchronous` false) before this returns. The thread is no
    daemon: a process that ends waits for it, so that what is being written is written to its end."""

    def __init__(self, work: Callable[[], None], asynchronous: bool = True) -> None:
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="agentrl-save")  # cli.main knows it by its name
        if asynchronous:
            self._thread.start()
        else:
            self._run()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread; `result` raises it
            self._error = error
        finally:
            del self._work  # and with it the snapshot
