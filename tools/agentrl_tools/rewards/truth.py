"""Where a task keeps what is right, and how a text marks its final answer: what the reward functions share."""

from collections.abc import Mapping

from agentrl.plugins.types import Json, Task
from agentrl_tools.rewards.grade import boxed, hashed

TRUTH_FIELDS = ("ground_truth", "reward_model.ground_truth", "answer")


def field_of(data: Mapping[str, Json], path: str) -> Json:
    """`reward_model.ground_truth` of nested mappings; None where it is not there."""
    if path in data:
        return data[path]
    found: Json = data
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def truth_of(task: Task, field: str | None = None) -> Json:
    """The task's ground truth: of that field, else of the first of `TRUTH_FIELDS` that it has. Raises
    ValueError."""
    for path in (field,) if field else TRUTH_FIELDS:
        value = field_of(task.data, path)
        if value is not None:
            return value
    wanted = field or ", ".join(TRUTH_FIELDS)
    has = ", ".join(task.data) or "nothing"
    raise ValueError(f"task {task.id} has no ground truth: none of {wanted} in its data, which has {has}")


def marked(text: str) -> str | None:
    """What stands in the last mark: `#### x`, `\\boxed{x}` or `<answer>x</answer>`; None where there is none.
    Linear in the text, whatever it holds."""
    found = [mark for mark in (hashed(text), boxed(text), _tagged(text)) if mark is not None]
    return max(found, key=lambda mark: mark[0])[1] if found else None


def _tagged(text: str) -> tuple[int, str] | None:
    end = text.rfind("</answer>")
    at = text.rfind("<answer>", 0, max(end, 0))
    return None if at < 0 else (at, text[at + len("<answer>") : end])
