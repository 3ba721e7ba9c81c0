"""What a customer may know: each fact's values, how an assistant asks for it, and how a customer says it.

A fact with many values keeps some of them for held-out tasks, chosen by a hash: training never shows them.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

_HELD_OUT = 51  # of 256

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_NAMES = (
    "Abara", "Adler", "Bauer", "Berg", "Carter", "Castro", "Costa", "Cruz", "Dahl", "Diaz", "Egan", "Fox", "Frey",
    "Gale", "Garcia", "Grant", "Haas", "Hale", "Hill", "Holm", "Ito", "Jansen", "Joshi", "Kahn", "Keller", "Khan",
    "Kim", "Koch", "Lam", "Lane", "Lee", "Lima", "Lopez", "Maier", "Marsh", "Mori", "Nagy", "Novak", "Okafor", "Olsen",
    "Park", "Patel", "Perez", "Popov", "Quinn", "Ramos", "Reed", "Rossi", "Roth", "Sato", "Silva", "Singh", "Sousa",
    "Stone", "Suzuki", "Tan", "Torres", "Vega", "Voss", "Wagner", "Walsh", "Weber", "Wolf", "Yang", "Young", "Zhou",
)  # fmt: skip
_STREETS = ("Hill Road", "Park Lane", "Mill Street", "Lake Road", "High Street", "Oak Lane", "Bridge Street")


@dataclass(frozen=True)
class Fact:
    """One thing that a task may need.

    draw: a value. size: how many there are. asked: what in a question asks for it. questions: how an assistant may ask.
    stated: how the opening says it. answers, other_answers: what the customer says when asked, in training and in the
    held-out wordings; `{}` is the value.
    """

    name: str
    """Name of the fact."""
    draw: Callable[[Random], str]
    size: int
    asked: str
    questions: tuple[str, ...]
    stated: tuple[str, str]
    answers: tuple[str, ...] = ("{}.", "It is {}.", "{}, please.")
    other_answers: tuple[str, ...] = ("That would be {}.", "Let me see ... {} it is.", "Sure: {}. Thanks!")
    _pattern: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pattern", re.compile(rf"\b(?:{self.asked})\b", re.IGNORECASE))

    def mention(self, text: str) -> int | None:
        """Where a text first asks for it; None where it does not."""
        found = self._pattern.search(text)
        return found.start() if found else None

    @property
    def splits(self) -> bool:
        """Whether some of its values are kept for held-out tasks."""
        return self.size >= 40

    def value(self, rng: Random, held_out: bool) -> str:
        """A value of the asked side, where the fact has two."""
        while True:
            value = self.draw(rng)
            if not self.splits or is_held_out(self.name, value) == held_out:
                return value


def is_held_out(name: str, value: str) -> bool:
    """Whether a value of a fact that `splits` never occurs in training."""
    return hashlib.sha256(f"{name}={value}".encode()).digest()[0] < _HELD_OUT


def _number(first: int, last: int) -> Callable[[Random], str]:
    return lambda rng: str(rng.randint(first, last))


def _one_of(values: tuple[str, ...]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(values)


def _time(rng: Random) -> str:
    return f"{rng.randint(8, 21)}:{rng.choice(('00', '15', '30', '45'))}"


def _address(rng: Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(_STREETS)}"


ORDER = Fact(
    "order", _number(100, 9999), 9900, r"order|orders|reference",
    ("What is the order number?", "Which order is it?", "Could you give me your order number?"),
    ("The order number is {}.", "It is about order {}."),
    ("{}.", "It is {}.", "Order {}.", "The number is {}."),
)  # fmt: skip
CARD = Fact(
    "card", _number(10000, 99999), 90000, r"card|membership|member number",
    ("What is your card number?", "What number is on your card?", "Could you give me the number of your card?"),
    ("My card is {}.", "The number of the card is {}."),
)  # fmt: skip
ACCOUNT = Fact(
    "account", _number(1000, 99999), 99000, r"account|iban|recipient|to whom|to who",
    ("To which account?", "What is the account number?", "Could you give me the account?"),
    ("It goes to account {}.", "The account is {}."), ("{}.", "To {}.", "Account {}."),
)  # fmt: skip
AMOUNT = Fact(
    "amount", _number(5, 999), 995, r"amount|how much|sum",
    ("How much is it?", "What amount?", "How much should it be?"),
    ("It is {} euros.", "The amount is {}."), ("{}.", "{} euros.", "It is {}."),
)  # fmt: skip
NAME = Fact(
    "name", _one_of(_NAMES), len(_NAMES), r"name|names|who|whom",
    ("What is your name?", "What name is it for?", "Could I have your name?"),
    ("My name is {}.", "I am called {}."), ("{}.", "It is {}.", "My name is {}."),
)  # fmt: skip
ADDRESS = Fact(
    "address", _address, 99 * len(_STREETS), r"address|street|where",
    ("What is the address?", "Where to?", "Could you give me the address?"),
    ("It is to {}.", "The address is {}."), ("{}.", "To {}.", "It is {}."),
)  # fmt: skip
DAY = Fact(
    "day", _one_of(_DAYS), len(_DAYS), r"day|date|when",
    ("Which day?", "On what day?", "What day would you like?"),
    ("It is for {}.", "{} is the day."), ("{}.", "On {}.", "{}, please."),
)  # fmt: skip
TIME = Fact(
    "time", _time, 56, r"time|hour|o'clock|when",
    ("At what time?", "What time would you like?", "Which time is good?"),
    ("It is for {}.", "The time is {}."), ("{}.", "At {}.", "{}, please."),
)  # fmt: skip
PEOPLE = Fact(
    "people", _number(2, 12), 11, r"people|persons|guests|party|how many",
    ("How many people?", "For how many people?", "How many guests will come?"),
    ("We are {} people.", "There are {} of us."), ("{}.", "We are {}.", "{} people."),
)  # fmt: skip
NIGHTS = Fact(
    "nights", _number(1, 14), 14, r"nights|night|how long|stay",
    ("How many nights?", "For how many nights?", "How many nights will you stay?"),
    ("I stay {} nights.", "It is for {} nights."), ("{}.", "{} nights.", "For {}."),
)  # fmt: skip
ROOM = Fact(
    "room", _one_of(("single", "double", "family")), 3, r"room|kind|type|single|double|family",
    ("What kind of room?", "Which room would you like?", "A single, double or family room?"),
    ("A {} room is fine.", "It should be a {} room."), ("{}.", "A {} room.", "{}, please."),
)  # fmt: skip
SIZE = Fact(
    "size", _one_of(("XS", "S", "M", "L", "XL")), 5, r"size|sizes|large|small",
    ("Which size?", "What size do you need?", "What is the new size?"),
    ("I need size {}.", "It should be size {}."), ("{}.", "Size {}.", "{}, please."),
)  # fmt: skip
COLOUR = Fact(
    "colour", _one_of(("red", "blue", "green", "black", "white", "grey", "brown", "pink")), 8, r"colou?rs?",
    ("Which colour?", "What colour would you like?", "What is the new colour?"),
    ("I want it in {}.", "The colour should be {}."), ("{}.", "In {}.", "{}, please."),
)  # fmt: skip

FACTS = (
    ORDER, CARD, ACCOUNT, AMOUNT, NAME, ADDRESS, DAY, TIME, PEOPLE, NIGHTS, ROOM, SIZE, COLOUR,
)  # fmt: skip
