"""The reward functions that only look: match, length_penalty, relative_length; and what they read a text by."""

from typing import Any

import pytest
from agentrl_tools.rewards.length_penalty import LengthPenalty
from agentrl_tools.rewards.match import Match
from agentrl_tools.rewards.relative_length import RelativeLength
from agentrl_tools.rewards.truth import marked, truth_of

from agentrl import Sample, Task
from agentrl.plugins.rewards import make_rewards
from agentrl.recipe.sections.env import RewardsSection


def sample(said: str = "", truth: Any = "72", tokens: int = 1, **rewards: float) -> Sample:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": said})
    return Sample(Task("t-1", {"ground_truth": truth}), messages, rewards, tokens=tokens)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so #### 72\nbye", " 72"),
        ("\\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("<answer> Paris\n</answer>", " Paris\n"),
        ("\\boxed{1} or #### 2", " 2"),
        ("#### 1 or <answer>2</answer> or \\boxed{3}", "3"),
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("\\boxed{never closed", None),
        ("$\\boxed 72$ it is", " 72"),
        ("\\fbox{\\boxed{a}b}", "\\boxed{a}b"),
        ("</answer> <answer>", None),
        ("none", None),
    ],
)
def test_the_last_mark_is_the_answer(text: str, found: str | None) -> None:
    assert marked(text) == found


def test_marks_are_found_in_linear_time() -> None:
    for piece in ("<answer>", "\\boxed{", "####", "</answer>", "{"):
        assert marked(piece * 200_000) is None or piece == "####"


@pytest.mark.parametrize(
    ("said", "truth", "score"),
    [
        ("#### Paris.", "paris", 1.0),
        ("It is <answer>The  Beatles</answer>", "beatles", 1.0),
        ("Paris", "Paris", 1.0),
        ("It is Paris", "Paris", 0.0),
        ("#### Paris #### Rome", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("#### 1,234.0", "1234", 1.0),
        ("#### 1234", 1234, 1.0),
        ("#### 12", "1234", 0.0),
        ("#### 5 or 6", "5", 0.0),
        ("#### B", ["A", "B"], 1.0),
        ("#### C", ["A", "B"], 0.0),
        ("#### 18", "16-3-4=9, 9*2=18\n#### 18", 1.0),
        ("#### a", "A", 1.0),
        ("#### 3*24", "324", 0.0),
        ("#### ٧٢", "72", 1.0),
        ("#### 1,2,3", "1,2,3", 1.0),
        ("#### 123", "1,2,3", 0.0),
        ("#### 5 kg", ".5 kg", 0.0),
        ("#### .5 kg", ".5 kg", 1.0),
    ],
)
async def test_match(said: str, truth: Any, score: float) -> None:
    assert await Match().score(sample(said, truth)) == score


async def test_match_by_number_by_pattern_and_by_field() -> None:
    assert await Match("numeric").score(sample("#### $72 apples")) == 1.0
    assert await Match("numeric").score(sample("no number")) == 0.0
    with pytest.raises(ValueError, match="is not a single number"):
        await Match("numeric").score(sample("#### 1", "Paris"))
    assert await Match(pattern=r"final: (\w+)").score(sample("final: 1, final: 72!")) == 1.0
    assert await Match(pattern=r"final: (\w+)").score(sample("72")) == 0.0
    with pytest.raises(ValueError, match="not a regular expression"):
        Match(pattern="(")
    assert await Match(pattern=r"(?:a|a)*: (\w+)").score(sample("a" * 40 + "; 72")) == 0.0
    nested = Task("t-1", {"reward_model": {"ground_truth": "7"}, "gold": "8"})
    assert truth_of(nested) == "7"
    assert truth_of(nested, "gold") == "8"
    with pytest.raises(ValueError, match="task t-1 has no ground truth: none of other in its data"):
        truth_of(nested, "other")
    with pytest.raises(ValueError, match="neither text nor a number"):
        await Match().score(sample("1", ["1", {"a": 2}]))


@pytest.mark.parametrize(("tokens", "score"), [(0, 0.0), (80, 0.0), (90, -0.5), (99, -0.95), (100, -1.0), (1000, -1.0)])
async def test_length_penalty_falls_over_the_buffer(tokens: int, score: float) -> None:
    assert await LengthPenalty(limit=100, buffer=20).score(sample(tokens=tokens)) == pytest.approx(score)


def test_a_length_penalty_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="buffer must be above 0"):
        LengthPenalty(limit=100, buffer=101)


async def test_relative_length_pays_the_short_right_ones() -> None:
    group = [sample(tokens=10, answer=1.0), sample(tokens=20, answer=1.0), sample(tokens=30, answer=1.0)]
    assert await RelativeLength().score(group) == [0.5, 0.0, -0.5]
    wrong = [sample(tokens=10, answer=0.0), sample(tokens=30, answer=0.0), sample(tokens=15, answer=1.0)]
    assert await RelativeLength().score(wrong) == [0.0, -0.5, 0.25]
    assert await RelativeLength().score([sample(tokens=5, answer=1.0)] * 3) == [0.0, 0.0, 0.0]
    told = [sample(tokens=10, answer=1.0, tool=-0.5), sample(tokens=30, answer=1.0, tool=-0.5)]
    assert await RelativeLength().score(told) == [0.0, -0.5]
    assert await RelativeLength(part="answer").score(told) == [0.5, -0.5]
    with pytest.raises(ValueError, match="no reward part 'anwser'; there are answer, tool"):
        await RelativeLength(part="anwser").score(told)


async def test_a_recipe_names_them() -> None:
    section = RewardsSection.model_validate(
        {
            "weights": {"length_penalty": 0.5},
            "functions": [
                "match",
                {"name": "match", "part": "number", "args": {"mode": "numeric"}},
                {"name": "length_penalty", "args": {"limit": 100, "buffer": 10}},
                "relative_length",
            ],
        }
    )
    made = make_rewards(section)
    assert set(made.samples) == {"match", "number", "length_penalty"}
    assert set(made.groups) == {"relative_length"}
    assert await made.samples["number"].score(sample("#### 72.0")) == 1.0
