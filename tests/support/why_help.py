"""Stored samples of a calculator, solved and unsolved: what tests of `why` and of scanners read."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.plugins.types import Task
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.journal import Journal
from agentrl.trajectory import FinishReason, Group, Learned, ToolUse, Trajectory, Turn


def call(arguments: Any, name: str = "calculator") -> Any:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def answer(text: str) -> Any:
    return {"role": "assistant", "content": text}


def result(text: str) -> Any:
    return {"role": "tool", "name": "calculator", "content": [{"type": "text", "text": text}, {"type": "image"}]}


TEXT = "".join(map(chr, range(32, 127)))


def sample(number: int, wrong: bool, index: int = 0, **changes: Any) -> Trajectory:
    """A sample whose call copies 225 wrongly if `wrong`, and is not sure of the 3 or the 4 there."""
    written = "22/15 " if wrong else "225/15"
    ids = np.array([TEXT.index(c) for c in f"?{written}.14!"], np.int32)
    mask = np.array([0, *[1] * 6, 0, 1, 1, 1], np.uint8)
    logprobs = (-0.1 * mask).astype(np.float32)
    logprobs[2 if wrong else 8] = -3.0
    messages = (user("225 by 15"), call({"expression": written}), result("14"), answer("14!"))
    given = Trajectory(
        request_id=f"{number}#{index}", task=Task(f"t{number}", {"level": number % 3, "number": number, "kind": "x"}),
        sample=index, ids=ids, loss_mask=mask, logprobs=logprobs, prompt_length=1, turns=(Turn(1, 7), Turn(8, 11)),
        weight_version=np.where(mask, 1, -1).astype(np.int32), messages=messages, rewards={"answer": float(not wrong)},
        finish=FinishReason.STOP, tools=("calculator",), tool_uses=(ToolUse("calculator", 0, 0.1),),
    )  # fmt: skip
    return replace(given, **changes)


def stored(folder: Path, step: int, samples: Sequence[Trajectory], split: str = "test") -> Path:
    """The file of an evaluation of these samples, solved where they earned something."""
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    journal = Journal(TrajectoriesSection(), lambda: folder / "trajectories", lambda task: "home")
    groups: dict[str, list[Trajectory]] = {}
    for one in samples:
        groups.setdefault(one.task.id, []).append(one)
    held = [
        Group(those[0].task, tuple(t for t in those if t.valid), tuple(t for t in those if not t.valid))
        for those in groups.values()
    ]
    if split == "train":
        every = [t for group in held for t in group.trajectories]
        journal.step(step, held, [Learned(True, t.logprobs, t.logprobs) for t in every])
    else:
        journal.evaluation(split, step, held, lambda t: t.reward > 0)
    return folder / "trajectories" / (f"step_{step}.parquet" if split == "train" else f"eval_{split}_{step}.parquet")
