"""`Engine`: the contract of what samples tokens. Token ids in, token ids out."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol

from agentrl.chat.base import Chat
from agentrl.errors import PlainError, UserError
from agentrl.plugins.registry import load
from agentrl.weights.source import WeightSource


class GenerationFinish(StrEnum):
    """Why the engine stopped."""

    STOP = "stop"
    """A stop id was sampled; it is the last of `ids`."""

    LENGTH = "length"
    """`max_tokens`, or the model's context, is used up."""

    ABORT = "abort"
    """The request was aborted; the ids so far are kept."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one turn."""

    max_tokens: int
    """The maximum number of tokens of the turn."""

    temperature: float = 1.0
    """0 is greedy."""

    top_p: float = 1.0
    """Sample from the fewest tokens that hold this share of the probability; 1: from all."""

    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: from all."""

    stop_ids: tuple[int, ...] = ()
    """Token ids that end the turn."""

    seed: int | None = None
    """The same seed, ids and weights give the same tokens, whatever else is in the batch (None: any)."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled turn."""

    ids: list[int]
    """The sampled token ids."""

    logprobs: list[float]
    """The log-prob (natural) of each id under the distribution sampled from at `temperature`, before top-p and top-k
    renormalise it; at temperature 0 under that of temperature 1."""

    finish: GenerationFinish
    """Why sampling stopped."""

    weight_version: int | Sequence[int] = 0
    """The trainer's step whose weights sampled the ids: one number for all, or one for each where weights changed in
    between."""


class EngineError(PlainError):
    """The engine could not do its work: the request becomes FAILED with boundary `engine`; its reward is not 0."""


class Engine(Protocol):
    """The contract of an engine. A class that a recipe names in `engine.name` derives from it: what the class does not
    define has the default below. `generate` may be called by thousands of coroutines at once."""

    brings_chat: ClassVar[bool] = False
    """Whether the engine takes messages: it is made without a model, and its own `chat` replaces the tokenizer's."""

    chat: Chat | None = None
    """The chat of an engine that brings one."""

    @staticmethod
    def missing(args: Mapping[str, Any]) -> list[str]:
        """Return what this machine lacks to start the engine with these `engine.args`, one line each."""
        return []

    @classmethod
    def refusal(cls, sampling: Sampling) -> str | None:
        """Return why the engine cannot sample so with the log-probs that `Generation` promises; None: it can."""
        return None

    @staticmethod
    def gpus(args: Mapping[str, Any]) -> int:
        """Return how many GPUs of this machine the engine takes for itself with these `engine.args`.

        Raises ValueError for an argument that should be a number and is not.
        """
        return 0

    @property
    @abstractmethod
    def max_context(self) -> int:
        """The maximum number of tokens of a request, prompt and answer together."""
        ...

    @abstractmethod
    async def generate(self, ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        """Sample one turn after the prompt `ids`. Calls with one `request_id` are turns of one conversation, each
        prompt beginning with the former prompt and answer: what was computed for it may be kept until
        `finish(request_id)`. Raises EngineError."""
        ...

    def finish(self, request_id: str) -> None:
        """Free what is kept for a conversation that is over. Unknown ids are ignored."""
        return None

    def abort(self, request_id: str | None = None) -> None:
        """Stop one request (None: all); their `generate` returns what they have, with finish `abort`."""
        return None

    async def update_weights(self, version: int, weights: WeightSource | None = None) -> None:
        """Sample from new weights, those of the trainer's step `version`, from now on; drop what was computed with the
        old ones. weights: those of a trainer in other processes; None where the engine knows the trainer's model."""
        return None

    async def sleep(self) -> None:
        """Stop sampling and free memory while the trainer works; requests wait."""
        return None

    async def wake(self) -> None:
        """Sample again after `sleep`."""
        return None

    async def health(self) -> None:
        """Start what has to be started, and check that the engine can serve. Raises EngineError or UserError."""
        return None

    def keep_logs(self, folder: Path) -> None:
        """Write the output of the engine's processes into `folder`, the run's, from now on."""
        return None

    async def close(self) -> None:
        """Free everything; running requests end with finish `abort`."""
        return None


def engine_class(name: str) -> type[Engine]:
    """Return the class of the installed engine `name`, which knows its capabilities before an engine is made.

    Raises UserError: no such engine, or not a class that derives from `Engine`.
    """
    made = load("engines", name)
    if not (isinstance(made, type) and Engine in made.__mro__):
        raise UserError(f"engine {name!r} is not a class derived from agentrl.engine.base.Engine")
    return made
