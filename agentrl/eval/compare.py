"""`compare`: evaluations of the same tasks, task by task, and whether they can be told apart."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from agentrl.checkpoint.run_folder import RECIPE, TRAJECTORIES, RunFolder
from agentrl.errors import UserError, nearest
from agentrl.eval.folder import EVALUATION, new_folder
from agentrl.eval.outcome import Outcome, by_task, read_outcomes
from agentrl.eval.paired import Difference, difference, difference_shown, holm, tasks_needed
from agentrl.eval.result import SplitResult, summarize
from agentrl.models import EMBEDDED
from agentrl.plugins.types import Json
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.trajectory_file import Stored, stored_files

API = "openai:"
"""How a model behind OpenAI's API, or the one of OPENAI_BASE_URL, is named: `openai:gpt-5-mini`."""
WANTED = 0.02
"""The difference that is asked about where nothing else is said."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the evaluations that are compared."""

    letter: str
    """A, B, ..."""
    name: str
    """What was asked for, with the step of a run's evaluation."""
    folder: Path
    """The run folder or evaluation folder."""
    files: Mapping[str, Stored]
    """Split -> its stored samples."""
    model: str = ""
    """What was evaluated, where that is written down."""


@dataclass(frozen=True, slots=True)
class TaskPair:
    """A task that both sides played."""

    task: str
    """Its id."""
    a: tuple[int, int]
    """Samples of A that solve it, and all of them."""
    b: tuple[int, int]
    """Likewise of B."""

    @property
    def difference(self) -> float:
        """The share of B's samples that solve it, less A's."""
        return self.b[0] / self.b[1] - self.a[0] / self.a[1]


@dataclass(frozen=True, slots=True)
class Paired:
    """Two sides on one split."""

    split: str
    """The split."""
    a: str
    """Letter of the side that is compared with."""
    b: str
    """Letter of the other."""
    pairs: tuple[TaskPair, ...]
    """The tasks that both have a sample of."""
    alone: Mapping[str, int]
    """Why tasks have no pair -> their number."""
    results: tuple[SplitResult, SplitResult]
    """The figures of both on the tasks that pair."""
    found: Difference
    """B less A."""
    p: float
    """`found.p`, raised where there are several comparisons of a split (Holm)."""
    shown: float
    """The least difference that so many tasks show 8 times out of 10."""
    needed: Mapping[float, int]
    """A difference -> tasks that show it 8 times out of 10."""

    @property
    def apart(self) -> bool:
        """Whether the data tell the sides apart."""
        return self.p < 0.05

    @property
    def gained(self) -> list[TaskPair]:
        """The tasks of which B solves more, the largest change first."""
        return sorted((one for one in self.pairs if one.difference > 0), key=lambda one: -one.difference)

    @property
    def lost(self) -> list[TaskPair]:
        """The tasks of which B solves less, the largest change first."""
        return sorted((one for one in self.pairs if one.difference < 0), key=lambda one: one.difference)

    def json(self) -> dict[str, Json]:
        """The fields as a dictionary, which `json.dumps` takes."""
        tasks = {"gained": [asdict(one) for one in self.gained], "lost": [asdict(one) for one in self.lost]}
        return {
            "split": self.split, "a": self.a, "b": self.b, "pairs": len(self.pairs), "alone": dict(self.alone),
            "results": {self.a: self.results[0].json(), self.b: self.results[1].json()},
            "difference": asdict(self.found), "p": self.p, "apart": self.apart, "difference_shown": self.shown,
            "tasks_needed": {f"{wanted:.6g}": tasks for wanted, tasks in self.needed.items()}, **tasks,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found: every side against the first, on every split that all have."""

    sides: tuple[Side, ...]
    """What was compared."""
    paired: tuple[Paired, ...]
    """By split, then by side."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Lines about what was left out."""

    def json(self) -> dict[str, Json]:
        """Sides and comparisons as JSON values."""
        sides = {
            one.letter: {"name": one.name, "model": one.model, "files": {s: str(f.path) for s, f in one.files.items()}}
            for one in self.sides
        }
        return {"sides": sides, "notes": list(self.notes), "comparisons": [one.json() for one in self.paired]}


def compare(
    *names: str,
    splits: Sequence[str] | None = None,
    recipe: str | None = None,
    wanted: float = WANTED,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare evaluations of the same tasks, each with the first.

    names: run folders (their newest evaluation; `RUN@STEP` that after a step; a run alone is compared with its first
    one), evaluation folders, checkpoints, models, `openai:MODEL`. A model is evaluated first, by `recipe` or that of
    the first name that has one, and kept. splits: those that all have. wanted: the difference (0..1) about which is
    said how many tasks would show it. say: told what is evaluated.

    Raises UserError: what is not there, is damaged, or has no task in common.
    """
    if not 0 < wanted <= 1:
        raise UserError(f"--difference {wanted:g}: expected a share above 0 and at most 1, such as 0.02")
    sides, notes = _sides(names, splits, recipe, say or (lambda line: None))
    return compared(sides, splits, wanted, notes)


def _sides(
    names: Sequence[str], splits: Sequence[str] | None, recipe: str | None, say: Callable[[str], None]
) -> tuple[list[Side], list[str]]:
    if len(names) > len(LETTERS):
        raise UserError(f"at most {len(LETTERS)} can be compared")
    stored = [_stored(name) for name in names]
    if len(names) == 1 and "@" in Path(names[0]).name:
        raise UserError(f"{names[0]}: name what it is to be compared with")
    if len(names) == 1 and stored[0] is not None:
        first, last = _first_and_last(names[0], stored[0])
        names, stored = [_at(*first), _at(*last)], [first, last]
    if not names:
        raise UserError("name the runs, evaluations or models to compare")
    notes: list[str] = []
    known = [one for one in stored if one is not None]
    for index, one in enumerate(stored):
        if one is None:
            stored[index] = _evaluated(names[index], splits, recipe, known, say)
    sides = []
    for letter, name, one in zip(LETTERS, names, stored, strict=False):
        assert one is not None
        folder, files = one
        sides.append(Side(letter, _named(name, folder, files), folder, files, _model(folder, files)))
    return sides, notes


_Found = tuple[Path, dict[str, Stored]]


def _stored(name: str) -> _Found | None:
    """The folder and files of the evaluation that a name stands for; None: it is a model that is to be
    evaluated. Raises UserError."""
    folder, step = Path(name), None
    if not folder.exists() and (m := re.fullmatch(r"(.+)@(\d{1,9})", name)) and Path(m[1]).is_dir():
        folder, step = Path(m[1]), int(m[2])
    if (run := _run_of(folder)) is not None:
        folder, step = run
    elif not folder.exists():
        if (
            name in EMBEDDED
            or name.startswith(API)
            or (_HUB_NAME.fullmatch(name) and not name.endswith((".yaml", ".yml", ".json")))
        ):
            return None
        raise UserError(f"{name}: there is no such folder, nor is it a model's name on the hub")
    files = _files(folder, step)
    if files:
        return folder, files
    if step is not None and run is None:
        raise UserError(f"{name}: no evaluation after step {step} is stored there{_steps(folder)}")
    if list((folder / TRAJECTORIES).glob(".eval_*.part_*.parquet")):
        raise UserError(f"{name}: an evaluation that is not whole: agentrl eval --resume {folder}")
    if (folder / "config.json").is_file() or (folder / "checkpoints").is_dir():
        return None
    raise UserError(f"{name}: neither a run or evaluation with stored conversations ({TRAJECTORIES}/) nor a model")


def _run_of(folder: Path) -> tuple[Path, int] | None:
    """Run and step of a checkpoint of a run that was evaluated after it."""
    m = re.fullmatch(r"step_(\d{1,9})", folder.name)
    run = folder.parent.parent
    if m is None or folder.parent.name != "checkpoints" or not _files(run, int(m[1])):
        return None
    return run, int(m[1])


def _files(folder: Path, step: int | None) -> dict[str, Stored]:
    """The stored evaluations of a folder by split: those after a step, or the newest of each."""
    found = [one for one in stored_files(folder / TRAJECTORIES) if one.evaluation and step in (None, one.step)]
    return {one.split: one for one in found}


def _steps(folder: Path) -> str:
    steps = sorted({one.step for one in stored_files(folder / TRAJECTORIES) if one.evaluation})
    return f"; stored are those after {', '.join(map(str, steps))}" if steps else ""


def _first_and_last(name: str, stored: _Found) -> tuple[_Found, _Found]:
    """The first and the newest evaluation of each split that a run has evaluated twice; `stored`: the newest.
    Raises UserError: there is none."""
    folder, newest = stored
    every = [one for one in stored_files(folder / TRAJECTORIES) if one.evaluation]
    first = {one.split: one for one in reversed(every)}
    again = [split for split in newest if first[split].step < newest[split].step]
    if not again:
        raise UserError(f"{name}: has one evaluation only; name what it is to be compared with")
    return (folder, {split: first[split] for split in again}), (folder, {split: newest[split] for split in again})


def _named(name: str, folder: Path, files: Mapping[str, Stored]) -> str:
    """A name with the steps of the run's evaluations."""
    if all(one.step == 0 for one in files.values()) or re.search(r"@[\d,]+$|checkpoints/step_\d+/?$", name):
        return name
    return _at(folder, files)


def _at(folder: Path, files: Mapping[str, Stored]) -> str:
    return f"{folder}@{','.join(map(str, sorted({one.step for one in files.values()})))}"


def _model(folder: Path, files: Mapping[str, Stored]) -> str:
    try:
        found = json.loads((folder / EVALUATION).read_bytes())
        return str(found["model"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        steps = {one.step for one in files.values()}
        return "" if len(steps) > 1 else f"after step {max(steps)}" if max(steps) else "before training"


def _evaluated(
    name: str, splits: Sequence[str] | None, recipe: str | None, known: Sequence[_Found], say: Callable[[str], None]
) -> _Found:
    """Evaluate a model as what is stored was, and return where that is kept. Raises UserError."""
    from agentrl.eval.evaluate import evaluate, model_of  # torch and all, which what is stored does without

    if recipe is None and not (known and (known[0][0] / RECIPE).is_file()):
        raise UserError(
            f"{name}: not evaluated yet, and nothing else that is compared has a recipe to do it by: add --recipe "
            "RECIPE, or evaluate it by agentrl eval RECIPE --model MODEL and name the folder that is kept"
        )
    how = load_recipe(recipe if recipe is not None else RunFolder(known[0][0]).recipe())
    model: str | None = None
    if name.startswith(API):
        how = how.changed(engine={"name": "openai", "args": {"model": name.removeprefix(API)}})
    else:
        model = model_of(name)
    if known:
        how, splits = _alike(how, known, splits)
    folder = new_folder(None, Path(name.removeprefix(API)).name)
    say(f"{name} is evaluated now, and kept in {folder}")
    evaluate(how, model=model, splits=splits, keep=folder)
    return folder, _files(folder, None)


def _alike(how: Recipe, known: Sequence[_Found], splits: Sequence[str] | None) -> tuple[Recipe, list[str]]:
    """A recipe with as many tasks and samples as the stored evaluations have, and their splits."""
    chosen = list(splits or [split for split in known[0][1] if all(split in files for _, files in known)])
    played = [
        one for _, files in known for split in chosen if split in files for one in read_outcomes(files[split].path)
    ]
    tasks, samples = (1 + max((getattr(one, key) for one in played), default=0) for key in ("group", "sample"))
    return how.changed(eval={"tasks": max(tasks, 1), "samples": samples}), chosen


def compared(
    sides: Sequence[Side], splits: Sequence[str] | None = None, wanted: float = WANTED, notes: Sequence[str] = ()
) -> Comparison:
    """Compare sides that are stored; see `compare`. Raises UserError."""
    common = [split for split in sides[0].files if all(split in side.files for side in sides)]
    notes = list(notes)
    if splits:
        for split in splits:
            if split not in common:
                raise UserError(f"--split {split}: not every one has it{nearest(split, common)}")
        common = list(dict.fromkeys(splits))
    elif not common:
        told = "; ".join(f"{side.name} has {', '.join(side.files)}" for side in sides)
        raise UserError(f"no split is in all of them: {told}")
    elif left := sorted({split for side in sides for split in side.files} - set(common)):
        notes.append(f"left out, not in all of them: {', '.join(left)}")
    paired = [one for split in common for one in _split(split, sides, wanted)]
    return Comparison(tuple(sides), tuple(paired), tuple(notes))


def _split(split: str, sides: Sequence[Side], wanted: float) -> list[Paired]:
    outcomes = [read_outcomes(side.files[split].path) for side in sides]
    found = [
        _pair(split, (sides[0], side), (outcomes[0], those), wanted)
        for side, those in zip(sides[1:], outcomes[1:], strict=True)
    ]
    raised = holm([one.found.p for one in found])
    return [replace(one, p=p) for one, p in zip(found, raised, strict=True)]


def _pair(
    split: str, sides: tuple[Side, Side], outcomes: tuple[Sequence[Outcome], Sequence[Outcome]], wanted: float
) -> Paired:
    """Pair the tasks of two sides. Raises UserError: none is in both."""
    a, b = (_tasks(those) for those in outcomes)
    alone = {
        f"{one.letter} alone has them": len(mine.keys() - others.keys())
        for one, mine, others in ((sides[0], a, b), (sides[1], b, a))
    }
    pairs: list[TaskPair] = []
    both: tuple[list[Outcome], list[Outcome]] = ([], [])
    other = empty = 0
    for task, mine in a.items():
        if task not in b:
            continue
        if mine[0].data != b[task][0].data or mine[0].environment != b[task][0].environment:
            other += 1
            continue
        one = TaskPair(task, _count(mine), _count(b[task]))
        if not one.a[1] or not one.b[1]:
            empty += 1
            continue
        pairs.append(one)
        for kept, samples in zip(both, (mine, b[task]), strict=True):
            kept += samples
    alone |= {"the task's data are not the same": other, "every sample failed": empty}
    alone = {why: number for why, number in alone.items() if number}
    if not pairs:
        raise UserError(_nothing(split, sides, outcomes, alone))
    values = np.array([one.difference for one in pairs])
    counts = {size for one in pairs for size in (one.a[1], one.b[1])}
    denominator = math.lcm(*counts)
    unit = 1 / max(counts)
    found = difference(values, denominator, mcnemar=counts == {1})
    asked = {wanted, abs(found.value)} - {0.0}
    needed = {size: tasks_needed(values, size, unit) for size in sorted(asked)}
    results = (summarize(split, both[0]), summarize(split, both[1]))
    shown = difference_shown(values, unit)
    return Paired(split, sides[0].letter, sides[1].letter, tuple(pairs), alone, results, found, found.p, shown, needed)


def _tasks(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The samples by the task's id; those of a task that comes several times are one's."""
    found: dict[str, list[Outcome]] = {}
    for task in by_task(outcomes):
        found.setdefault(task[0].task, []).extend(task)
    return found


def _count(samples: Sequence[Outcome]) -> tuple[int, int]:
    valid = [one for one in samples if one.valid]
    return sum(bool(one.solved) for one in valid), len(valid)


def _nothing(
    split: str,
    sides: tuple[Side, Side],
    outcomes: tuple[Sequence[Outcome], Sequence[Outcome]],
    alone: Mapping[str, int],
) -> str:
    names = [sorted({one.environment for one in those if one.environment}) for those in outcomes]
    if names[0] and names[1] and not set(names[0]) & set(names[1]):
        first, second = (", ".join(those) for those in names)
        return f"{split}: {sides[0].name} is of environment {first}, {sides[1].name} of {second}"
    told = ", ".join(f"{why} ({number})" for why, number in alone.items())
    return f"{split}: {sides[0].name} and {sides[1].name} have no task in common: {told or 'they are empty'}"


def points(share: float, sign: bool = True) -> str:
    """A difference in percentage points, such as `+3.1`."""
    return f"{100 * share:+.1f}" if sign else f"{100 * share:.1f}"


def sentences(one: Paired) -> Iterator[str]:
    """Yield what a comparison says, in words: whether the data tell the sides apart, and what more tasks would show."""
    d, tasks = one.found, len(one.pairs)
    p = "p < 0.0001" if one.p < 0.0001 else f"p = {one.p:.2g}" if one.p < 0.1 else f"p = {one.p:.2f}"
    interval = f"95 % interval {points(d.low)} to {points(d.high)} points, {p}"
    if one.apart:
        more = "more" if d.value > 0 else "less"
        yield f"{one.b} solves {points(abs(d.value), False)} points {more} than {one.a} ({interval})."
    else:
        yield f"The data cannot tell {one.b} from {one.a}: {points(d.value)} points ({interval})."
    if one.shown < 1:
        known = f"{tasks:,} tasks show differences from {points(one.shown, False)} points on, 8 times out of 10"
    else:
        known = f"{tasks:,} tasks show no difference reliably"
    yield f"{known}; {'; '.join(_more(one))}." if one.needed else f"{known}."


def _more(one: Paired) -> Iterator[str]:
    tasks = len(one.pairs)
    for size, needed in one.needed.items():
        what = f"{points(size, False)} points"
        if size == abs(one.found.value):
            if one.apart:
                continue
            what += " as seen here"
        yield f"{what} need {needed:,} tasks, {needed - tasks:,} more" if needed > tasks else f"{what} need {needed:,}"
