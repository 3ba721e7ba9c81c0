"""Objects and tools that other people wrote, named in recipes by import path: `adapter_plugins:EchoToolEnv`."""

import asyncio
import json
import threading
import time
from collections import Counter
from typing import Any, Optional

EVENTS: Counter[str] = Counter()


class EchoToolEnv:
    """The example of TRL's documentation, its server taken out."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        self.reward = len(message) * 0.1
        return message


def reward_func(environments, **kwargs):
    return [env.reward for env in environments]


class WordEnv:
    """In the manner of TRL's Wordle example: an observation from reset, a method that raises when the game is over."""

    def __init__(self):
        EVENTS["made"] += 1
        self.guesses = None

    def reset(self, secret: str, prompt: list, **kwargs) -> str | None:
        EVENTS["reset"] += 1
        assert prompt[-1]["role"] == "user"
        self.secret = secret
        self.guesses, self.done = [], False
        return f" The word has {len(secret)} letters."

    def guess(self, word: str, loud: bool = False) -> str:
        """
        Guess the word.

        Args:
            word: The guessed word.
            loud: Whether to shout.

        Returns:
            What was right.
        """
        if self.done:
            raise ValueError("Game over.")
        self.guesses.append(word)
        self.done = word == self.secret
        return "right!" if self.done else "wrong"

    async def hint(self) -> str:
        """Ask for the first letter."""
        await asyncio.sleep(0)
        return self.secret[0]

    def _private(self) -> str:
        return self.secret

    def get_reward(self) -> float:
        return 1.0 if self.done else 0.1 * len(self.guesses) / 10


async def politeness(completions, environments, secret, **kwargs):
    """A reward function of TRL's kind: sees messages, environments and the row's columns as lists."""
    assert [e.secret for e in environments] == secret
    return [0.5 if "please" in (c[0]["content"] or "") else 0.0 for c in completions]


def two_rewards(environments, **kwargs):
    return [1.0, 2.0]


def wants_tokens(completion_ids, **kwargs):
    return [0.0] * len(completion_ids)


class Counting:
    """Counts its calls, slowly, and notices when it is entered twice at once or from two threads."""

    def __init__(self, start: int = 0):
        self.value, self.thread, self.busy = start, None, False
        EVENTS["made"] += 1

    def add(self, amount: int) -> int:
        """Add to the count.

        Args:
            amount: How much.
        """
        assert not self.busy
        assert self.thread in (None, threading.get_ident())
        self.busy, self.thread = True, threading.get_ident()
        time.sleep(0.01)
        self.value, self.busy = self.value + amount, False
        return self.value

    def hang(self) -> str:
        """Take long."""
        time.sleep(0.3)
        EVENTS["hung"] += 1
        return "late"

    def fail(self) -> str:
        """Raise."""
        raise KeyError("no such thing")

    def show(self) -> list:
        """Show a picture."""
        return [{"type": "text", "text": "look:"}, {"type": "image", "image": b"\x89PNG..."}]

    def close(self) -> None:
        EVENTS["closed"] += 1

    @property
    def reward(self) -> float:
        return float(self.value)


def make_counting(start: int = 5):
    return Counting(start)


class Rewardless:
    def look(self) -> str:
        """Look."""
        return "nothing"


class Silent(Counting):
    def mumble(self, x: int) -> str:
        return "no docstring"


class Broken:
    def __init__(self):
        raise OSError("the server is away")


class Fussy(Counting):
    def reset(self, seed: int) -> str:
        if seed % 2:
            raise RuntimeError("odd seeds are out")
        return f"seed {seed}"


SCHEMA = {
    "type": "function",
    "function": {
        "name": "grade",
        "description": "Grades an answer.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer."}},
            "required": ["answer"],
        },
    },
}


class OldTool:
    """The oldest form of verl's interface: parameters as JSON text, a str as result, nothing imported."""

    def __init__(self, config: dict, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.instances: dict[str, dict] = {}

    def get_openai_tool_schema(self):
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs) -> str:  # noqa: UP045
        self.instances[instance_id] = {"truth": ground_truth, "reward": 0.0}
        return instance_id

    async def execute(self, instance_id: str, parameters: str, **kwargs) -> tuple[str, float, dict]:
        answer = json.loads(parameters)["answer"]
        state = self.instances[instance_id]
        better = float(answer == state["truth"]) > state["reward"]
        state["reward"] = float(answer == state["truth"])
        return f"{answer=} {kwargs}", 0.0 if better else self.config["penalty"], {"right": state["reward"], "note": "x"}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return self.instances[instance_id]["reward"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.instances[instance_id]


class Bare:
    """No tool of verl's at all."""


ROWS = [{"prompt": [{"role": "user", "content": f"Guess word {i}."}], "secret": f"word{i}"} for i in range(30)]


def rows(split: str) -> list[dict[str, Any]]:
    return ROWS[:24] if split == "train" else ROWS[24:]
