"""`train`: from a recipe to a result, taken up again where a worker is lost."""

import shlex
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from agentrl.checkpoint.checkpoints import Checkpoints, NotSaved, Saved
from agentrl.checkpoint.disk import FULL
from agentrl.checkpoint.run_folder import ERRORS, RunFolder
from agentrl.cluster.errors import WorkerLost
from agentrl.errors import UserError, describe, from_signal
from agentrl.recipe.load import load_recipe, recipe_name
from agentrl.recipe.schema import Recipe
from agentrl.report.page import write_report
from agentrl.rollout.event_loop import blocking
from agentrl.training.changes import changes, check_same_run
from agentrl.training.display import Display
from agentrl.training.folder_lock import FolderLock
from agentrl.training.interrupt import Interrupted, Interrupts
from agentrl.training.loop import Loop
from agentrl.training.preflight import check_run
from agentrl.training.setup import Start, set_up


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

    Raises UserError: one line, before anything is sampled, for what can be known by then, and later for whatever ends
    the run, with the step that is saved; KeyboardInterrupt when it is stopped before the first evaluation has begun,
    with nothing to be saved.
    """
    if isinstance(recipe, str):
        name, recipe = name or recipe_name(recipe), load_recipe(recipe, overrides)
    elif overrides:
        raise UserError("overrides go with a recipe's path; a Recipe object is complete")
    return _start(recipe, name or "run", None, display)


def resume_run(
    run: str,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    force: bool = False,
    display: Display | None = None,
) -> TrainResult:
    """Go on with a run from its last checkpoint, by its own recipe, or by `recipe`; `overrides` change either.

    Raises UserError for one that makes it another run (see `changes.py`), unless `force`.
    """
    folder = RunFolder.existing(run)
    found = load_recipe(recipe or folder.recipe(), overrides)
    if not force:
        check_same_run(folder.recipe(), found)
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
        start = _begin(recipe, name, folder, display, interrupts, again=left < recipe.cluster.restarts)
        try:
            return _run(start)
        except WorkerLost as lost:
            folder = start.folder or folder
            if not left or interrupts.requested:
                raise UserError(f"{lost}{_remedy(folder)}") from lost
            Display(recipe.train.steps, name).note(f"{lost}; going on by itself, {left} restarts are left")
    raise AssertionError("a range that ends with 0 returns or raises")


def _remedy(folder: RunFolder | None) -> str:
    if folder is None or (saved := Checkpoints(folder.checkpoints, 1).latest()) is None:
        return "; no checkpoint was saved yet"
    return f"; step {saved.step} is saved, go on with --resume {folder.path}, or set cluster.restarts"


def _begin(
    recipe: Recipe,
    name: str,
    resumed: RunFolder | None,
    display: Display | None,
    interrupts: Interrupts,
    again: bool,
) -> Start:
    """again: not by a person's wish, so that a folder without a checkpoint is begun anew."""
    saved = None
    with ExitStack() as stack:
        if resumed is None:
            RunFolder.check_free(recipe.output)
        else:
            stack.callback(FolderLock(resumed.path).release)
            saved = _last_checkpoint(recipe, resumed, again)
        display = display or Display(recipe.train.steps, name, first_step=saved.step if saved else 0)
        if resumed and not again and (line := changes(resumed.recipe(), recipe)):
            display.note(line)
        return Start(recipe, name, resumed, saved, check_run(recipe), display, interrupts, stack.pop_all())


def _run(start: Start) -> TrainResult:
    began = monotonic()
    with start.stack as stack:
        stack.callback(start.interrupts.close)
        stack.enter_context(start.display)
        start.interrupts.say = start.display.note
        try:
            loop = set_up(start)
        except Interrupted:
            raise KeyboardInterrupt("interrupted before the first step: there is nothing to save") from None
        except UserError as error:
            if start.saved is None or str(start.saved.path) not in str(error):
                raise
            raise UserError(f"{error}{_one_before(start.saved)}") from error
        try:
            interrupted = _play(loop)
        finally:
            start.display.over()
    return _finish(loop, interrupted, monotonic() - began)


def _play(loop: Loop) -> bool:
    """The loop to its end; returns whether it was interrupted. The one place that knows what may end it otherwise.

    Raises UserError, one line, of whatever that is, an exit that somebody's code asked for included: what went wrong,
    which step is saved, how to go on. WorkerLost, with nobody left who could save anything, and a second Ctrl-C stay
    what they are.
    """
    try:
        return loop.run()
    except BaseException as error:
        first = _first(error)
        if isinstance(first, WorkerLost) or from_signal(first):
            raise first from None
        raise UserError(_after_error(loop, first)) from error


def _first(error: BaseException) -> BaseException:
    """The error itself, out of the groups that concurrent work raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _after_error(loop: Loop, error: BaseException) -> str:
    """What went wrong, and what there is to go on from; the last whole step is saved where it still can be."""
    deleted = loop.folder.gone
    if isinstance(error, NotSaved) and not deleted:
        return f"{error}{_command(loop, '; ')}"
    what, refused = describe(error), isinstance(error, OSError) and error.errno in FULL
    if deleted and isinstance(error, OSError | NotSaved):
        what = f"{loop.folder.path}: the folder of this run was deleted"
    elif refused and isinstance(error, OSError):
        what = f"{error.filename or loop.folder.path}: {error.strerror}"
    elif isinstance(error, UserError):
        what = str(error)
    traced = "" if deleted or refused else _keep_traceback(loop, error)
    return f"{what}{traced}; {_save_after(loop)}"


def _save_after(loop: Loop) -> str:
    """Save the last whole step after an error; what there is to go on from, in a few words."""
    if not loop.whole:
        return f"the update of step {loop.step + 1} had begun, and is not saved; {_last_saved(loop)}"
    try:
        loop.save_after_error()
    except NotSaved as refused:
        return f"{refused}{_command(loop, '; ')}"
    except WorkerLost:  # the failure of one ended them all
        return _last_saved(loop)
    except Exception as error:  # noqa: BLE001 - it is said; what ended the run is what the line begins with
        return f"step {loop.step} could not be saved: {describe(error)}; {_last_saved(loop)}"
    return _last_saved(loop)


def _last_saved(loop: Loop) -> str:
    with suppress(NotSaved, WorkerLost):
        loop.checkpoints.finish()
    if (last := loop.checkpoints.latest()) is None:
        return "nothing was saved yet"
    return f"step {last.step} is saved{_command(loop, ', ')}"


def _command(loop: Loop, joint: str) -> str:
    """How to go on from the newest checkpoint; empty where there is none."""
    if loop.checkpoints.latest() is None:
        return ""
    return f"{joint}go on with: agentrl train --resume {shlex.quote(str(loop.folder.path))}"


def _keep_traceback(loop: Loop, error: BaseException) -> str:
    """Write down where an error came from, which the line leaves out; where that lies, in a few words. Empty for a
    line that says it all."""
    if isinstance(error, UserError) and error.__cause__ is None:
        return ""
    path = loop.folder.path / ERRORS
    try:
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"after step {loop.step}:\n{''.join(traceback.format_exception(error))}\n")
    except OSError:
        return ""
    return f"; the traceback is in {path}"


def _one_before(saved: Saved) -> str:
    """What there is to go on from where `saved` cannot be read."""
    names = (path.name.removeprefix("step_") for path in saved.path.parent.glob("step_*"))
    older = [int(name) for name in names if name.isdecimal() and int(name) < saved.step]
    return f"; to go on from step {max(older)}, move {saved.path} away" if older else ""


def _last_checkpoint(recipe: Recipe, resumed: RunFolder, again: bool) -> Saved | None:
    saved = Checkpoints(resumed.checkpoints, recipe.train.keep).latest()
    if saved is None and again:
        return None
    if saved is None:
        raise UserError(f"--resume {resumed.path}: no checkpoint was saved there; start it anew")
    if saved.step >= recipe.train.steps:
        raise UserError(f"--resume: step {saved.step} of {recipe.train.steps} is done; set train.steps higher to go on")
    return saved


def _finish(loop: Loop, interrupted: bool, seconds: float) -> TrainResult:
    folder, display = loop.folder.path, loop.display
    last = Checkpoints(loop.folder.checkpoints, loop.recipe.train.keep).latest()
    assert last is not None  # the loop saves before it returns
    try:
        write_report(folder, folder.name)
    except Exception as error:  # noqa: BLE001 - what was learned is saved, and a page is no reason to end otherwise
        why = error.strerror if isinstance(error, OSError) and error.strerror else describe(error)
        display.note(f"report.html could not be written: {why}")
    if interrupted:
        done = loop.step >= loop.recipe.train.steps
        then = "every step is done" if done else f"go on with: agentrl train --resume {folder}"
        display.note(f"Interrupted. The checkpoint of step {loop.step} is saved in {last.path}; {then}")
    else:
        rows = [(split, before, loop.after[split]) for split, before in loop.before.items() if split in loop.after]
        display.final(rows, str(folder), seconds)
        display.note(loop.profiler.describe())
        if (best := loop.checkpoints.best()) is not None and best.step != last.step:
            rated = f"{best.accuracy:.1%} on {best.split}" if best.split else f"{best.accuracy:.1%}"
            display.note(f"The best checkpoint is that of step {best.step} ({rated}): {best.path}")
    before, after = ({s: a.value for s, a in found.items()} for found in (loop.before, loop.after))
    return TrainResult(folder, loop.step, last.path, before, after, interrupted)
