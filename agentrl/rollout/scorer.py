"""`Scorer`: the recipe's reward functions on finished requests, and on stored ones. One that raises makes a sample
FAILED, never a 0."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from agentrl.containment.deadline import GRACE, CancelledFromWithinError, DeadlineTimer, OwnedTask
from agentrl.errors import contained, describe
from agentrl.images import keyed
from agentrl.plugins.reward import GroupReward, Reward, Sample
from agentrl.plugins.rewards import NO_REWARDS, Rewards
from agentrl.rollout.hooks import PluginError, check_sum, finite
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trajectory import Boundary, Failure, FinishReason, Group, Trajectory


class Scorer:
    """seconds: what one function may take for one sample or one group."""

    def __init__(self, rewards: Rewards = NO_REWARDS, seconds: float = 300.0) -> None:
        self._rewards = rewards
        self._seconds = seconds

    @property
    def weights(self) -> "dict[str, float]":
        """Weights of reward parts by name; 1 for a part without one."""
        return dict(self._rewards.weights)

    @property
    def functions(self) -> int:
        """How many may be called for one sample."""
        return len(self._rewards.samples)

    async def score(
        self, request: AsyncRolloutRequest, rewards: dict[str, float], finish: FinishReason, timer: DeadlineTimer
    ) -> dict[str, float]:
        """`rewards` of the plugins, and every sample function's part. Raises what a function raises."""
        if not self._rewards.samples:
            return rewards
        task, messages, tokens = request.task, tuple(request.main.messages), request.sampled_tokens
        sample = Sample(
            task, messages, dict(rewards), str(finish), request.turn_count, tokens, request.conversation_ids
        )
        for part, reward in self._rewards.samples.items():
            request.main.at = Boundary.REWARD, part
            value = await timer.wait(reward.score(sample), time.monotonic() + self._seconds)
            rewards[part] = rewards.get(part, 0.0) + finite(value, part)
        return rewards

    async def score_group(self, group: Group) -> Group:
        """The group with every group function's part. Where one raises, all of its samples are FAILED."""
        for part, reward in self._rewards.groups.items():
            group = await self._score_part(group, part, reward)
        return group

    async def score_stored(self, group: Group, retries: int = 0) -> Group:
        """A stored group, whose samples have the parts of environment and tools alone, with every function's
        part. A sample whose function raises is tried `retries` times more, then FAILED."""
        alone = [await self._score_sample(t, retries) for t in group.trajectories]
        valid = tuple(t for t in alone if t.valid)
        failed = (*group.failed, *(t for t in alone if not t.valid))
        return await self.score_group(replace(group, trajectories=valid, failed=failed))

    async def _score_sample(self, t: Trajectory, retries: int) -> Trajectory:
        for _ in range(retries + 1):
            group = Group(t.task, (t,))
            for part, reward in self._rewards.samples.items():
                group = await self._score_part(group, part, _OfOne(reward, t))
            if group.trajectories:
                break
        return (*group.trajectories, *group.failed)[0]

    async def _score_part(self, group: Group, part: str, reward: GroupReward) -> Group:
        if not group.trajectories:
            return group
        own = OwnedTask()
        work = self._scored(own, reward, part, group.trajectories)
        task = await own.run(work, self._seconds + 3 * GRACE, 3 * GRACE)
        if not task.done():
            return _failed(group, f"{part}: it ignores its cancellation and was left behind")
        if task.cancelled():
            return _failed(group, f"{part}: {CancelledFromWithinError()}")
        scored = task.result()
        return _failed(group, f"{part}: {scored}") if isinstance(scored, str) else replace(group, trajectories=scored)

    async def _scored(
        self, own: OwnedTask, reward: GroupReward, part: str, trajectories: Sequence[Trajectory]
    ) -> tuple[Trajectory, ...] | str:
        """The trajectories with the part, or a line that says why they cannot have it."""
        timer = DeadlineTimer(own)
        try:
            samples = [_sample(t) for t in trajectories]
            values = await timer.wait(reward.score(samples), time.monotonic() + self._seconds)
            values = list(islice(_each(values), len(samples) + 1))
            if len(values) != len(samples):
                most = "more than " if len(values) > len(samples) else ""
                raise PluginError(f"it scored {most}{min(len(values), len(samples))} of {len(samples)} samples")
            return tuple(_with_part(t, part, finite(v, part)) for t, v in zip(trajectories, values, strict=True))
        except BaseException as error:  # noqa: BLE001 - boundary: a reward that raises takes its own group out
            return describe(contained(error))
        finally:
            timer.close()


class _OfOne(GroupReward):
    """A function of a sample, on one that is stored; it sees all sampled tokens, as when it was sampled."""

    def __init__(self, reward: Reward, t: Trajectory) -> None:
        self.name, self._reward = reward.name, reward
        self._tokens = sum(turn.end - turn.start for turn in t.turns)

    async def score(self, samples: Sequence[Sample]) -> Sequence[float]:
        return [await self._reward.score(replace(sample, tokens=self._tokens)) for sample in samples]


def _sample(t: Trajectory) -> Sample:
    path = t.last_path()
    shown = keyed(t.ids, t.images)[path] if t.images else None
    return Sample(
        t.task, t.messages, dict(t.rewards), str(t.finish), len(t.turns), t.sampled_tokens, t.ids[path], shown
    )


def _each(values: Any) -> Iterator[Any]:
    try:
        return iter(values)
    except TypeError:
        raise PluginError(f"it returned {type(values).__name__}, not a number for each sample") from None


def _with_part(t: Trajectory, part: str, value: float) -> Trajectory:
    rewards = {**t.rewards, part: t.rewards.get(part, 0.0) + value}
    check_sum(rewards, t.weights)
    return replace(t, rewards=rewards)


def _failed(group: Group, line: str) -> Group:
    failure = Failure(Boundary.REWARD, line)
    failed = (replace(t, finish=FinishReason.ERROR, failure=failure, rewards={}) for t in group.trajectories)
    return replace(group, trajectories=(), failed=(*group.failed, *failed))
