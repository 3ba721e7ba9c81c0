"""`Trajectory`: the immutable record of one finished request, as flat arrays; its invariants are always checked.

A conversation is one sequence of tokens. A rollout that branches (an agent that edits its history, compacts it, starts
a sub-agent or tries again) is a tree of segments: each token stands once, and is trained at most once, however many
paths run through it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.constraint import Allowed, allows
from agentrl.images import ImageSpan
from agentrl.plugins.types import Json, Message, Task

UNKNOWN = "unknown"
"""The name in `tool/<name>/...` of every tool that a model called although it does not exist."""
STEP = "step"
"""The reward part that holds the sum of the turns' step rewards."""


class FinishReason(StrEnum):
    """Why a request ended; counted as `stop/<reason>`."""

    STOP = "stop"
    """The model answered without a tool call, and the environment did not reply."""
    LENGTH = "length"
    """The token limit of a turn, of the trajectory or of the context was reached."""
    MAX_TURNS = "max_turns"
    """The maximum number of turns was reached."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The maximum number of tool calls was reached."""
    TIMEOUT = "timeout"
    """The deadline of a turn or of the trajectory passed."""
    ENV_DONE = "env_done"
    """The environment or a tool ended the trajectory."""
    ABORTED = "aborted"
    """The request was aborted."""
    ERROR = "error"
    """An error that is not the model's: never a reward of 0, never trained on."""


class Boundary(StrEnum):
    """The part that is responsible for an error."""

    TOOL = "tool"
    """A tool."""
    ENVIRONMENT = "environment"
    """The environment's hooks."""
    REWARD = "reward"
    """A reward function."""
    AGENT = "agent"
    """An agent that holds the conversation in place of the built-in driver."""
    WORKSPACE = "workspace"
    """What provides workspaces."""
    ENGINE = "engine"
    """The engine."""
    INFRASTRUCTURE = "infrastructure"
    """Anything else."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request FAILED."""

    boundary: Boundary
    """The part that is responsible."""
    message: str
    """One line that names the hook and the error."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: ids[start:end] were sampled."""

    start: int
    """Index of the first sampled token."""
    end: int
    """Index after the last sampled token."""
    reward: float = 0.0
    """Sum of the step rewards of its tool calls and of the environment's reply."""
    trained: bool = True
    """Whether the loss covers its tokens."""
    state: str = ""
    """The environment's `state_key` when it began; empty where there was none."""
    role: str = ""
    """The seat that an agent called for, such as `judge`; empty: the rollout's own."""
    asked: Mapping[str, Json] = field(default_factory=dict)
    """What an agent's call asked for that the recipe decides, such as a temperature."""
    untrained: str = ""
    """Why the loss does not cover the answer to an agent's call: `unreceived`, `unproven`, `marked` by the agent,
    `without_tools`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A node of a rollout's tree: ids[start:end] follow the ids of the segment `parent`."""

    start: int
    """Index of the first token."""
    end: int
    """Index after the last token."""
    parent: int = -1
    """Index of the parent segment, which stands before this one; -1: a conversation begins here."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One call of a tool, for the metrics."""

    name: str
    """The tool's name as the model wrote it, at most 64 characters."""
    turn: int
    """Index of the assistant turn."""
    seconds: float
    """Wall time of `execute`."""
    error: str | None = None
    """One line, `model: ...` or `tool: ...`; None without an error."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The tool's own metrics, finite."""
    cut: bool = False
    """Whether the answer was cut to `rollout.max_tool_tokens`."""


class Span(NamedTuple):
    """A stretch of time in which a rollout waited for one part, or that a plugin named."""

    part: str
    """`engine`, `tools`, `environment` or `hooks`; `workspace` within hooks; or what a plugin named by `span`."""
    start: float
    """Seconds since 1970, by a clock that does not jump while the process lives."""
    end: float
    """Likewise."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished rollout of T tokens: one conversation, or a tree of them."""

    request_id: str
    """Unique within a run."""
    task: Task
    """The task."""
    sample: int
    """Index of this sample among the samples of its task."""
    ids: npt.NDArray[np.int32]
    """int32 [T]: all tokens. ids[:prompt_length] is the opening prompt."""
    loss_mask: npt.NDArray[np.uint8]
    """uint8 [T]: 1 for sampled tokens that are trained, else 0."""
    logprobs: npt.NDArray[np.float32]
    """float32 [T]: natural log-probs from the engine; 0 for tokens that were not sampled."""
    weight_version: npt.NDArray[np.int32]
    """int32 [T]: number of updates behind the weights that sampled the token; -1 for tokens that were not sampled."""
    prompt_length: int
    """Number of tokens of the opening prompt; of a tree, of its first conversation."""
    turns: tuple[Turn, ...]
    """The assistant turns, in the order in which they began."""
    messages: tuple[Message, ...]
    """The conversation in the format of the OpenAI API; of a tree, the one that ends in `leaf`."""
    rewards: Mapping[str, float]
    """Reward parts by name, before weighting: those of `calc_reward`, those of the recipe's reward functions, and
    `step`, the sum of the turns' step rewards."""
    finish: FinishReason
    """Why the request ended."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the reward parts by name; the default of a part is 1."""
    tool_uses: tuple[ToolUse, ...] = ()
    """Every tool call, in order."""
    failure: Failure | None = None
    """Why the request FAILED; None if it did not."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time: `total`, `engine`, `tools`, `environment` (its replies) and `hooks` (`create` and `calc_reward`)."""
    spans: tuple[Span, ...] = ()
    """When that was, in the order in which the stretches ended; empty where it is not known."""
    tools: Sequence[str] = ()
    """Names of the tools that the task offered."""
    extra: Mapping[str, Json] = field(default_factory=dict)
    """If there are any: `retried` and `release_errors`, tuples of lines; `depths`, of each segment the calls of tools
    that its conversation lies in; `usage`, what an endpoint counted, failed attempts included (`Generation.usage`)."""
    segments: tuple[Segment, ...] = ()
    """The tree, in the order of the tokens; empty for one conversation, whose only segment is all of it."""
    branches: tuple[tuple[Message, ...], ...] = ()
    """Of a tree, the messages that each segment adds to the conversation of its parent; empty where `messages` is all
    there is."""
    seed: int | None = None
    """Seed of the sample and attempt; None where it was not sampled from one."""
    leaf: int = -1
    """Index of the segment in which the conversation of `messages` ends."""
    experts: npt.NDArray[np.int16] | None = None
    """int16 [T, layers, experts a token]: what the engine's routers chose for each token, -1 where that is not known;
    None without `algorithm.routing_replay`, and of a tree. Not stored on disk."""
    images: tuple[ImageSpan, ...] = ()
    """Where images stand in `ids`, in order."""
    seats: Mapping[str, float] = field(default_factory=dict)
    """Rewards of seats by name, in place of `reward` for the turns of their `role`."""
    allowed: Allowed | None = None
    """object [T]: of each token that was sampled under a constraint the ids that were allowed (`constraint.packed`),
    None elsewhere; None where there is no such token."""

    @property
    def reward(self) -> float:
        """The weighted sum of the reward parts."""
        return sum(value * self.weights.get(part, 1.0) for part, value in self.rewards.items())

    @property
    def valid(self) -> bool:
        """Whether it may be part of a group: it neither failed nor was aborted."""
        return self.failure is None and self.finish not in (FinishReason.ERROR, FinishReason.ABORTED)

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens that are trained."""
        return int(self.loss_mask.sum())

    def paths(self) -> "list[npt.NDArray[np.int64]]":
        """The indices of the tokens of each path from a root to a leaf, in the order of the leaves."""
        if not self.segments:
            return [np.arange(len(self.ids))]
        inner = {segment.parent for segment in self.segments}
        return [self._path(leaf) for leaf in range(len(self.segments)) if leaf not in inner]

    def last_path(self) -> "npt.NDArray[np.int64]":
        """The indices of the tokens of the conversation of `messages`, int64."""
        return self._path(self.leaf % len(self.segments)) if self.segments else np.arange(len(self.ids))

    def _path(self, index: int) -> "npt.NDArray[np.int64]":
        spans: list[npt.NDArray[np.int64]] = []
        while index >= 0:
            segment = self.segments[index]
            spans.append(np.arange(segment.start, segment.end))
            index = segment.parent
        return np.concatenate(spans[::-1])


@dataclass(frozen=True, slots=True)
class Learned:
    """What an update made of a trajectory of T tokens."""

    trained: bool
    """Whether it was part of an update of the policy."""
    advantages: npt.NDArray[np.float32]
    """float32 [T]: 0 where `loss_mask` is 0."""
    logprobs: npt.NDArray[np.float32] | None = None
    """float32 [T]: natural log-probs of the trainer before the update, 0 where `loss_mask` is 0; None where they were
    not computed."""


class InvariantError(AssertionError):
    """A trajectory is inconsistent and must not be trained on; the message names the request and the inconsistency.

    token: the index of the first token that it concerns, where it concerns some.
    """

    def __init__(self, message: str, token: int | None = None) -> None:
        super().__init__(message)
        self.token = token


def check_invariants(t: Trajectory) -> None:
    """Check that a trajectory is consistent. Raises InvariantError if it is not.

    All arrays have one length; turns are ordered, do not overlap and follow the prompt; the mask is 1 exactly within
    trained turns; log-probs are finite and at most 0 (up to 1e-4) within turns, and 0 elsewhere; weight versions are
    set exactly within turns. Of a tree, the segments cover all tokens in order, each after its parent, and every turn
    lies within one; where the messages of the segments are known, those of each are. Of images, the placeholders are as
    many as the features, none of them sampled; no other token that was not sampled is a placeholder. A token that was
    sampled under a constraint is one of those that were allowed.
    """
    n = len(t.ids)
    if not (len(t.loss_mask) == len(t.logprobs) == len(t.weight_version) == n):
        lengths = (n, len(t.loss_mask), len(t.logprobs), len(t.weight_version))
        raise InvariantError(f"{t.request_id}: lengths of ids, mask, logprobs, versions differ: {lengths}")
    if t.experts is not None and len(t.experts) != n:
        raise InvariantError(f"{t.request_id}: the experts of {len(t.experts)} tokens, but {n} ids")
    spans, trained = np.zeros(n, np.uint8), np.zeros(n, np.uint8)
    last = t.prompt_length
    for turn in t.turns:
        if not (last <= turn.start <= turn.end <= n):
            raise InvariantError(f"{t.request_id}: turn {turn.start}:{turn.end} is out of order or range ({n} ids)")
        spans[turn.start : turn.end] = 1
        trained[turn.start : turn.end] = turn.trained
        last = turn.end
    sampled = spans.astype(bool)
    for wrong, what in (
        (trained != t.loss_mask, "the loss mask is not 1 on exactly the sampled spans that are trained"),
        (~sampled & (t.logprobs != 0), "a token that was not sampled has a logprob"),
        (sampled & ~(np.isfinite(t.logprobs) & (t.logprobs <= 1e-4)), "a sampled token has no valid logprob"),
        ((t.weight_version >= 0) != sampled, "weight versions are not on exactly the sampled tokens"),
    ):
        if wrong.any():
            token = int(wrong.argmax())
            raise InvariantError(f"{t.request_id}: {what}: token {token} of {n}", token)
    if t.branches and len(t.branches) != len(t.segments):
        raise InvariantError(f"{t.request_id}: messages of {len(t.branches)} segments, but {len(t.segments)} segments")
    if t.segments:
        _check_segments(t, n)
    if t.images:
        _check_images(t, sampled)
    if t.allowed is not None:
        _check_allowed(t, sampled)


def _check_allowed(t: Trajectory, sampled: npt.NDArray[np.bool_]) -> None:
    assert t.allowed is not None
    if len(t.allowed) != len(t.ids):
        raise InvariantError(f"{t.request_id}: the allowed ids of {len(t.allowed)} tokens, but {len(t.ids)} ids")
    known: dict[tuple[bytes, int], bool] = {}
    for index in np.flatnonzero([one is not None for one in t.allowed]).tolist():
        key = t.allowed[index], int(t.ids[index])
        if key not in known:
            try:
                known[key] = isinstance(key[0], bytes) and allows(*key)
            except ValueError as error:
                raise InvariantError(f"{t.request_id}: {error}: token {index}", index) from None
        if not (sampled[index] and known[key]):
            raise InvariantError(f"{t.request_id}: token {index} is none of those that were allowed there", index)


def _check_images(t: Trajectory, sampled: npt.NDArray[np.bool_]) -> None:
    first = t.images[0]
    placeholder, ratio = t.ids[first.start : first.start + 1], np.prod(first.grid) / max(1, first.tokens)
    expected, end = np.zeros(len(t.ids), bool), 0
    for span in t.images:
        if not (end <= span.start < span.start + span.tokens <= len(t.ids)):
            raise InvariantError(f"{t.request_id}: an image at {span.start} is out of order or range")
        if np.prod(span.grid) != ratio * span.tokens:
            raise InvariantError(f"{t.request_id}: an image of grid {span.grid} has {span.tokens} placeholders")
        end = span.start + span.tokens
        expected[span.start : end] = True
    if not np.array_equal((t.ids == placeholder) & ~sampled, expected):
        raise InvariantError(f"{t.request_id}: the placeholders are not exactly those of its {len(t.images)} images")
    starts = [segment.start for segment in t.segments]
    if any(span.start < start < span.start + span.tokens for span in t.images for start in starts):
        raise InvariantError(f"{t.request_id}: an image is in more than one segment")


def _check_segments(t: Trajectory, n: int) -> None:
    end = 0
    for index, segment in enumerate(t.segments):
        if segment.start != end or segment.end <= segment.start or not -1 <= segment.parent < index:
            raise InvariantError(f"{t.request_id}: segment {index} ({segment}) does not follow the one before it")
        end = segment.end
    if end != n:
        raise InvariantError(f"{t.request_id}: the segments end at {end} of {n} ids")
    starts = np.array([segment.start for segment in t.segments])
    for turn in t.turns:
        inside = t.segments[int(np.searchsorted(starts, turn.start, side="right")) - 1]
        if turn.end > inside.end:
            raise InvariantError(f"{t.request_id}: turn {turn.start}:{turn.end} is in more than one segment")


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one task."""

    task: Task
    """The task."""
    trajectories: tuple[Trajectory, ...]
    """The valid samples, in sample order."""
    failed: tuple[Trajectory, ...] = ()
    """The samples that failed or were aborted."""

    @classmethod
    def of(cls, task: Task, samples: Sequence[Trajectory]) -> "Group":
        """The group of all samples of a task, in their order."""
        return cls(task, tuple(t for t in samples if t.valid), tuple(t for t in samples if not t.valid))


def spread(name: str, values: npt.ArrayLike) -> dict[str, float]:
    """<name>_mean, _std (of the population), _min and _max of some values; 0 where there are none."""
    found = np.asarray(values, np.float64)
    found = found if found.size else np.zeros(1)
    return {
        f"{name}_mean": float(found.mean()),
        f"{name}_std": float(found.std()),
        f"{name}_min": float(found.min()),
        f"{name}_max": float(found.max()),
    }
