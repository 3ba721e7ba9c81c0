"""The environment `code`: its tasks, what is held out, its rows, and what is paid."""

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from agentrl_envs.code.answer import find_solution
from agentrl_envs.code.environment import INSTRUCTIONS, Code
from agentrl_envs.code.generate import SPLITS, TESTS, is_held_out, problem
from agentrl_envs.code.kinds import KINDS, UNSEEN
from agentrl_envs.code.source import read_row
from agentrl_tools.python import Python
from fakes import ScriptedEngine, call, make_driver
from train_help import write_lines

from agentrl.errors import UserError
from agentrl.plugins.registry import make_environment
from agentrl.plugins.types import InfrastructureError, Session, Task
from agentrl.recipe.sections.env import EnvSection
from agentrl.testing import check_environment
from agentrl.trajectory import Boundary, FinishReason, Trajectory

MBPP = [
    {"text": "Write a function to double a number.", "test_list": ["assert twice(2) == 4", "assert twice(0) == 0"]},
    {
        "prompt": "Write a function that takes a root.", "test_imports": ["import math"],
        "test_list": ["assert math.isclose(root(4), 2)", "assert math.isclose(root(9), 3)"],
    },
]  # fmt: skip
HUMAN_EVAL = {
    "task_id": "HumanEval/0", "entry_point": "above",
    "prompt": "from typing import List\n\n\ndef low() -> int:\n    return 1\n\n\n"
              'def above(xs: List[int]) -> List[int]:\n    """Above low().\n    >>> above([2])\n    [2]\n    """\n',
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == [2]\n"
            "    assert candidate([low()]) == []\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(bubblewrap: None) -> Code:
    env = make_environment(EnvSection(name="code", args={"seconds": 10, "pool": 1}))
    assert isinstance(env, Code)
    return env


@pytest.fixture
async def env(made: Code) -> AsyncIterator[Code]:
    yield made
    await made.close()


def _block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nThat is all."


async def _play(env: Code, task: Task, *turns: str) -> Trajectory:
    driver = make_driver(ScriptedEngine(turns), env)
    return await driver.drive(driver.request(task, 0))


def test_the_kinds_are_many_and_their_text_says_it_all() -> None:
    assert len(KINDS) >= 20
    assert len({name for kind in (*KINDS, *UNSEEN) for name in kind.names}) == sum(
        len(kind.names) for kind in (*KINDS, *UNSEEN)
    )
    for kind in (*KINDS, *UNSEEN):
        parameters = kind.draw(Random(3))
        asked = kind.asked.format(**parameters)
        assert all(str(value) in asked for value in parameters.values()), kind.name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("split", SPLITS)
def test_problems_are_stable_varied_and_no_constant_passes(split: str) -> None:
    seen: Counter[str] = Counter()
    for i in range(250):
        made = problem(split, i)
        seen[made.kind] += 1
        assert len(made.tests) == TESTS == len({repr(arguments) for arguments, _ in made.tests})
        assert max(Counter(repr(result) for _, result in made.tests).values()) < TESTS
        assert made.entry_point in made.text
    known = {kind.name for kind in (UNSEEN if split == "kinds" else KINDS)}
    assert set(seen) == known or (split == "validation" and set(seen) < known and len(seen) > 10)
    assert problem(split, 7) == problem(split, 7) != problem(split, 7, seed=1)


def test_held_out_parameters_and_kinds_are_never_trained_on() -> None:
    def asked(split: str) -> set[str]:
        return {problem(split, i).text.partition("(")[2] for i in range(300)}

    assert not asked("train") & asked("test")
    assert not {k.name for k in KINDS} & {k.name for k in UNSEEN}
    for kind in KINDS:
        sides = Counter(is_held_out(kind.name, kind.draw(Random(i))) for i in range(200))
        assert sides[True] > 0, kind.name
        assert sides[False] > 50, kind.name


def test_it_keeps_what_training_relies_on(made: Code) -> None:
    def gold(task: Task) -> list[str]:
        return [_block(problem(task.data["split"], task.data["index"], task.data["seed"]).reference)]

    def wrong(task: Task) -> list[str]:
        return [_block(f"def {task.data['entry_point']}(*arguments):\n    return None")]

    check_environment(Code, gold, wrong, tasks=2, sessions=6)


@pytest.mark.parametrize("split", SPLITS)
async def test_a_right_function_gets_the_full_reward_and_a_wrong_one_less(env: Code, split: str) -> None:
    task = env.tasks(split)[2]
    reference = problem(split, 2).reference
    gold = await _play(env, task, _block(reference))
    assert gold.failure is None
    assert [m["role"] for m in gold.messages] == ["system", "user", "assistant"]
    assert gold.messages[0]["content"] == INSTRUCTIONS
    assert gold.rewards == {"passed": 1.0, "fraction": 1.0, "format": 1.0}
    assert (gold.finish, env.solved(gold.rewards, task)) == (FinishReason.STOP, True)
    head = reference.partition("\n")[0]
    half = f"{reference}\n{task.data['entry_point']}_right = {task.data['entry_point']}\n{head}\n"
    half += f"    return {task.data['entry_point']}_right({_names(head)}) if repr(({_names(head)},)) == "
    half += f"{task.data['tests'][0][0]!r}.__repr__() else 1 / 0"
    for wrong, passed, fraction in (
        (_block(f"{head}\n    return None"), 0.0, 0.0), (_block(half), 0.0, 1 / TESTS), (reference, 0.0, 0.0),
    ):  # fmt: skip
        played = await _play(env, task, wrong)
        assert played.failure is None
        assert (played.rewards["passed"], played.rewards["fraction"]) == (passed, fraction)
        assert not env.solved(played.rewards, task)
        assert played.reward < gold.reward


def _names(head: str) -> str:
    return head.partition("(")[2].partition(")")[0]


@pytest.mark.parametrize("split", ["test", "kinds"])
async def test_every_reference_passes_its_own_tests(env: Code, split: str) -> None:
    kinds = {kind.name for kind in (UNSEEN if split == "kinds" else KINDS)}
    for i in range(1000):
        made = problem(split, i)
        if made.kind in kinds:
            kinds.remove(made.kind)
            verdict = await env._runner.by_results(made.reference, made.entry_point, made.tests)
            assert verdict.all_passed, (made, verdict)
    assert not kinds


async def test_clean_demonstrations_are_right_and_their_trials_what_the_tool_says(env: Code) -> None:
    tool = Python(pool=1)
    passed: Counter[str] = Counter()
    for style in ("clean", "plain", "careless"):
        for task in env.tasks("train")[:8]:
            messages = env.demonstrate(task, Random(task.id), style)
            session = Session("s", task, Random(0), 1e9, messages)
            rewards = await env.calc_reward(session)
            passed[style] += env.solved(rewards, task)
            if style == "clean":
                await tool.create(session)
                code = messages[0]["tool_calls"][0]["function"]["arguments"]["code"]  # type: ignore[index]
                assert (await tool.execute(session, code=code)).text == messages[1]["content"]
                await tool.release(session)
    await tool.close()
    assert passed["clean"] == passed["plain"] == 8
    assert 1 <= passed["careless"] <= 6


async def test_the_tool_and_the_test_runner_see_nothing_of_each_other(env: Code) -> None:
    """What a model leaves in its interpreter does not help it in the tests."""
    task, tool = env.tasks("train")[2], Python(pool=1)
    made = problem("train", 2)
    name = made.entry_point
    turns = [call("python", code=f"{made.reference}\n1 + 1"), _block(f"kept = {name}\n{name} = kept")]
    driver = make_driver(ScriptedEngine(turns), env, [tool])
    played = await driver.drive(driver.request(task, 0))
    await tool.close()
    assert played.messages[-2]["content"] == "2"
    assert played.rewards == {"passed": 0.0, "fraction": 0.0, "format": 1.0}


async def test_a_runner_that_cannot_serve_fails_the_request_and_pays_nothing(
    env: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> None:
        raise InfrastructureError("the sandbox does not start")

    monkeypatch.setattr(env._sandbox, "open", away)
    played = await _play(env, env.tasks("train")[2], _block(problem("train", 2).reference))
    assert played.failure is not None
    assert (played.failure.boundary, played.rewards) == (Boundary.REWARD, {})
    assert "the sandbox does not start" in played.failure.message


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\ndef f(x):\n    return 1\n```", True),
        ("```\nf = lambda x: 1\n```", True),
        ("```py\nimport g\ndef f(x): pass\n```\nand\n```text\ndef f\n```", True),
        ("```python\ndef f(x):\n    return 1", False),
        ("def f(x):\n    return 1", False),
        ("```python\ndef ff(x):\n    return 1\n```", False),
        ("```python def f(x): return 1```", False),
        ("", False),
    ],
)
def test_the_answer_is_a_closed_block_that_defines_the_function(text: str, found: bool) -> None:
    assert (find_solution(text, "f") is not None) is found


def test_of_several_answers_the_last_counts() -> None:
    text = "```python\ndef f(x): return 1\n```\nNo:\n```python\ndef f(x): return 2\n```\nUse:\n```python\nf(1)\n```"
    assert find_solution(text, "f") == "def f(x): return 2\n"


async def test_rows_of_mbpp_and_humaneval_are_tested_by_their_own_tests(tmp_path: Path, made: Code) -> None:
    write_lines(tmp_path / "train.jsonl", [*MBPP, HUMAN_EVAL])
    env = Code(source=str(write_lines(tmp_path / "test.jsonl", MBPP[:1])), pool=1)
    assert (env.splits, len(env.tasks("train")), len(env.tasks("test"))) == (("test",), 3, 1)
    twice, root, above = env.tasks("train")
    assert "assert twice(2) == 4" in twice.data["question"]
    assert "twice(0)" not in twice.data["question"]
    for task, right, wrong in (
        (twice, "def twice(x):\n    return 2 * x", "def twice(x):\n    return 4"),
        (root, "def root(x):\n    return x ** 0.5", "def root(x):\n    return 2.0"),
        (above, "def above(xs: List[int]):\n    return [x for x in xs if x > low()]", "def above(xs):\n    return [2]"),
    ):
        gold, less = await _play(env, task, _block(right)), await _play(env, task, _block(wrong))
        assert (gold.failure, less.failure) == (None, None)
        assert gold.rewards == {"passed": 1.0, "fraction": 1.0, "format": 1.0}
        assert (less.rewards["passed"], less.rewards["format"]) == (0.0, 1.0)
    await env.close()
    with pytest.raises(UserError, match="generated tasks only"):
        env.demonstrate(twice, Random(0), "clean")


async def test_a_row_whose_tests_check_nothing_fails_its_request_by_name(tmp_path: Path, made: Code) -> None:
    row = {"text": "?", "entry_point": "f", "test_list": ["assert True"]}
    write_lines(tmp_path / "train.jsonl", [row])
    env = Code(source=str(write_lines(tmp_path / "test.jsonl", [row])), pool=1)
    played = await _play(env, env.tasks("test")[0], _block("def f(): pass"))
    await env.close()
    assert played.failure is not None
    assert "test.jsonl" in played.failure.message
    assert "never call f" in played.failure.message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "neither 'test_list' nor 'test'; it has 'question'"),
        ({"text": "?", "test_list": []}, "'test_list': contains no test"),
        ({"text": "?", "test_list": "assert f(1)"}, "'test_list': expected a list of texts"),
        ({"text": "?", "test_list": ["assert f(1"]}, "'test_list': is no Python"),
        ({"text": "?", "test_list": ["assert f(1) == g(1)"]}, r"do not call one function \(f, g\)"),
        ({"text": " ", "test_list": ["assert f(1)"]}, "'text': expected text"),
        ({"prompt": "def f(): ...", "test": "def check(c): pass"}, "no field 'entry_point'"),
    ],
)
def test_a_row_that_cannot_be_tested_is_one_clear_line(row: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"rows.jsonl, line 3.*{message}"):
        read_row(row, "rows.jsonl, line 3")


def test_the_name_of_the_function_is_what_the_tests_call() -> None:
    row = {"text": "?", "test_setup_code": "def h(x): return x", "test_list": ["assert h(f(1)) == sorted([1])", "f(2)"]}
    assert read_row(row, "here").entry_point == "f"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"args": {"backend": "docker"}}, "docker"),
        ({"args": {"seconds": 0}}, "must be above 0"),
        ({"source": "nowhere.jsonl"}, "there is no file nowhere.jsonl"),
    ],
)
def test_wrong_settings_are_one_clear_line(made: Code, section: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_environment(EnvSection(name="code", **section))
