"""The local engine in several processes: what it samples is what one process samples, and a dead one is replaced."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import eventually
from tiny_models import NO_IDS, qwen3

from agentrl.constraint import Constraint, Shape
from agentrl.engine.base import ConstraintError, EngineError, Generation, GenerationFinish, Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.local.native import native
from agentrl.engine.local.processes import APART, SLOW_SECONDS, quickest
from agentrl.errors import UserError
from agentrl.models.load import load_model
from agentrl.recipe.sections.model import ModelSection

VOCAB = 61


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and that nobody has asked for has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def made(**config: Any) -> Any:
    torch.set_num_threads(1)
    return qwen3(vocab_size=VOCAB, max_position_embeddings=256, initializer_range=0.2, **NO_IDS, **config)


@pytest.fixture
def model() -> Any:
    return made()


@pytest.fixture
async def engine(model: Any) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(model, max_batch=32, processes=2)
    yield engine
    await engine.close()
    await eventually(lambda: not any(alive(pid) for pid in engine.processes))


async def turns(engine: LocalEngine, count: int, seed: int = 0, **changes: Any) -> list[Generation]:
    """Two turns of `count` conversations each, in groups of four with one prompt."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, 5 + i).tolist() for i in range(-(-count // 4))]

    async def one(number: int) -> list[Generation]:
        prompt, found = list(prompts[number // 4]), []
        for turn in range(2):
            sampling = Sampling(**{"max_tokens": 12, "seed": 100 * number + turn, **changes})
            found.append(await engine.generate(prompt, sampling, f"{seed}/{number}"))
            prompt += [*found[-1].ids, 7, 8]
        engine.finish(f"{seed}/{number}")
        return found

    return [g for pair in await asyncio.gather(*(one(i) for i in range(count))) for g in pair]


@pytest.mark.slow
async def test_they_sample_what_one_process_samples(model: Any, engine: LocalEngine) -> None:
    """To the last bit where a step is compiled; else to those of a product of other row counts."""
    off = 0.0 if native() is not None else 1e-5
    alone = LocalEngine(model, max_batch=32)
    for changes in ({}, {"temperature": 0.0}, {"top_p": 0.8, "top_k": 9}, {"stop_ids": tuple(range(12))}):
        theirs, ours = [await turns(e, 16, **changes) for e in (engine, alone)]
        for a, b in zip(theirs, ours, strict=True):
            assert (a.ids, a.finish, a.weight_version) == (b.ids, b.finish, b.weight_version)
            assert a.logprobs == pytest.approx(b.logprobs, abs=off, rel=0)
    await alone.close()


@pytest.mark.slow
async def test_the_same_seeds_and_number_give_the_same_to_the_last_bit(model: Any) -> None:
    found = []
    for _ in range(3):
        engine = LocalEngine(model, max_batch=32, processes=3)
        found.append([(g.ids, g.logprobs) for g in await turns(engine, 24)])
        await engine.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
async def test_samples_follow_the_models_distribution(model: Any, engine: LocalEngine) -> None:
    prompt, count = [3, 1, 4], 600
    sampling = [Sampling(1, seed=i) for i in range(count)]
    drawn = await asyncio.gather(*(engine.generate(prompt, s, f"c{i}") for i, s in enumerate(sampling)))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy() * count
    seen = Counter(g.ids[0] for g in drawn)
    common = [i for i in range(VOCAB) if expected[i] >= 5]
    rest = count - sum(seen[i] for i in common), count - sum(expected[i] for i in common)
    square = sum((seen[i] - expected[i]) ** 2 / expected[i] for i in common) + (rest[0] - rest[1]) ** 2 / max(
        rest[1], 1
    )
    assert square < len(common) + 4 * (2 * len(common)) ** 0.5


@pytest.mark.slow
async def test_equal_prompts_are_together_and_the_rest_is_dealt(engine: LocalEngine) -> None:
    apart = engine._apart
    assert apart is not None
    running = asyncio.create_task(turns(engine, 16, max_tokens=200))
    await eventually(lambda: sum(len(p.requests) for p in apart._processes) == 16)
    assert [p.conversations for p in apart._processes] == [8, 8]
    homes = [apart._home[f"0/{i}"][0].number for i in range(16)]
    assert all(len(set(homes[first : first + 4])) == 1 for first in range(0, 16, 4))
    engine.fork("branch", ["0/5"])
    assert apart._home["branch"][0].number == homes[5]
    engine.finish("branch")
    engine.abort()
    await running
    assert not apart._home
    assert not apart._openings
    assert [p.conversations for p in apart._processes] == [0, 0]
    many = [engine.generate([5, 6], Sampling(200), f"m{i}") for i in range(40)]
    tasks = [asyncio.create_task(one) for one in many]  # as many as that are not all on one
    await eventually(lambda: sum(len(p.requests) for p in apart._processes) == 40)
    assert abs(apart._processes[0].conversations - apart._processes[1].conversations) <= APART
    engine.abort()
    await asyncio.gather(*tasks)


async def test_new_weights_are_read_where_the_trainer_changes_them(model: Any, engine: LocalEngine) -> None:
    before = await turns(engine, 4, temperature=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
        model.model.norm.weight.data = model.model.norm.weight.data * 1.5  # put elsewhere
    await engine.update_weights(4)
    after, alone = await turns(engine, 4, 1, temperature=0.0), LocalEngine(model, max_batch=4)
    assert {g.weight_version for g in after} == {4}
    assert {g.weight_version for g in before} == {0}
    for a, b in zip(after, await turns(alone, 4, 1, temperature=0.0), strict=True):
        assert a.ids == b.ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    await alone.close()


@pytest.mark.slow
async def test_weights_change_in_mid_turn_and_each_id_has_its_version(model: Any) -> None:
    engine = LocalEngine(model, max_batch=8, overlap=True, processes=2)
    told: list[int] = []
    running = [
        asyncio.create_task(engine.generate([1, 2, 3 + i], Sampling(240), f"r{i}", told.extend if not i else None))
        for i in range(4)
    ]
    await eventually(lambda: told)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.3)  # the engine keeps a copy, which has not changed
    await engine.update_weights(1)
    found = await asyncio.gather(*running)
    assert told == found[0].ids
    for one in found:
        versions = [one.weight_version] * len(one.ids) if isinstance(one.weight_version, int) else one.weight_version
        assert list(versions) == sorted(versions)
        assert set(versions) <= {0, 1}
    assert any(not isinstance(one.weight_version, int) for one in found)
    await engine.close()


@pytest.mark.slow
async def test_abort_sleep_and_cancel(engine: LocalEngine) -> None:
    for attempt in range(5):  # under load the processes may be done before this one has looked
        running = [asyncio.create_task(engine.generate([1, 2 + i], Sampling(250), f"a{attempt}{i}")) for i in range(4)]
        await asyncio.sleep(0.05)
        engine.abort(f"a{attempt}0")
        if running[1].cancel() and (await running[0]).finish is GenerationFinish.ABORT:
            break
    else:
        pytest.fail("nothing was aborted and cancelled in its midst")
    await engine.sleep()
    waiting = asyncio.create_task(engine.generate([9], Sampling(3), "late"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await engine.update_weights(2)
    await asyncio.sleep(0.05)
    assert not waiting.done(), "it sleeps on"
    await engine.wake()
    assert (await waiting).weight_version == 2
    assert len((await running[2]).ids) == 250
    with pytest.raises(asyncio.CancelledError):
        await running[1]
    with pytest.raises(EngineError, match="already generating"):
        await asyncio.gather(*(engine.generate([1], Sampling(200), "twice") for _ in range(2)))
    last = asyncio.create_task(engine.generate([1], Sampling(250), "z"))
    await asyncio.sleep(0.01)
    await engine.close()
    assert (await last).finish is GenerationFinish.ABORT


@pytest.mark.slow
async def test_a_killed_process_is_replaced_and_its_turns_go_on(model: Any, engine: LocalEngine) -> None:
    expected = await turns(engine, 16, max_tokens=60)
    first = engine.processes
    running = asyncio.create_task(turns(engine, 16, max_tokens=60))
    await asyncio.sleep(0.02)
    os.kill(first[0], signal.SIGKILL)
    again = await running
    assert [(g.ids, g.finish) for g in again] == [(g.ids, g.finish) for g in expected]
    assert engine.processes[0] != first[0]
    assert engine.processes[1] == first[1]


async def test_a_process_that_always_dies_fails_its_turns(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.local.processes.DEATHS", 0)
    told: list[int] = []
    running = asyncio.create_task(engine.generate([1], Sampling(250), "r", told.extend))
    await eventually(lambda: told)
    for pid in engine.processes:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="the sampling process 0 was killed by SIGKILL"):
        await running
    assert (await engine.generate([1], Sampling(3), "s")).ids, "another one took its place"


async def test_without_what_makes_them_anew_turns_fail_at_once(engine: LocalEngine) -> None:
    assert engine._apart is not None
    await engine.update_weights(0)  # all have begun: one that is stopped before that would outlive the others
    for pid in engine.processes:  # or they might have sampled all of it before
        os.kill(pid, signal.SIGSTOP)
    running = asyncio.create_task(engine.generate([1], Sampling(250), "r"))
    await asyncio.sleep(0.02)
    os.kill(engine._apart._nursery_pid, signal.SIGKILL)
    for work in (running, engine.generate([1], Sampling(3), "s"), engine.update_weights(1)):
        with pytest.raises(EngineError, match="the sampling processes are gone"):
            await work


@pytest.mark.slow
async def test_constraints_are_kept_to() -> None:
    model, tokenizer = load_model(ModelSection(), 0)
    engine = LocalEngine(model, max_batch=8, tokenizer=tokenizer, processes=2)
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    sampling = Sampling(60, constraint=Constraint((Shape("", schema, ""),)), stop_ids=(tokenizer.eos_token_id,))
    found = await asyncio.gather(*(engine.generate([5, 6 + i], sampling, f"c{i}") for i in range(4)))
    for one in found:
        assert one.allowed is not None
        assert len(one.allowed) == len(one.ids)
        if one.finish is GenerationFinish.STOP:
            assert isinstance(json.loads(tokenizer.decode(one.ids[:-1]))["n"], int)
    wrong = Sampling(60, constraint=Constraint((Shape("", '{"type": "nonsense"}', ""),)))
    with pytest.raises(ConstraintError):
        await engine.generate([5], wrong, "w")
    assert (await engine.generate([5], Sampling(3), "x")).ids, "the others go on"
    await engine.close()


async def test_an_error_of_the_model_fails_the_turns_and_no_process(model: Any, engine: LocalEngine) -> None:
    pids = engine.processes
    kept = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    await engine.update_weights(1)
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate([1], Sampling(3), "r")
    with torch.no_grad():
        model.model.norm.weight.copy_(kept)
    await engine.update_weights(2)
    assert len((await engine.generate([1], Sampling(3), "r")).ids) == 3
    assert engine.processes == pids


async def test_weights_of_another_process_are_received_for_all(model: Any, engine: LocalEngine) -> None:
    other = made()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    await engine.update_weights(1, list(other.state_dict().items()))  # type: ignore[arg-type]
    alone = LocalEngine(other, max_batch=4)
    for a, b in zip(await turns(engine, 4), await turns(alone, 4), strict=True):
        assert a.ids == b.ids
    await alone.close()


@pytest.mark.slow
def test_nothing_outlives_a_run_that_was_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from test_sampling_processes import made\n"
        "from agentrl.engine.local.engine import LocalEngine\n"
        "engine = LocalEngine(made(), max_batch=4, processes=2)\n"
        "print(engine._apart._nursery_pid, *engine.processes, flush=True)\n"
        "time.sleep(60)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = subprocess.Popen(
        [sys.executable, "-c", program, str(Path(__file__).parent)],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert len(pids) == 3
    run.kill()
    run.wait()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process outlived the run"
        time.sleep(0.05)


def test_each_process_must_hold_a_context(model: Any) -> None:
    room = 300 * LocalEngine(model, max_batch=4).runner.token_bytes
    with pytest.raises(UserError, match="fewer than one context of 256"):
        LocalEngine(model, max_batch=4, max_context=256, processes=2, cache_bytes=room)
    engine = LocalEngine(model, max_batch=64, processes="auto", cache_bytes=room)
    assert (engine.max_context, engine.settled, engine.processes) == (256, {"processes": 1}, [])


@pytest.mark.parametrize(
    ("step", "count"),
    [
        (lambda rows: rows, 4),  # a half takes half as long
        (lambda rows: 100 + rows / 8, 1),  # its weights are most of it
        (lambda rows: max(32, rows), 3),  # a third takes as little as a quarter
        (lambda rows: SLOW_SECONDS * 1e5 * rows, 1),
    ],
)
def test_as_many_sample_as_take_least_each_with_one_thread(
    step: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What threads gain differs from one moment to the next, and with it the choice would."""
    threads = set()

    def seconds(runner: Any, rows: int) -> float:
        threads.add(torch.get_num_threads())
        return float(step(rows)) * 1e-5

    monkeypatch.setattr("agentrl.engine.local.processes._step_seconds", seconds)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert quickest(None, 96) == count  # type: ignore[arg-type]
        assert (threads, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)
