"""`Answer`: the tokens of a request so far. They may come in several pieces, from several servers."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import orjson
from pydantic_core import from_json

from agentrl.engine.base import Generation, GenerationFinish, OnTokens, Sampling, tell
from agentrl.plugins.types import Json

INTERVAL = 128
"""Tokens between two pieces of an answer: what is lost with a server that dies. Each piece costs this process what some
hundred tokens do (`benchmarks/servers.py`). More would take longer than `engine.args.stall` where a server's requests
each sample less than a token a second."""

STREAM_INTERVAL = 8
"""The same where somebody reads along."""


INTEGERS, NUMBERS = frozenset((int,)), frozenset((int, float))
"""The types that ids have in JSON, and log-probs."""
Ids = Sequence[int] | npt.NDArray[np.generic]
"""Token ids of a prompt."""


def parsed(payload: bytes) -> Json:
    """What a piece of an answer says. Raises ValueError: it is not JSON."""
    try:
        return orjson.loads(payload)
    except ValueError:
        return from_json(payload)  # it may hold NaN, which Python writes and orjson refuses: the reader says where


class PieceEnd(StrEnum):
    """Why a server ended its part of an answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Features:
    """What differs between servers."""

    seeds: bool = False
    """Whether it samples by seed (deterministic inference)."""
    incremental: bool = False
    """Whether a piece of an answer holds only what is new."""
    raw_pixels: bool = False
    """Whether it scales and normalizes pixels itself, and is given them as bytes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a server is asked to sample."""

    ids: Ids
    """The prompt, and what is sampled already."""
    sampling: Sampling
    """How to sample; `max_tokens` counts what is sampled already."""
    room: int
    """How many more tokens it may sample."""
    rid: str
    """The request's id."""
    adapter: str | None = None
    """Name of one that the server holds."""
    interval: int = INTERVAL
    """Tokens between two pieces of the answer."""


@dataclass(slots=True)
class Answer:
    """The tokens so far."""

    ids: list[int] = field(default_factory=list)
    """Sampled token ids."""
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    """Natural log-probs, one for each id."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of (weight version, number of ids)."""
    on_tokens: OnTokens | None = None
    """Is given the ids as they come."""
    streamed: int = 0
    """How many ids it was given."""
    experts: npt.NDArray[np.generic] | None = None
    """What the routers chose for all tokens but the last, as the server told it: of every layer, integers; None: it
    did not tell."""

    def tell(self, sure: int) -> None:
        """Give `on_tokens` what is new of the first `sure` ids, which stay."""
        if self.on_tokens is not None and sure > self.streamed:
            new, self.streamed = self.ids[self.streamed : sure], sure
            tell(self.on_tokens, new)

    def begin_anew(self) -> None:
        """Forget what was sampled; nobody was told of it."""
        del self.ids[:], self.logprobs[:], self.versions[:]

    def generation(self, finish: GenerationFinish, version: int) -> Generation:
        """It as a `Generation`. version: of the weights, where no id came."""
        runs = self.versions
        if len({v for v, _ in runs}) <= 1:
            return Generation(self.ids, self.logprobs.tolist(), finish, runs[0][0] if runs else version)
        each: list[int] = np.repeat([v for v, _ in runs], [count for _, count in runs]).tolist()
        return Generation(self.ids, self.logprobs.tolist(), finish, each)


def finish_of(end: PieceEnd, answer: Answer, sampling: Sampling, room: int) -> GenerationFinish | None:
    """The finish that a server's end stands for; None where it has to go on: it stopped at an id that is not one
    of our stop ids."""
    if end is PieceEnd.ABORT:
        return GenerationFinish.ABORT
    if answer.ids and answer.ids[-1] in sampling.stop_ids:
        return GenerationFinish.STOP
    return GenerationFinish.LENGTH if len(answer.ids) >= room or end is PieceEnd.LENGTH else None
