"""Conversations of the built-in driver that branch: summaries that the model goes on from, and sub-agents."""

import asyncio
import json

import pytest
from agentrl_tools.delegate import Delegate
from fakes import TASK, CharChat, Echo, Env, Hooks, ScriptedEngine, call, logprob, make_driver

from agentrl.compute.batch import Batch
from agentrl.engine.base import EngineError
from agentrl.errors import UserError
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import InfrastructureError, Message, Reply, ToolResponse
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import roll_out
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.player import check_tools_of_agent
from agentrl.rollout.request import RequestState, TransitionError
from agentrl.rollout.trajectory_file import record, row
from agentrl.trajectory import Boundary, FinishReason, Group, Trajectory, check_invariants


async def drive(driver: Driver) -> Trajectory:
    return await driver.drive(driver.request(TASK, 0))


def texts(t: Trajectory) -> list[str]:
    """Check a trajectory whole, and return its paths as text."""
    check_invariants(t)
    sampled = t.loss_mask.astype(bool)
    assert t.logprobs[sampled].tolist() == pytest.approx([logprob(i) for i in t.ids[sampled].tolist()])
    batch = Batch.from_trajectories([t])
    assert int(batch.tokens["loss_mask"].sum()) == t.sampled_tokens == int(sampled.sum())  # each token once
    json.dumps(record(row(t)))
    check_messages(t)
    return [CharChat().decode(t.ids[path].tolist()) for path in t.paths()]


def check_messages(t: Trajectory) -> None:
    """Each segment has the messages of its own turns, and those up to the leaf are the conversation's."""
    for segment, messages in zip(t.segments, t.branches, strict=True):
        turns = sum(segment.start <= turn.start < segment.end for turn in t.turns)
        assert [m["role"] for m in messages].count("assistant") == turns
    if t.segments:
        index, path = t.leaf % len(t.segments), []
        while index >= 0:
            path.insert(0, index)
            index = t.segments[index].parent
        assert [m for index in path for m in t.branches[index]] == list(t.messages)


def compacting(script, *, at=60, env=None, tools=None, most=8, resume="So far: {summary}", **limits):
    compact = {"at": at, "most": most, "prompt": "Sum up.", "resume": resume}
    return make_driver(script, env, [Echo()] if tools is None else tools, compact=compact, **limits)


SAYS = call("echo", text="x" * 20)  # 34 characters, answered by 20


async def test_a_conversation_that_nears_its_limit_goes_on_from_its_summary():
    seen: list[list[Message]] = []

    def note(session, text="", **_):
        seen.append([dict(m) for m in session.messages])
        return ToolResponse(text)

    engine = ScriptedEngine(lambda name, turn: "four, done" if "/1" in name else [SAYS, "saw x"][turn])
    driver = compacting(engine, tools=[Echo(execute=note)])
    request = driver.request(TASK, 0)
    t = await driver.drive(request)
    first, second = texts(t)
    assert first.endswith("x" * 20 + "<0>\n<2>Sum up.<0>\n<3>saw x<0>")
    assert second == "echo<2>2+2?\n\nSo far: saw x<0>\n<3>four, done<0>"
    assert [(s.parent, t.ids[s.start]) for s in t.segments] == [(-1, ord("e")), (-1, ord("e"))]
    assert len(t.turns) == 3
    assert t.finish is FinishReason.STOP
    assert [m["content"] for m in t.messages] == ["2+2?\n\nSo far: saw x", "four, done"]
    assert t.ids[t.last_path()].tolist() == request.main.ids.tolist()
    assert [m["content"] for m in seen[0]] == ["2+2?", ""]
    assert [[m["content"] for m in messages] for messages in t.branches] == [
        ["2+2?", "", "x" * 20, "Sum up.", "saw x"],
        ["2+2?\n\nSo far: saw x", "four, done"],
    ]
    assert rollout_metrics([Group(TASK, (t,))])["rollout/compactions"] == 1
    assert set(engine.finished) == {request.id, f"{request.id}/1"}
    assert len({s.seed for s in engine.samplings}) == 3


async def test_the_messages_of_a_session_are_those_that_the_model_sees_now():
    seen: list[list[str]] = []

    def reply(session, message):
        seen.append([str(m["content"]) for m in session.messages])
        return Reply(({"role": "user", "content": "y" * 20},), done=len(seen) == 3)

    script = ["a" * 20, "summary", "b", "c"]
    t = await drive(compacting(lambda name, turn: script[turn + 2 * ("/" in name)], at=58, env=Env(execute=reply)))
    assert seen == [
        ["2+2?", "a" * 20],
        ["2+2?\n\nSo far: summary", "b"],
        ["2+2?\n\nSo far: summary", "b", "y" * 20, "c"],
    ]
    first, _ = texts(t)
    assert "y" * 20 + "\n\nSum up.<0>" in first  # in the user's own message: templates want them to alternate


@pytest.mark.parametrize(
    ("limits", "script", "finish", "written", "failed", "turns"),
    [
        ({}, lambda name, turn: ["", SAYS][turn == 0], FinishReason.LENGTH, 1, 1, 2),  # no summary
        ({}, lambda name, turn: [call("echo"), SAYS][turn == 0], FinishReason.LENGTH, 1, 1, 2),  # a call is none
        (
            {"resume": "{summary}" * 3},
            lambda name, turn: ["s" * 60, SAYS][turn == 0],
            FinishReason.LENGTH,
            1,
            1,
            2,
        ),  # leaves no room
        ({"most": 2}, lambda name, turn: "s" + SAYS, FinishReason.LENGTH, 2, 0, 6),  # again and again
        ({"max_turns": 5}, lambda name, turn: "s" + SAYS, FinishReason.MAX_TURNS, 2, 0, 5),
        ({"max_turns": 2}, lambda name, turn: SAYS, FinishReason.MAX_TURNS, 0, 0, 2),  # none without a turn after it
        ({"at": 0.4}, lambda name, turn: "s" + SAYS, FinishReason.MAX_TURNS, 9, 0, 20),
        ({"max_total_tokens": 330}, lambda name, turn: "s" + SAYS, FinishReason.LENGTH, 2, 1, 4),
    ],
)
async def test_summaries_are_bounded_and_counted(limits, script, finish, written, failed, turns):
    limits = {"max_tokens": 170, "max_turns": 20, "max_tool_calls": 99, "most": 50, **limits}
    t = await drive(compacting(script, **limits))
    texts(t)
    assert t.failure is None
    assert (t.finish, len(t.turns)) == (finish, turns)
    assert (t.extra["compactions"], t.extra["compactions_failed"]) == (written, failed)
    assert max(len(path) for path in t.paths()) <= 170
    assert len(t.ids) <= limits.get("max_total_tokens", len(t.ids))


async def test_a_conversation_that_fits_is_never_summarized():
    plain = await drive(make_driver([SAYS, "four"], tools=[Echo()]))
    t = await drive(compacting([SAYS, "four"], at=0.75))
    assert (t.ids.tolist(), t.segments, t.extra) == (
        plain.ids.tolist(),
        (),
        {"compactions": 0, "compactions_failed": 0},
    )


async def test_a_summary_that_is_aborted_is_driven_on():
    engine = ScriptedEngine(lambda name, turn: "four" if "/" in name else [SAYS, "saw x", " too"][turn], seconds=0.1)
    driver = compacting(engine)
    request = driver.request(TASK, 0)

    async def abort_the_summary():
        while engine.turns[request.id] < 2:
            await asyncio.sleep(0.01)
        engine.abort()

    await asyncio.gather(driver.drive(request, resumable=True), abort_the_summary())
    assert request.state is RequestState.ABORTED
    t = await driver.drive(request)
    assert texts(t)[1].startswith("echo<2>2+2?\n\nSo far: saw too")
    assert [turn.end - turn.start for turn in t.turns][1] == 8


SUB = "What is 2+2?"


def sub_agents(script, *, tools=(), env=None, **limits):
    return make_driver(script, env, [Echo(), *(tools or [Delegate()])], **{"max_turns": 20, "retries": 0, **limits})


async def test_a_call_is_a_conversation_of_its_own_whose_answer_is_the_result():
    script = {"": [call("delegate", task=SUB), "it is 4"], "/1": [call("echo", text="hm"), "4"]}
    hooks = Hooks()
    engine = ScriptedEngine(lambda name, turn: script["/1" if "/" in name else ""][turn])
    t = await drive(sub_agents(engine, env=Env(hooks), tools=[Delegate("Be brief.", "Do: {task}", max_turns=4)]))
    sub, main = texts(t)
    assert (
        sub == "echo<1>Be brief.<0>\n<2>Do: What is 2+2?<0>\n<3>" + call("echo", text="hm") + "<0>\n<4>hm<0>\n<3>4<0>"
    )
    assert main.endswith("<0>\n<4>4<0>\n<3>it is 4<0>")
    assert [s.parent for s in t.segments] == [-1, -1, 0]  # in the order in which its turns began
    assert (t.finish, t.rewards, t.sampled_tokens) == (FinishReason.STOP, {"env": 1.0}, int(t.loss_mask.sum()))
    assert [(u.name, u.turn, u.error) for u in t.tool_uses] == [("echo", 1, None), ("delegate", 0, None)]
    assert t.tool_uses[1].metrics == {"turns": 2.0}
    assert [m["content"] for m in t.messages][-2:] == ["4", "it is 4"]
    assert CharChat().decode(t.ids[t.last_path()].tolist()) == main
    hooks.check()
    assert len({s.seed for s in engine.samplings}) == 4


async def test_the_sub_agents_of_a_turn_run_at_the_same_time():
    waiting, most = 0, 0

    class Engine(ScriptedEngine):
        async def generate(self, ids, sampling, request_id):
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            try:
                return await super().generate(ids, sampling, request_id)
            finally:
                waiting -= 1

    two = call("delegate", task="a") + call("delegate", task="b")
    engine = Engine(lambda name, turn: name[-2:] if "/" in name else [two, "end"][turn])
    driver = sub_agents(engine)
    (group,) = await roll_out(driver, [TASK], 2, seed=3)
    assert most == 4
    for t in group.trajectories:
        assert len(texts(t)) == 3
        assert [m["content"] for m in t.messages][2:4] == ["/1", "/2"]
    again = sub_agents(Engine(engine.script))
    await roll_out(again, [TASK], 2, seed=3)
    assert sorted(s.seed for s in engine.samplings) == sorted(s.seed for s in again.engine.samplings)


@pytest.mark.parametrize(("depth", "deepest"), [(1, 1), (2, 2), (3, 3)])
async def test_sub_agents_in_each_other_are_bounded(depth, deepest):
    t = await drive(
        sub_agents(
            lambda name, turn: call("delegate", task="go on") if turn == 0 else "end", tools=[Delegate(max_depth=depth)]
        )
    )
    assert len(texts(t)) == deepest + 1
    assert sum(u.error is not None and "no tool named 'delegate'" in u.error for u in t.tool_uses) == 1
    assert t.finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("limits", "script", "result"),
    [
        ({"max_turns": 4}, lambda name, turn: call("echo"), "Error: it ended without an answer (max_turns)"),
        ({"max_turns": 1}, lambda name, turn: "4", None),  # its turn would be the second
        ({"tools": [Delegate(max_turns=2)]}, lambda name, turn: call("echo"), "without an answer (max_turns)"),
        ({"tools": [Delegate(max_tokens=40)]}, lambda name, turn: "y" * 90, "y" * 10),
        (
            {"tools": [Delegate(max_tokens=9)]},
            lambda name, turn: "4",
            "Error: it begins with 20 tokens, with room for 8",
        ),
        ({"tools": [Delegate(tools=["ecko"])]}, lambda name, turn: "4", "did you mean 'echo'"),
        ({"tool_timeout": 0.01, "slow": 5}, lambda name, turn: "4", "Error: it did not answer within 0.01 seconds"),
        ({"max_total_tokens": 120}, lambda name, turn: "y" * 90, "y" * 10),
    ],
)
async def test_a_sub_agent_has_limits_of_its_own_within_the_rollouts(limits, script, result):
    class Engine(ScriptedEngine):
        async def generate(self, ids, sampling, request_id):
            if "/" in request_id:
                await asyncio.sleep(slow)
            return await super().generate(ids, sampling, request_id)

    limits = dict(limits)
    slow = limits.pop("slow", 0)
    engine = Engine(lambda name, turn: script(name, turn) if "/" in name else [call("delegate", task=SUB), "end"][turn])
    t = await drive(sub_agents(engine, **limits))
    texts(t)
    assert t.failure is None
    assert t.reward == 1.0
    assert len(t.turns) <= limits.get("max_turns", 20)
    assert len(t.ids) <= limits.get("max_total_tokens", len(t.ids))
    said = [str(m["content"]) for m in t.messages if m["role"] == "tool"]
    assert result in said[0] if result else "no turn is left of 1 (rollout.max_turns)" in said[0]
    assert set(engine.known) <= set(engine.finished)


async def test_a_tool_that_ends_the_episode_ends_it_from_within_a_sub_agent():
    won = Echo(name="win", execute=ToolResponse("won", reward=2.0, done=True))
    t = await drive(
        sub_agents(lambda name, turn: call("win" if "/" in name else "delegate", task=SUB), tools=[Delegate(), won])
    )
    texts(t)
    assert (t.finish, t.rewards["step"]) == (FinishReason.ENV_DONE, 2.0)
    assert [turn.reward for turn in t.turns] == [0.0, 2.0]
    assert [s.parent for s in t.segments] == [-1, -1]
    assert t.last_path().tolist() == list(range(t.segments[0].end))  # `messages` are those of the rollout's own


CALLS = {"delegate": call("delegate", task=SUB), "careless": call("careless")}


class Careless(Tool):
    """Converses, and takes no notice of what goes wrong."""

    name = "careless"
    converses = True
    kept = None

    async def execute(self, session, **arguments):
        self.kept = arguments["converse"]
        try:
            return (await self.kept([{"role": "user", "content": "?"}], tools=["echo"])).answer
        except InfrastructureError as error:
            return f"caught {type(error).__name__}"


@pytest.mark.parametrize("tools", [[Delegate()], [Careless()]])
@pytest.mark.parametrize("where", ["engine", "tool"])
async def test_what_the_machinery_did_wrong_in_a_sub_agent_fails_the_rollout_where_it_was(tools, where):
    class Engine(ScriptedEngine):
        async def generate(self, ids, sampling, request_id):
            if "/" in request_id and where == "engine":
                raise EngineError("the server is gone")
            return await super().generate(ids, sampling, request_id)

    hooks = Hooks()
    engine = Engine(lambda name, turn: call("echo") if "/" in name else CALLS[tools[0].name])
    broken = Echo(hooks, execute=InfrastructureError("the sandbox is lost"))
    t = await drive(make_driver(engine, Env(hooks), [broken, *tools]))
    check_invariants(t)
    assert t.failure.boundary is (Boundary.ENGINE if where == "engine" else Boundary.TOOL)
    assert ("the server is gone" if where == "engine" else "echo.execute: the sandbox is lost") in t.failure.message
    hooks.check()
    assert set(engine.known) <= set(engine.finished)


async def test_a_rollout_that_is_aborted_within_a_sub_agent_is_not_driven_on():
    hooks = Hooks()
    engine = ScriptedEngine(lambda name, turn: call("delegate", task=SUB), seconds=0.05)
    driver = sub_agents(engine, env=Env(hooks))
    request = driver.request(TASK, 0)

    async def abort_the_sub_agent():
        while not any("/" in name for name in engine.turns):
            await asyncio.sleep(0.005)
        engine.abort()

    t, _ = await asyncio.gather(driver.drive(request, resumable=True), abort_the_sub_agent())
    check_invariants(t)
    assert (t.finish, t.valid) == (FinishReason.ABORTED, False)
    hooks.check()
    with pytest.raises(TransitionError, match="released"):
        await driver.drive(request)


async def test_a_rollout_that_is_cancelled_within_a_sub_agent_is_released():
    hooks = Hooks()
    engine = ScriptedEngine(lambda name, turn: call("delegate", task=SUB) * 2, seconds=0.02)
    driver = sub_agents(engine, env=Env(hooks), max_turns=1000, max_tool_calls=1000)
    driving = asyncio.create_task(driver.drive(driver.request(TASK, 0)))
    while not any("/" in name for name in engine.turns):
        await asyncio.sleep(0.005)
    driving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driving
    hooks.check()
    assert set(engine.turns) == set(engine.finished)


async def test_nothing_is_said_after_the_call():
    tool = Careless()
    await drive(
        make_driver(lambda name, turn: "end" if turn or "/" in name else call("careless"), tools=[Echo(), tool])
    )
    with pytest.raises(InfrastructureError, match="the call is over"):
        await tool.kept([{"role": "user", "content": "?"}])


def test_an_agent_holds_its_conversations_itself():
    with pytest.raises(UserError, match=r"tool 'delegate' holds conversations .* beside `agent`"):
        check_tools_of_agent([Echo(), Delegate()])


async def test_a_sub_agent_compacts_too():
    def script(name, turn):
        if "/" not in name:
            return [call("delegate", task=SUB), "end"][turn]
        return [SAYS, "saw x"][turn] if name.endswith("/1") else "4"

    t = await drive(compacting(script, at=75, tools=[Echo(), Delegate()]))
    main, sub, rest = sorted(texts(t), key=len, reverse=True)
    assert (t.extra["compactions"], t.messages[-2]["content"]) == (1, "4")
    assert rest.endswith("So far: saw x<0>\n<3>4<0>")
    assert sub.startswith("echodelegate")
    assert main.endswith("saw x<0>")
