"""`Pool`: which server a request goes to. A conversation stays on one server, whose prefix cache knows it; a new one
goes to the least loaded; no server has more than `limit` requests in flight. One that fails is out until it is let in.

`Call`: a request in flight; it can be aborted, or cut when its server is taken out.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl.engine.servers.answer import Features
from agentrl.engine.servers.client import Client, ServerError
from agentrl.plugins.types import Json

ABORT_SECONDS = 1.0
"""Time for a server to answer an abort with all that it sampled; then the tokens that came are taken."""


@dataclass(slots=True, eq=False)
class Member:
    """One server of the pool."""

    client: Client
    """Its connection."""
    features: Features = field(default_factory=Features)
    """What it can do."""
    out: str | None = "it has not started"
    """Why it gets no requests; None: it does."""
    calls: "set[Call]" = field(default_factory=set)
    """The requests that it answers."""
    queue: "deque[Waiter]" = field(default_factory=deque)
    """Conversations of its own that wait for room."""
    last_seen: float = 0.0
    """When it last gave a sign of life, seconds of time.monotonic()."""
    faults: int = 0
    """Failed requests in a row."""
    served: int = 0
    """Requests that have taken room on it."""

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.url


class Call:
    """A request while it waits, for room or for a server. A context manager around each wait, which raises TimeoutError
    when the request was aborted or cut."""

    def __init__(self) -> None:
        self.aborted = False
        self.adapter: str | None = None
        """The adapter that it samples from, on the server that answers it."""
        self.start = 0.0
        """When that server was asked, seconds of time.monotonic()."""
        self._error: ServerError | None = None
        self._timeout: asyncio.Timeout | None = None
        self._member: Member | None = None
        self._rid = ""

    @contextmanager
    def on(self, member: Member, rid: str, adapter: str | None) -> Iterator[None]:
        """Be in flight on a server, under the request id `rid`."""
        self._member, self._rid, self.adapter, self.start = member, rid, adapter, time.monotonic()
        member.calls.add(self)
        try:
            yield
        finally:
            member.calls.discard(self)
            self._member = None

    async def __aenter__(self) -> None:
        now = asyncio.get_running_loop().time()
        self._timeout = asyncio.timeout_at(now if self.aborted else None)
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        timeout, self._timeout = self._timeout, None
        assert timeout is not None
        await timeout.__aexit__(*error)

    def abort(
        self,
        in_background: Callable[[Coroutine[object, None, None]], None] | None,
        how: Callable[[str], tuple[str, dict[str, Json]]] | None = None,
    ) -> None:
        """End it with what it has. With `in_background`, ask the server for what it sampled and has not sent yet, by
        the path and body that `how` returns for a request's id."""
        if self.aborted:
            return
        self.aborted = True
        if self._member is not None and in_background is not None and how is not None:
            in_background(post(self._member, *how(self._rid)))
            self._end_in(ABORT_SECONDS)
        else:
            self._end_in(0.0)

    def cut(self, error: ServerError) -> None:
        """End its wait: its server is taken out."""
        self._error = error
        self._end_in(0.0)

    def take_error(self) -> ServerError:
        """Why it was cut, once."""
        error, self._error = self._error, None
        return error or ServerError("the request was cut")

    def _end_in(self, seconds: float) -> None:
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time() + seconds)


async def post(member: Member, path: str, body: Mapping[str, Json] | None = None) -> None:
    """Post in the background: a server that fails at it is noticed by those who wait for it."""
    with suppress(ServerError):
        await member.client.post(path, body or {})


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for room on a server."""

    conversation: str
    """Its request id, the same in every turn."""
    future: "asyncio.Future[Member]"
    """Set to the server that has room."""
    avoid: Member | None = None
    """The server that it failed on."""


class Pool:
    """limit: requests in flight on one server, at most. Belongs to one event loop at a time; waiters do not outlive
    it."""

    def __init__(self, members: Iterable[Member], limit: int) -> None:
        self.members = list(members)
        self._limit = limit
        self._home: dict[str, Member] = {}
        self._queue: deque[Waiter] = deque()

    @property
    def up(self) -> list[Member]:
        """The servers that are sent requests."""
        return [m for m in self.members if m.out is None]

    @property
    def waiting(self) -> bool:
        """Whether a request waits for room on any server."""
        return any(not w.future.done() for w in self._queue)

    @property
    def in_flight(self) -> int:
        """Requests on all servers."""
        return sum(len(m.calls) for m in self.members)

    async def take(self, conversation: str, avoid: Member | None = None) -> Member:
        """Wait for a server with room for one more request and take that room until `give`. `avoid` is chosen only when
        it is the only one."""
        waiter = Waiter(conversation, asyncio.get_running_loop().create_future(), avoid)
        if not self._admit(waiter):
            home = self._home.get(conversation)
            (home.queue if home is not None and home is not avoid else self._queue).append(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                self.give(waiter.future.result())
            raise

    def give(self, member: Member) -> None:
        """Give back the room that `take` took."""
        member.served -= 1
        self._serve()

    def forget(self, conversation: str) -> None:
        """Bind a conversation that has ended to no server."""
        self._home.pop(conversation, None)

    def take_out(self, member: Member, why: str) -> None:
        """Send it nothing more; its requests in flight and those that wait for it go elsewhere."""
        if member.out is not None:
            return
        member.out = why
        for conversation in [c for c, m in self._home.items() if m is member]:
            del self._home[conversation]
        self._queue.extendleft(reversed(member.queue))
        member.queue.clear()
        for call in list(member.calls):
            call.cut(ServerError(f"{member.url} was taken out: {why}"))
        self._serve()

    def let_in(self, member: Member) -> None:
        """Send it requests again."""
        member.out, member.faults, member.last_seen = None, 0, time.monotonic()
        self._serve()

    def fail_waiting(self, error: ServerError) -> None:
        """Raise `error` in every request that waits."""
        for waiter in self._queue:
            if not waiter.future.done():
                waiter.future.set_exception(error)
        self._queue.clear()

    def _admit(self, waiter: Waiter) -> bool:
        """Assign a server with room, and return whether there is one."""
        home = self._home.get(waiter.conversation)
        if home is not None and home is not waiter.avoid:
            return self._assign(waiter, home) if home.served < self._limit else False
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
        return self._assign(waiter, chosen)

    def _assign(self, waiter: Waiter, member: Member) -> bool:
        member.served += 1
        waiter.future.set_result(member)
        return True

    def _serve(self) -> None:
        """Admit waiting requests: first the conversations that a server knows, then the rest, in the order they
        came."""
        for member in self.members:
            while member.queue and (member.queue[0].future.done() or self._admit(member.queue[0])):
                member.queue.popleft()
        while self._queue and (self._queue[0].future.done() or self._admit(self._queue[0])):
            self._queue.popleft()
