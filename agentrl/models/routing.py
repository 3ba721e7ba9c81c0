"""`Routing`: which experts the routers of a mixture choose, recorded while an engine samples and replayed in training.

Sampler and trainer round differently, so that a router near a tie chooses other experts in each, and the log-probs of
such a token differ by far more than rounding. Replaying the sampler's choice (R3, arXiv:2510.11370) leaves the routers'
weights, and their gradients, to the trainer; only the choice is taken over.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNKNOWN = -1
"""In place of an expert: the router's own choice is taken."""
_ATTRIBUTE = "agentrl_routing"
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ServedExperts:
    """What a server tells of the choices of its routers: of every layer, those without a router included."""

    layers: tuple[int, ...]
    """The layers of the model that have a router."""
    of_model: int
    """Number of layers of the model."""
    each: int
    """Number of experts that a router chooses for a token."""

    @classmethod
    def of(cls, model: "PreTrainedModel") -> "ServedExperts":
        """That of a model, which may be a skeleton. Raises UserError: it has no routers."""
        routers, config = routers_of(model), model.config.get_text_config()
        layers = [int(found[1]) for name in routers if (found := _LAYER.search(name))]
        return cls(tuple(layers), int(config.num_hidden_layers), int(next(iter(routers.values())).top_k))

    def recorded(self, experts: npt.NDArray[np.generic], tokens: int) -> npt.NDArray[np.int16]:
        """The experts as int16 [n, routers, experts a token]. experts: integers, n tokens after each other.
        tokens: in all, of which n were computed. Raises ValueError: it is of another size."""
        shape = (-1, self.of_model, self.each)
        if experts.size % (self.of_model * self.each) or experts.size > tokens * self.of_model * self.each:
            raise ValueError(f"{experts.size} experts of {tokens} tokens, {self.of_model} layers and {self.each} each")
        return experts.reshape(shape)[:, list(self.layers)].astype(np.int16)


def routers_of(model: nn.Module) -> dict[str, Any]:
    """The routers whose choice can be recorded and replayed, by name. Raises UserError: there are none."""
    named = {name: m for name, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")}
    found = {name: m for name, m in named.items() if hasattr(m, "top_k")}
    if not found:
        raise UserError(
            f"{type(model).__name__} has no router whose choice can be replayed: set algorithm.routing_replay=false"
        )
    return found


class Routing:
    """The routers of one model, in the order of its layers. They choose as always unless told otherwise.

    A router is a module that chooses by one `topk` over the experts, as those of `transformers` do (Qwen2, Qwen3,
    Mixtral, OLMoE, gpt-oss and their like). Raises UserError: the model has none.
    """

    def __init__(self, model: nn.Module) -> None:
        routers = list(routers_of(model).values())
        self.layers = len(routers)
        """Number of routers."""
        self._taken: list[Tensor | None] | None = None
        self._replayed: Tensor | None = None
        self._differs: list[Tensor | None] = []
        for layer, router in enumerate(routers):
            chooser = _Chooser(self, layer)
            router.register_forward_pre_hook(chooser.enter)
            router.register_forward_hook(chooser.leave, always_call=True)
        setattr(model, _ATTRIBUTE, self)

    @classmethod
    def of(cls, model: nn.Module) -> "Routing":
        """The routing of `model`, the same object for all callers. Raises UserError: it has no routers."""
        return getattr(model, _ATTRIBUTE, None) or cls(model)

    @contextmanager
    def recording(self) -> Iterator[list[Tensor | None]]:
        """Record what the routers choose in the block; nothing is replayed meanwhile. Yields a list with one entry for
        each router, int64 [tokens, experts a token] once it was computed."""
        self._taken = [None] * self.layers
        try:
            yield self._taken
        finally:
            self._taken = None

    @contextmanager
    def replaying(self, experts: Tensor) -> Iterator[None]:
        """Take these experts in all passes of the block, also those of a backward pass that computes activations again.

        experts: [tokens, routers, experts a token], UNKNOWN where the router chooses itself.
        """
        self._replayed, self._differs = experts, [None] * self.layers
        try:
            yield
        finally:
            self._replayed = None

    def differing(self) -> Tensor:
        """The share of the replayed choices that the routers would not have made, float32 [tokens], of the
        first pass of `replaying`."""
        known = [share for share in self._differs if share is not None]
        return torch.stack(known).mean(0) if known else torch.zeros(0)

    def choose(self, layer: int, scores: Tensor, found: Any) -> object:
        """What `topk` of a router shall return. scores: [tokens, experts]. found: what it returned."""
        if self._taken is not None:
            self._taken[layer] = found.indices
            return found
        if self._replayed is None:
            return found
        wanted = self._replayed[:, layer].to(found.indices.device)
        known = wanted != UNKNOWN
        chosen = torch.where(known, wanted, found.indices)
        if self._differs[layer] is None:
            same = (wanted[:, :, None] == found.indices[:, None, :]).any(-1)
            self._differs[layer] = (known & ~same).float().mean(-1)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class _Chooser(TorchFunctionMode):
    """Steps in between the router of one layer and `topk`, while the router runs."""

    def __init__(self, routing: Routing, layer: int) -> None:
        super().__init__()
        self._routing, self._layer = routing, layer
        self._mode: TorchFunctionMode = self

    def enter(self, router: nn.Module, arguments: object) -> None:
        """Begin with the router's forward."""
        self._mode.__enter__()

    def leave(self, router: nn.Module, arguments: object, output: object) -> None:
        """End with it, also where it raises."""
        self._mode.__exit__(None, None, None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            return self._routing.choose(self._layer, args[0], found)
        return found
