"""`Pending`: work in a thread, with its result."""

import threading
from collections.abc import Callable
from typing import Protocol


class PendingLike(Protocol):
    """A save in progress, in this process or in many workers."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def result(self) -> None:
        """Wait for its end, and raise its error if it failed."""


class Pending:
    """Runs `work` in a thread, which is not a daemon: the process waits for it before it exits, so that a checkpoint is
    written to its end."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(
            target=self._run, name="agentrl-save"
        )  # cli.main waits for threads of this name
        self._thread.start()

    def done(self) -> bool:
        """Whether the work has ended, with an error or without."""
        return not self._thread.is_alive()

    def result(self) -> None:
        """Wait for the end of the work; raise its error if it failed."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread; `result` raises it
            self._error = error
        finally:
            del self._work  # frees the snapshot
