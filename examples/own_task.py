"""A task of your own in one file: a tool with a state, an environment, a reward; taught, then trained.

    python own_task.py [STEPS [LESSONS]]

The desk of a library lends books. Members say what they want, and the model writes it into the ledger by calling
`lend`. The embedded model has never seen this tool: demonstrations teach it first (`start`), in the end careless
ones, so that it begins imperfect; reinforcement learning (`agentrl.train`) does the rest.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import agentrl
from agentrl import Environment, Message, Recipe, Session, Task, tool


@tool
def lend(book: int, member: int, session: Session) -> str:
    """Lend a book to a member.

    Args:
        book: the number of the book
        member: the number of the member
    """
    ledger = session.environment.state  # of this conversation alone
    if book in ledger:
        return f"book {book} is already lent"
    ledger[book] = member
    return f"lent {book} to {member}"


class Library(Environment):
    """Lend every book that a member asks for, and no other. source: rows `{"member": 35, "books": [218, 704]}`."""

    name = "library"
    splits = ("test",)
    reward_parts = ("ledger",)

    def __init__(self, source: str) -> None:
        file, rng = Path(source), Random(0)
        self._rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        while len(self._rows) < 2000:  # besides rows of one's own, made-up ones
            self._rows.append({"member": rng.randrange(10, 100), "books": rng.sample(range(100, 1000), 2)})

    def tasks(self, split: str) -> Sequence[Task]:
        """Every tenth row is held out: no task stands in both splits."""
        rows = [(i, row) for i, row in enumerate(self._rows) if (i % 10 == 9) == (split == "test")]
        return [Task(f"{split}-{i}", row) for i, row in rows]

    def tools(self) -> Sequence[agentrl.Tool]:
        return [lend]

    async def create(self, session: Session, **kwargs) -> Sequence[Message]:
        session.state = {}
        first, second = session.task.data["books"]
        return [{"role": "user", "content": f"Member {session.task.data['member']} wants books {first} and {second}."}]

    async def calc_reward(self, session: Session, **kwargs) -> dict[str, float]:
        wanted = dict.fromkeys(session.task.data["books"], session.task.data["member"])
        return {"ledger": float(session.state == wanted)}

    def demonstrate(self, task: Task, rng: Random, style: str) -> Sequence[Message]:
        """What `start` teaches: a careless clerk forgets the second book now and then."""
        said = []
        for number, book in enumerate(task.data["books"]):
            if number and style == "careless" and rng.random() < 0.6:
                break
            call = {"name": "lend", "arguments": {"book": book, "member": task.data["member"]}}
            call = {"id": f"c{number}", "type": "function", "function": call}
            said += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{number}", "content": f"lent {book} to {task.data['member']}"},
            ]
        return [*said, {"role": "assistant", "content": "Done."}]


RECIPE = {
    "model": {"path": "tiny"},
    "env": {"name": "own_task:Library", "source": "members.jsonl"},
    "rollout": {"tasks": 16, "n": 8, "max_turns": 4, "max_turn_tokens": 64, "max_tokens": 256},
    "train": {"lr": 3e-4, "save_every": 0},
    "eval": {"tasks": 64, "every": 0},
}


def main(steps: int = 10, lessons: int = 60) -> None:
    stages = [
        {"style": "clean", "steps": lessons, "batch": 16, "lr": 2e-3},
        {"style": "careless", "steps": max(1, lessons // 5), "batch": 16, "lr": 1e-3},
    ]
    recipe = Recipe.model_validate(RECIPE | {"start": "demonstrations", "sft": {"stages": stages}})
    result = agentrl.train(recipe.changed(train={"steps": steps}), name="library")
    print(f"held-out accuracy: {result.before['test']:.0%} -> {result.after['test']:.0%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
