"""Stored evaluations whose outcomes a test says."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from learner_help import make_groups

from agentrl.plugins.types import Task
from agentrl.recipe.load import dump_recipe, load_recipe
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.journal import Journal
from agentrl.trajectory import Boundary, Failure, FinishReason, Group


def stored(folder: Path, rewards: Sequence[Sequence[float]], **options: object) -> Path:
    """A folder with an evaluation of `test`: the rewards of each task's samples; 1 is solved, None one that failed."""
    step, ids, env = (options.get(name, value) for name, value in (("step", 0), ("ids", "t"), ("env", "e")))
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    groups = []
    for index, group in enumerate(make_groups([[one or 0.0 for one in task] for task in rewards])):
        task = Task(f"{ids}{index}", {"question": f"{options.get('data', 'q')}{index}"})
        samples = [replace(t, task=task) for t in group.trajectories]
        lost = [i for i, one in enumerate(rewards[index]) if one is None]
        failed = [
            replace(samples[i], failure=Failure(Boundary.ENGINE, "gone"), finish=FinishReason.ERROR, rewards={})
            for i in lost
        ]
        groups.append(Group(task, tuple(t for i, t in enumerate(samples) if i not in lost), tuple(failed)))
    journal = Journal(TrajectoriesSection(), lambda: folder / "trajectories", lambda task: str(env))
    journal.evaluation("test", int(str(step)), groups, lambda t: t.reward == 1.0)
    return folder


def run_of(folder: Path, rewards: Sequence[Sequence[float]], *keys: str, step: int = 20, **options: object) -> Path:
    """A run folder with an evaluation of `test` after a step, and its recipe: the default one with these keys."""
    stored(folder, rewards, step=step, **options)
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe(None, keys)))
    return folder
