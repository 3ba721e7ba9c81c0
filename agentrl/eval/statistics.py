"""Accuracy with a confidence interval, and pass@k: pure functions of counts."""

import math
from collections.abc import Sequence

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
