"""The real server's tokens and log-probs beside the local engine's, and one conversation through both."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from sglang_help import StandIn, all_of, check_constrained, logprobs_of, prompts, tiny
from teacher_help import check_teacher

from agentrl.engine.base import EngineError, GenerationFinish, Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.engine.servers.answer import STREAM_INTERVAL
from agentrl.engine.sglang.kind import SglangEngine
from agentrl.errors import UserError

STOP = (2,)


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    return tiny()


@pytest.fixture
async def engines(parts: tuple[Any, Any], sglang_url: str) -> AsyncIterator[tuple[SglangEngine, LocalEngine]]:
    model, tokenizer = parts
    remote = SglangEngine(model, max_batch=32, tokenizer=tokenizer, urls=(sglang_url,))
    local = LocalEngine(model, max_batch=32)
    await remote.health()
    yield remote, local
    await remote.close()
    await local.close()


async def test_it_keeps_to_constraints_in_its_own_words(engines: Any, parts: Any) -> None:
    await check_constrained(engines[0], parts[1])


async def test_greedy_equals_local(engines: Any, parts: Any) -> None:
    remote, local = engines
    ids = prompts(parts[1], 8)
    theirs, ours = [await all_of(e, ids, Sampling(48, temperature=0.0, stop_ids=STOP)) for e in (remote, local)]
    for a, b in zip(theirs, ours, strict=True):
        assert a.ids == b.ids
        assert a.finish == b.finish
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize("form", ["sampled", "top_k"])
def test_a_teacher_says_how_likely_given_tokens_are(form: str, parts: Any, sglang_url: str) -> None:
    check_teacher(parts, path=sglang_url, form=form, top_k=4)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 1.0, 0), (1.0, 0.8, 0), (0.7, 1.0, 5)]
)
async def test_logprobs_are_those_of_the_temperature(
    engines: Any, parts: Any, temperature: float, top_p: float, top_k: int
) -> None:
    """Before top-p and top-k renormalise, which is what the local engine gives and the trainer computes."""
    (model, tokenizer), (remote, _) = parts, engines
    ids = prompts(tokenizer, 6)
    sampling = Sampling(24, temperature=temperature, top_p=top_p, top_k=top_k, stop_ids=STOP)
    for prompt, made in zip(ids, await all_of(remote, ids, sampling), strict=True):
        assert made.logprobs == pytest.approx(logprobs_of(model, prompt, made.ids, temperature), abs=1e-4)


async def test_greedy_among_sampled_ones_keeps_its_temperature(engines: Any, parts: Any) -> None:
    (model, tokenizer), (remote, _) = parts, engines
    prompt = prompts(tokenizer, 1)[0]
    greedy = Sampling(16, temperature=0.0, stop_ids=STOP)
    hot = Sampling(16, temperature=1.5, stop_ids=STOP)
    made, *_ = await asyncio.gather(
        remote.generate(prompt, greedy, "g"), *(remote.generate(prompt, hot, f"h{i}") for i in range(4))
    )
    assert made.logprobs == pytest.approx(logprobs_of(model, prompt, made.ids, 1.0), abs=1e-4)


async def test_no_stop_ids_means_that_nothing_stops(engines: Any, parts: Any) -> None:
    remote, local = engines
    prompt = prompts(parts[1], 1)[0]
    told: list[list[int]] = []
    theirs, ours = [await e.generate(prompt, Sampling(80, temperature=0.0), "x", told.append) for e in (remote, local)]
    assert theirs.ids == ours.ids
    assert [i for piece in told for i in piece] == theirs.ids * 2
    assert len(told) >= 80 + 80 // STREAM_INTERVAL
    assert len(theirs.ids) == 80
    assert 2 in theirs.ids  # the model's own end of turn, which stops a server left to itself


async def test_stops_at_our_ids_alone(engines: Any, parts: Any) -> None:
    """The server also stops at the model's end-of-turn id; where that is none of ours, the answer goes on."""
    remote, local = engines
    prompt = prompts(parts[1], 1)[0]
    full = (await local.generate(prompt, Sampling(80, temperature=0.0), "x")).ids
    after = next(i for i in full[full.index(2) + 1 :] if i != 2 and i not in full[: full.index(2)])
    theirs, ours = [await e.generate(prompt, Sampling(80, temperature=0.0, stop_ids=(after,)), "y")
                    for e in (remote, local)]  # fmt: skip
    assert theirs.ids == ours.ids
    assert theirs.finish is GenerationFinish.STOP


async def test_answer_fills_the_context_and_no_more(engines: Any, parts: Any) -> None:
    remote, _ = engines
    room = remote.max_context
    assert room <= 1024
    for left in (0, 1, 7):
        made = await remote.generate([10] * (room - left), Sampling(50), f"c{left}")
        assert (len(made.ids), made.finish) == (left, GenerationFinish.LENGTH)


async def test_what_would_kill_the_server_never_leaves(engines: Any) -> None:
    """The real server ends when it is given an id outside its vocabulary."""
    remote, _ = engines
    for wrong in (-1, 1024, 99999):
        with pytest.raises(EngineError, match=f"id {wrong} is outside"):
            await remote.generate([5, wrong], Sampling(4), "w")
    with pytest.raises(EngineError, match="empty prompt"):
        await remote.generate([], Sampling(4), "w")
    await remote.generate([5, 6], Sampling(4), "w")


async def test_abort_keeps_every_token(engines: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, tokenizer), (remote, _) = parts, engines
    monkeypatch.setattr("agentrl.engine.servers.pool.ABORT_SECONDS", 60.0)  # a busy machine takes its time
    prompt = prompts(tokenizer, 1)[0]
    running = [asyncio.create_task(remote.generate(prompt, Sampling(900), f"a{i}")) for i in range(4)]
    client = remote.fleet.pool.up[0].client
    while (await client.get("/v1/loads"))["loads"][0]["num_running_reqs"] < 4:
        await asyncio.sleep(0.02)
    remote.abort("a0")
    first = await running[0]
    assert first.finish is GenerationFinish.ABORT
    assert not any(task.done() for task in running[1:])
    remote.abort()
    made = [first, *[await task for task in running[1:]]]
    for one in made:
        assert one.finish is GenerationFinish.ABORT
        assert 0 < len(one.ids) < 900
        assert one.logprobs == pytest.approx(logprobs_of(model, prompt, one.ids, 1.0), abs=1e-4)


async def test_a_cancelled_request_leaves_room(engines: Any, parts: Any) -> None:
    remote, _ = engines
    running = [asyncio.create_task(remote.generate([5, 6, 7], Sampling(900), f"{i}")) for i in range(64)]
    await asyncio.sleep(0.5)
    for task in running:
        task.cancel()
    assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*running, return_exceptions=True))
    made = await asyncio.wait_for(all_of(remote, [[5, 6, 7]] * 40, Sampling(4)), 300)
    assert [len(m.ids) for m in made] == [4] * 40


async def test_new_weights_are_sampled_from_and_named(parts: Any, sglang_url: str) -> None:
    model, tokenizer = parts
    prompt, sampling = prompts(tokenizer, 1)[0], Sampling(24, temperature=0.0, stop_ids=STOP)
    remote = SglangEngine(model, max_batch=8, urls=(sglang_url,))
    kept = [p.detach().clone() for p in model.parameters()]
    try:
        before = await remote.generate(prompt, sampling, "a")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        await remote.update_weights(3)
        after = await remote.generate(prompt, sampling, "b")
    finally:
        changed = logprobs_of(model, prompt, after.ids, 1.0)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
        await remote.update_weights(0)
        again = await remote.generate(prompt, sampling, "c")
        await remote.close()
    assert (before.weight_version, after.weight_version, again.weight_version) == (0, 3, 0)
    assert after.ids != before.ids
    assert after.logprobs == pytest.approx(changed, abs=1e-4)
    assert again.ids == before.ids


async def test_servers_sleep_until_new_weights_come(parts: Any, sglang_url: str) -> None:
    """By protocol: a CPU frees nothing. A request that comes meanwhile waits, and is answered by the new weights."""
    model, tokenizer = parts
    remote = SglangEngine(model, max_batch=8, urls=(sglang_url,))
    await remote.health()
    await remote.sleep()
    await remote.sleep()
    waiting = asyncio.create_task(remote.generate(prompts(tokenizer, 1)[0], Sampling(8, temperature=0.0), "w"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await remote.update_weights(21)
    await remote.wake()
    answer = await waiting
    assert len(answer.ids) == 8
    assert answer.weight_version in (21, [21] * 8)
    local = await LocalEngine(model, max_batch=8).generate(prompts(tokenizer, 1)[0], Sampling(8, temperature=0.0), "l")
    assert answer.ids == local.ids
    await remote.close()


async def test_a_server_with_weights_of_another_run_is_given_ours(parts: Any, sglang_url: str) -> None:
    model, tokenizer = parts
    prompt, sampling = prompts(tokenizer, 1)[0], Sampling(16, temperature=0.0, stop_ids=STOP)
    other, _ = tiny()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for one in (other, model):
        said: list[str] = []
        remote = SglangEngine(one, max_batch=8, urls=(sglang_url,), say=said.append)
        made = await remote.generate(prompt, sampling, "a")
        await remote.close()
        assert any("samples from other weights than model.path" in line for line in said)
        assert made.logprobs == pytest.approx(logprobs_of(one, prompt, made.ids, 1.0), abs=1e-4)


async def test_one_engine_in_several_loops(parts: Any, sglang_url: str) -> None:
    """As in a run whose event loops follow each other."""
    model, tokenizer = parts
    remote = SglangEngine(model, max_batch=8, urls=(sglang_url,))
    sampling = Sampling(12, temperature=0.0, stop_ids=STOP)

    def in_loops() -> list[Any]:
        made = [asyncio.run(remote.generate(prompts(tokenizer, 1)[0], sampling, "x")) for _ in range(3)]
        asyncio.run(remote.close())
        return made

    made = await asyncio.to_thread(in_loops)
    assert made[0].ids == made[1].ids == made[2].ids


async def test_a_failed_update_is_never_sampled_from(parts: Any, sglang_url: str) -> None:
    """One of two servers does not take the weights: it is out, and its requests go to the other."""
    model, tokenizer = parts
    said: list[str] = []
    async with StandIn(model, tokenizer) as failing:
        remote = SglangEngine(model, max_batch=8, urls=(failing.url, sglang_url), say=said.append)
        try:
            await all_of(remote, [[5, 6, 7]] * 4, Sampling(2))
            before = len(failing.asked)
            assert before == 2
            await remote.update_weights(1)
            made = await all_of(remote, [[5, 6, 7]] * 4, Sampling(2))
            assert [m.weight_version for m in made] == [1] * 4
            assert len(failing.asked) == before
            assert any(failing.url in line and "weights of step 1 did not arrive whole" in line for line in said)
        finally:
            await remote.update_weights(0)
            await remote.close()


async def test_an_update_that_reaches_nobody_is_one_line(parts: Any) -> None:
    model, tokenizer = parts
    async with StandIn(model, tokenizer) as failing:
        remote = SglangEngine(model, max_batch=8, urls=(failing.url,))
        await remote.health()
        with pytest.raises(UserError, match="no server has the weights of step 1: " + failing.url) as caught:
            await remote.update_weights(1)
        assert "\n" not in str(caught.value)
        await remote.close()


async def test_a_server_that_died_between_steps_costs_the_others_nothing(parts: Any, sglang_url: str) -> None:
    model, tokenizer = parts
    async with StandIn(model, tokenizer) as failing:
        remote = SglangEngine(model, max_batch=8, urls=(failing.url, sglang_url))
        try:
            await remote.health()
            failing.dead = True
            await remote.update_weights(1)
            assert (await remote.generate([5, 6, 7], Sampling(2), "x")).weight_version == 1
        finally:
            await remote.update_weights(0)
            await remote.close()
