"""What calls came to: counts by samples, and what is said of them."""

from typing import Any

import numpy as np
import pytest

from agentrl.chat.calls import failed
from agentrl.plugins.types import Task
from agentrl.rollout.call_counts import CallCounts, add_row, count_calls
from agentrl.rollout.trajectory_file import row
from agentrl.trajectory import FinishReason, Group, ToolUse, Trajectory, Turn

LIMIT = 4
UNREAD = f"model: {failed('<tool_call>', 'it is not closed').error}"


def sample(*uses: tuple[str, str | None], turn: int = 3, tools: tuple[str, ...] = ("lend",)) -> Trajectory:
    """A sample of one turn of so many tokens, with these calls."""
    mask = np.array([0, *[1] * turn], np.uint8)
    return Trajectory(
        request_id="r", task=Task("t", {}), sample=0, ids=np.zeros(1 + turn, np.int32), loss_mask=mask,
        logprobs=np.zeros(1 + turn, np.float32), weight_version=np.where(mask, 0, -1).astype(np.int32),
        prompt_length=1, finish=FinishReason.STOP, turns=(Turn(1, 1 + turn),), messages=(), rewards={"a": 0.0},
        tools=tools, tool_uses=tuple(ToolUse(name, 0, 0.0, error) for name, error in uses),
    )  # fmt: skip


def counted(*samples: Trajectory) -> CallCounts:
    return count_calls([Group(Task("t", {}), samples)], LIMIT)


WRONG = sample(("calculator", "model: there is no tool named 'calculator'"))
RIGHT = sample(("lend", None))
SILENT = sample()


@pytest.mark.parametrize(
    ("samples", "line"),
    [
        ([RIGHT] * 8, None),
        ([WRONG] * 7, None),
        ([WRONG] * 4 + [RIGHT] * 5, None),
        ([WRONG] * 8, "8 of 8 calls name tools that do not exist: calculator (8); the tasks offer lend"),
        ([sample(("x", "model: no"), tools=())] * 8,
         "8 of 8 calls name tools that do not exist: x (8); the tasks offer no tools"),
        ([sample(("", UNREAD))] * 6 + [RIGHT] * 2, "6 of 8 calls cannot be read"),
        ([sample(("lend", UNREAD), turn=LIMIT)] * 8,
         "8 of 8 calls were cut off by rollout.max_turn_tokens, which is 4"),
        ([SILENT] * 8, "8 of 8 samples call no tool; the tasks offer lend"),
        ([sample(tools=())] * 8, None),
    ],
)  # fmt: skip
def test_what_most_calls_came_to_is_said(samples: list[Trajectory], line: str | None) -> None:
    assert [fault.line for fault in counted(*samples).faults(LIMIT)] == ([] if line is None else [line])


def test_a_step_has_their_metrics() -> None:
    found = counted(WRONG, RIGHT, SILENT, sample(("", UNREAD)), sample(("", UNREAD), turn=LIMIT))
    assert found.metrics() == {"calls/unknown": 1, "calls/unreadable": 1, "calls/cut": 1, "calls/none": 1}
    assert (found.samples, found.calls, found.named()) == (5, 4, "calculator (1)")


def test_stored_samples_are_counted_alike() -> None:
    samples = (WRONG, RIGHT, SILENT, sample(("", UNREAD), turn=LIMIT))
    stored = CallCounts()
    for one in samples:
        add_row(stored, row(one), LIMIT)
    assert stored == counted(*samples)


def test_rows_of_older_versions_are_counted_as_far_as_they_go() -> None:
    old: dict[str, Any] = {"tools": None, "tool_uses": [{"name": "x", "error": None}], "turns": None}
    counts = CallCounts()
    add_row(counts, old, None)
    assert (counts.samples, counts.calls, counts.unknown) == (0, 1, 1)
