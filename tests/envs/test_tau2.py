"""The adapter of tau2-bench, by a small checkout in its form that the tests bring."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest
from agentrl_envs.foreign.environment import ForeignEnvironment
from agentrl_envs.foreign.sources import Tau2
from paths import SUPPORT

from agentrl.audit.answer import turns_of
from agentrl.errors import UserError
from agentrl.plugins.types import Task
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.testing import call, check_environment
from agentrl.testing.play import Stage
from agentrl.trajectory import Trajectory

CHECKOUT = str(SUPPORT / "tau2_small")


def tau2(**args: Any) -> ForeignEnvironment:
    return ForeignEnvironment(sys.executable, "tau2", {"checkout": CHECKOUT, "domain": "shop", **args})


async def played(env: ForeignEnvironment, name: str, *turns: str) -> Trajectory:
    tasks = {task.id: task for split in ("train", "test") for task in env.tasks(split)}
    return await Stage(env).play(tasks[name], lambda _: list(turns))


async def test_calls_a_user_and_the_reward_of_its_evaluator() -> None:
    env = tau2()
    assert (env.name, [len(env.tasks(split)) for split in ("train", "test")]) == ("tau2-shop", [2, 2])
    assert env.cannot["assertions that a model judges"].startswith("1 tasks are left out")
    assert [tool.name for tool in env.tools()] == ["cancel", "look_up"]
    right = await played(env, "train-cancel", call("cancel", order="A1"), "It is done.")
    assert [(m["role"], m["content"]) for m in right.messages[:3]] == [
        ("system", "Help the user.\n\nCancel open orders alone."), ("assistant", "Hello. What can I do?"),
        ("user", "Cancel order A1."),
    ]  # fmt: skip
    assert right.messages[4]["content"] == '{"price": 10, "status": "cancelled"}'
    assert (right.failure, dict(right.rewards), len(right.turns)) == (None, {"reward": 1.0}, 2)
    for turns in (["It is done."], [call("cancel", order="A2"), "Done."]):
        assert dict((await played(env, "train-cancel", *turns)).rewards) == {"reward": 0.0}
    cut = await Stage(env, limits=RolloutSection(max_turns=1)).play(
        env.tasks("train")[0], lambda _: [call("cancel", order="A1"), "It is done."]
    )
    assert (cut.failure, dict(cut.rewards)) == (None, {"reward": 0.0})
    told = await played(env, "train-price", call("look_up", order="A2"), "It was 20.")
    silent = await played(env, "train-price", call("look_up", order="A2"), "I shall not say.")
    assert (told.rewards["reward"], silent.rewards["reward"]) == (1.0, 0.0)
    await env.close()


async def test_errors_are_told_and_counted_and_limits_end_it() -> None:
    env = tau2(max_errors=2, max_steps=12)
    wrong = await played(env, "test-nothing", call("cancel", order="A9"), "There is none.")
    assert wrong.messages[4]["content"] == "Error: 'A9'"
    assert (wrong.failure, wrong.rewards["reward"]) == (None, 1.0)
    many = await played(env, "test-nothing", call("cancel", order="A9"), call("cancel", number=9), "There is none.")
    assert (many.rewards["reward"], len(many.turns)) == (0.0, 2)
    long = await played(env, "test-nothing", *[call("look_up", order="A1")] * 20, "There is none.")
    assert long.failure is None
    assert (long.rewards["reward"], len(long.turns)) == (0.0, 6)
    empty = await played(env, "test-nothing", "  ")
    assert (empty.failure, empty.rewards["reward"]) == (None, 0.0)
    await env.close()


async def test_demonstrations_earn_1_and_what_a_script_cannot_do_is_said() -> None:
    env = tau2()
    for name in ("train-cancel", "train-price", "test-nothing"):
        (task,) = [task for split in ("train", "test") for task in env.tasks(split) if task.id == name]
        assert (await played(env, name, *turns_of(env.demonstrate(task, Random(0), "")))).rewards["reward"] == 1.0
    with pytest.raises(UserError, match="needs actions of the user"):
        env.demonstrate(env.tasks("test")[1], Random(0), "")
    await env.close()


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    env = tau2()

    def right(task: Task) -> list[str]:
        return list(turns_of(env.demonstrate(task, Random(0), "")))

    check_environment(env, None, lambda task, messages: "I do not know.", tasks=2, disjoint=False)


async def test_a_script_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "def talk(instructions, heard):\n"
        "    return ['Hi.', instructions, '###STOP###'][len(heard) - 1]\n"
        "def silent(instructions, heard):\n    return ''\n"
    )
    env = tau2(user=f"{tmp_path / 'user.py'}:talk")
    done = await played(env, "train-cancel", "What is it?", call("cancel", order="A1"), "Done.")
    assert [m["content"] for m in done.messages if m["role"] == "user"] == ["Hi.", "Cancel order A1."]
    assert done.rewards["reward"] == 1.0
    await env.close()
    env = tau2(user=f"{tmp_path / 'user.py'}:silent")
    failed = await played(env, "train-cancel", "What?")
    await env.close()
    assert failed.failure is not None
    assert "script returned ''" in failed.failure.message


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[Any]]]:
    """A model that plays the user, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.headers["Authorization"], given))
            said = "Cancel A1, please." if len(given["messages"]) == 2 else "###STOP###"
            data = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_user_behind_an_endpoint(endpoint: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    url, asked = endpoint
    monkeypatch.setenv("USER_KEY", "secret")
    env = tau2(user={"model": "someone", "base_url": url, "api_key_env": "USER_KEY"})
    done = await played(env, "train-cancel", call("cancel", order="A1"), "Done.")
    with pytest.raises(UserError, match="needs a scripted user"):
        env.demonstrate(env.tasks("train")[0], Random(0), "")
    await env.close()
    assert (done.failure, done.rewards["reward"]) == (None, 1.0)
    assert done.messages[2]["content"] == "Cancel A1, please."
    assert [(key, given["model"]) for key, given in asked] == [("Bearer secret", "someone")] * 2
    assert asked[1][1]["messages"][0] == {"role": "system", "content": "Cancel order A1."}


async def test_an_endpoint_that_is_away_fails_the_rollout() -> None:
    env = tau2(user={"model": "someone", "base_url": "http://127.0.0.1:9/v1"})
    failed = await played(env, "train-cancel", "Done.")
    await env.close()
    assert failed.failure is not None
    assert not failed.rewards


async def test_tasks_without_splits_and_those_that_a_model_judges() -> None:
    env = tau2(task_set="shop_small", train=1, env_args={"stock": 7})
    assert [[task.id for task in env.tasks(split)] for split in ("train", "test")] == [["train-cancel"], ["test-price"]]
    assert "assertions that a model judges" not in env.cannot
    assert (await played(env, "train-cancel", call("cancel", order="A1"), "Done.")).rewards["reward"] == 1.0
    await env.close()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"checkout": "/nowhere"}, "/nowhere is no clone of tau2-bench"),
        ({"domain": "shopp"}, "there is no domain 'shopp': the checkout has shop"),
        ({"task_set": "all"}, "there is no task set 'all'"),
        ({"user": "someone"}, "expected scripted, file.py:function, or an endpoint"),
        ({"user": {"model": "someone"}}, "an endpoint needs model and base_url"),
        ({"user": {"model": "a", "base_url": "b", "api_key_env": "NOT_THERE"}}, "NOT_THERE is not set"),
    ],
)
def test_arguments_that_do_not_fit(args: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as raised:
        tau2(**args)
    assert said in str(raised.value)


def test_the_recipe_of_a_checkout() -> None:
    sections = Tau2().sections(f"{CHECKOUT}@shop", "python")
    assert sections["env"]["args"]["args"] == {"checkout": CHECKOUT, "domain": "shop", "train": 4}
    assert Tau2().sections(CHECKOUT, "python")["env"]["args"]["args"]["domain"] == "retail"
    with pytest.raises(UserError, match="is no clone of tau2-bench"):
        Tau2().sections(str(SUPPORT), "python")
