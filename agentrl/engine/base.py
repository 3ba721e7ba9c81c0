"""`Engine`: the contract of an engine, which samples token ids after token ids."""

import asyncio
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from agentrl.chat.base import Chat
from agentrl.cluster.placement import Launched
from agentrl.constraint import Constraint
from agentrl.errors import PlainError, UserError
from agentrl.plugins.registry import load
from agentrl.plugins.types import Json
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.rollout import EngineSection

if TYPE_CHECKING:
    from agentrl.weights.source import WeightSource


class GenerationFinish(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    """A stop id was sampled; it is the last of `ids`."""

    LENGTH = "length"
    """`max_tokens` or the model's maximum context was reached."""

    ABORT = "abort"
    """The request was aborted; the ids sampled so far are kept."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one turn."""

    max_tokens: int
    """The maximum number of tokens of the turn."""

    temperature: float = 1.0
    """Sampling temperature; 0: always the likeliest token."""

    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens whose probabilities sum to at least this; 1: from all."""

    top_k: int = 0
    """Sample from this many likeliest tokens; 0: from all."""

    stop_ids: tuple[int, ...] = ()
    """Token ids that end the turn."""

    constraint: Constraint | None = None
    """What the turn must look like; None: anything. An engine that cannot keep to it raises ConstraintError."""

    said: tuple[int, ...] = ()
    """What was sampled of the turn before, and stands at the end of the prompt: a constraint goes on behind it."""

    seed: int | None = None
    """Seed: equal seeds, ids and weights give equal tokens, independent of the rest of the batch. None: random."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled turn."""

    ids: list[int]
    """The sampled token ids."""

    logprobs: list[float]
    """Natural log-prob of each id under softmax(logits / temperature), before top-p and top-k; at temperature 0, under
    softmax(logits). Under a constraint of the logits that it allows."""

    finish: GenerationFinish
    """Why sampling stopped."""

    weight_version: int | Sequence[int] = 0
    """The trainer's step whose weights sampled the ids: one number for all ids, or one per id if the weights changed
    during the turn."""

    usage: Mapping[str, int] = field(default_factory=dict)
    """What an endpoint counted, which tokens here do not say: `input`, `cached_input` (part of it) and `output`."""

    allowed: Sequence[bytes | None] | None = None
    """Under a constraint, for each id those that were allowed (`constraint.packed`; None: all of them); its log-prob is
    that under softmax over them. None: nothing was constrained."""

    trainable: bool = True
    """Whether the trainer can compute the log-probs: False under a constraint whose allowed ids are not known."""

    experts: npt.NDArray[np.int16] | None = None
    """int16 [n, layers, experts a token]: what the routers of a mixture chose for the first n tokens of the prompt and
    `ids`, -1 where that is not known; None: it was not asked for."""


OnTokens = Callable[[Sequence[int]], None]
"""Is given sampled ids as they come, in the event loop's thread; must be quick."""


def tell(on_tokens: OnTokens, ids: Sequence[int]) -> None:
    """Call `on_tokens` in the event loop's thread; what it raises goes to the loop's handler, and no further."""
    try:
        on_tokens(ids)
    except Exception as error:  # noqa: BLE001 - the boundary to whoever reads along
        context = {"message": "on_tokens of Engine.generate raised", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)


class EngineError(PlainError):
    """An error of the engine: the request becomes FAILED with boundary `engine`, without a reward."""


class ConstraintError(EngineError):
    """A constraint that the engine cannot keep to: the call is refused, and the request goes on."""


class Engine(Protocol):
    """The contract of an engine. A class that a recipe names in `engine.name` derives from it; the methods below are
    the defaults. `generate` may be called by thousands of coroutines at once."""

    brings_chat: ClassVar[bool] = False
    """Whether the engine takes messages: it is built without a model, and its own `chat` replaces the tokenizer's."""

    in_process: ClassVar[bool] = False
    """Whether the engine computes with the run's model in this process: it is then given the weights also where they
    are trained in others."""

    streams: ClassVar[bool] = False
    """Whether `generate` calls `on_tokens`; where not, it is not given any."""

    tells_experts: ClassVar[bool] = False
    """Whether it fills `Generation.experts` where its class is given `routing_replay=True`."""

    constrains: ClassVar[bool] = False
    """Whether it keeps to `Sampling.constraint`; where not, it is not given any."""

    images: bool = False
    """Whether prompts may hold images: ids of `generate` that are negative, as `agentrl.images.keyed` makes them."""

    chat: Chat | None = None
    """The engine's own chat if `brings_chat`."""

    settled: Mapping[str, Json] = {}
    """What of `engine.args` it chose by itself. A run writes it into its recipe, and is resumed with the same."""

    @staticmethod
    def missing(recipe: Recipe) -> list[str]:
        """What this machine lacks to run the engine as `recipe` says, and what of it cannot work, one line
        each. Starts nothing."""
        return []

    @staticmethod
    def launched(args: Mapping[str, Json]) -> Launched:
        """The servers that the engine launches on this machine with these `engine.args`, for the table of
        devices (`cluster/placement.py`), which gives an engine whose class takes `devices` those of each server.

        Raises ValueError for an argument that is not a number but should be.
        """
        return Launched()

    @property
    @abstractmethod
    def max_context(self) -> int:
        """The maximum number of tokens of a request, prompt and answer together."""

    @abstractmethod
    async def generate(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Sample one turn after the prompt `ids`. Raises EngineError.

        Calls with the same `request_id` are turns of one conversation. Each prompt begins with the previous prompt and
        answer, so that their cached state may be kept until `finish(request_id)`; where a stop string ended the turn
        (`engine/stops.py`), with the answer up to there, which may be less than the engine sampled.

        on_tokens: called with the ids that were sampled since its last call, each id once and in order, the last ones
        before this returns: together they are `Generation.ids`. What it raises is logged by the event loop.
        """

    def check_constraint(self, sampling: Sampling) -> None:
        """Try `sampling.constraint` before a turn needs it, where `constrains`. Raises ConstraintError."""
        return None

    def fork(self, request_id: str, others: Sequence[str]) -> None:
        """Note that the first prompt of the new conversation `request_id` begins like the conversations `others`, as
        far as it does, so that their cached state may serve it too. An engine that finds that out itself ignores it."""
        return None

    def finish(self, request_id: str) -> None:
        """Free the state kept for a conversation that has ended. Unknown ids are ignored."""
        return None

    def abort(self, request_id: str | None = None) -> None:
        """Stop one request (None: all). `generate` then returns the ids sampled so far, with finish `abort`."""
        return None

    async def update_weights(self, version: int, weights: "WeightSource | None" = None) -> None:
        """Sample from the weights of the trainer's step `version` from now on, and drop state computed with old ones.

        weights: the new weights if the trainer is in other processes; None if the engine has the trainer's model.
        """
        return None

    async def sleep(self) -> None:
        """Pause sampling and free memory for the trainer; requests wait until `wake`."""
        return None

    async def wake(self) -> None:
        """Resume sampling after `sleep`."""
        return None

    async def health(self) -> None:
        """Start the engine's processes, if any, and check that it can serve. Raises EngineError or UserError."""
        return None

    def keep_logs(self, folder: Path) -> None:
        """Write the output of the engine's processes into the run folder `folder` from now on."""
        return None

    async def close(self) -> None:
        """Free all resources; running requests end with finish `abort`."""
        return None


IntArray = npt.NDArray[np.int64]
"""Ids of a prompt, at each turn the whole conversation so far: lists of thousands take longer to check and to write
than the answer takes to read."""


def checked_prompt(ids: Sequence[int], request_id: str, vocabulary: int, images: bool) -> IntArray:
    """The prompt of a request as an array of its own. images: see `Engine.images`. Raises EngineError: it is
    empty, or an id is outside the vocabulary."""
    prompt: IntArray = np.array(ids if isinstance(ids, array) else array("q", ids))
    if not len(prompt):
        raise EngineError(f"request {request_id!r} has an empty prompt")
    low, high = int(prompt.min()), int(prompt.max())
    if (low < 0 and not images) or high >= vocabulary:
        wrong = low if low < 0 and not images else high
        raise EngineError(f"request {request_id!r}: id {wrong} is outside the model's vocabulary of {vocabulary}")
    return prompt


def engine_class(name: str) -> type[Engine]:
    """The class of the engine `name`, which declares the engine's capabilities before an instance exists.

    Raises UserError if there is no such engine, or if it is not a class derived from `Engine`.
    """
    made = load("engines", name)
    if not (isinstance(made, type) and Engine in made.__mro__):
        raise UserError(f"engine {name!r} is not a class derived from agentrl.engine.base.Engine")
    return made


def launched_by(section: EngineSection) -> Launched:
    """The servers that an engine launches. Raises UserError for flags of servers that should be numbers."""
    try:
        return engine_class(section.name).launched(section.args)
    except (TypeError, ValueError) as error:
        raise UserError(f"engine.args.flags: expected a number: {error}") from error
