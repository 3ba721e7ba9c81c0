"""A made-up encyclopedia: towns, people, firms and books, each an article of a sentence or two. Always the same.

No fact follows from another or from anything outside, so nothing can be answered without looking it up.
"""

from dataclasses import dataclass
from functools import cache
from random import Random

from agentrl_tools.search import Document

_SIZES = {"town": 160, "person": 320, "firm": 120, "book": 160}
_STARTS = ("B", "D", "F", "G", "H", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Br", "Dr", "St", "Tr")
_MIDDLES = ("a", "e", "i", "o", "u", "ar", "el", "in", "or", "un", "al", "er")
_BEATS = ("b", "d", "g", "k", "l", "m", "n", "r", "s", "t", "v", "z")
_ENDS = {
    "town": ("ford", "ton", "stad", "by", "ham"),
    "person": ("a", "o", "ek", "is", "en"),
    "firm": ("ex", "um", "co"),
}
_JOBS = (
    "baker", "barber", "butcher", "carpenter", "clerk", "cook", "dancer", "dentist", "doctor", "driver", "farmer",
    "fisher", "gardener", "judge", "miner", "nurse", "painter", "pilot", "porter", "printer", "sailor", "singer",
    "smith", "soldier", "tailor", "teacher", "waiter", "weaver",
)  # fmt: skip
_GOODS = (
    "bags", "beds", "bells", "boats", "books", "bread", "bricks", "candles", "carpets", "chairs", "clocks", "coats",
    "cups", "drums", "flour", "glass", "hats", "keys", "knives", "lamps", "paper", "pens", "pianos", "ropes",
    "shoes", "soap", "toys", "wheels",
)  # fmt: skip
_COLORS = ("Black", "Blue", "Green", "Grey", "Red", "White", "Golden", "Silver")
_THINGS = ("Bird", "Boat", "Door", "Garden", "House", "Lake", "Letter", "Mirror", "Road", "Room", "Tower", "Winter")


@dataclass(frozen=True, slots=True)
class Relation:
    """fact: the sentence of an article, `{s}` the subject and `{o}` the answer. ask: a question. phrase: how a further
    question refers to the answer. target: the kind of entity that the answer is, or None."""

    kind: str
    name: str
    """Name of the relation, such as `founded`."""
    fact: str
    ask: str
    phrase: str
    target: str | None = None


RELATIONS = (
    Relation("town", "mayor", "Its mayor is {o}.", "Who is the mayor of {s}?", "the mayor of {s}", "person"),
    Relation("town", "founded", "It was founded in {o}.", "In which year was {s} founded?", ""),
    Relation("person", "job", "{s} is a {o}.", "What is the job of {s}?", ""),
    Relation("person", "home", "{s} was born in {o}.", "Where was {s} born?", "the town where {s} was born", "town"),
    Relation("firm", "goods", "{s} is a firm that makes {o}.", "What does {s} make?", ""),
    Relation(
        "firm", "seat", "Its seat is in {o}.", "Where is the seat of {s}?", "the town where {s} has its seat", "town"
    ),
    Relation("firm", "owner", "It belongs to {o}.", "Who owns {s}?", "the owner of {s}", "person"),
    Relation("book", "author", "{s} was written by {o}.", "Who wrote {s}?", "the author of {s}", "person"),
    Relation("book", "year", "It came out in {o}.", "In which year did {s} come out?", ""),
)
BY_KIND = {kind: tuple(r for r in RELATIONS if r.kind == kind) for kind in _SIZES}


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. path: the relations from the subject to the answer, one or two. titles: the articles to read."""

    text: str
    """The question as it is asked."""
    answer: str
    path: tuple[str, ...]
    titles: tuple[str, ...]

    @property
    def subject(self) -> str:
        """The title of the article that the question begins with."""
        return self.titles[0]


@dataclass(frozen=True, slots=True)
class World:
    """entities: names by kind. facts: by name, then by relation. documents: an article for each entity."""

    entities: dict[str, tuple[str, ...]]
    facts: dict[str, dict[str, str]]
    documents: tuple[Document, ...]

    def questions(self) -> list[Question]:
        """Every question that can be asked, in a fixed order: of one article, and of two."""
        return [
            question
            for kind, names in self.entities.items()
            for name in names
            for first in BY_KIND[kind]
            for question in self._about(name, first)
        ]

    def _about(self, name: str, first: Relation) -> list[Question]:
        value = self.facts[name][first.name]
        found = [Question(first.ask.format(s=name), value, (first.name,), (name,))]
        for second in BY_KIND[first.target] if first.target else ():
            text = second.ask.format(s=first.phrase.format(s=name))
            found.append(Question(text, self.facts[value][second.name], (first.name, second.name), (name, value)))
        return found


@cache
def world() -> World:
    """The encyclopedia, made once a process."""
    rng = Random("search_qa world 1")
    entities = _names(rng)
    facts = {name: _facts(kind, entities, rng) for kind, names in entities.items() for name in names}
    documents = tuple(
        Document(name, _article(kind, name, facts[name])) for kind, names in entities.items() for name in names
    )
    return World(entities, facts, documents)


def _names(rng: Random) -> dict[str, tuple[str, ...]]:
    """Names, each of which holds a word that no other name holds, so that a search for it finds its article
    first."""
    used: set[str] = set()
    single = {kind: tuple(_word(kind, used, rng) for _ in range(_SIZES[kind])) for kind in ("town", "person", "firm")}
    books = [f"The {color} {thing} of {_word('town', used, rng)}" for color in _COLORS for thing in _THINGS]
    more = [f"{thing} and {_word('person', used, rng)}" for thing in _THINGS for _ in range(6)]
    return single | {"book": tuple((books + more)[: _SIZES["book"]])}


def _word(kind: str, used: set[str], rng: Random) -> str:
    while True:
        beats = _pick(_BEATS, rng) + _pick(_MIDDLES, rng) if rng.random() < 0.7 else ""
        word = _pick(_STARTS, rng) + _pick(_MIDDLES, rng) + beats + _pick(_BEATS, rng) + _pick(_ENDS[kind], rng)
        if word not in used:
            used.add(word)
            return word


def _facts(kind: str, entities: dict[str, tuple[str, ...]], rng: Random) -> dict[str, str]:
    """One value for each relation of a kind."""
    plain = {"job": _JOBS, "goods": _GOODS}
    facts = {}
    for relation in BY_KIND[kind]:
        if relation.target:
            facts[relation.name] = _pick(entities[relation.target], rng)
        elif relation.name in plain:
            facts[relation.name] = _pick(plain[relation.name], rng)
        else:
            facts[relation.name] = str(1000 + int(rng.random() * 1000))
    return facts


def _article(kind: str, name: str, facts: dict[str, str]) -> str:
    opening = f"{name} is a town. " if kind == "town" else ""
    return opening + " ".join(r.fact.format(s=name, o=facts[r.name]) for r in BY_KIND[kind])


def _pick(options: tuple[str, ...], rng: Random) -> str:
    """Draw by `random()` alone, which Python promises to keep as it is."""
    return options[int(rng.random() * len(options))]
