"""How a function is written, as chat messages: tried with the tool `python` first, or carelessly.

A tool result in a demonstration is what the tool answers to that call: the value of its last line.
"""

import re
from collections.abc import Callable
from random import Random

from agentrl.plugins.types import Message
from agentrl_envs.code.answer import FENCE
from agentrl_envs.code.generate import Problem
from agentrl_envs.conversation import Styles, assistant, draw_way, tool_turn


def demonstrate(problem: Problem, rng: Random, style: str) -> list[Message]:
    """The messages after the question. Raises KeyError for a style that is not in `STYLES`."""
    return draw_way(STYLES[style], rng)(problem, rng)


def _tried(problem: Problem, rng: Random) -> list[Message]:
    """Call the tool with the function and a call of it, then the answer."""
    arguments, result = min(problem.tests, key=lambda test: len(repr(test)))
    code = f"{problem.reference}\n{problem.entry_point}({', '.join(map(repr, arguments))})"
    return [*tool_turn("python", {"code": code}, repr(result)), *_untried(problem, rng)]


def _untried(problem: Problem, rng: Random) -> list[Message]:
    return [assistant(f"{FENCE}python\n{problem.reference}\n{FENCE}")]


def _mistaken(problem: Problem, rng: Random) -> list[Message]:
    """Answer with a number of the solution changed, or its `return` left out."""
    head, line, body = problem.reference.partition("\n")
    places = list(re.finditer(r"\d+", body))
    if not places:
        wrong = body.replace("return ", "", 1)
    else:
        at = rng.choice(places)
        wrong = f"{body[: at.start()]}{int(at[0]) + rng.choice((1, 2))}{body[at.end() :]}"
    return [assistant(f"{FENCE}python\n{head}{line}{wrong}\n{FENCE}")]


def _no_block(problem: Problem, rng: Random) -> list[Message]:
    return [assistant(problem.reference)]


STYLES: Styles[Callable[[Problem, Random], list[Message]]] = {
    "clean": {_tried: 1.0},
    "plain": {_untried: 1.0},
    "careless": {_tried: 0.25, _untried: 0.25, _mistaken: 0.35, _no_block: 0.15},
}
