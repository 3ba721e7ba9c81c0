"""`Scorer`: the recipe's reward functions on finished requests. One that raises makes a sample FAILED, never a 0."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from agentrl.plugins.reward import GroupReward, Sample
from agentrl.plugins.rewards import NO_REWARDS, Rewards
from agentrl.rollout.failures import describe
from agentrl.rollout.hooks import PluginError, finite
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.trajectory import Boundary, Failure, FinishReason, Group, Trajectory
from agentrl.rollout.watch import Watch


class Scorer:
    """seconds: what one function may take for one sample or one group."""

    def __init__(self, rewards: Rewards = NO_REWARDS, seconds: float = 300.0) -> None:
        self._rewards = rewards
        self._seconds = seconds

    @property
    def weights(self) -> "dict[str, float]":
        return dict(self._rewards.weights)

    @property
    def functions(self) -> int:
        """How many may be called for one sample."""
        return len(self._rewards.samples)

    async def score(
        self, request: AsyncRolloutRequest, rewards: dict[str, float], finish: FinishReason, watch: Watch
    ) -> dict[str, float]:
        """`rewards` of the plugins, and every sample function's part. Raises what a function raises."""
        if not self._rewards.samples:
            return rewards
        task, messages, tokens = request.task, tuple(request.messages), len(request.logprobs)
        sample = Sample(task, messages, dict(rewards), str(finish), request.turn_count, tokens, request.ids)
        for part, reward in self._rewards.samples.items():
            request.at = Boundary.REWARD, part
            value = await watch.wait(reward.score(sample), time.monotonic() + self._seconds)
            rewards[part] = rewards.get(part, 0.0) + finite(value, part)
        return rewards

    async def score_group(self, group: Group) -> Group:
        """The group with every group function's part. Where one raises, all of its samples are FAILED."""
        for part, reward in self._rewards.groups.items():
            if not group.trajectories:
                break
            try:
                values = await self._values(reward, part, group.trajectories)
            except Exception as error:  # noqa: BLE001 - boundary: a reward that raises takes its own group out
                return _failed(group, f"{part}: {describe(error)}")
            scored = (_with_part(t, part, v) for t, v in zip(group.trajectories, values, strict=True))
            group = replace(group, trajectories=tuple(scored))
        return group

    async def _values(self, reward: GroupReward, part: str, trajectories: Sequence[Trajectory]) -> list[float]:
        async with asyncio.timeout(self._seconds):
            values = list(await reward.score([_sample(t) for t in trajectories]))
        if len(values) != len(trajectories):
            raise PluginError(f"it scored {len(values)} of {len(trajectories)} samples")
        return [finite(value, part) for value in values]


def _sample(t: Trajectory) -> Sample:
    return Sample(t.task, t.messages, dict(t.rewards), str(t.finish), len(t.turns), t.sampled_tokens, t.ids)


def _with_part(t: Trajectory, part: str, value: float) -> Trajectory:
    return replace(t, rewards={**t.rewards, part: t.rewards.get(part, 0.0) + value})


def _failed(group: Group, line: str) -> Group:
    failure = Failure(Boundary.REWARD, line)
    failed = (replace(t, finish=FinishReason.ERROR, failure=failure, rewards={}) for t in group.trajectories)
    return replace(group, trajectories=(), failed=(*group.failed, *failed))
