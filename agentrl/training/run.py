"""`train` and `resume_run`: from a recipe to a result, with a restart from the last checkpoint if a worker is lost."""

import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from agentrl.checkpoint.checkpoints import Checkpoints, NotSaved, Saved
from agentrl.checkpoint.disk import FULL
from agentrl.checkpoint.mirror import Mirror, fetched_run, open_mirror
from agentrl.checkpoint.run_folder import ERRORS, RECIPE, FolderLock, RunFolder
from agentrl.cluster.errors import WorkerLost
from agentrl.containment.event_loop import blocking
from agentrl.engine.base import engine_class
from agentrl.errors import UserError, describe, from_signal
from agentrl.eval.result import Accuracy, MeanReward
from agentrl.eval.why import reasons
from agentrl.learner.monitors import RANGES, WATCHED
from agentrl.models.allocator import expand_segments
from agentrl.models.load import load_tokenizer, resolve_types
from agentrl.plugins.types import Json
from agentrl.recipe.load import differing, leaves, load_recipe, recipe_name
from agentrl.recipe.schema import Recipe
from agentrl.remote import is_remote
from agentrl.rollout.stored import training_files
from agentrl.secrets import masked_text
from agentrl.training.display import Display
from agentrl.training.interrupt import Interrupted, Interrupts
from agentrl.training.loop import Loop
from agentrl.training.preflight import check_run, told_of_data, with_epochs
from agentrl.training.setup import Start, set_up, stored_of
from agentrl.training.taught import Taught
from agentrl.view.freeze import write_report

FIXED = ("env", "data", "tools", "rewards", "model", "start", "algorithm", "critic", "train.seed")
"""Keys that a resumed run must keep, because they define what is trained. Others (steps, learning rate, sampling,
limits, evaluation, machines) may change; the change is printed."""
FREE = (
    "data.epochs",
    "model.device",
    "model.checkpointing",
    "model.compile",
    "model.compute",
    "model.trust_remote_code",
)
"""Keys below `FIXED` that may change, because they only define how long to train, or where and how the same result
is computed."""
_TRAINED = ("model", "start", "algorithm", "critic", "train", "rollout.temperature", "cluster")
"""Keys that say what an update makes of given rollouts."""
SHOWN = 8  # maximum number of changed keys listed in a line


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run."""

    folder: Path
    """The run folder."""
    steps: int
    """Number of whole steps, including those before a resumption."""
    checkpoint: Path
    """The last checkpoint, a folder that `transformers` can load."""
    before: dict[str, float] = field(default_factory=dict)
    """Held-out accuracy (0..1) before the first step, by split, if evaluated."""
    after: dict[str, float] = field(default_factory=dict)
    """Held-out accuracy (0..1) after the last step, by split, if evaluated."""
    interrupted: bool = False
    """Whether Ctrl-C or another signal stopped the run; it can be resumed."""
    untaught: dict[str, float] = field(default_factory=dict)
    """Held-out accuracy (0..1) before the recipe's `start`, by split, if it has one and that was evaluated."""


def train(
    recipe: Recipe | str,
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
    display: Display | None = None,
    stored: Sequence[str] = (),
    taught: Taught | None = None,
) -> TrainResult:
    """Train from the first step, in a new run folder.

    recipe: a path or a Recipe. overrides: `key=value`, only with a path. name: of the run folder; default: the recipe's
    name, or `run` for a Recipe. display: default: on stdout. stored: run folders or Parquet files of trajectories, to
    train on these instead of sampling: a file is a step. taught: what the recipe's `start` made.

    Raises UserError, one line, before anything is sampled if the mistake can be found by then, later with the step that
    is saved. Raises KeyboardInterrupt if stopped before the first evaluation, when there is nothing to save.
    """
    if isinstance(recipe, str):
        name, recipe = name or recipe_name(recipe), load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides go with a recipe's path; a Recipe object is complete")
    return _start(recipe, name or "run", None, display, stored, taught)


def resume_run(
    run: str,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    force: bool = False,
    display: Display | None = None,
    stored: Sequence[str] = (),
) -> TrainResult:
    """Continue the run in folder `run` from its last checkpoint, with its own recipe or `recipe`, plus `overrides`.
    `run` may be the URL of a mirror (`train.mirror`).

    stored: of a run that trains on stored rollouts, where they lie now; default: where they lay.

    Raises UserError, also for a recipe that changes what is trained (`FIXED`) unless `force` is set.
    """
    folder = RunFolder.existing(local_run(run, overrides))
    found = load_recipe(recipe or folder.recipe(), overrides)
    if not force:
        check_same_run(folder.recipe(), found)
    return _start(found, folder.path.name, folder, display, stored)


def local_run(run: str, overrides: Sequence[str]) -> str:
    """The folder of a run to resume: `run`, or a copy of the mirror at that URL, in the folder that `output=`
    names. Raises UserError."""
    if not is_remote(run):
        return run
    given = [value for key, _, value in (text.partition("=") for text in overrides) if key == "output"]
    return str(fetched_run(run, given[-1] if given else None))


def _start(
    recipe: Recipe,
    name: str,
    resumed: RunFolder | None,
    display: Display | None,
    stored: Sequence[str],
    taught: Taught | None = None,
) -> TrainResult:
    with Interrupts(recipe.rollout.stuck_timeout) as interrupts:

        def prepare(folder: RunFolder | None, restarted: bool) -> Start:
            start = _prepare(recipe, name, folder, display, interrupts, stored, restarted)
            start.taught = taught
            return start

        return blocking(lambda: run_with_restarts(recipe, name, resumed, interrupts, prepare, set_up))


def run_with_restarts(
    recipe: Recipe,
    name: str,
    resumed: RunFolder | None,
    interrupts: Interrupts,
    prepare: Callable[[RunFolder | None, bool], Start],
    make: Callable[[Start], Loop],
) -> TrainResult:
    """Run; if a worker is lost, restart from the last checkpoint, at most `cluster.restarts` times.

    prepare: checks and locks a folder (None: a new one), told whether the program itself restarts the run. make: makes
    the parts of the run."""
    expand_segments(recipe)
    folder = resumed
    for left in range(recipe.cluster.restarts, -1, -1):
        start = prepare(folder, left < recipe.cluster.restarts)
        try:
            return _run(start, make)
        except WorkerLost as lost:
            folder = start.folder or folder
            if not left or interrupts.requested:
                raise UserError(f"{lost}{_remedy(folder)}") from lost
            Display(recipe.train.steps, name).note(f"{lost}; restarting the run, {left} restarts are left")
    raise AssertionError("unreachable: the last attempt returns or raises")


def _remedy(folder: RunFolder | None) -> str:
    if folder is None or (saved := Checkpoints(folder.checkpoints, 1).latest()) is None:
        return "; no checkpoint was saved yet"
    return f"; step {saved.step} is saved, go on with --resume {folder.path}, or set cluster.restarts"


def _prepare(
    recipe: Recipe,
    name: str,
    resumed: RunFolder | None,
    display: Display | None,
    interrupts: Interrupts,
    stored: Sequence[str],
    restarted: bool,
) -> Start:
    """Lock the folder, find the checkpoint and the stored rollouts, and check the recipe. restarted: whether the
    program itself restarts the run, so that a folder without a checkpoint starts from the first step."""
    recipe, saved = resolve_types(recipe), None
    with ExitStack() as stack:
        if resumed is None:
            RunFolder.check_free(recipe.output)
        else:
            stack.callback(FolderLock(resumed.path).release)
            saved = last_checkpoint(recipe, resumed, restarted)
            stored = _previous_files(saved, stored)
        files = training_files(stored)
        mirror = open_mirror(recipe.train.mirror, resumed is not None)
        checked = check_run(recipe)
        recipe = with_epochs(recipe, checked)
        steps = min(recipe.train.steps, len(files) or recipe.train.steps)
        unevaluated = resumed is not None and checked.choosing is not None and not resumed.evaluated(steps)
        if saved and (saved.step > steps or (saved.step == steps and not unevaluated)):
            more = "set train.steps higher to go on" if steps == recipe.train.steps else "no more steps are stored"
            raise UserError(f"--resume: step {saved.step} of {steps} is done; {more}")
        display = display or Display(steps, name, first_step=saved.step if saved else 0)
        if resumed and not restarted and (line := changes(resumed.recipe(), recipe)):
            display.note(line)
        for line in (*told_of_data(recipe, checked), *told_of_stored(stored, files, recipe)):
            display.note(line)
        return Start(recipe, name, resumed, saved, checked, display, interrupts, stack.pop_all(), files, mirror=mirror)


def last_checkpoint(recipe: Recipe, resumed: RunFolder, restarted: bool) -> Saved | None:
    """The checkpoint that a resumed run continues from; None where it has none and the program itself restarts
    it. Raises UserError."""
    saved = Checkpoints(resumed.checkpoints, recipe.train.keep).latest()
    if saved is None and not restarted:
        raise UserError(f"--resume {resumed.path}: no checkpoint was saved there; start a new run")
    return saved


def _previous_files(saved: Saved | None, stored: Sequence[str]) -> Sequence[str]:
    """What a resumed run trains on. Raises UserError: it samples, and is asked to train on `stored`."""
    previous = stored_of(saved) if saved is not None else []
    if saved is not None and stored and not previous:
        raise UserError("--from: the run that is resumed samples its rollouts; start a new run to train on stored ones")
    return stored or previous


def told_of_stored(stored: Sequence[str], files: Sequence[Path], recipe: Recipe) -> list[str]:
    """Lines that say what is trained on, and why a run's updates are not repeated to the bit where they are
    not. Raises UserError: another tokenizer made the tokens."""
    if not files:
        return []
    steps, most = len(files), recipe.train.steps
    few = f"; the learning rates are those of train.steps {most}" if steps < most else ""
    lines = [f"trains on {min(steps, most)} of {steps} stored steps{few}"]
    for folder in (Path(name) for name in stored if Path(name, RECIPE).is_file()):
        previous = load_recipe(str(RunFolder(folder).recipe()))
        check_tokenizer(folder, previous, recipe)
        if previous.rewards != recipe.rewards:
            lines.append(f"rewards are those stored in {folder}: agentrl rescore computes them by another recipe")
        if why := _unlike(folder, previous, recipe, files):
            lines.append(f"not the updates of {folder} to the bit: {'; '.join(why)}")
    return lines


def _unlike(folder: Path, previous: Recipe, recipe: Recipe, files: Sequence[Path]) -> list[str]:
    """What keeps the updates of the run in `folder` from being repeated to the bit."""
    why = []
    if line := changes(RunFolder(folder).recipe(), recipe, _TRAINED):
        why.append(line)
    if list(folder.glob("recipe.resumed_*.yaml")):
        why.append("it was resumed with other recipes")
    policy = previous.track.trajectories
    whole = [f"step_{step}.parquet" for step in range(1, len(files) + 1)]
    if [path.name for path in files] != whole or 0 < policy.sample < previous.rollout.tasks:
        why.append("not all of its steps are stored whole (track.trajectories)")
    if previous.cluster.used:
        why.append("several workers trained")
    return why


def check_tokenizer(folder: Path, previous: Recipe, recipe: Recipe) -> None:
    """Raises UserError: rollouts in `folder`, of the recipe `previous`, have no token ids, or another tokenizer's."""
    if engine_class(previous.engine.name).brings_chat:
        raise UserError(f"{folder}: its engine {previous.engine.name!r} gives no token ids to train on")
    if not same_tokenizer(previous, recipe):
        raise UserError(
            f"{folder}: sampled with the tokenizer of {previous.model.path}: {recipe.model.path} has another"
        )


def same_tokenizer(one: Recipe, other: Recipe) -> bool:
    """Whether the models of two recipes have the same vocabulary. Raises UserError: one cannot be loaded."""
    if one.model.path == other.model.path:
        return True
    ours, theirs = (load_tokenizer(recipe.model, light=True).get_vocab() for recipe in (one, other))
    return bool(ours == theirs)


def _run(start: Start, make: Callable[[Start], Loop]) -> TrainResult:
    started = monotonic()
    with start.stack as stack:
        stack.callback(start.interrupts.close)
        stack.enter_context(start.display)
        start.interrupts.notify = start.display.note
        try:
            loop = make(start)
        except Interrupted:
            raise KeyboardInterrupt("interrupted before the first step: there is nothing to save") from None
        except UserError as error:
            if start.saved is None or str(start.saved.path) not in str(error):
                raise
            raise UserError(f"{error}{_older_checkpoint(start.saved)}") from error
        resume = f"{loop.command} --resume {shlex.quote(str(loop.folder.path))}"
        program = (sys.executable, "-m", "agentrl.checkpoint.checkpoints")
        start.interrupts.last_words = (*program, str(loop.folder.checkpoints), resume)
        start.interrupts.rescue = lambda line: _after_error(loop, UserError(line))
        try:
            interrupted = _run_loop(loop)
        except UserError as error:
            start.display.log(f"error: {error}")
            raise
    return _finish(loop, interrupted, monotonic() - started, start.mirror)


def _older_checkpoint(saved: Saved) -> str:
    """A hint how to resume from the checkpoint before `saved`, which cannot be read."""
    names = (path.name.removeprefix("step_") for path in saved.path.parent.glob("step_*"))
    older = [int(name) for name in names if name.isdecimal() and int(name) < saved.step]
    return f"; to go on from step {max(older)}, move {saved.path} away" if older else ""


def _run_loop(loop: Loop) -> bool:
    """Run the loop to its end; return whether it was interrupted.

    Raises UserError, one line, for every error that ends it, including a plugin's `sys.exit`: what went wrong, which
    step is saved, how to continue. WorkerLost, after which nothing can be saved, and a second Ctrl-C are raised
    unchanged.
    """
    try:
        return loop.run()
    except BaseException as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):  # raised by concurrent work
            first = first.exceptions[0]
        if isinstance(first, WorkerLost) or from_signal(first):
            raise first from None
        raise UserError(_after_error(loop, first)) from error


def _after_error(loop: Loop, error: BaseException) -> str:
    """Save the last whole step if that is still possible; return what went wrong and how to continue."""
    deleted, removed = loop.folder.gone, isinstance(error, NotSaved) and loop.checkpoints.removed
    if isinstance(error, NotSaved) and not deleted and not removed:
        return f"{error}{_command(loop, '; ')}"
    what, refused = describe(error, plain=False), isinstance(error, OSError) and error.errno in FULL
    if deleted and isinstance(error, OSError | NotSaved):
        what = f"{loop.folder.path}: the folder of this run was deleted"
    elif refused and isinstance(error, OSError):
        what = f"{error.filename or loop.folder.path}: {error.strerror}"
    elif isinstance(error, UserError):
        what = str(error)
    traced = "" if deleted or removed or refused else _save_traceback(loop, error)
    return f"{what}{traced}; {_save_step(loop)}"


def _save_step(loop: Loop) -> str:
    """Save the last whole step after an error; return which step is saved."""
    if not loop.whole:
        return f"the update of step {loop.step + 1} had begun, and is not saved; {_last_saved(loop)}"
    try:
        loop.save_after_error()
    except NotSaved as refused:
        return f"{refused}{_command(loop, '; ')}"
    except WorkerLost:  # the loss of one worker ends all of them
        return _last_saved(loop)
    except Exception as error:  # noqa: BLE001 - reported in the line, after the error that ended the run
        return f"step {loop.step} could not be saved: {describe(error)}; {_last_saved(loop)}"
    return _last_saved(loop)


def _last_saved(loop: Loop) -> str:
    with suppress(NotSaved, WorkerLost):
        loop.checkpoints.finish()
    if (last := loop.checkpoints.latest()) is None:
        return "nothing was saved yet"
    if not last.step:
        return "no step was done: start again once that is right"
    return f"step {last.step} is saved{_command(loop, ', ')}"


def _command(loop: Loop, joint: str) -> str:
    """The command that resumes from the newest checkpoint; an empty string if there is none."""
    if loop.checkpoints.latest() is None:
        return ""
    return f"{joint}go on with: {loop.command} --resume {shlex.quote(str(loop.folder.path))}"


def _save_traceback(loop: Loop, error: BaseException) -> str:
    """Append the traceback to `error.log`; return a note with its path. Empty for an error that needs no traceback."""
    if isinstance(error, UserError) and error.__cause__ is None:
        return ""
    path = loop.folder.path / ERRORS
    try:
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(masked_text(f"after step {loop.step}:\n{''.join(traceback.format_exception(error))}\n"))
    except OSError:
        return ""
    return f"; the traceback is in {path}"


def _finish(loop: Loop, interrupted: bool, seconds: float, mirror: Mirror | None) -> TrainResult:
    """Write the report and print the result."""
    folder, display = loop.folder.path, loop.display
    last = Checkpoints(loop.folder.checkpoints, loop.recipe.train.keep).latest()
    assert last is not None  # the loop saves before it returns
    untaught = loop.taught.before if loop.taught is not None else {}
    try:
        write_report(folder, folder.name, RANGES, reasons, WATCHED)
    except Exception as error:  # noqa: BLE001 - the checkpoint is saved: the run succeeds without its report
        why = error.strerror if isinstance(error, OSError) and error.strerror else describe(error)
        display.note(f"report.html could not be written: {why}")
    if mirror is not None:
        mirror.results()
    if interrupted:
        done = loop.step >= loop.rollouts.steps
        then = "every step is done, and not evaluated" if done else f"go on with: {loop.command} --resume {folder}"
        display.note(f"Interrupted. The checkpoint of step {loop.step} is saved in {last.path}; {then}")
    else:
        rows = [(split, loop.before.get(split), after) for split, after in loop.after.items()]
        display.final(rows, str(folder), seconds, untaught, {split: _mean_rewards(loop, split) for split in loop.after})
        for finding in loop.health.remaining():
            display.note(f"still so at the end: {finding.line}")
        display.note(loop.profiler.describe())
        best = loop.checkpoints.best()
        if best is not None and (line := _best_checkpoint(best, last, loop.before.get(best.split or ""))):
            display.note(line)
    before, after = ({s: a.value for s, a in found.items()} for found in (loop.before, loop.after))
    return TrainResult(
        folder, loop.step, last.path, before, after, interrupted, {s: a.value for s, a in untaught.items()}
    )


def _mean_rewards(loop: Loop, split: str) -> list[MeanReward | None]:
    """The mean rewards on a split before the recipe's `start`, before the first step and after the last."""
    rows, name = {row["step"]: row for row in loop.folder.metrics()}, f"eval/{split}/reward"
    keys = f"{name}/mean", f"{name}_low", f"{name}_high"
    figures: list[list[Json]] = [[rows.get(step, {}).get(key) for key in keys] for step in (0, loop.step)]
    untaught = loop.taught.rewards.get(split) if loop.taught is not None else None
    return [untaught, *(None if None in found else MeanReward(*found) for found in figures)]


def _best_checkpoint(best: Saved, last: Saved, start: Accuracy | None) -> str | None:
    """A line about the best checkpoint; None where it is the last one, and better than the start. start: the accuracy
    before the first step, on the same split."""
    rated = f"{best.accuracy:.1%} on {best.split}" if best.split else f"{best.accuracy:.1%}"
    if start is None or best.accuracy is None or best.accuracy > start.value:
        if best.step == last.step:
            return None
        return f"The best checkpoint is that of step {best.step} ({rated}): {best.path}"
    return f"No checkpoint is better than the start ({start.value:.1%}); the best is that of step {best.step} ({rated})"


def changes(previous: Path, recipe: Recipe, sections: tuple[str, ...] = ()) -> str | None:
    """One line with the keys in which `recipe` differs from the recipe at `previous`, and both values.

    None if they are equal. The values of `${VAR}` are compared but not shown. sections: keys that matter; empty: all.
    """
    try:
        before = load_recipe(previous)
    except UserError as error:
        return f"what changed since the run began is not known: {error}"
    keys = [key for key in differing(before, recipe) if not sections or _below(key, sections)]
    return f"changed since the run began: {_describe_changes(keys, before, recipe)}" if keys else None


def check_same_run(previous: Path, recipe: Recipe, fixed: tuple[str, ...] = FIXED) -> None:
    """Check that `recipe` trains the same as the run whose recipe is at `previous`. fixed: the keys that say so.

    Raises UserError if it does not, or if that recipe cannot be read.
    """
    force = "start a new run with it, or go on all the same with --force"
    try:
        before = load_recipe(previous)
    except UserError as error:
        raise UserError(f"--resume: the run's own recipe cannot be compared: {error}; {force}") from error
    if keys := [key for key in differing(before, recipe) if _below(key, fixed) and not _below(key, FREE)]:
        described = _describe_changes(keys, before, recipe)
        raise UserError(f"--resume: this is not what the run began with: {described}; {force}")


def _below(key: str, parents: tuple[str, ...]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _describe_changes(keys: list[str], before: Recipe, now: Recipe) -> str:
    old, new = (dict(leaves(recipe.shown())) for recipe in (before, now))
    listed = [f"{key} {_short(old.get(key))} -> {_short(new.get(key))}" for key in keys[:SHOWN]]
    return ", ".join(listed + ([f"and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else []))


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
