"""`AsyncRolloutRequest`: one sample of one task while it grows. Every token is written once, and never again."""

import hashlib
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any

import numpy as np

from agentrl.chat.base import Chat
from agentrl.engine.base import EngineError, Generation
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Session, Task
from agentrl.rollout.deadline import OwnedTask
from agentrl.trajectory import Boundary, Failure, FinishReason, Segment, ToolUse, Trajectory, Turn

Seed = int | tuple[int, ...]
"""A run's seed, alone or with what it is divided by (the step)."""

_BITS = 63
_UNWEIGHTED: Mapping[str, float] = {}


def derive(*parts: object) -> int:
    """Return a seed of 63 bits from any printable parts: the same parts give the same seed on every machine."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> (64 - _BITS)


def nth(seed: int, index: int) -> int:
    """Return the `index`-th seed of the sequence that `seed` starts (a step of splitmix64), without hashing."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> (64 - _BITS)


class RequestState(StrEnum):
    """Where a request is."""

    PENDING = "pending"  # made; no hook was called yet
    RUNNING = "running"  # the engine samples, or is about to
    TOOL_CALLING = "tool_calling"  # the tools of one turn run
    INTERACTING = "interacting"  # the environment answers a turn without tool calls
    COMPLETED = "completed"  # it ended and its reward is known
    FAILED = "failed"  # the machinery did not do its work; `failure` says whose
    ABORTED = "aborted"  # stopped from outside; its tokens are kept

    nexts: tuple["RequestState", ...]  # its row of the table


_ENDS = (RequestState.COMPLETED, RequestState.FAILED, RequestState.ABORTED)

TRANSITIONS: dict[RequestState, tuple[RequestState, ...]] = {
    RequestState.PENDING: (RequestState.RUNNING, *_ENDS),
    RequestState.RUNNING: (RequestState.TOOL_CALLING, RequestState.INTERACTING, *_ENDS),
    RequestState.TOOL_CALLING: (RequestState.RUNNING, *_ENDS),
    RequestState.INTERACTING: (RequestState.RUNNING, *_ENDS),
    RequestState.COMPLETED: (),
    RequestState.FAILED: (),
    RequestState.ABORTED: (RequestState.RUNNING,),  # driven on
}

for _state, _nexts in TRANSITIONS.items():
    _state.nexts = _nexts  # an enum hashes in Python, so looking it up costs more than a turn's bookkeeping should


class TransitionError(RuntimeError):
    """A request was moved in a way that the table does not allow."""


@dataclass(slots=True)
class Opening:
    """The opening prompt that the samples of a task share: rendered again only when its messages differ."""

    messages: list[Message] | None = None
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    """Token ids of `messages`, rendered."""

    def render(self, chat: Chat, messages: list[Message], schemas: Sequence[dict[str, Json]]) -> "array[int]":
        """Return the ids of `messages`, as a copy of its own. The tools are the task's and so the same for all
        samples."""
        if self.messages is None or self.messages != messages:
            self.ids = array("i", chat.render(messages, schemas))
            self.messages = list(messages)
        return self.ids[:]


@dataclass(slots=True)
class Begun:
    """A plugin whose `create` was called for this request, and so whose `release` must be."""

    plugin: Environment | Tool
    session: Session
    """The plugin's session of this request."""
    calc_reward_kwargs: Mapping[str, Json]
    """Keyword arguments of its `calc_reward`."""
    release_kwargs: Mapping[str, Json]
    """Keyword arguments of its `release`."""

    def release(self) -> Awaitable[None]:
        """Call its `release`."""
        return self.plugin.release(self.session, **self.release_kwargs)


@dataclass(slots=True, eq=False)
class AsyncRolloutRequest:
    """A request as the driver sees it. `ids` grows in place and is handed to the engine as it is.

    id: unique among the requests in flight. seed: of this sample and attempt. logprobs, versions: of the sampled ids
    alone, in order, versions as counts of ids in a row with one version. turn_starts, turn_ends, step_rewards: one
    entry a turn. open_turn: where a turn begins that is not whole yet. deadline: seconds of time.monotonic(). at: whose
    code runs now, and which, so that an error finds its boundary. own: the task that it is driven in.
    """

    id: str
    task: Task
    sample: int
    seed: int
    opening: Opening = field(default_factory=Opening)
    """Shared by the samples of a task."""
    own: OwnedTask = field(default_factory=OwnedTask)
    state: RequestState = RequestState.PENDING
    """Changed by `move` and `end` alone."""
    at: tuple[Boundary, str] = (Boundary.INFRASTRUCTURE, "driver")
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: "array[int]" = field(default_factory=lambda: array("i"))
    version_counts: "array[int]" = field(default_factory=lambda: array("i"))
    """For each entry of `versions`, the number of sampled ids in a row with it."""
    prompt_length: int = 0
    """Tokens of the opening prompt."""
    open_turn: int | None = None
    turn_starts: "array[int]" = field(default_factory=lambda: array("i"))
    turn_ends: "array[int]" = field(default_factory=lambda: array("i"))
    step_rewards: "array[float]" = field(default_factory=lambda: array("d"))
    messages: list[Message] = field(default_factory=list)
    """The conversation so far."""
    tools: dict[str, Tool] = field(default_factory=dict)
    """The tools that the task offers, by name."""
    begun: list[Begun] = field(default_factory=list)
    """Plugins to be released, in the order in which they were created."""
    held: list[tuple[str, Callable[[], Awaitable[None]]]] = field(default_factory=list)
    """What is released after them: whose, and how."""
    tool_uses: list[ToolUse] = field(default_factory=list)
    """One entry for each call so far."""
    tool_calls: int = 0
    """Calls that were run."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Reward parts by name, before weighting."""
    finish: FinishReason | None = None
    """Why it ended; None while it runs."""
    failure: Failure | None = None
    """What failed, where the machinery did."""
    deadline: float = 0.0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"total": 0.0, "engine": 0.0, "tools": 0.0, "environment": 0.0, "hooks": 0.0}
    )
    extra: dict[str, Any] = field(default_factory=dict)
    """Further facts for `Trajectory.extra`."""
    segments: list[Segment] = field(default_factory=list)
    """The tree of a rollout that an agent held; empty for one conversation."""
    branches: list[tuple[Message, ...]] = field(default_factory=list)
    """The messages that each of `segments` adds to its parent's conversation."""

    def move(self, state: RequestState) -> None:
        """Go to `state`. Raises TransitionError when the table does not allow it."""
        if state not in self.state.nexts:
            raise TransitionError(f"{self.id}: {self.state} -> {state} is not a transition of a request")
        self.state = state

    def end(self, state: RequestState, finish: FinishReason, failure: Failure | None = None) -> None:
        """Go to a state that ends it, and keep why."""
        self.move(state)
        self.finish, self.failure = finish, failure

    def session_of(self, plugin: Environment | Tool) -> Session:
        """Return the session of a plugin that was created."""
        for begun in self.begun:
            if begun.plugin is plugin:
                return begun.session
        raise KeyError(plugin.name)

    @property
    def turn_count(self) -> int:
        """Whole turns so far."""
        return len(self.turn_ends)

    @property
    def turns(self) -> list[Turn]:
        """The whole turns so far, made on demand."""
        return list(map(Turn, self.turn_starts, self.turn_ends, self.step_rewards))

    @property
    def sampled_tokens(self) -> int:
        """Tokens that were sampled so far."""
        return len(self.logprobs)

    @property
    def conversation_ids(self) -> Sequence[int]:
        """The tokens of the conversation; of a tree, of the one that ends last."""
        return self.ids

    @property
    def turn_tokens(self) -> int:
        """Tokens that the unfinished turn has so far (after an abort)."""
        return 0 if self.open_turn is None else len(self.ids) - self.open_turn

    def open_with(self, ids: "array[int]") -> None:
        """Take over the opening prompt; once, before any token."""
        self.ids = ids
        self.prompt_length = len(ids)

    def add_sampled(self, generation: Generation) -> None:
        """Append what the engine returned. Raises EngineError when its parts do not belong together."""
        count = len(generation.ids)
        if count != len(generation.logprobs):
            raise EngineError(f"{count} ids came with {len(generation.logprobs)} logprobs")
        if count == 0:
            return
        start, logprobs, version = len(self.ids), array("f", generation.logprobs), generation.weight_version
        if not isinstance(version, int) and count != len(version):
            raise EngineError(f"{count} ids came with {len(version)} weight versions")
        self.ids.fromlist(generation.ids)  # raises before anything is changed where an id is none
        self.logprobs.extend(logprobs)
        if isinstance(version, int):
            self.versions.append(version)
            self.version_counts.append(count)
        else:
            self._add_versions(version)
        if self.open_turn is None:
            self.open_turn = start

    def _add_versions(self, versions: Sequence[int]) -> None:
        """Append one version an id, as counts of ids in a row."""
        for version, run in groupby(versions):
            self.versions.append(version)
            self.version_counts.append(len(list(run)))

    def close_turn(self) -> list[int]:
        """Return the turn is whole: its ids."""
        assert self.open_turn is not None, "close_turn follows add_sampled"
        start, self.open_turn = self.open_turn, None
        self.turn_starts.append(start)
        self.turn_ends.append(len(self.ids))
        self.step_rewards.append(0.0)
        return self.ids[start:].tolist()

    def add_bridge(self, ids: list[int]) -> None:
        """Append what the environment or the tools said, generation prompt included."""
        self.ids.fromlist(ids)

    def add_step_reward(self, reward: float) -> None:
        """Credit a step reward to the last turn."""
        self.step_rewards[-1] += reward

    def trajectory(self, weights: Mapping[str, float] = _UNWEIGHTED) -> Trajectory:
        """Return what it leaves behind, as arrays of its own: the request may be driven on afterwards. weights: of
        reward parts."""
        turns = self.turns
        if self.open_turn is not None:
            turns.append(Turn(self.open_turn, len(self.ids)))
        size = len(self.ids)
        mask = np.zeros(size, np.uint8)
        for turn in turns:
            mask[turn.start : turn.end] = 1
        sampled = np.flatnonzero(mask)
        for turn in turns:
            mask[turn.start : turn.end] = turn.trained
        logprobs = np.zeros(size, np.float32)
        logprobs[sampled] = self.logprobs
        version = np.full(size, -1, np.int32)
        version[sampled] = np.repeat(np.array(self.versions, np.int32), self.version_counts)
        extra = {key: tuple(value) if isinstance(value, list) else value for key, value in self.extra.items()}
        return Trajectory(
            request_id=self.id, task=self.task, sample=self.sample, ids=np.array(self.ids, np.int32), loss_mask=mask,
            logprobs=logprobs, weight_version=version, prompt_length=self.prompt_length, turns=tuple(turns),
            messages=tuple(self.messages), rewards=dict(self.rewards), finish=self.finish or FinishReason.ERROR,
            weights=weights, tool_uses=tuple(self.tool_uses), failure=self.failure, seconds=dict(self.seconds),
            tools=tuple(self.tools), extra=extra, segments=tuple(self.segments), branches=tuple(self.branches),
            seed=self.seed,
        )  # fmt: skip
