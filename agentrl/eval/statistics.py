"""Means with their confidence intervals, pass@k, and Student's t: pure functions of numbers."""

import math
from collections.abc import Sequence
from functools import lru_cache

Z95 = 1.959963984540054  # two-sided 95 % quantile of the standard normal

PSEUDO = 3
"""So many that intervals cover at least 93 % where hardly any task differs, too: `benchmarks/intervals.py`."""


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """The 95 % score interval (low, high) of a proportion (Wilson 1927): within 0..1, and valid at 0 and 1.

    trials: may be an effective, fractional number; 0 gives (0, 1).
    """
    if trials <= 0:
        return 0.0, 1.0
    p, z2 = successes / trials, Z95 * Z95
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def accuracy_interval(correct: Sequence[int], samples: Sequence[int]) -> tuple[float, float, float]:
    """(accuracy, low, high) over tasks, where task i was solved in correct[i] of samples[i] samples.

    Samples of a task are correlated, so the Wilson interval uses the number of samples divided by the design effect
    (Kish 1965): the number of tasks if all samples of a task have the same outcome, as at accuracy 0 or 1, and the
    number of samples if they are independent.
    """
    pairs = [(c, s) for c, s in zip(correct, samples, strict=True) if s > 0]
    if not pairs:
        return 0.0, 0.0, 1.0
    total = sum(s for _, s in pairs)
    p = sum(c for c, _ in pairs) / total
    mean_size = sum(s * s for _, s in pairs) / total  # samples per task, averaged over samples
    trials = total / (1 + (mean_size - 1) * _correlation(pairs))
    low, high = wilson(p * trials, trials)
    return p, low, high


def _correlation(pairs: Sequence[tuple[int, int]]) -> float:
    """The intra-task correlation of two samples, 0..1, from (correct, samples) of each task.

    It follows from how often a second sample of a task has the same outcome, given that the first has the rarer one.
    PSEUDO samples of the rarer outcome are added, with which all other samples of their tasks agree: without data the
    correlation is 1, and with more data they matter less.
    """
    total, correct = sum(s for _, s in pairs), sum(c for c, _ in pairs)
    rare = pairs if 2 * correct <= total else [(s - c, s) for c, s in pairs]
    others = sum(s * s for _, s in pairs) / total - 1
    if others <= 0:
        return 0.0
    agreed = PSEUDO * others
    alike = (sum(r * (r - 1) for r, _ in rare) + agreed) / (sum(r * (s - 1) for r, s in rare) + agreed)
    share = min(correct, total - correct) / total
    return min(1.0, max(0.0, (alike - share) / (1 - share)))


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples is correct.

    1 - C(samples - correct, k) / C(samples, k) (Chen et al. 2021, arXiv:2107.03374, equation 1). Raises ValueError if
    k > samples.
    """
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_all_k(correct: int, samples: int, k: int) -> float:
    """The unbiased estimate of the probability that all of k samples are correct (pass^k).

    C(correct, k) / C(samples, k) (Yao et al. 2024, arXiv:2406.12045). Raises ValueError if k > samples.
    """
    if k > samples:
        raise ValueError(f"pass^{k} needs at least {k} samples, there are {samples}")
    return math.comb(correct, k) / math.comb(samples, k)


def mean_interval(values: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """(mean, low, high): the mean over samples, values[i] of task i, with its 95 % interval.

    Where all are 0 or 1 it is `accuracy_interval`. Else tasks are drawn, with all of their samples (the variance of a
    ratio, Cochran 1977, and Student's t); two more tasks are counted, as far above and below the mean as half of the
    range of what was seen, since few tasks have not shown all.
    """
    tasks = [task for task in values if task]
    every = [value for task in tasks for value in task]
    if all(value in (0, 1) for value in every):
        return accuracy_interval([round(sum(task)) for task in tasks], [len(task) for task in tasks])
    mean, size = sum(every) / len(every), len(every) / len(tasks)
    unseen = (max(every) - min(every) or max(1.0, abs(mean))) / 2
    square = sum((sum(task) - mean * len(task)) ** 2 for task in tasks) + 2 * (unseen * size) ** 2
    count = len(tasks) + 2
    half = t_quantile(count - 1) * math.sqrt(square * count / (count - 1)) / (size * count)
    return mean, mean - half, mean + half


def t_p(t: float, freedom: float) -> float:
    """The two-sided p of Student's t, of any positive degrees of freedom (a regularized incomplete beta function)."""
    x, rest = freedom / (freedom + t * t), t * t / (freedom + t * t)
    if not rest or not x:
        return 1.0 if not rest else 0.0
    a, b = freedom / 2, 0.5
    log = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log) * _beta_fraction(a, b, x) / a
    return 1 - math.exp(log) * _beta_fraction(b, a, rest) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function (Abramowitz and Stegun 26.5.8), by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    found = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d = 1 / ((1 + step * d) or tiny)
            c = (1 + step / c) or tiny
            found *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    return found


@lru_cache(100_000)
def t_quantile(freedom: float, p: float = 0.05) -> float:
    """Student's t whose two-sided p is `p`, by Newton's method in logarithms: there p falls ever steeper, so that it
    converges from above."""
    log = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    t = 2.0
    for _ in range(100):
        found = t_p(t, freedom)
        density = math.exp(log - (freedom + 1) / 2 * math.log1p(t * t / freedom))
        step = math.log(found / p) * found / (2 * t * density)
        t *= math.exp(step)
        if abs(step) < 1e-11:
            break
    return t
