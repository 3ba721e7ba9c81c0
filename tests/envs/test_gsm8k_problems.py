"""The generator: reproducible anywhere, right by construction, and disjoint where it says so."""

import subprocess
import sys

import pytest
from agentrl_envs.gsm8k.problems import KINDS, SPLITS, problem
from agentrl_envs.gsm8k.problems.draw import Draw
from agentrl_envs.gsm8k.problems.expression import parse, show, steps
from agentrl_envs.gsm8k.problems.generate import is_held_out
from agentrl_envs.gsm8k.problems.grammar import count, expand, has_held_out
from agentrl_envs.gsm8k.problems.grammar import parse as parse_grammar
from hypothesis import given
from hypothesis import strategies as st

splits = st.sampled_from(SPLITS)
indices = st.integers(0, 10**9)


@given(splits, indices, st.integers(0, 1000))
def test_a_problem_is_worked_right_in_whole_steps(split: str, index: int, seed: int) -> None:
    made = problem(split, index, seed)
    assert 2 <= len(made.steps) <= 4
    assert all(result >= 0 for _, result in made.steps)
    for text, result in made.steps:
        assert eval(text) == result
    assert eval(show(made.expression)) == made.answer == made.steps[-1][1]
    assert made.question.endswith("?")
    assert not set("{}[]<>|^") & set(made.question)
    assert made == problem(split, index, seed)


@given(splits, indices)
def test_the_text_holds_the_numbers(split: str, index: int) -> None:
    made = problem(split, index)
    said = "".join(c if c.isdigit() else " " for c in made.question).split()
    assert set(map(str, dict(made.numbers).values())) <= set(said)


@given(splits.filter(lambda s: s != "large"), indices)
def test_train_and_held_out_share_no_numbers(split: str, index: int) -> None:
    made = problem(split, index)
    assert is_held_out(made.kind, dict(made.numbers)) == (split != "train")


@pytest.mark.slow
def test_large_numbers_are_larger_than_any_of_training() -> None:
    largest: dict[tuple[str, str], int] = {}
    for index in range(6_000):
        made = problem("train", index)
        for name, number in made.numbers:
            largest[made.kind, name] = max(largest.get((made.kind, name), 0), number)
    for index in range(600):
        made = problem("large", index)
        assert any(number > largest[made.kind, name] for name, number in made.numbers), made


def test_a_new_process_makes_the_same_problems() -> None:
    program = "from agentrl_envs.gsm8k.problems import *\nprint([problem(s, 12345, 7).question for s in SPLITS])"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert made.strip() == str([problem(s, 12345, 7).question for s in SPLITS])


def test_enough_kinds_of_enough_phrasings() -> None:
    assert len(KINDS) >= 20
    assert len({k.name for k in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert count(kind.grammar) >= 24
        assert has_held_out(kind.grammar), kind.name


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_a_held_out_phrasing_is_never_seen_in_training(kind: object) -> None:
    seen = {expand(kind.grammar, Draw(f"a{i}"), held_out=False) for i in range(400)}
    unseen = {expand(kind.grammar, Draw(f"b{i}"), held_out=True) for i in range(400)}
    assert not seen & unseen
    assert len(seen) > 10


def test_grammar_notation() -> None:
    grammar = parse_grammar("[a|b<c>|^d] e", {"c": "[1|2]"})
    assert count(grammar) == 3
    assert {expand(grammar, Draw(str(i)), False) for i in range(50)} == {"a e", "b1 e", "b2 e"}
    assert {expand(grammar, Draw(str(i)), True) for i in range(50)} == {"d e"}


@pytest.mark.parametrize("text", ["[a|b", "a]", "<none>", "[^a]", "<open"])
def test_grammar_mistakes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"bracket|closed|rule|held out"):
        parse_grammar(text, {})


def test_expressions() -> None:
    tree = parse("(n + 2)*a - m/k", {"n": 3, "a": 4, "m": 9, "k": 3})
    assert show(tree) == "(3+2)*4-9/3"
    assert steps(tree) == (("3+2", 5), ("5*4", 20), ("9/3", 3), ("20-3", 17))
    assert show(parse("n - (m - a)", {"n": 9, "m": 5, "a": 1})) == "9-(5-1)"
    with pytest.raises(ArithmeticError):
        steps(parse("n/m", {"n": 7, "m": 2}))
    with pytest.raises(ValueError, match="no split"):
        problem("dev", 0)
