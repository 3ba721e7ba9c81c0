"""`train`: put the parts of a run together, go through the loop, say where it lies."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from agentrl.data.prompts import PromptLengths
from agentrl.data.sampler import TaskSampler
from agentrl.errors import UserError
from agentrl.eval.evaluate import chosen_splits
from agentrl.eval.held_out import HeldOut
from agentrl.plugins.registry import load
from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Task
from agentrl.recipe.load import dump_recipe, load_recipe, recipe_name
from agentrl.recipe.schema import Recipe
from agentrl.rollout.player import Player
from agentrl.training.actor import Actor
from agentrl.training.checkpoint import Checkpoints, Saved
from agentrl.training.display import Display
from agentrl.training.interrupt import Interrupts
from agentrl.training.loop import Loop
from agentrl.training.run_folder import RECIPE, RunFolder


@dataclass(frozen=True, slots=True)
class TrainResult:
    """folder: the run's. steps: how many are done. before, after: held-out accuracy by split (0..1), where evaluated.

    checkpoint: the last one, a folder that `transformers` loads. interrupted: stopped by Ctrl-C, and can be resumed.
    """

    folder: Path
    steps: int
    checkpoint: Path
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False


def train(
    recipe: Recipe | str, *, overrides: Sequence[str] = (), name: str | None = None, display: Display | None = None
) -> TrainResult:
    """Train from the beginning, in a new run folder. `recipe`: a path, or a Recipe (then `name` names the folder).

    Raises UserError: one line, before anything is sampled, for what can be known by then.
    """
    if isinstance(recipe, str):
        name, recipe = name or recipe_name(recipe), load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides go with a recipe's path; a Recipe object is complete")
    return _run(recipe, name or "run", resumed=None, display=display)


def resume_run(
    run: str, *, recipe: str | None = None, overrides: Sequence[str] = (), display: Display | None = None
) -> TrainResult:
    """Go on with a run from its last checkpoint, by its own recipe, or by `recipe`; `overrides` change either."""
    folder = RunFolder.existing(run)
    found = load_recipe(recipe or str(folder.path / RECIPE), overrides)
    return _run(found, folder.path.name, resumed=folder, display=display)


def _run(recipe: Recipe, name: str, resumed: RunFolder | None, display: Display | None) -> TrainResult:
    began = monotonic()
    saved = Checkpoints(resumed.checkpoints, recipe.train.keep).latest() if resumed else None
    if resumed and saved is None:
        raise UserError(f"--resume {resumed.path}: no checkpoint was saved there; start it anew")
    if saved and saved.step >= recipe.train.steps:
        raise UserError(f"--resume: step {saved.step} of {recipe.train.steps} is done; set train.steps higher to go on")
    prepare_torch(recipe)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        player = interrupts.run(lambda: Player.build(recipe, model_path=str(saved.path) if saved else None))
        stack.callback(lambda: interrupts.complete(player.close))
        first = saved.step if saved else 0
        display = stack.enter_context(display or Display(recipe.train.steps, name, first_step=first))
        display.note(player.describe())

        held_out, notes = interrupts.run(lambda: HeldOut.prepare(player, recipe, chosen_splits(player.env, recipe)))
        tasks = player.env.tasks("train")
        sampler = TaskSampler(len(tasks), recipe.train.seed)
        notes += _leave_out_long(recipe, player, tasks, sampler, interrupts)
        for note in notes:
            display.note(note)

        actor = Actor(player.model, recipe)
        display.note(f"chat: {player.chat.description}")
        display.note(f"training forward: {actor.description}")
        folder = resumed or RunFolder.create(recipe.output, name)
        folder.write_recipe(dump_recipe(recipe))
        loop = Loop(
            recipe=recipe,
            player=player,
            actor=actor,
            tasks=tasks,
            sampler=sampler,
            held_out=held_out,
            folder=folder,
            checkpoints=Checkpoints(folder.checkpoints, recipe.train.keep, player.tokenizer),
            display=display,
            interrupts=interrupts,
            trackers=_start_trackers(recipe, folder, stack),
        )
        if saved:
            _restore(loop, saved)
        display.note(f"run folder: {folder.path}")
        interrupted = loop.run()
    return _finish(loop, interrupted, monotonic() - began)


def prepare_torch(recipe: Recipe) -> None:
    """Threads and seed. Two runs on one machine should share its cores by `train.threads`."""
    import torch

    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    torch.manual_seed(recipe.train.seed)


def _leave_out_long(
    recipe: Recipe, player: Player, tasks: Sequence[Task], sampler: TaskSampler, interrupts: Interrupts
) -> list[str]:
    """Measure the tasks that this run will draw, and let the sampler pass over those that do not fit."""
    need = min(recipe.train.steps * recipe.rollout.tasks, len(tasks))
    probe = TaskSampler(len(tasks), recipe.train.seed)
    found: dict[int, int] = {}
    limit = player.prompt_limit
    while sum(n <= limit for n in found.values()) < need and len(found) < len(tasks):
        new = [i for i in probe.draw(need) if i not in found]
        lengths = interrupts.run(lambda new=new: player.measure([tasks[i] for i in new]))  # type: ignore[misc]
        found |= dict(zip(new, lengths.lengths, strict=True))
    sampler.excluded = frozenset(i for i, n in found.items() if n > limit)
    line = PromptLengths(tuple(found.values()), limit).report("training")
    return [line] if line else []


def _start_trackers(recipe: Recipe, folder: RunFolder, stack: ExitStack) -> list[Tracker]:
    trackers: list[Tracker] = []
    for name in recipe.track.trackers:
        tracker = load("agentrl.trackers", name)()
        tracker.start(folder.path, recipe.model_dump(mode="json"))
        stack.callback(tracker.finish)
        trackers.append(tracker)
    return trackers


def _restore(loop: Loop, saved: Saved) -> None:
    state: dict[str, Any] = saved.load_into(loop.actor)
    loop.step = saved.step
    loop.before = state["before"]
    loop.sampler.restore(state["sampler"])
    loop.folder.rewind(saved.step)
    loop.display.note(f"resumed after step {saved.step}")


def _finish(loop: Loop, interrupted: bool, seconds: float) -> TrainResult:
    folder, display = loop.folder.path, loop.display
    last = Checkpoints(loop.folder.checkpoints, loop.recipe.train.keep).latest()
    assert last is not None  # the loop saves before it returns
    if interrupted:
        display.note(
            f"Interrupted. The checkpoint of step {loop.step} is saved; go on with: agentrl train --resume {folder}"
        )
    else:
        rows = [(split, before, loop.after[split]) for split, before in loop.before.items() if split in loop.after]
        display.final(rows, str(folder), seconds)
    return TrainResult(folder, loop.step, last.path, dict(loop.before), dict(loop.after), interrupted)
