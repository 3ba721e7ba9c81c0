"""The parts of a run put together, in the order in which a mistake costs least."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.data.prompts import PromptLengths
from agentrl.data.sampler import TaskSampler
from agentrl.eval.held_out import HeldOut
from agentrl.eval.result import Accuracy
from agentrl.plugins.environment import is_validation
from agentrl.plugins.types import Task
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.player import Player
from agentrl.training.checkpoint import ADAPTER, Checkpoints, Saved
from agentrl.training.contrast import ContrastWatch
from agentrl.training.display import Display
from agentrl.training.folder_lock import FolderLock
from agentrl.training.interrupt import Interrupts
from agentrl.training.learner import Learner
from agentrl.training.loop import Loop
from agentrl.training.mismatch import MismatchWatch
from agentrl.training.model_reward import add_reward_model
from agentrl.training.preflight import Checked
from agentrl.training.rollouts import make_rollouts
from agentrl.training.run_folder import RunFolder
from agentrl.training.trackers import Trackers
from agentrl.training.watch import PROFILE, Watch
from agentrl.training.workplace import Here, Workplace


@dataclass(slots=True)
class Start:
    """What a run begins with. resumed: the folder of the run that goes on; saved: the checkpoint that it goes on from,
    None: from the beginning. stack: gets what must be closed at the end. folder: the run's, once there is one."""

    recipe: Recipe
    name: str
    resumed: RunFolder | None
    saved: Saved | None
    checked: Checked
    display: Display
    interrupts: Interrupts
    stack: ExitStack
    folder: RunFolder | None = None

    def open_folder(self) -> RunFolder:
        """The run's folder, made and locked if it is new. What failed before it wrote anything leaves none behind."""
        if self.folder is None and self.resumed is not None:
            self.folder = self.resumed  # which is locked since its checkpoint was looked for
        if self.folder is None:
            self.folder = RunFolder.create(self.recipe.output, self.name)
            self.stack.callback(_drop_if_empty, self.folder.path)
            self.stack.callback(FolderLock(self.folder.path).release)
            RunFolder.check_free(str(self.folder.path))  # another run may have come and gone since it was asked
        return self.folder


def _drop_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def set_up(start: Start) -> Loop:
    """The parts of the run, put together."""
    recipe, display, interrupts, stack = start.recipe, start.display, start.interrupts, start.stack
    begins, player = _make_player(start)
    held_out, sampler = _measure(start, player)
    workplace = _make_workplace(start, begins, player)
    watch = Watch(
        workplace, start.open_folder().path / PROFILE, recipe.profile.steps, engine=recipe.engine.name == "local"
    )
    if watch.reward_model is not None:
        add_reward_model(player, watch.reward_model.scores)
    rollouts = make_rollouts(recipe, player, start.checked.tasks, sampler, interrupts, workplace.weights)
    stack.callback(lambda: interrupts.complete(rollouts.close))
    interrupts.check()
    folder = start.open_folder()
    folder.write_recipe(dump_recipe(recipe))
    if hasattr(player.engine, "keep_logs"):
        player.engine.keep_logs(folder.path)
    learner = Learner(recipe, workplace)
    watch.over(learner)
    trackers = Trackers(display.note)
    trackers.start(start.checked.trackers, folder.path, recipe.model_dump(mode="json"), stack)
    contrast = ContrastWatch(recipe)
    if line := contrast.beforehand():
        display.note(line)
    loop = Loop(
        recipe=recipe,
        player=player,
        learner=learner,
        watch=watch,
        workplace=workplace,
        rollouts=rollouts,
        held_out=held_out,
        folder=folder,
        checkpoints=Checkpoints(folder.checkpoints, recipe.train.keep, player.tokenizer),
        display=display,
        interrupts=interrupts,
        mismatch=MismatchWatch(recipe),
        contrast=contrast,
        trackers=trackers,
    )
    if start.saved:
        _restore(loop, start.saved)
    elif start.resumed:
        folder.rewind(-1)
    if not workplace.here:  # the engine's model is what the recipe names; that of the workers may be further
        interrupts.complete(lambda: player.engine.update_weights(loop.step, workplace.weights()))
    display.note(f"run folder: {folder.path}")
    return loop


def _make_player(start: Start) -> tuple[Recipe, Player]:
    """And the recipe with the model that the policy begins as."""
    recipe, saved, display = start.recipe, start.saved, start.display
    display.phase("loading")
    begins, apart = _beginning(recipe, saved), recipe.cluster.used
    named, path = (recipe, begins.model.path) if saved and recipe.model.lora is None else (begins, None)
    player = start.interrupts.run(
        lambda: Player.build(named, path, start.checked.env, display.note, display.phase, apart)
    )
    start.stack.callback(lambda: start.interrupts.complete(player.close))
    display.note(player.describe())
    if recipe.sft is not None:
        display.note("sft: no part of this run: `agentrl sft RECIPE --out DIR` does it first, then model.path=DIR")
    return begins, player


def _measure(start: Start, player: Player) -> tuple[HeldOut, TaskSampler]:
    """The held-out tasks, and who draws those to train on: without those whose prompts do not fit."""
    recipe, checked = start.recipe, start.checked
    start.display.phase("measuring the prompts")
    held_out, notes = start.interrupts.run(lambda: HeldOut.prepare(player, recipe, checked.splits, checked.choosing))
    sampler = TaskSampler(len(checked.tasks), recipe.train.seed)
    notes += _leave_out_long(recipe, player, checked.tasks, sampler, start.interrupts)
    if checked.choosing in checked.splits and 0 < recipe.eval.every < recipe.train.steps:
        notes.append(
            f"the best checkpoint is chosen on {checked.choosing}, which is reported too and so flatters it"
            + ("" if is_validation(checked.choosing) else "; a split called validation would keep the two apart")
        )
    for note in notes:
        start.display.note(note)
    return held_out, sampler


def _make_workplace(start: Start, begins: Recipe, player: Player) -> Workplace:
    """Where the roles are: here, or on a cluster, whose workers write their output into the run's folder."""
    recipe, display = start.recipe, start.display
    display.note(f"chat: {player.chat.description}")
    workplace: Workplace
    if recipe.cluster.used:
        from agentrl.training.remote import OnCluster

        workplace = OnCluster(recipe, begins, start.open_folder().path / "logs", display.note, display.phase)
    else:
        workplace = Here(recipe, player.model)
    start.stack.callback(workplace.close)
    for line in workplace.describe():
        display.note(line)
    return workplace


def _beginning(recipe: Recipe, saved: Saved | None) -> Recipe:
    """The recipe with the model that the policy begins as: what is saved, where a run goes on. An adapter goes back
    into the base that it was trained on, which the merged weights no longer show."""
    if saved is None:
        return recipe
    section = recipe.model
    if section.lora is None:
        update: dict[str, Any] = {"path": str(saved.path)}
    else:
        update = {"lora": section.lora.model_copy(update={"start": str(saved.path / ADAPTER)})}
    return recipe.model_copy(update={"model": section.model_copy(update=update)})


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


def _restore(loop: Loop, saved: Saved) -> None:
    loop.workplace.load(saved.path)
    state: dict[str, Any] = saved.extra
    loop.step = loop.learner.steps = saved.step
    loop.before = {split: Accuracy.read(saved) for split, saved in state["before"].items()}
    if (best := loop.checkpoints.best()) is not None and best.split == loop.held_out.choosing:
        loop.best = best.accuracy or 0.0
    loop.rollouts.restore(saved.step, state["sampler"])
    loop.folder.rewind(saved.step or -1)  # before the first step is done, step 0 is evaluated anew
    loop.display.note(f"resumed after step {saved.step}")
