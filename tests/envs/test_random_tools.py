"""`random_tools`: its lessons can be worked as demonstrated, and what is held out has nothing in common with them."""

import re
import sys
from contextlib import suppress
from itertools import pairwise
from random import Random

import pytest
from agentrl_envs.random_tools.environment import RandomTools
from agentrl_envs.random_tools.lessons import ERRANDS, make_lesson
from agentrl_envs.random_tools.world import State
from fakes import call, make_driver
from paths import ROOT

import agentrl
from agentrl.errors import UserError
from agentrl.plugins.types import ArgumentError
from agentrl.recipe.load import load_recipe
from agentrl.rollout.stored import folder_files, read_samples
from agentrl.testing import call as line
from agentrl.testing import check_environment
from agentrl.trajectory import FinishReason, check_invariants

LESSONS = 2000
LIMITS = {"max_turns": 24, "max_tool_calls": 16}
VALUE = re.compile(r'"[^"]*"|\b[A-Za-z]*-?\d[\w./-]*')


@pytest.fixture(scope="module")
def lessons():
    return [make_lesson(f"random_tools/train/0/{i}") for i in range(LESSONS)]


def names(lessons):
    """Names of tools, and of arguments."""
    tools = [tool for lesson in lessons for tool in lesson.tools]
    return {tool.name for tool in tools}, {name for tool in tools for name in tool.parameters["properties"]}


async def play(env, task, script):
    driver = make_driver(script, env, **LIMITS)
    trajectory = await driver.drive(driver.request(task, 0))
    check_invariants(trajectory)
    return trajectory


def script_of(said, write=call):
    """What a model would write to say what a demonstration says."""
    return [
        write(message["tool_calls"][0]["function"]["name"], **message["tool_calls"][0]["function"]["arguments"])
        if message.get("tool_calls")
        else message["content"]
        for message in said
        if message["role"] == "assistant"
    ]


@pytest.mark.parametrize(
    ("split", "shares"),
    [
        ("train", {}),
        ("train", {"errands": 1.0}),
        ("train", {"vague": 0.5}),
        ("train", {"vague": 1.0}),
        ("train", {"doubts": 1.0}),
        ("validation", {}),
        ("test", {}),
    ],
)
async def test_demonstrations_are_paid_and_say_what_the_tools_say(split, shares):
    env = RandomTools(**shares)
    for task in env.tasks(split)[:40]:
        said = env.demonstrate(task, Random(0), "clean")
        trajectory = await play(env, task, script_of(said))
        assert trajectory.finish is FinishReason.STOP
        assert trajectory.reward == 1.0
        results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
        assert results == [message["content"] for message in said if message["role"] == "tool"]


async def test_a_guess_without_a_call_and_a_change_too_many_are_not_paid():
    env, refused = RandomTools(), 0
    for task in env.tasks("train")[:60]:
        lesson = env.lesson(task)
        assert (await play(env, task, [request.answer for request in lesson.requests])).reward == 0.0
        if lesson.requests[-1].changes:
            script = script_of(env.demonstrate(task, Random(0), "clean"))
            assert (await play(env, task, [script[-2], *script])).reward == 0.0
            refused += 1
    assert refused > 10


def test_no_argument_has_the_name_of_the_key():
    lesson = make_lesson("random_tools/train/0/500041", drills=0.0)  # draws an argument `name` beside a key `name`
    assert all(tool.check(arguments) for request in lesson.requests for tool, arguments in request.calls)


@pytest.mark.slow
def test_calls_of_demonstrations_fit_their_schemas(lessons):
    for lesson in lessons:
        for tool, arguments in (pair for request in lesson.requests for pair in request.calls):
            assert tool.check(arguments).items() >= arguments.items()
        assert len({tool.name for tool in lesson.tools}) == len(lesson.tools) <= 6
        assert all(text in request.answer for request in lesson.requests for text in request.expected)


@pytest.mark.slow
def test_lessons_are_of_many_kinds(lessons):
    assert {len(lesson.tools) for lesson in lessons} == {1, 2, 3, 4, 5, 6}
    assert {len(lesson.requests) for lesson in lessons} == {1, 2, 3, 4, 5, 6}
    assert {len(request.calls) for lesson in lessons for request in lesson.requests} == {1, 2, 3}
    schemas = [value for lesson in lessons for tool in lesson.tools for value in tool.parameters["properties"].values()]
    assert {value["type"] for value in schemas} == {"string", "integer", "number", "boolean"}
    assert any("enum" in value for value in schemas)
    assert any("default" in value for value in schemas)
    errors = [
        text for lesson in lessons for text in (m["content"] for m in lesson.play()[0]) if text.startswith("Error")
    ]
    assert any("busy" in text for text in errors)
    assert any("did you mean" in text for text in errors)


def test_a_task_is_always_the_same_and_no_two_splits_share_one():
    env = RandomTools()
    for split in ("train", "test"):
        assert (
            env.lesson(env.tasks(split)[3]).opening()
            == make_lesson(f"random_tools/{split}/0/3", split == "test").opening()
        )
    assert RandomTools(seed=1).tasks("train")[0].data != env.tasks("train")[0].data
    assert RandomTools(seed=1).tasks("test")[0].data == env.tasks("test")[0].data


def words_of(text):
    return set(re.findall(r"\w+", text.lower()))


def test_what_an_errand_says_is_in_the_description_of_the_tool_that_is_called():
    for i in range(50):
        lesson = make_lesson(f"errands/{i}", errands=1.0)
        described = {tool.name: words_of(tool.description) for tool in lesson.tools}
        said, state = lesson.play()
        assert lesson.solved(state)
        assert 2 <= len(described) <= 6
        calls = 0
        for before, message in pairwise([*lesson.opening(), *said]):
            for called in message.get("tool_calls", ()):
                shared = {name: len(words & words_of(before["content"])) for name, words in described.items()}
                assert called["function"]["arguments"] == {}
                assert shared[called["function"]["name"]] >= 2
                calls += 1
        assert calls == ERRANDS
        assert len(lesson.requests) < ERRANDS


def test_a_vague_errand_does_not_say_which_tool_is_meant():
    told = []
    for vague in (0.0, 1.0):
        shared = []
        for i in range(60):
            for request in make_lesson(f"vague/{i}", errands=1.0, vague=vague).requests:
                tool = request.calls[0][0]
                shared.append(bool(words_of(request.text) & (words_of(tool.description) - {"the", "a", "of", "by"})))
        told.append(sum(shared) / len(shared))
    assert told[0] > 0.9
    assert told[1] < 0.15


def test_vague_commands_and_orders_of_drills_seldom_say_which_tool_is_meant():
    told = []
    for vague in (0.0, 0.9):
        lessons = [make_lesson(f"vague/{i}", drills=1.0, vague=vague) for i in range(600 if vague else 60)]
        changing = [request for lesson in lessons for request in lesson.requests if request.changes]
        shared = [words_of(r.text) & (words_of(r.calls[0][0].description) - {"the", "a", "one"}) for r in changing]
        told.append(sum(map(bool, shared)) / len(shared))
    assert told[0] > 0.9
    assert told[1] < 0.3


def test_a_vague_drill_gives_values_and_says_of_none_which_argument_it_is_for():
    requests = [r for i in range(100) for r in make_lesson(f"vague/{i}", drills=1.0, vague=1.0).requests]
    named, told = [], []
    for request in requests:
        [(tool, arguments)] = request.calls
        values = " ".join(str(value) for value in arguments.values())
        assert all(str(value).lower() in request.text.lower() for value in arguments.values())
        said = words_of(request.text) - words_of(values) - {"from", "to"}
        named += [bool(words_of(name.replace("_", " ")) & said) for name in arguments]
        told.append(bool(words_of(tool.name.replace("_", " ")) & said))
    assert sum(named) / len(named) < 0.05
    assert 0.3 < sum(told) / len(told) < 0.7
    assert {len(request.calls[0][1]) for request in requests} == {1, 2, 3}


def test_in_doubt_one_tool_after_the_other_is_tried_and_all_that_is_found_is_told():
    told, tried = [], []
    for i in range(100):
        lesson = make_lesson(f"doubts/{i}", doubts=1.0)
        for request in lesson.requests:
            results = []
            for tool, arguments in request.calls:
                (value,) = arguments.values()
                assert value.lower() in request.text.lower()
                told.append(bool(words_of(tool.name.replace("_", " ")) & (words_of(request.text) - words_of(value))))
                with suppress(ArgumentError):
                    results.append(tool.run(State(), arguments))
            assert len({tool.name for tool, _ in request.calls}) == len(request.calls)
            [found] = results  # by the last call
            assert all(text in found and text in request.answer for text in request.expected)
            tried.append(len(request.calls))
    assert sum(told) / len(told) < 0.05
    assert set(tried) == {1, 2, 3, 4, 5}


@pytest.mark.slow
def test_no_tool_and_no_argument_of_the_test_split_is_in_a_lesson(lessons):
    errands = [make_lesson(f"random_tools/train/0/{i}", errands=1.0) for i in range(LESSONS)]
    doubts = [make_lesson(f"random_tools/train/0/{i}", doubts=1.0) for i in range(LESSONS)]
    tools, arguments = names([*lessons, *errands, *doubts])
    for share in ({}, {"errands": 1.0}, {"doubts": 1.0}):
        own = [make_lesson(f"random_tools/test/0/{i}", held_out=True, **share) for i in range(512)]
        own_tools, own_arguments = names(own)
        assert not tools & own_tools
        assert own_arguments & arguments <= {"name", "key", "which"}


@pytest.mark.slow
def test_the_worlds_of_the_benchmark_share_no_name_and_no_sentence_with_the_lessons(lessons, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    import domains

    doubts = [make_lesson(f"random_tools/train/0/{i}", doubts=1.0, vague=0.5) for i in range(LESSONS)]
    tools, arguments = names([*lessons, *doubts])
    sentences = {VALUE.sub("_", request.text) for lesson in (*lessons, *doubts) for request in lesson.requests}
    for kind in (domains.OrderDesk, domains.Library, domains.UnitConversion):
        env = kind()
        assert not tools & {tool.name for tool in env.tools()}
        assert not arguments & {name for tool in env.tools() for name in tool.parameters["properties"]}
        requests = [task.data["request"] for task in env.tasks("test")]
        assert not sentences & {VALUE.sub("_", request) for request in requests}


@pytest.mark.slow
def test_the_embedded_model_calls_tools_that_it_has_never_seen(tmp_path):
    keys = ["model.path=tiny_tools", "sft.new_model=null", "env.args={}", "eval.rollout.temperature=0"]
    sizes = ["eval.tasks=48", "rollout.max_turns=1", "rollout.max_turn_tokens=100", "rollout.strict_calls=true"]
    recipe = load_recipe(ROOT / "recipes" / "tiny_tools.yaml", [*keys, *sizes])
    agentrl.evaluate(recipe, splits=["test"], keep=tmp_path)
    env, named, fitting, right = RandomTools(), 0, 0, 0
    for file in folder_files(tmp_path):
        for sample in read_samples(file.path):
            lesson = env.lesson(sample.trajectory.task)
            said = next(m for m in sample.trajectory.messages if m["role"] == "assistant")
            called = said["tool_calls"][0]["function"] if said.get("tool_calls") else {"name": "", "arguments": {}}
            for tool in lesson.tools:
                if tool.name == called["name"]:
                    named += 1
                    with suppress(ArgumentError):
                        arguments = tool.check(called["arguments"])
                        fitting += 1
                        wanted, given = lesson.requests[0].calls[0]
                        right += wanted is tool and arguments == tool.check(given)
    assert named >= 0.9 * 48
    assert fitting >= 0.9 * 48
    assert right >= 0.4 * 48


@pytest.mark.slow
def test_it_keeps_the_contract():
    env = RandomTools()

    def gold(task):
        return script_of(env.demonstrate(task, Random(0), "clean"), line)

    check_environment(env, gold, lambda task: ["I do not know."] * len(env.lesson(task).requests), limits=LIMITS)


def test_a_style_or_source_that_is_not_there_is_refused():
    env = RandomTools()
    with pytest.raises(UserError, match="no demonstrations of style 'clever'"):
        env.demonstrate(env.tasks("train")[0], Random(0), "clever")
    with pytest.raises(UserError, match="makes its own tasks"):
        RandomTools("file.jsonl")
