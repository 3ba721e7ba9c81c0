"""Inspect (`inspect_ai`): its tasks, by their own solvers and scorers; the model answers through the gateway.

Inspect runs one evaluation at a time in a process: samples play at the same time in as many processes as `processes`
of `env.args` and `agent.args` allows.
"""

import asyncio
import os
import tempfile
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("INSPECT_DISPLAY", "none")

from inspect_ai import eval_async
from inspect_ai._eval.loader import load_tasks
from inspect_ai.model import get_model
from inspect_ai.scorer import value_to_float


class Adapter:
    """task: what `inspect eval` takes, `file.py`, `file.py@name` or the name of an installed one. args: its own. train:
    the first so many samples are training tasks, by default none, since tasks of Inspect are evaluations; the others
    are the split `test`. solved: the score that counts as solved. limits: of a sample, as keyword arguments of
    `inspect_ai.eval`, such as `message_limit`."""

    def __init__(
        self,
        task: str,
        args: dict[str, Any] | None = None,
        train: int = 0,
        solved: float = 1.0,
        limits: dict[str, Any] | None = None,
    ) -> None:
        path, at, name = task.partition("@")
        if os.path.isabs(path):  # which it looks for as a pattern where no task is named
            task = os.path.relpath(path) + at + name
        found = load_tasks([task], args or {})
        if len(found) != 1:
            names = ", ".join(one.name for one in found)
            raise ValueError(f"{task} holds {len(found)} tasks ({names}): name one, as file.py@name")
        self.inspected, self.solved, self.limits = found[0], solved, limits or {}
        for number, sample in enumerate(self.inspected.dataset, 1):
            sample.id = number if sample.id is None else sample.id
        self.samples = list(self.inspected.dataset)
        self.train = min(train, len(self.samples))
        self.playing = asyncio.Lock()

    def describe(self) -> dict[str, Any]:
        """See docs/foreign.md."""
        return {
            "name": self.inspected.name.rpartition("/")[2],
            "splits": {"train": self.train, "test": len(self.samples) - self.train},
            "solved": self.solved,
            "cannot": {
                "metrics over samples": "each sample's scores alone; accuracies and intervals are agentrl's",
                "epochs": "samples of a task are those of the recipe",
            },
        }

    def _sample(self, task: Mapping[str, Any]) -> Any:
        return self.samples[task["index"] + (0 if task["split"] == "train" else self.train)]

    def task(self, split: str, index: int) -> dict[str, Any]:
        """A sample's id, input and target."""
        sample = self._sample({"split": split, "index": index})
        messages = sample.input
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        else:
            messages = [{"role": message.role, "content": message.text} for message in messages]
        return {"id": str(sample.id), "target": sample.target, "messages": messages}

    async def play(self, task: dict[str, Any], client: dict[str, Any]) -> dict[str, Any]:
        """One sample from its setup to its scores. Raises RuntimeError where Inspect says that it went wrong."""
        sample = self._sample(task)
        model = get_model(
            f"openai-api/agentrl/{client['model']}",
            base_url=client["base_url"],
            api_key=client["api_key"],
            memoize=False,
        )
        async with self.playing:
            with tempfile.TemporaryDirectory(prefix="agentrl-inspect-") as folder:
                options = {"sample_id": [sample.id], "epochs": 1, "log_dir": folder, "max_retries": 0}  # else for ever
                (log,) = await eval_async(self.inspected, model=model, **{**options, **self.limits})
                played = (log.samples or [None])[0]  # read from the folder
        error = log.error or (played.error if played is not None else None)
        if played is None or error is not None:
            raise RuntimeError(error.message if error is not None else f"no sample was played: {log.status}")
        return {"rewards": _rewards(played.scores or {})}


def _rewards(scores: Mapping[str, Any]) -> dict[str, float]:
    """Scores by the name of their scorer, and by their own names where a scorer gives several."""
    as_number = value_to_float()
    rewards: dict[str, float] = {}
    for name, score in scores.items():
        values = score.value if isinstance(score.value, Mapping) else {name: score.value}
        rewards |= {key: as_number(value) for key, value in values.items()}
    return rewards
