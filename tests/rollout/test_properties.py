"""Whatever a conversation holds and wherever it is cut: ids, mask, logprobs and versions agree, and each prompt is, id
for id, the trajectory so far. The scripted engine asserts the latter at every turn."""

import asyncio
import random

import numpy as np
import pytest
from agentrl_tools.delegate import Delegate
from fakes import ROLES, TASK, CharChat, Echo, Env, Hooks, ScriptedEngine, call, logprob, make_driver, rng_text
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.plugins.types import Reply, ToolResponse
from agentrl.rollout.request import RequestState
from agentrl.trajectory import FinishReason, check_invariants

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30)
PIECE = st.one_of(
    TEXT,
    TEXT.map(lambda text: call("echo", text=text)),
    TEXT.map(lambda text: call("slow", text=text)),
    st.sampled_from(["<call>", "<call>echo {", "</call>", call("nobody"), "<call>echo [1]</call>", call("bad")]),
)
TURNS = st.lists(st.lists(PIECE, max_size=4).map("".join), min_size=1, max_size=6)
LIMITS = st.fixed_dictionaries(
    {
        "max_turns": st.integers(1, 6),
        "max_tool_calls": st.integers(1, 6),
        "max_tool_calls_per_turn": st.integers(1, 3),
        "max_turn_tokens": st.integers(1, 60),
        "max_tokens": st.integers(60, 600),
        "max_tool_tokens": st.integers(1, 50),
    }
)


class Versions(ScriptedEngine):
    """New weights at every turn."""

    async def generate(self, ids, sampling, request_id):
        self.version = self.turns[request_id] + 1
        return await super().generate(ids, sampling, request_id)


def plugins(hooks, seed, seconds=0.0):
    rng = random.Random(seed)

    async def reply(session, message):
        await asyncio.sleep(seconds * rng.random())
        return Reply(({"role": "user", "content": rng_text(rng, 10)},), reward=rng.random(), done=rng.random() < 0.2)

    async def slow(session, text="", **_):
        await asyncio.sleep(seconds * rng.random())
        return ToolResponse(text * rng.randrange(40), reward=rng.random(), done=rng.random() < 0.1)

    env = Env(hooks, execute=reply)
    return env, [Echo(hooks), Echo(hooks, name="slow", execute=slow), Echo(hooks, name="bad", execute=KeyError("k"))]


def check(t, engine, limits):
    check_invariants(t)
    assert t.failure is None, t.failure
    assert len(t.ids) <= limits["max_tokens"]
    assert len(t.turns) <= limits["max_turns"]
    assert all(turn.end - turn.start <= limits["max_turn_tokens"] for turn in t.turns)
    assert sum(u.error is None for u in t.tool_uses) <= limits["max_tool_calls"]
    for token, mask, p, version in zip(t.ids, t.loss_mask, t.logprobs, t.weight_version, strict=True):
        assert abs(p - (logprob(int(token)) if mask else 0)) < 1e-6
        assert (version >= 1) == bool(mask)
    for k, turn in enumerate(t.turns):
        assert set(t.weight_version[turn.start : turn.end].tolist()) == {k + 1}
        assert t.ids[turn.start - 1] == ROLES["assistant"], "a turn begins right after a generation prompt"
    known = engine.known[t.request_id]
    assert t.ids[: len(known)].tolist() == known, "what the engine saw and said is the trajectory"
    assert t.turns[-1].end == len(known)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(TURNS, LIMITS, st.integers(0, 99))
def test_ids_mask_and_logprobs_agree_however_it_ends(turns, limits, seed):
    hooks = Hooks()
    env, tools = plugins(hooks, seed)
    engine = Versions(lambda _, turn: turns[turn % len(turns)])
    limits["max_turn_tokens"] = min(limits["max_turn_tokens"], limits["max_tokens"])
    driver = make_driver(engine, env, tools, **limits)
    t = asyncio.run(driver.drive(driver.request(TASK, 0)))
    check(t, engine, limits)
    hooks.check()
    assert hooks.total("env", "calc_reward") == 1


BRANCHING = st.lists(
    st.lists(st.one_of(PIECE, TEXT.map(lambda text: call("delegate", task=text))), min_size=1, max_size=4).map("".join),
    min_size=2,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(BRANCHING, LIMITS, st.integers(0, 99), st.integers(30, 250), st.integers(1, 3), st.integers(100, 3000))
def test_every_path_of_a_rollout_that_branches_is_what_the_engine_saw_and_said(turns, limits, seed, at, depth, total):
    hooks = Hooks()
    env, tools = plugins(hooks, seed)
    engine = ScriptedEngine(lambda name, turn: "s" + turns[(turn + ord(name[-1])) % len(turns)])
    limits |= {key: 4 * limits[key] for key in ("max_turns", "max_tool_calls", "max_turn_tokens", "max_tokens")}
    limits |= {"max_total_tokens": total, "compact": {"at": at, "prompt": "Sum up.", "resume": "{summary}"}}
    driver = make_driver(engine, env, [*tools, Delegate(max_depth=depth)], **limits)
    t = asyncio.run(driver.drive(driver.request(TASK, 0)))
    check_invariants(t)
    hooks.check()
    assert t.failure is None, t.failure
    assert len(t.turns) == engine.turns.total() <= limits["max_turns"]
    assert len(t.ids) <= total
    assert all(turn.end - turn.start <= limits["max_turn_tokens"] for turn in t.turns)
    assert all(t.ids[turn.start - 1] == ROLES["assistant"] for turn in t.turns)
    seen = []
    for path in t.paths():
        assert len(path) <= limits["max_tokens"]
        if t.loss_mask[path].any():
            seen.append(t.ids[path][: np.flatnonzero(t.loss_mask[path])[-1] + 1].tolist())
    assert sorted(seen) == sorted(engine.known.values())
    assert t.ids[t.loss_mask.astype(bool)].size == sum(turn.end - turn.start for turn in t.turns)
    assert set(engine.known) <= set(engine.finished)


@settings(max_examples=40, deadline=None)
@given(TURNS, st.integers(0, 99), st.floats(0, 0.012), st.sampled_from(["cancel", "abort", "timeout"]))
def test_hooks_are_closed_and_tokens_kept_when_it_is_stopped_at_any_moment(turns, seed, moment, how):
    hooks = Hooks()
    env, tools = plugins(hooks, seed, seconds=0.003)
    engine = Versions(lambda _, turn: turns[turn % len(turns)], seconds=0.002)
    driver = make_driver(engine, env, tools, **({"timeout": moment + 1e-6} if how == "timeout" else {}))
    request = driver.request(TASK, 0)

    async def main():
        driving = asyncio.create_task(driver.drive(request))
        if how != "timeout":
            await asyncio.sleep(moment)
            driving.cancel() if how == "cancel" else engine.abort()
        (result,) = await asyncio.gather(driving, return_exceptions=True)
        return result

    result = asyncio.run(main())
    assert not isinstance(result, Exception), result
    assert not request.state.nexts or request.state is RequestState.ABORTED
    check_invariants(request.trajectory())
    hooks.check()
    assert engine.finished[request.id] == 1


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(TURNS, st.integers(0, 99), st.lists(st.floats(0, 0.004), max_size=6))
def test_a_request_that_is_aborted_and_driven_on_ends_with_whole_turns(turns, seed, moments):
    hooks = Hooks()
    env, tools = plugins(hooks, seed)
    engine = ScriptedEngine(lambda _, turn: turns[turn % len(turns)], seconds=0.002)
    driver = make_driver(engine, env, tools)
    request = driver.request(TASK, 0)

    async def main():
        before = []
        for moment in moments:
            asyncio.get_running_loop().call_later(moment, engine.abort)
            t = await driver.drive(request, resumable=True)
            check_invariants(t)
            assert t.ids[: len(before)].tolist() == before
            before = t.ids.tolist()
            if t.finish is not FinishReason.ABORTED:
                return t
        return await driver.drive(request)

    t = asyncio.run(main())
    check_invariants(t)
    hooks.check()
    assert t.failure is None
    assert [CharChat().parse(t.ids[u.start : u.end].tolist()).content for u in t.turns] == [
        m["content"] for m in t.messages if m["role"] == "assistant"
    ]
