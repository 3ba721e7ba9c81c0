"""The environment `openenv` against servers of the package itself, and against one that keeps no promise."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agentrl_envs.openenv.environment import OpenEnv
from aiohttp import web
from openenv_help import free_port, real_servers
from serving import serving

from agentrl.errors import UserError
from agentrl.testing import call, check_environment
from agentrl.testing.play import Stage
from agentrl.trajectory import Boundary, FinishReason

pytestmark = pytest.mark.slow
SHOP = {"opening": "Buy for 10."}


@pytest.fixture(scope="module")
def urls(environments_venv: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with real_servers(environments_venv, tmp_path_factory.mktemp("openenv"), "guess", "shop") as found:
        yield found


def secret(task: Any) -> int:
    return int((task.data["index"] + (100 if task.data["split"] == "test" else 0)) % 7)


def test_it_keeps_the_contract_of_environments(urls: dict[str, str]) -> None:
    def right(task: Any) -> list[str]:
        return [call("act", number=secret(task))]

    def wrong(task: Any) -> list[str]:
        return [call("act", number=(secret(task) + 1) % 7), "I give up."]

    made = OpenEnv(urls["guess"])
    assert [made.tools()[0].name, made.splits, len(made.tasks("train")), len(made.tasks("test"))] == [
        "act", ("test",), 20, 5,
    ]  # fmt: skip
    check_environment(made, right, wrong, tasks=2, disjoint=False)


async def played(env: OpenEnv, turns: list[str], split: str = "train") -> Any:
    try:
        return await Stage(env).play(env.tasks(split)[3], lambda task: turns)
    finally:
        await env.close()


async def test_calls_of_its_tools_are_steps_with_rewards(urls: dict[str, str]) -> None:
    env = OpenEnv(urls["shop"], tasks=5, **SHOP)
    assert [tool.name for tool in env.tools()] == ["add"]
    assert dict(env.tools()[0].parameters)["required"] == ["price"]
    done = await played(env, [call("add", price=4, name="pear"), call("add", price=7)])
    assert [message["content"] for message in done.messages if message["role"] == "tool"] == [
        "pear added: 4 in all",
        "thing added: 11 in all",
    ]
    assert (done.finish, dict(done.rewards)) == (FinishReason.ENV_DONE, {"step": 1.0})
    assert [turn.reward for turn in done.turns] == [0.0, 1.0]


async def test_a_call_after_the_end_of_the_episode_earns_nothing(urls: dict[str, str]) -> None:
    done = await played(OpenEnv(urls["shop"], tasks=5, **SHOP), ["\n".join([call("add", price=12)] * 3)])
    assert [message["content"] for message in done.messages[2:]] == [
        "thing added: 12 in all", "Error: the episode is over", "Error: the episode is over",
    ]  # fmt: skip
    assert dict(done.rewards) == {"step": 1.0}


async def test_rewards_of_the_last_step_and_of_the_state(urls: dict[str, str]) -> None:
    turns = [call("act", number=5), call("act", number=3)]
    assert dict((await played(OpenEnv(urls["guess"]), turns)).rewards) == {"step": pytest.approx(0.9)}
    assert (await played(OpenEnv(urls["guess"], reward="last"), turns)).rewards["last"] == 1.0
    of_state = await played(OpenEnv(urls["guess"], reward="state.score"), turns)
    assert of_state.rewards["state.score"] == 7.0
    missing = await played(OpenEnv(urls["guess"], reward="state.fame"), turns)
    assert "its state has no number 'fame'; it has episode_id, score, step_count" in missing.failure.message


async def test_answers_in_words_are_actions_where_the_recipe_says_so(urls: dict[str, str]) -> None:
    env = OpenEnv(urls["guess"], tool="", text="number", solved=0.5)
    done = await played(env, ["x", "3"])
    assert env.tools() == ()
    assert [message["content"] for message in done.messages if message["role"] == "user"] == [
        "Which number from 0 to 6?",
        "Error: Invalid message",
    ]
    assert (done.finish, done.reward) == (FinishReason.STOP, 1.0)  # an answer without a call ended it


async def test_what_an_environment_raises_fails_the_sample_alone(urls: dict[str, str]) -> None:
    failed = await played(OpenEnv(urls["guess"]), [call("act", number=666)])
    assert failed.failure.boundary is Boundary.TOOL
    assert "EXECUTION_ERROR: the devil is in it" in failed.failure.message


async def test_more_rollouts_than_the_server_has_sessions(urls: dict[str, str]) -> None:
    env = OpenEnv(urls["guess"], sessions=64)  # the server has four
    stage = Stage(env)
    started = time.monotonic()
    try:
        plays = [stage.play(task, lambda task: [call("act", number=secret(task))]) for task in env.tasks("train")]
        done = await asyncio.gather(*plays)
    finally:
        await env.close()
    assert [trajectory.reward for trajectory in done] == [1.0] * 20
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"tools": ["sell"]}, "env.args.tools: the server offers no tool 'sell'; it has none"),
        ({"tool": ""}, "name the field of actions by `text`, or give them a `tool`"),
        ({"splits": {"train": "trian"}}, "env.args.splits: .* has no split 'trian'; it has train, test"),
        ({"splits": {"test": "test"}}, "has no split `train` but train, test"),
        ({"reward": "best"}, "env.args.reward: 'best'; expected step, last, or state.NAME"),
        ({"source": "x.jsonl"}, "env.source is 'x.jsonl'"),
    ],
)
def test_arguments_that_do_not_fit(urls: dict[str, str], args: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        OpenEnv(urls["guess"], **args)


def test_where_no_server_is() -> None:
    with pytest.raises(UserError, match=r"env.args.url: 'localhost:80' is no address"):
        OpenEnv("localhost:80")
    with pytest.raises(UserError, match=r"env.args.url: http://127.0.0.1:\d+/schema: .*refused"):
        OpenEnv(f"http://127.0.0.1:{free_port()}")


class Liar:
    """A server that says what `answers` hold to one message after the other."""

    def __init__(self, *answers: str | bytes) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    async def ws(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        answers = list(self.answers)
        async for message in socket:
            self.asked.append(json.loads(message.data))
            if not answers:
                break
            answer = answers.pop(0)
            await (socket.send_bytes(answer) if isinstance(answer, bytes) else socket.send_str(answer))
        return socket

    @asynccontextmanager
    async def env(self, **args: Any) -> AsyncIterator[OpenEnv]:
        async def schema(request: web.Request) -> web.Response:
            return web.json_response({"action": {"title": "Deed", "properties": {"deed": {"type": "string"}}}})

        async with serving({"GET /schema": schema, "GET /ws": self.ws}) as url:
            env = await asyncio.to_thread(OpenEnv, url, **args)
            try:
                yield env
            finally:
                await env.close()


SEEN = '{"type": "observation", "data": {"observation": {"sight": "a wall"}}}'


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("{", "sent what cannot be read"),
        ("[" * 100_000, "nested deeper than 64"),
        ("7", "sent int, no message"),
        (b"\x00", "sent bytes, where its protocol has texts"),
        ('{"type": "weather", "data": {}}', "answered step by"),
        ('{"type": "observation", "data": {"observation": 3}}', "an observation of type int"),
        ('{"type": "observation", "data": {"observation": {}, "reward": "much"}}', "a reward of type str"),
        (
            '{"type": "observation", "data": {"observation": {"x": "' + "y" * (9 << 20) + '"}}}',
            "broke the connection: .*8388608",
        ),
        ("", "sent what cannot be read"),
    ],
)
async def test_a_server_that_lies(answer: str | bytes, said: str) -> None:
    async with Liar(SEEN, answer).env() as env:
        failed = await Stage(env).play(env.tasks("train")[0], lambda task: [call("act", deed="x")])
    assert failed.failure is not None
    assert failed.failure.boundary is Boundary.TOOL
    assert re.search(said, failed.failure.message), failed.failure.message


async def test_a_server_that_hangs_up_or_never_answers() -> None:
    async with Liar(SEEN).env() as env:
        gone = await Stage(env).play(env.tasks("train")[0], lambda task: [call("act", deed="x")])
        assert "closed the session" in gone.failure.message
    async with Liar().env() as env:
        gone = await Stage(env).play(env.tasks("train")[0], lambda task: [call("act", deed="x")])
        assert gone.failure.boundary is Boundary.ENVIRONMENT
