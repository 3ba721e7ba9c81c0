"""Environments, tools and rewards with the slips of a first day, each a class or function of its own."""

from collections.abc import Callable
from typing import Any

from agentrl import Environment, Reply, Reward, Task, Tool, ToolResponse, tool

QUESTION = "There are 5 rows of 112 seats. 195 guests take a seat. How many seats are empty?"


def gives(value: object) -> Callable[..., Any]:
    """A hook that is not async."""
    return lambda self, *args, **kwargs: value


def awaits(value: object) -> Callable[..., Any]:
    """A hook that returns this."""

    async def hook(self: object, *args: object, **kwargs: object) -> object:
        return value

    return hook


@tool
def lend(title: str) -> str:
    """Lend a book."""
    return title


class Seats(Environment):
    """One that is right."""

    name = "seats"
    reward_parts = ("answer",)

    def tasks(self, split: str) -> Any:
        return [Task(f"{split}-{number}", {"number": number}) for number in range(2)]

    async def create(self, session: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": QUESTION}]

    async def calc_reward(self, session: Any, **kwargs: Any) -> Any:
        return {"answer": float(session.rng.random() < 0.5)}


class Sums(Tool):
    """One that is right."""

    name = "calculator"
    description = "Works out."
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}  # noqa: RUF012

    async def execute(self, session: Any, **arguments: Any) -> Any:
        return "4"


ENVIRONMENTS: dict[str, tuple[object, str]] = {
    "tasks_none": ({"tasks": gives(None)}, "tasks('train') returned nothing: expected a sequence of Task"),
    "tasks_text": ({"tasks": gives("train")}, "tasks('train') returned str: expected a sequence of Task"),
    "tasks_dicts": ({"tasks": gives([{"id": "a"}])}, "task 0 of 'train' is dict, not a Task"),
    "tasks_twice": ({"tasks": gives([Task("a", {})] * 2)}, "has the id of task 0, 'a': give each its own"),
    "tasks_number": ({"tasks": gives([Task(1, {})])}, "has the id 1 of type int: an id is a text"),  # type: ignore[arg-type]
    "tasks_data": ({"tasks": gives([Task("a", [1])])}, "has data of type list; expected a dictionary"),  # type: ignore[arg-type]
    "splits_text": ({"splits": "test"}, "`splits` is 'test'; expected a tuple of texts"),
    "tools_class": ({"tools": gives([Sums])}, "`tools` returned ABCMeta; expected a sequence of Tool objects"),
    "tools_one": ({"tools": gives(Sums())}, "`tools` returned Sums; expected a sequence of Tool objects"),
    "tools_none": ({"tools": gives(None)}, "`tools` returned NoneType; expected a sequence of Tool objects"),
    "tools_dict": ({"tools": gives([{"type": "function"}])}, "`tools` returned dict; expected a sequence of Tool"),
    "tools_twice": ({"tools": gives([lend, lend])}, "both offer 'lend' to the model"),
    "tools_for_names": ({"tools": gives([lend]), "tools_for": gives(["lend"])}, "expected a sequence of Tool objects"),
    "tools_for_twice": ({"tools_for": gives([lend, lend])}, "gives 'lend', and another tool has that name"),
    "create_dict": ({"create": awaits({"role": "user", "content": "?"})}, "it returned no opening messages but dict"),
    "create_none": ({"create": awaits(None)}, "it returned no opening messages but NoneType"),
    "create_sync": ({"create": gives([{"role": "user", "content": "?"}])}, "it is not `async def`: it returned list"),
    "create_role": ({"create": awaits([{"role": "human", "content": "?"}])}, "a message has the role 'human'"),
    "create_bare": ({"create": awaits([{"role": "user"}])}, "a message of the user has no content"),
    "execute_none": ({"execute": awaits(None)}, "it returned NoneType, not a Reply"),
    "execute_reward": ({"execute": awaits(Reply(done=True, reward="1"))}, "the reward 'step' is str, not a number"),  # type: ignore[arg-type]
    "reward_none": ({"calc_reward": awaits(None)}, "the reward 'seats' is NoneType, not a number"),
    "reward_text": ({"calc_reward": awaits({"answer": "1.0"})}, "the reward 'answer' is str, not a number"),
    "reward_nan": ({"calc_reward": awaits(float("nan"))}, "the reward 'seats' is nan"),
    "reward_list": ({"calc_reward": awaits([1.0])}, "the reward 'seats' is list, not a number"),
    "reward_undeclared": (
        {"reward_parts": ("answer",), "calc_reward": awaits({"style": 1.0})},
        "the reward part 'style' is none of its `reward_parts`: answer",
    ),
    "parts_text": ({"reward_parts": "answer", "calc_reward": awaits(1.0)}, "expected a tuple of texts"),
    "instance": (Seats(), "is of type Seats; expected an Environment class"),
    "list_of_tasks": ([Task("a", {})], "is of type list; expected an Environment class"),
}
TOOLS: dict[str, tuple[object, str]] = {
    "execute_none": ({"execute": awaits(None)}, "it returned NoneType, not text or a ToolResponse"),
    "execute_dict": ({"execute": awaits({"sum": 4})}, "it returned dict, not text or a ToolResponse"),
    "execute_sync": ({"execute": gives("4")}, "it is not `async def`: it returned str"),
    "step_nan": ({"execute": awaits(ToolResponse("4", reward=float("nan")))}, "the reward 'step' is nan"),
    "name_none": ({"name": None}, "its class sets no `name`"),
    "name_space": ({"name": "my tool"}, "its name holds white space"),
    "description_none": ({"description": None}, "its `description` is of type NoneType; expected a text"),
    "parameters_none": ({"parameters": None}, "its `parameters` are of type NoneType; expected a JSON schema"),
    "parameters_type": (
        {"parameters": {"type": "object", "properties": {"expression": {"type": "strng"}}}},
        "its parameter 'expression' has the type 'strng'; did you mean 'string'?",
    ),
    "required_text": (
        {"parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": "x"}},
        "its `parameters` require 'x'; expected a list of names among its properties",
    ),
    "reward_text": ({"calc_reward": awaits("1")}, "the reward 'calculator' is str, not a number"),
    "dictionary": ([], "is of type list; expected a Tool class or a @tool function"),
}


class SyncReward(Reward):
    """A score that is not async."""

    name = "sync"

    def score(self, sample: Any) -> Any:
        return 1.0


REWARDS: dict[str, tuple[object, str]] = {
    "none": (lambda sample: None, "is NoneType, not a number"),
    "text": (lambda sample: "1.0", "is str, not a number"),
    "nan": (lambda sample: float("nan"), "is nan"),
    "dictionary": (lambda sample: {"a": 1.0}, "is dict, not a number"),
    "few": (lambda samples: [1.0], "it scored 1 of 2 samples"),
    "texts": (lambda samples: ["1"] * len(samples), "is str, not a number"),
    "no_argument": (lambda: 1.0, "takes no argument; expected `sample`, or `samples` for a whole group"),
    "mapping": ({}, "is not a Reward or GroupReward class, nor a function"),
    "sync": (SyncReward, "it is not `async def`: it returned float"),
}

for _right, _table, _prefix in ((Seats, ENVIRONMENTS, "env"), (Sums, TOOLS, "tool"), (None, REWARDS, "reward")):
    for _name, (_made, _) in _table.items():
        _is_class = _right is not None and isinstance(_made, dict)
        globals()[f"{_prefix}_{_name}"] = type(_name, (_right,), _made) if _is_class else _made
