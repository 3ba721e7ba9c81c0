"""Adapters when servers come and go, by protocol: no token comes from another adapter than the one it is counted to."""

import asyncio
import copy
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from processes import eventually
from sglang_adapter_help import AdapterStandIn, adapted, stir
from sglang_help import GREEDY, PROMPT, logprobs_of, tiny

from agentrl.engine.base import EngineError, Generation
from agentrl.engine.servers.adapters import AdapterNeeds, AdapterRoom, needs_of, why_merged
from agentrl.engine.sglang.command import SglangPlan
from agentrl.engine.sglang.identity import TOGETHER
from agentrl.engine.sglang.kind import SglangEngine
from agentrl.errors import UserError
from agentrl.models.load import load_skeleton
from agentrl.recipe.sections.model import LoraSection, ModelSection
from agentrl.weights.publisher import Publisher
from agentrl.weights.source import WeightSource


@asynccontextmanager
async def served(model: Any, faults: Any = (), **args: Any) -> AsyncIterator[Any]:
    """An engine over two stand-ins with the embedded model, the first of which has `faults`; what was said."""
    said: list[str] = []
    async with AdapterStandIn(tiny()[0]) as first, AdapterStandIn(tiny()[0]) as second:
        first.faults = deque(faults)
        engine = SglangEngine(model, max_batch=16, say=said.append, urls=(first.url, second.url), **args)
        try:
            yield engine, (first, second), said
        finally:
            await engine.close()


def check(made: Generation, versions: dict[int, Any]) -> None:
    """Each token is that of the model of its version, after all before it."""
    each = made.weight_version
    each = [each] * len(made.ids) if isinstance(each, int) else list(each)
    for version, model in versions.items():
        wanted = logprobs_of(model, PROMPT, made.ids, 1.0)
        for own, found, right in zip(each, made.logprobs, wanted, strict=True):
            assert own != version or found == pytest.approx(right, abs=1e-4)
    assert set(each) <= set(versions)


@pytest.mark.slow
async def test_a_server_that_was_restarted_is_given_base_and_newest_adapter() -> None:
    model = adapted()
    stir(model, 1)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.3)  # a base that no server was started with
    async with served(model, [("die", 2)]) as (engine, (first, second), said):
        await engine.update_weights(1)
        old = copy.deepcopy(model)
        made = await asyncio.gather(*(engine.generate(PROMPT, GREEDY, f"a{i}") for i in range(4)))
        for one in made:
            assert len(one.ids) == 24
            check(one, {1: old})
        assert any(f"{first.url} is taken out" in line for line in said)
        stir(model, 2)
        await engine.update_weights(2)
        with torch.no_grad():
            first.model.model.norm.weight.div_(1.3)
        first.restart()
        waiting = asyncio.create_task(eventually(lambda: any(f"{first.url} is back" in line for line in said)))
        for i in range(40):  # somebody has to want it
            await engine.generate(PROMPT, GREEDY, f"b{i}")
            await asyncio.sleep(0.05)
            if waiting.done():
                break
        await waiting
        before = first.calls["/generate"]
        made = await asyncio.gather(*(engine.generate(PROMPT, GREEDY, f"c{i}") for i in range(4)))
        assert first.calls["/generate"] > before
        for one in made:
            check(one, {2: model})
        assert list(first.adapters) == [engine.fleet.sync.adapter_of(first.url)[0]]
        assert second.calls["/update_weights_from_tensor"] == first.calls["/update_weights_from_tensor"] - 1


@pytest.mark.slow
async def test_an_adapter_that_a_server_has_lost_is_not_silently_the_base() -> None:
    model = adapted()
    stir(model, 1)
    async with served(model) as (engine, servers, said):
        await engine.update_weights(1)
        servers[0].adapters.clear()
        made = await asyncio.gather(*(engine.generate(PROMPT, GREEDY, f"{i}") for i in range(4)))
        for one in made:
            check(one, {1: model})
        assert any("never been loaded" in line for line in said)


@pytest.mark.slow
async def test_a_request_that_changes_servers_has_the_versions_of_both() -> None:
    model = adapted()
    stir(model, 1)
    async with served(model, [("hang", 2)], stall=3.0) as (engine, (first, _), _):
        await engine.update_weights(1)
        old = copy.deepcopy(model)
        under_way = asyncio.create_task(engine.generate(PROMPT, GREEDY, "a"))
        await eventually(lambda: first.running)
        await asyncio.sleep(0.2)
        stir(model, 2)
        await engine.update_weights(2)
        made = await under_way
        assert list(made.weight_version) == [1] * 8 + [2] * 16
        check(made, {1: old, 2: model})


class Elsewhere(WeightSource):
    """The weights of a trainer in other processes."""

    def __init__(self, model: Any) -> None:
        self.publisher = Publisher(model)


@pytest.mark.slow
async def test_a_shape_waits_for_its_trainer() -> None:
    """The controller of a cluster holds no weights: who does sends the base, where that is not known, and adapters."""
    shape, _ = load_skeleton(ModelSection())
    model = adapted()
    stir(model, 1)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.3)
    async with served(shape, lora=LoraSection(rank=4)) as (engine, (first, _), _):
        await engine.health()
        with pytest.raises(EngineError, match="has sent no weights yet"):
            await engine.generate(PROMPT, GREEDY, "a")
        weights = Elsewhere(model)
        for version in (3, 4):
            await engine.update_weights(version, weights)
            made = await engine.generate(PROMPT, GREEDY, f"{version}")
            assert made.weight_version == version
            check(made, {version: model})
            stir(model, version)
        assert first.calls["/update_weights_from_tensor"] == 1


async def test_a_shape_without_an_adapter_is_sent_whole_weights() -> None:
    shape, _ = load_skeleton(ModelSection())
    model = tiny()[0]
    with torch.no_grad():
        model.model.norm.weight.mul_(1.3)
    async with served(shape) as (engine, (first, _), _):
        await engine.update_weights(3, Elsewhere(model))
        made = await engine.generate(PROMPT, GREEDY, "a")
        assert made.weight_version == 3
        check(made, {3: model})
        assert not first.adapters


async def test_a_model_of_other_sizes_is_found_out_before_it_is_sent_anything(tmp_path: Any) -> None:
    model = tiny()[0]
    async with AdapterStandIn(model) as server:
        config = copy.deepcopy(model.config)
        config.intermediate_size += 16
        config.save_pretrained(tmp_path)
        server.model_path = str(tmp_path)
        engine = SglangEngine(model, max_batch=4, urls=(server.url,))
        with pytest.raises(UserError, match=f"has intermediate_size {config.intermediate_size}, model.path has"):
            await engine.health()
        assert not server.calls["/begin_weight_update"]


ROOM = AdapterRoom(True, 8, frozenset(("qkv_proj", "o_proj")))


@pytest.mark.parametrize(
    ("needs", "room", "why"),
    [
        (AdapterNeeds(8, frozenset(("q_proj", "o_proj"))), ROOM, None),
        (AdapterNeeds(8, frozenset(("q_proj",))), AdapterRoom(True, None, frozenset()), None),
        (AdapterNeeds(8, frozenset(("up_proj",))), AdapterRoom(True, 8, frozenset(("all",))), None),
        (AdapterNeeds(8, frozenset(("q_proj", "up_proj"))), ROOM, "u takes no adapters for gate_up_proj"),
        (AdapterNeeds(16, frozenset(("q_proj",))), ROOM, "u takes adapters up to rank 8"),
        (AdapterNeeds(8, frozenset(("q_proj",))), AdapterRoom(), "u takes no adapters"),
        (
            AdapterNeeds(8, frozenset(("up_proj",))),
            AdapterRoom(True, together=TOGETHER),
            "u takes no adapter for up_proj without one for gate_proj",
        ),
        (
            AdapterNeeds(8, frozenset(("q_proj", "o_proj"))),
            AdapterRoom(True, together=TOGETHER),
            "u takes no adapter for q_proj without one for v_proj",
        ),
        (AdapterNeeds(8, frozenset(("gate_proj", "q_proj", "v_proj"))), AdapterRoom(True, together=TOGETHER), None),
        (AdapterNeeds(8, frozenset(("c_attn",))), ROOM, "servers have no adapters for c_attn"),
    ],
)
def test_why_whole_weights_are_sent(needs: AdapterNeeds, room: AdapterRoom, why: str | None) -> None:
    found = why_merged(needs, [("u", room)])
    assert found is None if why is None else found is not None and found.startswith(why)


@pytest.mark.slow
def test_what_an_adapter_needs_is_the_same_of_a_model_and_of_its_shape() -> None:
    section = LoraSection(rank=4, alpha=8)
    shape, _ = load_skeleton(ModelSection())
    assert needs_of(shape, section) == needs_of(adapted(), None)
    assert needs_of(tiny()[0], section) is None  # such as a checkpoint, whose adapter is merged


@pytest.mark.parametrize(
    ("cpu", "flags", "wanted"),
    [
        (False, {}, True),
        (False, {"enable-lora": False}, False),
        (True, {}, False),
        (True, {"enable_lora": True}, True),
    ],
)
def test_a_server_is_launched_with_room_for_the_adapter(cpu: bool, flags: dict[str, Any], wanted: bool) -> None:
    plan = SglangPlan(
        command=("x",), model_path="m", dtype="float32", flags=flags, max_batch=4, cpu=cpu, token_bytes=1, context=8,
        adapter=AdapterNeeds(4, frozenset(("v_proj", "q_proj"))),
    )  # fmt: skip
    words = plan.arguments(30000, 0)
    assert plan.adapted is wanted
    assert ("--enable-lora" in words) is wanted
    line = " ".join(words)
    assert ("--max-lora-rank 4 --lora-target-modules q_proj v_proj --max-loaded-loras 8" in line) is wanted
    assert ("--lora-backend torch_native" in line) is (wanted and cpu)
