"""Whether the intervals and tests of `agentrl eval` and `agentrl compare` are right: simulations whose truth is known.

    python benchmarks/intervals.py --runs 1000

First table: how often the 95 % interval of an accuracy holds the truth, at the accuracy and the kind of tasks where it
does so least often. Second: the interval of a difference, the false alarms of its test where there is none, and how
often it is found where there is one. Third: how often a difference is found with as many tasks as are said to show it
8 times out of 10. A simulation of N runs is off by 2 * sqrt(0.05 * 0.95 / N): 1.4 points with 1000.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from agentrl.eval import paired
from agentrl.eval.statistics import accuracy_interval

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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="simulations of each row")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap, to be quick")
    arguments = parser.parse_args()
    paired.RESAMPLES = arguments.resamples
    rng = np.random.default_rng(1)
    console = Console()
    console.print(coverage(rng, arguments.runs))
    for table in comparison(rng, arguments.runs):
        console.print(table)


if __name__ == "__main__":
    main()
