"""`evaluate`: play held-out tasks with a model, and score them with the rewards that the recipe trains on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.checkpoint.run_folder import MODEL, TRAJECTORIES, RunFolder, recipe_of
from agentrl.errors import UserError, nearest
from agentrl.eval.held_out import HeldOut
from agentrl.eval.progress import Progress
from agentrl.eval.result import SplitResult, failures, parts
from agentrl.models.load import resolve_types
from agentrl.plugins.environment import Environment, is_validation
from agentrl.plugins.mixture import environment_of
from agentrl.plugins.registry import make_environment, tasks_of
from agentrl.plugins.types import Task
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe, TrajectoriesSection
from agentrl.rollout.event_loop import blocking, run
from agentrl.rollout.journal import Journal
from agentrl.rollout.model_reward import ask_reward_model
from agentrl.rollout.player import Player


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of `evaluate`. `evaluation["test"]` is the result of one split."""

    model: str
    """The model's folder or hub name; for an engine that brings its own chat, the chat's description."""
    env: str
    """The environment's name, and its source in brackets unless it is a mixture."""
    splits: tuple[SplitResult, ...]
    """One result per split, in the order requested."""
    notes: tuple[str, ...] = ()
    """Lines about tasks or samples that were left out, and about resources that could not be closed."""

    def __getitem__(self, split: str) -> SplitResult:
        """Return the result of `split`. Raises StopIteration if it was not evaluated."""
        return next(r for r in self.splits if r.split == split)

    def json(self) -> dict[str, Any]:
        """Return model, environment and the results by split as JSON values; `notes` are left out."""
        return {"model": self.model, "env": self.env, "splits": {r.split: r.json() for r in self.splits}}


def evaluate(
    recipe: Recipe | str,
    *,
    overrides: Sequence[str] = (),
    model: str | None = None,
    splits: Sequence[str] | None = None,
    samples: int | None = None,
    by: str | None = None,
    keep: str | Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a model on `eval.tasks` tasks of each split, with `samples` (default: `eval.samples`) samples per task.

    recipe: a Recipe, the path of a recipe, or a run folder: then that run's recipe and its best checkpoint are used.
    overrides: `key=value`, only with a path. model: replaces the recipe's model: a folder, a run folder (its best
    checkpoint) or a hub name. splits: replaces `eval.splits`. by: a field of the tasks' data, by whose values the
    accuracy is given too. keep: a folder for the conversations, which `agentrl show` prints. progress: where to show
    progress; default: stderr. A reward model (`rewards.model`) is loaded into this process.

    Raises UserError for bad input; before a model is loaded, wherever the mistake can be found without one.
    """
    if isinstance(recipe, str):
        path, folder = recipe_of(recipe)
        recipe, model = load_recipe(path, overrides), model or folder
    elif overrides:
        raise UserError("overrides go with a recipe's path; a Recipe object is complete")
    model = model_of(model) if model is not None else None
    changed = {"samples": samples or recipe.eval.samples, "splits": tuple(splits) if splits else recipe.eval.splits}
    recipe = resolve_types(recipe.model_copy(update={"eval": recipe.eval.model_copy(update=changed)}))
    extend = None if recipe.rewards.model is None else ask_reward_model
    with progress or Progress() as shown:
        return blocking(lambda: run(play(recipe, model, shown, extend, by, keep)))


def model_of(path: str) -> str:
    """Return the model folder of a run: its best checkpoint, else its last one, else the model of its warm start.

    Any path or name that is not a run folder is returned unchanged. Raises UserError for a run without a checkpoint.
    """
    if recipe_of(path)[1] is None:
        return path
    folder = RunFolder(Path(path))
    checkpoints = Checkpoints(folder.checkpoints, 1)
    if (saved := checkpoints.best() or checkpoints.latest()) is not None:
        return str(saved.path)
    if (folder.path / MODEL / "config.json").is_file():
        return str(folder.path / MODEL)
    raise UserError(f"{path}: this run has saved no checkpoint to be evaluated")


async def play(
    recipe: Recipe,
    model: str | None,
    progress: Progress,
    extend: Callable[[Player], None] | None = None,
    by: str | None = None,
    keep: str | Path | None = None,
) -> Evaluation:
    """Run the evaluation that the recipe's `eval` section describes, in the running event loop.

    model: a folder or hub name that replaces the recipe's. extend: called once with the player, before it plays.
    by, keep: see `evaluate`.

    Raises UserError for bad input; before a model is loaded, wherever the mistake can be found without one.
    """
    env = make_environment(recipe.env)
    chosen = chosen_splits(env, recipe)
    if empty := [split for split in chosen if not len(tasks_of(env, split))]:
        raise UserError(f"environment {env.name!r} (source {recipe.env.source}) has no task in {', '.join(empty)}")
    if by is not None:
        for split in chosen:
            check_field(by, tasks_of(env, split)[0], split)
    journal = None if keep is None else journal_in(keep, recipe, env)
    player = await Player.build(recipe, model_path=model, env=env, say=progress.say, phase=progress.phase)
    try:
        held_out, notes = await HeldOut.prepare(player, recipe, chosen)
        if extend is not None:
            extend(player)
        results = []
        for split in held_out.splits:
            on_group = progress.follow(split, len(held_out.tasks[split]))
            result, groups = await held_out.play(split, on_group)
            results.append(result if by is None else replace(result, by=parts(groups, by, held_out.solved)))
            if journal is not None:
                journal.evaluation(split, 0, groups, held_out.solved)
            if line := failures(f"evaluation of {split}", groups):
                notes.append(line)
    finally:
        unclosed = await player.close()
    played = player.chat.description if player.model is None else model or recipe.model.path
    source = "" if recipe.env.mix else f" ({recipe.env.source})"
    return Evaluation(played, f"{env.name}{source}", tuple(results), (*notes, *unclosed))


def check_field(name: str, task: Task, split: str) -> None:
    """Raise UserError unless the first task of a split has a field of this name in its data."""
    if name not in task.data:
        raise UserError(f"--by {name}: the tasks of {split} have no such field{nearest(name, list(task.data))}")


def journal_in(folder: str | Path, recipe: Recipe, env: Environment) -> Journal:
    """Return what keeps the conversations of an evaluation in a folder. Raises UserError where it cannot be made, or
    holds some."""
    path = Path(folder) / TRAJECTORIES
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UserError(f"--keep {folder}: holds conversations already; name another folder")
    except OSError as error:
        raise UserError(f"--keep {folder}: cannot be made: {error.strerror}") from error
    return Journal(TrajectoriesSection(), lambda: path, partial(environment_of, env), recipe.secrets)


def chosen_splits(env: Environment, recipe: Recipe) -> tuple[str, ...]:
    """Return the splits to report: those of `eval.splits`, else those of `reported`.

    Raises UserError for a split that the environment does not have.
    """
    if recipe.eval.splits is None:
        return reported(env)
    for split in recipe.eval.splits:
        if split not in (*env.splits, "train"):
            raise UserError(f"eval.splits: environment {env.name!r} has no split {split!r}{nearest(split, env.splits)}")
    return recipe.eval.splits


def reported(env: Environment) -> tuple[str, ...]:
    """Return the held-out splits that are not for validation; all held-out splits if there are no others."""
    return tuple(split for split in env.splits if not is_validation(split)) or tuple(env.splits)


def choosing_split(env: Environment, recipe: Recipe, splits: tuple[str, ...]) -> str | None:
    """Return the split that is evaluated during training to choose the best checkpoint; None: nothing is evaluated.

    It is the environment's first validation split if the recipe evaluates during training, else the first of `splits`,
    the reported ones.
    """
    own = next((split for split in env.splits if is_validation(split)), None)
    if not splits or own is None or not 0 < recipe.eval.every < recipe.train.steps:
        return splits[0] if splits else None
    return own
