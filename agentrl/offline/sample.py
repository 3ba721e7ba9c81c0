"""`sample_rollouts`: rollouts without an update, stored as those of a run: what `train --from` trains on."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from agentrl.checkpoint.run_folder import FolderLock, RunFolder
from agentrl.containment.event_loop import blocking
from agentrl.data.sampler import TaskSampler, make_sampler, restrict
from agentrl.errors import UserError, nearest
from agentrl.eval.progress import Progress
from agentrl.eval.result import failures
from agentrl.models.load import resolve_types
from agentrl.plugins.environment import Environment
from agentrl.plugins.mixture import environment_of
from agentrl.plugins.registry import make_environment, tasks_of
from agentrl.plugins.types import Task
from agentrl.recipe.load import dump_recipe, load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.journal import Journal
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.model_reward import ask_reward_model
from agentrl.rollout.player import Player
from agentrl.rollout.stored import folder_files
from agentrl.rollout.trajectory_file import TRAIN, read_rows
from agentrl.training.interrupt import Interrupted, Interrupts
from agentrl.training.setup import exclude_long
from agentrl.trajectory import Group


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of `sample_rollouts`."""

    folder: Path
    """Of the form of a run folder, without checkpoints."""
    steps: int
    """Steps that are stored, those before a resumption included."""
    interrupted: bool = False
    """Whether it was stopped before the last step."""


def sample_rollouts(
    recipe: Recipe,
    *,
    steps: int = 1,
    split: str = TRAIN,
    model: str | None = None,
    name: str = "rollouts",
    progress: Progress | None = None,
) -> Sampled:
    """Sample `steps` times `rollout.tasks` tasks of a split, `rollout.n` samples each, and store them in a new folder.

    Tasks and seeds are those of the same steps of a run; so the first step is, id for id, that of a run from the same
    weights. model: replaces the recipe's: a folder or hub name. name: of the folder, where the recipe has no `output`.

    Raises UserError for bad input. What was whole when it is interrupted stays.
    """
    RunFolder.check_free(recipe.output)
    if model is not None:
        recipe = recipe.changed(model={"path": model, "lora": None})
    recipe = resolve_types(recipe)
    env = make_environment(recipe.env)
    tasks = _tasks(env, split, recipe)
    with ExitStack() as stack:
        job = _Job(recipe, env, tasks, split, steps, 0, name)
        return _run(job, stack, progress)


def resume_rollouts(folder: str, *, steps: int, progress: Progress | None = None) -> Sampled:
    """Go on with rollouts that `sample_rollouts` stores in `folder`, up to step `steps`. Raises UserError."""
    there = RunFolder.existing(folder)
    recipe = load_recipe(there.recipe())
    stored = (
        folder_files(there.path) if there.trajectories.is_dir() and any(there.trajectories.glob("*.parquet")) else []
    )
    done, split = 0, TRAIN
    if there.checkpoints.is_dir():
        raise UserError(f"--resume {folder}: a run that trains: go on with agentrl train --resume {folder}")
    if stored:
        done = stored[-1].step
        split = next((row["split"] for row in read_rows(stored[-1].path, ["split"])), TRAIN)
    if done >= steps:
        raise UserError(f"--resume: step {done} of {steps} is done; set --steps higher to go on")
    env = make_environment(recipe.env)
    with ExitStack() as stack:
        stack.callback(FolderLock(there.path).release)
        job = _Job(recipe, env, _tasks(env, split, recipe), split, steps, done, there.path.name, there)
        return _run(job, stack, progress)


def _tasks(env: Environment, split: str, recipe: Recipe) -> Sequence[Task]:
    if split not in (TRAIN, *env.splits):
        raise UserError(f"--split {split}: environment {env.name!r} has no such split{nearest(split, env.splits)}")
    tasks = tasks_of(env, split)
    if not len(tasks):
        raise UserError(f"environment {env.name!r} (source {recipe.env.source}) has no task in {split}")
    return tasks


@dataclass(slots=True)
class _Job:
    recipe: Recipe
    env: Environment
    tasks: Sequence[Task]
    split: str
    steps: int
    done: int
    name: str
    folder: RunFolder | None = None
    """That of rollouts that are gone on with."""


def _run(job: _Job, stack: ExitStack, progress: Progress | None) -> Sampled:
    shown = stack.enter_context(progress or Progress())
    interrupts = stack.enter_context(Interrupts(job.recipe.rollout.stuck_timeout))
    stack.callback(interrupts.close)
    interrupts.notify = shown.say
    return blocking(lambda: _sample(job, interrupts, shown))


def _sample(job: _Job, interrupts: Interrupts, shown: Progress) -> Sampled:
    recipe = job.recipe
    with ExitStack() as stack:
        try:
            player = interrupts.run(lambda: Player.build(recipe, None, job.env, shown.say, shown.phase))
            stack.callback(_close, player, interrupts, shown)
            if recipe.rewards.model is not None:
                ask_reward_model(player)
            shown.say(player.describe())
            sampler = make_sampler(recipe.data, job.tasks, recipe.train.seed)
            if job.split == TRAIN:
                restrict(sampler, recipe.data, job.tasks)
            if recipe.algorithm.dynamic_sampling is not None or recipe.algorithm.filter is not None:
                shown.say("algorithm.filter and dynamic_sampling choose what is trained on: here all groups are stored")
            for line in exclude_long(player, job.tasks, job.steps * recipe.rollout.tasks, sampler, interrupts):
                shown.say(line)
        except Interrupted:
            raise KeyboardInterrupt("interrupted before the first step: nothing is stored") from None
        folder = job.folder or RunFolder.create(recipe.output, job.name)
        if job.folder is None:
            stack.callback(FolderLock(folder.path).release)
            folder.write_recipe(dump_recipe(recipe))
        interrupts.complete(lambda: player.draw(sampler, job.tasks, job.done * recipe.rollout.tasks))
        whole = TrajectoriesSection(keep=0)
        journal = Journal(whole, lambda: folder.trajectories, partial(environment_of, job.env))
        bar = shown.follow("sampling", (job.steps - job.done) * recipe.rollout.tasks)
        step = job.done
        with suppress(Interrupted):
            for step in range(job.done + 1, job.steps + 1):
                _one_step(job, step, sampler, player, journal, interrupts, shown, bar)
            return Sampled(folder.path, step)
        return Sampled(folder.path, step - 1, interrupted=True)


def _one_step(
    job: _Job,
    step: int,
    sampler: TaskSampler,
    player: Player,
    journal: Journal,
    interrupts: Interrupts,
    shown: Progress,
    bar: Callable[[Group], None],
) -> None:
    limits, start = job.recipe.rollout, perf_counter()
    tasks = [job.tasks[i] for i in interrupts.run(lambda: player.draw(sampler, job.tasks, limits.tasks))]

    def ended(group: Group) -> None:
        bar(group)
        journal.finished(group)

    seed = (job.recipe.train.seed, step)
    groups = interrupts.run(lambda: player.play(tasks, limits.n, seed=seed, label=f"step_{step}", on_group=ended))
    journal.step(step, groups, split=job.split)
    if line := failures(f"step {step}", groups):
        shown.say(line)
    found, seconds = rollout_metrics(groups), perf_counter() - start
    speed = sum(t.sampled_tokens for group in groups for t in group.trajectories) / seconds
    samples = sum(len(group.trajectories) for group in groups)
    shown.say(
        f"step {step:>4}/{job.steps}  {samples} samples  reward {found['reward/mean']:.3f}  "
        f"{speed:,.0f} sampled tokens/s  {seconds:.2f} s"
    )


def _close(player: Player, interrupts: Interrupts, shown: Progress) -> None:
    for line in interrupts.complete(player.close):
        shown.say(line)
