"""The splits as sequences of tasks, each made as it is looked at."""

from agentrl.plugins.environment import LazyTasks
from agentrl.plugins.types import Task
from agentrl_envs.text_game.maps import HELD_OUT_SIZE, make_map

TRAIN_SIZE = 1_000_000
"""Maps of `train`, more than any run plays."""


def maps(split: str, seed: int) -> LazyTasks:
    """A split of the generator. Train depends on the seed; the held-out splits never do, so that runs compare."""
    own = seed if split == "train" else 0
    return LazyTasks(TRAIN_SIZE if split == "train" else HELD_OUT_SIZE, lambda index: _task(split, index, own))


def _task(split: str, index: int, seed: int) -> Task:
    world = make_map(split, index, seed)
    shortest = world.distances()[world.start, False]
    return Task(id=f"{split}-{index}", data={"map": world.draw(), "shortest": shortest})
