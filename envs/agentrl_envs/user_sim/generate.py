"""Any task of any split by its index: `scenario(split, index, seed)` depends on nothing else.

What the opening leaves out has at least `FEWEST` possible values, so that a guess cannot pay.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from random import Random

from agentrl_envs.user_sim.facts import Fact
from agentrl_envs.user_sim.kinds import KINDS, Kind

SPLITS = ("train", "test", "wording", "validation")
"""test: facts never seen in training; wording: those, said in words never seen; validation: as test, with no kind and
facts of the others."""

HELD_OUT_SIZE = 1_000
"""Scenarios of each held-out split."""

FEWEST = 50


@dataclass(frozen=True)
class Scenario:
    """facts: all that the wish needs, by name. told: those that the opening says. found: what `lookup` says of the
    number, or None. other_words: said in the held-out wordings."""

    kind: Kind
    facts: dict[str, str]
    told: tuple[str, ...]
    found: str | None
    opening: str
    other_words: bool

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.facts if name not in self.told)

    @property
    def answer(self) -> str:
        """The final line without its mark."""
        return self.kind.form.format(**self.facts, found=self.found)


def scenario(split: str, index: int, seed: int = 0) -> Scenario:
    """The scenario at `index` (0 or more) of a split. Raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; known: {', '.join(SPLITS)}")
    rng = Random(f"user_sim/{seed}/{split}/{index}")
    other = split == "wording"
    kind, facts = _wish(rng, split)
    told = _told(kind, rng)
    found = str(rng.randint(11, 999)) if kind.looks_up else None
    opening = rng.choice(kind.other_openings if other else kind.openings)
    said = [fact.stated[other].format(facts[fact.name]) for fact in told]
    return Scenario(kind, facts, tuple(f.name for f in told), found, " ".join([opening, *said]), other)


def _wish(rng: Random, split: str) -> tuple[Kind, dict[str, str]]:
    while True:
        kind = rng.choice(KINDS)
        facts = {fact.name: fact.value(rng, split != "train") for fact in kind.facts}
        if split != "validation" or (kind.name, *facts.items()) not in _tested():
            return kind, facts


@cache
def _tested() -> frozenset[tuple[object, ...]]:
    """Kinds and facts of `test` and `wording`."""
    places = [f"user_sim/0/{split}/{index}" for split in ("test", "wording") for index in range(HELD_OUT_SIZE)]
    wishes = [_wish(Random(place), "test") for place in places]
    return frozenset((kind.name, *facts.items()) for kind, facts in wishes)


def _told(kind: Kind, rng: Random) -> list[Fact]:
    """What the opening says: anything that leaves enough open."""
    while True:
        told = [fact for fact in kind.facts if rng.random() < 0.4]
        if prod(fact.size for fact in kind.facts if fact not in told) >= FEWEST:
            return told
