"""Accuracy with its uncertainty, and pass@k. Pure functions on counts."""

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # two-sided 95 % quantile of the standard normal


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """The 95 % score interval of a proportion (Wilson 1927), which stays within 0..1 and holds at 0 and at 1.

    `trials` may be an effective number. No trials: (0, 1).
    """
    if trials <= 0:
        return 0.0, 1.0
    p, z2 = successes / trials, Z95 * Z95
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def accuracy_interval(correct: Sequence[int], samples: Sequence[int]) -> tuple[float, float, float]:
    """(accuracy, low, high) over tasks, of which task i was solved correct[i] out of samples[i] times.

    Samples of a task are not independent, so the number of trials is divided by the design effect, estimated from the
    spread of the tasks' own accuracies (Kish 1965); never below the number of tasks nor above that of samples.
    """
    pairs = [(c, s) for c, s in zip(correct, samples, strict=True) if s > 0]
    if not pairs:
        return 0.0, 0.0, 1.0
    total = sum(s for _, s in pairs)
    p = sum(c for c, _ in pairs) / total
    n = len(pairs)
    trials = float(total)
    if n > 1 and total > n and 0 < p < 1:
        spread = sum((c - p * s) ** 2 for c, s in pairs) * n / (n - 1) / total**2
        trials = min(max(p * (1 - p) / spread, n), total) if spread > 0 else total
    low, high = wilson(p * trials, trials)
    return p, low, high


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """The chance that at least one of k samples is right, without bias from `samples` draws.

    1 - C(samples - correct, k) / C(samples, k) (Chen et al. 2021, arXiv:2107.03374, equation 1). Needs k <= samples.
    """
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
