"""`math_verify`: 1.0 where the final answer equals the truth as mathematics, by the package of that name."""

import asyncio
import os

from agentrl.plugins.reward import Reward, Sample
from agentrl.threads import in_thread
from agentrl_tools.rewards.math_pool import MathPool
from agentrl_tools.rewards.truth import marked, truth_of


class MathVerify(Reward):
    """1.0 where the answer equals the truth as mathematics, else 0.0.

    Free-form maths (fractions, roots, sets, intervals, equations): `1/2`, `0.5` and `\\frac{1}{2}` are equal.

    truth: the field of the task's data that holds it. seconds: of CPU for one answer; one that needs more is not right.
    workers: processes (0: one a core, at most 4). memory_mb: of each. A truth that cannot be read raises.
    """

    name = "math_verify"

    def __init__(self, truth: str | None = None, seconds: float = 5.0, workers: int = 0, memory_mb: int = 2048) -> None:
        if seconds <= 0 or workers < 0 or memory_mb < 256:
            raise ValueError("seconds must be above 0, workers 0 or more, memory_mb 256 or more")
        self._truth = truth
        self._pool = MathPool(workers or min(4, os.cpu_count() or 1), seconds, memory_mb)

    async def score(self, sample: Sample) -> float:
        gold = str(truth_of(sample.task, self._truth))
        written = gold if marked(gold) is not None or "$" in gold else f"${gold}$"
        loop = asyncio.get_running_loop()
        right = await loop.run_in_executor(self._pool.threads, self._pool.compare, written, sample.answer)
        return 1.0 if right else 0.0

    async def close(self) -> None:
        await in_thread(self._pool.close)
