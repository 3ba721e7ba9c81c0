"""One kind of problem: what numbers it has, how they are computed with, and how it is said."""

from collections.abc import Callable
from dataclasses import dataclass

from agentrl_envs.gsm8k.problems import grammar
from agentrl_envs.gsm8k.problems.draw import Draw
from agentrl_envs.gsm8k.problems.words import RULES


@dataclass(frozen=True)
class Kind:
    """`formula` uses the names that `draw` gives; every step of it is a whole number and none is negative."""

    name: str
    formula: str
    draw: Callable[[Draw], dict[str, int]]
    grammar: grammar.Sequence


def kind(name: str, formula: str, draw: Callable[[Draw], dict[str, int]], text: str, **rules: str) -> Kind:
    """`text` in the notation of `grammar`; `rules` are the kind's own, beside the shared ones."""
    parsed = grammar.parse(text, {**RULES, **rules})
    if not grammar.has_held_out(parsed):
        raise ValueError(f"kind {name!r} holds no phrasing out")
    return Kind(name, formula, draw, parsed)
