"""The real server: its tokens and log-probs beside the local engine's, new weights in mid-request, adapters, a run."""

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
from sglang_help import all_of, check_constrained, logprobs_of, prompts, tiny
from vllm_help import VllmStandIn

from agentrl.checkpoint.run_folder import RunFolder
from agentrl.engine.base import EngineError, GenerationFinish, Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.servers.answer import Answer
from agentrl.engine.vllm.kind import VllmEngine
from agentrl.training.run import train

RECIPE = str(RECIPES / "gsm8k_tool.yaml")
STOP = (2,)


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    return tiny()


@pytest.fixture
async def engines(parts: tuple[Any, Any], vllm_url: str) -> AsyncIterator[tuple[VllmEngine, LocalEngine]]:
    model, tokenizer = parts
    remote = VllmEngine(model, max_batch=32, tokenizer=tokenizer, urls=(vllm_url,))
    local = LocalEngine(model, max_batch=32)
    await remote.health()
    yield remote, local
    await remote.close()
    await local.close()


def shaken(model: Any, seed: int) -> Any:
    """Another step of the trainer."""
    noise, changed = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    return changed


async def test_it_keeps_to_constraints_in_its_own_words(engines: Any, parts: Any) -> None:
    await check_constrained(engines[0], parts[1])


async def test_greedy_equals_local(engines: Any, parts: Any) -> None:
    remote, local = engines
    ids = prompts(parts[1], 8)
    theirs, ours = [await all_of(e, ids, Sampling(48, temperature=0.0, stop_ids=STOP)) for e in (remote, local)]
    for a, b in zip(theirs, ours, strict=True):
        assert (a.ids, a.finish) == (b.ids, b.finish)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
async def test_logprobs_are_those_of_the_temperature(engines: Any, parts: Any, temperature: float) -> None:
    """Greedy and sampled requests are in one batch."""
    (model, tokenizer), (remote, _) = parts, engines
    ids = prompts(tokenizer, 6)
    other = asyncio.create_task(remote.generate(ids[0], Sampling(24, temperature=1.0 - min(temperature, 1.0)), "o"))
    sampling = Sampling(24, temperature=temperature, stop_ids=STOP)
    for prompt, made in zip(ids, await all_of(remote, ids, sampling), strict=True):
        expected = logprobs_of(model, prompt, made.ids, temperature or 1.0)
        assert made.logprobs == pytest.approx(expected, abs=1e-4)
    await other


async def test_only_our_ids_stop_it(engines: Any, parts: Any) -> None:
    remote, local = engines
    prompt = prompts(parts[1], 1)[0]
    full = (await local.generate(prompt, Sampling(80, temperature=0.0), "x")).ids
    after = next(i for i in full[full.index(2) + 1 :] if i != 2 and i not in full[: full.index(2)])
    for stop in ((), (after,)):
        theirs, ours = [await e.generate(prompt, Sampling(80, temperature=0.0, stop_ids=stop), "y")
                        for e in (remote, local)]  # fmt: skip
        assert (theirs.ids, theirs.finish) == (ours.ids, ours.finish)


async def test_answer_fills_the_context_and_no_more(engines: Any) -> None:
    remote, _ = engines
    for left in (0, 1, 7):
        made = await remote.generate([10] * (remote.max_context - left), Sampling(50), f"c{left}")
        assert (len(made.ids), made.finish) == (left, GenerationFinish.LENGTH)
    with pytest.raises(EngineError, match="id 1024 is outside"):
        await remote.generate([5, 1024], Sampling(4), "w")


async def test_abort_keeps_every_token(engines: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, tokenizer), (remote, _) = parts, engines
    monkeypatch.setattr("agentrl.engine.servers.pool.ABORT_SECONDS", 60.0)  # a busy machine takes its time
    answers: list[Answer] = []
    reader = remote.kind.reader

    def noted(answer: Answer, *rest: Any) -> Any:
        answers.append(answer)
        return reader(answer, *rest)

    monkeypatch.setattr(remote.kind, "reader", noted)
    prompt = prompts(tokenizer, 1)[0]
    for attempt in range(5):  # an idle server may have sampled all of them before it hears of the abort
        answers.clear()
        names = [f"a{attempt}.{i}" for i in range(3)]
        running = [asyncio.create_task(remote.generate(prompt, Sampling(900), name)) for name in names]
        await eventually(lambda: len(answers) == 3 and all(answer.ids for answer in answers))
        remote.abort(names[0])
        await running[0]
        going_on = not any(task.done() for task in running[1:])
        remote.abort()
        found = [await task for task in running]
        if going_on and not any(one.finish is GenerationFinish.LENGTH for one in found):
            break
    assert going_on
    for one in found:
        assert one.finish is GenerationFinish.ABORT
        assert 0 < len(one.ids) < 900
        assert one.logprobs == pytest.approx(logprobs_of(model, prompt, one.ids, 1.0), abs=1e-4)


async def test_weights_change_in_mid_request_and_each_token_has_its_version(parts: Any, vllm_url: str) -> None:
    """Each token is what the weights of its version say after all before it, computed anew."""
    model, tokenizer = copy.deepcopy(parts[0]), parts[1]
    first, second, said = copy.deepcopy(model), shaken(model, 1), []
    remote = VllmEngine(model, max_batch=8, urls=(vllm_url,), say=said.append)
    try:
        await remote.health()
        prompt, member = prompts(tokenizer, 1)[0], remote.fleet.pool.up[0]
        for before in (0, 4, 8, 12):  # a quick server may have sampled all of it when the weights come
            told: list[int] = []
            running = asyncio.create_task(
                remote.generate(prompt, Sampling(900, temperature=0.0), f"a{before}", told.extend)
            )
            seen, after = member.last_seen, before + 3
            await eventually(
                lambda seen=seen, running=running: running.done() or (member.calls and member.last_seen > seen)
            )
            model.load_state_dict(second.state_dict())
            await remote.update_weights(after)
            made = await running
            assert told == made.ids
            versions = (
                [made.weight_version] * len(told) if isinstance(made.weight_version, int) else made.weight_version
            )
            if versions[-1] == after:
                break
            model.load_state_dict(first.state_dict())
            await remote.update_weights(before + 4)
        versions = list(versions)
        assert sorted(set(versions)) == [before, after]
        assert versions == sorted(versions)
        cut = versions.index(after)
        expected = [logprobs_of(one, prompt, made.ids, 1.0) for one in (first, second)]
        assert made.logprobs == pytest.approx(expected[0][:cut] + expected[1][cut:], abs=1e-4)
        again = await remote.generate(prompt, Sampling(24, temperature=0.0), "b")
        assert again.weight_version == after
        assert again.logprobs == pytest.approx(logprobs_of(second, prompt, again.ids, 1.0), abs=1e-4)
    finally:
        model.load_state_dict(first.state_dict())
        await remote.update_weights(0)
        await remote.close()
    assert any("weights: from_disk" in line for line in said)


async def test_servers_sleep_until_new_weights_come(parts: Any, vllm_url: str) -> None:
    """By protocol: a CPU frees nothing. A request that comes meanwhile waits, and is answered by the new weights."""
    model, tokenizer = parts
    remote = VllmEngine(model, max_batch=8, urls=(vllm_url,))
    await remote.health()
    await remote.sleep()
    prompt = prompts(tokenizer, 1)[0]
    waiting = asyncio.create_task(remote.generate(prompt, Sampling(8, temperature=0.0), "w"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await remote.update_weights(21)
    answer = await waiting
    assert answer.weight_version in (21, [21] * 8)
    assert answer.logprobs == pytest.approx(logprobs_of(model, prompt, answer.ids, 1.0), abs=1e-4)
    await remote.update_weights(0)
    await remote.close()


async def test_a_failed_update_is_never_sampled_from(parts: Any, vllm_url: str) -> None:
    """One of two servers takes weights half-way: it is out, and its requests go to the other."""
    model, tokenizer = parts
    async with VllmStandIn(model, tokenizer) as failing:
        remote = VllmEngine(model, max_batch=8, urls=(failing.url, vllm_url))
        try:
            await all_of(remote, [[5, 6, 7]] * 4, Sampling(2))
            before = len(failing.asked)
            assert before == 2
            failing.broken = True
            await remote.update_weights(1)
            made = await all_of(remote, [[5, 6, 7]] * 4, Sampling(2))
            assert [m.weight_version for m in made] == [1] * 4
            assert len(failing.asked) == before
        finally:
            await remote.update_weights(0)
            await remote.close()


async def test_adapters_sample_as_merged_weights_do(vllm_url: str) -> None:
    """The adapter of each step travels alone; a turn under way keeps the one that it began with."""
    model, said = adapted(), []
    remote, ids = VllmEngine(model, max_batch=32, urls=(vllm_url,), say=said.append), prompts(tiny()[1], 2)
    local = LocalEngine(model, max_batch=32)
    try:
        await remote.health()
        member = remote.fleet.pool.up[0]
        under_way = asyncio.create_task(remote.generate(ids[0], Sampling(300, temperature=0.0), "long"))
        await eventually(lambda: member.calls or under_way.done())  # done: it failed, which is told below
        old = copy.deepcopy(model)
        for step in (1, 2, 3):
            stir(model, step)
            await remote.update_weights(step)
            await local.update_weights(step)
        theirs, ours = [await all_of(e, ids, Sampling(24, 0.0)) for e in (remote, local)]
        for a, b in zip(theirs, ours, strict=True):
            assert (a.ids, a.weight_version) == (b.ids, 3)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        first = await under_way
        assert first.weight_version == 0
        assert first.logprobs == pytest.approx(logprobs_of(old, ids[0], first.ids, 1.0), abs=1e-4)
    finally:
        await remote.close()
    assert [line for line in said if "weights:" in line] == ["weights: the adapter alone, without a pause"]


def test_a_run_trains_through_a_real_server(vllm_url: str, tmp_path: Path) -> None:
    """Weights follow each step: the trainer's log-probs of what was sampled equal the server's, step after step."""
    result = train(
        RECIPE,
        overrides=[
            "engine.name=vllm", f"engine.args.urls=[{vllm_url}]", "train.steps=2", "rollout.tasks=6", "rollout.n=4",
            "train.lr=1e-3", "eval.tasks=2", "eval.every=0", "eval.splits=[test]", "train.threads=1",
            f"output={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    apart = [row["mismatch/logprob_max"] for row in rows[1:] if "mismatch/logprob_max" in row]
    assert apart, "no step had anything to learn from"
    assert max(apart) < 1e-3
    assert all(row["stop/error"] == 0 for row in rows[1:] if "stop/error" in row)


@pytest.mark.long
def test_a_run_trains_through_a_server_whose_layers_two_processes_share(vllm_venv: str, tmp_path: Path) -> None:
    flags = "engine.args={flags: {tensor-parallel-size: 2}}"
    small = ["rollout.tasks=4", "rollout.n=4", "train.steps=2", "train.lr=1e-3", "eval.every=0", "eval.splits=[]"]
    result = train(RECIPE, overrides=["engine.name=vllm", flags, *small, f"output={tmp_path / 'run'}"])
    rows = RunFolder(result.folder).metrics()[1:]
    assert [row["rollout/failed"] for row in rows] == [0, 0]
    assert max(row["mismatch/logprob_max"] for row in rows) < 1e-3
