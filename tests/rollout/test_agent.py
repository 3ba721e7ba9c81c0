"""Agents that hold the conversation themselves: every call comes in by HTTP, and the rollout is a tree of them."""

import asyncio
import gc
import json
import os
import shutil
import socket
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from agentrl_tools.agents import anthropic_messages, chat_completions, responses
from fakes import END, ROLES, CharChat, Echo, Env, Hooks, ScriptedEngine, call, logprob
from processes import alive, eventually

from agentrl.constraint import Constraint, Shape
from agentrl.engine.base import EngineError, Generation, GenerationFinish
from agentrl.errors import UserError
from agentrl.gateway.call import Call, Origin
from agentrl.gateway.server import Gateway
from agentrl.plugins import agent_process
from agentrl.plugins.agent import AgentClient, FunctionAgent, Outcome, ProgramAgent
from agentrl.plugins.agent_process import agent_of_recipe
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import InfrastructureError, Session, Task, ToolResponse
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.agent import AgentSection, host_and_port
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.agent import AgentDriver, AgentRequest, Rollout
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.player import gateway_of
from agentrl.rollout.trajectory_file import conversations, record, row
from agentrl.trajectory import Boundary, FinishReason, Group, Trajectory, check_invariants

TASK = Task("t", {"question": "2+2?"})
Solve = Callable[..., Any]


@asynccontextmanager
async def driving(
    solve: Solve, script: Any = ("4",), env: Env | None = None, tools: Sequence[Tool] = (), **keys: Any
) -> AsyncIterator[tuple[AgentDriver, ScriptedEngine]]:
    """A driver of the agent `solve`; `keys` are those of the recipe's sections `agent` and `rollout`."""
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script)
    own = {key: keys.pop(key) for key in list(keys) if key in AgentSection.model_fields}
    gateway = Gateway(model="tiny")
    await gateway.start()
    agent = FunctionAgent("solve", solve)
    try:
        yield AgentDriver(
            agent=agent, gateway=gateway, section=AgentSection(name="solve", **own), engine=engine, chat=CharChat(),
            environment=env or Env(), tools=tools,
            limits=RolloutSection(**{"max_tokens": 100_000, "max_turn_tokens": 2_000, **keys}),
        ), engine  # fmt: skip
    finally:
        await agent.close()
        await gateway.close()


async def played(solve: Solve, script: Any = ("4",), **keys: Any) -> Trajectory:
    async with driving(solve, script, **keys) as (driver, engine):
        trajectory = await driver.drive(driver.request(TASK, 0))
        check_tokens(trajectory)
        assert all(engine.finished[name] == 1 for name in engine.known)
    return trajectory


def check_tokens(t: Trajectory) -> None:
    """What was sampled is as the engine gave it, and each path is one conversation of the chat."""
    check_invariants(t)
    check_messages(t)
    for turn in t.turns:
        assert t.logprobs[turn.start : turn.end].tolist() == pytest.approx(
            [logprob(i) for i in t.ids[turn.start : turn.end]]
        )


def check_messages(t: Trajectory) -> None:
    """Each segment adds messages that end with the call's answer, and each path is told as one conversation."""
    assert len(t.branches) == len(t.segments)
    if not t.branches:
        return
    assert [messages[-1]["role"] for messages in t.branches] == ["assistant"] * len(t.segments)
    told = conversations(record(row(t)))
    assert [len(one.messages) for one in told] == [sum(len(t.branches[i]) for i in one.segments) for one in told]
    assert len(told) == len(t.paths())


def texts(t: Trajectory) -> list[str]:
    return [CharChat().decode(t.ids[path].tolist()) for path in t.paths()]


def trained(t: Trajectory) -> list[str]:
    return ["".join(chr(i) for i in t.ids[turn.start : turn.end] if i < END) for turn in t.turns if turn.trained]


class Stepped(Env):
    """Asks for one thing after the other, and remembers what the agent returned."""

    def __init__(self, *steps: str, **actions: Any) -> None:
        opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
        super().__init__(**{"create": opening, **actions})
        self.steps = steps

    async def next_step(self, session: Session) -> Any:
        session.state = [*(session.state or []), session.outcome.returned]
        return [{"role": "user", "content": text} for text in self.steps[len(session.state) - 1 :][:1]]


async def test_an_agent_is_started_again_with_each_next_step() -> None:
    seen: list[list[Any]] = []

    async def solve(task: Task, client: AgentClient) -> str:
        seen.append([message["content"] for message in client.messages])
        await chat_completions(task, client)
        return str(seen[-1][-1])

    env = Stepped("Two?", "Three?", calc_reward=lambda session: float(session.state == ["One?", "Two?", "Three?"]))
    found = await played(solve, ["1"], env=env)
    assert seen == [["Be brief.", "One?"], ["Be brief.", "Two?"], ["Be brief.", "Three?"]]
    assert (found.finish, found.reward, trained(found)) == (FinishReason.STOP, 1.0, ["1"] * 3)
    assert len(found.paths()) == 3


async def test_a_task_may_have_less_time_than_the_recipe_gives() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        await chat_completions(task, client)
        await asyncio.sleep(client.timeout + 60)

    async with driving(solve) as (driver, _):
        found = await driver.drive(driver.request(replace(TASK, seconds=2.0), 0))
    assert (found.finish, found.reward) == (FinishReason.TIMEOUT, 1.0)


async def test_a_next_step_that_fails_or_is_not_played() -> None:
    async def once(task: Task, client: AgentClient) -> str:
        return await chat_completions(task, client) if client.messages[-1]["content"] == "One?" else ""

    found = await played(once, ["1"], env=Stepped("Two?"))
    assert found.failure is not None
    assert found.failure.boundary is Boundary.AGENT
    assert "ended without a call of the model" in found.failure.message
    asked = Stepped("Two?", calc_reward=lambda session: float(session.state is None))
    found = await played(_calls_until_it_is_refused, ["1", "2", "3"], env=asked, max_calls=2)
    assert (found.finish, found.reward) == (FinishReason.MAX_TURNS, 1.0)

    async def late(session: Session) -> Any:
        await asyncio.sleep(60)

    slow = Stepped("Two?")
    slow.next_step = late  # type: ignore[method-assign]
    found = await played(chat_completions, ["1"], env=slow, turn_timeout=0.5)
    assert found.failure is not None
    assert found.failure.message.startswith("env.next_step")
    found = await played(chat_completions, ["1"], env=slow, timeout=1.0)
    assert (found.finish, found.reward) == (FinishReason.TIMEOUT, 1.0)


async def _calls_until_it_is_refused(task: Task, client: AgentClient) -> None:
    while True:
        await chat_completions(task, client)


NONE = dict.fromkeys(
    ("calls", "forks", "retries", "auxiliary", "unreceived", "unproven", "ignored", "dropped_thinking"), 0
)
ECHO = [call("echo", text="four"), call("echo", text="4"), "It is 4."]
LOOPS = [chat_completions, responses, anthropic_messages]


@pytest.mark.parametrize("solve", LOOPS, ids=lambda f: f.__name__)
async def test_a_loop_on_a_vendors_sdk_is_one_conversation(solve: Solve) -> None:
    seen: list[Outcome] = []
    env = Env(
        create=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
        calc_reward=lambda session: seen.append(session.outcome) or 0.5,
    )
    found = await played(solve, ECHO, env=env, tools=[Echo()])
    assert found.finish is FinishReason.STOP
    assert found.reward == 0.5
    assert [seen[0].returned] == ["It is 4."]
    chat = CharChat()
    wanted = chat.render(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}], [Echo().schema]
    )
    for said, answer in zip(ECHO, ["four", "4", None], strict=True):
        turn = [*map(ord, said), END]
        wanted += turn
        if answer is not None:
            wanted += chat.bridge(turn, [{"role": "tool", "content": answer}])
    (path,) = found.paths()
    assert found.ids[path].tolist() == wanted
    assert trained(found) == ECHO
    assert [use.name for use in found.tool_uses] == ["echo", "echo"]
    assert [message["role"] for message in found.messages] == [
        "system",
        "user",
        *["assistant", "tool"] * 2,
        "assistant",
    ]
    assert found.extra["gateway"] == {**NONE, "calls": 3}


async def raw(client: AgentClient, messages: list[Any], headers: dict[str, str] | None = None, **body: Any) -> Any:
    """One call of the Chat Completions API without an SDK: (status, body)."""
    given = {"Authorization": f"Bearer {client.api_key}", **(headers or {})}
    url = f"{client.base_url}/chat/completions"
    async with (
        aiohttp.ClientSession(headers=given) as session,
        session.post(url, json={"messages": messages, **body}) as response,
    ):
        return response.status, await response.json()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def said(client: AgentClient, messages: list[Any], **body: Any) -> Any:
    """The message that a call is answered with."""
    status, found = await raw(client, messages, **body)
    assert status == 200, found
    return found["choices"][0]["message"]


def by_count() -> Callable[[str, int], str]:
    """An engine's script: a1, a2, ... whatever the branch."""
    count = iter(range(1, 1000))
    return lambda _, turn: f"a{next(count)}"


async def test_a_history_that_was_changed_begins_a_branch_at_the_last_answer_that_it_keeps() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        talk: list[Any] = [user("one")]
        talk.append(await said(client, talk))
        edited = [*talk, user("other")]
        talk.append(user("two"))
        talk.append(await said(client, talk))
        edited.append(await said(client, edited))
        await said(client, [*edited, user("three")])
        await said(client, [user("new")])

    engine = ScriptedEngine(by_count())
    found = await played(solve, engine)
    assert list(engine.forks.values()) == [["t#0.1"], ["t#0.1", "t#0.1/1"]]
    assert [s.parent for s in found.segments] == [-1, 0, 0, 2, -1]
    assert trained(found) == ["a1", "a2", "a3", "a4", "a5"]
    assert found.extra["gateway"]["forks"] == 2
    assert [text.count("<0>") for text in texts(found)] == [4, 6, 2]
    assert found.messages[0]["content"] == "new"


async def test_after_a_fork_an_answer_that_was_sampled_keeps_its_ids_as_context() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        first = await said(client, [user("one")])
        await said(client, [user("summary of one"), first, user("two")])
        await said(client, [user("x"), {"role": "assistant", "content": "of nobody"}, user("two")])

    found = await played(solve, by_count())
    assert [s.parent for s in found.segments] == [-1, -1, -1]
    chat = CharChat()
    turn = [ord("a"), ord("1"), END]
    kept = [*chat.render([user("summary of one")], []), *turn, *chat.bridge(turn, [user("two")])]
    second = found.segments[1]
    assert found.ids[second.start : second.start + len(kept)].tolist() == kept
    assert found.loss_mask[second.start : second.start + len(kept)].sum() == 0


@pytest.mark.parametrize("form", ["order", "text", "parts", "ids"])
async def test_another_form_of_the_same_history_is_the_same_history(form: str) -> None:
    def changed(message: Any) -> Any:
        (made,) = message["tool_calls"]
        arguments = json.loads(made["function"]["arguments"])
        function = dict(made["function"])
        if form == "order":
            function["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
        if form == "ids":
            made = {**made, "id": "own"}
        content: Any = (
            [{"type": "text", "text": "so "}, {"type": "text", "text": "far"}] if form == "parts" else "so far"
        )
        return {"tool_calls": [{**made, "function": function}], "content": content, "role": "assistant"}

    async def solve(task: Task, client: AgentClient) -> None:
        message = await said(client, [user("go")], tools=list(client.tools))
        result = {"role": "tool", "tool_call_id": "x", "content": "ok"}
        await said(client, [user("go"), changed(message), result], tools=list(client.tools))

    found = await played(solve, ["so far" + call("echo", text="a", more=1), "done"], tools=[Echo()])
    assert not found.segments
    assert not found.branches
    assert found.messages[1]["tool_calls"][0]["id"] == "call_0_0"  # as it was sampled
    assert found.extra["gateway"]["forks"] == 0


async def test_an_answer_without_a_choice_of_tools_is_text_of_the_same_conversation() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        talk: list[Any] = [user("go")]
        for choice in ("auto", "none", "auto"):
            talk.append(await said(client, talk, tools=list(client.tools), tool_choice=choice))
            talk.append(user("on"))
        assert [bool(message.get("tool_calls")) for message in talk[1::2]] == [True, False, False]
        assert talk[3]["content"] == "so: after\n" + call("echo", text="b")

    script = [call("echo", text="a"), "so: " + call("echo", text="b") + "after", "done"]
    found = await played(solve, script, tools=[Echo()], train="tools")
    assert len(found.paths()) == 1
    assert trained(found) == script
    assert found.extra["gateway"]["forks"] == 0


async def completed(client: AgentClient, prompt: Any, **body: Any) -> Any:
    """The choice that a prompt as it stands is answered with."""
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{client.base_url}/completions", json={"prompt": prompt, **body}) as response,
    ):
        assert response.status == 200, await response.text()
        return (await response.json())["choices"][0]


async def test_a_prompt_as_it_stands_is_sampled_and_trained_like_any() -> None:
    """By text and by token ids: what goes on from an answer goes on from its tokens; what does not begins anew."""

    async def solve(task: Task, client: AgentClient) -> None:
        text = "<2>Say"
        first = await completed(client, text)
        assert (first["text"], first["finish_reason"]) == ("a1" + call("echo"), "stop")
        text += first["text"] + "<0>"
        second = await completed(client, text + "<2>on", max_tokens=2, return_token_ids=True)
        assert (second["text"], second["token_ids"]) == ("a2", [ord("a"), ord("2")])
        text += "<2>on" + second["text"]
        third = await completed(client, text, logprobs=0)  # it was cut, and goes on where it was
        assert third["logprobs"]["tokens"] == [*"a3" + call("echo"), "<0>"]
        whole = [*map(ord, "hi"), ROLES["user"]]
        fourth = await completed(client, whole, return_token_ids=True)
        await completed(client, [*whole, *fourth["token_ids"], 65])
        await completed(client, [*whole, *fourth["token_ids"][:-1], 65])
        await completed(client, "<2>Say it")

    count = iter(range(1, 10))
    found = await played(solve, lambda _, turn: f"a{next(count)}" + call("echo"))
    assert found.failure is None, found.failure
    assert [segment.parent for segment in found.segments] == [-1, 0, 1, -1, 3, -1, -1]
    said = call("echo")
    assert trained(found) == [f"a1{said}", "a2", *(f"a{i}{said}" for i in range(3, 8))]
    assert [text.count("<0>") for text in texts(found)] == [2, 2, 1, 1]
    assert texts(found)[0] == f"<2>Saya1{said}<0><2>ona2a3{said}<0>"
    assert found.turns[1].end == found.turns[2].start


async def test_a_prompt_does_not_read_what_it_does_not_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    decode = CharChat.decode
    monkeypatch.setattr(CharChat, "decode", lambda chat, ids: read.append(len(ids)) or decode(chat, ids))

    async def solve(task: Task, client: AgentClient) -> None:
        await completed(client, "text " * 1000)
        await completed(client, [66] * 5000)
        read.clear()
        await completed(client, "another")
        assert max(read) < 100

    assert (await played(solve)).failure is None


@pytest.mark.parametrize(("prompt", "why"), [([1 << 30], "no token id"), ("", "prompt: expected a text")])
async def test_a_prompt_that_is_none_is_refused(prompt: Any, why: str) -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        with pytest.raises(AssertionError, match=why):
            await completed(client, prompt)
        await completed(client, "one")

    assert len((await played(solve)).turns) == 1


async def test_two_answers_alike_are_told_apart_by_the_ids_of_their_calls() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        tools = list(client.tools)
        both = [await said(client, [user("go")], tools=tools) for _ in range(2)]
        for message in both:
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
            await said(client, [user("go"), message, result], tools=tools)

    found = await played(solve, lambda _, turn: call("echo") if turn == 0 else "done", tools=[Echo()])
    assert [s.parent for s in found.segments] == [-1, -1, 0, 1]


async def test_a_call_that_the_sdk_sends_again_joins_the_first() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        again = {"x-stainless-retry-count": "1"}
        first, second = await asyncio.gather(raw(client, [user("one")]), later(client, again))
        assert first[1]["choices"] == second[1]["choices"]
        assert (await raw(client, [user("one")], headers=again))[1]["id"] == first[1]["id"]

    async def later(client: AgentClient, headers: dict[str, str]) -> Any:
        await asyncio.sleep(0.02)
        return await raw(client, [user("one")], headers=headers)

    found = await played(solve, ScriptedEngine(["a"], seconds=0.1))
    assert len(found.turns) == 1
    assert found.extra["gateway"] == {**NONE, "calls": 1, "retries": 2}


async def test_calls_run_side_by_side_and_stand_in_the_order_in_which_they_began() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        await asyncio.gather(*(said(client, [user(f"part {i}")]) for i in range(5)))

    class Together(ScriptedEngine):
        async def _stopped(self, request_id: str) -> bool:
            await all_five.wait()
            return False

    all_five = asyncio.Barrier(5)
    async with asyncio.timeout(60):
        found = await played(solve, Together(lambda name, _: f"of {name}"))
    assert len(found.paths()) == 5
    assert all(s.parent == -1 for s in found.segments)


MARKS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({}, ["a1", "a2", "a4", "a5"], ["", "", "marked", "", ""]),
    ({"train": "tools"}, ["a2", "a5"], ["without_tools", "", "marked", "without_tools", ""]),
]


@pytest.mark.parametrize(("keys", "kept", "why"), MARKS, ids=["all", "tools"])
async def test_every_answer_is_trained_but_what_the_agent_marks_and_the_recipe_leaves_out(
    keys: dict[str, Any], kept: list[str], why: list[str]
) -> None:
    async def solve(task: Task, client: AgentClient) -> str:
        plan = await said(client, [user("plan")])
        talk: list[Any] = [user(f"do {plan['content']}")]
        talk.append(await said(client, talk, tools=list(client.tools)))
        marked = {"X-Agentrl-Train": "0", "X-Agentrl-Role": "title"}
        await raw(client, [user("a title for this")], headers=marked, tools=list(client.tools))
        final = await said(client, [*talk, user("your answer, without tools")])
        await raw(client, [user("and this")], headers={"X-Agentrl-Train": "1"})
        return str(final["content"])

    found = await played(solve, by_count(), tools=[Echo()], **keys)
    assert trained(found) == kept
    assert [turn.untrained for turn in found.turns] == why
    assert [turn.role for turn in found.turns] == ["", "", "title", "", ""]
    assert found.extra["gateway"]["auxiliary"] == 5 - len(kept)
    assert found.sampled_tokens == 3 * len(kept)
    assert np.isfinite(found.logprobs[found.turns[2].start])


async def test_a_rollout_has_a_bounded_number_of_seats() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        found = [
            await raw(client, [user("hi")], headers={"X-Agentrl-Role": f"seat-{min(i, 17)}"}) for i in (*range(18), 3)
        ]
        assert [status for status, _ in found] == [200] * 16 + [400] * 2 + [200]

    assert len((await played(solve)).turns) == 17


async def test_an_environment_rewards_the_seats_that_an_agent_calls_for() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        answer = await said(client, [user("2+2?")])
        for _ in range(2):
            await raw(client, [user(f"is {answer['content']} right?")], headers={"X-Agentrl-Role": "judge"})

    env = Env(calc_reward={"right": 1.0, "seats": {"judge": 0.25, "other": 2}})
    found = await played(solve, by_count(), env=env)
    assert found.failure is None
    assert (dict(found.rewards), found.reward) == ({"right": 1.0}, 1.0)
    assert dict(found.seats) == {"judge": 0.25, "other": 2.0}
    assert [turn.role for turn in found.turns] == ["", "judge", "judge"]
    metrics = rollout_metrics([Group(TASK, (found,))])
    assert {name: value for name, value in metrics.items() if name.startswith("seat/")} == {
        "seat/judge/calls": 2, "seat/judge/tokens": 6, "seat/judge/reward_mean": 0.25,
        "seat/other/calls": 0, "seat/other/tokens": 0, "seat/other/reward_mean": 2.0,
    }  # fmt: skip
    assert metrics["reward/mean"] == 1.0


@pytest.mark.parametrize(
    ("name", "value"), [("X-Agentrl-Train", "no"), ("X-Agentrl-Role", "a/b"), ("X-Agentrl-Role", "x" * 33)]
)
async def test_a_header_of_ours_that_says_nothing_known_is_refused(name: str, value: str) -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        await said(client, [user("one")])
        status, body = await raw(client, [user("two")], headers={name: value})
        assert (status, body["error"]["message"].partition(":")[0]) == (400, name)

    assert len((await played(solve)).turns) == 1


async def test_a_key_serves_its_own_rollout_and_no_longer() -> None:
    clients: list[AgentClient] = []

    async def solve(task: Task, client: AgentClient) -> None:
        clients.append(client)
        await said(client, [user("one")])

    async with driving(solve) as (driver, _):
        await driver.drive(driver.request(TASK, 0))
        for key in (clients[0].api_key, "", "wrong"):
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                for path in ("chat/completions", "responses", "messages", "messages/count_tokens"):
                    async with session.post(f"{clients[0].base_url}/{path}", json={}) as response:
                        assert response.status == 401, path
                        assert "key" in json.dumps(await response.json())
                async with session.get(f"{clients[0].base_url}/models") as response:
                    assert response.status == 401


@pytest.mark.parametrize(
    ("limit", "finish"),
    [
        ({"max_calls": 2}, FinishReason.MAX_TURNS), ({"max_total_tokens": 14}, FinishReason.LENGTH),
        ({"max_tokens": 22}, FinishReason.LENGTH),
    ],
    ids=str,
)  # fmt: skip
async def test_limits_end_a_rollout_which_is_judged(limit: dict[str, int], finish: FinishReason) -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        talk: list[Any] = [user("one")]
        for _ in range(20):
            talk += [await said(client, talk), user("on")]

    found = await played(solve, by_count(), **limit)
    assert found.finish is finish
    assert found.reward == 1.0
    assert 1 <= len(found.turns) < 20


FAULTS: list[tuple[Any, str]] = [
    (ValueError("bad luck"), "bad luck"), (SystemExit(3), "SystemExit"), (KeyboardInterrupt(), "KeyboardInterrupt"),
    (asyncio.CancelledError(), "cancelled itself"), (None, "without a call of the model"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "said"), FAULTS, ids=[type(e).__name__ for e, _ in FAULTS])
async def test_an_agent_that_fails_is_no_fault_of_the_models(error: Any, said: str) -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        if error is not None:
            raise error

    hooks = Hooks()
    found = await played(solve, env=Env(hooks))
    assert found.failure.boundary is Boundary.AGENT
    assert said in found.failure.message
    assert not found.rewards
    hooks.check()


@pytest.mark.slow
async def test_an_agent_that_takes_too_long_ends_by_its_deadline_and_is_judged() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        await said(client, [user("one")])
        await asyncio.sleep(60)

    found = await played(solve, timeout=2.0)
    assert found.finish is FinishReason.TIMEOUT
    assert found.reward == 1.0


async def test_a_plain_function_runs_in_a_thread_and_calls_tools_without_await() -> None:
    def solve(task: Task, client: AgentClient) -> str:
        from openai import OpenAI

        with OpenAI(base_url=client.base_url, api_key=client.api_key) as openai:
            openai.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
        return str(client.call_tool("echo", {"text": "back"}))

    seen: list[Session] = []
    found = await played(solve, env=Env(calc_reward=lambda session: seen.append(session) or 1.0), tools=[Echo()])
    assert seen[0].outcome.returned == "back"
    assert found.tool_uses[0].name == "echo"


async def test_what_a_tool_earns_stands_at_the_answer_and_its_faults_are_its_own() -> None:
    async def solve(task: Task, client: AgentClient) -> str:
        await said(client, [user("one")])
        assert "no tool named" in await client.call_tool("ecco", {})
        assert "no JSON object" in await client.call_tool("echo", "[1")
        return str(await client.call_tool("echo", {"text": "x"}))

    rewarding = Echo(execute=lambda session, text="": ToolResponse(text, reward=0.25))
    found = await played(solve, tools=[rewarding])
    assert found.turns[0].reward == 0.25
    assert found.rewards["step"] == 0.25
    assert [use.error is None for use in found.tool_uses] == [False, False, True]
    broken = await played(solve, tools=[Echo(execute=InfrastructureError("the server is down"))])
    assert broken.failure.boundary is Boundary.TOOL


@pytest.mark.parametrize(
    ("gives", "why"),
    [
        (EngineError("it is gone"), "it is gone"),
        (Generation([], [], GenerationFinish.STOP), "0 ids came"),
        (Generation([1] * 3000, [-0.5] * 3000, GenerationFinish.STOP), "3000 ids came where 1 to 2000"),
        (Generation([1, 2], [-0.5], GenerationFinish.STOP), "another number of logprobs"),
        (Generation([1, 2], [-0.5, -0.5], GenerationFinish.STOP, [1]), "another number of logprobs or weight versions"),
    ],
)
async def test_an_engine_that_fails_is_told_to_the_agent_and_fails_the_rollout(gives: Any, why: str) -> None:

    class Broken(ScriptedEngine):
        async def generate(self, *args: Any) -> Any:
            if isinstance(gives, EngineError):
                raise gives
            return gives

    async def solve(task: Task, client: AgentClient) -> None:
        status, body = await raw(client, [user("one")])
        assert (status, body["error"]["type"]) == (500, "server_error")

    found = await played(solve, Broken(["4"]))
    assert found.failure.boundary is Boundary.ENGINE
    assert why in found.failure.message


CURL = """
curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
  -d "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$0\\"}]}" > answer.json
echo "asked $0"; exit 3
"""


@asynccontextmanager
async def program(command: list[str], script: Any = ("4",), **keys: Any) -> AsyncIterator[AgentDriver]:
    async with driving(lambda task, client: None, script, **keys) as (driver, _):
        driver.agent = ProgramAgent(tuple(command))
        try:
            yield driver
        finally:
            await driver.agent.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_a_program_in_another_language_is_an_agent() -> None:
    seen: list[tuple[Outcome, str]] = []

    def judge(session: Session) -> float:
        seen.append((session.outcome, Path(session.outcome.folder, "answer.json").read_text()))
        return 0.5

    async with program(["sh", "-c", CURL, "{prompt}"], env=Env(calc_reward=judge)) as driver:
        found = await driver.drive(driver.request(TASK, 0))
        ((outcome, answer),) = seen
        assert await gone(outcome)
    assert found.reward == 0.5
    assert (outcome.exit_code, outcome.output) == (3, "asked 2+2?\n")
    assert json.loads(answer)["choices"][0]["message"]["content"] == "4"
    assert texts(found)[0].count("2+2?") == 1


async def gone(outcome: Outcome) -> bool:
    """Whether its folder goes."""
    assert outcome.folder is not None
    folder = Path(outcome.folder).parent
    await eventually(lambda: not folder.exists())
    return True


WILD = """
import os, signal, subprocess, sys, time, urllib.request
signal.signal(signal.SIGTERM, signal.SIG_IGN)
body = b'{"messages": [{"role": "user", "content": "hi"}]}'
for _ in range(200):
    one = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
                                 {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    try: urllib.request.urlopen(one).read()
    except OSError: pass
open("state", "w").write("here")
os.write(1, b"x" * 3_000_000)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
time.sleep(1000)
"""


@pytest.mark.slow
async def test_a_wild_program_is_bounded_and_judged_by_what_it_left() -> None:
    seen: list[tuple[Outcome, str]] = []

    def judge(session: Session) -> float:
        seen.append((session.outcome, Path(session.outcome.folder, "state").read_text()))
        return 1.0

    keys: dict[str, Any] = {"env": Env(calc_reward=judge), "timeout": 4.0, "max_calls": 5}
    async with program([sys.executable, "-c", WILD], by_count(), **keys) as driver:
        found = await driver.drive(driver.request(TASK, 0))
        ((outcome, state),) = seen
        assert await gone(outcome)
    assert state == "here"
    assert len(found.turns) == 5
    assert outcome.exit_code is None
    assert 0 < len(outcome.output) <= 1 << 16
    await eventually(lambda: not processes_with(str(outcome.folder)))


HOSTILE = """
import os, signal, subprocess, sys
for name in ("ended", ".ended"): os.mkfifo("../" + name)
os.symlink(sys.argv[1], "link")
here = os.getcwd()
for n in range(1500):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
os.chdir(here)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open("child", "w").write(str(child.pid))
supervisor, keeper = os.getppid(), os.getpgrp()
exec(sys.argv[2])
"""


KILLS = {
    "nobody": "", "its supervisor": "os.kill(supervisor, signal.SIGKILL)",
    "its supervisor, by a stop": "os.kill(supervisor, signal.SIGSTOP)",
    "its group": "os.killpg(0, signal.SIGKILL)",
    "both": "os.kill(keeper, signal.SIGKILL); os.kill(supervisor, signal.SIGKILL)",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kills", KILLS.values(), ids=KILLS)
async def test_what_a_hostile_program_leaves_is_removed(tmp_path: Path, kills: str) -> None:
    """It attacks its supervisor, and what a folder is removed by; nobody waits for its pipes."""
    (tmp_path / "kept").touch()
    async with program([sys.executable, "-c", HOSTILE, str(tmp_path), kills]) as driver:
        outcome = await driver.agent.solve(TASK, client_without_gateway())
        child = int(Path(str(outcome.folder), "child").read_text())
        await driver.agent.release(outcome)
    assert outcome.exit_code == (None if kills else 0)
    assert not alive(child)
    assert not Path(str(outcome.folder)).parent.exists()
    assert (tmp_path / "kept").exists()


def client_without_gateway() -> AgentClient:
    return AgentClient("http://127.0.0.1:9/v1", "", "", "key", "model", (), (), lambda name, arguments: None, 60)


def processes_with(folder: str) -> list[str]:
    """The processes whose working folder is this one."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if os.readlink(link).startswith(folder):
                found.append(str(link))
    return found


SEALED = """
import json, os, pathlib, socket, subprocess, sys, urllib.request
task = json.load(open(os.environ["AGENTRL_TASK"]))
body = json.dumps({"messages": [{"role": "user", "content": task["id"]}]}).encode()
one = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
                             {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
said = json.load(urllib.request.urlopen(one))["choices"][0]["message"]["content"]
try: socket.create_connection(("127.0.0.1", int(sys.argv[1])), 2); reached = True
except OSError: reached = False
interfaces = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
read = [path for path in sys.argv[2:] if os.path.exists(path)]
pathlib.Path("state").write_text(json.dumps([said, reached, interfaces, read, "SECRET_OF_OURS" in os.environ]))
subprocess.Popen(["sleep", "1000"], start_new_session=True)
sys.exit(5)
"""


async def test_a_program_in_the_sandbox_has_the_gateway_and_nothing_else(
    bubblewrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    seen: list[tuple[Outcome, Any]] = []

    def judge(session: Session) -> float:
        folder = session.outcome.folder
        seen.append((session.outcome, json.loads(Path(folder, "state").read_text())))
        return 1.0

    (tmp_path / "shown").mkdir()
    (tmp_path / "hidden").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = [str(other.getsockname()[1]), *map(str, (tmp_path / "shown", tmp_path / "hidden", __file__))]
        section = AgentSection(command=(sys.executable, "-c", SEALED, *words), sandbox=(str(tmp_path / "shown"),))
        gateway = Gateway(socket=True)
        await gateway.start()
        async with driving(lambda task, client: None, env=Env(calc_reward=judge)) as (driver, _):
            driver.agent, driver.gateway = agent_of_recipe(section), gateway
            found = await driver.drive(driver.request(TASK, 0))
            await driver.agent.close()
        await gateway.close()
    assert found.failure is None, found.failure
    ((outcome, state),) = seen
    assert outcome.exit_code == 5, outcome.output
    assert state == ["4", False, ["lo"], [str(tmp_path / "shown")], False]
    assert not processes_with(str(outcome.folder))
    assert not Path(str(gateway.socket)).exists()
    program = tmp_path / "hidden" / "program"
    program.write_text("")
    program.chmod(0o755)
    with pytest.raises(UserError, match=r"the sandbox does not show .*hidden/program: add the folder"):
        agent_of_recipe(AgentSection(command=(str(program),), sandbox=True))
    (tmp_path / "hidden").chmod(0o700)
    if os.getuid() == 0:
        with pytest.raises(UserError, match=r"ordinary user, who cannot read what it needs .*hidden.*chmod -R o\+rX"):
            agent_of_recipe(AgentSection(command=(str(program),), sandbox=(str(tmp_path / "hidden"),)))
    with pytest.raises(UserError, match=r"agent.sandbox: is for programs"):
        agent_of_recipe(AgentSection(name="chat_completions", sandbox=True))


@pytest.mark.parametrize(
    ("host", "port"), [("0.0.0.0:8000", 8000), ("localhost", 0), ("::1", 0), ("[::1]:80", 80), ("a.b", 0)]
)
def test_a_recipe_says_where_agents_find_the_gateway(host: str, port: int) -> None:
    section = AgentSection(name="solve", host=host, public_url="https://elsewhere:{port}/gate/")
    assert host_and_port(section.host) == (host.removesuffix(f":{port}").strip("[]"), port)
    assert section.public_url == "https://elsewhere:{port}/gate"


@pytest.mark.parametrize(("sandbox", "wanted"), [(False, "http://elsewhere:1/v1"), (True, "http://127.0.0.1:")])
async def test_an_agent_is_given_the_public_url_but_in_a_sandbox(sandbox: bool, wanted: str) -> None:
    urls: list[str] = []

    async def solve(task: Task, client: AgentClient) -> None:
        urls.append(client.base_url)

    async with driving(solve, sandbox=sandbox) as (driver, _):
        recipe = Recipe(agent=AgentSection(name="solve", public_url="http://elsewhere:1"))
        driver.gateway = gateway_of(recipe)
        await driver.gateway.start()
        await driver.drive(driver.request(TASK, 0))
        await driver.gateway.close()
    assert urls[0].startswith(wanted)


async def test_a_program_that_ends_without_a_call_fails_the_rollout() -> None:
    async with program(["sh", "-c", "exit 1"]) as driver:
        found = await driver.drive(driver.request(TASK, 0))
    assert found.failure.message == (
        "agent sh: it ended without a call of the model, with exit code 1: does it use the gateway's base URL and key?"
    )
    async with program(["sh", "-c", "echo usage: my-agent >&2; exit 2"]) as driver:
        found = await driver.drive(driver.request(TASK, 0))
    assert found.failure.message.endswith("of the model, with exit code 2; it said 'usage: my-agent'")


@asynccontextmanager
async def processes(
    name: str, env: Env | None = None, args: dict[str, Any] | None = None, **keys: Any
) -> AsyncIterator[AgentDriver]:
    async with driving(lambda task, client: None, lambda _, turn: "4", env, **keys) as (driver, _):
        section = AgentSection(name=f"agent_functions:{name}", processes=1, args=args or {})
        driver.agent = agent_of_recipe(section)
        try:
            yield driver
        finally:
            await driver.agent.close()


async def then(driver: AgentDriver, what: str) -> Trajectory:
    return await driver.drive(driver.request(Task("t", {"then": what}), 0))


@pytest.mark.slow
async def test_a_process_does_many_rollouts_at_once_and_says_in_a_line_what_each_raised() -> None:
    seen: list[Any] = []
    all_here = asyncio.Barrier(8)

    async def execute(session: Session, text: str = "") -> str:
        if session.task.data["then"] == "together":
            await all_here.wait()
        return text.upper() + "!"

    env = Env(calc_reward=lambda session: seen.append(session.outcome.returned) or 1.0)
    async with processes("act", env=env, tools=[Echo(execute=execute)]) as driver:
        found = await asyncio.gather(*(then(driver, "together") for _ in range(8)))
        assert all(t.failure is None for t in found), found[0].failure
        pids = {returned["pid"] for returned in seen}
        assert len(pids) == 1
        assert os.getpid() not in pids
        assert {returned["heard"] for returned in seen} == {"4!"}
        assert [len(t.tool_uses) for t in found] == [1] * 8
        faults = {
            "raise": "agent act: ValueError: bad luck (agent_functions.py:", "exit": "SystemExit: enough",
            "cancel": "it cancelled itself", "lambda": "what it returned cannot be sent from its process (",
        }  # fmt: skip
        for failed, line in zip(await asyncio.gather(*(then(driver, f) for f in faults)), faults.values(), strict=True):
            assert failed.failure.boundary is Boundary.AGENT
            assert line in failed.failure.message
            assert "\n" not in failed.failure.message
        await then(driver, "")
        assert seen[-1]["pid"] in pids, "the process goes on"
        unsent = await driver.drive(driver.request(Task("t", {"then": "", "f": lambda: 0}), 0))
        assert "the task cannot be sent to a process" in unsent.failure.message


@pytest.mark.slow
async def test_a_process_that_dies_or_hangs_fails_its_own_rollouts_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_process, "PING_SECONDS", 0.05)
    monkeypatch.setattr(agent_process, "HELD_PINGS", 20)
    monkeypatch.setattr(agent_process, "START_PINGS", 6000)
    seen: list[Any] = []
    waiting = asyncio.Event()

    def execute(session: Session, text: str = "") -> str:
        waiting.set()
        return text

    env = Env(calc_reward=lambda session: seen.append(session.outcome.returned) or 1.0)
    async with processes("act", env=env, tools=[Echo(execute=execute)]) as driver:
        for fault, line in (("die", "its process ended by exit code 7"), ("hold", "an agent held up its process for")):
            waiting.clear()
            beside = asyncio.ensure_future(then(driver, "wait"))
            await waiting.wait()
            for failed in (await then(driver, fault), await beside):
                assert failed.failure.boundary is Boundary.AGENT
                assert line in failed.failure.message
        await then(driver, "")
        request = driver.request(Task("t", {"then": "late"}), 0)
        monkeypatch.setattr(driver, "limits", driver.limits.model_copy(update={"timeout": 1.0}))
        late = await driver.drive(request)
        assert (late.finish, seen[-1]) == (FinishReason.TIMEOUT, "at last")


@pytest.mark.slow
async def test_an_outcome_is_released_where_it_was_made(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    judged: list[str] = []
    env = Env(calc_reward=lambda session: judged.append(mark.read_text()) or 1.0)
    async with processes("Holds", env, {"mark": str(mark)}) as driver:
        found = await driver.drive(driver.request(TASK, 0))
    pid = judged[0].split()[0]
    assert judged == [f"{pid} 4"]
    assert mark.read_text() == f"{pid} 4 {pid} 4"
    assert "agent holds.release: OSError: it is stuck" in found.extra["release_errors"][0]
    assert int(pid) != os.getpid()


@pytest.mark.slow
async def test_a_thread_that_hangs_ends_with_its_process() -> None:
    async with processes("hang", timeout=20.0) as driver:
        request = driver.request(TASK, 0)
        driven = asyncio.ensure_future(driver.drive(request))
        await eventually(lambda: request.turn_count)  # type: ignore[attr-defined]
        pid = int(request.tree.nodes[0].call.messages[0]["content"])  # type: ignore[attr-defined]
        driven.cancel()
        await asyncio.wait({driven})
        await eventually(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(UserError, match=r"agent\.processes: a program has a process of its own"):
        agent_of_recipe(AgentSection(command=("sh",), processes=1))


async def agents_sdk(task: Task, client: AgentClient, api: str) -> str:
    """An agent of the OpenAI Agents SDK, whose tool calls the task's."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)

    @function_tool
    async def echo(text: str) -> str:
        """Says it back."""
        return str(await client.call_tool("echo", {"text": text}))

    async with client.openai() as openai:
        kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
        agent = Agent(name="a", instructions="Be brief.", tools=[echo], model=kind(client.model, openai))
        found = await Runner.run(agent, str(client.messages[-1]["content"]))
    return str(found.final_output)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_an_agent_of_the_openai_agents_sdk(api: str) -> None:
    seen: list[Outcome] = []
    env = Env(calc_reward=lambda session: seen.append(session.outcome) or 1.0)
    found = await played(lambda task, client: agents_sdk(task, client, api), ECHO, env=env, tools=[Echo()])
    assert found.failure is None, found.failure
    assert seen[0].returned == "It is 4."
    assert trained(found) == ECHO
    assert len(found.paths()) == 1
    assert found.extra["gateway"]["forks"] == 0
    assert len(found.tool_uses) == 2


@pytest.mark.parametrize("solve", LOOPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "mistake", ["<call> {}</call>", "<call>echo [1</call>", "<call>ecco {}</call>", "<call>echo {}"]
)
async def test_a_mistake_of_the_models_goes_back_to_it(solve: Solve, mistake: str) -> None:
    found = await played(solve, [mistake, "sorry"], tools=[Echo()])
    assert found.failure is None, found.failure
    assert trained(found) == [mistake, "sorry"]
    assert len(found.paths()) == 1
    assert found.tool_uses[0].error is not None


async def test_an_answer_that_nobody_received_is_not_trained() -> None:
    """Sent once or more: it counts as received where one of them was, or a later call goes on from it."""
    async with driving(lambda task, client: None, by_count()) as (driver, _):
        for retries, losses, continued, why in (
            (0, 1, False, "unreceived"), (1, 1, False, ""), (1, 2, False, "unreceived"), (0, 1, True, ""),
        ):  # fmt: skip
            request = driver.request(TASK, 0)
            rollout, call = Rollout(driver, request), Call((user("one"),))  # type: ignore[arg-type]
            found = await asyncio.create_task(rollout.complete(call, Origin(b"{}", train=True)))
            for _ in range(retries):
                again = await asyncio.create_task(rollout.complete(call, Origin(b"{}", 1)))
                assert again is found
            for _ in range(losses):
                rollout.lost(found)
            if continued:
                more = Call((user("one"), found.message, user("two")))  # type: ignore[arg-type]
                await asyncio.create_task(rollout.complete(more, Origin(b"{1}")))
            assert request.turns[0].untrained == why
            assert request.turns[0].trained == (not why)


async def test_a_long_prompt_is_laid_out_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop is laid out what is short, and what goes on from an answer, however long the history is;
    many messages are long, however little each says."""
    where: list[bool] = []

    def noted(name: str) -> None:
        made = getattr(CharChat, name)

        def method(chat: CharChat, *given: Any) -> list[int]:
            where.append(threading.current_thread() is threading.main_thread())
            return made(chat, *given)  # type: ignore[no-any-return]

        monkeypatch.setattr(CharChat, name, method)

    noted("render")
    noted("bridge")

    async def solve(task: Task, client: AgentClient) -> None:
        await said(client, [user("")] * 300)
        talk: list[Any] = [user("short")]
        talk.append(await said(client, talk))
        talk.append(user("long " * 10_000))
        talk.append(await said(client, talk))
        talk.append(user("short"))
        await said(client, talk)
        await said(client, [user("changed"), *talk[1:]])

    await played(solve, by_count())
    assert where == [False, True, False, True, *[False] * 3]


@pytest.mark.slow
async def test_what_is_kept_of_bodies_does_not_grow_with_what_they_hold_besides() -> None:
    kept: list[int] = []

    async def solve(task: Task, client: AgentClient) -> None:
        tracemalloc.start()
        for i in range(6):
            await said(client, [user(str(i))], metadata={"a": "b" * 1_000_000})
            gc.collect()
            kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()

    await played(solve, by_count())
    assert kept[-1] - kept[1] < 1_000_000


async def test_a_conversation_that_no_context_could_hold_ends_as_one_that_became_too_long() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        await said(client, [user("short")])
        status, found = await raw(client, [user("long " * 100_000)])
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
        raise ValueError("as the SDK raises")

    found = await played(solve, by_count(), max_tokens=1000)
    assert (found.finish, found.failure) == (FinishReason.LENGTH, None)


async def test_a_key_of_the_clients_own_joins_what_it_sends_again() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        first, *others = [{"Idempotency-Key": key} for key in ("one", "one", "two", "")]
        found = [await raw(client, [user("hi")], headers=first)]
        found += await asyncio.gather(*(raw(client, [user("hi")], headers=one) for one in others))
        assert [body["id"] == found[0][1]["id"] for _, body in found] == [True, True, False, False]
        status, body = await raw(client, [user("other")], headers=first)
        assert (status, body["error"]["code"]) == (422, "idempotency_error")
        for i in range(70):
            await raw(client, [user("hi")], headers={"Idempotency-Key": f"more {i}"})
        assert (await raw(client, [user("hi")], headers=first))[1]["id"] != found[0][1]["id"]

    found = await played(solve, by_count(), max_calls=100)
    assert found.extra["gateway"]["retries"] == 1
    assert len(found.turns) == 3 + 70 + 1


async def test_the_prompt_of_a_call_that_was_refused_is_not_kept() -> None:
    async with driving(lambda task, client: None, by_count(), max_tokens=100) as (driver, _):
        request = driver.request(TASK, 0)
        assert isinstance(request, AgentRequest)
        rollout = Rollout(driver, request)
        for text in ("long " * 500, "short"):
            answered = asyncio.create_task(rollout.complete(Call((user(text),)), Origin(text.encode())))  # type: ignore[arg-type]
            await asyncio.wait({answered})
            assert (answered.exception() is None) == (text == "short")
        first, second = request.tree.nodes
        assert first.given.ids == []
        assert request.tree.tokens == second.end < 100


async def test_a_call_that_failed_is_not_joined() -> None:
    async with driving(lambda task, client: None, by_count(), max_images=0) as (driver, _):
        request = driver.request(TASK, 0)
        rollout = Rollout(driver, request)  # type: ignore[arg-type]
        for call, fails in ((Call(()), True), (Call((user("one"),)), False)):  # type: ignore[arg-type]
            answered = asyncio.create_task(rollout.complete(call, Origin(b"{}", 1, "mine")))
            await asyncio.wait({answered})
            assert (answered.exception() is not None) == fails


class Streaming(ScriptedEngine):
    """Tells its characters one by one, and stops as soon as it is told to."""

    streams = True

    async def generate(self, ids: Any, sampling: Any, request_id: str, on_tokens: Any = None) -> Generation:
        whole = await super().generate(ids, sampling, request_id)
        self.stopping[request_id] = asyncio.Event()
        count = 0
        while count < len(whole.ids) and not self.stopping[request_id].is_set():
            count += 1
            if on_tokens is not None:
                on_tokens(whole.ids[count - 1 : count])
        self.known[request_id] = [*ids, *whole.ids[:count]]
        return Generation(whole.ids[:count], whole.logprobs[:count], GenerationFinish.ABORT)


class Forgetful(ScriptedEngine):
    """Keeps nothing between turns."""

    async def generate(self, ids: Any, sampling: Any, request_id: str) -> Generation:
        self.known.pop(request_id, None)
        return await super().generate(ids, sampling, request_id)


@pytest.mark.parametrize("kind", [Streaming, Forgetful])
@pytest.mark.parametrize("repeats", ["", "</code>"], ids=["shown", "closed"])
async def test_a_stop_string_ends_the_turn_on_any_engine_and_its_tokens_stay(kind: Any, repeats: str) -> None:
    """smolagents repeats an answer with the closing tag at which it stopped."""

    async def solve(task: Task, client: AgentClient) -> str:
        status, found = await raw(client, [user("go")], stop=["Observation:", "</code>"])
        first = found["choices"][0]
        assert (status, first["finish_reason"]) == (200, "stop")
        told = {"role": "assistant", "content": first["message"]["content"] + repeats}
        await said(client, [user("go"), told, user("more")], stop="never")
        return first["message"]["content"]

    script = ["think\n<code>print(4)\n</code> Observation: 5", "done"]
    found = await played(solve, kind(script))
    assert trained(found) == ["think\n<code>print(4)\n</code>", "done"]
    assert found.extra["gateway"]["forks"] == 0
    first = next(m["content"] for m in found.messages if m["role"] == "assistant")
    assert first == "think\n<code>print(4)\n"  # as it was sampled, however it was repeated


async def test_a_stop_sequence_has_its_own_reason_and_a_stream_shows_no_part_of_it() -> None:
    from anthropic import AsyncAnthropic

    seen: list[Any] = []

    async def solve(task: Task, client: AgentClient) -> None:
        asked: Any = {"model": "m", "max_tokens": 99, "messages": [user("go")], "stop_sequences": ["Obs:", "zz"]}
        async with AsyncAnthropic(base_url=client.anthropic_url, api_key=client.api_key) as anthropic:
            async with anthropic.messages.stream(**asked) as stream:
                text = [piece async for piece in stream.text_stream]
                final = await stream.get_final_message()
            plain = await anthropic.messages.create(**{**asked, "messages": [user("again")]})
        seen.extend([text, final, plain])

    await played(solve, Streaming(lambda *_: "Ob Obs: 3"))
    text, final, plain = seen
    assert "".join(text) == "Ob "
    for message in (final, plain):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Obs:")
        assert [block.text for block in message.content] == ["Ob "]


class Secretive(ScriptedEngine):
    """Keeps to constraints as a server does: it does not tell which ids it allowed."""

    constrains = True

    async def generate(self, ids: Any, sampling: Any, request_id: str) -> Generation:
        found = await super().generate(ids, sampling, request_id)
        return replace(found, trainable=sampling.constraint is None)


class Formal(CharChat):
    """Writes constraints as they come."""

    def constraint(self, schema: str | None, tools: Any) -> Constraint:
        if any(tool["function"]["name"] == "odd" for tool in tools):
            raise UserError("a call of 'odd' cannot be forced")
        return Constraint(
            tuple(Shape(tool["function"]["name"], "{}", "") for tool in tools) or (Shape("", schema, ""),)
        )


ODD = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object"}}}
JSON_FORM = {"response_format": {"type": "json_object"}}


async def test_constrained_turns_whose_allowed_ids_are_not_told_are_left_out_and_counted() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        talk: list[Any] = [user("one")]
        talk += [await said(client, talk, **JSON_FORM), user("two")]
        talk += [await said(client, talk), user("three")]
        status, found = await raw(client, talk, tools=[ODD], tool_choice="required")
        assert (status, found["error"]["message"]) == (400, "tool_choice: a call of 'odd' cannot be forced")
        await said(client, talk, tools=[*map(dict, [Echo().schema])], tool_choice="required")
        await said(client, [user("new")], tools=[*map(dict, [Echo().schema])], tool_choice="none", **JSON_FORM)

    engine = Secretive(by_count())
    async with driving(solve, engine) as (driver, _):
        driver.chat = Formal()
        found = await driver.drive(driver.request(TASK, 0))
    check_invariants(found)
    assert [turn.trained for turn in found.turns] == [False, True, False, False]
    assert found.extra["gateway"]["unproven"] == 3
    forms = [sampling.constraint.shapes[0].before for sampling in engine.samplings if sampling.constraint]
    assert forms == ["", "echo", ""]


@pytest.mark.parametrize("body", [JSON_FORM, {"tools": [ODD], "tool_choice": "required"}], ids=["json", "call"])
async def test_an_engine_that_cannot_be_held_to_a_form_says_so(body: dict[str, Any]) -> None:
    async def solve(task: Task, client: AgentClient) -> str:
        status, found = await raw(client, [user("go")], **body)
        await said(client, [user("go")])
        return f"{status} {found['error']['message']}"

    returned: list[Any] = []
    env = Env(calc_reward=lambda session: returned.append(session.outcome.returned) or 0.0)
    await played(solve, env=env)
    assert returned[0].startswith("400 ")
    assert "cannot keep to it" in returned[0]


async def test_a_turn_of_which_one_call_was_asked_for_ends_with_its_first_call() -> None:
    """What was sampled after it is neither context nor trained, as if sampling had been stopped there."""
    both = "Well. " + call("echo", text="a") + call("echo", text="b")

    async def solve(task: Task, client: AgentClient) -> None:
        talk: list[Any] = [user("one")]
        for ask in ({"parallel_tool_calls": False}, {"parallel_tool_calls": True}):
            talk.append(await said(client, talk, tools=list(client.tools), **ask))
            for one in talk[-1]["tool_calls"]:
                talk.append({"role": "tool", "tool_call_id": one["id"], "content": "r"})
        assert [len(message.get("tool_calls", ())) for message in talk] == [0, 1, 0, 2, 0, 0]
        assert talk[1]["content"] == "Well. "

    found = await played(solve, lambda _, turn: both, tools=[Echo()])
    assert trained(found) == ["Well. " + call("echo", text="a"), both]
    assert found.segments == ()
    assert found.extra["gateway"]["forks"] == 0


async def test_what_is_ignored_is_counted_by_name_and_what_is_asked_for_is_kept() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        await said(client, [user("one")], user="me", metadata={}, x_mine=1, store=None, temperature=0.3)
        await said(client, [user("two")], user="me")

    found = await played(solve, by_count())
    assert found.extra["gateway"]["ignored"] == 4
    assert found.extra["ignored_fields"] == {"metadata": 1, "user": 2, "x_mine": 1}
    assert [turn.asked for turn in found.turns] == [{"temperature": 0.3}, {}]
