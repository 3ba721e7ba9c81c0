"""Three small worlds for `own_task.py`: an order desk, a library, unit conversion.

They stand for tasks of a user's own. No lesson of `random_tools` shares a tool's name, an argument's name or a sentence
with them (tests/envs/test_random_tools.py), and they were fixed before the first model learned from those lessons.
"""

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from agentrl import ArgumentError, Environment, LazyTasks, Session, Task, Tool, ToolResponse
from agentrl.plugins.types import Json, Message, RewardParts, answer_of

TRAIN_SIZE, TEST_SIZE = 20_000, 256


class State:
    """What the tools of one rollout read and change."""

    def __init__(self, world: Mapping[str, Any]) -> None:
        self.world = json.loads(json.dumps(world))
        self.done: list[list[Json]] = []
        """Changes, in their order."""


class Desk(Tool):
    """A tool that works on the state of its rollout."""

    def __init__(self, name: str, description: str, arguments: Mapping[str, tuple[str, str]], work: Any) -> None:
        self.name, self.description, self._work = name, description, work
        properties = {key: {"type": kind, "description": text} for key, (kind, text) in arguments.items()}
        self.parameters = {"type": "object", "properties": properties, "required": list(properties)}

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        assert session.environment is not None
        return ToolResponse(json.dumps(self._work(session.environment.state, **arguments)))


class Domain(Environment):
    """What the three have in common: generated tasks, a state a rollout, and a reward for what was done and said."""

    splits = ("test",)
    reward_parts = ("done", "answer")

    def __init__(self, source: str = "generated", seed: int = 0) -> None:
        self._seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        size = TRAIN_SIZE if split == "train" else TEST_SIZE
        return LazyTasks(size, lambda index: self._task(split, index))

    def _task(self, split: str, index: int) -> Task:
        rng = Random(f"{self.name}/{split}/{self._seed if split == 'train' else 0}/{index}")
        return Task(f"{split}-{index}", self.make(rng))

    def make(self, rng: Random) -> dict[str, Json]:
        """A world, a request, the changes that it asks for, and what the answer must contain."""
        raise NotImplementedError

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        session.state = State(session.task.data["world"])
        return [{"role": "user", "content": session.task.data["request"]}]

    async def calc_reward(self, session: Session, **kwargs: Json) -> RewardParts:
        done = session.state.done == session.task.data["changes"]
        said = answer_of(session.messages).replace(",", "").split()
        answer = str(session.task.data["answer"]) in [word.strip(".:;!\"'") for word in said]
        return {"done": 0.5 * done, "answer": 0.5 * (done and answer)}


def _known(table: Mapping[str, Any], what: str, key: Json) -> Any:
    if str(key) not in table:
        raise ArgumentError(f"there is no {what} {key}")
    return table[str(key)]


MATERIALS = ("brass", "oak", "steel", "copper", "cotton", "rubber", "glass", "pine", "nylon", "ceramic")
GOODS = ("hinge", "shelf", "kettle", "ladder", "curtain", "bucket", "stool", "hammer", "basket", "mirror", "blanket")
STATUSES = ("packed", "shipped", "delayed", "delivered", "returned")


def find_product(state: State, product: str) -> Json:
    """The number, price and stock of a product."""
    return _known(state.world["products"], "product", product.lower())


def place_order(state: State, product_id: str, quantity: int) -> Json:
    """Order so many pieces."""
    found = next((p for p in state.world["products"].values() if p["product_id"] == product_id), None)
    if found is None:
        raise ArgumentError(f"there is no product {product_id}")
    state.done.append(["order", product_id, quantity])
    return {"order": state.world["next"], "total": found["price"] * quantity}


def order_status(state: State, order: str) -> Json:
    """How far an order is."""
    return {"order": order, "status": _known(state.world["orders"], "order", order)}


def cancel_order(state: State, order: str) -> Json:
    """Cancel an order."""
    _known(state.world["orders"], "order", order)
    state.done.append(["cancel", order])
    return {"order": order, "status": "cancelled", "refund": state.world["refund"]}


class OrderDesk(Domain):
    """Prices, new orders, and what became of old ones."""

    name = "order_desk"

    def __init__(self, source: str = "generated", seed: int = 0) -> None:
        super().__init__(source, seed)
        self._tools = (
            Desk("find_product", "Find a product by its name: product id, price and stock.",
                 {"product": ("string", "name of the product")}, find_product),
            Desk("place_order", "Order a product.",
                 {"product_id": ("string", "id of the product"), "quantity": ("integer", "how many")}, place_order),
            Desk("order_status", "The status of an order.", {"order": ("string", "number of the order")}, order_status),
            Desk("cancel_order", "Cancel an order.", {"order": ("string", "number of the order")}, cancel_order),
        )  # fmt: skip

    def tools(self) -> Sequence[Tool]:
        return self._tools

    def make(self, rng: Random) -> dict[str, Json]:
        names = rng.sample([f"{m} {g}" for m in MATERIALS for g in GOODS], 4)
        products = {
            name: {"product_id": f"P{rng.randint(100, 999)}", "price": rng.randint(2, 95), "stock": rng.randint(0, 60)}
            for name in names
        }
        orders = {f"A-{number}": rng.choice(STATUSES) for number in rng.sample(range(1000, 9999), 3)}
        world = {"products": products, "orders": orders, "next": f"B-{rng.randint(1000, 9999)}",
                 "refund": rng.randint(5, 400)}  # fmt: skip
        name, order, count = names[0], next(iter(orders)), rng.randint(1, 12)
        kind = rng.choice(("price", "stock", "order", "order", "status", "cancel"))
        changes: list[list[Json]] = []
        answer: Json
        if kind == "price":
            request, answer = f"How much is one {name}?", products[name]["price"]
        elif kind == "stock":
            request, answer = f"How many of the {name} do we have in stock?", products[name]["stock"]
        elif kind == "order":
            request, answer = f"I would like {count} of the {name}, please. Which order number is it?", world["next"]
            changes.append(["order", products[name]["product_id"], count])
        elif kind == "status":
            request, answer = f"Where is my order {order} now?", orders[order]
        else:
            request, answer = f"Please cancel order {order}. How much do I get back?", world["refund"]
            changes.append(["cancel", order])
        return {"world": world, "request": request, "changes": changes, "answer": answer}


FIRST = ("The Silent", "A Distant", "The Last", "My Golden", "The Crooked", "Our Hidden", "A Small", "The Burning")
SECOND = ("Harbour", "Orchard", "Winter", "Sparrow", "Lighthouse", "Promise", "Bridge", "Meadow", "Violin", "Comet")
AUTHORS = ("Hale", "Okafor", "Lindqvist", "Moreau", "Tanaka", "Petrov", "Quinn", "Sato", "Abara", "Novak")


def search_catalog(state: State, title: str) -> Json:
    """The entry of a title."""
    titles = {name.lower(): entry for name, entry in state.world["titles"].items()}
    return _known(titles, "title", title.lower())


def borrow_book(state: State, book: str, member: str) -> Json:
    """Lend a book."""
    if book not in [entry["book"] for entry in state.world["titles"].values()]:
        raise ArgumentError(f"there is no book {book}")
    _known(state.world["members"], "member", member)
    state.done.append(["borrow", book, member])
    return {"book": book, "due": state.world["due"]}


def return_book(state: State, book: str) -> Json:
    """Take a book back."""
    if book not in [entry["book"] for entry in state.world["titles"].values()]:
        raise ArgumentError(f"there is no book {book}")
    state.done.append(["return", book])
    return {"book": book, "receipt": state.world["receipt"]}


def member_account(state: State, member: str) -> Json:
    """Loans and fines."""
    return _known(state.world["members"], "member", member)


class Library(Domain):
    """A catalogue, loans, and members' accounts."""

    name = "library"

    def __init__(self, source: str = "generated", seed: int = 0) -> None:
        super().__init__(source, seed)
        self._tools = (
            Desk("search_catalog", "Search the catalog by title: book number, author, shelf, copies.",
                 {"title": ("string", "title of the book")}, search_catalog),
            Desk("borrow_book", "Lend a book to a member.",
                 {"book": ("string", "number of the book"), "member": ("string", "card of the member")}, borrow_book),
            Desk("return_book", "Take a book back.", {"book": ("string", "number of the book")}, return_book),
            Desk("member_account", "Loans and fine of a member.",
                 {"member": ("string", "card of the member")}, member_account),
        )  # fmt: skip

    def tools(self) -> Sequence[Tool]:
        return self._tools

    def make(self, rng: Random) -> dict[str, Json]:
        names = rng.sample([f"{a} {b}" for a in FIRST for b in SECOND], 3)
        titles = {
            name: {"book": f"L{rng.randint(1000, 9999)}", "author": rng.choice(AUTHORS),
                   "shelf": f"{rng.choice('CDEFGH')}{rng.randint(10, 99)}", "copies": rng.randint(1, 9)}
            for name in names
        }  # fmt: skip
        members = {
            f"M{number}": {"loans": rng.randint(0, 9), "fine": rng.randint(1, 40)}
            for number in rng.sample(range(100, 999), 2)
        }
        world = {"titles": titles, "members": members, "due": f"{rng.randint(1, 28)}/{rng.randint(1, 12)}",
                 "receipt": f"R{rng.randint(100, 999)}"}  # fmt: skip
        name, member = names[0], next(iter(members))
        entry = titles[name]
        kind = rng.choice(("author", "shelf", "borrow", "borrow", "return", "fine", "loans"))
        changes: list[list[Json]] = []
        answer: Json
        if kind == "author":
            request, answer = f'Who wrote "{name}"?', entry["author"]
        elif kind == "shelf":
            request, answer = f'On which shelf do I find "{name}"?', entry["shelf"]
        elif kind == "borrow":
            request = f'I am member {member} and want to borrow "{name}". Until when?'
            answer = world["due"]
            changes.append(["borrow", entry["book"], member])
        elif kind == "return":
            request, answer = f"Here is book {entry['book']} back. May I have a receipt?", world["receipt"]
            changes.append(["return", entry["book"]])
        elif kind == "fine":
            request, answer = f"What fine does {member} owe?", members[member]["fine"]
        else:
            request, answer = f"How many loans has {member}?", members[member]["loans"]
        return {"world": world, "request": request, "changes": changes, "answer": answer}


UNITS = {
    "length": {"metres": 1000, "feet": 305, "inches": 25, "yards": 914, "miles": 1_609_344, "kilometres": 1_000_000},
    "weight": {"grams": 1, "ounces": 28, "pounds": 454, "kilograms": 1000, "stones": 6350},
    "time": {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86_400, "weeks": 604_800},
}


def convert(state: State, amount: float, from_unit: str, to_unit: str) -> Json:
    """The same in another unit, to two decimals."""
    sizes = next((sizes for sizes in UNITS.values() if from_unit in sizes), None)
    if sizes is None or to_unit not in sizes:
        raise ArgumentError(f"{from_unit} cannot be converted to {to_unit}")
    return {"result": round(amount * sizes[from_unit] / sizes[to_unit], 2)}


def add_up(state: State, first: float, second: float) -> Json:
    """The sum of two numbers, to two decimals."""
    return {"sum": round(first + second, 2)}


class UnitConversion(Domain):
    """Amounts from one unit to another, also two of them added."""

    name = "unit_conversion"

    def __init__(self, source: str = "generated", seed: int = 0) -> None:
        super().__init__(source, seed)
        self._tools = (
            Desk("convert_units", "Convert an amount from one unit to another.",
                 {"amount": ("number", "how much"), "from_unit": ("string", "its unit"),
                  "to_unit": ("string", "the unit that is wanted")}, convert),
            Desk("add_up", "Add two numbers.",
                 {"first": ("number", "one number"), "second": ("number", "the other number")}, add_up),
        )  # fmt: skip

    def tools(self) -> Sequence[Tool]:
        return self._tools

    def make(self, rng: Random) -> dict[str, Json]:
        sizes = UNITS[rng.choice(list(UNITS))]
        start, end, other = rng.sample(list(sizes), 3)
        amount, more = rng.randint(2, 400), rng.randint(2, 400)
        result = round(amount * sizes[start] / sizes[end], 2)
        kind = rng.choice(("plain", "asked", "sum"))
        if kind == "plain":
            request = f"Convert {amount} {start} to {end}."
        elif kind == "asked":
            request = f"How many {end} are {amount} {start}?"
        else:
            request = f"How many {end} are {amount} {start} and {more} {other} together?"
            result = round(result + round(more * sizes[other] / sizes[end], 2), 2)
        return {"world": {}, "request": request, "changes": [], "answer": result}
