"""What the HTTP servers of this package have in common: who may ask, and that strangers' faults print nothing."""

import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_NAMES_HERE = frozenset(("127.0.0.1", "localhost", "[::1]"))
_log = logging.getLogger("agentrl.http")
_log.addFilter(lambda record: not isinstance(_raised(record), HttpProcessingError | web.RequestPayloadError))


def _raised(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def names_this_machine(request: web.Request) -> bool:
    """Whether the request's `Host` is a name of the loopback: not one that somebody else lets point here, by
    which a page of theirs would be of the same origin (DNS rebinding)."""
    host = request.host.lower()
    return host in _NAMES_HERE or host.rpartition(":")[0] in _NAMES_HERE


def quiet_runner(app: web.Application, **options: Any) -> web.AppRunner:
    """The runner of an application that writes no log of requests, and no traceback for those that are not
    HTTP, or whose bodies are not what their headers say: they are answered with status 400, or as if they had no body
    where nobody reads it. options: further ones of `web.AppRunner`."""
    return web.AppRunner(app, access_log=None, logger=_log, **options)
