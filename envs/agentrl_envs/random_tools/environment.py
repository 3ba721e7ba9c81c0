"""The environment `random_tools`: each task brings a small world and its own tools, made at random."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random

from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Reply, Session, Task, answer_of
from agentrl_envs.conversation import check_generated, check_split, check_style, generated_tasks
from agentrl_envs.random_tools.lessons import DRILLS, Lesson, make_lesson
from agentrl_envs.random_tools.world import State

TRAIN_SIZE, HELD_OUT_SIZE = 1_000_000, 512
STYLES: dict[str, dict[str, float]] = {"clean": {"clean": 1.0}}
KEPT = 4096  # lessons that are remembered


@lru_cache(KEPT)
def lesson_of(split: str, index: int, seed: int, drills: float, errands: float, vague: float, doubts: float) -> Lesson:
    """The lesson of a task. Those of `test` are of words that no other has."""
    return make_lesson(f"random_tools/{split}/{seed}/{index}", split == "test", drills, errands, vague, doubts)


def _task(split: str, index: int, seed: int) -> Task:
    return Task(f"{split}-{seed}-{index}", {"split": split, "index": index, "seed": seed})


class RandomTools(Environment):
    """Requests that take one to three calls each (in doubt up to five), of tools that no other task has.

    source: `generated`, which is all there is. seed: of the training tasks. errands: share of tasks that are chains of
    commands without arguments. doubts: share of the rest whose requests name a thing and not the tool that knows it:
    one after the other is tried, and all that is found is told. drills: share of what remains that are many short
    requests to the same tools. vague: share of requests by which no tool or no argument of a value can be told, so that
    a model learns to try any where it does not know. Rewards:
    `answer`, 1 where each answer has what was asked for, after exactly the changes that were wanted. Tools of the split
    `test` have no word in common with those of the others.
    """

    name = "random_tools"
    reward_parts = ("answer",)
    splits = ("validation", "test")

    def __init__(
        self,
        source: str = "generated",
        seed: int = 0,
        drills: float = DRILLS,
        errands: float = 0.0,
        vague: float = 0.0,
        doubts: float = 0.0,
    ) -> None:
        check_generated(self, source)
        self._seed, self._shares = seed, (drills, errands, vague, doubts)

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        return generated_tasks(split, TRAIN_SIZE, HELD_OUT_SIZE, self._seed, _task)

    def lesson(self, task: Task) -> Lesson:
        """The world of a task."""
        return lesson_of(task.data["split"], task.data["index"], task.data["seed"], *self._shares)

    def tools_for(self, task: Task) -> Sequence[Tool]:
        return self.lesson(task).tools

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        session.state = State()
        return self.lesson(session.task).opening()

    async def execute(self, session: Session, message: Message) -> Reply:
        """Take the answer to one request, and ask for the next."""
        requests, answers = self.lesson(session.task).requests, session.state.answers
        answers.append(answer_of([message]))
        following = requests[len(answers) : len(answers) + 1]
        return Reply(tuple(request.message() for request in following), done=not following)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        called = any(message["role"] == "tool" for message in session.messages)
        return {"answer": float(called and self.lesson(session.task).solved(session.state))}

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        """Decide by the answer alone."""
        return rewards.get("answer", 0.0) >= 1.0

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        """A task worked without a mistake of its own."""
        check_style(self, style, STYLES)
        return self.lesson(task).play()[0]
