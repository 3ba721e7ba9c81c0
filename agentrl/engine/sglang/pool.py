"""`Pool`: which server a request goes to. A conversation stays on one server, whose prefix cache knows it; a new one
goes to the least loaded; no server has more than `limit` requests in flight. One that fails is out until it is let in.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agentrl.engine.sglang.client import Client, ServerError
from agentrl.engine.sglang.wire import Features


@dataclass(slots=True, eq=False)
class Member:
    """One server. flights: what is told when the server is taken out, one a request in flight. `out`: why it is out, or
    None. moved: when it last gave a sign of life, seconds of time.monotonic(). faults: failed requests in a row."""

    client: Client
    features: Features = field(default_factory=Features)
    out: str | None = "it has not started"
    flights: "set[Flight]" = field(default_factory=set)
    queue: "deque[Waiter]" = field(default_factory=deque)
    moved: float = 0.0
    faults: int = 0
    served: int = 0

    @property
    def url(self) -> str:
        return self.client.url


class Flight:
    """A request in flight. `cut(error)` ends its wait for the server. adapter: that it samples from. began: seconds of
    time.monotonic()."""

    __slots__ = ("adapter", "began", "cut")

    def __init__(self, cut: Callable[[ServerError], None], adapter: str | None = None) -> None:
        self.cut, self.adapter = cut, adapter
        self.began = time.monotonic()


@dataclass(slots=True, eq=False)
class Waiter:
    """Somebody who waits for room on a server."""

    conversation: str
    future: "asyncio.Future[Member]"
    avoid: Member | None = None


class Pool:
    """Belongs to one event loop at a time; waiters do not outlive theirs."""

    def __init__(self, members: Iterable[Member], limit: int) -> None:
        self.members = list(members)
        self._limit = limit
        self._home: dict[str, Member] = {}
        self._queue: deque[Waiter] = deque()

    @property
    def up(self) -> list[Member]:
        return [m for m in self.members if m.out is None]

    @property
    def waiting(self) -> bool:
        return any(not w.future.done() for w in self._queue)

    @property
    def flying(self) -> int:
        return sum(len(m.flights) for m in self.members)

    async def take(self, conversation: str, avoid: Member | None = None) -> Member:
        """A server with room for one more request, which is to be `give`n back. Waits for one; `avoid` is taken only
        when it is the only one."""
        waiter = Waiter(conversation, asyncio.get_running_loop().create_future(), avoid)
        if not self._place(waiter):
            home = self._home.get(conversation)
            (home.queue if home is not None and home is not avoid else self._queue).append(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                self.give(waiter.future.result())
            raise

    def give(self, member: Member) -> None:
        """A request that was let in is over."""
        member.served -= 1
        self._serve()

    def forget(self, conversation: str) -> None:
        self._home.pop(conversation, None)

    def take_out(self, member: Member, why: str) -> None:
        """Nothing goes to it any more; its requests in flight and those that wait for it go elsewhere."""
        if member.out is not None:
            return
        member.out = why
        for conversation in [c for c, m in self._home.items() if m is member]:
            del self._home[conversation]
        self._queue.extendleft(reversed(member.queue))
        member.queue.clear()
        for flight in list(member.flights):
            flight.cut(ServerError(f"{member.url} was taken out: {why}"))
        self._serve()

    def let_in(self, member: Member) -> None:
        member.out, member.faults, member.moved = None, 0, time.monotonic()
        self._serve()

    def fail_waiting(self, error: ServerError) -> None:
        """Nobody is left to serve those who wait."""
        for waiter in self._queue:
            if not waiter.future.done():
                waiter.future.set_exception(error)
        self._queue.clear()

    def _place(self, waiter: Waiter) -> bool:
        home = self._home.get(waiter.conversation)
        if home is not None and home is not waiter.avoid:
            return self._admit(waiter, home) if home.served < self._limit else False
        free = [m for m in self.members if m.out is None and m.served < self._limit]
        others = [m for m in free if m is not waiter.avoid]
        if (
            not others
            and waiter.avoid is not None
            and any(m.out is None for m in self.members if m is not waiter.avoid)
        ):
            return False  # the others are only busy
        chosen = min(others or free, key=lambda m: m.served, default=None)
        if chosen is None:
            return False
        self._home[waiter.conversation] = chosen
        return self._admit(waiter, chosen)

    def _admit(self, waiter: Waiter, member: Member) -> bool:
        member.served += 1
        waiter.future.set_result(member)
        return True

    def _serve(self) -> None:
        """Let in who waits: first the conversations that a server knows, then the rest, in the order they came."""
        for member in self.members:
            while member.queue and (member.queue[0].future.done() or self._place(member.queue[0])):
                member.queue.popleft()
        while self._queue and (self._queue[0].future.done() or self._place(self._queue[0])):
            self._queue.popleft()
