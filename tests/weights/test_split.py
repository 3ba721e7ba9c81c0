"""Servers of one run that are reached in different ways: each by the one that suits it, from one reading of the
weights."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from sglang_weights_help import BUCKET, TENSORS, FaultyServer, Weights, channel_to

from agentrl.containment.threads import in_thread
from agentrl.weights.channel import gloo_seconds, open_channel
from agentrl.weights.group import Group
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.sglang import SglangServer
from agentrl.weights.source import NamedTensor, Rounded, WeightSource
from agentrl.weights.transports import nccl
from agentrl.weights.transports.disk import DiskTransport
from agentrl.weights.transports.nccl import GroupTransport
from agentrl.weights.transports.shared_memory import SharedMemoryTransport
from agentrl.weights.transports.split import Shared, SplitTransport


class Once(WeightSource):
    """Weights that can be read once, like those of shards."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __iter__(self) -> Iterator[NamedTensor]:
        assert not self.read, "it is read twice"
        for name, tensor in TENSORS:
            self.read.append(name)
            yield name, tensor


def split(close: FaultyServer, folder: Path) -> SplitTransport:
    return SplitTransport(SharedMemoryTransport(BUCKET), DiskTransport(folder, shard_bytes=BUCKET), [close.url])


async def test_each_server_gets_all_weights_by_its_own_way(session: Any, tmp_path: Path) -> None:
    async with FaultyServer() as close, FaultyServer() as apart:
        channel = channel_to([close, apart], session, split(close, tmp_path))
        weights = Once()
        done = await channel.publish(1, weights)
        assert (done.failed, len(done.good), done.transport) == ({}, 2, "from_tensor and from_disk")
        assert weights.read == [name for name, _ in TENSORS]
        assert close.calls.count("/update_weights_from_tensor") == 3
        assert apart.calls.count("/update_weights_from_disk") == 1
        for server in (close, apart):
            assert {n: t.tolist() for n, t in server.tensors.items()} == {n: t.tolist() for n, t in TENSORS}
        await channel.close()


@pytest.mark.parametrize("bad", ["close", "apart"])
async def test_one_that_fails_holds_up_no_other(bad: str, session: Any, tmp_path: Path) -> None:
    async with FaultyServer() as close, FaultyServer() as apart:
        failing, good = (close, apart) if bad == "close" else (apart, close)
        failing.faults = {"/update_weights_from_tensor": (1, 500), "/update_weights_from_disk": (0, 500)}
        channel = channel_to([close, apart], session, split(close, tmp_path))
        done = await asyncio.wait_for(channel.publish(1, Once()), 60)
        assert (list(done.failed), done.good) == ([failing.url], (good.url,))


async def test_a_transport_that_raises_lets_the_other_read_on(session: Any, tmp_path: Path) -> None:
    class Raises(DiskTransport):
        def _write(self, version: int, weights: WeightSource) -> Path:
            raise OSError("the disk is full")

    async with FaultyServer() as close, FaultyServer() as apart:
        transport = SplitTransport(SharedMemoryTransport(BUCKET), Raises(tmp_path), [close.url])
        with pytest.raises(OSError, match="the disk is full"):
            await asyncio.wait_for(channel_to([close, apart], session, transport).publish(1, Once()), 60)
        assert len(close.tensors) == len(TENSORS)


async def test_readers_stay_in_step() -> None:
    """No reader gets further than one tensor ahead: a whole model never stands between two of them."""
    weights = Once()
    first, second = (iter(branch) for branch in Shared(weights, 2).branches)
    assert next(first)[0] == "layer.0"
    ahead = asyncio.create_task(in_thread(next, first))
    await asyncio.sleep(0.05)
    assert not ahead.done()
    assert weights.read == ["layer.0"]
    assert next(second)[0] == "layer.0"
    assert (await ahead)[0] == "layer.1"


async def test_the_way_is_chosen_for_each_server(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    async with FaultyServer() as close, FaultyServer() as apart:
        monkeypatch.setattr("agentrl.weights.channel.same_host", lambda url: url == close.url)
        kinds = {
            (close.url, apart.url): SplitTransport,
            (close.url,): SharedMemoryTransport,
            (apart.url,): GroupTransport,
        }
        for urls, kind in kinds.items():
            channel = await open_channel(urls, session, folder=tmp_path, say=said.append)
            assert type(channel.transport) is kind
    far = f"from_distributed over gloo ({apart.url} does not share this machine's memory)"
    assert said == [
        f"weights: from_tensor to 1 servers, {far}",
        "weights: from_tensor (servers share this machine's memory)",
        f"weights: {far}",
    ]


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ("2.30.7", "from_distributed over NCCL 2.30.7"),
        ("2.29.7", "from_distributed over gloo, estimated 33 s an update: their NCCL is not known to be 2.30.7"),
        (None, "from_distributed over gloo, estimated 33 s an update: their NCCL is not known to be 2.30.7"),
    ],
)
async def test_nccl_serves_by_itself_where_its_version_is_one(
    told: str | None, wanted: str, session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 8.2 billion parameters to eight ranks: log2(9), rounded up, copies of 16.4 GB at 2 GB/s."""
    said: list[str] = []
    monkeypatch.setattr("agentrl.weights.channel.own_nccl", lambda: "2.30.7")
    monkeypatch.setattr("agentrl.weights.channel.same_host", lambda url: False)
    facts = SglangServer.facts

    async def on_gpus(self: SglangServer) -> Any:
        return replace(await facts(self), device="cuda", dtype="bfloat16", ranks=8)

    monkeypatch.setattr(SglangServer, "facts", on_gpus)
    async with FaultyServer() as apart:
        channel = await open_channel(
            [apart.url], session, folder=tmp_path, say=said.append, nccl=told, parameters=8_200_000_000
        )
    assert isinstance(channel.transport, GroupTransport)
    assert channel.transport._nccl is (told == "2.30.7")
    assert said[0].startswith(f"weights: {wanted}")
    assert gloo_seconds(145 * 10**9, 24) == pytest.approx(363, abs=1)  # of 72 billion to three servers of eight ranks


def test_tensors_of_a_broadcast_lie_at_multiples_of_their_numbers() -> None:
    """As SGLang takes them apart: in the order of their names, without gaps."""
    sent: list[torch.Tensor] = []
    group: Any = SimpleNamespace(servers=[SimpleNamespace(joins_by_id=False)], broadcast=sent.append)
    batch = [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.arange(2.0)), ("c", torch.ones(1, 3).byte())]
    ordered = nccl._aligned(batch)
    assert [name for name, _ in ordered] == ["b", "a", "c"]
    nccl._broadcast(group, ordered)
    (flat,) = sent
    start = 0
    for _, tensor in ordered:
        assert start % tensor.element_size() == 0
        piece = flat[start : (start := start + tensor.nbytes)]
        assert torch.equal(piece.view(tensor.dtype).reshape(tensor.shape), tensor)
    assert start == len(flat)


@pytest.mark.parametrize(
    ("asked", "device", "backend"), [(True, "cuda", "nccl"), (False, "cuda", "gloo"), (True, "cpu", "gloo")]
)
async def test_nccl_serves_only_where_it_was_asked_for_and_all_have_gpus(
    asked: bool, device: str, backend: str, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    async def open_group(servers: Any, backend: str, timeout: float, failures: Any, device: Any) -> None:
        opened.append(backend)

    monkeypatch.setattr(nccl, "open_group", open_group)
    async with FaultyServer() as server:
        target = SglangServer(server.url, session)
        target._facts = replace(await target.facts(), device="cuda")
        await GroupTransport(nccl=asked)._joined([target], torch.device(device), {})
    assert opened == [backend]


async def test_a_broadcast_that_hangs_is_given_up_before_nccl_ends_the_process(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    class Hanging:
        def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
            return SimpleNamespace(wait=self._wait)

        def _wait(self) -> None:
            assert ended.wait(30)
            raise RuntimeError("aborted")

        def abort(self) -> None:
            ended.set()

    async def open_group(servers: Any, backend: str, timeout: float, failures: Any, device: Any) -> Group:
        return Group("name", tuple(servers), Hanging(), None, backend)

    monkeypatch.setattr(nccl, "open_group", open_group)
    async with FaultyServer({"/update_weights_from_distributed": (0, None)}) as server:
        transport = GroupTransport(timeout=0.4, bucket_bytes=BUCKET)
        weights = Once()
        done = await asyncio.wait_for(channel_to([server], session, transport).publish(1, weights), 60)
    assert "the process group broke" in done.failed[server.url]
    assert ended.is_set()
    assert len(weights.read) == len(TENSORS)  # other ranks gather in step


class Half(FaultyServer):
    def _do(self, path: str, body: Any) -> web.Response:
        if path == "/server_info":
            return web.json_response({"device": "cpu", "dtype": "bfloat16", "tp_size": 1, "version": "0"})
        return super()._do(path, body)


class Pipeline(FaultyServer):
    def _do(self, path: str, body: Any) -> web.Response:
        if path == "/server_info":
            return web.json_response(
                {"device": "cuda", "dtype": "bfloat16", "tp_size": 1, "pp_size": 2, "version": "0"}
            )
        return super()._do(path, body)


@pytest.mark.parametrize(
    ("machines", "fed", "transport"),
    [(2, False, "from_distributed"), (2, True, "from_tensor"), (1, False, "from_tensor")],
)
async def test_a_server_over_machines_is_sent_to_by_a_group_unless_it_is_fed_on_each(
    machines: int, fed: bool, transport: str, session: Any
) -> None:
    async with FaultyServer() as server:
        server.machines = machines
        assert (await SglangServer(server.url, session).transport(near=not fed, fed=fed))[0] == transport


@pytest.mark.parametrize("transport", ["auto", "from_disk"])
async def test_a_pipeline_is_sent_nothing_since_its_stages_load_at_other_times(
    transport: str, session: Any, tmp_path: Path
) -> None:
    async with Pipeline() as server:
        with pytest.raises(WeightUpdateError, match="before all stages of its pipeline have loaded: use tp-size"):
            await open_channel([server.url], session, folder=tmp_path, transport=transport)
    assert server.calls == ["/server_info"]


async def test_matrices_travel_in_the_type_that_servers_hold(session: Any) -> None:
    tensors = [("matrix", torch.randn(4, 4)), ("norm", torch.randn(4)), ("half", torch.ones(2, 2, dtype=torch.float16))]
    kinds = {name: tensor.dtype for name, tensor in Rounded(Weights(tensors), torch.bfloat16)}
    assert kinds == {"matrix": torch.bfloat16, "norm": torch.float32, "half": torch.float16}
    async with Half() as half, FaultyServer() as full:
        done = await channel_to([half], session, SharedMemoryTransport()).publish(1, Weights(tensors))
        assert done.bytes == 32 + 16 + 8
        done = await channel_to([half, full], session, SharedMemoryTransport()).publish(2, Weights(tensors))
        assert done.bytes == 64 + 16 + 8
        assert half.tensors["matrix"].dtype == torch.float32
