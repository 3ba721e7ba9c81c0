"""The grading tool: its four hooks, the penalty for asking again, and who sees the truth."""

import asyncio
import random

import pytest
from agentrl_tools.calc_gsm8k_reward import CalcGsm8kReward

from agentrl import ArgumentError, Session, Task
from agentrl.plugins.registry import make_tool
from agentrl.recipe.sections.env import ToolSection


def play(tool, truth, *answers):
    """The responses to `answers` and the final reward."""

    async def run():
        session = Session("r/0", Task("t", {}), random.Random(0), 0.0)
        await tool.create(session, ground_truth=truth)
        responses = [await tool.execute(session, **tool.check({"answer": a})) for a in answers]
        reward = await tool.calc_reward(session)
        await tool.release(session)
        assert session.state is None
        return [(r.text, r.reward) for r in responses], reward

    return asyncio.run(run())


RIGHT, WRONG = "reward: 1.0", "reward: 0.0"


@pytest.mark.parametrize(
    ("truth", "answers", "responses", "reward"),
    [
        ("72", ["72"], [(RIGHT, None)], 1.0),
        ("72", [], [], 0.0),
        ("72", ["71"], [(WRONG, None)], 0.0),
        ("72", ["71", "72"], [(WRONG, None), (RIGHT, None)], 1.0),
        ("72", ["71", "70"], [(WRONG, None), (WRONG, -0.05)], 0.0),
        ("72", ["72", "72"], [(RIGHT, None), (RIGHT, -0.05)], 1.0),
        ("72", ["72", "71"], [(RIGHT, None), (WRONG, -0.05)], 0.0),
        ("1,234", ["$1234.00", "#### 1,234"], [(RIGHT, None), (RIGHT, -0.05)], 1.0),
        (18, [18], [(RIGHT, None)], 1.0),
        ("She sells 9 * 2 = 18.\n#### 18", ["18 dollars"], [(RIGHT, None)], 1.0),
        ("5", ["5 or 6", "no idea", ""], [(WRONG, None), (WRONG, -0.05), (WRONG, -0.05)], 0.0),
    ],
)
def test_it_grades_and_discourages_asking_again(truth, answers, responses, reward):
    assert play(CalcGsm8kReward(), truth, *answers) == (responses, reward)


def test_the_penalty_is_an_argument_of_the_recipe():
    tool = make_tool(ToolSection(name="calc_gsm8k_reward", args={"penalty": -0.2}))
    assert play(tool, "1", "2", "3")[0][1] == (WRONG, -0.2)
    with pytest.raises(ValueError, match="0 or less"):
        CalcGsm8kReward(penalty=0.1)


@pytest.mark.parametrize("given", [{}, {"ground_truth": None}, {"ground_truth": "many"}])
def test_a_task_without_a_truth_is_the_datas_fault(given):
    session = Session("r/0", Task("t", {}), random.Random(0), 0.0)
    with pytest.raises(ValueError, match=r"ground_truth|no answer"):
        asyncio.run(CalcGsm8kReward().create(session, **given))


def test_a_missing_answer_is_the_models_fault():
    with pytest.raises(ArgumentError, match="argument 'answer' is missing"):
        CalcGsm8kReward().check({})


def test_requests_do_not_share_what_they_asked():
    async def run():
        tool = CalcGsm8kReward()
        first, second = (Session(f"r/{i}", Task("t", {}), random.Random(0), 0.0) for i in range(2))
        await tool.create(first, ground_truth="1")
        await tool.create(second, ground_truth="2")
        await tool.execute(first, answer="1")
        await tool.execute(second, answer="1")
        return await tool.calc_reward(first), await tool.calc_reward(second)

    assert asyncio.run(run()) == (1.0, 0.0)
