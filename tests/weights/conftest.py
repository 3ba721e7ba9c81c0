from collections.abc import AsyncIterator

import aiohttp
import pytest

from agentrl.weights.publisher import KEEP_ALIVE_SECONDS


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Like the product's: it uses no connection again that the server may be closing at this moment."""
    connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_SECONDS)
    async with aiohttp.ClientSession(connector=connector) as found:
        yield found
