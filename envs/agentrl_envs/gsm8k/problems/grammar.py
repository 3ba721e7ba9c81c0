"""A small notation for many phrasings of one thought.

`[a|b|c]` chooses, `<rule>` inserts a named rule, `{x}` is filled in afterwards, and an alternative that begins with
`^` is held out: it is never chosen unless asked for, and `expand(..., held_out=True)` always contains at least one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl_envs.gsm8k.problems.draw import Draw
from agentrl_envs.gsm8k.problems.words import RULES


@dataclass(frozen=True)
class Choice:
    """Alternatives: those for training, and those that are held out."""

    seen: tuple["Sequence", ...]
    """Alternatives for training."""
    unseen: tuple["Sequence", ...]
    """Alternatives that are held out."""


@dataclass(frozen=True)
class Sequence:
    """Parts that stand one after another."""

    parts: tuple[str | Choice, ...]
    """Texts and choices."""


def parse(text: str, rules: Mapping[str, str]) -> Sequence:
    """Parse a text. Raises ValueError for a bracket without its partner, a choice with nothing to train on, an unknown
    rule."""
    sequence, rest = _sequence(_insert_rules(text, rules))
    if rest:
        raise ValueError(f"{rest[0]!r} outside of brackets in {text!r}")
    return sequence


def _insert_rules(text: str, rules: Mapping[str, str]) -> str:
    while "<" in text:
        before, _, rest = text.partition("<")
        name, closed, after = rest.partition(">")
        if not closed or name not in rules:
            raise ValueError(f"unknown rule <{name} in {text!r}")
        text = before + rules[name] + after
    return text


def _sequence(text: str) -> tuple[Sequence, str]:
    """The parts up to the end of this alternative, and what follows, its `|` or `]` included."""
    parts: list[str | Choice] = []
    literal = ""
    while text and text[0] not in "|]":
        if text[0] == "[":
            choice, text = _choice(text[1:])
            parts += [literal, choice]
            literal = ""
        else:
            literal += text[0]
            text = text[1:]
    return Sequence(tuple(p for p in [*parts, literal] if p)), text


def _choice(text: str) -> tuple[Choice, str]:
    groups: dict[bool, list[Sequence]] = {True: [], False: []}
    while True:
        held_out = text.startswith("^")
        sequence, text = _sequence(text[held_out:])
        groups[held_out].append(sequence)
        if not text:
            raise ValueError("a [ is never closed")
        end, text = text[0], text[1:]
        if end == "]":
            break
    if not groups[False]:
        raise ValueError("a choice whose every alternative is held out")
    return Choice(tuple(groups[False]), tuple(groups[True])), text


def expand(grammar: Sequence, draw: Draw, held_out: bool) -> str:
    """One phrasing. Raises ValueError when a held-out one is asked for and the grammar has none."""
    if held_out and not has_held_out(grammar):
        raise ValueError("the grammar holds no phrasing out")
    while True:
        text, unseen = _expand(grammar, draw, held_out)
        if unseen == held_out:
            return text


def _expand(grammar: Sequence, draw: Draw, held_out: bool) -> tuple[str, bool]:
    """The text, and whether it contains a held-out alternative."""
    texts: list[str] = []
    unseen = False
    for part in grammar.parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        take_unseen = held_out and bool(part.unseen) and draw.flip()
        text, deeper = _expand(draw.pick(part.unseen if take_unseen else part.seen), draw, held_out)
        texts.append(text)
        unseen = unseen or take_unseen or deeper
    return "".join(texts), unseen


def has_held_out(grammar: Sequence) -> bool:
    """Whether a grammar has a held-out alternative."""
    choices = [p for p in grammar.parts if isinstance(p, Choice)]
    return any(c.unseen or any(has_held_out(s) for s in c.seen) for c in choices)


def count(grammar: Sequence) -> int:
    """How many phrasings the training alternatives yield."""
    product = 1
    for part in grammar.parts:
        if isinstance(part, Choice):
            product *= sum(count(option) for option in part.seen)
    return product


@dataclass(frozen=True)
class Kind:
    """`formula` uses the names that `draw` gives; every step of it is a whole number and none is negative."""

    name: str
    """Name of the kind."""
    formula: str
    draw: Callable[[Draw], dict[str, int]]
    grammar: Sequence
    """The phrasings."""


def kind(name: str, formula: str, draw: Callable[[Draw], dict[str, int]], text: str, **rules: str) -> Kind:
    """Make a kind of problems from a text in the notation of `grammar`; `rules` are the kind's own, beside the shared
    ones."""
    parsed = parse(text, {**RULES, **rules})
    if not has_held_out(parsed):
        raise ValueError(f"kind {name!r} holds no phrasing out")
    return Kind(name, formula, draw, parsed)
