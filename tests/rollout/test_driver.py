"""A request from its first hook to its last: what is written down, and every reason to end."""

import asyncio
import time
from itertools import pairwise

import numpy as np
import pytest
from fakes import (
    END,
    TASK,
    CharChat,
    Echo,
    Env,
    Hooks,
    ScriptedEngine,
    abort_when_waiting,
    call,
    logprob,
    make_driver,
)
from processes import eventually

from agentrl.plugins.types import Reply, Task, ToolKwargs, ToolResponse
from agentrl.rollout.request import TRANSITIONS, RequestState, TransitionError
from agentrl.trajectory import Boundary, FinishReason, check_invariants

USER = {"role": "user", "content": "and?"}


async def drive(driver, task=TASK, **kwargs):
    trajectory = await driver.drive(driver.request(task, 0), **kwargs)
    check_invariants(trajectory)
    return trajectory


async def test_two_turns_with_a_tool_are_written_down_token_by_token():
    chat = CharChat()
    t = await drive(make_driver([call("echo", text="4"), "4!"], tools=[Echo()]))
    opening = chat.render([{"role": "user", "content": "2+2?"}], [Echo().schema])
    first = [*map(ord, call("echo", text="4")), END]
    result = chat.bridge(first, [{"role": "tool", "content": "4"}])
    assert t.ids.tolist() == [*opening, *first, *result, ord("4"), ord("!"), END]
    assert t.loss_mask.tolist() == [0] * len(opening) + [1] * len(first) + [0] * len(result) + [1] * 3
    assert np.allclose(t.logprobs, [logprob(i) if m else 0 for i, m in zip(t.ids, t.loss_mask, strict=True)])
    assert t.prompt_length == len(opening)
    assert [m["role"] for m in t.messages] == ["user", "assistant", "tool", "assistant"]
    assert t.messages[1]["tool_calls"][0]["id"] == t.messages[2]["tool_call_id"]
    assert (t.finish, t.reward, t.valid) == (FinishReason.STOP, 1.0, True)
    assert [(u.name, u.error) for u in t.tool_uses] == [("echo", None)]


async def test_the_environment_speaks_and_ends_it():
    replies = [Reply((USER,), reward=0.5), Reply((USER,), reward=0.25, done=True)]
    env = Env(execute=lambda session, message: replies[sum(m["role"] == "assistant" for m in session.messages) - 1])
    t = await drive(make_driver(["a", "b"], env))
    assert t.finish is FinishReason.ENV_DONE
    assert [turn.reward for turn in t.turns] == [0.5, 0.25]
    assert t.rewards == {"env": 1.0, "step": 0.75}
    assert [m["role"] for m in t.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert t.ids[-1] == END, "what is said after the last turn is for people, not for the model"


async def test_a_tool_ends_it_and_gives_a_step_reward():
    tool = Echo(execute=ToolResponse("won", reward=2.0, done=True), calc_reward={"style": 0.5})
    t = await drive(make_driver([call("echo")], tools=[tool]))
    assert t.finish is FinishReason.ENV_DONE
    assert t.rewards == {"env": 1.0, "style": 0.5, "step": 2.0}


async def test_a_turn_cut_by_its_limit_ends_it_and_is_rewarded():
    t = await drive(make_driver(["x" * 50], max_turn_tokens=20))
    assert (t.finish, t.sampled_tokens, t.reward) == (FinishReason.LENGTH, 20, 1.0)


async def test_the_limit_of_the_trajectory_is_never_passed():
    for limit in range(10, 120, 7):
        t = await drive(
            make_driver([call("echo", text="x" * 20)] * 9, tools=[Echo()], max_tokens=limit, max_turn_tokens=9)
        )
        assert len(t.ids) <= limit


async def test_a_context_smaller_than_the_recipe_ends_it():
    engine = ScriptedEngine(["x" * 50], max_context=30)
    t = await drive(make_driver(engine, max_turn_tokens=2000))
    assert (t.finish, len(t.ids)) == (FinishReason.LENGTH, 30)


async def test_no_room_for_what_the_tool_said_ends_it_before_it_is_added():
    t = await drive(make_driver([call("echo", text="x" * 40), "y"], tools=[Echo()], max_tokens=100))
    assert t.finish is FinishReason.LENGTH
    assert t.ids[-1] == END
    assert t.messages[-1]["role"] == "tool"


async def test_an_opening_prompt_without_room_fails_with_the_counts():
    t = await drive(
        make_driver(["x"], Env(create=[{"role": "user", "content": "x" * 90}]), max_tokens=60, max_turn_tokens=9)
    )
    assert t.failure.boundary is Boundary.ENVIRONMENT
    assert "94 tokens" in t.failure.message
    assert "60" in t.failure.message


async def test_turns_used_up():
    t = await drive(make_driver([call("echo")] * 9, tools=[Echo()], max_turns=3))
    assert (t.finish, len(t.turns), len(t.tool_uses)) == (FinishReason.MAX_TURNS, 3, 3)
    assert t.ids[-1] == END


async def test_tool_calls_used_up():
    hooks = Hooks()
    t = await drive(make_driver([call("echo") * 2] * 9, tools=[Echo(hooks)], max_tool_calls=3))
    assert (t.finish, len(t.turns)) == (FinishReason.MAX_TOOL_CALLS, 2)
    assert hooks.total("echo", "execute") == 3
    assert [u.error is None for u in t.tool_uses] == [True, True, True, False]


async def test_when_it_waited_for_whom_is_known():
    t = await drive(make_driver(ScriptedEngine([call("echo"), "done"], seconds=0.01), tools=[Echo()]))
    assert [span.part for span in t.spans] == ["hooks", "engine", "tools", "engine", "environment", "hooks"]
    assert all(a.end <= b.start for a, b in pairwise(t.spans))
    assert abs(t.spans[-1].end - time.time()) < 60
    for part in ("hooks", "engine", "tools", "environment"):
        own = sum(span.end - span.start for span in t.spans if span.part == part)
        assert own == pytest.approx(t.seconds[part], abs=1e-5)


async def test_the_deadline_of_a_turn_keeps_what_was_sampled():
    engine = ScriptedEngine(["x" * 50], seconds=60)
    t = await drive(make_driver(engine, turn_timeout=0.3))
    assert (t.finish, t.sampled_tokens, t.reward) == (FinishReason.TIMEOUT, 25, 1.0)
    assert t.messages[-1] == {"role": "assistant", "content": "x" * 25}


async def test_the_deadline_of_the_request_ends_a_turn_too():
    t = await drive(make_driver(ScriptedEngine(["x" * 50], seconds=60), timeout=0.3))
    assert (t.finish, t.sampled_tokens) == (FinishReason.TIMEOUT, 25)


async def test_the_deadline_of_the_request_ends_a_slow_tool():
    async def slow(session, **_):
        await asyncio.sleep(60)

    t = await drive(make_driver([call("echo")], tools=[Echo(execute=slow)], timeout=0.3))
    assert t.finish is FinishReason.TIMEOUT
    assert t.tool_uses[0].error.startswith("tool: ")


async def test_the_deadline_of_the_request_counts_all_turns():
    engine = ScriptedEngine(lambda *_: call("echo"), seconds=0.05)
    t = await drive(make_driver(engine, tools=[Echo()], timeout=0.3, max_turns=1000, max_tool_calls=1000))
    assert t.finish is FinishReason.TIMEOUT
    assert 1 <= len(t.turns) < 10


async def test_an_aborted_request_keeps_its_tokens_and_is_driven_on():
    hooks = Hooks()
    engine = ScriptedEngine([call("echo", text="x"), "abcdef", "ghij"], seconds=0.2)
    driver = make_driver(engine, Env(hooks), [Echo(hooks)])
    request = driver.request(TASK, 0)
    driving = asyncio.create_task(driver.drive(request, resumable=True))
    await eventually(lambda: engine.turns[request.id] == 2)
    engine.abort()
    first = await driving
    check_invariants(first)
    assert (first.finish, first.valid, request.state) == (FinishReason.ABORTED, False, RequestState.ABORTED)
    assert hooks.total("env", "release") == 0
    engine.version = 7
    second = await driver.drive(request)
    check_invariants(second)
    assert second.ids[: len(first.ids)].tolist() == first.ids.tolist()
    assert (second.finish, len(second.turns)) == (FinishReason.STOP, 2)
    assert second.messages[-1]["content"] == "abcghij"
    assert sorted(set(second.weight_version.tolist())) == [-1, 0, 7]
    assert engine.finished[request.id] == 2
    hooks.check()


async def test_an_aborted_request_is_released_unless_it_is_to_be_driven_on():
    hooks = Hooks()
    engine = ScriptedEngine(["abcdef"], seconds=60)
    driver = make_driver(engine, Env(hooks))
    request = driver.request(TASK, 0)
    t, _ = await asyncio.gather(driver.drive(request), abort_when_waiting(engine, 1))
    assert (t.finish, t.sampled_tokens) == (FinishReason.ABORTED, 3)
    hooks.check()
    with pytest.raises(TransitionError, match="released"):
        await driver.drive(request)


async def test_a_turn_that_is_driven_on_keeps_its_limit():
    engine = ScriptedEngine(["x" * 50, "y" * 50], seconds=0.2)
    driver = make_driver(engine, max_turn_tokens=20)
    request = driver.request(TASK, 0)
    await asyncio.gather(driver.drive(request, resumable=True), abort_when_waiting(engine, 1))
    t = await driver.drive(request)
    assert (t.finish, len(t.turns), t.sampled_tokens) == (FinishReason.LENGTH, 1, 20)
    assert t.messages[-1]["content"] == "x" * 10 + "y" * 10


async def test_a_request_to_be_driven_on_is_released_when_it_is_cancelled():
    hooks = Hooks()
    engine = ScriptedEngine(["abcdef"], seconds=60)
    driver = make_driver(engine, Env(hooks))
    driving = asyncio.create_task(driver.drive(driver.request(TASK, 0), resumable=True))
    await eventually(lambda: engine.stopping)
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    hooks.check()


async def test_a_kept_request_that_is_discarded_is_released():
    hooks = Hooks()
    engine = ScriptedEngine(["abcdef"], seconds=60)
    driver = make_driver(engine, Env(hooks))
    request = driver.request(TASK, 0)
    await asyncio.gather(driver.drive(request, resumable=True), abort_when_waiting(engine, 1))
    await driver.discard(request)
    hooks.check()


async def test_a_finished_request_is_not_driven_again():
    driver = make_driver(["a"])
    request = driver.request(TASK, 0)
    await driver.drive(request)
    with pytest.raises(TransitionError, match="completed"):
        await driver.drive(request)


def test_only_the_transitions_of_the_table_are_allowed():
    driver = make_driver(["a"])
    for old in RequestState:
        for new in RequestState:
            request = driver.request(TASK, 0)
            request.state = old
            if new in TRANSITIONS[old]:
                request.move(new)
                assert request.state is new
            else:
                with pytest.raises(TransitionError, match=f"{old} -> {new}"):
                    request.move(new)


async def test_kwargs_of_the_task_reach_the_four_hooks():
    seen = {}

    def note(hook, result=None):
        def act(session, **kwargs):
            seen[hook] = kwargs
            return result

        return act

    tool = Echo(
        create=note("create"), execute=note("execute", "ok"), calc_reward=note("reward"), release=note("release")
    )
    env = Env(create=note("env", [USER]))
    kwargs = ToolKwargs({"a": 1}, {"b": 2}, {"c": 3}, {"d": 4})
    task = Task("t", {}, tools=("echo",), tools_kwargs={"echo": kwargs}, create_kwargs={"e": 5})
    await drive(make_driver([call("echo", text="x"), "y"], env, [tool, Echo(name="other")]), task)
    assert seen == {
        "create": {"a": 1}, "execute": {"text": "x", "b": 2}, "reward": {"c": 3}, "release": {"d": 4}, "env": {"e": 5},
    }  # fmt: skip


async def test_a_task_offers_only_its_tools():
    task = Task("t", {}, tools=("echo",))
    t = await drive(make_driver([call("other"), "y"], tools=[Echo(), Echo(name="other")]), task)
    assert t.tools == ("echo",)
    assert "no tool named 'other'" in t.messages[2]["content"]


async def test_a_task_with_a_tool_that_the_recipe_lacks_fails_with_the_nearest():
    t = await drive(make_driver(["y"], tools=[Echo()]), Task("t", {}, tools=("ecko",)))
    assert "'ecko'" in t.failure.message
    assert "did you mean 'echo'" in t.failure.message


async def test_sampling_follows_the_recipe_and_seeds_follow_seed_task_sample_and_turn():
    def seeds(seed, task, sample, attempt=0):
        engine = ScriptedEngine([call("echo"), "y"])
        driver = make_driver(engine, tools=[Echo()], temperature=0.7, top_p=0.9, top_k=5)
        asyncio.run(driver.drive(driver.request(task, sample, seed=seed, attempt=attempt)))
        assert {(s.temperature, s.top_p, s.top_k, s.stop_ids) for s in engine.samplings} == {(0.7, 0.9, 5, (END,))}
        return tuple(s.seed for s in engine.samplings)

    def everything():
        other = Task("u", {})
        return [seeds(1, TASK, 0), seeds(2, TASK, 0), seeds((1, 2), TASK, 0), seeds(1, other, 0), seeds(1, TASK, 1),
                seeds(1, TASK, 0, 1)]  # fmt: skip

    first = await asyncio.to_thread(everything)
    assert first == await asyncio.to_thread(everything)
    assert len({seed for both in first for seed in both}) == 12


async def test_what_the_engine_is_given_is_the_requests_own_list():
    given = []

    class Engine(ScriptedEngine):
        async def generate(self, ids, sampling, request_id):
            given.append(ids)
            return await super().generate(ids, sampling, request_id)

    driver = make_driver(Engine([call("echo"), "y"]), tools=[Echo()])
    request = driver.request(TASK, 0)
    await driver.drive(request)
    assert all(ids is request.main.ids for ids in given)
