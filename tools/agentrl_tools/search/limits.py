"""How a service is asked: so many calls at once, so many a second, again after a failure, all within a deadline."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_FIRST, _LONGEST = 0.25, 8.0  # seconds of back-off after the first failure, and at most


class TryAgainError(Exception):
    """The service failed in a way that may pass. after: seconds that it asks us to wait, if it says."""

    def __init__(self, what: str, after: float | None = None) -> None:
        super().__init__(what)
        self.after = after


class GaveUpError(Exception):
    """It failed for good; the text says how often and of what."""


class Pace:
    """At most `rate` beginnings a second, evenly apart; None: no limit. Belongs to one event loop."""

    def __init__(self, rate: float | None) -> None:
        self._apart = 1.0 / rate if rate else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        if not self._apart:
            return
        now = time.monotonic()
        mine = max(now, self._next)
        self._next = mine + self._apart
        if mine > now:
            await asyncio.sleep(mine - now)


async def persist(work: Callable[[float], Awaitable[T]], retries: int, deadline: float) -> T:
    """The result of `work(seconds left)`, tried again after a TryAgainError with exponential back-off and jitter.

    deadline: on the clock of time.monotonic(). Raises GaveUpError after `retries` further attempts or when the next
    one would come too late; what else the work raises, it raises.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await asyncio.wait_for(work(deadline - time.monotonic()), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise GaveUpError(f"no answer before the deadline, in attempt {attempt}") from None
        except TryAgainError as error:
            pause = error.after if error.after is not None else _backoff(attempt)
            if attempt > retries:
                raise GaveUpError(f"{error} (attempt {attempt} of {retries + 1})") from error
            if time.monotonic() + pause >= deadline:
                raise GaveUpError(f"{error} (attempt {attempt}; no time is left for another)") from error
            await asyncio.sleep(pause)


def _backoff(attempt: int) -> float:
    """Half of it fixed, half of it random, so that those who failed together do not come back together."""
    most = min(_LONGEST, _FIRST * 2.0 ** (attempt - 1))
    return most * (0.5 + 0.5 * random.random())
