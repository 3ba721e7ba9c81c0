"""Questions about the made-up encyclopedia, split by what they are about and by what must be put together."""

import hashlib
from functools import cache
from random import Random
from typing import TypeVar

from agentrl.plugins.types import Task
from agentrl_envs.search_qa.world import Question, world

T = TypeVar("T")

SPLITS = ("train", "test", "two_hop", "validation")
"""test, validation: about subjects that training never asks about. two_hop: two facts that training never puts
together."""

_APART = (("seat", "founded"), ("owner", "home"))
_TEST_SHARE, _VALIDATION_SHARE = 0.15, 0.05  # of the subjects


@cache
def questions(split: str) -> tuple[Question, ...]:
    """Those of a split, mixed. Raises KeyError for an unknown one."""
    chosen = [q for q in world().questions() if _split_of(q) == split]
    if not chosen:
        raise KeyError(split)
    return tuple(_mixed(chosen, f"search_qa {split}"))


def tasks(split: str, seed: int) -> list[Task]:
    """The tasks of a split; the order of training is the seed's."""
    made = [_task(split, index, question) for index, question in enumerate(questions(split))]
    return _mixed(made, f"search_qa order {seed}") if split == "train" else made


def question_of(task: Task) -> Question:
    """The question of a generated task."""
    return questions(task.data["split"])[task.data["index"]]


def _split_of(question: Question) -> str:
    if question.path in _APART:
        return "two_hop"
    place = int.from_bytes(hashlib.sha256(question.subject.encode()).digest()[:4], "big") / 2**32
    if place < _TEST_SHARE:
        return "test"
    return "validation" if place < _TEST_SHARE + _VALIDATION_SHARE else "train"


def _task(split: str, index: int, question: Question) -> Task:
    data = {
        "question": question.text, "answers": (question.answer,), "data_source": f"generated_{len(question.path)}_hop",
        "split": split, "index": index,
    }  # fmt: skip
    return Task(id=f"{split}-{index}", data=data)


def _mixed(items: list[T], seed: str) -> list[T]:
    rng = Random(seed)
    return [item for _, item in sorted(((rng.random(), item) for item in items), key=lambda pair: pair[0])]
