"""How a problem is worked, as chat messages: one operation a call, carefully or the way a careless pupil does it.

Every tool result in a demonstration is what the one-operation calculator would have answered to that call.
"""

from collections.abc import Callable
from random import Random

from agentrl_tools.calculator import Calculator, CalculatorError, evaluate, written

from agentrl.plugins.types import Message
from agentrl_envs.conversation import Styles, assistant, draw_way, tool_turn
from agentrl_envs.gsm8k.problems import Problem
from agentrl_envs.gsm8k.problems.expression import Expression, show, steps

MISREAD = frozenset({"times_both", "more_both", "share_rest", "market_stall", "two_shifts", "twice_as_many_gone"})
"""Kinds of problems that a careless pupil systematically misreads."""

MISREAD_SHARES = {"clean": 0.0, "careless": 0.8}
"""By style: the share of the problems of `MISREAD` that are misread."""

_LIMIT = Calculator().limit
_CONFUSED = {"+": "-", "-": "+", "*": "+", "/": "-"}


def demonstrate(problem: Problem, rng: Random, style: str) -> list[Message]:
    """The messages after the question. Raises KeyError for a style that is not in `STYLES`."""
    way = draw_way(STYLES[style], rng)
    tree = problem.expression
    if problem.kind in MISREAD and rng.random() < MISREAD_SHARES[style]:
        tree = _misread(tree)
    return way(problem, tree, rng)


def _good(problem: Problem, tree: Expression, rng: Random) -> list[Message]:
    return [*_work(tree), _answer(steps(tree)[-1][1])]


def _no_tool(problem: Problem, tree: Expression, rng: Random) -> list[Message]:
    """Guess near the answer, seldom right."""
    off = 0 if rng.random() < 0.2 else rng.choice([-20, -10, -5, -2, -1, 1, 2, 5, 10, 20])
    return [_answer(max(0, problem.answer + off))]


def _wrong_expression(problem: Problem, tree: Expression, rng: Random) -> list[Message]:
    return _good(problem, _spoil(tree, [n for _, n in problem.numbers], rng), rng)


def _all_at_once(problem: Problem, tree: Expression, rng: Random) -> list[Message]:
    """Try one long expression, which the calculator refuses; then step by step."""
    return [*_call(show(tree)), *_good(problem, tree, rng)]


def _broken_syntax(problem: Problem, tree: Expression, rng: Random) -> list[Message]:
    """Write an expression that the calculator refuses; then work the problem, or give up."""
    slip = _call(_garbled(steps(tree)[0][0], rng))
    return [*slip, *_good(problem, tree, rng)] if rng.random() < 0.5 else [*slip, _answer(0)]


def _wrong_copy(problem: Problem, tree: Expression, rng: Random) -> list[Message]:
    digits = list(str(steps(tree)[-1][1]))
    at = rng.randrange(len(digits))
    digits[at] = rng.choice([d for d in "0123456789" if d != digits[at]])
    return [*_work(tree), assistant("#### " + "".join(digits))]


def _no_mark(problem: Problem, tree: Expression, rng: Random) -> list[Message]:
    return [*_work(tree), assistant(f"The answer is {steps(tree)[-1][1]}")]


STYLES: Styles[Callable[[Problem, Expression, Random], list[Message]]] = {
    "clean": {_good: 1.0},
    "careless": {
        _good: 0.42,
        _no_tool: 0.28,
        _wrong_expression: 0.13,
        _all_at_once: 0.03,
        _broken_syntax: 0.05,
        _wrong_copy: 0.04,
        _no_mark: 0.05,
    },
}


def _work(tree: Expression) -> list[Message]:
    return [message for text, _ in steps(tree) for message in _call(text)]


def _call(expression: str) -> list[Message]:
    return tool_turn("calculator", {"expression": expression}, result_of(expression))


def result_of(expression: str) -> str:
    """What the calculator answers, with one operation a call."""
    try:
        value, operations = evaluate(expression)
    except CalculatorError as error:
        return f"error: {error}"
    return written(value) if operations <= 1 else f"error: {_LIMIT}"


def _garbled(expression: str, rng: Random) -> str:
    """A slip of the pen that the calculator refuses."""
    while True:
        at = rng.randrange(1, len(expression))
        slip = expression[:at] + rng.choice("(*/)") + expression[at:] + rng.choice(["", "=", "("])
        if result_of(slip).startswith("error"):
            return slip


def _answer(value: int) -> Message:
    return assistant(f"#### {value}")


def _misread(tree: Expression) -> Expression:
    """Always the same wrong reading of a kind: the last step with another operation."""
    if isinstance(tree, int):
        return tree
    return _CONFUSED[tree[0]], tree[1], tree[2]


def _spoil(tree: Expression, numbers: list[int], rng: Random) -> Expression:
    """Another tree with whole results: the last step forgotten, an operation or a number mistaken."""
    while True:
        spoiled = _mistake(tree, numbers, rng)
        if spoiled != tree and not isinstance(spoiled, int) and _whole(spoiled):
            return spoiled


def _mistake(tree: Expression, numbers: list[int], rng: Random) -> Expression:
    if isinstance(tree, int):
        return rng.choice(numbers)
    operator, left, right = tree
    what = rng.random()
    if what < 0.25:
        return left if not isinstance(left, int) else right
    if what < 0.5:
        return rng.choice("+-*"), left, right
    if what < 0.75:
        return operator, _mistake(left, numbers, rng), right
    return operator, left, _mistake(right, numbers, rng)


def _whole(tree: Expression) -> bool:
    try:
        steps(tree)
    except ArithmeticError:
        return False
    return True
