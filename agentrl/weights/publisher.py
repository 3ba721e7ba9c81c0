"""Sending a model's weights to servers, as a `WeightRequest` says: `Sender` in any event loop, `Publisher` in each
process of a sharded trainer.

    publisher = Publisher(model, rank)                     # in each worker
    publisher.open(folder, transport)
    result = publisher.publish(WeightRequest(urls, step))  # of a rank that sends: a WeightResult; the others: None

The invariant, for a sharded model: by one request each rank gathers the same tensors in the same order, once and to the
end, whatever fails on the way. Rank 0 sends, and on other machines the rank that is named for the servers there; the
others follow, so nobody waits in a collective for ever.
"""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from agentrl.addresses import authorization
from agentrl.containment.threads import in_thread
from agentrl.models.lora import adapter_config, adapter_state
from agentrl.weights.channel import KEYS_AND_VALUES, WeightChannel, open_channel
from agentrl.weights.feed import Feed
from agentrl.weights.kinds import SERVERS, folder_for
from agentrl.weights.lora import Adapter, LoraChannel
from agentrl.weights.request import WeightContent, WeightRequest, WeightResult, WeightUpdateError
from agentrl.weights.scratch import Scratch
from agentrl.weights.source import ModelWeights, whole
from agentrl.weights.transports.handles import HandleTransport
from agentrl.weights.transports.shared_memory import SharedMemoryTransport

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
UPDATES = itertools.count()
"""Numbers of this process's calls of `publish`, of any publisher: they share a store."""
KEEP_ALIVE_SECONDS = 3.0
"""Less than a server keeps an idle connection (5 s): a connection that it is about to close is not used again."""


class Sender:
    """Sends the weights of `model`, a transformers module, from this process.

    session: returns that of the running event loop. scratch: makes the folder that may be written to. transport: see
    `open_channel`. say: called with lines for people. kind: of the servers.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        session: Callable[[], aiohttp.ClientSession],
        scratch: Callable[[], Path],
        transport: str,
        say: Callable[[str], None],
        kind: str = "sglang",
        nccl: str | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._session, self._scratch = model, session, scratch
        self.nccl, self._beat = nccl, beat
        self._transport, self._say, self._kind = transport, say, kind
        self._channel: WeightChannel | None = None
        self._channel_key: tuple[object, object, object] | None = None  # event loop, URLs, and which of these are fed
        self._lora: LoraChannel | None = None
        self._buckets = HandleTransport() if kind == "vllm" else SharedMemoryTransport()  # those filled for other ranks
        self._stamp: str | None = None  # of the weights that were sent last: the trainer may have changed them since
        self._adapter: Adapter | None = None

    async def send(self, request: WeightRequest, feed: Feed | None = None) -> WeightResult:
        """Send to all servers at once. A server that does not take all of it is in the result, not raised. feed: of
        other ranks that fill buckets for these servers."""
        try:
            if request.content is WeightContent.ADAPTER:
                return await self._send_adapter(request)
            return await self._send_weights(request, feed)
        except WeightUpdateError as error:
            return WeightResult(dict.fromkeys(request.urls, str(error)))

    def follow(self, request: WeightRequest, feed: Feed | None = None) -> None:
        """Take part in the collectives of a request, on a rank that sends nothing. feed: where this rank is to fill
        buckets for one that does."""
        if request.content is not WeightContent.ADAPTER:
            weights = ModelWeights(self._model, base=request.content is WeightContent.BASE, beat=self._beat)
            if request.content is WeightContent.WHOLE and not request.again:
                self._stamp = weights.stamp  # a server of ours may be sent them again
            if feed is not None and feed.sender is not None:
                try:
                    self._buckets.fill(weights, feed)
                except Exception as error:  # noqa: BLE001 - the sender raises it; the other ranks need this one to read on
                    feed.fail(" ".join(str(error).split()))
            weights.follow()
        elif self._gathers(request):
            self._adapter = self._gathered(request.version)

    async def sleep(self, urls: Sequence[str]) -> dict[str, str]:
        """Pause the servers, which release their memory until `send` or `wake`: that of the weights too, where whole
        weights are sent. Returns what failed, by URL."""
        try:
            channel = await self._to(urls)
            if self._lora is None:
                return dict(await channel.sleep())
            channel.versions = dict.fromkeys(urls, 0)  # the base is whole and stays
            return dict(await channel.sleep(KEYS_AND_VALUES))
        except WeightUpdateError as error:
            return dict.fromkeys(urls, str(error))

    async def wake(self) -> dict[str, str]:
        """Resume servers that sleep and were sent nothing, where their weights are whole. Returns what failed, by
        URL."""
        return dict(await self._channel.wake()) if self._channel is not None else {}

    async def close(self) -> None:
        """Close the channel; the next `send` opens another one."""
        channel, self._channel, self._channel_key = self._channel, None, None
        await self._buckets.close()
        if channel is not None:
            await channel.close()

    async def _send_weights(self, request: WeightRequest, feed: Feed | None) -> WeightResult:
        base = request.content is WeightContent.BASE
        fed = frozenset(request.feeders).intersection(request.urls)
        stamp = self._stamp if request.again and not base else None
        weights = ModelWeights(self._model, stamp=stamp, base=base, beat=self._beat, feed=feed)
        try:
            if request.again or base:
                channel = await self._open(request.urls, lambda line: None, None, fed)
                try:
                    done = await channel.publish(request.version, weights, request.mode)
                finally:
                    await channel.close()
            else:
                channel = await self._to(request.urls, fed)
                self._stamp = weights.stamp
                done = await channel.publish(request.version, weights, request.mode)
        except WeightUpdateError:
            self._channel_key = self._channel_key if request.again else None
            raise
        finally:
            await in_thread(weights.finish)
        return WeightResult(done.failed)

    async def _send_adapter(self, request: WeightRequest) -> WeightResult:
        if self._gathers(request):
            self._adapter = self._gathered(request.version)
        adapter = self._adapter
        if adapter is None or adapter.version != request.version:
            raise WeightUpdateError(f"the trainer's adapter is no longer that of step {request.version}")
        servers = [SERVERS[self._kind](url, self._session()) for url in request.urls]
        if self._lora is None:
            self._say("weights: the adapter alone, without a pause")
        self._lora = LoraChannel(servers, self._scratch, previous=self._lora)
        done = await self._lora.publish(adapter, request.keep)
        failed = done.failed | (await self.wake() if not request.again else {})
        names = {url: name for url in request.urls if (name := self._lora.names.get(url)) is not None}
        return WeightResult(failed, names)

    def _gathers(self, request: WeightRequest) -> bool:
        """Whether this request reads the adapter from the model; the same on every rank."""
        return not request.again or self._adapter is None

    def _gathered(self, version: int) -> Adapter:
        tensors = [(name, whole(tensor).cpu().clone()) for name, tensor in adapter_state(self._model).items()]
        return Adapter(version, adapter_config(self._model), tensors)

    async def _to(self, urls: Sequence[str], fed: frozenset[str] | None = None) -> WeightChannel:
        """The channel to these servers in this event loop. fed: those that are fed at their places (None: nothing is to
        be sent)."""
        key, found = (asyncio.get_running_loop(), tuple(urls), fed), self._channel_key
        if self._channel is None or found is None or key[:2] != found[:2] or fed not in (None, found[2]):
            previous = self._channel
            await self.close()
            say: Callable[[str], None] = self._say if fed is not None and self._lora is None else lambda line: None
            self._channel, self._channel_key = await self._open(urls, say, previous, fed or frozenset()), key
        return self._channel

    async def _open(
        self, urls: Sequence[str], say: Callable[[str], None], previous: WeightChannel | None, fed: frozenset[str]
    ) -> WeightChannel:
        session, folder = self._session(), self._folder()
        return await open_channel(
            urls, session, folder=folder, transport=self._transport, say=say, previous=previous, kind=self._kind,
            nccl=self.nccl, parameters=sum(p.numel() for p in self._model.parameters()), fed=fed,
        )  # fmt: skip

    def _folder(self) -> Path:
        return (
            self._scratch() / f"weights_{uuid.uuid4().hex[:8]}"
        )  # one for each channel, which removes it when it closes


class Publisher:
    """Sends the weights of `model`, a transformers module whose parameters may be sharded (FSDP2). Called alike on
    every rank; each call blocks. rank: of this process. One that sends has an event loop of its own for it. beat:
    called after each tensor, as a sign of life."""

    def __init__(self, model: "PreTrainedModel", rank: int = 0, beat: Callable[[], None] = lambda: None) -> None:
        self._model, self._rank, self._beat = model, rank, beat
        self._runner: asyncio.Runner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._key: str | None = None
        self._kind = "sglang"
        self._sender: Sender | None = None
        self._folder: Path | None = None
        self._temporary: Scratch | None = None
        self._messages: list[str] = []

    def open(
        self,
        folder: str | None = None,
        transport: str = "auto",
        key: str | None = None,
        kind: str = "sglang",
        nccl: str | None = None,
    ) -> None:
        """folder: where `from_disk` writes, which servers must see by the same path (None: a temporary one). transport,
        nccl: see `open_channel`. key: of servers that ask for one. kind: of the servers. An unknown transport raises
        UserError once it is used."""
        self.close()
        self._key, self._kind = key, kind
        self._folder = Path(folder) if folder is not None else None
        self._sender = Sender(
            self._model, self._get_session, self._scratch, transport, self._messages.append, kind, nccl, self._beat
        )

    def publish(self, request: WeightRequest) -> WeightResult | None:
        """Send the weights as `request` says. Returns the result of what this rank sent; None: it sent nothing. It
        reads the weights to their end also when every server has failed."""
        sender, own, feed = self._opened(), request.of(self._rank), self._feed(request)
        if not own.urls and (self._rank != 0 or request.urls):
            sender.follow(request, feed)
            return None
        try:
            result = self._run(lambda: sender.send(own, feed))
        finally:
            if feed is not None:
                feed.close()
        messages, self._messages[:] = tuple(self._messages), ()
        return WeightResult(result.failed, result.adapters, messages)

    def sleep(self, urls: Sequence[str], senders: Mapping[str, int] = MappingProxyType({})) -> dict[str, str]:
        """Have the servers release their memory until the next `publish`. senders: as `WeightRequest.senders`. Returns
        what failed, by URL."""
        sender, own = self._opened(), WeightRequest(tuple(urls), 0, senders=senders).of(self._rank).urls
        return self._run(lambda: sender.sleep(own)) if own else {}

    def wake(self) -> dict[str, str]:
        """Wake servers after `sleep`, where nothing was published since. Returns what failed, by URL."""
        sender = self._opened()
        return self._run(sender.wake) if self._runner is not None else {}

    def make_room(self) -> None:
        """Free GPU memory that torch caches, for servers on the same GPU."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Leave process groups and remove what was written. It may be opened again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.run(self._close())
            runner.close()
        if self._temporary is not None:
            self._temporary.close()
        self._sender = None

    async def _close(self) -> None:
        if self._sender is not None:
            await self._sender.close()
        if self._session is not None:
            await self._session.close()
        self._session = None

    def _feed(self, request: WeightRequest) -> Feed | None:
        """What ranks tell each other during this request; None: each server is fed by one."""
        update = next(UPDATES)
        if not request.feeders or request.content is WeightContent.ADAPTER:
            return None
        shared: Any = _get_default_store()
        store = PrefixStore("agentrl/weights", shared.clone())  # by a connection of its own: its waits hold up nobody
        return Feed(store, update, self._rank, request.feeders, self._beat)

    def _opened(self) -> Sender:
        if self._sender is None:
            self.open()
        assert self._sender is not None
        return self._sender

    def _run(self, work: Callable[[], Coroutine[object, None, T]]) -> T:
        """Run it in the event loop that connections and channels belong to."""
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(work())

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=authorization(self._key))
        return self._session

    def _scratch(self) -> Path:
        if self._folder is not None:
            return self._folder
        if self._temporary is None:
            self._temporary = folder_for(self._kind, self._model)
        return self._temporary.path()
