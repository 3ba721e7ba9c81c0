"""Who samples tokens. Token ids in, token ids out."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from agentrl.weights.source import WeightSource

from agentrl.errors import PlainError


class GenerationFinish(StrEnum):
    """Why the engine stopped."""

    STOP = "stop"  # a stop id was sampled; it is the last of `ids`
    LENGTH = "length"  # max_tokens, or the model's context, is used up
    ABORT = "abort"  # aborted; the ids so far are kept


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one turn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch those off.

    seed: the same seed, ids and weights give the same tokens, whatever else is in the batch (None: any).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled. logprobs: natural log, of the distribution sampled from at `temperature` (before top-p/top-k
    renormalisation; at temperature 0 that of temperature 1), one for each id. weight_version: of the weights, the
    trainer's step, one number for each id (where new weights came in its midst) or one for all."""

    ids: list[int]
    logprobs: list[float]
    finish: GenerationFinish
    weight_version: int | Sequence[int] = 0


class EngineError(PlainError):
    """The engine could not do its work: the request becomes FAILED with boundary `engine`, it is no reward of 0."""


class Engine(Protocol):
    """`generate` may be called by thousands of coroutines at once."""

    @property
    def max_context(self) -> int:
        """The most tokens a request may have, prompt and answer together."""
        ...

    async def generate(self, ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        """Sample one turn after `ids`. Calls with one `request_id` are turns of one conversation, each prompt beginning
        with the former prompt and answer: what was computed for it may be kept until `finish(request_id)`."""
        ...

    def finish(self, request_id: str) -> None:
        """The conversation is over: free what is kept for it. Unknown ids are ignored."""
        ...

    def abort(self, request_id: str | None = None) -> None:
        """Stop one request (None: all); their `generate` returns what they have, with finish `abort`."""
        ...

    async def update_weights(self, version: int, weights: "WeightSource | None" = None) -> None:
        """Sample from new weights from now on; what was computed with the old ones is dropped. weights: of a trainer in
        other processes; None where the engine knows the trainer's model."""
        ...

    async def pause(self, mode: str = "retract") -> None: ...

    async def resume(self) -> None: ...

    def flush(self) -> None:
        """Drop every cached prefix."""
        ...

    async def sleep(self) -> None:
        """Give memory back while the trainer works."""
        ...

    async def wake(self) -> None: ...

    async def health(self) -> None:
        """Raises EngineError when it cannot serve."""
        ...

    async def close(self) -> None: ...
