"""Any Python object as an environment, played by the real driver; TRL's examples as TRL itself would call them."""

import asyncio
import json

import adapter_plugins
import pytest
from adapter_plugins import EVENTS, ROWS
from agentrl_envs.object.environment import ObjectEnvironment
from processes import eventually

from agentrl.errors import UserError
from agentrl.plugins.registry import make_environment
from agentrl.recipe.sections.env import EnvSection
from agentrl.rollout.groups import roll_out
from agentrl.testing import call, check_environment
from agentrl.testing.play import Stage


@pytest.fixture(autouse=True)
def _no_events():
    EVENTS.clear()


def made(name: str, source: str = "generated", **args) -> ObjectEnvironment:
    env = make_environment(
        EnvSection(name="object", source=source, args={"factory": f"adapter_plugins:{name}", **args})
    )
    assert isinstance(env, ObjectEnvironment)
    return env


def word(**args) -> ObjectEnvironment:
    return made("WordEnv", "adapter_plugins:rows", splits={"train": "train", "test": "test"}, **args)


async def play(env, *turns, task=0, split="train"):
    stage = Stage(env)
    trajectory = await stage.play(env.tasks(split)[task], lambda _: list(turns))
    await env.close()
    return trajectory


def told(trajectory) -> list[str]:
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


async def test_trl_environment_runs_unchanged():
    played = await play(
        word(), "please\n" + call("guess", word="house"), call("hint"), call("guess", word="word3"), "done", task=3
    )
    assert played.failure is None
    assert played.messages[0]["content"] == "Guess word 3. The word has 5 letters."
    assert told(played) == ["wrong", "w", "right!"]
    assert dict(played.rewards) == {"WordEnv": 1.0}
    assert ROWS[3]["prompt"][0]["content"] == "Guess word 3.", "the row itself is left as it is"


async def test_what_a_method_raises_goes_back_to_the_model():
    played = await play(word(), call("guess", word="word0"), call("guess", word="x"), call("guess", wrd="x"), "done")
    assert told(played)[1] == "Error: ValueError: Game over."
    assert told(played)[2].startswith("Error: ")
    assert played.rewards == {"WordEnv": 1.0}


async def test_an_attribute_can_end_the_episode():
    played = await play(word(done="done"), call("guess", word="word0"), "never said")
    assert (str(played.finish), len(played.turns)) == ("env_done", 1)


def trl_plays(env_class, row, calls, reward_funcs):
    """The calls that TRL 1.16 makes for one sample: construct, reset with the row, tools by name, rewards by lists."""
    env = env_class()
    prompt = row["prompt"]
    observation = env.reset(**row)
    if observation is not None:
        prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]
    results = [str(getattr(env, name)(**arguments)) for name, arguments in calls]
    columns = {key: [value] for key, value in row.items() if key != "prompt"}
    rewards = {}
    if hasattr(env, "get_reward"):
        rewards[env_class.__name__] = env.get_reward()
    for function in reward_funcs:
        rewards[function.__name__] = function(prompts=[prompt], completions=[[]], environments=[env], **columns)[0]
    return prompt, results, rewards


@pytest.mark.parametrize(
    ("env_class", "calls", "functions"),
    [
        (adapter_plugins.EchoToolEnv, [("echo", {"message": "Hello World!"})], ["reward_func"]),
        (adapter_plugins.WordEnv, [("guess", {"word": "a", "loud": True}), ("guess", {"word": "word1"})], []),
    ],
)
async def test_prompt_results_and_rewards_are_those_of_trl(env_class, calls, functions):
    paths = [f"adapter_plugins:{name}" for name in functions]
    env = made(env_class.__name__, "adapter_plugins:rows", splits={"train": "train"}, rewards=paths)
    played = await play(env, *(call(name, **arguments) for name, arguments in calls), "done", task=1)
    prompt, results, rewards = trl_plays(
        env_class, ROWS[1], calls, [getattr(adapter_plugins, name) for name in functions]
    )
    assert list(played.messages[: len(prompt)]) == prompt
    assert told(played) == results
    assert dict(played.rewards) == pytest.approx(rewards)


@pytest.mark.parametrize("env_class", [adapter_plugins.EchoToolEnv, adapter_plugins.WordEnv])
def test_a_model_is_offered_the_tools_that_trl_offers(env_class):
    import inspect

    from transformers.utils import get_json_schema

    theirs = [
        get_json_schema(getattr(env_class(), name))["function"]
        for name, _ in inspect.getmembers(env_class, predicate=inspect.isfunction)  # as TRL lists them
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]
    ours = [tool.schema["function"] for tool in made(env_class.__name__, reward="none").tools()]
    assert [tool["name"] for tool in ours] == [tool["name"] for tool in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["description"] == other["description"]
        properties, wanted = mine["parameters"]["properties"], other["parameters"].get("properties", {})
        assert {n: (p["type"], p.get("description")) for n, p in properties.items()} == {
            n: (p["type"], p.get("description")) for n, p in wanted.items()
        }
        assert mine["parameters"].get("required", []) == other["parameters"].get("required", [])


def test_it_keeps_the_contract_of_environments():
    def gold(task):
        return [call("guess", word=task.data["secret"]), "done"]

    check_environment(word(), gold, lambda task: "no idea")


async def test_functions_of_trls_kind_pay_besides_get_reward():
    played = await play(word(rewards=["adapter_plugins:politeness"]), "a word, please", task=2)
    assert dict(played.rewards) == {"WordEnv": 0.0, "politeness": 0.5}


async def test_many_requests_at_once_share_nothing_and_block_nobody():
    """64 requests of 5 calls that sleep 10 ms would take 3.2 s one after the other."""
    env = made("make_counting", args={"start": 5}, opening="Count.")
    stage = Stage(env)

    async def one(amount):
        turns = [call("add", amount=amount)] * 3 + [f"{call('add', amount=1)}\n{call('add', amount=1)}", "done"]
        return await stage.play(env.tasks("train")[amount], lambda _: turns)

    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    played = await asyncio.gather(*(one(i) for i in range(64)))
    ticking.cancel()
    assert [t.rewards["Counting"] for t in played] == [5 + 3 * i + 2 for i in range(64)]
    assert told(played[10]) == ["15", "25", "35", "36", "37"], "the calls of a turn run in their order"
    assert ticks > 2, "the event loop went on"
    await env.close()
    assert EVENTS["made"] == EVENTS["closed"] == 64, "the object that told the class served a request"


async def test_objects_that_are_dear_to_make_are_used_again():
    env = word(reuse=True)
    stage = Stage(env)
    for i in range(5):
        played = await stage.play(env.tasks("train")[i], lambda task: [call("guess", word=task.data["secret"]), "done"])
        assert played.rewards == {"WordEnv": 1.0}
    assert (EVENTS["made"], EVENTS["reset"]) == (1, 5)
    await env.close()


async def test_a_call_that_hangs_is_answered_in_time_and_its_object_closed_afterwards():
    env = made("Counting", reuse=True, opening="Count.")
    stage = Stage(env, changes={"tool_timeout": 0.05})
    played = await stage.play(env.tasks("train")[0], lambda _: [call("hang"), "done"])
    assert "did not answer within" in told(played)[0]
    assert played.failure is None
    await eventually(lambda: EVENTS["closed"])
    assert EVENTS == {"made": 1, "hung": 1, "closed": 1}, "an object in unknown state is not used again"
    await env.close()


async def test_pictures_text_and_errors_of_methods():
    env = made("Counting", methods=["show", "fail"], opening="Look.")
    assert [tool.name for tool in env.tools()] == ["show", "fail"]
    played = await play(env, call("show"), call("fail"), "done")
    assert told(played)[0] == [{"type": "text", "text": "look:"}, {"type": "image", "image": b"\x89PNG..."}]
    assert told(played)[1].startswith("Error: KeyError")


async def test_a_reset_that_raises_fails_its_own_request():
    env = made("Fussy")
    groups = await roll_out(Stage(env, changes={"retries": 0}).driver, env.tasks("train")[1:2], 1)
    (failed,) = groups[0].failed
    assert failed.failure.boundary == "environment"
    assert "odd seeds are out" in failed.failure.message
    assert EVENTS["closed"] == 1
    played = await play(env, "done", task=2)
    assert played.messages[0]["content"] == "seed 2"


def test_tasks_without_data_hold_seeds_that_are_apart():
    env = made("Counting", tasks=50, seed=7)
    train, test = ([t.data["seed"] for t in env.tasks(split)] for split in ("train", "test"))
    assert train == list(range(7, 57))
    assert not set(train) & set(test)
    assert json.dumps([dict(t.data) for t in env.tasks("test")])


MISTAKES = [
    (lambda: made("Nobody"), r"env.args.factory: 'adapter_plugins' has no 'Nobody'"),
    (lambda: made("ROWS"), r"adapter_plugins:ROWS is list; expected a class or a function"),
    (lambda: made("Silent"), r"Silent.mumble: a tool needs a docstring"),
    (lambda: made("Counting", methods=["ad"]), r"Counting has no method 'ad'; did you mean 'add'\?"),
    (lambda: made("Counting", rewards=["adapter_plugins:wants_tokens"]), r"asks for completion_ids"),
    (lambda: made("Counting", rewards=["adapter_plugins:ROWS"]), r"adapter_plugins:ROWS is not a function"),
    (lambda: made("Counting", args=3), r"env.args.args: should be a valid dictionary"),
    (lambda: make_environment(EnvSection(name="object")), r"needs it, and it is missing"),
    (lambda: made("Counting").tasks("tst"), r"no split 'tst'"),
]


@pytest.mark.parametrize(("make", "words"), MISTAKES)
def test_a_mistake_is_one_line(make, words):
    with pytest.raises(UserError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


FAILURES = [
    ({"name": "Rewardless", "source": "adapter_plugins:rows"}, "has no get_reward"),
    ({"name": "Rewardless", "reward": "score", "source": "adapter_plugins:rows"}, "has no 'score'"),
    ({"name": "Counting", "source": "generated"}, "the opening is empty"),
    ({"name": "Broken"}, "the server is away"),
    (
        {"name": "EchoToolEnv", "rewards": ["adapter_plugins:two_rewards"], "source": "adapter_plugins:rows"},
        "2 rewards",
    ),
]


@pytest.mark.parametrize(("args", "words"), FAILURES)
async def test_what_shows_only_when_it_runs_fails_the_request_with_a_line(args, words):
    given = dict(args)
    name, source = given.pop("name"), given.pop("source", "generated")
    extra = {} if source == "generated" else {"splits": {"train": "train"}}
    played = await play(made(name, source, **extra, **given), "done")
    assert played.failure is not None
    assert words in played.failure.message


async def test_others_may_pay():
    played = await play(made("Rewardless", "adapter_plugins:rows", splits={"train": "train"}, reward="none"), "done")
    assert played.failure is None
    assert dict(played.rewards) == {}
