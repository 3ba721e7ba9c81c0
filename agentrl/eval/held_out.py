"""The held-out tasks of a run: the same tasks and the same seeds at every evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.errors import UserError, call_plugin
from agentrl.eval.result import SplitResult, summarize
from agentrl.plugins.registry import tasks_of
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.rollout.player import Player
from agentrl.trajectory import Group, Trajectory

EVAL_SEED = 20_000_003  # apart from those of training steps


@dataclass(slots=True)
class HeldOut:
    """Plays the first `eval.tasks` fitting tasks of a split. `tasks` maps split -> tasks. splits: those to report;
    choosing: the one by which the best checkpoint is chosen, None where there is none."""

    player: Player
    tasks: Mapping[str, Sequence[Task]]
    samples: int
    temperature: float | None
    splits: tuple[str, ...]
    choosing: str | None

    @classmethod
    async def prepare(
        cls, player: Player, recipe: Recipe, splits: Sequence[str], choosing: str | None = None
    ) -> "tuple[HeldOut, list[str]]":
        """With the lines to print about tasks whose prompt does not fit."""
        chosen: dict[str, Sequence[Task]] = {}
        notes = []
        for split in dict.fromkeys((*splits, *((choosing,) if choosing is not None else ()))):
            every = tasks_of(player.env, split)
            wanted = [every[i] for i in range(min(recipe.eval.tasks, len(every)))]
            lengths = await player.measure(wanted)
            if line := lengths.report(split):
                notes.append(line)
            chosen[split] = [wanted[i] for i in lengths.fitting]
        return cls(player, chosen, recipe.eval.samples, recipe.eval.temperature, tuple(splits), choosing), notes

    async def play(
        self, split: str, on_group: Callable[[Group], None] | None = None, after: int = 0
    ) -> tuple[SplitResult, list[Group]]:
        """after: steps of training that are done, which the ids of sessions tell and their seeds do not."""
        groups = await self.player.play(
            self.tasks[split],
            self.samples,
            seed=(EVAL_SEED, 0),
            temperature=self.temperature,
            on_group=on_group,
            occasion=f"eval_{split}_{after}",
        )
        return summarize(split, groups, self.solved), groups

    def solved(self, trajectory: Trajectory) -> bool:
        """The environment's word on a finished trajectory. Raises UserError for an error of it, and for no word."""
        env = self.player.env
        whose = f"environment {env.name!r}: `solved` of task {trajectory.task.id}"
        found = call_plugin(whose, env.solved, trajectory.rewards, trajectory.task)
        if not isinstance(found, bool | np.bool_):
            raise UserError(f"{whose} gave {type(found).__name__}, not True or False")
        return bool(found)
