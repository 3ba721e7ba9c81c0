"""Two evaluations of the same tasks: test, interval and power, as pure functions of the tasks' differences.

A difference is of one task: the share of its samples that B solves, or their mean of another measure, less A's. Tasks
are independent, samples of a task are not, so that everything is by task.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentrl.eval.statistics import Z95

Z80 = 0.8416212335729143  # 80 % quantile of the standard normal
SEED = 20_000_003
RESAMPLES = 10_000
"""Resamples of the bootstrap, and random flips of the test where it is not exact times ten."""
_FLIPS = 100_000
_WORK = 400_000_000  # additions of the exact test, beyond which flips are drawn
_DENOMINATOR = 100_000  # of differences as whole numbers, beyond which they count as real ones

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """How much more B has than A: of the tasks solved, or of another measure."""

    value: float
    """Mean over tasks; -1..1 of the tasks solved."""
    low: float
    """Lower bound of the 95 % interval; it holds 0 exactly where `p` is 0.05 or more."""
    high: float
    """Upper bound of the 95 % interval."""
    p: float
    """Probability of a difference this large where A and B are alike, two-sided."""
    test: str
    """How `p` was found: `exact McNemar`, `exact permutation`, `permutation`, or `t` where seeds are compared."""


def difference(
    values: Sequence[float] | Values,
    denominator: int | None = None,
    mcnemar: bool = False,
    scale: float | None = 1.0,
) -> Difference:
    """The mean of the differences of all tasks, one or more, with its interval and test.

    denominator: a number whose product with each is whole, if there is one. mcnemar: each is of one sample a side.
    scale: as of `bootstrap_interval`.
    """
    d = np.asarray(values, np.float64)
    p, exact = permutation_p(d, denominator)
    low, high = bootstrap_interval(d, scale)
    mean = float(d.mean())
    if p >= 0.05:
        low, high = min(low, 0.0), max(high, 0.0)
    elif mean > 0:
        low = max(low, 0.0)
    else:
        high = min(high, 0.0)
    kind = "permutation" if not exact else "exact McNemar" if mcnemar else "exact permutation"
    return Difference(mean, low, high, p, kind)


def permutation_p(d: Values, denominator: int | None = None) -> tuple[float, bool]:
    """The two-sided p of a mean this far from 0, where A and B of every task are exchanged at random, and
    whether it is exact: with one sample a side it is McNemar's exact test (1947).

    denominator: as of `difference`; None, and for very many tasks: 100,000 exchanges are drawn.
    """
    if denominator is not None and denominator <= _DENOMINATOR:
        whole = np.rint(np.abs(d) * denominator).astype(np.int64)
        signed = int(np.rint(d * denominator).sum())
        whole = whole[whole > 0]
        shrink = int(np.gcd.reduce(whole)) if len(whole) else 1
        whole, signed = whole // shrink, signed // shrink
        if len(whole) * int(whole.sum()) <= _WORK:
            return _exact(whole, abs(signed)), True
    return _drawn(d), False


def _exact(sizes: npt.NDArray[np.int64], seen: int) -> float:
    """How likely the sizes, each with a random sign, sum to `seen` or more, or to its negative or less."""
    if seen == 0:
        return 1.0
    total = int(sizes.sum())
    chance = np.zeros(total + 1)  # of the sum of those with a plus
    chance[0] = 1.0
    end = 0
    for size in sorted(sizes.tolist()):
        chance[size : end + size + 1] += chance[: end + 1].copy()
        chance[: end + size + 1] *= 0.5
        end += size
    return min(1.0, 2.0 * float(chance[-(-(total + seen) // 2) :].sum()))


def _drawn(d: Values) -> float:
    rng = np.random.default_rng(SEED)
    sizes, counts = np.unique(np.abs(d).round(12), return_counts=True)
    sums = np.zeros(_FLIPS)
    for size, count in zip(sizes, counts, strict=True):
        if size:
            sums += size * (2.0 * rng.binomial(count, 0.5, _FLIPS) - count)
    hits = int((np.abs(sums) >= abs(float(d.sum())) - 1e-9).sum())
    return (hits + 1) / (_FLIPS + 1)


def bootstrap_interval(d: Values, scale: float | None = 1.0) -> tuple[float, float]:
    """The 95 % interval of the mean of `d`, by drawing whole tasks again (percentile bootstrap, seeded).

    Two more tasks are drawn from, which differ in either direction, by the mean of 1 and of the most that any does, or
    by 1 where none does: what few tasks have not shown yet may happen. With one sample a side their effect on the
    variance is that of Bonett and Price (2012), whose interval covers also where hardly any task differs.

    scale: the most that a task can differ by, in place of 1; None: it has no bound, and is the most that any does.
    """
    rng = np.random.default_rng(SEED)
    most = float(np.abs(d).max())
    scale = most if scale is None else scale
    most = (scale + most) / 2 if most else scale
    sizes, counts = np.unique(np.concatenate([d, [-most, most]]).round(12), return_counts=True)
    tasks = int(counts.sum())
    share = counts / tasks
    at_once = max(1, 2_000_000 // len(sizes))
    means: list[Values] = []
    for start in range(0, RESAMPLES, at_once):
        drawn = rng.multinomial(tasks, share, min(at_once, RESAMPLES - start))
        means.append(drawn @ sizes / tasks)
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def tasks_needed(d: Values, wanted: float, unit: float = 1.0) -> int:
    """How many tasks show a difference of `wanted` (above 0) 8 times out of 10, where tasks differ as much from
    each other as in `d`. unit: the smallest step of a task's difference, 1 with one sample a side, 0 of a real number.

    Connor (1987) with the variance of `d`, to which two tasks that differ by `unit` are added, and with the correction
    for continuity of an exact test.
    """
    square = (float(d @ d) + 2.0 * unit**2) / (len(d) + 2.0)
    around = square - float(d.mean()) ** 2  # what tasks differ by, other than the mean
    square = max(around + wanted**2, wanted * unit)
    half = Z95 * math.sqrt(square) + Z80 * math.sqrt(max(0.0, square - wanted**2))
    plain = (half / wanted) ** 2
    if not unit:
        return max(1, math.ceil(plain))
    return math.ceil(plain / 4 * (1 + math.sqrt(1 + 4 * unit / (plain * wanted))) ** 2)


def difference_shown(d: Values, unit: float = 1.0, most: float = 1.0) -> float:
    """The least difference that as many tasks as in `d` show 8 times out of 10; `most` where none below it does."""
    low, high = 0.0, most
    if tasks_needed(d, high, unit) > len(d):
        return most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if tasks_needed(d, middle, unit) <= len(d) else (middle, high)
    return high


def holm(ps: Sequence[float]) -> list[float]:
    """P values of several comparisons so that any false alarm among them is as rare as said (Holm 1979)."""
    found = [0.0] * len(ps)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        least = max(least, min(1.0, ps[index] * (len(ps) - rank)))
        found[index] = least
    return found
