"""Agents that hold the conversation themselves: every call comes in by HTTP, and the rollout is a tree of them."""

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from agentrl_tools.agents import anthropic_messages, chat_completions, responses
from fakes import END, CharChat, Echo, Env, Hooks, ScriptedEngine, call, logprob
from processes import eventually

from agentrl.engine.base import EngineError, Generation, GenerationFinish
from agentrl.errors import UserError
from agentrl.gateway.call import Call, Origin
from agentrl.gateway.server import Gateway
from agentrl.plugins import agent_process
from agentrl.plugins.agent import AgentClient, FunctionAgent, Outcome, ProgramAgent
from agentrl.plugins.agent_process import agent_of_recipe
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import InfrastructureError, Session, Task, ToolResponse
from agentrl.recipe.schema import AgentSection, RolloutSection
from agentrl.rollout.agent import AgentDriver, Rollout
from agentrl.rollout.trajectory_file import conversations, record, row
from agentrl.trajectory import Boundary, FinishReason, Trajectory, check_invariants

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
    assert found.extra["gateway"] == {"calls": 3, "forks": 0, "retries": 0, "auxiliary": 0, "dropped_thinking": 0}


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
    assert [s.parent for s in found.segments] == [-1, 0]
    assert found.extra["gateway"]["forks"] == 0


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
    assert found.extra["gateway"] == {"calls": 1, "forks": 0, "retries": 2, "auxiliary": 0, "dropped_thinking": 0}


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


async def test_a_call_without_tools_that_nothing_repeats_is_not_trained() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        await said(client, [user("a title for: go")])
        plan = await said(client, [user("plan")])
        await said(client, [user("plan"), plan, user("go")], tools=list(client.tools))

    found = await played(solve, by_count(), tools=[Echo()])
    assert trained(found) == ["a2", "a3"]
    assert found.extra["gateway"]["auxiliary"] == 1
    assert found.sampled_tokens == 6
    assert np.isfinite(found.logprobs[found.turns[0].start])
    whole = await played(solve, by_count(), tools=[Echo()], train_auxiliary=True)
    assert trained(whole) == ["a1", "a2", "a3"]


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
        driver._agent = ProgramAgent(tuple(command))
        try:
            yield driver
        finally:
            await driver._agent.close()


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
        section = AgentSection(
            command=(sys.executable, "-c", SEALED, *words), sandbox=True, sandbox_folders=(str(tmp_path / "shown"),)
        )
        gateway = Gateway(socket=True)
        await gateway.start()
        async with driving(lambda task, client: None, env=Env(calc_reward=judge)) as (driver, _):
            driver._agent, driver._gateway = agent_of_recipe(section), gateway
            found = await driver.drive(driver.request(TASK, 0))
            await driver._agent.close()
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
    with pytest.raises(UserError, match=r"agent.sandbox: is for programs"):
        agent_of_recipe(AgentSection(name="chat_completions", sandbox=True))


async def test_a_program_that_ends_without_a_call_fails_the_rollout() -> None:
    async with program(["sh", "-c", "exit 1"]) as driver:
        found = await driver.drive(driver.request(TASK, 0))
    assert "without a call of the model" in found.failure.message


@asynccontextmanager
async def processes(
    name: str, env: Env | None = None, args: dict[str, Any] | None = None, **keys: Any
) -> AsyncIterator[AgentDriver]:
    async with driving(lambda task, client: None, lambda _, turn: "4", env, **keys) as (driver, _):
        section = AgentSection(name=f"agent_functions:{name}", processes=1, args=args or {})
        driver._agent = agent_of_recipe(section)
        try:
            yield driver
        finally:
            await driver._agent.close()


async def then(driver: AgentDriver, what: str) -> Trajectory:
    return await driver.drive(driver.request(Task("t", {"then": what}), 0))


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
        monkeypatch.setattr(driver, "_limits", driver.limits.model_copy(update={"timeout": 1.0}))
        late = await driver.drive(request)
        assert (late.finish, seen[-1]) == (FinishReason.TIMEOUT, "at last")


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
    assert [s.parent for s in found.segments] == [-1, 0]
    assert found.tool_uses[0].error is not None


async def test_a_call_without_tools_that_a_later_one_goes_on_from_is_trained() -> None:
    async def solve(task: Task, client: AgentClient) -> None:
        talk: list[Any] = [user("plan")]
        talk += [await said(client, talk), user("more")]
        await said(client, talk)
        await said(client, [user("go")], tools=list(client.tools))

    found = await played(solve, by_count(), tools=[Echo()])
    assert trained(found) == ["a1", "a3"]  # nothing repeats the second answer


async def test_an_answer_that_was_lost_is_trained_once_it_was_sent_again() -> None:
    async with driving(lambda task, client: None) as (driver, _):
        for retries, is_trained in ((0, False), (1, True)):
            request = driver.request(TASK, 0)
            rollout, call = Rollout(driver, request), Call((user("one"),))  # type: ignore[arg-type]
            found = await asyncio.create_task(rollout.complete(call, Origin(b"{}")))
            for _ in range(retries):
                again = await asyncio.create_task(rollout.complete(call, Origin(b"{}", 1)))
                assert again is found
            rollout.lost(found)
            assert [turn.trained for turn in request.turns] == [is_trained]
