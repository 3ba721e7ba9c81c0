"""`AsyncRolloutRequest`: one sample of one task while it grows. Every token is written once, and never again."""

import hashlib
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from agentrl.chat.base import Chat
from agentrl.constraint import Allowed
from agentrl.containment.deadline import OwnedTask
from agentrl.engine.base import EngineError, Generation
from agentrl.images import ImageSpan
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Session, Task
from agentrl.trajectory import Boundary, Failure, FinishReason, Segment, Span, ToolUse, Trajectory, Turn

Seed = int | tuple[int, ...]
"""A run's seed, alone or with what it is divided by (the step)."""

_BITS = 63
_UNWEIGHTED: Mapping[str, float] = {}
_SINCE_1970 = time.time() - time.monotonic()  # seconds from the clock of deadlines to that of the world


def derive(*parts: object) -> int:
    """A seed of 63 bits from any printable parts: the same parts give the same seed on every machine."""
    text = "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> (64 - _BITS)


def nth(seed: int, index: int) -> int:
    """The `index`-th seed of the sequence that `seed` starts (a step of splitmix64), without hashing."""
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
        """The ids of `messages`, as a copy of its own. The tools are the task's and so the same for all
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


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """One sequence of tokens while it grows. `ids` grows in place and is handed to the engine as it is.

    logprobs, versions: of the sampled ids alone, in order, versions as counts of ids in a row with one version.
    turn_starts, turn_ends, step_rewards, orders: one entry a turn. open_turn: where a turn begins that is not whole
    yet. deadline: seconds of time.monotonic(). at: whose code runs now, and which, so that an error finds its boundary.
    """

    name: str = ""
    """By which the engine knows it; unique among the conversations in flight."""
    seed: int = 0
    """Of its tokens."""
    at: tuple[Boundary, str] = (Boundary.INFRASTRUCTURE, "driver")
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: "array[int]" = field(default_factory=lambda: array("i"))
    version_counts: "array[int]" = field(default_factory=lambda: array("i"))
    """For each entry of `versions`, the number of sampled ids in a row with it."""
    allowed: list[tuple[int, Sequence[bytes]]] = field(default_factory=list)
    """Where ids begin that were sampled under a constraint, and which ids were allowed there."""
    experts: npt.NDArray[np.int16] | None = None
    """What the engine's routers chose for the first ids (see `Generation.experts`)."""
    images: list[ImageSpan] = field(default_factory=list)
    """Where images stand in `ids`."""
    prompt_length: int = 0
    """Tokens of the opening prompt."""
    open_turn: int | None = None
    turn_starts: "array[int]" = field(default_factory=lambda: array("i"))
    turn_ends: "array[int]" = field(default_factory=lambda: array("i"))
    step_rewards: "array[float]" = field(default_factory=lambda: array("d"))
    state_keys: list[str] = field(default_factory=list)
    """For each whole turn, the key of the state in which it began (`Environment.state_key`)."""
    state_key: str = ""
    """The key of the state in which the turn begins that is not whole yet; those of whole turns are `state_keys`."""
    orders: "array[int]" = field(default_factory=lambda: array("i"))
    """For each turn, how many turns of the rollout began before it."""
    order: int = -1
    """That of the turn that is not whole yet; -1: none has begun."""
    opening_messages: tuple[Message, ...] = ()
    """The messages that it began with, without a summary."""
    messages: list[Message] = field(default_factory=list)
    """The conversation so far."""
    tools: dict[str, Tool] = field(default_factory=dict)
    """The tools that it offers, by name."""
    deadline: float = 0.0
    depth: int = 0
    """Calls of tools that it lies in: 0 for the rollout's own."""
    max_turns: int = 0
    """Assistant turns that it may have; 0: as many as the rollout."""
    max_tokens: int = 0
    """Tokens that it may have; 0: as many as a rollout's own."""
    summarizing: bool = False
    """Whether the next turn is a summary, from which it goes on."""
    turns_before: int = 0
    """Its turns that summaries took the place of."""

    @property
    def turn_tokens(self) -> int:
        """Tokens that the unfinished turn has so far (after an abort)."""
        return 0 if self.open_turn is None else len(self.ids) - self.open_turn

    def open_with(self, ids: "array[int]", images: Sequence[ImageSpan] = ()) -> None:
        """Take over the opening prompt; once, before any token. images: where they stand in it."""
        self.ids = ids
        self.prompt_length = len(ids)
        self.images = list(images)

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
        if generation.allowed is not None:
            self.allowed.append((start, generation.allowed))
        if self.open_turn is None:
            self.open_turn = start
        if (experts := generation.experts) is not None:  # what is known already was chosen when it was sampled
            known = experts[:0] if self.experts is None else self.experts
            self.experts = np.concatenate([known, experts[len(known) :]])

    def _add_versions(self, versions: Sequence[int]) -> None:
        """Append one version an id, as counts of ids in a row."""
        each = np.array(versions, np.int32)
        starts = np.flatnonzero(np.diff(each, prepend=each[0] - 1))
        self.versions.fromlist(each[starts].tolist())
        self.version_counts.fromlist(np.diff(starts, append=len(each)).tolist())

    def close_turn(self) -> list[int]:
        """The turn is whole: its ids."""
        assert self.open_turn is not None, "close_turn follows add_sampled"
        start, self.open_turn = self.open_turn, None
        self.turn_starts.append(start)
        self.turn_ends.append(len(self.ids))
        self.step_rewards.append(0.0)
        self.state_keys.append(self.state_key)
        self.orders.append(self.order if self.order >= 0 else len(self.orders))
        self.order = -1
        return self.ids[start:].tolist()

    def add_bridge(self, ids: list[int], images: Sequence[ImageSpan] = ()) -> None:
        """Append what the environment or the tools said, generation prompt included. images: where they stand in it."""
        self.images += (replace(span, start=span.start + len(self.ids)) for span in images)
        self.ids.fromlist(ids)

    def add_step_reward(self, reward: float) -> None:
        """Credit a step reward to the last turn."""
        self.step_rewards[-1] += reward

    @property
    def last_turn(self) -> int:
        """Index of the last whole turn among those of the rollout."""
        return self.orders[-1]

    def begin_anew(self, name: str) -> "Conversation":
        """What it was so far, as a conversation of its own; go on as an empty one that the engine knows by
        `name`. Its messages are the caller's to change."""
        past = Conversation(**{one.name: getattr(self, one.name) for one in fields(Conversation)})
        past.messages = list(self.messages)
        self.name, self.seed, self.turns_before = name, derive(self.seed, "summary"), self.turns_taken
        self.ids, self.logprobs, self.versions, self.version_counts = array("i"), array("f"), array("i"), array("i")
        self.turn_starts, self.turn_ends, self.orders, self.step_rewards = (
            array("i"),
            array("i"),
            array("i"),
            array("d"),
        )
        self.open_turn, self.order, self.summarizing = None, -1, False
        self.experts, self.state_keys, self.images, self.allowed = None, [], [], []
        return past

    @property
    def turns_taken(self) -> int:
        """Whole turns so far, those before a summary included."""
        return self.turns_before + len(self.turn_ends)

    @property
    def whole_turns(self) -> list[Turn]:
        """The turns that are whole; places in `ids`."""
        columns = zip(self.turn_starts, self.turn_ends, self.step_rewards, self.state_keys, strict=True)
        return [Turn(start, end, reward, state=state) for start, end, reward, state in columns]

    @property
    def own_turns(self) -> list[Turn]:
        """The turns, one that is not whole among them; places in `ids`."""
        turns = self.whole_turns
        if self.open_turn is not None:
            turns.append(Turn(self.open_turn, len(self.ids), state=self.state_key))
        return turns


@dataclass(slots=True, eq=False)
class AsyncRolloutRequest(Conversation):
    """A request as the driver sees it: the conversation that its hooks see, and the branches beside it.

    id: unique among the requests in flight. seed: of this sample and attempt. own: the task that it is driven in.
    """

    id: str
    task: Task
    sample: int
    opening: Opening = field(default_factory=Opening)
    """Shared by the samples of a task."""
    own: OwnedTask = field(default_factory=OwnedTask)
    state: RequestState = RequestState.PENDING
    """Changed by `move` and `end` alone."""
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
    seats: dict[str, float] = field(default_factory=dict)
    """Rewards of seats by name."""
    finish: FinishReason | None = None
    """Why it ended; None while it runs."""
    failure: Failure | None = None
    """What failed, where the machinery did."""
    seconds: dict[str, float] = field(
        default_factory=lambda: {"total": 0.0, "engine": 0.0, "tools": 0.0, "environment": 0.0, "hooks": 0.0}
    )
    """Wall time so far, in all and by whom it was waited for."""
    spans: list[Span] = field(default_factory=list)
    """When it was waited for them."""
    extra: dict[str, Json] = field(default_factory=dict)
    """Further facts for `Trajectory.extra`."""
    segments: list[Segment] = field(default_factory=list)
    """The tree of a rollout that an agent held; empty for one conversation."""
    told: list[tuple[Message, ...]] = field(default_factory=list)
    """The messages that each of `segments` adds to its parent's conversation."""
    branches: list[Conversation] = field(default_factory=list)
    """What a summary took the place of, and the conversations of its tools, in the order in which they began."""
    turns_begun: int = 0
    """Turns of all of its conversations, those that are sampled now and those that came to nothing included."""
    promised: int = 0
    """Tokens that turns may still add which are sampled now."""
    broken: tuple[tuple[Boundary, str], Exception] | None = None
    """What failed in a conversation of a tool, and where, where the machinery did."""
    summaries: int = 0
    """Summaries that were asked for, and written."""
    summaries_failed: int = 0
    """Those of them from which it could not be gone on."""
    severed: bool = False
    """Whether it was aborted within a call of a tool, and so cannot be driven on."""

    def __post_init__(self) -> None:
        self.name = self.name or self.id

    def move(self, state: RequestState) -> None:
        """Go to `state`. Raises TransitionError when the table does not allow it."""
        if state not in self.state.nexts:
            raise TransitionError(f"{self.id}: {self.state} -> {state} is not a transition of a request")
        self.state = state

    def end(self, state: RequestState, finish: FinishReason, failure: Failure | None = None) -> None:
        """Go to a state that ends it, and keep why."""
        self.move(state)
        self.finish, self.failure = finish, failure

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state in _ENDS

    def session_of(self, plugin: Environment | Tool) -> Session:
        """The session of a plugin that was created."""
        for begun in self.begun:
            if begun.plugin is plugin:
                return begun.session
        raise KeyError(plugin.name)

    def branch_name(self) -> str:
        """A name for a conversation beside those so far."""
        return f"{self.id}/{len(self.branches) + 1}"

    @property
    def turn_count(self) -> int:
        """Whole turns so far, of all conversations."""
        return len(self.turn_ends) + sum(len(branch.turn_ends) for branch in self.branches)

    @property
    def turns(self) -> list[Turn]:
        """The whole turns of its own conversation so far, made on demand."""
        return self.whole_turns

    @property
    def sampled_tokens(self) -> int:
        """Tokens that were sampled so far, in all conversations."""
        return len(self.logprobs) + sum(len(branch.logprobs) for branch in self.branches)

    @property
    def total_tokens(self) -> int:
        """Tokens of all conversations."""
        return len(self.ids) + sum(len(branch.ids) for branch in self.branches)

    @property
    def step_reward(self) -> float:
        """The sum of all step rewards."""
        return sum(self.step_rewards) + sum(sum(branch.step_rewards) for branch in self.branches)

    @property
    def conversation_ids(self) -> Sequence[int]:
        """The tokens of the conversation; of an agent's tree, of the one that ends last."""
        return self.ids

    def waited(self, part: str, started: float) -> None:
        """Note that it waited for `part` since `started`, of time.monotonic()."""
        now = time.monotonic()
        self.seconds[part] += now - started
        self.spans.append(Span(part, started + _SINCE_1970, now + _SINCE_1970))

    def begin_turn(self, talk: Conversation) -> None:
        """Note that a turn of `talk` begins, or goes on."""
        if talk.order < 0:
            talk.order = self.turns_begun
            self.turns_begun += 1

    def trajectory(self, weights: Mapping[str, float] = _UNWEIGHTED) -> Trajectory:
        """What it leaves behind, as arrays of its own: the request may be driven on afterwards. weights: of
        reward parts."""
        tree = _tree(self) if self.branches else _one(self)
        mask = np.zeros(len(tree.ids), np.uint8)
        for turn in tree.turns:
            mask[turn.start : turn.end] = turn.trained
        extra = {key: tuple(value) if isinstance(value, list) else value for key, value in self.extra.items()}
        if any(tree.depths):
            extra["depths"] = tree.depths
        return Trajectory(
            request_id=self.id, task=self.task, sample=self.sample, ids=tree.ids, loss_mask=mask,
            logprobs=tree.logprobs, weight_version=tree.version, prompt_length=tree.prompt_length,
            turns=tuple(tree.turns), messages=tuple(self.messages), rewards=dict(self.rewards),
            finish=self.finish or FinishReason.ERROR, weights=weights, tool_uses=tuple(tree.tool_uses),
            failure=self.failure, seconds=dict(self.seconds), spans=tuple(self.spans), tools=tuple(self.tools),
            extra=extra, segments=tuple(tree.segments), branches=tuple(tree.told), leaf=tree.leaf, seed=self.seed,
            experts=None if self.branches else _of_all(self.experts, len(tree.ids)),
            images=tuple(tree.images), seats=dict(self.seats) if self.failure is None else {},
            allowed=None if self.branches else _allowed(self),
        )  # fmt: skip


def _allowed(talk: Conversation) -> Allowed | None:
    """The ids that were allowed at each token, as a trajectory has them."""
    if not talk.allowed:
        return None
    found = np.full(len(talk.ids), None, object)
    for start, allowed in talk.allowed:
        found[start : start + len(allowed)] = allowed
    return found


def _of_all(experts: npt.NDArray[np.int16] | None, tokens: int) -> npt.NDArray[np.int16] | None:
    """The experts of all tokens, -1 for those at the end that the engine did not compute."""
    if experts is None:
        return None
    found = np.full((tokens, *experts.shape[1:]), -1, np.int16)
    found[: len(experts)] = experts[:tokens]
    return found


@dataclass(slots=True)
class _Flat:
    """The columns of a trajectory, as it has them."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    version: npt.NDArray[np.int32]
    prompt_length: int
    turns: list[Turn]
    tool_uses: list[ToolUse]
    segments: list[Segment]
    told: list[tuple[Message, ...]]
    depths: tuple[int, ...] = ()
    leaf: int = -1
    images: Sequence[ImageSpan] = ()


def _one(request: AsyncRolloutRequest) -> _Flat:
    """The columns of a request whose tokens lie in a row."""
    turns = request.turns
    if request.open_turn is not None:
        turns.append(Turn(request.open_turn, len(request.ids), state=request.state_key))
    columns = _columns(request, turns)
    return _Flat(
        *columns, request.prompt_length, turns, request.tool_uses, request.segments, request.told, images=request.images
    )


def _columns(
    talk: Conversation, turns: Sequence[Turn]
) -> "tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]":
    """Ids, log-probs and versions of all tokens."""
    sampled = np.zeros(len(talk.ids), np.bool_)
    for turn in turns:
        sampled[turn.start : turn.end] = True
    logprobs, version = np.zeros(len(sampled), np.float32), np.full(len(sampled), -1, np.int32)
    logprobs[sampled] = talk.logprobs
    version[sampled] = np.repeat(np.array(talk.versions, np.int32), talk.version_counts)
    return np.array(talk.ids, np.int32), logprobs, version


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of a conversation: a turn, and what was said before it. order: of the turn among the rollout's."""

    order: float
    talk: int
    start: int
    end: int
    turn: Turn | None
    messages: tuple[Message, ...]


def _pieces(index: int, talk: Conversation) -> Iterator[_Piece]:
    """Yield a conversation turn by turn; what follows its last turn goes with that."""
    if not (turns := talk.own_turns):
        return
    orders = [*talk.orders, talk.order][: len(turns)]
    starts = [0, *(turn.end for turn in turns[:-1])]
    ends = [*(turn.end for turn in turns[:-1]), len(talk.ids)]
    told = _told(talk, len(turns))
    for order, start, end, turn, messages in zip(orders, starts, ends, turns, told, strict=True):
        yield _Piece(order, index, start, end, turn, messages)


def _told(talk: Conversation, turns: int) -> list[tuple[Message, ...]]:
    """The messages of each turn with those before it; what follows the last turn goes with that."""
    first = len(talk.opening_messages)
    said = [i + 1 for i, message in enumerate(talk.messages) if i >= first and message["role"] == "assistant"]
    ends = [*said[: turns - 1], *[len(talk.messages)] * (turns - min(len(said), turns - 1))]
    return [tuple(talk.messages[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _tree(request: AsyncRolloutRequest) -> _Flat:
    """The columns of a request with branches: its turns in the order in which they began."""
    talks: list[Conversation] = [*request.branches, request]
    pieces = [piece for index, talk in enumerate(talks) for piece in _pieces(index, talk)]
    if request.ids and not request.own_turns:  # it was just begun anew
        pieces.append(_Piece(math.inf, len(talks) - 1, 0, len(request.ids), None, tuple(request.messages)))
    pieces.sort(key=lambda piece: piece.order)
    columns = [_columns(talk, talk.own_turns) for talk in talks]
    segments: list[Segment] = []
    told: list[tuple[Message, ...]] = []
    depths: list[int] = []
    last: dict[int, int] = {}  # the segment in which each conversation ends so far
    turns: list[Turn] = []
    images: list[ImageSpan] = []
    at = 0
    for piece, before in zip(pieces, [None, *pieces], strict=False):
        end = at + piece.end - piece.start
        if before is not None and before.talk == piece.talk:
            segments[-1] = replace(segments[-1], end=end)
            told[-1] += piece.messages
        else:
            segments.append(Segment(at, end, last.get(piece.talk, -1)))
            told.append(piece.messages)
            depths.append(talks[piece.talk].depth)
        last[piece.talk] = len(segments) - 1
        images += (
            replace(span, start=span.start + at - piece.start)
            for span in talks[piece.talk].images
            if piece.start <= span.start < piece.end
        )
        if piece.turn is not None:
            moved = at - piece.start
            turns.append(replace(piece.turn, start=piece.turn.start + moved, end=piece.turn.end + moved))
        at = end
    parts = [[column[piece.start : piece.end] for column in columns[piece.talk]] for piece in pieces]
    ids, logprobs, version = (np.concatenate(column) for column in zip(*parts, strict=True))
    rank = {int(piece.order): index for index, piece in enumerate(pieces) if piece.turn is not None}
    uses = [replace(use, turn=rank.get(use.turn, use.turn)) for use in request.tool_uses]
    opening = talks[pieces[0].talk].prompt_length
    leaf = last.get(len(talks) - 1, -1)
    return _Flat(ids, logprobs, version, opening, turns, uses, segments, told, tuple(depths), leaf, images)
