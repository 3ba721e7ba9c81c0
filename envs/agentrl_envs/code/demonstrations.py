"""How a function is written, as chat messages: tried with the tool `python` first, or carelessly.

A tool result in a demonstration is what the tool answers to that call: the value of its last line.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from random import Random

from agentrl.plugins.types import FunctionCall, Message
from agentrl_envs.code.answer import FENCE
from agentrl_envs.code.generate import Problem


@dataclass(frozen=True)
class Style:
    """Relative frequencies of the ways to answer."""

    tried: float = 0.0
    untried: float = 0.0
    mistaken: float = 0.0
    no_block: float = 0.0


STYLES = {
    "clean": Style(tried=1.0),
    "plain": Style(untried=1.0),
    "careless": Style(tried=0.25, untried=0.25, mistaken=0.35, no_block=0.15),
}


def demonstrate(problem: Problem, rng: Random, style: str) -> list[Message]:
    """The messages after the question. Raises KeyError for a style that is not in `STYLES`."""
    mix = STYLES[style]
    ways = [f.name for f in fields(mix)]
    way = rng.choices(ways, [getattr(mix, w) for w in ways])[0]
    return _WAYS[way](problem, rng)


def _tried(problem: Problem, rng: Random) -> list[Message]:
    """One call of the tool with the function and a call of it, then the answer."""
    arguments, result = min(problem.tests, key=lambda test: len(repr(test)))
    code = f"{problem.reference}\n{problem.entry_point}({', '.join(map(repr, arguments))})"
    function: FunctionCall = {"name": "python", "arguments": {"code": code}}
    trial: Message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [trial, {"role": "tool", "content": repr(result)}, *_untried(problem, rng)]


def _untried(problem: Problem, rng: Random) -> list[Message]:
    return [_say(f"{FENCE}python\n{problem.reference}\n{FENCE}")]


def _mistaken(problem: Problem, rng: Random) -> list[Message]:
    """A number of the solution is off, or what it returns is forgotten."""
    head, line, body = problem.reference.partition("\n")
    places = list(re.finditer(r"\d+", body))
    if not places:
        wrong = body.replace("return ", "", 1)
    else:
        at = rng.choice(places)
        wrong = f"{body[: at.start()]}{int(at[0]) + rng.choice((1, 2))}{body[at.end() :]}"
    return [_say(f"{FENCE}python\n{head}{line}{wrong}\n{FENCE}")]


def _no_block(problem: Problem, rng: Random) -> list[Message]:
    return [_say(problem.reference)]


_WAYS: dict[str, Callable[[Problem, Random], list[Message]]] = {
    "tried": _tried,
    "untried": _untried,
    "mistaken": _mistaken,
    "no_block": _no_block,
}


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}
