"""reasoning-gym: its procedural sets, scored by their own scorers, with the levels of their curricula as difficulty.

A task is an entry of a set: its question is the opening, and the first answer ends the rollout.
"""

import copy
import json
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
from reasoning_gym.factory import CURRICULA, DATASETS
from reasoning_gym.utils import extract_answer

HELD_OUT = 1_000_003
"""Added to the seed for held-out tasks."""
CARELESS = 0.5
"""The share of careless answers that belong to another question."""
_EXAMPLES = ("possible_answer", "example_answer", "example_correct_answer")
"""Where entries keep an answer that is right beside others, and `answer` is None."""
_ITSELF = ("composite",)  # a set of sets, which `dataset` does better


class Adapter:
    """dataset: the name of a set, or several, which take turns. config: of the sets, as their own configuration.
    levels: those of the curriculum, which take turns too, and which tasks name as `level`; where a set has no
    curriculum there are none. attributes: those that have a level; by default all. mode: whether a level draws from it
    alone (`upper_bound`) or from the lower ones too (`inclusive`). train, held_out: how many tasks. seed: of the sets.
    opening: what stands before each question. tag: the XML tag in which an answer is looked for; where it does not
    occur, the whole text is the answer."""

    def __init__(
        self,
        dataset: str | list[str],
        config: dict[str, Any] | None = None,
        levels: list[int] | None = None,
        attributes: list[str] | None = None,
        mode: str = "upper_bound",
        train: int = 10_000,
        held_out: int = 200,
        seed: int = 0,
        opening: str = "",
        tag: str = "answer",
    ) -> None:
        self.names = [dataset] if isinstance(dataset, str) else list(dataset)
        for name in self.names:
            if name not in DATASETS or name in _ITSELF:
                raise ValueError(f"reasoning-gym has no set {name!r}: reasoning_gym.factory.DATASETS names them")
            if levels and name not in CURRICULA:
                raise ValueError(f"the set {name!r} has no curriculum: leave `levels` out")
        self.config, self.levels = config or {}, levels or []
        self.attributes, self.mode = attributes, RangeAttributeMode(mode)
        self.sizes, self.seed, self.opening, self.tag = {"train": train, "test": held_out}, seed, opening, tag
        every: list[int | None] = [*self.levels] or [None]
        self.kinds = [(name, level) for level in every for name in self.names]
        self._set = lru_cache(maxsize=256)(self._made)
        self._kept = lru_cache(maxsize=1024)(self._made_entry)
        for name, level in self.kinds:
            self._set(name, level, "train")

    def describe(self) -> dict[str, Any]:
        """See docs/foreign.md."""
        return {
            "name": self.names[0] if len(self.names) == 1 else "reasoning_gym",
            "splits": self.sizes,
            "reward_parts": ["score"],
            "solved": {"score": 1.0},
            "cannot": {"tools": "the sets have questions and answers alone"},
        }

    def _made(self, name: str, level: int | None, split: str) -> Any:
        """A set at a level."""
        seed, size = self.seed + (HELD_OUT if split != "train" else 0), self.sizes[split]
        fixed = {**self.config, "seed": seed, "size": size}
        if level is None:
            return reasoning_gym.create_dataset(name, **fixed)
        curriculum = CURRICULA[name]()
        for attribute in self.attributes or curriculum.attributes:
            most = len(curriculum.get_attribute(attribute).levels) - 1
            curriculum.set_attr_level(attribute, min(level, most))
        config = curriculum.generate_configuration(fixed, DefaultCurriculumContext(self.mode))
        for key, value in self.config.items():  # the user's own word goes last
            setattr(config, key, value)
        return DATASETS[name][0](config=config)

    def _entry(self, task: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The set of a task, and its entry, which is made once: some sets take long, and codeio's do not come out the
        same twice."""
        made, entry = self._kept(task["split"], task["index"])
        return made, copy.deepcopy(entry)

    def _made_entry(self, split: str, index: int) -> tuple[Any, dict[str, Any]]:
        name, level = self.kinds[index % len(self.kinds)]
        made = self._set(name, level, split)
        return made, made[index]

    def task(self, split: str, index: int) -> dict[str, Any]:
        """The set of a task and its level."""
        name, level = self.kinds[index % len(self.kinds)]
        return {"set": name} if level is None else {"set": name, "level": level}

    def open(self, task: dict[str, Any], seed: int) -> "Question":
        """One rollout."""
        made, entry = self._entry(task)
        return Question(made, entry, self.opening, self.tag)

    def demonstrate(self, task: dict[str, Any], seed: int, style: str) -> list[dict[str, Any]]:
        """The answer that is stored with the question (`stored`), or half of the time that of another question
        (`careless`). Raises ValueError: none is."""
        if style not in ("stored", "careless"):
            raise ValueError(f"there is no style {style!r}: reasoning-gym has stored and careless")
        rng = random.Random(seed)
        if style == "careless" and rng.random() < CARELESS:
            step = len(self.kinds) * rng.randrange(1, 1 + self.sizes[task["split"]] // len(self.kinds))
            task = {**task, "index": (task["index"] + step) % self.sizes[task["split"]]}
        answer = stored_answer(self._entry(task)[1])
        if answer is None:
            raise ValueError(f"the set {task['set']!r} stores no answers: whether one is right, its scorer tells")
        return [{"role": "assistant", "content": answer}]

    def stored(self, task: dict[str, Any]) -> dict[str, Any]:
        """The entry's `answer`, and where else an answer that is right may stand in it."""
        entry = self._entry(task)[1]
        beside = {f"metadata.{key}": _text(entry["metadata"].get(key)) for key in _EXAMPLES if key in entry["metadata"]}
        return {"answer": _text(entry["answer"]), **beside}


class Question:
    """An entry of a set."""

    def __init__(self, made: Any, entry: dict[str, Any], opening: str, tag: str) -> None:
        self._made, self._entry, self._tag = made, entry, tag
        self.messages = opening + entry["question"]

    def step(self, message: dict[str, Any]) -> None:
        """Any answer is the last."""

    def grade(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What the set's scorer says. One that raises on an answer has not understood it: a score of 0, counted."""
        said = next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), None)
        answer = said if isinstance(said, str) else ""
        if self._tag and f"<{self._tag}>" in answer:
            answer = extract_answer(answer, tag_name=self._tag) or ""
        try:
            score, raised = float(self._made.score_answer(answer.strip(), entry=self._entry)), 0.0
        except Exception:  # noqa: BLE001 - boxnet and prime_factorization raise what they meet in an answer
            score, raised = 0.0, 1.0
        return {"rewards": {"score": score}, "metrics": {"scorer_raised": raised}}


def stored_answer(entry: dict[str, Any]) -> str | None:
    """The answer of an entry, or one of several that are right; None where none is stored."""
    found = entry["answer"]
    for key in _EXAMPLES:
        found = entry["metadata"].get(key) if found is None else found
    return _text(found)


def _text(found: Any) -> str | None:
    """An answer as it is said; None where there is none."""
    return found if found is None or isinstance(found, str) else json.dumps(found)
