"""`AsyncRolloutRequest`: one sample of one task while it grows. Every token is written once, and never again."""

import math
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from agentrl.chat.base import Chat
from agentrl.constraint import Allowed
from agentrl.containment.deadline import OwnedTask
from agentrl.images import ImageSpan
from agentrl.plugins.environment import Environment
from agentrl.plugins.span import SINCE_1970
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Session, Task
from agentrl.rollout.conversation import Conversation
from agentrl.trajectory import Boundary, Failure, FinishReason, Segment, Span, ToolUse, Trajectory, Turn
from agentrl.workspace.workspace import Workspace

_UNWEIGHTED: Mapping[str, float] = {}
_MOST_SPANS = 1000  # of a request, beyond which those that plugins name are left out


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
class Created:
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
    """One sample of one task: the conversation that its hooks see, the branches beside it, and what became of them."""

    id: str
    """Unique among the requests in flight."""
    task: Task
    sample: int
    """Its place in the group of its task."""
    opening: Opening = field(default_factory=Opening)
    """Shared by the samples of a task."""
    seed: int = 0
    """Of this sample and attempt."""
    main: Conversation = field(default_factory=Conversation)
    """The conversation that the environment and its hooks see."""
    branches: list[Conversation] = field(default_factory=list)
    """What a summary took the place of, and the conversations of its tools, in the order in which they began."""
    own: OwnedTask = field(default_factory=OwnedTask)
    """The task that it is driven in."""
    state: RequestState = RequestState.PENDING
    """Changed by `move` and `end` alone."""
    created: list[Created] = field(default_factory=list)
    """Plugins to be released, in the order in which they were created."""
    cleanups: list[tuple[str, Callable[[], Awaitable[None]]]] = field(default_factory=list)
    """What is cleaned up after them: by name, and how."""
    workspace: Workspace | None = None
    """Its files and processes, where the recipe has a section `workspace`."""
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
    segment_messages: list[tuple[Message, ...]] = field(default_factory=list)
    """The messages that each of `segments` adds to its parent's conversation."""
    turns_started: int = 0
    """Turns of all of its conversations, those that are sampled now and those that came to nothing included."""
    reserved: int = 0
    """Tokens that turns may still add which are sampled now."""
    broken: tuple[tuple[Boundary, str], Exception] | None = None
    """What failed in a conversation of a tool, and where, where the machinery did."""
    summaries: int = 0
    """Summaries that were asked for, and written."""
    summaries_failed: int = 0
    """Those of them from which it could not be gone on."""
    aborted_in_tool: bool = False
    """Whether it was aborted within a call of a tool, and so cannot be driven on."""

    def __post_init__(self) -> None:
        self.main.name, self.main.seed = self.main.name or self.id, self.seed

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
        for created in self.created:
            if created.plugin is plugin:
                return created.session
        raise KeyError(plugin.name)

    def branch_name(self) -> str:
        """A name for a conversation beside those so far."""
        return f"{self.id}/{len(self.branches) + 1}"

    @property
    def turn_count(self) -> int:
        """Whole turns so far, of all conversations."""
        return len(self.main.turn_ends) + sum(len(branch.turn_ends) for branch in self.branches)

    @property
    def turns(self) -> list[Turn]:
        """The whole turns of its own conversation so far, made on demand."""
        return self.main.whole_turns

    @property
    def sampled_tokens(self) -> int:
        """Tokens that were sampled so far, in all conversations."""
        return len(self.main.logprobs) + sum(len(branch.logprobs) for branch in self.branches)

    @property
    def total_tokens(self) -> int:
        """Tokens of all conversations."""
        return len(self.main.ids) + sum(len(branch.ids) for branch in self.branches)

    @property
    def step_reward(self) -> float:
        """The sum of all step rewards."""
        return sum(self.main.step_rewards) + sum(sum(branch.step_rewards) for branch in self.branches)

    @property
    def conversation_ids(self) -> Sequence[int]:
        """The tokens of the conversation; of an agent's tree, of the one that ends last."""
        return self.main.ids

    def last_turn(self, conversation: Conversation) -> int:
        """Index of the last whole turn of a conversation among those of the rollout."""
        return conversation.orders[-1]

    def add_step_reward(self, conversation: Conversation, reward: float) -> None:
        """Credit a step reward to the last turn of a conversation."""
        conversation.step_rewards[-1] += reward

    def waited(self, part: str, started: float) -> None:
        """Note that it waited for `part` since `started`, of time.monotonic()."""
        now = time.monotonic()
        self.seconds[part] += now - started
        self.spans.append(Span(part, started + SINCE_1970, now + SINCE_1970))

    def named(self, name: str, start: float, end: float) -> None:
        """Keep a span that a plugin named, in seconds since 1970."""
        if len(self.spans) < _MOST_SPANS:
            self.spans.append(Span(name, start, end))

    def begin_turn(self, conversation: Conversation) -> None:
        """Note that a turn of `conversation` begins, or goes on."""
        if conversation.order < 0:
            conversation.order = self.turns_started
            self.turns_started += 1

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
            turns=tuple(tree.turns), messages=tuple(self.main.messages), rewards=dict(self.rewards),
            finish=self.finish or FinishReason.ERROR, weights=weights, tool_uses=tuple(tree.tool_uses),
            failure=self.failure, seconds=dict(self.seconds), spans=tuple(self.spans), tools=tuple(self.main.tools),
            extra=extra, segments=tuple(tree.segments), branches=tuple(tree.segment_messages), leaf=tree.leaf,
            seed=self.seed,
            experts=None if self.branches else _of_all(self.main.experts, len(tree.ids)),
            images=tuple(tree.images), seats=dict(self.seats) if self.failure is None else {},
            allowed=tree.allowed,
        )  # fmt: skip


def _allowed(conversation: Conversation) -> Allowed:
    """The ids that were allowed at each token, as a trajectory has them."""
    found = np.full(len(conversation.ids), None, object)
    for start, allowed in conversation.allowed:
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
    segment_messages: list[tuple[Message, ...]]
    depths: tuple[int, ...] = ()
    leaf: int = -1
    images: Sequence[ImageSpan] = ()
    allowed: Allowed | None = None


def _one(request: AsyncRolloutRequest) -> _Flat:
    """The columns of a request whose tokens lie in a row."""
    main, turns = request.main, request.turns
    if main.open_turn is not None:
        turns.append(Turn(main.open_turn, len(main.ids), state=main.state_key))
    columns = _columns(main, turns)
    return _Flat(
        *columns,
        main.prompt_length,
        turns,
        request.tool_uses,
        request.segments,
        request.segment_messages,
        images=main.images,
        allowed=_allowed(main) if main.allowed else None,
    )


def _columns(
    conversation: Conversation, turns: Sequence[Turn]
) -> "tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]":
    """Ids, log-probs and versions of all tokens."""
    sampled = np.zeros(len(conversation.ids), np.bool_)
    for turn in turns:
        sampled[turn.start : turn.end] = True
    logprobs, version = np.zeros(len(sampled), np.float32), np.full(len(sampled), -1, np.int32)
    logprobs[sampled] = conversation.logprobs
    version[sampled] = np.repeat(np.array(conversation.versions, np.int32), conversation.version_counts)
    return np.array(conversation.ids, np.int32), logprobs, version


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of a conversation: a turn, and what was said before it. order: of the turn among the rollout's."""

    order: float
    conversation: int
    start: int
    end: int
    turn: Turn | None
    messages: tuple[Message, ...]


def _pieces(index: int, conversation: Conversation) -> Iterator[_Piece]:
    """Yield a conversation turn by turn; what follows its last turn goes with that."""
    if not (turns := conversation.own_turns):
        return
    orders = [*conversation.orders, conversation.order][: len(turns)]
    starts = [0, *(turn.end for turn in turns[:-1])]
    ends = [*(turn.end for turn in turns[:-1]), len(conversation.ids)]
    messages_of = _messages_by_turn(conversation, len(turns))
    for order, start, end, turn, messages in zip(orders, starts, ends, turns, messages_of, strict=True):
        yield _Piece(order, index, start, end, turn, messages)


def _messages_by_turn(conversation: Conversation, turns: int) -> list[tuple[Message, ...]]:
    """The messages of each turn with those before it; what follows the last turn goes with that."""
    first = len(conversation.opening_messages)
    said = [i + 1 for i, message in enumerate(conversation.messages) if i >= first and message["role"] == "assistant"]
    ends = [*said[: turns - 1], *[len(conversation.messages)] * (turns - min(len(said), turns - 1))]
    return [tuple(conversation.messages[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _tree(request: AsyncRolloutRequest) -> _Flat:
    """The columns of a request with branches: its turns in the order in which they began."""
    conversations: list[Conversation] = [*request.branches, request.main]
    pieces = [piece for index, conversation in enumerate(conversations) for piece in _pieces(index, conversation)]
    if (main := request.main).ids and not main.own_turns:  # it was just begun anew
        pieces.append(_Piece(math.inf, len(conversations) - 1, 0, len(main.ids), None, tuple(main.messages)))
    pieces.sort(key=lambda piece: piece.order)
    columns = [_columns(conversation, conversation.own_turns) for conversation in conversations]
    segments: list[Segment] = []
    segment_messages: list[tuple[Message, ...]] = []
    depths: list[int] = []
    last: dict[int, int] = {}  # the segment in which each conversation ends so far
    turns: list[Turn] = []
    images: list[ImageSpan] = []
    at = 0
    for piece, before in zip(pieces, [None, *pieces], strict=False):
        end = at + piece.end - piece.start
        if before is not None and before.conversation == piece.conversation:
            segments[-1] = replace(segments[-1], end=end)
            segment_messages[-1] += piece.messages
        else:
            segments.append(Segment(at, end, last.get(piece.conversation, -1)))
            segment_messages.append(piece.messages)
            depths.append(conversations[piece.conversation].depth)
        last[piece.conversation] = len(segments) - 1
        images += (
            replace(span, start=span.start + at - piece.start)
            for span in conversations[piece.conversation].images
            if piece.start <= span.start < piece.end
        )
        if piece.turn is not None:
            moved = at - piece.start
            turns.append(replace(piece.turn, start=piece.turn.start + moved, end=piece.turn.end + moved))
        at = end
    parts = [[column[piece.start : piece.end] for column in columns[piece.conversation]] for piece in pieces]
    ids, logprobs, version = (np.concatenate(column) for column in zip(*parts, strict=True))
    rank = {int(piece.order): index for index, piece in enumerate(pieces) if piece.turn is not None}
    uses = [replace(use, turn=rank.get(use.turn, use.turn)) for use in request.tool_uses]
    opening = conversations[pieces[0].conversation].prompt_length
    leaf = last.get(len(conversations) - 1, -1)
    allowed = None
    if any(conversation.allowed for conversation in conversations):
        known = [_allowed(conversation) for conversation in conversations]
        allowed = np.concatenate([known[piece.conversation][piece.start : piece.end] for piece in pieces])
    return _Flat(
        ids, logprobs, version, opening, turns, uses, segments, segment_messages, tuple(depths), leaf, images, allowed
    )
