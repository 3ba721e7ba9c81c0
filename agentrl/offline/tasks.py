"""The tasks of stored rollouts, as the environment has them now: with what a file does not hold, such as images."""

import json
import re
from collections.abc import Mapping, Sequence

from agentrl.errors import call_plugin
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import tasks_of
from agentrl.plugins.types import Task
from agentrl.rollout.trajectory_file import as_json


def live_tasks(env: Environment, split: str, stored: Mapping[str, str]) -> dict[str, Task]:
    """Return by their ids those of the stored tasks of a split that the environment still has, with the same data.

    stored: by a task's id its column `task_data`. Raises UserError where the tasks cannot be read.
    """
    tasks: Sequence[Task] = tasks_of(env, split) if split in ("train", *env.splits) else ()
    found = call_plugin(f"environment {env.name!r}: tasks({split!r})", _find, tasks, stored)
    return {name: task for name, task in found.items() if _same(task, stored[name])}


def _same(task: Task, data: str) -> bool:
    try:
        return bool(json.loads(as_json(task.data)) == json.loads(data))
    except (ValueError, RecursionError):  # of a damaged file
        return False


def _find(tasks: Sequence[Task], stored: Mapping[str, str]) -> dict[str, Task]:
    found = {name: task for name in stored if (task := _by_number(tasks, name)) is not None}
    wanted = set(stored) - set(found)
    for index in range(len(tasks)):
        if not wanted:
            break
        task = tasks[index]
        if task.id in wanted:
            wanted.remove(task.id)
            found[task.id] = task
    return found


def _by_number(tasks: Sequence[Task], name: str) -> Task | None:
    """Return the task whose id ends in its place, as most do: making all of them may take long."""
    digits = re.search(r"\d{1,12}$", name)
    if digits is None or int(digits[0]) >= len(tasks):
        return None
    task = tasks[int(digits[0])]
    return task if task.id == name else None
