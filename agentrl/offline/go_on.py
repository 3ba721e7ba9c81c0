"""`go_on`: sample on from a turn of a stored rollout, several ways, to see what would have helped.

The state of environment and tools is made again by playing the turns before: their tokens are the stored ones, their
calls run live, and where these answer otherwise nothing is sampled.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from agentrl.checkpoint.run_folder import RunFolder
from agentrl.containment.event_loop import blocking, run
from agentrl.containment.threads import check_abandoned
from agentrl.engine.base import engine_class
from agentrl.errors import UserError
from agentrl.eval.evaluate import model_of
from agentrl.eval.held_out import solved_by
from agentrl.eval.progress import Progress
from agentrl.models.load import resolve_types
from agentrl.offline.replay import Which, live_task
from agentrl.offline.turns import Script, Spoken, StoredTurns, spoken_by
from agentrl.plugins.mixture import environment_of
from agentrl.plugins.registry import make_environment
from agentrl.plugins.types import Task
from agentrl.recipe.load import dump_recipe, load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.journal import Journal
from agentrl.rollout.model_reward import ask_reward_model
from agentrl.rollout.player import Player
from agentrl.rollout.stored import StoredSample
from agentrl.training.run import same_tokenizer
from agentrl.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True)
class GoneOn:
    """The result of `go_on`."""

    folder: Path | None
    """Of the form of a run folder: the continuations as one group of step 1. None: none could be sampled."""
    stored: StoredSample
    """The rollout that they go on from."""
    solved: bool | None
    """Whether that was solved; None where it failed."""
    samples: tuple[Trajectory, ...]
    """The continuations, in order, those that failed or were stopped included."""
    stopped: tuple[str, ...]
    """For each, why it could not be gone on; empty where it could."""
    solved_now: tuple[bool | None, ...]
    """For each, whether it is solved; None where it failed or was stopped."""


def go_on(
    folder: str | Path,
    which: Which,
    *,
    turn: int,
    n: int = 4,
    model: str | None = None,
    overrides: Sequence[str] = (),
    output: str | None = None,
    progress: Progress | None = None,
) -> GoneOn:
    """Keep the first `turn` turns of a stored rollout, and sample what follows `n` times.

    folder: of a run, an evaluation or rollouts. model: a folder, a run or a hub name; default: the run's best
    checkpoint, or the recipe's model. overrides: `key=value` of the folder's recipe. output: the new folder; default:
    `continued-<number>` beside what is stored.

    Raises UserError for bad input: no such sample or turn, a task that is gone, a model with another tokenizer.
    """
    path = Path(folder)
    _, sample = which.find(path)
    turns = len(sample.trajectory.turns)
    if not 0 <= turn < turns:
        raise UserError(f"--turn {turn}: {sample.trajectory.request_id} has {turns} turns: expected 0 to {turns - 1}")
    if output is not None:
        RunFolder.check_free(output)
    own = RunFolder(path)
    previous = load_recipe(str(own.recipe()))
    recipe = load_recipe(str(own.recipe()), overrides)
    for one in (previous, recipe):
        if engine_class(one.engine.name).brings_chat:
            raise UserError(f"engine {one.engine.name!r} gives no token ids: its rollouts cannot be gone on with")
    named = model_of(model) if model is not None else (model_of(str(path)) if own.checkpoints.is_dir() else None)
    if named is not None:
        recipe = recipe.changed(model={"path": named, "lora": None})
    if not same_tokenizer(previous, recipe):
        raise UserError(
            f"--model: {recipe.model.path} has another tokenizer than {previous.model.path}, whose tokens are stored"
        )
    with progress or Progress() as shown:
        return blocking(lambda: run(_go_on(own, sample, resolve_types(recipe), turn, n, output, shown)))


async def _go_on(
    folder: RunFolder, sample: StoredSample, recipe: Recipe, turn: int, n: int, output: str | None, progress: Progress
) -> GoneOn:
    env = make_environment(recipe.env)
    try:
        task = live_task(env, sample)
    except UserError:
        await env.close()
        raise
    player = await Player.build(recipe, None, env, progress.say, progress.phase)
    player.engine = engine = StoredTurns(player.engine)
    try:
        if recipe.rewards.model is not None:
            ask_reward_model(player)
        driver = player.driver(label="continue")
        work = _Work(driver, engine, sample, task, spoken_by(sample.trajectory), turn)
        room = asyncio.Semaphore(recipe.rollout.concurrency)
        done = progress.follow(f"{n} ways on from turn {turn}", n)

        async def one(number: int) -> tuple[Trajectory, str]:
            async with room:
                found = await work.sample(number)
                check_abandoned()
                done(Group(task, ()))
                return found

        each = await asyncio.gather(*(one(number) for number in range(n)))
        group = await driver.scorer.score_group(Group.of(task, [t for t, _ in each]))
        scored = {t.sample: t for t in (*group.trajectories, *group.failed)}
        samples = tuple(scored[number] for number in range(n))
        stopped = tuple(why for _, why in each)
        made = None
        if not all(stopped):
            made = RunFolder.create(output, "") if output is not None else RunFolder.within(folder.path, "continued")
            made.write_recipe(dump_recipe(recipe))
            place = partial(environment_of, env)
            journal = Journal(TrajectoriesSection(), lambda: made.trajectories, place)
            journal.step(1, [group], split=sample.facts["split"])
        words = [solved_by(env, t) if t.valid else None for t in (*samples, replace(sample.trajectory, task=task))]
        return GoneOn(made.path if made else None, sample, words[-1], samples, stopped, tuple(words[:-1]))
    finally:
        for line in await player.close():
            progress.say(line)


@dataclass(frozen=True, slots=True)
class _Work:
    driver: Driver
    engine: StoredTurns
    stored: StoredSample
    task: Task
    turns: Sequence[Spoken]
    turn: int

    async def sample(self, number: int) -> tuple[Trajectory, str]:
        """A continuation, tried again where the machinery failed, and why it was stopped."""
        previous = self.stored.trajectory
        for attempt in range(self.driver.limits.retries + 1):
            request = self.driver.request(self.task, number, attempt=attempt)
            if previous.seed is not None:
                request.seed = request.main.seed = previous.seed  # the plugins' random numbers are those that they had
            script = Script(self.turns, self.turn, strict=True, branches=bool(previous.segments), number=number + 1)
            self.engine.seat(request.id, script)
            found = await self.driver.drive(request)
            if found.failure is None:
                break
        left = self.turn - len(script.said)
        why = script.stopped or (f"it ended by {found.finish} before turn {self.turn}" if left else "")
        return _untrained(found, len(script.said)), why


def _untrained(t: Trajectory, turns: int) -> Trajectory:
    """The trajectory with its first turns left out of the loss: other weights sampled them."""
    mask = np.array(t.loss_mask)
    for turn in t.turns[:turns]:
        mask[turn.start : turn.end] = 0
    kept = tuple(replace(turn, trained=False) for turn in t.turns[:turns])
    return replace(t, turns=(*kept, *t.turns[turns:]), loss_mask=mask)
