"""The held-out tasks of a run: the same tasks and the same seeds at every evaluation."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl.errors import UserError, call_plugin
from agentrl.eval.outcome import outcomes_of
from agentrl.eval.result import SplitResult, summarize
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import tasks_of
from agentrl.plugins.types import Json, Task
from agentrl.recipe.schema import Recipe
from agentrl.rollout.player import Player
from agentrl.trajectory import Group, Trajectory

EVAL_SEED = 20_000_003  # differs from every seed of a training step


@dataclass(slots=True)
class HeldOut:
    """The held-out tasks of each split, with the settings that every evaluation plays them with."""

    player: Player
    """Plays the tasks."""
    tasks: Mapping[str, Sequence[Task]]
    """The tasks of each split: those of its first `eval.tasks` whose prompt fits."""
    samples: int
    """Samples per task."""
    limits: Mapping[str, Json]
    """Keys of `rollout` that evaluations have another value of, such as the temperature."""
    splits: tuple[str, ...]
    """The splits to report."""
    choosing: str | None
    """The split that chooses the best checkpoint; None if there is none."""

    @classmethod
    async def prepare(
        cls, player: Player, recipe: Recipe, splits: Sequence[str], choosing: str | None = None
    ) -> "tuple[HeldOut, list[str]]":
        """Choose the tasks of `splits` and `choosing`; return them with one line per split about prompts that do not
        fit."""
        chosen: dict[str, Sequence[Task]] = {}
        notes = []
        for split in dict.fromkeys((*splits, *((choosing,) if choosing is not None else ()))):
            every = tasks_of(player.env, split)
            wanted = [every[i] for i in range(min(recipe.eval.tasks, len(every)))]
            lengths = await player.measure(wanted, recipe.eval.rollout.get("max_tokens"))
            fit = lengths.fitting
            said = await asyncio.gather(*(player.unseen(wanted[i]) for i in fit))
            late = {i: f"{wanted[i].id}: {why}" for i, why in zip(fit, said, strict=True) if why is not None}
            lengths = replace(lengths, broken={**lengths.broken, **late})
            if line := lengths.report(split):
                notes.append(line)
            chosen[split] = [wanted[i] for i in lengths.fitting]
        return cls(player, chosen, recipe.eval.samples, recipe.eval.rollout, tuple(splits), choosing), notes

    async def play(
        self, split: str, on_group: Callable[[Group], None] | None = None, after: int = 0
    ) -> tuple[SplitResult, list[Group]]:
        """Play all tasks of `split`; return the result and the groups.

        on_group: called as each group ends. after: training steps done so far; part of the session ids, not of the
        seeds.
        """
        groups = await self.sample(split, on_group=on_group, after=after)
        return summarize(split, outcomes_of(groups, self.solved)), groups

    async def sample(
        self,
        split: str,
        *,
        only: Sequence[Collection[int]] | None = None,
        on_sample: Callable[[int, Trajectory], None] | None = None,
        on_group: Callable[[Group], None] | None = None,
        after: int = 0,
    ) -> list[Group]:
        """Play tasks of `split`; return the groups. only, on_sample, on_group: as of `roll_out`. after: see `play`."""
        return await self.player.play(
            self.tasks[split],
            self.samples,
            seed=(EVAL_SEED, 0),
            limits=self.limits,
            only=only,
            on_sample=on_sample,
            on_group=on_group,
            label=f"eval_{split}_{after}",
        )

    def solved(self, trajectory: Trajectory) -> bool:
        """The environment's `solved` for a finished trajectory.

        Raises UserError if `solved` raises, or returns anything but a bool.
        """
        return solved_by(self.player.env, trajectory)


def solved_by(env: Environment, trajectory: Trajectory) -> bool:
    """The environment's `solved` for a finished trajectory. Raises UserError as `HeldOut.solved`."""
    owner = f"environment {env.name!r}: `solved` of task {trajectory.task.id}"
    found = call_plugin(owner, env.solved, trajectory.rewards, trajectory.task)
    if not isinstance(found, bool | np.bool_):
        raise UserError(f"{owner} gave {type(found).__name__}, not True or False")
    return bool(found)
