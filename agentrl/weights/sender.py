"""`Sender`: sends a model's weights where an `WeightRequest` says, in whichever event loop it is asked.

The invariant, for a sharded model: by one order each rank gathers the same tensors in the same order, once and to the
end, whatever fails on the way. Rank 0 sends; the others call `follow` with the same order.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from agentrl.models.lora import adapter_config, adapter_state
from agentrl.threads import in_thread
from agentrl.weights.channel import KEYS_AND_VALUES, WeightChannel
from agentrl.weights.choose import open_channel
from agentrl.weights.lora import LoraChannel
from agentrl.weights.request import WeightRequest, WeightResult, What
from agentrl.weights.server import WeightServer, WeightUpdateError
from agentrl.weights.source import ModelWeights, NamedTensor, whole


@dataclass(frozen=True, slots=True)
class Adapter:
    """What was sent last, kept for servers that missed it: the trainer has gone on since."""

    version: int
    config: dict[str, Any]
    tensors: list[NamedTensor]


class Sender:
    """model: a transformers module. session: that of the running loop. scratch: makes the folder that may be written
    to. way: see `open_channel`. say: is told lines for people."""

    def __init__(
        self,
        model: Any,
        session: Callable[[], aiohttp.ClientSession],
        scratch: Callable[[], Path],
        way: str,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._session, self._scratch, self._way, self._say = model, session, scratch, way, say
        self._channel: WeightChannel | None = None
        self._key: object = None
        self._lora: LoraChannel | None = None
        self._stamp: str | None = None  # of the weights that were sent last: the trainer may be changing them since
        self._adapter: Adapter | None = None

    async def send(self, order: WeightRequest) -> WeightResult:
        """Do it, to all servers at once; who did not take all of it is told, not raised."""
        send = self._send_adapter if order.what is What.ADAPTER else self._send_weights
        try:
            return await send(order)
        except WeightUpdateError as error:
            return WeightResult(dict.fromkeys(order.urls, str(error)))

    def follow(self, order: WeightRequest) -> None:
        """The part of a rank that sends nothing."""
        if order.what is not What.ADAPTER:
            ModelWeights(self._model, base=order.what is What.BASE).follow()
        elif self._gathers(order):
            self._adapter = self._gathered(order.version)

    async def sleep(self, urls: Sequence[str]) -> dict[str, str]:
        """Pause the servers, which give their memory back until `send`, or `wake`: with whole weights theirs too. What
        failed, by URL."""
        try:
            channel = await self._to(urls)
            if self._lora is None:
                return dict(await channel.sleep())
            channel.versions = dict.fromkeys(urls, 0)  # the base is whole, and stays
            return dict(await channel.sleep(KEYS_AND_VALUES))
        except WeightUpdateError as error:
            return dict.fromkeys(urls, str(error))

    async def wake(self) -> dict[str, str]:
        """Servers that sleep and were sent nothing go on where their weights are whole. What failed, by URL."""
        return dict(await self._channel.wake()) if self._channel is not None else {}

    async def close(self) -> None:
        channel, self._channel, self._key = self._channel, None, None
        if channel is not None:
            await channel.close()

    async def _send_weights(self, order: WeightRequest) -> WeightResult:
        base = order.what is What.BASE
        weights = ModelWeights(self._model, stamp=self._stamp if order.again and not base else None, base=base)
        try:
            if order.again or base:
                channel = await self._open(order.urls, lambda line: None)
                try:
                    done = await channel.publish(order.version, weights, order.mode)
                finally:
                    await channel.close()
            else:
                channel = await self._to(order.urls)
                self._stamp = weights.stamp
                done = await channel.publish(order.version, weights, order.mode)
        except WeightUpdateError:
            self._key = None if not order.again else self._key
            raise
        finally:
            await in_thread(weights.finish)
        return WeightResult(done.failed)

    async def _send_adapter(self, order: WeightRequest) -> WeightResult:
        if self._gathers(order):
            self._adapter = self._gathered(order.version)
        adapter = self._adapter
        if adapter is None or adapter.version != order.version:
            raise WeightUpdateError(f"the trainer's adapter is not that of step {order.version} any more")
        servers = [WeightServer(url, self._session()) for url in order.urls]
        if self._lora is None:
            self._say("weights: the adapter alone, without a pause")
        self._lora = LoraChannel(servers, self._scratch, former=self._lora)
        done = await self._lora.publish(order.version, adapter.config, adapter.tensors, order.keep)
        failed = done.failed | (await self.wake() if not order.again else {})
        names = {url: name for url in order.urls if (name := self._lora.names.get(url)) is not None}
        return WeightResult(failed, names)

    def _gathers(self, order: WeightRequest) -> bool:
        """Whether this order reads the adapter from the model; every rank finds the same."""
        return not order.again or self._adapter is None

    def _gathered(self, version: int) -> Adapter:
        tensors = [(name, whole(tensor).cpu().clone()) for name, tensor in adapter_state(self._model).items()]
        return Adapter(version, adapter_config(self._model), tensors)

    async def _to(self, urls: Sequence[str]) -> WeightChannel:
        """The channel to these servers in this event loop."""
        key = (asyncio.get_running_loop(), tuple(urls))
        if key != self._key or self._channel is None:
            former = self._channel
            await self.close()
            say: Callable[[str], None] = self._say if self._lora is None else lambda line: None
            self._channel, self._key = await self._open(urls, say, former), key
        return self._channel

    async def _open(
        self, urls: Sequence[str], say: Callable[[str], None], former: WeightChannel | None = None
    ) -> WeightChannel:
        session, folder = self._session(), self._folder()
        return await open_channel(urls, session, folder=folder, way=self._way, say=say, former=former)

    def _folder(self) -> Path:
        return self._scratch() / f"weights_{uuid.uuid4().hex[:8]}"  # its own: a channel removes it when it closes
