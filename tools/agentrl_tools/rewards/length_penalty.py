"""`length_penalty`: answers that come near the limit of tokens lose a little, those at it lose a whole point."""

from agentrl.plugins.reward import Reward, Sample


class LengthPenalty(Reward):
    """0 for short answers, falling to -1 towards a limit of tokens.

    DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13): 0 up to `limit - buffer` sampled
    tokens, then falling linearly to -1 at `limit`, and -1 beyond. Give it a weight to make it weaker.

    limit: in sampled tokens of the whole conversation; below `rollout.max_tokens`, or nothing ever reaches it.
    """

    name = "length_penalty"

    def __init__(self, limit: int, buffer: int) -> None:
        if not 0 < buffer <= limit:
            raise ValueError(f"buffer must be above 0 and at most limit, got buffer {buffer} and limit {limit}")
        self._limit, self._buffer = limit, buffer

    async def score(self, sample: Sample) -> float:
        over = sample.tokens - (self._limit - self._buffer)
        return -min(1.0, max(0.0, over / self._buffer))
