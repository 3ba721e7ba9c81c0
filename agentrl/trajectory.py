"""`Trajectory`: what one request leaves behind, frozen and flat; its invariants are checked in production."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.plugins.types import Message, Task


class FinishReason(StrEnum):
    """Why a request ended; counted as `stop/<reason>`."""

    STOP = "stop"  # the model answered and the environment had nothing to add
    LENGTH = "length"  # the tokens of a turn, of the trajectory or of the context are used up
    MAX_TURNS = "max_turns"
    MAX_TOOL_CALLS = "max_tool_calls"
    TIMEOUT = "timeout"  # the turn's or the trajectory's deadline
    ENV_DONE = "env_done"  # the environment or a tool said that it is over
    ABORTED = "aborted"
    ERROR = "error"  # the machinery failed; never a reward of 0, never trained on


class Boundary(StrEnum):
    """Whose fault an error is."""

    MODEL = "model"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    ENGINE = "engine"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request FAILED. boundary: whose fault it is. message: one line, which names the hook and the error."""

    boundary: Boundary
    message: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: ids[start:end] were sampled. reward: the sum of the step rewards of its tools and of the
    environment's reply to it."""

    start: int
    end: int
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One call of a tool, for the metrics.

    name: as the model wrote it, at most 64 characters. turn: index of the assistant turn. seconds: wall time of
    `execute`. error: None, or `model: ...` or `tool: ...`, one line. metrics: the tool's own, finite. cut: whether the
    answer was longer than `rollout.max_tool_tokens`.
    """

    name: str
    turn: int
    seconds: float
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished conversation of T tokens.

    request_id: unique in a run. task, sample: which task, and which of its samples.
    ids: int32 [T], all tokens; the opening prompt is ids[:prompt_length]. loss_mask: uint8 [T], 1 where sampled.
    logprobs: float32 [T], natural, the engine's; 0 where not sampled. weight_version: int32 [T], updates that the
    engine's weights had seen; -1 where not sampled.
    turns: the sampled spans, in order. messages: the conversation, in the shape of the OpenAI API.
    rewards: by part, unweighted: those of `calc_reward`, of the recipe's functions, and `step`, the sum of the turns'
    step rewards. weights: by part, 1 where a part has none. finish: why it ended. failure: None unless it FAILED.
    tool_uses: every call, in order. tools: names of the tools that the task offered.
    seconds: wall time in all (`total`), and in `engine`, `tools`, `environment` (its replies) and `hooks` (`create` and
    `calc_reward`). extra: `retried` and `release_errors`, tuples of lines, where there are any.
    """

    request_id: str
    task: Task
    sample: int
    ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    weight_version: npt.NDArray[np.int32]
    prompt_length: int
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    rewards: Mapping[str, float]
    finish: FinishReason
    weights: Mapping[str, float] = field(default_factory=dict)
    tool_uses: tuple[ToolUse, ...] = ()
    failure: Failure | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    tools: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """The weighted sum of the reward parts."""
        return sum(value * self.weights.get(part, 1.0) for part, value in self.rewards.items())

    @property
    def valid(self) -> bool:
        """Whether it may enter a group: it neither failed nor was aborted."""
        return self.failure is None and self.finish not in (FinishReason.ERROR, FinishReason.ABORTED)

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.loss_mask.sum())


class InvariantError(AssertionError):
    """A trajectory that must never be trained on; it names the request and what disagrees."""


def check_invariants(t: Trajectory) -> None:
    """Check that lengths agree; the mask is 1 on exactly the turns' spans; a logprob is finite and at most 0 there, and
    0 elsewhere; turns are ordered and lie after the prompt. Raises InvariantError."""
    n = len(t.ids)
    if not (len(t.loss_mask) == len(t.logprobs) == len(t.weight_version) == n):
        lengths = (n, len(t.loss_mask), len(t.logprobs), len(t.weight_version))
        raise InvariantError(f"{t.request_id}: lengths of ids, mask, logprobs, versions differ: {lengths}")
    spans = np.zeros(n, np.uint8)
    last = t.prompt_length
    for turn in t.turns:
        if not (last <= turn.start <= turn.end <= n):
            raise InvariantError(f"{t.request_id}: turn {turn.start}:{turn.end} is out of order or range ({n} ids)")
        spans[turn.start : turn.end] = 1
        last = turn.end
    if not np.array_equal(spans, t.loss_mask):
        raise InvariantError(f"{t.request_id}: the loss mask is not 1 on exactly the sampled spans")
    sampled = spans.astype(bool)
    if np.any(t.logprobs[~sampled] != 0):
        raise InvariantError(f"{t.request_id}: a token that was not sampled has a logprob")
    if not np.all(np.isfinite(t.logprobs[sampled])) or np.any(t.logprobs[sampled] > 1e-4):
        raise InvariantError(f"{t.request_id}: a sampled token has no valid logprob")
    if np.any((t.weight_version >= 0) != sampled):
        raise InvariantError(f"{t.request_id}: weight versions are not on exactly the sampled tokens")


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one task. trajectories: the valid ones, in sample order. failed: the rest."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    failed: tuple[Trajectory, ...] = ()
