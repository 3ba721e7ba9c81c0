"""HTTP servers on loopback."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def serving(routes: dict[str, Any], port: int = 0, host: str = "127.0.0.1", **runner: Any) -> AsyncIterator[str]:
    """Serve while the block runs; yield the URL, without a path.

    routes: by `METHOD /path` the handler. runner: further arguments of aiohttp's AppRunner, and
    `middlewares` and `client_max_size`.
    """
    size = runner.pop("client_max_size", 1 << 20)
    app = web.Application(middlewares=runner.pop("middlewares", ()), client_max_size=size)
    for route, handler in routes.items():
        app.router.add_route(*route.split(" ", 1), handler)
    running = web.AppRunner(app, **{"shutdown_timeout": 0.1, **runner})
    await running.setup()
    try:
        await web.TCPSite(running, host, port).start()
        yield f"http://{host}:{running.addresses[0][1]}"
    finally:
        await running.cleanup()
