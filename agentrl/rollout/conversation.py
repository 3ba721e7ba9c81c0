"""`Conversation`: one sequence of tokens while it grows. Every token is written once, and never again."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from agentrl.constraint import Constraint
from agentrl.engine.base import EngineError, Generation
from agentrl.images import ImageSpan
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Message
from agentrl.trajectory import Boundary, Turn

Seed = int | tuple[int, ...]
"""A run's seed, alone or with what it is divided by (the step)."""

_BITS = 63


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
    allowed: list[tuple[int, Sequence[bytes | None]]] = field(default_factory=list)
    """Where ids begin that were sampled under a constraint, and which ids were allowed there."""
    strict: Constraint | None = None
    """What holds its calls to its tools, once that is known (`rollout.strict_calls`)."""
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
    def is_main(self) -> bool:
        """Whether it is the rollout's own: no call of a tool holds it."""
        return self.depth == 0

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
