"""Two recipes, each trained from several seeds: interval, test and seeds needed, as pure functions of task means.

The means of a side are an array [seeds, tasks]. A recipe's score is its mean over all seeds and tasks that there might
be. What was seen of it varies with the seeds that were drawn, with the tasks, which both sides play, and with what a
seed does on a task, samples included: a crossed design, whose variance is that by seeds and that by tasks, less what
both contain. `benchmarks/intervals.py` holds it to simulated recipes.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentrl.eval.paired import Difference
from agentrl.eval.statistics import t_p, t_quantile

MOST_SEEDS = 1000
_LEAST = 0.5
"""The variance is at least this share of that by seeds and of that by tasks: it is a difference of estimates."""

Means = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Variances:
    """What the difference of two sides varies with."""

    seeds: float
    """The variance of a difference of the means of one seed a side, over all tasks: seeds, and their samples."""
    spread: float
    """The standard deviation of the seeds of a side, without what their samples add; the mean of both sides."""
    tasks: float
    """The variance of the difference that more seeds do not lower: that of the tasks."""


def replicated(a: Means, b: Means) -> tuple[Difference, Variances]:
    """B less A with interval and test (Student's t with Satterthwaite's degrees of freedom), and what it varies with.

    Satterthwaite's formula takes the spreads that were seen for true. That of two seeds is not: where a side has two,
    the seeds of both count for one degree of freedom.

    a, b: [seeds, tasks], the same tasks; at least two seeds on one of the sides. A side of one seed is taken to vary
    as the other does.
    """
    by_task = b.mean(0) - a.mean(0)
    value, tasks = float(by_task.mean()), by_task.size
    counts = len(a), len(b)
    of_seed, within = zip(*(_parts(side) for side in (a, b)), strict=True)
    if 1 in counts:
        of_seed, within = (max(of_seed),) * 2, (max(within),) * 2
    free = [max(1, count - 1) for count in counts] if 1 not in counts else [max(counts) - 1] * 2
    own = [seed / count for seed, count in zip(of_seed, counts, strict=True)]
    seeds = sum(own)
    if 1 in counts or min(free) == 1:  # one estimate of both; or a side of two seeds, whose spread is hardly known
        freedom = float(min(free))
    else:
        freedom = seeds**2 / sum(v**2 / f for v, f in zip(own, free, strict=True)) if seeds else float(sum(free))
    both = sum(noise / (count * tasks) for noise, count in zip(within, counts, strict=True))
    unseen = float(np.abs(by_task).max()) / 2 or 0.5  # of two more tasks, as in `bootstrap_interval`
    by_tasks = (float(((by_task - value) ** 2).sum()) + 2 * unseen**2) / ((tasks + 1) * (tasks + 2))
    variance = max(seeds + by_tasks - both, _LEAST * max(seeds, by_tasks))
    parts = seeds**2 / freedom + by_tasks**2 / (tasks + 1) + both**2 / (sum(free) * max(1, tasks - 1))
    half = math.sqrt(variance)
    freedom = max(1.0, variance**2 / parts)
    p = t_p(value / half, freedom)
    width = t_quantile(freedom) * half
    spread = math.sqrt(max(0.0, sum(of_seed) / 2 - sum(within) / 2 / tasks))
    found = Difference(value, value - width, value + width, p, f"t, {freedom:.3g} degrees of freedom")
    return found, Variances(sum(of_seed), spread, max(0.0, by_tasks - both))


def _parts(means: Means) -> tuple[float, float]:
    """The variance of a side's seeds, over all tasks, and that of a seed on a task; 0 and 0 of one seed."""
    count, tasks = means.shape
    if count == 1:
        return 0.0, 0.0
    of_seed = means.mean(1)
    rest = means - of_seed[:, None] - means.mean(0)[None, :] + means.mean()
    return float(of_seed.var(ddof=1)), float((rest**2).sum()) / ((count - 1) * max(1, tasks - 1))


def seeds_needed(wanted: float, seeds: float, tasks: float) -> int | None:
    """How many seeds a side show a difference of `wanted` (above 0) 8 times out of 10; None where MOST_SEEDS do not.

    seeds, tasks: as of `Variances`.
    """
    for count in range(2, MOST_SEEDS + 1):
        of_seeds = seeds / count
        whole = of_seeds + tasks
        own = 2 * count - 2.5 if count > 2 else 1.0  # fewer than 2 * count - 2 where seeds look unlike
        freedom = own * (whole / of_seeds) ** 2 if of_seeds else math.inf
        if not whole:
            return count
        freedom = round(min(freedom, 1e6), 3)
        if (t_quantile(freedom) + t_quantile(freedom, 0.4)) * math.sqrt(whole) <= wanted:
            return count
    return None
