"""Weights to the real server: what it samples afterwards, bit for bit, by every transport and in mid-request."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from sglang_help import real_plan, real_server
from sglang_weights_help import Weights, altered, ask, check_answer, spans_of, tiny
from torch.distributed import HashStore

from agentrl.containment.threads import in_thread
from agentrl.learner.roles import make_trainer
from agentrl.models.load import load_model
from agentrl.recipe.load import load_recipe
from agentrl.recipe.sections.model import ModelSection
from agentrl.weights.channel import WeightChannel, open_channel
from agentrl.weights.feed import Feed
from agentrl.weights.request import WeightRequest, WeightResult
from agentrl.weights.server import PauseMode
from agentrl.weights.sglang import SglangServer
from agentrl.weights.source import ModelWeights
from agentrl.weights.transports.disk import DiskTransport
from agentrl.weights.transports.nccl import GroupTransport
from agentrl.weights.transports.shared_memory import SharedMemoryTransport

TRANSPORTS = ("from_tensor", "from_distributed", "from_disk")
LONG = 300  # tokens: long enough to be in the middle of it
LONGEST = 950  # all that the model's context has room for, of which nobody waits for the end


@pytest.fixture
async def channel(session: aiohttp.ClientSession, sglang_url: str, tmp_path: Path) -> AsyncIterator[WeightChannel]:
    """By the automatic transport; the server's own weights are put back afterwards, as version 0."""
    found = await open_channel([sglang_url], session, folder=tmp_path, say=lambda line: None)
    yield found
    assert not (await found.publish(0, ModelWeights(tiny()))).failed
    await found.close()


def transport(name: str, folder: Path) -> Any:
    """In several buckets."""
    small = 200_000
    if name == "from_disk":
        return DiskTransport(folder, shard_bytes=small)
    return SharedMemoryTransport(small) if name == "from_tensor" else GroupTransport(bucket_bytes=small)


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_the_server_samples_from_what_was_sent(name: str, channel: WeightChannel, session, sglang_url, tmp_path):
    channel.transport = transport(name, tmp_path)
    for version in (1, 2):  # twice: groups, buckets and folders are used again
        model = altered(version)
        done = await channel.publish(version, ModelWeights(model))
        assert (done.failed, done.good, done.transport) == ({}, (sglang_url,), name)
        assert done.bytes == sum(p.nbytes for p in model.parameters())
        assert channel.versions == {sglang_url: version}
        answer = await ask(session, sglang_url)
        check_answer(answer, [(model, 0, 16)])
        assert spans_of(answer) == [(str(version), 0, 16)]
        assert answer["meta_info"]["cached_tokens"] == 0  # the caches were dropped
    assert spans_of(await ask(session, sglang_url, 1)) == [("2", 0, 1)]
    await channel.transport.close()


@pytest.fixture
def two_ranks(sglang_venv: str, tmp_path: Path) -> Iterator[str]:
    """A server whose layers two processes share, over gloo."""
    with real_server(tmp_path, real_plan({"tp-size": 2})) as url:
        yield url


@pytest.mark.long
async def test_every_rank_of_a_server_has_what_was_sent(two_ranks: str, session: aiohttp.ClientSession, tmp_path: Path):
    channel = await open_channel([two_ranks], session, folder=tmp_path, say=lambda line: None)
    for version, name in enumerate(TRANSPORTS, 1):
        channel.transport, model = transport(name, tmp_path), altered(version)
        assert not (await channel.publish(version, ModelWeights(model))).failed
        check_answer(await ask(session, two_ranks), [(model, 0, 16)])
        await channel.transport.close()
    await channel.close()


@pytest.mark.long
async def test_each_rank_of_a_server_is_fed_by_another_rank_of_the_trainer(two_ranks: str, session, tmp_path: Path):
    channel = await open_channel([two_ranks], session, folder=tmp_path, transport="from_tensor", say=lambda line: None)
    store, filling = HashStore(), SharedMemoryTransport()
    channel.transport = SharedMemoryTransport(200_000)
    for version in (1, 2):
        feeds = [Feed(store, version, rank, {two_ranks: (0, 1)}) for rank in range(2)]
        model = altered(version)
        fed = asyncio.create_task(in_thread(filling.fill, ModelWeights(model), feeds[1]))
        done = await channel.publish(version, ModelWeights(model, feed=feeds[0]))
        feeds[0].close()
        await fed
        assert done.failed == {}
        check_answer(await ask(session, two_ranks), [(model, 0, 16)])
    await channel.close()


async def test_another_trainers_publisher_sends_what_its_stages_hold(
    channel: WeightChannel, session: aiohttp.ClientSession, sglang_url: str, tmp_path: Path
) -> None:
    """docs/another_trainer.md: two stages of a pipeline, of which neither has the whole model."""
    model = altered(1)
    model.save_pretrained(tmp_path / "model")
    load_model(ModelSection())[1].save_pretrained(tmp_path / "model")
    keys = ["model.device=cpu", "model.dtype=float32", "cluster.trainer=pipeline_trainer:PipelineRoles"]
    recipe = load_recipe(None, [f"model.path={tmp_path / 'model'}", *keys])
    host = make_trainer(recipe, recipe, tmp_path, lambda line: None, lambda line: None)
    try:
        publisher = host.weights().publisher
        publisher.open()
        done = await in_thread(publisher.publish, WeightRequest((sglang_url,), 7))
    finally:
        host.close()
    assert done == WeightResult({})
    answer = await ask(session, sglang_url)
    check_answer(answer, [(model, 0, 16)])
    assert spans_of(answer) == [("7", 0, 16)]


async def test_weights_of_another_dtype_are_converted_and_checked(channel: WeightChannel, session, sglang_url):
    model = altered(3, torch.bfloat16)
    assert not (await channel.publish(3, ModelWeights(model))).failed
    reference = tiny()
    reference.load_state_dict(model.state_dict())
    check_answer(await ask(session, sglang_url), [(reference, 0, 16)])


async def in_flight(session: aiohttp.ClientSession, url: str, tokens: int = LONG) -> "asyncio.Task[Any]":
    """A long answer that has begun."""
    task = asyncio.create_task(ask(session, url, tokens))
    running = 0
    while not running:
        async with session.get(url + "/v1/loads") as answer:
            running = (await answer.json())["loads"][0]["num_running_reqs"]
        assert not task.done()
    await asyncio.sleep(0.1)
    return task


async def test_an_update_lands_in_mid_request(channel: WeightChannel, session, sglang_url):
    first, second = altered(4), altered(5)
    await channel.publish(4, ModelWeights(first))
    task = await in_flight(session, sglang_url)
    assert not (await channel.publish(5, ModelWeights(second), "retract")).failed
    answer = await task
    (one, _, cut), (two, start, end) = spans_of(answer)
    assert (one, two, start, end) == ("4", "5", cut, LONG)
    check_answer(answer, [(first, 0, cut), (second, cut, LONG)])


async def test_in_place_keeps_the_keys_and_values_of_the_old_weights(channel: WeightChannel, session, sglang_url):
    first, second = altered(6), altered(7)
    await channel.publish(6, ModelWeights(first))
    task = await in_flight(session, sglang_url)
    assert not (await channel.publish(7, ModelWeights(second), "in_place")).failed
    answer = await task
    (one, _, cut), (two, start, end) = spans_of(answer)
    assert (one, two, start, end) == ("6", "7", cut, LONG)
    check_answer(answer, [(first, 0, cut)])
    with pytest.raises(AssertionError):
        check_answer(answer, [(second, cut, LONG)])


async def test_abort_ends_what_is_in_flight(channel: WeightChannel, session, sglang_url):
    model, second = altered(8), altered(9)
    await channel.publish(8, ModelWeights(model))
    task = await in_flight(session, sglang_url, LONGEST)
    assert not (await channel.publish(9, ModelWeights(second), "abort")).failed
    answer = await task
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    (span,) = spans_of(answer)
    assert span[0] == "8"
    check_answer(answer, [(model, 0, len(answer["output_ids"]))])


async def test_a_request_waits_while_its_server_is_paused(channel: WeightChannel, session, sglang_url):
    model = altered(10)
    await channel.publish(10, ModelWeights(model))
    await channel.servers[0].pause(PauseMode.RETRACT)
    waiting = asyncio.create_task(ask(session, sglang_url))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    assert not await channel.resume()
    check_answer(await waiting, [(model, 0, 16)])


@pytest.mark.parametrize("tags", [("kv_cache",), ("weights", "kv_cache")])
async def test_servers_sleep_while_the_trainer_works(
    tags: tuple[str, ...], channel: WeightChannel, session, sglang_url
):
    """By protocol only: a CPU frees nothing."""
    first, second = altered(11), altered(12)
    await channel.publish(11, ModelWeights(first))
    task = await in_flight(session, sglang_url)
    assert not await channel.sleep(tags)
    assert channel.versions[sglang_url] == (None if "weights" in tags else 11)
    await asyncio.sleep(0.2)
    assert not task.done()
    assert not (await channel.publish(12, ModelWeights(second))).failed
    answer = await task
    cut = spans_of(answer)[0][2]
    assert spans_of(answer) == [("11", 0, cut), ("12", cut, LONG)]
    check_answer(answer, [(first, 0, cut), (second, cut, LONG)])


async def test_waking_alone_serves_only_weights_that_are_there(channel: WeightChannel, session, sglang_url):
    model = altered(13)
    await channel.publish(13, ModelWeights(model))
    assert not await channel.sleep(("kv_cache",))
    assert "sleeps already" in (await channel.sleep())[sglang_url]
    assert not await channel.wake()
    check_answer(await ask(session, sglang_url), [(model, 0, 16)])
    assert not await channel.sleep()
    assert not await channel.wake()
    waiting = asyncio.create_task(ask(session, sglang_url))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    assert not (await channel.publish(14, ModelWeights(model))).failed
    assert spans_of(await waiting) == [("14", 0, 16)]


WRONG = {
    "misnamed": (lambda w: [(n.replace("layers.2.mlp.down", "layers.2.mlp.dawn"), t) for n, t in w], "dawn"),
    "missing": (lambda w: [item for item in w if "layers.1.input_layernorm" not in item[0]], "was not sent"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_server_that_does_not_hold_everything_is_not_sampled_from(
    what: str, channel: WeightChannel, session, sglang_url
):
    model = altered(15)
    spoil, line = WRONG[what]
    done = await channel.publish(15, Weights(spoil(ModelWeights(model))))
    assert done.good == ()
    assert line in done.failed[sglang_url]
    assert channel.versions[sglang_url] is None
    waiting = asyncio.create_task(ask(session, sglang_url))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    assert not await channel.resume()  # nothing to resume
    await asyncio.sleep(0.2)
    assert not waiting.done()
    async with session.get(sglang_url + "/model_info") as answer:
        assert (await answer.json())["weight_version"] == "partial-15"
    assert not (await channel.publish(16, ModelWeights(model))).failed  # in the middle of an update that was left open
    check_answer(await waiting, [(model, 0, 16)])


async def test_an_update_that_ends_in_its_middle_leaves_the_server_paused(channel: WeightChannel, session, sglang_url):
    channel.transport = SharedMemoryTransport(200_000)

    def stop(i: int) -> None:
        if i == 20:
            raise RuntimeError("the trainer fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        await channel.publish(17, Weights(ModelWeights(altered(17)), before=stop))
    waiting = asyncio.create_task(ask(session, sglang_url))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    model = altered(18)
    assert not (await channel.publish(18, ModelWeights(model))).failed
    answer = await waiting
    check_answer(answer, [(model, 0, 16)])
    assert spans_of(answer) == [("18", 0, 16)]


async def test_several_channels_serve_one_server_in_turn(channel: WeightChannel, session, sglang_url, tmp_path):
    second = await open_channel(
        [sglang_url], session, folder=tmp_path, transport="from_distributed", say=lambda line: None
    )
    models = [altered(19), altered(20), altered(21)]
    for version, (one, model) in enumerate(zip((second, channel, second), models, strict=True), 19):
        assert not (await one.publish(version, ModelWeights(model))).failed
        check_answer(await ask(session, sglang_url), [(model, 0, 16)])
    await second.close()
    assert not (await channel.publish(22, ModelWeights(models[0]))).failed


async def test_the_transport_is_chosen_and_said(session, sglang_url, tmp_path):
    said: list[str] = []
    found = await open_channel([sglang_url], session, folder=tmp_path, say=said.append)
    assert (found.transport.name, said) == (
        "from_tensor",
        ["weights: from_tensor (servers share this machine's memory)"],
    )
    facts = await SglangServer(sglang_url, session).facts()
    assert (facts.device, facts.dtype, facts.ranks) == ("cpu", "float32", 1)
