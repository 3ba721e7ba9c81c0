"""`span`: names a stretch of time of a run, which the time line of its page then shows."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TypeAlias

SINCE_1970 = time.time() - time.monotonic()
"""Seconds from the clock of deadlines to that of the world."""
_NAME = 80  # characters
_MOST = 200  # spans of a step, those of its samples aside

Keep: TypeAlias = Callable[[str, float, float], None]
"""Takes a name, the beginning and the end, in seconds since 1970."""

_sample: ContextVar[Keep | None] = ContextVar("sample", default=None)
_step: "list[tuple[str, float, float]] | None" = None


class span:  # noqa: N801 - it is used as a function is
    """Name the time that a block takes: `with agentrl.span("retrieve"):`, or `async with`.

    Within a rollout (tools, environments, agents and rewards of a sample) it stands on the lane of the sample,
    elsewhere on that of the step. It counts in the process that trains, costs microseconds, and does nothing where no
    run goes on.
    """

    __slots__ = ("_name", "_started")

    def __init__(self, name: str) -> None:
        self._name, self._started = str(name)[:_NAME], 0.0

    def __enter__(self) -> "span":
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = time.monotonic()
        keep = _sample.get()
        if keep is not None:
            keep(self._name, self._started + SINCE_1970, ended + SINCE_1970)
        elif (kept := _step) is not None and len(kept) < _MOST:
            kept.append((self._name, self._started + SINCE_1970, ended + SINCE_1970))

    async def __aenter__(self) -> "span":
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def begin_sample(keep: Keep) -> None:
    """Give the spans of this task, and of what it starts, to a sample."""
    _sample.set(keep)


@contextmanager
def kept_steps() -> Iterator[None]:
    """Keep the spans of steps within the block, for `take_step`."""
    global _step
    _step = []
    try:
        yield
    finally:
        _step = None


def take_step() -> list[tuple[str, float, float]]:
    """The spans since the last call: name, beginning and end."""
    global _step
    if _step is None:
        return []
    found, _step = _step, []
    return found
