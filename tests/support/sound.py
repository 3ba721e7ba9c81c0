"""Small environments with nothing wrong, of which `planted.py` makes broken ones."""

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from agentrl import Environment, Reply, Session, Task, Tool, ToolResponse

WORDS = re.findall(
    r"\w+",
    """
    otter falcon maple violin harbor lantern saffron granite pepper velvet cobalt thistle walnut meadow copper
    ribbon saddle turnip anchor beetle canyon dagger ember fiddle goblet hammer island jacket kettle ladder magnet
    needle orchid parrot quartz rocket spiral tunnel urchin vessel willow yonder zephyr basket candle dragon
    engine forest
    """,
)
SIZES = {"train": 80, "test": 20}


class Small(Environment):
    """Tasks that `make` makes of a generator of their own; a reward of 1 or 0 by `right`."""

    name = "small"
    splits = ("test",)
    sizes: Mapping[str, int] = SIZES

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        """The data of a task."""
        raise NotImplementedError

    def tasks(self, split: str) -> Sequence[Task]:
        start = 0 if split == "train" else 100_000
        return [Task(f"{split}-{i}", self.make(Random(start + i), start + i)) for i in range(self.sizes[split])]

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        return [{"role": "user", "content": session.task.data["question"]}]

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return 1.0 if self.right(said(session), session.task.data) else 0.0

    def right(self, text: str, data: Any) -> bool:
        """Whether a final text answers a task."""
        raise NotImplementedError


def said(session: Session) -> str:
    """The last text of the assistant."""
    texts = [m.get("content") for m in session.messages if m["role"] == "assistant"]
    return texts[-1] if texts and isinstance(texts[-1], str) else ""


class Sums(Small):
    """Two numbers to add up; the number behind the last `####` counts."""

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        a, b = rng.randint(10, 400), 401 + index % 10_000
        return {"question": f"A shop had {a} boxes and got {b} more. How many are there?", "answer": str(a + b)}

    def right(self, text: str, data: Any) -> bool:
        found = re.findall(r"#### (-?[\d.]+)\s*$", text)
        return bool(found) and found[-1] == data["answer"]


class Capitals(Small):
    """A word to be spelled backwards, between tags."""

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        word = WORDS[index % len(WORDS)] + WORDS[(index * 7 + index // 48) % len(WORDS)]
        return {"question": f"Spell {word} backwards, please.", "answer": word[::-1]}

    def right(self, text: str, data: Any) -> bool:
        found = re.fullmatch(r"\s*<answer>(.*?)</answer>\s*", text, re.S)
        return found is not None and found[1].strip().lower() == data["answer"]


class Choice(Small):
    """Which of four words comes first in the alphabet, as a letter."""

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        words = rng.sample(WORDS, 4)
        listed = ", ".join(f"{letter}) {word}" for letter, word in zip("ABCD", words, strict=True))
        return {"question": f"Task {index}. Which comes first in a dictionary? {listed}",
                "answer": "ABCD"[words.index(min(words))]}  # fmt: skip

    def right(self, text: str, data: Any) -> bool:
        return text.strip() == data["answer"]


class Find(Tool):
    """A directory of this rollout's task."""

    name = "find_room"
    description = "Look up in which room a person sits."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"person": {"type": "string", "description": "The name of the person."}},
        "required": ["person"],
    }

    async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
        data = session.task.data
        if arguments["person"] == data["person"]:
            return f"{data['person']} sits in room {data['answer']}."
        return ToolResponse("There is nobody of that name.", error=True)


class Lookup(Small):
    """A room to be looked up by a tool."""

    def __init__(self) -> None:
        self.own: tuple[Tool, ...] = (Find(),)

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        person = f"{rng.choice(WORDS)}{index}"
        room = f"{rng.randint(100, 999)}{rng.choice('abcdef')}x"
        return {"question": f"In which room does {person} sit?", "person": person, "answer": room}

    def tools(self) -> Sequence[Tool]:
        return self.own

    def right(self, text: str, data: Any) -> bool:
        return text.strip() == f"Room {data['answer']}"

    def demonstrate(self, task: Task, rng: Random, style: str) -> Any:
        wanted = {"name": "find_room", "arguments": {"person": task.data["person"]}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": wanted}]},
            {"role": "tool", "content": f"{task.data['person']} sits in room {task.data['answer']}."},
            {"role": "assistant", "content": f"Room {task.data['answer']}"},
        ]


class Talk(Small):
    """Two sums, one after the other: the second is asked once the first was answered, rightly or not."""

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        a, b, c = rng.randint(100, 999), rng.randint(100, 999), 1000 + index % 10_000
        return {"question": f"First: what is {a} plus {b}?", "then": f"And now {c} more?",
                "first": str(a + b), "answer": str(a + b + c)}  # fmt: skip

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        session.state = {"answers": []}
        return await super().create(session)

    async def execute(self, session: Session, message: Any) -> Reply:
        session.state["answers"].append(message.get("content"))
        if len(session.state["answers"]) > 1:
            return Reply(done=True)
        return Reply(({"role": "user", "content": session.task.data["then"]},))

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        data = session.task.data
        right = session.state["answers"] == [data["first"], data["answer"]]
        return {"both": float(right)}

    def demonstrate(self, task: Task, rng: Random, style: str) -> Any:
        return [
            {"role": "assistant", "content": task.data["first"]},
            {"role": "user", "content": task.data["then"]},
            {"role": "assistant", "content": task.data["answer"]},
        ]


class Press(Tool):
    """Turns a dial of this rollout."""

    name = "turn_dial"
    description = "Turn the dial by a number of clicks. Says where it stands."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"clicks": {"type": "integer", "description": "How far to turn.", "minimum": 1, "maximum": 99}},
        "required": ["clicks"],
    }

    async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
        state = session.environment.state
        state["at"] = (state["at"] + arguments["clicks"]) % 100
        return ToolResponse(f"The dial stands at {state['at']}.")


class Dial(Small):
    """A dial to be turned to a number by one tool; what is said does not count."""

    def __init__(self) -> None:
        self.own: tuple[Tool, ...] = (Press(),)

    def make(self, rng: Random, index: int) -> dict[str, Any]:
        start, goal = rng.sample(range(100), 2)
        return {"question": f"Dial {index} stands at {start}. Turn it to {goal}.", "start": start, "goal": goal}

    def tools(self) -> Sequence[Tool]:
        return self.own

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        session.state = {"at": session.task.data["start"]}
        return await super().create(session)

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return 1.0 if session.state["at"] == session.task.data["goal"] else 0.0

    def demonstrate(self, task: Task, rng: Random, style: str) -> Any:
        clicks = (task.data["goal"] - task.data["start"]) % 100
        wanted = {"name": "turn_dial", "arguments": {"clicks": clicks}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": wanted}]},
            {"role": "tool", "content": f"The dial stands at {task.data['goal']}."},
            {"role": "assistant", "content": "Done."},
        ]


SOUND = (Sums, Capitals, Choice, Lookup, Talk, Dial)
