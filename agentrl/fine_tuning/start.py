"""`train`: reinforcement learning, after what a recipe's `start` teaches, which is kept for the next such run."""

import gc
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.checkpoint.disk import write_whole
from agentrl.checkpoint.roles import TRAINER
from agentrl.checkpoint.run_folder import CHECKPOINTS, RECIPE, FolderLock, RunFolder
from agentrl.errors import UserError
from agentrl.eval.evaluate import evaluate
from agentrl.eval.progress import Progress
from agentrl.eval.result import Accuracy, MeanReward
from agentrl.fine_tuning.run import resume_sft, sft
from agentrl.fine_tuning.stage import digest, stage_key, stage_recipe
from agentrl.fine_tuning.trainer import ENDS
from agentrl.jsonable import dumps, loads
from agentrl.models.load import resolve_types
from agentrl.recipe.load import load_recipe, recipe_name
from agentrl.recipe.schema import Recipe
from agentrl.rollout.stored import training_files
from agentrl.training import run as training
from agentrl.training.display import Display
from agentrl.training.preflight import check_run
from agentrl.training.run import TrainResult
from agentrl.training.taught import FILE, FOLDER, Taught

RUN = "run"
"""In the folder of a stage: the run that teaches, which is resumed where it was interrupted."""
DONE = "done"
"""A file that is there once that run is at its end."""
MEASURED = ("eval", "rollout", "agent", "rewards")
"""Sections that say how an accuracy is measured, beside those that say what is taught."""


def train(
    recipe: Recipe | str,
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
    display: Display | None = None,
    stored: Sequence[str] = (),
) -> TrainResult:
    """Train from the first step, in a new run folder; what the recipe's `start` teaches comes first.

    recipe: a path or a Recipe. overrides: `key=value`, only with a path. name: of the run folder; default: the recipe's
    name, or `run` for a Recipe. display: default: on stdout. stored: run folders or Parquet files of trajectories, to
    train on these instead of sampling: a file is a step.

    Raises UserError, one line, before anything is sampled if the mistake can be found by then, later with the step that
    is saved. Raises KeyboardInterrupt if stopped before the first evaluation, when there is nothing to save.
    """
    if isinstance(recipe, str):
        name, recipe = name or recipe_name(recipe), load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides go with a recipe's path; a Recipe object is complete")
    taught = None
    if recipe.start is not None:
        RunFolder.check_free(recipe.output)
        training_files(stored)
        check_run(resolve_types(recipe))  # a mistake in what comes later is told before the stage
        taught = teach(resolve_types(recipe), display or Display(recipe.train.steps, name or "run"))
    return training.train(recipe, name=name, display=display, stored=stored, taught=taught)


def place_of(recipe: Recipe) -> Path:
    """The folder in which a recipe's stage is kept, made or not. Raises UserError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "starts"
    return cache / stage_key(recipe)


def kept(place: Path) -> bool:
    """Whether a stage's folder holds what it made."""
    return (place / FILE).is_file() and (place / FOLDER).is_dir()


def teach(recipe: Recipe, display: Display) -> Taught:
    """What the recipe's `start` makes: as it is kept, or taught now. Raises UserError; KeyboardInterrupt, after which
    the same call goes on."""
    assert recipe.start is not None
    place = place_of(recipe)
    if there := kept(place):
        display.note(f"start: {recipe.start}: taught already, begins with {place / FOLDER}")
    before, rewards = _before(recipe, place, display)
    taught = Taught.read(place) if there else _taught(recipe, place, display)
    gc.collect()  # the run that follows wants the memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return replace(taught, before=before, rewards=rewards)


def _taught(recipe: Recipe, place: Path, display: Display) -> Taught:
    """Teach, or go on with what was interrupted. Raises UserError; KeyboardInterrupt."""
    place.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(place)
    try:
        if not (place / DONE).is_file():
            _teach(stage_recipe(recipe).changed(output=str(place / RUN)), place / RUN, display)
            write_whole(place / DONE, "")
        return _keep(place)
    finally:
        lock.release()


def _teach(recipe: Recipe, run: Path, display: Display) -> None:
    """Run the stage to its end. run: its folder. Raises UserError; KeyboardInterrupt."""
    if (run / RECIPE).is_file() and Checkpoints(run / CHECKPOINTS, 1).latest() is not None:
        display.note(f"start: {recipe.start}: goes on with what was interrupted in {run.parent}")
        found = resume_sft(str(run), console=display.console)
    else:
        display.note(f"start: {recipe.start}: teaches first, and keeps the model in {run.parent}")
        shutil.rmtree(run, ignore_errors=True)
        found = sft(recipe, name="start", console=display.console)
    if found.interrupted:
        raise KeyboardInterrupt(
            f"interrupted after {found.steps} steps of the start, which are kept: the same command goes on from there"
        )


def _keep(place: Path) -> Taught:
    """Keep the model of a finished stage and its metrics, not the optimizer."""
    run = RunFolder(place / RUN)
    losses = [row["train/loss"] for row in run.metrics() if "train/loss" in row]
    saved = Checkpoints(run.checkpoints, 1).latest()
    assert saved is not None  # a run saves its last step
    shutil.rmtree(place / FOLDER, ignore_errors=True)
    shutil.copytree(saved.path, place / FOLDER, ignore=shutil.ignore_patterns(TRAINER))
    taught = Taught(place / FOLDER, saved.step, (fmean(losses[: ENDS // 2]), fmean(losses[-ENDS:])))
    taught.write(place)  # last: what has this file is whole
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    return taught


def _before(recipe: Recipe, place: Path, display: Display) -> tuple[Mapping[str, Accuracy], Mapping[str, MeanReward]]:
    """Held-out accuracy and mean reward of the model that is taught, by split: measured once for the settings of the
    evaluation. A model that is made has none."""
    if not recipe.eval.before or recipe.new_model is not None:
        return {}, {}
    file = place / f"before-{digest([recipe.written()[key] for key in MEASURED])}.json"
    if not file.is_file():
        found = evaluate(recipe, progress=Progress(display.console))
        place.mkdir(parents=True, exist_ok=True)
        write_whole(file, dumps({one.split: [*one.interval, *one.mean_reward] for one in found.splits}))
    known = loads(file.read_text(encoding="utf-8"))
    before = {split: Accuracy(*figures[:3]) for split, figures in known.items()}
    rewards = {split: MeanReward(*figures[3:]) for split, figures in known.items() if figures[3:]}
    shown = "  ".join(f"{split} {accuracy.value:.1%}" for split, accuracy in before.items())
    display.note(f"start: held-out accuracy before it: {shown}")
    return before, rewards
