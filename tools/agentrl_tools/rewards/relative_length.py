"""`relative_length`: of the answers to one task, the shorter right ones gain and the longer ones lose."""

from collections.abc import Sequence

from agentrl.plugins.reward import GroupReward, Sample


class RelativeLength(GroupReward):
    """From 0.5 for the shortest right answer of a group to -0.5 for the longest.

    Kimi k1.5's length reward (Kimi Team 2025, arXiv:2501.12599, section 2.3.3): with the shortest and longest answer
    of the group, lambda = 0.5 - (tokens - shortest) / (longest - shortest); a right answer gets lambda, a wrong one
    min(0, lambda): shortness alone never pays. All are 0 where all are equally long.

    right: from which sum of the parts so far an answer counts as right. part: look at this one instead of the sum.
    """

    name = "relative_length"

    def __init__(self, right: float = 1.0, part: str | None = None) -> None:
        self._right, self._part = right, part

    async def score(self, samples: Sequence[Sample]) -> Sequence[float]:
        lengths = [sample.tokens for sample in samples]
        shortest, spread = min(lengths), max(lengths) - min(lengths)
        if not spread:
            return [0.0] * len(lengths)
        relative = [0.5 - (length - shortest) / spread for length in lengths]
        return [
            value if self._is_right(sample) else min(0.0, value)
            for sample, value in zip(samples, relative, strict=True)
        ]

    def _is_right(self, sample: Sample) -> bool:
        if self._part is None:
            return sum(sample.rewards.values()) >= self._right - 1e-6
        if self._part not in sample.rewards:
            raise ValueError(f"there is no reward part {self._part!r}; there are {', '.join(sample.rewards) or 'none'}")
        return sample.rewards[self._part] >= self._right - 1e-6
