"""Charts and questions about them: what is drawn, what a crop shows, what is paid, and how it is worked."""

import json
from collections import Counter
from random import Random

import numpy as np
import pytest
from agentrl_envs.chart_qa.chart import HEIGHT, KINDS, WIDTH
from agentrl_envs.chart_qa.environment import ChartQa, cropped, is_right
from agentrl_envs.chart_qa.questions import Question, ask
from agentrl_tools.calculator import Calculator

from agentrl.errors import UserError
from agentrl.plugins.types import Session
from agentrl.testing import call, check_environment

ENV = ChartQa(width=128)
WHOLE = {"left": 0, "top": 0, "right": 100, "bottom": 100}


def gold(task):
    """The turns of a demonstration."""
    said = [m for m in ENV.demonstrate(task, Random(0), "clean") if m["role"] == "assistant"]
    calls = [m["tool_calls"][0]["function"] for m in said[:-1]]
    return [*(call(c["name"], **c["arguments"]) for c in calls), said[-1]["content"]]


async def begun(task):
    session = Session("s", task, Random(0), 0.0)
    (opening,) = await ENV.create(session)
    return Session("t", task, Random(0), 0.0, environment=session), opening


@pytest.mark.slow
def test_it_keeps_the_contract_of_environments():
    check_environment(ENV, gold, lambda task: "#### nothing", tools=["calculator"], tasks=2, sessions=4,
                      limits={"max_turns": 9, "max_tool_calls": 9})  # fmt: skip


def test_charts_of_all_kinds_and_every_question_can_be_worked():
    seen = Counter()
    for split in ("train", "test", "validation"):
        for task in ENV.tasks(split)[:20]:
            chart, question = ENV._drafted(task.data["split"], task.data["index"])
            seen[chart.kind] += 1
            numbers = [chart.value((s, i)) for s in range(len(chart.series)) for i in range(len(chart.labels))]
            assert len(set(numbers)) == len(numbers)
            assert min(numbers) >= 5
            assert chart.kind != "pie" or sum(numbers) == 100
            assert all(str(chart.value(mark)) in "".join(question.steps) for mark in question.marks if question.steps)
            said = ENV.demonstrate(task, Random(1), "clean")
            assert is_right(said[-1]["content"], question)
            assert json.dumps(dict(task.data))
    assert set(seen) == set(KINDS)


async def test_the_steps_of_a_demonstration_are_what_the_calculator_answers():
    calculator, checked = Calculator(), 0
    for task in ENV.tasks("train")[:30]:
        session, _ = await begun(task)
        turns = ENV.demonstrate(task, Random(1), "clean")
        for turn, result in zip(turns[:-1:2], turns[1:-1:2], strict=True):
            function = turn["tool_calls"][0]["function"]
            if function["name"] == "calculator":
                assert await calculator.execute(session, **function["arguments"]) == result["content"]
            else:
                shown = (await ENV.tools()[0].execute(session, **function["arguments"])).images[0]
                assert shown.tobytes() == result["content"][0]["image"].tobytes()
            checked += 1
    assert checked > 30


@pytest.mark.parametrize("kind", KINDS)
def test_the_box_of_a_number_holds_its_print(kind):
    """Without its number a chart differs from itself in that box alone."""
    task = next(t for t in ENV.tasks("train") if t.data["chart"] == kind)
    chart, _ = ENV._drafted("train", task.data["index"])
    from agentrl_envs.chart_qa import chart as drawing

    drawn, left_out = np.asarray(chart.picture()), (0, 1)
    number = drawing._draw_number
    try:
        drawing._draw_number = lambda draw, c, mark: None if mark == left_out else number(draw, c, mark)
        without = np.asarray(drawing._drawn.__wrapped__(chart))
    finally:
        drawing._draw_number = number
    rows, columns = np.nonzero((drawn != without).any(axis=2))
    left, top, right, bottom = chart.box(left_out)
    assert len(rows) > 50
    assert WIDTH * left / 100 <= columns.min() <= columns.max() < WIDTH * right / 100
    assert HEIGHT * top / 100 <= rows.min() <= rows.max() < HEIGHT * bottom / 100


async def test_a_crop_is_enlarged_and_a_wrong_one_told_in_words():
    session, opening = await begun(ENV.tasks("test")[0])
    (crop,) = ENV.tools()
    whole = opening["content"][0]["image"]
    assert whole.size == (128, 96)
    (same,) = (await crop.execute(session, **WHOLE)).images
    assert same.tobytes() == whole.tobytes()
    (part,) = (await crop.execute(session, left=10, top=20, right=60, bottom=40)).images
    assert part.size == (128, round(128 * 0.75 * 20 / 50))
    (tall,) = (await crop.execute(session, left=0, top=0, right=5, bottom=100)).images
    assert tall.size[1] == 96
    for wrong, why in (
        ({"right": 140}, "right is 140: it must be 0 to 100"),
        ({"top": -1}, "top is -1"),
        ({"left": 98}, "right must be at least 5 more than left"),
        ({"left": 60, "right": 40}, "right must be at least 5 more than left"),
    ):
        said = await crop.execute(session, **WHOLE | wrong)
        assert said.error
        assert not said.images
        assert why in said.text


@pytest.mark.parametrize(
    ("said", "answer", "tolerance", "right"),
    [
        ("so\n#### 24", "24", 0, True), ("#### 24.4", "24", 0, False), ("24", "24", 0, False),
        ("#### 24.4%", "24.039", 0.5, True), ("#### 24.6", "24.039", 0.5, False), ("#### oslo.", "Oslo", 0, True),
        ("Oslo", "Oslo", 0, False), ("#### Oslo or Rome", "Oslo", 0, False), ("####", "Oslo", 0, False),
    ],
)  # fmt: skip
def test_what_is_paid(said, answer, tolerance, right):
    assert is_right(said, Question("?", answer, (), (), tolerance)) == right


def test_careless_demonstrations_guess_and_arguments_are_checked():
    said = [ENV.demonstrate(task, Random(task.id), "careless") for task in ENV.tasks("train")[:60]]
    right = [is_right(turns[-1]["content"], ENV._drafted("train", i)[1]) for i, turns in enumerate(said)]
    assert 0.55 < np.mean(right) < 0.9
    for wrong in ({"width": 20}, {"width": 5000}):
        with pytest.raises(UserError):
            ChartQa(**wrong)


def test_the_same_seed_draws_the_same_pixels():
    charts = [ChartQa()._drafted("test", 7)[0] for _ in range(2)]
    first, second = (cropped(chart, (0, 0, 100, 100), 200).tobytes() for chart in charts)
    assert first == second
    assert ask(charts[0], Random(3)) == ask(charts[1], Random(3))
