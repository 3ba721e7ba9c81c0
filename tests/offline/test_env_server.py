"""An environment of ours as an OpenEnv server: played by OpenEnv's own clients, and asked what nobody should ask."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agentrl_envs.openenv.environment import OpenEnv
from agentrl_envs.text_game.environment import TextGame
from fakes import Env
from openenv_help import free_port
from paths import ROOT, SUPPORT

from agentrl.errors import UserError
from agentrl.offline.env_server import MESSAGE_BYTES, serve_environment
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Message, Reply, Session, Task
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.testing import call, check_environment
from agentrl.testing.play import Stage

pytestmark = pytest.mark.slow


@asynccontextmanager
async def served(recipe: Recipe, key: str = "", sessions: int = 4, idle: float = 60.0) -> AsyncIterator[str]:
    port, said = free_port(), asyncio.Event()
    work = serve_environment(recipe, "127.0.0.1", port, key, sessions, idle, lambda line: said.set())
    serving = asyncio.create_task(work)
    try:
        await asyncio.wait({serving, asyncio.create_task(said.wait())}, return_when=asyncio.FIRST_COMPLETED)
        yield f"http://127.0.0.1:{port}"
    finally:
        serving.cancel()
        await asyncio.wait({serving})
        serving.result()


def game(*changes: str) -> Recipe:
    return load_recipe("text_game", list(changes))


async def test_inspect_plays_it(environments_venv: str) -> None:
    """Its own tools and reward, by a model of Inspect that answers from a list."""
    env = TextGame()
    shown = env.demonstrate(env.tasks("test")[0], random.Random(0), "clean")
    moves = [one["function"] for message in shown for one in message.get("tool_calls") or ()]
    right = [{"tool": move["name"], "arguments": move["arguments"]} for move in moves]
    file = ROOT / "envs/agentrl_envs/foreign/inspect_task.py"
    answers = json.dumps([right, [{"text": "I give up."}] * 25, []])
    async with served(game()) as url:
        command = [str(Path(environments_venv, "bin/python")), str(SUPPORT / "inspect_plays.py"), url, str(file)]
        done = await asyncio.to_thread(
            subprocess.run, [*command, answers], capture_output=True, text=True, timeout=100, check=False
        )
    assert done.returncode == 0, done.stderr
    won, lost, broken = json.loads(done.stdout)
    assert (won["status"], won["name"], won["metrics"]) == ("success", "text_game", ["mean", "stderr"])
    assert won["messages"][0][1].startswith("Find the key, open the door, reach the goal. Key: ")
    assert [role for role, _ in won["messages"]] == ["user", *["assistant", "tool"] * len(right)]
    assert won["scores"]["reward"] > 1.0  # the goal, and what is paid for being short and for steps
    assert (lost["status"], lost["scores"]) == ("success", {"reward": 0.0})
    assert (broken["status"], broken["scores"]) == ("error", {})


async def test_the_clients_of_openenv_play_it(environments_venv: str) -> None:
    async with served(game()) as url:
        command = [str(Path(environments_venv, "bin/python")), str(SUPPORT / "openenv_client.py"), url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    played, called = told["played"], told["called"]
    assert played["first"] == played["again"]
    assert played["first"].startswith("Find the key, open the door, reach the goal. Key: ")
    assert [tool["name"] for tool in played["tools"]] == ["move"]
    assert played["tools"][0]["input_schema"]["required"] == ["to"]
    assert played["state"]["done"] is True
    assert played["state"]["step_count"] == len(played["rewards"]) - 1
    assert sum(played["rewards"]) == pytest.approx(played["state"]["reward"])
    assert "reset begins another one" in played["after"]
    assert called["tools"] == ["move"]
    assert "Key: " in called["text"]
    assert "Key: " in called["result"]


@pytest.mark.long
async def test_trl_trains_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GRPO, by a model that calls the served tool: what was weighed there is the reward that TRL sees."""
    benchmarks = str(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(benchmarks)
    import vs_trl

    await asyncio.to_thread(vs_trl.make_model, tmp_path / "model", vs_trl.WARM_STEPS)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in vs_trl.rows(64, seed=2)))
    env = {"name": "object", "source": str(source), "args": {"factory": "vs_trl:Scales"}}
    recipe = Recipe.model_validate({"model": {"path": "tiny"}, "env": env, "output": str(tmp_path / "run")})
    async with served(recipe, sessions=16) as url:
        command = [sys.executable, str(SUPPORT / "trl_on_env_server.py"), url, str(tmp_path / "model"), "2", "48"]
        own = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
        done = await asyncio.to_thread(
            subprocess.run, command, env=own, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = json.loads(done.stdout.splitlines()[-1])
    assert len(steps) == 2
    for step in steps:
        assert step["tools/call_frequency"] > 1.0, "two boxes are weighed, as it has learnt"
        assert step["tools/failure_frequency"] < 0.2
        assert 0.3 < step["reward"] < 1.0, "a box weighs 100 to 999"


def test_our_own_client_finds_a_served_environment_as_it_is() -> None:
    """The tasks, tools, openings and rewards that the contract asks for, over the wire."""
    here = TextGame()

    def gold(task: Task) -> list[str]:
        own = here.tasks(task.data["split"])[task.data["index"]]
        played, turns = here.game(own), []
        while not played.over:
            way = played.best_ways()[0].value
            turns.append(call("move", to=way))
            played.move(played.best_ways()[0])
        return turns

    async def check() -> None:
        async with served(game("rewards.weights={}"), sessions=8) as url:
            env = await asyncio.to_thread(OpenEnv, url, solved=2.5, sessions=8)
            assert env.splits == here.splits
            assert len(env.tasks("test")) == len(here.tasks("test"))
            await asyncio.to_thread(
                check_environment, env, gold, lambda task: ["I give up."] * 40, tasks=1, disjoint=False,
                limits={"max_turns": 40}, sessions=8,
            )  # fmt: skip

    asyncio.run(check())


async def talk(url: str, *messages: object, path: str = "/ws", **headers: str) -> list[Any]:
    """What a server says to one message after another."""
    said = []
    async with aiohttp.ClientSession() as http, http.ws_connect(url + path, headers=headers) as socket:
        for message in messages:
            await socket.send_str(message if isinstance(message, str) else json.dumps(message))
            answer = await socket.receive()
            said.append(json.loads(answer.data) if answer.type is aiohttp.WSMsgType.TEXT else answer.data)
    return said


@pytest.mark.parametrize(
    ("message", "code", "said"),
    [
        ("{", "INVALID_JSON", "Invalid JSON"),
        ("[1]", "INVALID_JSON", "a message is an object, not list"),
        ("[" * 70 + "]" * 70, "INVALID_JSON", "nested deeper than 64"),
        ('{"a": [' + "0," * 210_000 + "0]}", "INVALID_JSON", "more than 200000 values"),
        ({"type": "weather"}, "UNKNOWN_TYPE", "'weather'"),
        ({"type": "step", "data": {"tool_name": "move", "arguments": {}}}, "EXECUTION_ERROR", "reset comes first"),
        ({"type": "step", "data": {}}, "VALIDATION_ERROR", "an action is"),
        ({"type": "step", "data": {"tool_name": "move", "arguments": 3}}, "VALIDATION_ERROR", "arguments by name"),
        ({"type": "reset", "data": 3}, "VALIDATION_ERROR", "data: int"),
        ({"type": "reset", "data": {"split": "trian"}}, "VALIDATION_ERROR", "expected one of train, test"),
        ({"type": "reset", "data": {"index": -1}}, "VALIDATION_ERROR", "index: -1; expected 0 to"),
        ({"type": "reset", "data": {"index": 10**9}}, "VALIDATION_ERROR", "index: 1000000000; expected 0 to"),
        ({"type": "reset", "data": {"seed": "x"}}, "VALIDATION_ERROR", "seed: 'x'"),
    ],
)
async def test_what_is_no_message_is_refused_and_the_session_goes_on(message: object, code: str, said: str) -> None:
    async with served(game()) as url:
        refused, state = await talk(url, message, {"type": "state"})
    assert refused["type"] == "error"
    assert refused["data"]["code"] == code
    assert said in refused["data"]["message"]
    assert state["data"]["step_count"] == 0


async def test_what_is_too_large_ends_the_session_unread() -> None:
    async with served(game()) as url:
        (code,) = await talk(url, '{"type": "reset", "data": "' + "x" * MESSAGE_BYTES + '"}')
        assert code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
        async with aiohttp.ClientSession() as http, http.post(f"{url}/mcp", data=b"x" * (MESSAGE_BYTES + 1)) as answer:
            assert answer.status == 413
        assert (await talk(url, {"type": "state"}))[0]["type"] == "state"


async def rpc(url: str, method: str, **params: Any) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/mcp", json=body) as answer:
        return await answer.json()


async def test_sessions_are_counted_and_silent_ones_end() -> None:
    async with served(game(), sessions=2, idle=1.0) as url:
        assert "result" in await rpc(url, "openenv/session/create")
        assert "result" in await rpc(url, "openenv/session/create")
        full = await rpc(url, "openenv/session/create")
        assert full["error"]["message"] == "2 sessions are open, as many as may be"
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as socket:
            assert json.loads((await socket.receive()).data)["data"]["code"] == "CAPACITY_REACHED"
        await asyncio.sleep(2.0)
        assert "result" in await rpc(url, "openenv/session/create")
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as socket:  # it says nothing
            assert (await asyncio.wait_for(socket.receive(), 10)).type is not aiohttp.WSMsgType.TEXT


async def test_who_may_ask() -> None:
    async with served(game(), key="secret") as url, aiohttp.ClientSession() as http:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer no"}, 401),
            ({"Authorization": "Bearer secret"}, 200),
        ):
            async with http.get(f"{url}/health", headers=headers) as answer:
                assert answer.status == status
        assert (await talk(url, {"type": "state"}, Authorization="Bearer secret"))[0]["type"] == "state"
    async with served(game()) as url, aiohttp.ClientSession() as http:
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
            async with http.get(f"{url}/health", headers=headers) as answer:
                assert answer.status == 403


async def test_other_addresses_than_loopback_want_a_key() -> None:
    with pytest.raises(UserError, match=r"^--key: on 0\.0\.0\.0 anybody could play"):
        await serve_environment(game(), "0.0.0.0", free_port(), "", 4, 60.0, print)


class Faulty(Environment):
    """Does in `execute` what it is told to."""

    name = "faulty"

    def tasks(self, split: str) -> list[Task]:
        return [Task("one", {})]

    async def create(self, session: Session, **create_kwargs: Any) -> list[Message]:
        return [{"role": "user", "content": "What now?"}]

    async def execute(self, session: Session, message: Message) -> Reply:
        what = message["content"]
        if what == "raise":
            raise RuntimeError("no such luck")
        if what == "exit":
            raise SystemExit(3)
        if what == "hang":
            await asyncio.Event().wait()
        if what == "flood":
            return Reply(({"role": "user", "content": "x" * (64 << 20)},))
        return Reply(done=True)

    async def calc_reward(self, session: Session, **kwargs: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise", "environment: faulty.execute: RuntimeError: no such luck"),
        ("exit", "environment: faulty.execute: "),
        ("hang", "faulty.execute took longer than 1 s (rollout.turn_timeout)"),
    ],
)
async def test_what_a_hook_does_wrong_is_an_error_of_its_session_alone(what: str, said: str) -> None:
    recipe = load_recipe(None, [f"env.name={__name__}:Faulty", "rollout.turn_timeout=1"])
    async with served(recipe) as url:
        begin, wrong, again, done = await talk(
            url,
            {"type": "reset"},
            {"type": "step", "data": {"message": what}},
            {"type": "reset"},
            {"type": "step", "data": {"message": "well"}},
        )
    assert begin["data"]["observation"]["text"] == "What now?"
    assert wrong["data"]["code"] == "EXECUTION_ERROR"
    assert said in wrong["data"]["message"]
    assert again["data"]["done"] is False
    assert (done["data"]["done"], done["data"]["reward"]) == (True, 1.0)


async def test_a_client_that_leaves_has_its_rollout_released() -> None:
    env = Env()
    released = asyncio.Event()

    async def release(session: Session, **kwargs: Any) -> None:
        released.set()

    env.release = release  # type: ignore[method-assign]
    import agentrl.offline.env_server as module

    made, module.make_environment = module.make_environment, lambda section: env
    try:
        async with served(load_recipe(None, [])) as url:
            await talk(url, {"type": "reset"})
            await asyncio.wait_for(released.wait(), 10)
    finally:
        module.make_environment = made


async def test_what_cannot_be_served_is_said_at_once() -> None:
    with pytest.raises(UserError, match=r"'relative_length' compares samples of a task; leave it out"):
        await serve_environment(
            game("rewards.functions=[{name: relative_length}]"), "127.0.0.1", 0, "", 1, 60.0, lambda line: None
        )


async def test_a_session_over_http_plays_too() -> None:
    async with served(game()) as url:
        name = (await rpc(url, "openenv/session/create"))["result"]["session_id"]
        early = await rpc(url, "tools/call", session_id=name, name="move", arguments={"to": "north"})
        assert "reset comes first" in early["error"]["message"]
        opening, state = await talk(
            url, {"type": "reset", "data": {"seed": 1}}, {"type": "state"}, path=f"/ws?session_id={name}"
        )
        assert state["data"]["task"] == "train-1"
        assert opening["data"]["reward"] == 0.0
        moved = await rpc(url, "tools/call", session_id=name, name="move", arguments={"to": "north"})
        assert "Key: " in moved["result"]["data"]
        assert (await rpc(url, "openenv/session/close", session_id=name))["result"]["closed"] is True
        assert "no such session" in (await rpc(url, "tools/list", session_id=name))["error"]["message"]
        assert [tool["name"] for tool in (await rpc(url, "tools/list"))["result"]["tools"]] == ["move"]


async def test_played_by_stage_and_server_alike() -> None:
    """A game over the wire pays what the driver pays."""
    here = TextGame()
    task = here.tasks("train")[5]
    turns = [call("move", to=way) for way in ("north", "east", "south", "west")]
    alone = await Stage(here, limits=game().rollout.model_copy(update={"max_turns": 4})).play(task, lambda _: turns)
    actions = [
        {"type": "call_tool", "tool_name": "move", "arguments": {"to": way}}
        for way in ("north", "east", "south", "west")
    ]
    async with served(game("rollout.max_turns=4", "rewards.weights={}")) as url:
        answers = await talk(
            url, {"type": "reset", "data": {"index": 5}}, *({"type": "step", "data": a} for a in actions)
        )
    assert answers[-1]["data"]["done"] is True
    assert sum(answer["data"]["reward"] for answer in answers) == pytest.approx(alone.reward)
