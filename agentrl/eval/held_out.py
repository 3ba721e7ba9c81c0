"""The held-out tasks of a run: the same tasks and the same seeds at every evaluation."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

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

T = TypeVar("T")

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

    async def play(self, split: str, after: int = 0) -> tuple[SplitResult, list[Group]]:
        """Play all tasks of `split`; return the result and the groups.

        after: training steps done so far; part of the session ids, not of the seeds.
        """
        return (await self.play_all((split,), after))[split]

    async def play_all(self, splits: Sequence[str], after: int = 0) -> dict[str, tuple[SplitResult, list[Group]]]:
        """What `play` returns of each of `splits`, all played at once."""
        sampled = await self.at_once(splits, partial(self.sample, after=after))
        return {
            split: (summarize(split, outcomes_of(groups, self.solved)), groups) for split, groups in sampled.items()
        }

    async def at_once(self, splits: Sequence[str], play: Callable[..., Coroutine[object, object, T]]) -> dict[str, T]:
        """What `play(split, limits=...)` returns of each, all running at once, so that none waits for the last rollouts
        of another; no more of them than there may be requests in flight. limits: the share of those; for `sample`.

        Raises UserError of the first that does; the others are cancelled.
        """
        concurrency = self.player.recipe.rollout.model_copy(update=dict(self.limits)).concurrency
        count = max(1, min(len(splits), concurrency))
        limits, turn = {"concurrency": concurrency // count}, asyncio.Semaphore(count)

        async def in_turn(split: str) -> T:
            async with turn:
                return await play(split, limits=limits)

        try:
            async with asyncio.TaskGroup() as playing:
                tasks = {split: playing.create_task(in_turn(split)) for split in splits}
        except ExceptionGroup as errors:
            if (ours := errors.subgroup(UserError)) is not None:
                raise ours.exceptions[0] from None
            raise
        return {split: task.result() for split, task in tasks.items()}

    async def sample(
        self,
        split: str,
        *,
        only: Sequence[Collection[int]] | None = None,
        on_sample: Callable[[int, Trajectory], None] | None = None,
        on_group: Callable[[Group], None] | None = None,
        limits: Mapping[str, Json] | None = None,
        after: int = 0,
    ) -> list[Group]:
        """Play tasks of `split`; return the groups. only, on_sample, on_group: as of `roll_out`. limits: keys of
        `rollout`, beside those of every evaluation. after: see `play`."""
        return await self.player.play(
            self.tasks[split],
            self.samples,
            seed=(EVAL_SEED, 0),
            limits={**self.limits, **(limits or {})},
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
