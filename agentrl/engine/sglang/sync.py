"""`Sync`: our weights to servers, through `weights/`. It knows which channel serves which servers in which loop."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.engine.sglang.client import Client, ServerError, Sessions
from agentrl.models.lora import layers


class Sync:
    """scratch: makes the folder that `from_disk` may write to. way: of `engine.args.weights`."""

    def __init__(
        self, model: Any, sessions: Sessions, scratch: Callable[[], Path], way: str, say: Callable[[str], None]
    ) -> None:
        self._model, self._sessions, self._scratch, self._way, self._say = model, sessions, scratch, way, say
        if layers(model):
            say("engine: the adapter is merged, and whole weights are sent")
        self._channel: Any = None
        self._key: object = None
        self._stamp: str | None = None  # of the weights that were sent last: the trainer may be changing them since

    async def send(self, clients: Sequence[Client], version: int, mode: str) -> dict[str, str]:
        """To all of them at once; URL -> why, for those that did not take all of it."""
        from agentrl.engine.sglang.weights import ModelWeights, WeightUpdateError

        try:
            channel = await self._to(clients)
            weights = ModelWeights(self._model)
            self._stamp = weights.stamp
            done = await channel.publish(version, weights, mode)
        except WeightUpdateError as error:
            self._key = None
            return {c.url: str(error) for c in clients}
        return dict(done.failed)

    async def sleep(self, clients: Sequence[Client]) -> dict[str, str]:
        """Pause the servers, which give their memory back until `send` (weights too). What failed, by URL."""
        from agentrl.engine.sglang.weights import WeightUpdateError

        try:
            return dict(await (await self._to(clients)).sleep())
        except WeightUpdateError as error:
            return {c.url: str(error) for c in clients}

    async def wake(self) -> dict[str, str]:
        """Servers that sleep and were sent nothing go on where their weights are whole. What failed, by URL."""
        return dict(await self._channel.wake()) if self._channel is not None else {}

    async def _to(self, clients: Sequence[Client]) -> Any:
        """The channel to these servers in this event loop."""
        key = (asyncio.get_running_loop(), tuple(c.url for c in clients))
        if key != self._key:
            former = self._channel
            await self.close()
            self._channel, self._key = await self._open(clients, self._say, former), key
        return self._channel

    async def send_to(self, client: Client, version: int) -> None:
        """To one server alone. Raises ServerError when it did not take all of it, or the trainer has gone on since:
        until the next update its weights are those of no step."""
        from agentrl.engine.sglang.weights import ModelWeights, WeightUpdateError

        try:
            channel = await self._open([client], lambda line: None)
            try:
                done = await channel.publish(version, ModelWeights(self._model, stamp=self._stamp))
            finally:
                await channel.close()
        except WeightUpdateError as error:
            raise ServerError(f"{client.url}: {error}") from error
        if why := done.failed.get(client.url):
            raise ServerError(f"{client.url}: {why}")

    async def close(self) -> None:
        channel, self._channel, self._key = self._channel, None, None
        if channel is not None:
            await channel.close()

    async def _open(self, clients: Sequence[Client], say: Callable[[str], None], former: Any = None) -> Any:
        from agentrl.engine.sglang.weights import open_channel

        folder = self._scratch() / f"weights_{uuid.uuid4().hex[:8]}"  # its own: a channel removes it when it closes
        urls, session = [c.url for c in clients], self._sessions.get()
        return await open_channel(urls, session, folder=folder, way=self._way, say=say, former=former)
