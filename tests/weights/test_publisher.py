"""Weights from a sharded trainer: two ranks over gloo, and servers that tell what they were given."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from lora_help import merged_state
from publisher_ranks import run_rank, tiny, trained
from sglang_weights_help import FaultyServer, opened
from warm import started

from agentrl.models.lora import adapter_state, plain_tensors
from agentrl.weights.request import WeightContent, WeightRequest, WeightResult
from agentrl.weights.source import ModelWeights

pytestmark = pytest.mark.slow
DEAD = "http://127.0.0.1:1"


class Workers:
    """The two ranks, as a group of workers looks to who calls it."""

    def __init__(self, folder: Path) -> None:
        self.ranks = [started(run_rank, rank, folder / "meeting") for rank in range(2)]

    async def call(self, method: str, *arguments: Any) -> Any:
        """What rank 0 answers; the other's answer says nothing."""
        found = await self.answers(method, *arguments)
        assert found[1] in (None, {})
        return found[0]

    async def answers(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank answers."""
        for _, rank in self.ranks:
            rank.send_bytes(pickle.dumps((method, arguments)))
        return [pickle.loads(await asyncio.to_thread(rank.recv_bytes)) for _, rank in self.ranks]

    def end(self) -> None:
        for _, rank in self.ranks:
            rank.send_bytes(pickle.dumps(None))
        for process, _ in self.ranks:
            process.join(60)
        assert [process.exitcode for process, _ in self.ranks] == [0, 0]


def test_each_tensor_that_is_read_is_a_sign_of_life() -> None:
    beats: list[int] = []
    names = [name for name, _ in ModelWeights(tiny(adapted=False), beat=lambda: beats.append(1))]
    assert len(beats) == len(names) > 1


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(tmp_path_factory.mktemp("ranks"))
    yield workers
    workers.end()


@pytest.fixture
async def whole(ranks: Workers) -> Workers:
    """A trainer of every weight."""
    await ranks.call("become", "whole")
    return ranks


@pytest.fixture
async def adapted(ranks: Workers) -> Workers:
    """A trainer of an adapter."""
    await ranks.call("become", "adapted")
    return ranks


@pytest.fixture
async def servers() -> AsyncIterator[list[FaultyServer]]:
    async with FaultyServer() as one, FaultyServer() as other:
        yield [one, other]


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)


def state(steps: int) -> dict[str, torch.Tensor]:
    model = tiny(adapted=False)
    for _ in range(steps):
        trained(model)
    return {name: t.detach() for name, t in model.state_dict().items() if name != "lm_head.weight"}


async def test_shards_arrive_whole_and_a_failure_holds_up_no_rank(whole: Workers, servers: list[FaultyServer]):
    urls = tuple(server.url for server in servers)
    result: WeightResult = await whole.call("publish", WeightRequest(urls, 3))
    assert (result.failed, result.adapters) == ({}, {})
    assert "from_tensor" in result.messages[0]
    for server in servers:
        same(server.tensors, state(0))
        assert (server.version, server.paused) == ("3", False)

    await whole.call("train")
    servers[0].faults["/update_weights_from_tensor"] = (1, 500)
    result = await whole.call("publish", WeightRequest(urls, 4))
    assert list(result.failed) == [urls[0]]
    assert servers[0].paused
    same(servers[1].tensors, state(1))

    await whole.call("train")  # who missed it cannot be given another step's weights under its name
    result = await whole.call("publish", WeightRequest(urls[:1], 4, again=True))
    assert "no longer those of step 4" in result.failed[urls[0]]
    result = await whole.call("publish", WeightRequest(urls, 5))
    assert result.failed == {}
    result = await whole.call("publish", WeightRequest(urls[:1], 5, again=True))
    assert result.failed == {}
    for server in servers:
        same(server.tensors, state(2))

    for fault in ("/begin_weight_update", "/pause_generation", "/server_info"):  # before a tensor is read
        async with FaultyServer({fault: (0, 500)}) as bad:
            assert list((await whole.call("publish", WeightRequest((bad.url,), 6))).failed) == [bad.url]
    assert "did not answer" in (await whole.call("publish", WeightRequest((DEAD,), 6))).failed[DEAD]
    assert (await whole.call("publish", WeightRequest(urls, 6))).failed == {}
    for server in servers:
        same(server.tensors, state(2))


class TwoRanks(FaultyServer):
    """A server of two ranks, each of which opens what is meant for it. memory: names of what they opened."""

    def __init__(self, dtype: str = "float32", machines: int = 1) -> None:
        super().__init__()
        self.dtype, self.machines = dtype, machines
        self.memory: list[list[str]] = []

    def _do(self, path: str, body: Any) -> web.Response:
        if path == "/server_info":
            return web.json_response(
                {"device": "cpu", "dtype": self.dtype, "tp_size": 2, "nnodes": self.machines, "version": "0"}
            )
        if path != "/update_weights_from_tensor":
            return super()._do(path, body)
        first, second = (opened(payload) for payload in body["serialized_named_tensors"])
        same(second, first)
        self.tensors = {name: tensor.clone() for name, tensor in first.items()}
        storages: Any = [next(iter(rank.values())).untyped_storage() for rank in (first, second)]
        self.memory.append([storage._share_filename_cpu_()[1].decode() for storage in storages])
        return web.json_response({"success": True, "message": "done"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_each_rank_of_a_server_is_fed_by_the_worker_on_its_gpu(whole: Workers, dtype: str, tmp_path: Path):
    """Of two servers, one is fed by both ranks; a rank that only follows fills nothing."""
    async with TwoRanks(dtype) as fed, TwoRanks(dtype) as other:
        for feeders, senders, kinds in (((0, 1), {}, 2), ((1, 0), {fed.url: 1, other.url: 1}, 2), ((), {}, 1)):
            request = WeightRequest(
                (fed.url, other.url), 3, senders=senders, feeders={fed.url: feeders} if feeders else {}
            )
            found = await whole.answers("publish", request)
            assert [result.failed for result in found if result is not None] == [{}]
            wanted = {name: t.to(getattr(torch, dtype)) if t.dim() > 1 else t for name, t in state(0).items()}
            for server in (fed, other):
                same(server.tensors, wanted)
            assert [len(set(names)) for names in (fed.memory.pop(), other.memory.pop())] == [kinds, 1]

        await whole.call("train")
        request = WeightRequest((fed.url,), 4, feeders={fed.url: (0, 1)})
        for path in ("/server_info", "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor"):
            fed.faults[path] = (0, 500)
            fed._counts.clear()
            assert list((await whole.call("publish", request)).failed) == [fed.url]
        fed.faults.clear()
        await whole.call("open", str(tmp_path), "from_disk")  # a transport that takes no offers
        assert (await whole.call("publish", request)).failed == {}
        await whole.call("open")
        fed.memory.clear()
        assert (await whole.call("publish", request)).failed == {}
        assert len(set(fed.memory.pop())) == 2


async def test_a_server_of_two_machines_that_sleeps_is_fed_on_each(whole: Workers):
    """The call that puts it to sleep opens the channel, before anybody says who feeds it."""
    async with TwoRanks(machines=2) as server:
        assert await whole.call("sleep", [server.url]) == {}
        request = WeightRequest((server.url,), 3, feeders={server.url: (0, 1)})
        (result, _) = await whole.answers("publish", request)
        assert result.failed == {}
        (line,) = result.messages
        assert line.startswith("weights: from_tensor (each rank of a server shares a GPU, or")
        same(server.tensors, state(0))
        assert len(set(server.memory.pop())) == 2
        assert server.calls.count("/resume_memory_occupation") == 2  # the weights' memory, then the rest
        await whole.call("open", None, "from_tensor")
        failed = (await whole.call("publish", replace(request, feeders={}))).failed
        assert "computes on 2 machines: from_tensor takes a rank of the trainer at the place" in failed[server.url]


async def test_a_rank_that_cannot_feed_holds_up_nobody(whole: Workers):
    async with TwoRanks() as server:
        request = WeightRequest((server.url,), 3, feeders={server.url: (0, 1)})
        await whole.call("break_buckets")
        failed = (await whole.call("publish", request)).failed
        assert failed == {server.url: "rank 1 of the trainer offers no memory of its GPU: out of memory"}
        assert (await whole.call("publish", replace(request, feeders={}))).failed == {}


async def test_through_a_folder_and_to_sleep(whole: Workers, servers: list[FaultyServer], tmp_path: Path):
    urls = tuple(server.url for server in servers)
    await whole.call("open", str(tmp_path), "from_disk")
    assert (await whole.call("publish", WeightRequest(urls, 1))).failed == {}
    wanted = dict(servers[0].tensors)
    assert await whole.call("sleep", urls) == {}
    assert "/release_memory_occupation" in servers[0].calls
    assert servers[0].paused
    assert (await whole.call("publish", WeightRequest(urls, 2))).failed == {}
    assert "/resume_memory_occupation" in servers[0].calls
    assert not servers[0].paused
    same(servers[0].tensors, wanted)
    await whole.call("close")
    assert list(tmp_path.iterdir()) == []


async def test_servers_sleep_with_their_base_where_an_adapter_is_sent(adapted: Workers, servers: list[FaultyServer]):
    urls = tuple(server.url for server in servers)
    await adapted.call("publish", WeightRequest(urls, 1, content=WeightContent.ADAPTER))
    for _ in range(2):
        assert await adapted.call("sleep", urls) == {}
        assert servers[0].released == {"kv_cache", "cuda_graph"}
        assert servers[0].paused
        result = await adapted.call("publish", WeightRequest(urls, 2, content=WeightContent.ADAPTER))
        assert (result.failed, result.messages) == ({}, ())
        for server in servers:
            assert (server.released, server.paused) == (set(), False)
    assert await adapted.call("sleep", urls) == {}
    assert await adapted.call("wake") == {}
    assert (servers[1].released, servers[1].paused) == (set(), False)


async def test_a_server_that_was_restarted_while_it_slept_takes_no_memory_and_new_weights(
    whole: Workers, servers: list[FaultyServer]
) -> None:
    urls = tuple(server.url for server in servers)
    await whole.call("open", None, "auto")
    assert (await whole.call("publish", WeightRequest(urls, 1))).failed == {}
    assert await whole.call("sleep", urls) == {}
    servers[0].restart()
    assert (await whole.call("publish", WeightRequest(urls, 2))).failed == {}
    for server in servers:
        assert (server.version, server.released, server.paused) == ("2", set(), False)
    same(servers[0].tensors, servers[1].tensors)
    assert await whole.call("sleep", urls) == {}
    servers[0].restart()
    assert await whole.call("sleep", urls[:1]) == {}  # it does not sleep any more
    assert (await whole.call("publish", WeightRequest(urls, 3))).failed == {}


async def test_a_server_that_was_restarted_while_it_slept_is_given_its_base_again(
    adapted: Workers, servers: list[FaultyServer]
) -> None:
    urls = tuple(server.url for server in servers)
    servers[0].version = "0"
    await adapted.call("publish", WeightRequest(urls, 1, content=WeightContent.ADAPTER))
    assert await adapted.call("sleep", urls) == {}
    servers[0].restart()
    result = await adapted.call("publish", WeightRequest(urls, 2, content=WeightContent.ADAPTER))
    assert list(result.failed) == [urls[0]]
    assert "was restarted while it slept" in result.failed[urls[0]]
    assert (servers[1].released, servers[1].paused) == (set(), False)


async def test_an_unknown_transport_is_named_and_holds_up_no_rank(whole: Workers, servers: list[FaultyServer]):
    await whole.call("open", None, "from_somewhere")
    error = await whole.call("publish", WeightRequest((servers[0].url,), 1))
    assert "from_somewhere" in str(error)
    await whole.call("open", None, "auto")
    assert (await whole.call("publish", WeightRequest((servers[0].url,), 1))).failed == {}


async def test_an_adapter_is_gathered_and_sent_alone(adapted: Workers, servers: list[FaultyServer]):
    urls = tuple(server.url for server in servers)
    model = tiny(adapted=True)
    result: WeightResult = await adapted.call("publish", WeightRequest(urls, 1, content=WeightContent.ADAPTER))
    assert result.failed == {}
    for server in servers:
        assert list(server.adapters) == [result.adapters[server.url]]
        same(server.adapters[result.adapters[server.url]], adapter_state(model))
        assert "/pause_generation" not in server.calls

    await adapted.call("train")  # who missed step 1 is given that one all the same
    again: WeightResult = await adapted.call(
        "publish", WeightRequest(urls[:1], 1, content=WeightContent.ADAPTER, again=True)
    )
    same(servers[0].adapters[again.adapters[urls[0]]], adapter_state(model))
    late = await adapted.call("publish", WeightRequest(urls[:1], 2, content=WeightContent.ADAPTER, again=True))
    assert "no longer that of step 2" in late.failed[urls[0]]

    trained(model)
    result = await adapted.call("publish", WeightRequest(urls, 2, content=WeightContent.ADAPTER))
    same(servers[1].adapters[result.adapters[urls[1]]], adapter_state(model))
    result = await adapted.call("publish", WeightRequest(urls, 2, content=WeightContent.BASE))
    assert result.failed == {}
    base = {name: t.detach() for name, t, _ in plain_tensors(model) if name != "lm_head.weight"}
    same(servers[0].tensors, base)
    await adapted.call("publish", WeightRequest(urls, 2))
    same(servers[0].tensors, {name: t for name, t in merged_state(model).items() if name in base})


async def test_each_machines_first_rank_sends_to_the_servers_there(whole: Workers, servers: list[FaultyServer]):
    """Both ranks gather every tensor once, each sends to its own server, and what fails on one holds up no other."""
    first, second = (server.url for server in servers)
    request = WeightRequest((first, second), 3, senders={second: 1})
    found = await whole.answers("publish", request)
    assert [result.failed for result in found] == [{}, {}]
    assert WeightResult.joined(found).messages == tuple(line for result in found for line in result.messages)
    for server in servers:
        same(server.tensors, state(0))
        assert (server.version, server.paused) == ("3", False)
    assert await whole.answers("sleep", (first, second), {second: 1}) == [{}, {}]
    assert all(server.released for server in servers)

    await whole.call("train")
    servers[1].faults["/update_weights_from_tensor"] = (1, 500)
    found = await whole.answers("publish", replace(request, version=4))
    assert WeightResult.joined(found).failed.keys() == {second}
    same(servers[0].tensors, state(1))
    found = await whole.answers("publish", replace(request, urls=(second,), version=4, again=True))
    assert (found[0], found[1].failed) == (None, {})
    same(servers[1].tensors, state(1))
    await whole.call("train")
    found = await whole.answers("publish", replace(request, urls=(second,), version=4, again=True))
    assert "no longer those of step 4" in found[1].failed[second]
    found = await whole.answers("publish", replace(request, urls=(second,), version=5))  # rank 0 sends nothing
    assert (found[0], found[1].failed) == (None, {})
    same(servers[1].tensors, state(2))
