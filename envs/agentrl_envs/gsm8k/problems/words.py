"""The words and the shared clauses that every kind of problem is written with."""

from agentrl_envs.gsm8k.problems.draw import Draw

NAMES = [
    "Maya", "Tom", "Lena", "Omar", "Ruth", "Ivan", "Nina", "Paul", "Sara", "Ben", "Ada", "Luis", "Mei", "Noah", "Zoe",
    "Kai", "Anna", "Leo", "Rosa", "Sam", "Eva", "Max", "Ella", "Jack", "Tara", "Hugo", "Iris", "Karl", "Lily", "Finn",
    "Dana", "Yuki",
]  # fmt: skip
OBJECTS = [
    "apples", "marbles", "stickers", "pencils", "cards", "books", "shells", "coins", "beads", "stamps", "buttons",
    "balls", "cups", "pears", "toys", "flowers", "stones", "ribbons", "candles", "plates", "shirts", "hats", "lemons",
    "eggs", "pens", "bottles", "blocks", "dolls", "kites", "rings",
]  # fmt: skip
FOODS = ["cookies", "muffins", "cakes", "pies", "rolls", "tarts", "buns", "pancakes", "waffles", "donuts"]
CONTAINERS = ["bags", "boxes", "packs", "jars", "crates", "baskets", "trays", "bins"]
THINGS = ["bike", "coat", "guitar", "game", "phone", "camera", "tent", "desk"]
PEOPLE = (
    ("friends", "friend"), ("children", "child"), ("students", "student"), ("cousins", "cousin"),
    ("neighbors", "neighbor"),
)  # fmt: skip
VERBS = (
    ("has", "have"), ("finds", "find"), ("collects", "collect"), ("picks", "pick"), ("sells", "sell"), ("gets", "get"),
)  # fmt: skip
MAKING = (("makes", "make"), ("paints", "paint"), ("packs", "pack"), ("sells", "sell"), ("collects", "collect"))
UNITS = (("day", "days"), ("week", "weeks"), ("month", "months"))
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

RULES = {
    "has": "[has|owns|starts with|begins with]",
    "buys": "[buys|gets|orders|picks up]",
    "for": "[for|at]",
    "shop": "[shop|store|market]",
    "then": "[ and then|. Then {A}|. After that, {A}|. Later {A}|, then]",
    "loses": "[loses {m} {o}|gives {m} {o} to {B}|sells {m} {o}|uses {m} {o}|gives away {m} {o}]",
    "total": "[in total|in all|altogether]",
    "now": "[now|in the end|at the end|after that]",
    "every": "[a|each|every|per]",
    "they": "[they|{A} and {B}|the two {people}]",
    "q_left": (
        "How many {o} [are left|remain|are left over|does {A} have left|does {A} still have|does {A} have <now>]?"
    ),
    "q_have": "How many {o} does {A} have <now>?",
    "q_both": "How many {o} do <they> {have} [<total>|together]?",
    "how_much": "[how much|how much money|how many dollars]",
    "q_spend": (
        "[<how_much> does {A} [spend|pay|need][| <total>]|What is the total [cost|price]"
        "|How much does it cost <total>]?"
    ),
    "q_earn": "<how_much> does {A} [earn|make|get][| <total>]?",
    "q_money_left": (
        "[How many dollars [are left|remain|does {A} have left|does {A} still have]"
        "|How much money [is left|remains|does {A} have left|does {A} have <now>]]?"
    ),
}


def fillers(draw: Draw, numbers: dict[str, int]) -> dict[str, str]:
    """What the placeholders stand for: `{A}` people, `{o}` things, `{n}` numbers and `{$n}` sums of money."""
    first, second, third = draw.some(NAMES, 3)
    thing, other = draw.some(OBJECTS, 2)
    food, food2 = draw.some(FOODS, 2)
    people, person = draw.pick(PEOPLE)
    has, have = draw.pick(VERBS)
    makes, make = draw.pick(MAKING)
    unit, units = draw.pick(UNITS)
    day = draw.between(0, 4)
    money = "${}" if draw.flip() else "{} dollars"
    words = {"A": first, "B": second, "C": third, "o": thing, "o2": other, "f": food, "f2": food2}
    words |= {"people": people, "person": person, "has": has, "have": have, "makes": makes, "make": make}
    words |= {"unit": unit, "units": units}
    words |= {"d1": DAYS[day], "d2": DAYS[day + 1], "d3": DAYS[day + 2]}
    words |= {"g": draw.pick(CONTAINERS), "thing": draw.pick(THINGS)}
    words |= {name: str(number) for name, number in numbers.items()}
    return words | {f"${name}": money.format(number) for name, number in numbers.items()}
