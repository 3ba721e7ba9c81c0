"""Run folders for the tests of the page, written by what writes them in a run, and what a frozen page holds."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.plugins.types import Task
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.journal import Journal
from agentrl.rollout.trajectory_file import note_schemas
from agentrl.trajectory import Boundary, Failure, FinishReason, Group, Learned, Segment, Span, ToolUse, Trajectory, Turn

HOSTILE = "</script><script>globalThis.owned=1</script><img src=x onerror=globalThis.owned=1>\u2028\ud800<!--"
PICTURE = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACH5BAAAAAAALAAAAAABAAEAAAICRAEAOw=="
LENGTH = 12  # tokens of a trajectory


def embedded(page: Path) -> dict[str, Any]:
    """What a frozen page holds."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    return json.loads(text)


def trajectory(task: str, sample: int = 0, reward: float = 1.0, said: str = "#### 1", **changed: Any) -> Trajectory:
    """A trajectory of one call of a tool, whose last message is `said`."""
    call = {"type": "function", "id": "c", "function": {"name": "calculator", "arguments": {"expression": "3-2"}}}
    fields: dict[str, Any] = {
        "request_id": f"{task}#{sample}",
        "task": Task(task, {"kind": "odd" if task[-1] in "13579" else "even", "question": f"What is {task}?"}),
        "sample": sample,
        "ids": np.arange(40, 40 + LENGTH, dtype=np.int32),
        "loss_mask": np.array([0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1], np.uint8),
        "logprobs": np.array([0, 0, 0, 0, -0.1, -0.1, -2, 0, 0, -0.1, -5, -0.1], np.float32),
        "weight_version": np.array([-1, -1, -1, -1, 3, 3, 3, -1, -1, 4, 4, 4], np.int32),
        "prompt_length": 4,
        "turns": (Turn(4, 7), Turn(9, 12, 0.5)),
        "messages": (
            {"role": "user", "content": f"What is {task}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "1", "name": "calculator"},
            {"role": "assistant", "content": said},
        ),
        "rewards": {"answer": reward},
        "finish": FinishReason.STOP,
        "tool_uses": (ToolUse("calculator", 0, 0.002),),
        "seconds": {"total": 1.0 + sample, "engine": 0.7, "tools": 0.002, "environment": 0.0, "hooks": 0.1},
        "spans": (
            Span("engine", 1e9 + sample, 1e9 + sample + 0.7),
            Span("tools", 1e9 + sample + 0.7, 1e9 + sample + 0.9),
        ),
        "tools": ("calculator",),
        "seed": sample,
    }
    return Trajectory(**fields | changed)


def tree(task: str) -> Trajectory:
    """A rollout of two conversations, the second of a sub-agent."""
    branches = tuple(({"role": "user", "content": text},) for text in ("root", "left", "right"))
    segments = (Segment(0, 4), Segment(4, 8, 0), Segment(8, 12, 0))
    whole = (*branches[0], *branches[2])
    return trajectory(task, segments=segments, branches=branches, messages=whole, extra={"depths": (0, 0, 1)})


def failed(task: str) -> Trajectory:
    """A sample that the machinery failed."""
    return trajectory(task, 9, finish=FinishReason.ERROR, failure=Failure(Boundary.TOOL, "tool calculator: away"))


def group(*trajectories: Trajectory) -> Group:
    """The samples of a task as a group."""
    valid = tuple(t for t in trajectories if t.valid)
    return Group(trajectories[0].task, valid, tuple(t for t in trajectories if not t.valid))


def journal(folder: Path) -> Journal:
    """What writes trajectories into a run's folder."""
    (folder / "trajectories").mkdir(exist_ok=True)
    return Journal(TrajectoriesSection(), lambda: folder / "trajectories", lambda task: "gsm8k")


def learned(groups: Sequence[Group]) -> list[Learned]:
    """What an update would have made of each valid sample: an advantage by its reward."""
    found = []
    for t in (t for one in groups for t in one.trajectories):
        mask = t.loss_mask.astype(np.float32)
        found.append(Learned(logprobs=(t.logprobs - 0.25) * mask, advantages=(t.reward - 0.5) * mask, trained=True))
    return found


def run_folder(path: Path, tasks: int = 10, steps: int = 2, recipe: bool = True) -> Path:
    """A run's folder: evaluations of two splits before and after, `steps` steps of two groups, metrics."""
    path.mkdir(parents=True, exist_ok=True)
    takes = {"type": "object", "properties": {"expression": {"type": "string"}}}
    calculator = {"name": "calculator", "description": HOSTILE, "parameters": takes}
    note_schemas([{"type": "function", "function": calculator}])
    writer = journal(path)
    rows: list[dict[str, Any]] = [{"step": 0, "eval/test/accuracy": 0.5}]
    for step in range(1, steps + 1):
        groups = [group(*(trajectory(f"train-{step}{g}", s, s % 2) for s in range(4))) for g in range(2)]
        writer.step(step, groups, learned(groups))
        rows.append({"step": step, "reward/mean": 0.5, "train/entropy": 1 / step, "stop/stop": 8, "stop/error": 0})
    rows[-1] |= {"eval/test/accuracy": 0.75, "health": [{"name": "entropy_collapse", "line": HOSTILE}]}
    for split in ("test", "large"):
        for step in (0, steps):
            solves = 2 if step else 3
            groups = [group(trajectory(f"{split}-{i}", reward=float(i % solves == 0))) for i in range(tasks)]
            if split == "test":
                groups += [group(trajectory("test-hostile", said=HOSTILE)), group(tree("test-tree"))]
                parts = [{"type": "text", "text": "Look:"}, {"type": "image", "image": PICTURE}]
                pictured = ({"role": "user", "content": parts}, {"role": "assistant", "content": "seen"})
                groups += [group(trajectory("test-picture", messages=pictured)), group(failed("test-failed"))]
            writer.evaluation(split, step, groups, lambda t: t.reward > 0)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if recipe:
        (path / "recipe.yaml").write_text("model: {path: tiny}\ntrain: {steps: 2, lr: 0.1}\n")
        (path / "recipe.resumed_1.yaml").write_text("# of step 2\nmodel: {path: tiny}\ntrain: {steps: 4, lr: 0.1}\n")
    return path
