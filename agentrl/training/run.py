"""`train`: put the parts of a run together, go through the loop, say where it lies."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from agentrl.algo import advantages, losses
from agentrl.cluster.errors import WorkerLost
from agentrl.data.prompts import PromptLengths
from agentrl.data.sampler import TaskSampler
from agentrl.errors import UserError
from agentrl.eval.evaluate import chosen_splits
from agentrl.eval.held_out import HeldOut
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import load, make_environment, tasks_of
from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Task
from agentrl.recipe.load import dump_recipe, load_recipe, recipe_name
from agentrl.recipe.schema import Recipe
from agentrl.report.page import write_report
from agentrl.rollout.blocking import blocking
from agentrl.rollout.player import Player
from agentrl.training.checkpoint import ADAPTER, Checkpoints, Saved
from agentrl.training.display import Display
from agentrl.training.interrupt import Interrupted, Interrupts
from agentrl.training.learner import Learner
from agentrl.training.loop import Loop
from agentrl.training.mismatch import MismatchWatch
from agentrl.training.model_reward import add_reward_model
from agentrl.training.reward_model import classifier_config
from agentrl.training.rollouts import make_rollouts
from agentrl.training.run_folder import RECIPE, RunFolder
from agentrl.training.watch import PROFILE, Watch
from agentrl.training.workplace import Here, Workplace


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

    Raises UserError: one line, before anything is sampled, for what can be known by then; KeyboardInterrupt when it is
    stopped before the first evaluation has begun, with nothing to be saved.
    """
    if isinstance(recipe, str):
        name, recipe = name or recipe_name(recipe), load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides go with a recipe's path; a Recipe object is complete")
    return _start(recipe, name or "run", None, display)


def resume_run(
    run: str, *, recipe: str | None = None, overrides: Sequence[str] = (), display: Display | None = None
) -> TrainResult:
    """Go on with a run from its last checkpoint, by its own recipe, or by `recipe`; `overrides` change either."""
    folder = RunFolder.existing(run)
    found = load_recipe(recipe or str(folder.path / RECIPE), overrides)
    return _start(found, folder.path.name, folder, display)


def _start(recipe: Recipe, name: str, resumed: RunFolder | None, display: Display | None) -> TrainResult:
    with Interrupts() as interrupts:
        return blocking(lambda: _run_on(recipe, name, resumed, display, interrupts))


def _run_on(
    recipe: Recipe, name: str, resumed: RunFolder | None, display: Display | None, interrupts: Interrupts
) -> TrainResult:
    """The run, taken up again from its last checkpoint as often as `cluster.restarts` says when a worker is lost."""
    folder = resumed
    for left in range(recipe.cluster.restarts, -1, -1):
        started: list[RunFolder] = []
        try:
            return _run(recipe, name, folder, display, interrupts, started, again=left < recipe.cluster.restarts)
        except WorkerLost as lost:
            folder = started[0] if started else folder
            if not left or interrupts.requested:
                raise UserError(f"{lost}{_remedy(folder)}") from lost
            Display(recipe.train.steps, name).note(f"{lost}; going on by itself, {left} restarts are left")
    raise AssertionError("a range that ends with 0 returns or raises")


def _remedy(folder: RunFolder | None) -> str:
    if folder is None or (saved := Checkpoints(folder.checkpoints, 1).latest()) is None:
        return "; no checkpoint was saved yet"
    return f"; step {saved.step} is saved, go on with --resume {folder.path}, or set cluster.restarts"


def _run(
    recipe: Recipe,
    name: str,
    resumed: RunFolder | None,
    display: Display | None,
    interrupts: Interrupts,
    started: list[RunFolder],
    again: bool,
) -> TrainResult:
    """started: gets the run's folder as soon as there is one. again: not by a person's wish, so that a folder without a
    checkpoint is begun anew."""
    began = monotonic()
    saved = _last_checkpoint(recipe, resumed, again) if resumed else None
    checked = _check(recipe, resumed)
    with ExitStack() as stack:
        stack.callback(interrupts.close)
        display = display or Display(recipe.train.steps, name, first_step=saved.step if saved else 0)
        stack.enter_context(display)
        try:
            loop = _set_up(recipe, name, resumed, saved, checked, display, interrupts, stack, started)
        except Interrupted:
            raise KeyboardInterrupt("interrupted before the first step: there is nothing to save") from None
        interrupted = loop.run()
    return _finish(loop, interrupted, monotonic() - began)


@dataclass(frozen=True, slots=True)
class _Checked:
    """What could be looked at before a model is loaded, so that a mistake costs no waiting."""

    env: Environment
    splits: tuple[str, ...]
    tasks: Sequence[Task]
    trackers: tuple[Callable[[], Tracker], ...]


def _check(recipe: Recipe, resumed: RunFolder | None) -> _Checked:
    """Raises UserError: one line."""
    if resumed is None:
        RunFolder.check_free(recipe.output)
    trackers = tuple(load("agentrl.trackers", name) for name in recipe.track.trackers)
    _check_critic(recipe)
    losses.get(recipe.algorithm.loss)
    if getattr(load("engines", recipe.engine.name), "brings_chat", False):
        raise UserError(f"engine.name {recipe.engine.name!r} plays a model that cannot be trained: use `agentrl eval`")
    env = make_environment(recipe.env)
    if not (env.pays or recipe.tools or env.tools() or recipe.rewards.functions or recipe.rewards.model):
        raise UserError(f"environment {env.name!r} pays nothing, and no tool can: name a reward in rewards.functions")
    if recipe.rewards.model is not None:
        classifier_config(recipe.rewards.model, recipe.model)
    splits = chosen_splits(env, recipe)
    tasks = tasks_of(env, "train")
    if empty := [split for split in ("train", *splits) if not len(tasks_of(env, split))]:
        raise UserError(f"environment {env.name!r} (source {recipe.env.source}) has no task in {', '.join(empty)}")
    return _Checked(env, splits, tasks, trackers)


def _check_critic(recipe: Recipe) -> None:
    """A critic is there where the advantage wants one, and nowhere else."""
    name = recipe.algorithm.advantage
    wanted = getattr(advantages.get(name), "wants_values", False)
    if wanted and recipe.critic is None:
        raise UserError(f"algorithm.advantage {name!r} wants a critic, and the recipe has none: say `critic: {{}}`")
    if recipe.critic is not None and not wanted:
        raise UserError(f"critic: algorithm.advantage {name!r} asks no critic; leave it out, or choose `gae`")


def _last_checkpoint(recipe: Recipe, resumed: RunFolder, again: bool) -> Saved | None:
    saved = Checkpoints(resumed.checkpoints, recipe.train.keep).latest()
    if saved is None and again:
        return None
    if saved is None:
        raise UserError(f"--resume {resumed.path}: no checkpoint was saved there; start it anew")
    if saved.step >= recipe.train.steps:
        raise UserError(f"--resume: step {saved.step} of {recipe.train.steps} is done; set train.steps higher to go on")
    return saved


def _set_up(
    recipe: Recipe,
    name: str,
    resumed: RunFolder | None,
    saved: Saved | None,
    checked: _Checked,
    display: Display,
    interrupts: Interrupts,
    stack: ExitStack,
    started: list[RunFolder],
) -> Loop:
    """The parts of the run; `stack` gets what must be closed at its end."""
    display.phase("loading")
    begins, apart = _beginning(recipe, saved), recipe.cluster.used
    named, path = (recipe, begins.model.path) if saved and recipe.model.lora is None else (begins, None)
    player = interrupts.run(lambda: Player.build(named, path, checked.env, display.note, display.phase, apart))
    stack.callback(lambda: interrupts.complete(player.close))
    display.note(player.describe())

    display.phase("measuring the prompts")
    held_out, notes = interrupts.run(lambda: HeldOut.prepare(player, recipe, checked.splits))
    sampler = TaskSampler(len(checked.tasks), recipe.train.seed)
    notes += _leave_out_long(recipe, player, checked.tasks, sampler, interrupts)
    for note in notes:
        display.note(note)

    display.note(f"chat: {player.chat.description}")
    folder = resumed
    if apart:  # the workers' output lies in it, whatever becomes of them
        folder = folder or RunFolder.create(recipe.output, name)
        started.append(folder)
    workplace = _workplace(recipe, begins, player, folder, display)
    stack.callback(workplace.close)
    for line in workplace.describe():
        display.note(line)
    if workplace.reward_model is not None:
        add_reward_model(player, workplace.reward_model.scores)
    rollouts = make_rollouts(recipe, player, checked.tasks, sampler, interrupts, workplace.weights)
    stack.callback(lambda: interrupts.complete(rollouts.close))
    interrupts.check()
    folder = folder or RunFolder.create(recipe.output, name)
    folder.write_recipe(dump_recipe(recipe))
    if hasattr(player.engine, "keep_logs"):
        player.engine.keep_logs(folder.path)
    watch = Watch(workplace, folder.path / PROFILE, recipe.profile.steps, engine=recipe.engine.name == "local")
    learner = Learner(recipe, workplace)
    watch.over(learner)
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
        trackers=_start_trackers(checked.trackers, recipe, folder, stack),
    )
    if saved:
        _restore(loop, saved)
    elif resumed:
        folder.rewind(-1)
    if apart:  # its model is what the recipe names; that of the workers may be further
        interrupts.complete(lambda: player.engine.update_weights(loop.step, workplace.weights()))
    display.note(f"run folder: {folder.path}")
    return loop


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


def _workplace(recipe: Recipe, begins: Recipe, player: Player, folder: RunFolder | None, display: Display) -> Workplace:
    """Where the roles are: here, or on a cluster."""
    if not recipe.cluster.used:
        return Here(recipe, player.model)
    from agentrl.training.remote import OnCluster

    assert folder is not None
    return OnCluster(recipe, begins, folder.path / "logs", display.note, display.phase)


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


def _start_trackers(
    makers: Sequence[Callable[[], Tracker]], recipe: Recipe, folder: RunFolder, stack: ExitStack
) -> list[Tracker]:
    trackers: list[Tracker] = []
    for make in makers:
        tracker = make()
        tracker.start(folder.path, recipe.model_dump(mode="json"))
        stack.callback(tracker.finish)
        trackers.append(tracker)
    return trackers


def _restore(loop: Loop, saved: Saved) -> None:
    loop.workplace.load(saved.path)
    state: dict[str, Any] = saved.extra
    loop.step = loop.learner.steps = saved.step
    loop.before = state["before"]
    if (best := loop.checkpoints.best()) is not None:
        loop.best = best.accuracy or 0.0
    loop.rollouts.restore(saved.step, state["sampler"])
    loop.folder.rewind(saved.step or -1)  # before the first step is done, step 0 is evaluated anew
    loop.display.note(f"resumed after step {saved.step}")


def _finish(loop: Loop, interrupted: bool, seconds: float) -> TrainResult:
    folder, display = loop.folder.path, loop.display
    last = Checkpoints(loop.folder.checkpoints, loop.recipe.train.keep).latest()
    assert last is not None  # the loop saves before it returns
    write_report(folder, folder.name)
    if interrupted:
        done = loop.step >= loop.recipe.train.steps
        then = "every step is done" if done else f"go on with: agentrl train --resume {folder}"
        display.note(f"Interrupted. The checkpoint of step {loop.step} is saved in {last.path}; {then}")
    else:
        rows = [(split, before, loop.after[split]) for split, before in loop.before.items() if split in loop.after]
        display.final(rows, str(folder), seconds)
        display.note(loop.watch.describe())
        if (best := loop.checkpoints.best()) is not None and best.step != last.step:
            display.note(f"The best checkpoint is that of step {best.step} ({best.accuracy:.1%}): {best.path}")
    return TrainResult(folder, loop.step, last.path, dict(loop.before), dict(loop.after), interrupted)
