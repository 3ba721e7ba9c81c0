"""`Call`: one request while it waits, for room or for a server; it can be aborted, or cut when its server is gone."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.engine.sglang.client import ServerError
from agentrl.engine.sglang.pool import Member

ABORT_SECONDS = 1.0
"""What a server has to answer an abort with all that it sampled; then the tokens that came are taken."""


class Call:
    """A context manager around each wait, which then raises TimeoutError when it was aborted or cut."""

    def __init__(self) -> None:
        self.aborted = False
        self._error: ServerError | None = None
        self._timeout: asyncio.Timeout | None = None
        self._member: Member | None = None
        self._rid = ""

    def at(self, member: Member | None, rid: str) -> None:
        self._member, self._rid = member, rid

    async def __aenter__(self) -> None:
        now = asyncio.get_running_loop().time()
        self._timeout = asyncio.timeout_at(now if self.aborted else None)
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        timeout, self._timeout = self._timeout, None
        assert timeout is not None
        await timeout.__aexit__(*error)

    def abort(self, in_background: Callable[[Any], None] | None) -> None:
        """End it with what it has. With `in_background`, ask the server for what it sampled and has not sent yet."""
        if self.aborted:
            return
        self.aborted = True
        if self._member is not None and in_background is not None:
            in_background(post(self._member, "/abort_request", {"rid": self._rid}))
            self._end_in(ABORT_SECONDS)
        else:
            self._end_in(0.0)

    def cut(self, error: ServerError) -> None:
        """Its server is taken out."""
        self._error = error
        self._end_in(0.0)

    def lost(self) -> ServerError:
        error, self._error = self._error, None
        return error or ServerError("the request was cut")

    def _end_in(self, seconds: float) -> None:
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time() + seconds)


async def post(member: Member, path: str, body: Mapping[str, Any] | None = None) -> None:
    """For errands: a server that does not do it is found out by those who wait for it."""
    try:
        await member.client.post(path, body or {})
    except ServerError:
        return
