"""`agentrl view`: the page of one or several runs, on this machine alone.

Who may read it: what is asked of a run carries a random token, which the printed address holds behind its #. So no
other server is sent it, as those of other ports would be sent a cookie. Requests by a name that somebody else lets
point here are refused, and bodies of another origin's pages. What is served are the page's own files, by name from a
fixed table, and what `RunStore` reads; no path comes from a request. What is written are notes alone.
"""

import asyncio
import hmac
import json
import os
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from agentrl.errors import UserError
from agentrl.http_server import names_this_machine, quiet_runner
from agentrl.plugins.types import Json
from agentrl.view.assets import MODULES, Ranges, Watched, page_file
from agentrl.view.catalog import Catalog
from agentrl.view.meanings import told_of
from agentrl.view.store import RunStore, Why

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

_KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HEADER = "X-Agentrl-Token"
"""Of requests for what is stored."""
_MOST_FILES = 64  # whose index one request may ask for
_MOST_RUNS = 64  # that one page shows together
_MOST_TEXT = 500  # characters that are searched for
_MOST_BODY = 16 << 20  # bytes: a selection of a million samples


@dataclass(frozen=True)
class Shown:
    """What a page shows."""

    catalog: Catalog
    """The runs that can be shown."""
    ranges: Callable[[], Ranges] = dict
    """The healthy ranges of metrics; called once the page asks for them."""
    watched: Callable[[], Watched] = dict
    """The conditions of health that look at metrics, likewise."""
    why: Why | None = None
    """Says why samples of a file are unsolved."""
    follow: bool = False
    """Whether the page goes to the newest step as it comes."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """What a request must carry."""


def make_app(shown: Shown) -> web.Application:
    """The application; see the module."""
    app = web.Application(middlewares=[_guard(shown.token)], client_max_size=_MOST_BODY)
    app.router.add_get("/", _page)
    for name in (*MODULES, "style.css"):
        app.router.add_get(f"/{name}", _page)
    for name, answer in _ANSWERS.items():
        app.router.add_get(f"/api/{name}", _api(shown, answer))
    for name, answer_to in _POSTED.items():
        app.router.add_post(f"/api/{name}", _posted(shown, answer_to))
    return app


def _guard(token: str) -> "Middleware":
    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not names_this_machine(request):
            return _refused("this address does not name this machine")
        given = request.headers.get(HEADER, "")
        if request.path.startswith("/api/") and not hmac.compare_digest(
            given.encode("utf-8", "surrogateescape"), token.encode()
        ):
            return _refused("open the address that agentrl view printed, with its token")
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            answer = web.Response(status=error.status, text=error.reason)
        answer.headers.update(_HEADERS)
        return answer

    return guard


def _refused(why: str) -> web.Response:
    return web.json_response({"error": why}, status=403, headers=_HEADERS)


async def _page(request: web.Request) -> web.Response:
    name = request.path[1:] or "index.html"
    body = page_file(name)
    if name == "index.html":  # the browser asks for all modules at once, rather than as it reads of each
        body = body.replace(
            b"</head>", "".join(f'<link rel="modulepreload" href="{m}">' for m in MODULES).encode() + b"</head>"
        )
    return web.Response(body=body, content_type=_KINDS[Path(name).suffix], charset="utf-8")


def _api(
    shown: Shown, answer: Callable[[Shown, Mapping[str, str]], Json]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            text = await asyncio.to_thread(lambda: json.dumps(answer(shown, request.query), allow_nan=False))
            status = 200
        except (UserError, ValueError, OSError) as error:
            text, status = json.dumps({"error": " ".join(str(error).split())[:1000]}), 422
        response = web.Response(text=text, content_type="application/json", status=status)
        if len(text) > 100_000:
            response.enable_compression()
        return response

    return handle


def _posted(
    shown: Shown, answer: Callable[[Shown, Mapping[str, Json]], tuple[str, bytes]]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answers a body of JSON, of a page of this origin alone."""

    async def handle(request: web.Request) -> web.Response:
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{request.host}":
            return _refused("another page may not write here")
        if request.content_type != "application/json":
            return _refused("the body must be JSON")
        data = await request.read()
        try:
            kind, body = await asyncio.to_thread(lambda: answer(shown, _object(data)))
            return web.Response(body=body, content_type=kind)
        except (UserError, ValueError, OSError, RecursionError) as error:
            return web.json_response({"error": " ".join(str(error).split())[:1000]}, status=422)

    return handle


def _object(data: bytes) -> Mapping[str, Json]:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise UserError("the body must be a JSON object")
    return found


def _note(shown: Shown, body: Mapping[str, Json]) -> tuple[str, bytes]:
    run = shown.catalog.store(str(body.get("run", "")))
    return "application/json", json.dumps(run.write_note(body)).encode()


def _selection(shown: Shown, body: Mapping[str, Json]) -> tuple[str, bytes]:
    from agentrl.view.selection import FORMATS, chosen

    ending = body.get("as")
    if not isinstance(ending, str) or ending not in FORMATS:
        raise UserError(f"as: expected one of {', '.join(FORMATS)}")
    kind, made = FORMATS[ending]
    return kind, made(chosen(shown.catalog.store, body.get("samples")), body.get("columns", []))


def about(shown: Shown, query: Mapping[str, str]) -> Json:
    """What does not change while the page is open."""
    return {
        "runs": shown.catalog.chosen(),
        "follow": shown.follow,
        "frozen": False,
        "note": "",
    }


def _run(shown: Shown, query: Mapping[str, str]) -> RunStore:
    return shown.catalog.store(query.get("run", ""))


def _states(shown: Shown, query: Mapping[str, str]) -> Json:
    """The state of each run that is asked for; None for one that is no more."""
    names = query.get("runs", "").split("\n")
    if len(names) > _MOST_RUNS:
        raise UserError(f"more than {_MOST_RUNS} runs at once")
    return [None if run is None else run.state() for run in shown.catalog.stores(names)]


def _whole(query: Mapping[str, str], key: str) -> int:
    text = query.get(key, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise UserError(f"{key}: not a number")
    return int(text)


def _names(query: Mapping[str, str]) -> list[str]:
    names = query.get("files", "").split("\n")
    if len(names) > _MOST_FILES:
        raise UserError(f"more than {_MOST_FILES} files at once")
    return names


def _why(shown: Shown, query: Mapping[str, str]) -> Json:
    if shown.why is None:
        raise UserError("nothing was given that says why samples are unsolved")
    return _run(shown, query).why(query.get("file", ""), shown.why)


_ANSWERS: dict[str, Callable[[Shown, Mapping[str, str]], Json]] = {
    "about": about,
    "meanings": lambda shown, query: told_of(shown.ranges(), shown.watched()),
    "runs": lambda shown, query: shown.catalog.listing(),
    "state": _states,
    "metrics": lambda shown, query: _run(shown, query).metrics(_whole(query, "start"), query.get("of", "")),
    "logs": lambda shown, query: _run(shown, query).logs(),
    "log": lambda shown, query: _run(shown, query).log(
        query.get("name", ""), _whole(query, "start"), query.get("of", "")
    ),
    "index": lambda shown, query: _run(shown, query).index(_names(query)),
    "previews": lambda shown, query: _run(shown, query).previews(query.get("file", "")),
    "sample": lambda shown, query: _run(shown, query).sample(query.get("file", ""), _whole(query, "row")),
    "search": lambda shown, query: _run(shown, query).search(query.get("text", "")[:_MOST_TEXT], _names(query)),
    "spans": lambda shown, query: _run(shown, query).spans(query.get("file", "")),
    "tools": lambda shown, query: _run(shown, query).tools(query.get("file", "")),
    "notes": lambda shown, query: _run(shown, query).notes(),
    "evaluations": lambda shown, query: _run(shown, query).evaluations(),
    "why": _why,
}


_POSTED: dict[str, Callable[[Shown, Mapping[str, Json]], tuple[str, bytes]]] = {
    "note": _note,
    "selection": _selection,
}


async def serve(shown: Shown, port: int, opened: Callable[[str], None]) -> None:
    """Serve until cancelled. opened: called with the address, once it can be opened. Raises UserError: the port is
    taken."""
    runner = quiet_runner(make_app(shown))
    await runner.setup()
    ended = threading.Event()
    threading.Thread(target=_prepare, args=(shown, ended), daemon=True).start()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except OSError as error:
            why = "taken" if error.errno in (98, 48) else error.strerror
            raise UserError(f"--port {port}: {why}; name another, or leave it out for any free one") from error
        opened(f"http://127.0.0.1:{runner.addresses[0][1]}/#token={shown.token}")
        await asyncio.Event().wait()
    finally:
        ended.set()
        await runner.cleanup()


def _prepare(shown: Shown, ended: threading.Event) -> None:
    """Read ahead while the browser opens, behind what is asked for."""
    with suppress(OSError, AttributeError):  # a thread of its own priority is Linux's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    with suppress(UserError, OSError, ValueError):
        for name in shown.catalog.chosen():
            shown.catalog.store(name).prepare(lambda: not ended.is_set())
