"""`compare`: evaluations of the same tasks, task by task, and whether they can be told apart."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError, nearest
from agentrl.eval import measure as measures
from agentrl.eval.measure import Measure, Prices
from agentrl.eval.outcome import Outcome, by_task, read_outcomes
from agentrl.eval.paired import Difference, difference, difference_shown, holm, tasks_needed
from agentrl.eval.replicates import Variances, replicated, seeds_needed
from agentrl.eval.result import SplitResult, summarize
from agentrl.eval.sides import Side, differences, sides_of
from agentrl.plugins.types import Json
from agentrl.recipe.schema import Recipe

WANTED = 0.02
"""The difference in the share of solved tasks that is asked about where nothing else is said."""
SPREADS = (0.015, 0.04)
"""Standard deviations of the accuracy over seeds that are usual: seeds needed are told of these, where one was run."""


@dataclass(frozen=True, slots=True)
class TaskPair:
    """A task that both sides played."""

    task: str
    """Its id."""
    a: tuple[float, int]
    """The sum of the measure over A's samples (those that solve it, of `solved`), and their number."""
    b: tuple[float, int]
    """Likewise of B."""

    @property
    def difference(self) -> float:
        """The mean of B's samples, less A's."""
        return self.b[0] / self.b[1] - self.a[0] / self.a[1]


@dataclass(frozen=True, slots=True)
class Also:
    """Another measure of the same tasks, which is told, and not tested."""

    measure: Measure
    """What it is."""
    means: tuple[float, float]
    """Its means of both sides."""
    found: Difference
    """B less A."""

    def json(self) -> dict[str, Json]:
        """The figures as JSON values."""
        bounds = {"value": self.found.value, "low": self.found.low, "high": self.found.high}
        return {"measure": self.measure.name, "means": list(self.means), "difference": bounds}


@dataclass(frozen=True, slots=True)
class Paired:
    """Two sides on one split."""

    split: str
    """The split."""
    a: str
    """Letter of the side that is compared with."""
    b: str
    """Letter of the other."""
    measure: Measure
    """What they are compared by."""
    pairs: tuple[TaskPair, ...]
    """The tasks that both have a sample of."""
    alone: Mapping[str, int]
    """Why tasks have no pair -> their number."""
    results: tuple[SplitResult, SplitResult]
    """The figures of both on the tasks that pair, over all seeds."""
    means: tuple[tuple[float, ...], tuple[float, ...]]
    """The mean over tasks of each seed of A, and of B."""
    found: Difference
    """B less A."""
    p: float
    """`found.p`, raised by the number of comparisons that are made at once (Holm)."""
    shown: float
    """The least difference that so many tasks show 8 times out of 10; 0 where seeds are compared."""
    needed: Mapping[float, int]
    """A difference -> tasks that show it 8 times out of 10; empty where seeds are compared."""
    variances: Variances | None = None
    """What the difference varies with; None where no side has several seeds."""
    seeds: Mapping[float, int | None] = field(default_factory=dict)
    """A difference -> seeds a side that show it 8 times out of 10, None: more than a thousand. Without several seeds:
    their standard deviation -> seeds a side that show the difference that was found, or was asked about."""
    also: Also | None = None
    """The other of accuracy and mean reward, where nobody said which to compare."""
    trained: bool = False
    """Whether it is about single runs of which one was trained, so that another seed would have given another."""

    @property
    def apart(self) -> bool:
        """Whether the data tell the sides apart."""
        return self.p < 0.05

    @property
    def replicated(self) -> bool:
        """Whether it is about recipes, of which a side has several seeds."""
        return self.variances is not None

    @property
    def gained(self) -> list[TaskPair]:
        """The tasks of which B solves more, or has more of the measure, the largest change first."""
        return sorted((one for one in self.pairs if one.difference > 0), key=lambda one: -one.difference)

    @property
    def lost(self) -> list[TaskPair]:
        """The tasks of which B solves less, or has less of the measure, the largest change first."""
        return sorted((one for one in self.pairs if one.difference < 0), key=lambda one: one.difference)

    def json(self) -> dict[str, Json]:
        """The fields as a dictionary, which `json.dumps` takes."""
        tasks = {"gained": [asdict(one) for one in self.gained], "lost": [asdict(one) for one in self.lost]}
        return {
            "split": self.split, "a": self.a, "b": self.b, "measure": self.measure.name,
            "about": "recipes" if self.replicated else "checkpoints", "pairs": len(self.pairs),
            "alone": dict(self.alone), "results": {self.a: self.results[0].json(), self.b: self.results[1].json()},
            "means": {self.a: list(self.means[0]), self.b: list(self.means[1])},
            "difference": asdict(self.found), "p": self.p, "apart": self.apart, "difference_shown": self.shown,
            "tasks_needed": {f"{wanted:.6g}": tasks for wanted, tasks in self.needed.items()},
            "seeds_needed": {f"{wanted:.6g}": seeds for wanted, seeds in self.seeds.items()},
            "variances": None if self.variances is None else asdict(self.variances),
            "also": None if self.also is None else self.also.json(), **tasks,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found: every side against the first, on every split that all have."""

    sides: tuple[Side, ...]
    """What was compared."""
    paired: tuple[Paired, ...]
    """By split, then by side."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Lines to be read first: what makes the evaluations unlike, and what was left out."""
    beside: tuple[str, ...] = field(default=(), compare=False)
    """Lines about how recipes and code differ."""

    def json(self) -> dict[str, Json]:
        """Sides and comparisons as JSON values."""
        sides = {
            one.letter: {
                "name": one.name, "model": one.model,
                "files": {split: str(file.path) for split, file in one.files.items()},
                "runs": [str(member.folder) for member in one.members],
            }
            for one in self.sides
        }  # fmt: skip
        told = {"notes": list(self.notes), "differences": list(self.beside)}
        return {"sides": sides, **told, "comparisons": [one.json() for one in self.paired]}


@dataclass(frozen=True, slots=True)
class _Asked:
    """What to compare by, and about which difference to say what would show it."""

    on: str | None
    wanted: float | None

    def difference(self, measure: Measure) -> float | None:
        """The difference that is asked about."""
        return self.wanted if self.wanted is not None else WANTED if measure.share else None


@dataclass(frozen=True, slots=True)
class _Played:
    """What a side played of a split."""

    side: Side
    outcomes: tuple[Sequence[Outcome], ...]
    """Of each of its evaluations."""
    prices: tuple[Prices, ...]


def compare(
    *names: str,
    splits: Sequence[str] | None = None,
    recipe: str | None = None,
    wanted: float | None = None,
    on: str | None = None,
    by: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare evaluations of the same tasks, each side with the first.

    names: run folders (their newest evaluation; `RUN@STEP` that after a step; a run alone is compared with its first
    one), evaluation folders, checkpoints, models, `openai:MODEL`. With "vs" among them the names between are one side:
    runs of one recipe from several seeds, and the recipes are compared. A model is evaluated first, by `recipe` or that
    of the first name that has one, and kept. splits: those that all have. wanted: the difference about which is said
    how many tasks or seeds would show it (default: 0.02 of solved tasks). on: `solved`, `reward`, a reward part,
    `turns`, `tokens`, `seconds`, `cost` or `tool_errors`; default: `solved`, or `reward` where that alone differs. by:
    keys of the recipes, by whose values all runs in the folders named are put together. say: told what is evaluated.

    Raises UserError: what is not there, is damaged, or has no task in common.
    """
    if wanted is not None and (wanted <= 0 or (on in (None, measures.SOLVED) and wanted > 1)):
        raise UserError(f"--difference {wanted:g}: expected a share above 0 and at most 1, such as 0.02")
    sides = sides_of(names, splits, recipe, by, say or (lambda line: None))
    return compared(sides, splits, _Asked(on, wanted))


def compared(sides: Sequence[Side], splits: Sequence[str] | None, asked: _Asked) -> Comparison:
    """Compare sides that are stored; see `compare`. Raises UserError."""
    common = [split for split in sides[0].splits if all(split in side.splits for side in sides)]
    recipes = {one.folder: one.recipe() for side in sides for one in side.members}
    notes, beside = differences(sides, recipes)
    if splits:
        for split in splits:
            if split not in common:
                raise UserError(f"--split {split}: not every one has it{nearest(split, common)}")
        common = list(dict.fromkeys(splits))
    elif not common:
        told = "; ".join(f"{side.name} has {', '.join(side.files)}" for side in sides)
        raise UserError(f"no split is in all of them: {told}")
    elif left := sorted({split for side in sides for one in side.members for split in one.files} - set(common)):
        notes.append(f"left out, not in all of them: {', '.join(left)}")
    prices = {folder: _prices(recipe) for folder, recipe in recipes.items()}
    paired = [one for split in common for one in _split(split, sides, asked, prices, notes)]
    notes += [
        f"{one.split}, {one.b} against {one.a}: tasks without a pair: "
        + ", ".join(f"{why}: {number:,}" for why, number in one.alone.items())
        for one in paired
        if one.alone
    ]
    raised = holm([one.found.p for one in paired])
    paired = [replace(one, p=p) for one, p in zip(paired, raised, strict=True)]
    return Comparison(tuple(sides), tuple(paired), tuple(notes), tuple(beside))


def _split(
    split: str, sides: Sequence[Side], asked: _Asked, prices: Mapping[Path, Prices], notes: list[str]
) -> list[Paired]:
    played = [
        _Played(
            side,
            tuple(read_outcomes(one.files[split].path) for one in side.members),
            tuple(prices[one.folder] for one in side.members),
        )
        for side in sides
    ]
    every = [outcomes for one in played for outcomes in one.outcomes]
    if asked.on is None:
        measure, note = measures.chosen(every)
        if note is not None:
            notes.append(f"{split}: {note}")
    else:
        measure = measures.measure_of(asked.on, every, [price for one in played for price in one.prices])
    return [_pair(split, (played[0], other), measure, asked) for other in played[1:]]


def _prices(recipe: Recipe | None) -> Prices:
    """The endpoint's prices by a recipe, empty where it has none."""
    found = recipe.engine.args.get("prices") if recipe is not None else None
    return found if isinstance(found, dict) else {}


Tasks = Mapping[str, Sequence[Outcome]]
Sums = Mapping[str, tuple[float, int]]
"""Task -> the sum of a measure over its valid samples, and their number."""


def _pair(split: str, both: tuple[_Played, _Played], measure: Measure, asked: _Asked) -> Paired:
    """Pair the tasks of two sides. Raises UserError: none is in both."""
    tasks = tuple([_tasks(outcomes) for outcomes in one.outcomes] for one in both)
    letters = both[0].side.letter, both[1].side.letter
    names, alone = _in_both(tasks, letters)
    if not names:
        raise UserError(_nothing(split, both, alone))
    a, b = (_sums(own, names, measure, one.prices) for own, one in zip(tasks, both, strict=True))
    pairs = tuple(TaskPair(name, _together(a, name), _together(b, name)) for name in names)
    matrices = tuple(np.array([[one[name][0] / one[name][1] for name in names] for one in own]) for own in (a, b))
    means = tuple(tuple(float(mean) for mean in matrix.mean(1)) for matrix in matrices)
    results = tuple(summarize(split, _pooled(own, names)) for own in tasks)
    one = Paired(
        split, *letters, measure, pairs, alone, (results[0], results[1]), (means[0], means[1]),
        Difference(0.0, 0.0, 0.0, 1.0, ""), 1.0, 0.0, {},
    )  # fmt: skip
    if len(both[0].outcomes) > 1 or len(both[1].outcomes) > 1:
        one = _by_seeds(one, matrices, asked)
    else:
        one = _by_tasks(replace(one, trained=_trained(both)), asked)
    return one if asked.on is not None else replace(one, also=_also(one, tasks, names))


def _trained(both: tuple[_Played, _Played]) -> bool:
    """Whether they come from different runs, of which one was trained: another seed would have given another."""
    a, b = (one.side for one in both)
    return a.folder != b.folder and (a.trained or b.trained)


def _in_both(tasks: Sequence[Sequence[Tasks]], letters: tuple[str, str]) -> tuple[list[str], dict[str, int]]:
    """The tasks of which every evaluation has a sample, in the order of the first one; why the others have no pair."""
    (first, *_), (second, *_) = tasks
    every = [one for own in tasks for one in own]
    alone = {
        f"{letter} alone has them": len(mine.keys() - others.keys())
        for letter, mine, others in ((letters[0], first, second), (letters[1], second, first))
    }
    names = [name for name in first if name in second]
    shared = [name for name in names if all(name in one for one in every)]
    alike = [name for name in shared if all(_same_task(first[name][0], one[name][0]) for one in every)]
    valid = [name for name in alike if all(any(sample.valid for sample in one[name]) for one in every)]
    alone["not every seed has them"] = len(names) - len(shared)
    alone["the task's data are not the same"] = len(shared) - len(alike)
    alone["every sample failed"] = len(alike) - len(valid)
    return valid, {why: number for why, number in alone.items() if number}


def _same_task(one: Outcome, other: Outcome) -> bool:
    return one.data == other.data and one.environment == other.environment


def _tasks(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The samples by the task's id; those of a task that comes several times are one's."""
    found: dict[str, list[Outcome]] = {}
    for task in by_task(outcomes):
        found.setdefault(task[0].task, []).extend(task)
    return found


def _sums(own: Sequence[Tasks], names: Sequence[str], measure: Measure, prices: Sequence[Prices]) -> Sequence[Sums]:
    """Of each evaluation of a side."""
    found = []
    for tasks, price in zip(own, prices, strict=True):
        values = {name: [measure.value(one, price) for one in tasks[name] if one.valid] for name in names}
        found.append({name: (math.fsum(those), len(those)) for name, those in values.items()})
    return found


def _together(sums: Sequence[Sums], name: str) -> tuple[float, int]:
    total = math.fsum(one[name][0] for one in sums)
    return (int(total) if total.is_integer() else total), sum(one[name][1] for one in sums)


def _pooled(own: Sequence[Tasks], names: Sequence[str]) -> list[Outcome]:
    """The samples of a side on these tasks; those of all seeds as samples of one task."""
    if len(own) == 1:
        return [one for name in names for one in own[0][name]]
    return [replace(one, group=index) for index, name in enumerate(names) for tasks in own for one in tasks[name]]


def _by_tasks(one: Paired, asked: _Asked) -> Paired:
    """The comparison of two evaluations: tasks are what it varies with; where one is of a training, its seed too."""
    values, counts = _values(one.pairs)
    if one.measure.share:
        unit, most = 1 / max(counts), 1.0
        found = difference(values, math.lcm(*counts), mcnemar=counts == {1})
    else:
        most = max(float(np.abs(values).max()), _range(one.pairs)) or 1.0
        unit = 0.0
        found = difference(values, scale=None if np.any(values) else most)
    sizes = {asked.difference(one.measure) or 0.0, abs(found.value)} - {0.0}
    needed = {size: tasks_needed(values, size, unit) for size in sorted(sizes)}
    one = replace(one, found=found, p=found.p, shown=difference_shown(values, unit, most), needed=needed)
    if not one.trained or not one.measure.share or not sizes:
        return one
    varies = float(values.var()) / len(values)
    size = abs(found.value) if found.p < 0.05 else asked.difference(one.measure) or abs(found.value)
    return replace(one, seeds={spread: seeds_needed(size, 2 * spread**2, varies) for spread in SPREADS})


def _values(pairs: Sequence[TaskPair]) -> tuple[npt.NDArray[np.float64], set[int]]:
    """The differences of the tasks, and the numbers of samples that there are."""
    return np.array([one.difference for one in pairs]), {size for one in pairs for size in (one.a[1], one.b[1])}


def _range(pairs: Sequence[TaskPair]) -> float:
    means = [side[0] / side[1] for one in pairs for side in (one.a, one.b)]
    return max(means) - min(means)


def _by_seeds(one: Paired, means: Sequence[npt.NDArray[np.float64]], asked: _Asked) -> Paired:
    """The comparison of two recipes: seeds and tasks are what it varies with. means: of each side [seeds, tasks]."""
    found, variances = replicated(means[0], means[1])
    sizes = {asked.difference(one.measure) or 0.0, abs(found.value)} - {0.0}
    seeds = {size: seeds_needed(size, variances.seeds, variances.tasks) for size in sorted(sizes)}
    return replace(one, found=found, p=found.p, variances=variances, seeds=seeds)


def _also(one: Paired, tasks: Sequence[Sequence[Tasks]], names: Sequence[str]) -> Also | None:
    """The other of accuracy and mean reward; None where both are the same number of every task."""
    other = Measure(measures.REWARD if one.measure.share else measures.SOLVED)
    sums = [_sums(own, names, other, [{}] * len(own)) for own in tasks]
    pairs = [TaskPair(name, _together(sums[0], name), _together(sums[1], name)) for name in names]
    if all(mine.a == theirs.a and mine.b == theirs.b for mine, theirs in zip(one.pairs, pairs, strict=True)):
        return None
    matrices = [np.array([[found[name][0] / found[name][1] for name in names] for found in own]) for own in sums]
    if one.replicated:
        found = replicated(matrices[0], matrices[1])[0]
    else:
        bare = replace(one, measure=other, pairs=tuple(pairs), trained=False)
        found = _by_tasks(bare, _Asked(other.name, None)).found
    return Also(other, (float(matrices[0].mean()), float(matrices[1].mean())), found)


def _nothing(split: str, both: tuple[_Played, _Played], alone: Mapping[str, int]) -> str:
    names = [sorted({one.environment for those in side.outcomes for one in those if one.environment}) for side in both]
    a, b = both[0].side.name, both[1].side.name
    if names[0] and names[1] and not set(names[0]) & set(names[1]):
        first, second = (", ".join(those) for those in names)
        return f"{split}: {a} is of environment {first}, {b} of {second}"
    told = ", ".join(f"{why} ({number})" for why, number in alone.items())
    return f"{split}: {a} and {b} have no task in common: {told or 'they are empty'}"


def sentences(one: Paired) -> Iterator[str]:
    """Yield what a comparison says, in words: whether the data tell the sides apart, what it is about, and what more
    tasks or seeds would show."""
    d, told = one.found, one.measure.told
    p = "p < 0.0001" if one.p < 0.0001 else f"p = {one.p:.2g}" if one.p < 0.1 else f"p = {one.p:.2f}"
    unit = " points" if one.measure.share else ""
    interval = f"95 % interval {told(d.low, True)} to {told(d.high, True)}{unit}, {p}"
    if not one.apart:
        yield f"The data cannot tell {one.b} from {one.a}: {told(d.value, True)}{unit} ({interval})."
    elif one.measure.share:
        more = "more" if d.value > 0 else "less"
        yield f"{one.b} solves {told(abs(d.value))} points {more} than {one.a} ({interval})."
    else:
        more = "higher" if d.value > 0 else "lower"
        name = one.measure.name.replace("_", " ")
        yield f"{one.b}'s mean of {name} is {told(abs(d.value))} {more} than {one.a}'s ({interval})."
    if one.replicated:
        yield from _of_recipes(one)
        return
    if one.trained:
        yield _of_checkpoints(one)
    if line := _of_tasks(one):
        yield line


def _of_recipes(one: Paired) -> Iterator[str]:
    """Yield what several seeds say."""
    varies, told = one.variances, one.measure.told
    assert varies is not None
    counts = tuple(len(means) for means in one.means)
    unit = " points" if one.measure.share else ""
    yield (
        f"This is about the recipes: {counts[0]} and {counts[1]} seeds, which spread by {told(varies.spread)}{unit} "
        f"(standard deviation, without what samples add)."
    )
    if 1 in counts:
        side = one.a if counts[0] == 1 else one.b
        yield f"{side} has one seed, which is taken to spread as the other side's do."
    more = []
    for size, seeds in one.seeds.items():
        seen = size == abs(one.found.value)
        if seen and one.apart:
            continue
        what = f"{told(size)}{unit}{' as seen here' if seen else ''}"
        more.append(f"{what} need {seeds} seeds a side" if seeds else f"{what} need more tasks, not more seeds")
    if more:
        yield f"8 times out of 10, {'; '.join(more)}."


def _of_checkpoints(one: Paired) -> str:
    """What one seed a side can claim, and of solved tasks how many would be needed."""
    about = "One seed a side: this is about these two checkpoints, not these two recipes."
    if not one.seeds:
        return about
    size = one.measure.told(abs(one.found.value)) if one.found.p < 0.05 else None
    what = f"the {size} points" if size else "the difference that is asked about"
    needed = [
        f"{seeds or 'more than a thousand'} where seeds spread by {100 * spread:g} points"
        for spread, seeds in one.seeds.items()
    ]
    return f"{about} To show {what} of the recipes 8 times out of 10 takes so many seeds a side: {', '.join(needed)}."


def _of_tasks(one: Paired) -> str:
    """What so many tasks show, and how many would show more; empty where there is nothing to be said."""
    tasks, more = len(one.pairs), "; ".join(_more(one))
    if not one.measure.share:
        return f"8 times out of 10, {more}." if more else ""
    if one.shown < 1:
        known = f"{tasks:,} tasks show differences from {one.measure.told(one.shown)} points on, 8 times out of 10"
    else:
        known = f"{tasks:,} tasks show no difference reliably"
    return f"{known}; {more}." if more else f"{known}."


def _more(one: Paired) -> Iterator[str]:
    tasks = len(one.pairs)
    for size, needed in one.needed.items():
        what = f"{one.measure.told(size)}{' points' if one.measure.share else ''}"
        if size == abs(one.found.value):
            if one.apart:
                continue
            what += " as seen here"
        yield f"{what} need {needed:,} tasks, {needed - tasks:,} more" if needed > tasks else f"{what} need {needed:,}"
