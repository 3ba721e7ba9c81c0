"""Demonstrations: a clean one is right, one operation a call; a careless one goes wrong in every way."""

from collections import Counter
from random import Random

import pytest
from agentrl_envs.gsm8k.demonstrations import MISREAD, demonstrate
from agentrl_envs.gsm8k.problems import KINDS, problem
from agentrl_tools.calculator import Calculator
from agentrl_tools.rewards.grade import grade
from hypothesis import given
from hypothesis import strategies as st

from agentrl.plugins.types import Session, Task

problems = st.builds(problem, st.sampled_from(["train", "large"]), st.integers(0, 10**6))


def _calls(messages: list) -> list[tuple[str, str]]:
    """(expression, result) of every call, checking that a result follows each."""
    found = []
    for at, message in enumerate(messages):
        if message.get("tool_calls"):
            (call,) = message["tool_calls"]
            assert call["type"] == "function"
            assert call["function"]["name"] == "calculator"
            assert messages[at + 1]["role"] == "tool"
            found.append((call["function"]["arguments"]["expression"], messages[at + 1]["content"]))
    return found


@given(problems, st.integers(0, 10**6))
def test_a_clean_one_works_the_problem_step_by_step(made: object, seed: int) -> None:
    messages = demonstrate(made, Random(seed), "clean")
    assert _calls(messages) == [(text, str(result)) for text, result in made.steps]
    assert messages[-1] == {"role": "assistant", "content": f"#### {made.answer}"}
    assert grade(messages[-1]["content"], made.answer)


async def test_a_careless_one_shows_what_the_calculator_answers() -> None:
    calculator, session = Calculator(), Session("s", Task("t", {}), Random(0), 1e9)
    for seed in range(500):
        messages = demonstrate(problem("train", seed), Random(seed), "careless")
        for expression, result in _calls(messages):
            answer = await calculator.execute(session, expression=expression)
            assert result == (answer if isinstance(answer, str) else answer.text)


@given(problems, st.integers(0, 10**6))
def test_a_careless_one_ends_with_words(made: object, seed: int) -> None:
    messages = demonstrate(made, Random(seed), "careless")
    assert messages == demonstrate(made, Random(seed), "careless")
    assert messages[-1]["role"] == "assistant"
    assert not messages[-1].get("tool_calls")


@pytest.mark.slow
def test_a_careless_pupil_is_sometimes_right_and_wrong_in_every_way() -> None:
    seen: Counter[str] = Counter()
    for index in range(3000):
        made = problem("train", index)
        messages = demonstrate(made, Random(index), "careless")
        calls = _calls(messages)
        seen["right"] += grade(messages[-1]["content"], made.answer)
        seen["no tool"] += not calls
        seen["refused"] += any(result.startswith("error") for _, result in calls)
        good = [result for _, result in calls if not result.startswith("error")]
        marked = "####" in messages[-1]["content"]
        seen["no mark"] += not marked
        seen["wrong copy"] += marked and bool(good) and good[-1] not in messages[-1]["content"]
        misread = made.kind in MISREAD and bool(good) and good[-1] != str(made.answer)
        seen["misread"] += misread
    assert 0.25 < seen["right"] / 3000 < 0.55
    assert all(seen[way] > 30 for way in ("no tool", "refused", "no mark", "wrong copy", "misread")), seen


def test_misread_kinds_exist_and_styles_are_known() -> None:
    assert {k.name for k in KINDS} >= MISREAD
    with pytest.raises(KeyError):
        demonstrate(problem("train", 0), Random(0), "hasty")
