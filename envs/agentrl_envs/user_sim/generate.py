"""Any task of any split by its index: `scenario(split, index, seed)` depends on nothing else.

What the opening leaves out has at least `FEWEST` possible values, so that a guess cannot pay.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from random import Random

from agentrl_envs.user_sim.facts import (
    ACCOUNT,
    ADDRESS,
    AMOUNT,
    CARD,
    COLOUR,
    DAY,
    NAME,
    NIGHTS,
    ORDER,
    PEOPLE,
    ROOM,
    SIZE,
    TIME,
    Fact,
)


@dataclass(frozen=True)
class Kind:
    """One wish.

    form: the final line, `{name}` standing for a fact's value and `{found}` for what `lookup` says of it.
    openings, other_openings: how it is said, in training and in the held-out wordings.
    """

    name: str
    """Name of the wish."""
    facts: tuple[Fact, ...]
    """The facts that the wish needs."""
    form: str
    openings: tuple[str, ...]
    other_openings: tuple[str, ...]

    @property
    def looks_up(self) -> bool:
        """Whether a number's record must be looked up for the answer."""
        return "{found}" in self.form

    @property
    def shown_form(self) -> str:
        """The form as the assistant is told it."""
        names = {fact.name: f"<{fact.name}>" for fact in self.facts}
        return f"#### {self.form.format(**names, found='<number found>')}"


KINDS = (
    Kind(
        "cancel", (ORDER,), "cancel {order}",
        ("Please cancel my order.", "I want to cancel an order.", "Can you cancel my order?"),
        ("I no longer want what I bought, so cancel it.", "Stop my order, it is not needed any more."),
    ),
    Kind(
        "resize", (ORDER, SIZE), "size {order} {size}",
        ("Please change the size of my order.", "My order has the wrong size.", "Can I have another size?"),
        ("What I bought does not fit, I need to swap it.", "The size I took is no good, do change it."),
    ),
    Kind(
        "recolour", (ORDER, COLOUR), "colour {order} {colour}",
        ("Please change the colour of my order.", "My order has the wrong colour.", "Can I have another colour?"),
        ("I took the wrong colour by mistake, do swap it.", "The colour that I bought does not suit me."),
    ),
    Kind(
        "deliver", (ORDER, DAY), "deliver {order} {day}",
        ("Please bring my order on another day.", "I am away, deliver my order later.", "Can you move my delivery?"),
        ("Nobody is at home when you come, make it another day.", "The delivery must be put off."),
    ),
    Kind(
        "address", (ORDER, ADDRESS), "address {order} {address}",
        ("Please send my order elsewhere.", "I have moved, change the address.", "Can my order go elsewhere?"),
        ("We live in a new house now, so do bring it there.", "The parcel must not come to my old place."),
    ),
    Kind(
        "table", (DAY, TIME, PEOPLE), "table {day} {time} {people}",
        ("Please book a table.", "I want a table for dinner.", "Can we have a table?"),
        ("We would love to eat at your place.", "Do keep a table for us, will you?"),
    ),
    Kind(
        "room", (NAME, NIGHTS, ROOM), "room {name} {nights} {room}",
        ("Please book a room.", "I need a room.", "Can I have a room?"),
        ("I am looking for a place to sleep.", "Do you still have a bed for me?"),
    ),
    Kind(
        "haircut", (NAME, DAY, TIME), "haircut {name} {day} {time}",
        ("Please book a haircut.", "I need a haircut.", "Can I come for a haircut?"),
        ("My hair is far too long.", "When could you cut my hair? I have a wish."),
    ),
    Kind(
        "taxi", (ADDRESS, TIME), "taxi {address} {time}",
        ("Please send a taxi.", "I need a taxi.", "Can I have a taxi?"),
        ("I have a plane to catch, somebody must drive me.", "A cab for me, if you would."),
    ),
    Kind(
        "transfer", (AMOUNT, ACCOUNT), "transfer {amount} {account}",
        ("Please transfer money.", "I want to send money.", "Can you make a transfer?"),
        ("I owe somebody some money and will pay it now.", "A payment has to leave today."),
    ),
    Kind(
        "price", (ORDER,), "{found}",
        ("What did my order cost?", "I want to know the price of my order.", "How much was my order?"),
        ("I forgot what I paid you the last time.", "Can you tell me how expensive my shopping was?"),
    ),
    Kind(
        "points", (CARD,), "{found}",
        ("How many points do I have?", "I want to know my points.", "Can you tell me my points?"),
        ("Did I collect enough points for a gift?", "I wonder what my loyalty brought me."),
    ),
)  # fmt: skip


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
    """What the customer wants."""
    facts: dict[str, str]
    told: tuple[str, ...]
    found: str | None
    opening: str
    other_words: bool

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the facts that the opening leaves out."""
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
