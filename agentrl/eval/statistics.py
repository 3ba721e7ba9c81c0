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

    Samples of a task belong together, so the score interval takes the trials divided by the design effect (Kish 1965):
    as many as tasks where a task's samples all end alike, as at 0 and at 1, and as many as samples where they are
    independent.
    """
    pairs = [(c, s) for c, s in zip(correct, samples, strict=True) if s > 0]
    if not pairs:
        return 0.0, 0.0, 1.0
    total = sum(s for _, s in pairs)
    p = sum(c for c, _ in pairs) / total
    mean_size = sum(s * s for _, s in pairs) / total  # of the task that a sample belongs to
    trials = total / (1 + (mean_size - 1) * _agreement(pairs))
    low, high = wilson(p * trials, trials)
    return p, low, high


def _agreement(pairs: Sequence[tuple[int, int]]) -> float:
    """The correlation of two samples of one task, 0..1, from (correct, samples) of each task.

    How often does another sample of a task end as one of the rarer outcome did? One more such sample, with which all
    others agree, is counted in, so that nothing seen is full agreement and certainty comes with what is seen.
    """
    total, correct = sum(s for _, s in pairs), sum(c for c, _ in pairs)
    rare = pairs if 2 * correct <= total else [(s - c, s) for c, s in pairs]
    others = sum(s * s for _, s in pairs) / total - 1
    if others <= 0:
        return 0.0
    alike = (sum(r * (r - 1) for r, _ in rare) + others) / (sum(r * (s - 1) for r, s in rare) + others)
    share = min(correct, total - correct) / total
    return min(1.0, max(0.0, (alike - share) / (1 - share)))


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """The chance that at least one of k samples is right, without bias from `samples` draws.

    1 - C(samples - correct, k) / C(samples, k) (Chen et al. 2021, arXiv:2107.03374, equation 1). Needs k <= samples.
    """
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
