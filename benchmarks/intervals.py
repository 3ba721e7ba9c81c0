"""Whether the intervals and tests of `agentrl eval` and `agentrl compare` are right: simulations whose truth is known.

    python benchmarks/intervals.py --runs 1000
    python benchmarks/intervals.py --runs 1000 --only recipes

First table: how often the 95 % interval of an accuracy holds the truth, at the accuracy and the kind of tasks where it
does so least often. Second: the interval of a difference, the false alarms of its test where there is none, and how
often it is found where there is one. Third: how often a difference is found with as many tasks as are said to show it
8 times out of 10. Fourth: means of rewards and other numbers, alone and as differences. Fifth: recipes of two to ten
seeds a side, by what their seeds spread by, over tasks and samples; `found` is how often a difference is found with as
many seeds as are said to show it. A simulation of N runs is off by 2 * sqrt(0.05 * 0.95 / N): 1.4 points with 1000.
"""

import argparse
import math
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from agentrl.eval import paired
from agentrl.eval.replicates import replicated, seeds_needed
from agentrl.eval.statistics import accuracy_interval, mean_interval

TASKS = (128, 500)
SAMPLES = (1, 2, 4, 16)
ACCURACIES = (0.02, 0.1, 0.5, 0.9, 0.98)
KINDS = ("equal", "beta 0.1", "beta 0.6", "two modes")
SHIFTS = (0.0, 0.02, 0.1)
Chances = npt.NDArray[np.float64]


def chances(rng: np.random.Generator, kind: str, accuracy: float, shape: tuple[int, int]) -> Chances:
    """Each task's chance of being solved. beta R: R is the correlation of two samples of a task."""
    if kind == "equal":
        return np.full(shape, accuracy)
    if kind == "two modes":  # 5 % and 95 %, or 0 and 50 %, or 50 % and 100 %
        low, high = (0.0, 0.5) if accuracy < 0.05 else (0.5, 1.0) if accuracy > 0.95 else (0.05, 0.95)
        return np.where(rng.random(shape) < (accuracy - low) / (high - low), high, low)
    spread = 1 / float(kind.split()[1]) - 1
    return rng.beta(accuracy * spread, (1 - accuracy) * spread, shape)


def coverage(rng: np.random.Generator, runs: int) -> Table:
    """The first table."""
    table = Table("tasks", "samples", "covers at least", "where", "on average", title="accuracy, 95 % interval")
    for tasks in TASKS:
        for samples in SAMPLES:
            found = {}
            for accuracy in ACCURACIES:
                for kind in KINDS if samples > 1 else ("equal",):
                    drawn = rng.binomial(samples, chances(rng, kind, accuracy, (runs, tasks)))
                    bounds = [accuracy_interval(row, [samples] * tasks)[1:] for row in drawn.tolist()]
                    found[f"{accuracy:.0%}, {kind}"] = sum(low <= accuracy <= high for low, high in bounds) / runs
            where = min(found, key=found.__getitem__)
            mean = sum(found.values()) / len(found)
            table.add_row(str(tasks), str(samples), f"{found[where]:.1%}", where, f"{mean:.1%}")
    return table


def differences(
    rng: np.random.Generator, kind: str, samples: int, shift: float, shape: tuple[int, int]
) -> npt.NDArray[np.float64]:
    """The differences of tasks. kind: `N % differ`, of one sample a side; `alike`: B is A where it does not
    solve a task for sure; `two modes`: likewise, but a seventh of the tasks changes its mode; `rare`: 5 % of the tasks
    are solved at all, by either."""
    if kind.endswith("differ"):
        share = float(kind.split()[0]) / 100
        up, down = (share + shift) / 2, (share - shift) / 2
        return rng.choice([1.0, -1.0, 0.0], shape, p=[up, down, 1 - share])
    if kind == "rare":
        a = np.where(rng.random(shape) < 0.05, 0.5, 0.0)
        b, mean = a, 0.025
    else:
        a = rng.beta(0.5, 0.5, shape) if kind == "alike" else rng.choice([0.05, 0.95], shape)
        b, mean = (a if kind == "alike" else np.where(rng.random(shape) < 1 / 7, 1 - a, a)), 0.5
    b = np.where(rng.random(shape) < shift / (1 - mean), 1.0, b)
    return (rng.binomial(samples, b) - rng.binomial(samples, a)) / samples


def kinds(samples: int) -> Iterator[str]:
    """Yield the kinds of differences of so many samples a task."""
    yield from ("2 % differ", "10 % differ", "30 % differ") if samples == 1 else ("alike", "two modes", "rare")


def comparison(rng: np.random.Generator, runs: int) -> tuple[Table, Table]:
    """The second and the third table."""
    columns = ("tasks", "samples", "kind", "points", "covers", "found", "width")
    table = Table(*columns, title="difference: 95 % interval, p < 0.05 (points 0: false alarms)")
    power = Table("samples", "kind", "points", "tasks that are said", "found", title="8 times out of 10")
    for samples in SAMPLES:
        for kind in kinds(samples):
            for shift in SHIFTS:
                if kind.endswith("differ") and float(kind.split()[0]) / 100 < shift:
                    continue
                for tasks in TASKS:
                    rows = differences(rng, kind, samples, shift, (runs, tasks))
                    found = [paired.difference(row, samples) for row in rows]
                    covers = sum(one.low <= shift <= one.high for one in found) / runs
                    shown = sum(one.p < 0.05 for one in found) / runs
                    width = 100 * sum(one.high - one.low for one in found) / runs
                    figures = (f"{covers:.1%}", f"{shown:.1%}", f"{width:.1f}")
                    table.add_row(str(tasks), str(samples), kind, f"{100 * shift:g}", *figures)
                if shift == 0.02:
                    pilot = differences(rng, kind, samples, shift, (20, 500))
                    needed = int(np.median([paired.tasks_needed(row, shift, 1 / samples) for row in pilot]))
                    rows = differences(rng, kind, samples, shift, (runs // 2, needed))
                    shown = sum(paired.permutation_p(row, samples)[0] < 0.05 for row in rows) / len(rows)
                    power.add_row(str(samples), kind, "2", f"{needed:,}", f"{shown:.1%}")
    return table, power


NUMBERS = ("five levels", "rare", "real", "log-normal")


def numbers(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> tuple[Chances, float]:
    """Samples [tasks, samples] of a number, and their expectation. rare: 8 % of the tasks have any of it."""
    tasks = shape[0]
    if kind == "five levels":
        return rng.binomial(4, np.repeat(rng.beta(0.6, 0.6, (tasks, 1)), shape[1], 1)) / 4, 0.5
    if kind == "rare":
        return np.where(rng.random((tasks, 1)) < 0.08, rng.random(shape), 0.0), 0.04
    if kind == "real":
        return rng.normal(0.4, 0.2, (tasks, 1)) + rng.normal(0, 0.2, shape), 0.4
    return np.exp(rng.normal(0, 0.5, (tasks, 1)) + rng.normal(0, 0.5, shape)), math.exp(0.25)


def means(rng: np.random.Generator, runs: int) -> Table:
    """The fourth table."""
    table = Table("number", "tasks", "samples", "mean covers", "difference covers", title="95 % intervals of numbers")
    for kind in NUMBERS:
        for tasks in TASKS:
            for samples in (1, 4):
                alone = both = 0
                for _ in range(runs):
                    values, truth = numbers(rng, kind, (tasks, 2 * samples))  # of one task, for both sides
                    a, b = values[:, :samples], values[:, samples:]
                    _, low, high = mean_interval(a.tolist())
                    alone += low <= truth <= high
                    low, high = paired.bootstrap_interval(b.mean(1) - a.mean(1), None)
                    both += low <= 0 <= high
                table.add_row(kind, str(tasks), str(samples), f"{alone / runs:.1%}", f"{both / runs:.1%}")
    return table


SEEDS = (2, 3, 5, 10)
SPREADS = (0.0, 0.015, 0.04)
"""Standard deviations of the accuracy over seeds."""
DESIGNS = ((32, 4), (128, 1), (128, 4), (500, 1))
"""Tasks and samples."""


def recipes(
    rng: np.random.Generator, spread: float, unlike: float, shift: float, shape: tuple[int, int, int, int]
) -> tuple[Chances, Chances, float]:
    """Means [seeds, tasks] of two recipes, and the true difference. A sample is solved where a normal sum is above 0:
    of the task, of what a recipe does on it (standard deviation `unlike`), of the seed, of the seed on the task, of
    chance. shift: what B has more of that sum. spread: as of SPREADS. shape: seeds of A, of B, tasks, samples."""
    tasks, samples = shape[2:]
    rest = math.sqrt(1 + 1 + unlike**2 + 0.3**2)
    slope = NormalDist().pdf(0) / rest  # of the accuracy, by the sum, at one half
    of_seed = spread / slope
    task = rng.normal(0, 1, tasks)

    def side(seeds: int, mean: float) -> Chances:
        own = task + rng.normal(0, unlike, tasks) + mean
        total = own + rng.normal(0, of_seed, (seeds, 1)) + rng.normal(0, 0.3, (seeds, tasks))
        return (total[None] + rng.standard_normal((samples, seeds, tasks)) > 0).mean(0)

    truth = NormalDist().cdf(shift / math.hypot(rest, of_seed)) - 0.5
    return side(shape[0], 0.0), side(shape[1], shift), truth


def of_recipes(rng: np.random.Generator, runs: int) -> tuple[Table, Table]:
    """The fifth table, and one of as many seeds as are said to be needed."""
    columns = ("seeds a side", "seeds spread", "false alarms: mean", "most", "covers: mean", "least", "where", "width")
    table = Table(*columns, title="recipes: p < 0.05 where there is no difference, 95 % interval of 8 points")
    for seeds in SEEDS:
        for spread in SPREADS:
            alarms, covers, widths = {}, {}, []
            for tasks, samples in DESIGNS:
                for unlike in (0.1, 0.6):
                    where = f"{tasks} tasks, {samples} samples, recipes differ by {unlike:g}"
                    for shift, found in ((0.0, alarms), (0.3, covers)):
                        drawn = [
                            recipes(rng, spread, unlike, shift, (seeds, seeds, tasks, samples)) for _ in range(runs)
                        ]
                        results = [(replicated(a, b)[0], truth) for a, b, truth in drawn]
                        held = sum(one.low <= truth <= one.high for one, truth in results) / runs
                        found[where] = held if shift else sum(one.p < 0.05 for one, _ in results) / runs
                        widths += [100 * (one.high - one.low) for one, _ in results]
            least = min(covers, key=covers.__getitem__)
            figures = (np.mean([*alarms.values()]), max(alarms.values()), np.mean([*covers.values()]), covers[least])
            shown = [f"{figure:.1%}" for figure in figures]
            table.add_row(str(seeds), f"{100 * spread:g}", *shown, least, f"{np.mean(widths):.1f}")
    power = Table(
        "seeds spread", "tasks", "samples", "points", "seeds that are said", "found", title="8 times out of 10"
    )
    for spread in SPREADS[1:]:
        for shift in (0.25, 0.5):
            for tasks, samples in DESIGNS[1:]:
                pilot = [recipes(rng, spread, 0.1, shift, (10, 10, tasks, samples)) for _ in range(20)]
                truth = pilot[0][2]
                varies = [replicated(a, b)[1] for a, b, _ in pilot]
                said = [seeds_needed(truth, one.seeds, one.tasks) for one in varies]
                needed = int(np.median([seeds or 1000 for seeds in said]))
                hits = 0
                for _ in range(runs // 2):
                    a, b, _ = recipes(rng, spread, 0.1, shift, (needed, needed, tasks, samples))
                    hits += replicated(a, b)[0].p < 0.05
                figures = (f"{100 * spread:g}", str(tasks), str(samples), f"{100 * truth:.1f}", str(needed))
                power.add_row(*figures, f"{hits / (runs // 2):.1%}")
    return table, power


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="simulations of each row")
    parser.add_argument("--only", choices=["accuracy", "difference", "numbers", "recipes"], help="these tables alone")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap, to be quick")
    arguments = parser.parse_args()
    paired.RESAMPLES = arguments.resamples
    rng = np.random.default_rng(1)
    console = Console()
    if arguments.only in (None, "accuracy"):
        console.print(coverage(rng, arguments.runs))
    tables = {"difference": comparison, "numbers": lambda *of: [means(*of)], "recipes": of_recipes}
    for name, made in tables.items():
        if arguments.only in (None, name):
            for table in made(rng, arguments.runs):
                console.print(table)


if __name__ == "__main__":
    main()
