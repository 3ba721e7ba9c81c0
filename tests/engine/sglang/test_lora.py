"""Only the adapter travels to a real server, and its tokens are those of merged weights.

The server runs on a CPU with stand-ins for page-locked memory (scripts/sglang_cpu), which SGLang keeps adapters in.
"""

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import RECIPES
from processes import eventually
from sglang_adapter_help import adapted, stir
from sglang_help import all_of, logprobs_of, prompts, tiny

from agentrl.engine.base import Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.sglang.kind import SglangEngine
from agentrl.training.run import train
from agentrl.weights.sglang import SglangServer

RECIPE = str(RECIPES / "gsm8k_tool.yaml")


@pytest.fixture
async def engine(sglang_url: str) -> AsyncIterator[tuple[SglangEngine, Any, list[str]]]:
    """The engine, the model that is trained, and what was said."""
    model, said = adapted(), []
    made = SglangEngine(model, max_batch=32, urls=(sglang_url,), say=said.append)
    yield made, model, said
    await made.close()


@pytest.mark.parametrize("near", [pytest.param(True, marks=pytest.mark.long), False])
async def test_each_step_samples_as_merged_weights_do(near: bool, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server does not see our files, and is sent tensors by value."""
    remote, model, said = engine
    monkeypatch.setattr("agentrl.weights.lora.same_host", lambda url: near)
    monkeypatch.delattr(SglangServer, "load_adapter_tensors" if near else "load_adapter")
    ids = prompts(tiny()[1], 4)
    local, seen = LocalEngine(model, max_batch=32), []
    await remote.health()
    for step in range(3):
        if step:
            stir(model, step)
            await remote.update_weights(step)
            await local.update_weights(step)
        theirs, ours = [await all_of(e, ids, Sampling(32, 0.0)) for e in (remote, local)]
        for a, b in zip(theirs, ours, strict=True):
            assert a.ids == b.ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
            assert a.weight_version == step
        seen.append([a.ids for a in theirs])
    assert seen[0] != seen[1] != seen[2]
    assert [line for line in said if "weights:" in line] == ["weights: the adapter alone, without a pause"]


async def test_a_turn_keeps_its_adapter_and_the_next_has_the_newest(engine: Any) -> None:
    remote, model, _ = engine
    stir(model, 1)
    prompt = prompts(tiny()[1], 1)[0]
    await remote.update_weights(1)
    old, member = copy.deepcopy(model), remote.fleet.pool.up[0]
    under_way = asyncio.create_task(remote.generate(prompt, Sampling(400, 0.0), "a"))
    await eventually(lambda: member.last_seen and member.calls)
    for step in (2, 3, 4):  # also once it would be dropped by its age
        stir(model, step)
        await remote.update_weights(step)
    assert not under_way.done(), "the server was too quick for this test: let it sample more"
    first = await under_way
    assert first.weight_version == 1
    assert first.logprobs == pytest.approx(logprobs_of(old, prompt, first.ids, 1.0), abs=1e-4)
    longer = prompt + first.ids[:20]
    turn = await remote.generate(longer, Sampling(20, 0.0), "a")
    assert turn.weight_version == 4
    assert turn.logprobs == pytest.approx(logprobs_of(model, longer, turn.ids, 1.0), abs=1e-4)


async def test_a_server_with_another_base_is_given_ours_first(engine: Any, sglang_url: str) -> None:
    remote, model, said = engine
    stir(model, 7)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    await remote.health()
    assert any("it is given ours" in line for line in said)
    prompt = prompts(tiny()[1], 1)[0]
    found = await remote.generate(prompt, Sampling(20, 0.0), "a")
    assert found.logprobs == pytest.approx(logprobs_of(model, prompt, found.ids, 1.0), abs=1e-4)
    back = SglangEngine(adapted(), max_batch=4, urls=(sglang_url,))  # and as it was for other tests
    await back.health()
    await back.close()


async def test_a_server_that_has_lost_its_adapters_is_given_the_newest(engine: Any) -> None:
    remote, model, _ = engine
    stir(model, 3)
    prompt = prompts(tiny()[1], 1)[0]
    await remote.update_weights(5)
    member = remote.fleet.pool.up[0]
    name = remote.fleet.sync.adapter_of(member.url)[0]
    await member.client.post("/unload_lora_adapter", {"lora_name": name})
    found = await remote.generate(prompt, Sampling(20, 0.0), "a")
    assert found.weight_version == 5
    assert found.logprobs == pytest.approx(logprobs_of(model, prompt, found.ids, 1.0), abs=1e-4)


async def test_an_adapter_that_the_server_has_no_room_for_is_merged(sglang_url: str) -> None:
    model, said = adapted(rank=8), []
    stir(model, 1)
    remote = SglangEngine(model, max_batch=4, urls=(sglang_url,), say=said.append)
    try:
        prompt = prompts(tiny()[1], 1)[0]
        found = await remote.generate(prompt, Sampling(20, 0.0), "a")
        assert found.logprobs == pytest.approx(logprobs_of(model, prompt, found.ids, 1.0), abs=1e-4)
    finally:
        await remote.close()
    assert any("merged, and whole weights are sent" in line and "rank 4" in line for line in said)
    back = SglangEngine(adapted(), max_batch=4, urls=(sglang_url,))
    await back.health()
    await back.close()


def test_a_run_trains_an_adapter_over_a_real_server(
    sglang_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(
        RECIPE,
        overrides=[
            "engine.name=sglang", f"engine.args.urls=[{sglang_url}]", "model.lora.rank=4", "train.steps=2",
            "rollout.tasks=6", "rollout.n=4", "train.lr=1e-2", "eval.tasks=2", "eval.every=0", "eval.splits=[test]",
            "train.threads=1", f"output={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    apart = [row["mismatch/logprob_max"] for row in rows[1:] if "mismatch/logprob_max" in row]
    assert apart, "no step had anything to learn from"
    assert max(apart) < 1e-3
    assert "the adapter alone" in capsys.readouterr().out
