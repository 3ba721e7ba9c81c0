"""The engine `openai` against a real HTTP server that speaks the chat completions API, on loopback."""

import asyncio
import base64
import json
import shlex
from collections import Counter
from random import Random

import pytest
from agentrl_envs.swe.environment import WORK, Swe, question
from agentrl_envs.swe.mutations import Mutation
from endpoint import Endpoint, completion, served
from fakes import TASK, Echo, Env
from vision_help import picture

import agentrl
from agentrl.cli.main import run
from agentrl.engine.api.engine import OpenAIEngine
from agentrl.errors import UserError
from agentrl.images import STORE
from agentrl.plugins.registry import make_environment
from agentrl.plugins.types import ToolResponse
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.env import EnvSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.driver import Driver
from agentrl.trajectory import Boundary, FinishReason


async def drive(endpoint, env=None, tools=(), **args):
    engine = OpenAIEngine(**{"model": "good-model", "base_url": endpoint.url, "retries": 0, **args})
    driver = Driver(
        engine=engine, chat=engine.chat, environment=env or Env(), tools=tools, limits=RolloutSection(temperature=0.5)
    )
    trajectory = await driver.drive(driver.request(TASK, 0))
    await engine.close()
    return trajectory


def scripted(*answers):
    """One answer a turn, by how many assistant messages the conversation holds."""
    return lambda body: answers[sum(m["role"] == "assistant" for m in body["messages"])]


async def test_a_conversation_with_tool_calls_and_what_is_sent():
    script = scripted(completion(None, [("echo", '{"text": "hi"}')], "tool_calls"), completion("4", tokens=3))
    async with Endpoint(script) as endpoint:
        t = await drive(endpoint, tools=[Echo()], extra={"top_k": 5})
    assert t.finish is FinishReason.STOP
    assert t.reward == 1.0
    assert [m["role"] for m in t.messages] == ["user", "assistant", "tool", "assistant"]
    assert t.messages[2] == {"role": "tool", "content": "hi", "tool_call_id": "c0", "name": "echo"}
    assert t.sampled_tokens == 10
    first, second = endpoint.bodies
    assert first["messages"] == [{"role": "user", "content": "2+2?"}]
    assert first["tools"][0]["function"]["name"] == "echo"
    assert (first["temperature"], first["max_tokens"], first["top_k"]) == (0.5, 512, 5)
    assert second["messages"][1]["tool_calls"][0]["function"] == {"name": "echo", "arguments": '{"text": "hi"}'}
    assert second["messages"][2] == {"role": "tool", "content": "hi", "tool_call_id": "c0"}


async def test_arguments_that_are_no_json_go_back_to_the_model():
    wrong = [completion(None, [("echo", arguments)]) for arguments in ("{oops", "[1]", '{"text": "a", "text": "b"}')]
    async with Endpoint(scripted(*wrong, completion("4"))) as endpoint:
        t = await drive(endpoint, tools=[Echo()])
    told = [m["content"] for m in t.messages if m["role"] == "tool"]
    assert told[0].startswith("Error: the arguments cannot be read: it is not valid JSON (")
    assert told[1] == "Error: the arguments are not a JSON object"
    assert told[2] == "Error: the arguments cannot be read: the key 'text' stands twice"
    assert t.reward == 1.0


@pytest.mark.parametrize("where", ["user", "tool"])
async def test_images_are_sent_as_urls_and_those_of_tools_where_the_endpoint_takes_them(where):
    script = scripted(completion(None, [("echo", "{}"), ("echo", "{}")]), completion("4"), completion("4"))
    env = Env(create=[{"role": "user", "content": [{"type": "text", "text": "2+2?"}, part(picture(1))]}])
    tools = [Echo(execute=ToolResponse("see", images=(picture(2), b"broken")))]
    async with Endpoint(script) as endpoint:
        t = await drive(endpoint, env, tools=tools, tool_images=where)
    opening, _, *answers = endpoint.bodies[1]["messages"]
    assert opening["content"] == [{"type": "text", "text": "2+2?"}, sent(picture(1))]
    text = {"type": "text", "text": "see\n[image 2 cannot be shown: it is no image that can be read]"}
    if where == "tool":
        assert [(m["role"], m["content"]) for m in answers] == [("tool", [text, sent(picture(2))])] * 2
    else:
        note = {"type": "text", "text": "[images: 1, in the user's next message]"}
        assert [(m["role"], m["content"]) for m in answers] == [
            *[("tool", [text, note])] * 2, ("user", [sent(picture(2))] * 2),
        ]  # fmt: skip
    assert t.messages[2]["content"][1] == {"type": "image", "image": STORE.put(picture(2))}


def part(image):
    return {"type": "image", "image": image}


def sent(image):
    data = base64.b64encode(STORE.path(STORE.put(image)).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@pytest.mark.slow
async def test_a_busy_endpoint_is_asked_again_and_a_broken_one_fails_the_request():
    tries = Counter()

    def busy(body):
        tries["all"] += 1
        return 429 if tries["all"] < 3 else completion("4")

    async with Endpoint(busy) as endpoint:
        assert (await drive(endpoint, retries=3)).reward == 1.0
    empty = {"id": "x", "choices": []}
    for answer, words in ((500, "InternalServerError"), ("{oops", "no choice"), (empty, "no choice")):
        async with Endpoint(lambda body, answer=answer: answer) as endpoint:
            t = await drive(endpoint)
        assert t.failure.boundary is Boundary.ENGINE
        assert words in t.failure.message


async def test_an_endpoint_that_never_answers_is_cut_off():
    async with Endpoint(lambda body: asyncio.sleep(60)) as endpoint:
        t = await drive(endpoint, timeout=0.2)
    assert "APITimeoutError" in t.failure.message


async def test_what_is_known_at_the_start_is_said_in_a_line(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UserError, match="OPENAI_API_KEY is not set"):
        OpenAIEngine(model="m")
    for prices, words in (
        ({"inptu": 1}, "prices of a million tokens by .*did you mean 'input'"),
        ({"input": -1}, "got -1"),
    ):
        with pytest.raises(UserError, match=words):
            OpenAIEngine(model="m", base_url="http://x", prices=prices)
    monkeypatch.setenv("MY_KEY", "secret")
    async with Endpoint(lambda body: completion("4")) as endpoint:
        for name, words in (("god-model", "has no model 'god-model'; did you mean 'good-model'"), ("forbidden", "key")):
            engine = OpenAIEngine(model=name, base_url=endpoint.url, api_key_env="MY_KEY")
            with pytest.raises(UserError, match=words):
                await engine.health()
            await engine.close()
        await drive(endpoint, api_key_env="MY_KEY")
        assert endpoint.keys == {"Bearer secret"}
        url = endpoint.url
    with pytest.raises(UserError, match="cannot be reached"):
        await OpenAIEngine(model="m", base_url=url, retries=0).health()


@pytest.mark.slow
def test_eval_plays_the_recipes_tasks_and_tools_through_the_endpoint(tmp_path, capsys, monkeypatch):
    env = make_environment(EnvSection(name="gsm8k"))
    gold = {}
    for task in env.tasks("test")[:6]:
        gold[task.data["question"]] = [m for m in env.demonstrate(task, Random(0), "clean") if m["role"] == "assistant"]

    def answer(body):
        question = body["messages"][0]["content"]
        (said,) = [talk for known, talk in gold.items() if known in question]
        message = said[sum(m["role"] == "assistant" for m in body["messages"])]
        calls = [(c["function"]["name"], json.dumps(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
        return completion(message["content"], calls)

    with served(answer) as url:
        overrides = ["engine.name=openai", "engine.args.model=good-model", f"engine.args.base_url={url}"]
        out = tmp_path / "result.json"
        recipe = "recipes/gsm8k_tool.yaml"
        overrides += ["engine.args.prices.input=2", "engine.args.prices.output=10"]
        asked = ["eval", recipe, *overrides, "eval.tasks=6", "--split", "test", "--output", str(tmp_path / "kept")]
        assert run([*asked, "--json", str(out)]) == 0
        found = json.loads(out.read_text())["splits"]["test"]
        assert found["accuracy"] == 1.0
        turns = round(found["turns"] * 6)
        assert found["usage"] == {"input": 5 * turns, "output": 7 * turns}
        assert found["cost"] == pytest.approx((2 * 5 + 10 * 7) * turns / 1e6)
        said = capsys.readouterr().out
        assert "good-model" in said
        assert "cost" in said
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        other = ["eval", recipe, "--model", "openai:good-model", "eval.tasks=2", "--split", "test", "--json", str(out)]
        assert run([*other, "--output", str(tmp_path / "other")]) == 0
        found = json.loads(out.read_text())
        assert (found["splits"]["test"]["accuracy"], found["splits"]["test"]["tasks"]) == (1.0, 2)
        assert f"good-model at {url}" in " ".join(capsys.readouterr().out.split())
        assert run(["eval", recipe, "--model", "openai:god-model", "--no-keep"]) == 2
        assert "has no model 'god-model'; did you mean 'good-model'" in capsys.readouterr().err
        assert run(["train", recipe, *overrides]) == 2
        assert "cannot be trained" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"engine\.args\.model: OpenAIEngine needs it"):
        agentrl.evaluate(Recipe.model_validate({"engine": {"name": "openai"}}))


REPAIR = """python3 -c '
import sys
path, start, end, sound = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4].encode()
data = open(path, "rb").read()
open(path, "wb").write(data[:start] + sound + data[end:])' """


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
def test_eval_lets_a_model_behind_an_endpoint_repair_packages(tmp_path, monkeypatch):
    source = Swe.example["source"]
    tasks = {question(task): task for task in Swe(source).tasks("test")}

    def answer(body):
        if body["messages"][-1]["role"] == "tool":
            return completion("Repaired.")
        data = tasks[body["messages"][0]["content"]].data
        mutation = Mutation(**data["mutation"])
        end = mutation.start + len(mutation.text.encode())
        words = (f"{WORK}/{data['file']}", str(mutation.start), str(end), data["sound"])
        command = REPAIR + shlex.join(words) if data["id"] != next(iter(tasks.values())).id else "true"
        return completion(None, [("terminal", json.dumps({"command": command}))])

    recipe, out = tmp_path / "repairs.yaml", tmp_path / "result.json"
    recipe.write_text(f"env: {{name: swe, source: {source}}}\ntools: [terminal, edit]\nworkspace: bwrap\n")
    with served(answer) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        asked = ["eval", str(recipe), "--model", "openai:good-model", "--split", "test", "--json", str(out)]
        assert run([*asked, "--output", str(tmp_path / "kept")]) == 0
    found = json.loads(out.read_text())["splits"]["test"]
    assert (found["tasks"], found["accuracy"]) == (len(tasks), pytest.approx(1 - 1 / len(tasks)))
