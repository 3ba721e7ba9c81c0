"""Whether an adapter can be sent alone: what it needs of a server, and what servers offer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.models.load import embeddings
from agentrl.models.lora import ADAPTER, layers, target_names
from agentrl.recipe.sections.model import LoraSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KNOWN = frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
"""Layers that servers of every architecture take adapters for."""
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
         "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip
"""Layer -> the layer that servers compute it as a part of."""
LOADED, IN_A_BATCH = 8, 4
"""Adapters that a launched server has room for, in memory and in a batch: requests in flight are of the last few
steps."""


@dataclass(frozen=True, slots=True)
class AdapterNeeds:
    """The size of an adapter."""

    rank: int
    """Of its matrices."""
    targets: frozenset[str]
    """Last parts of its layers' names, such as `q_proj`."""

    @property
    def unknown(self) -> str | None:
        """Why servers cannot take it, in one line; None: they can."""
        if others := sorted(self.targets - KNOWN):
            return f"servers have no adapters for {', '.join(others)}"
        return None


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The adapters that a server takes."""

    enabled: bool = False
    """Whether it takes any."""
    rank: int | None = None
    """The largest rank; None: not known."""
    targets: frozenset[str] = frozenset()
    """Names of layers, or `all`; empty: not known."""
    replicas: int = 1
    """Of the model, behind one address (data parallelism)."""
    files: bool = True
    """Whether adapters reach it: false where it reads them from files, and does not see this machine's."""

    together: tuple[tuple[str, str], ...] = ()
    """Pairs of layers: it takes an adapter for the first only where there is one for the second."""

    def lacks(self, needs: AdapterNeeds) -> str | None:
        """Why it does not take an adapter; None: it does."""
        if not self.enabled:
            return "takes no adapters (--enable-lora)"
        if not self.files:
            return "reads adapters from files, and does not see this machine's"
        if self.replicas > 1:
            return "takes no adapters while it runs with replicas (--dp-size)"
        if self.rank is not None and self.rank < needs.rank:
            return f"takes adapters up to rank {self.rank} (--max-lora-rank), this one has {needs.rank}"
        for layer, other in self.together:
            if layer in needs.targets and other not in needs.targets:
                return f"takes no adapter for {layer} without one for {other}"
        offered = _fused(self.targets)
        if offered and "all" not in offered and (missing := sorted(_fused(needs.targets) - offered)):
            return f"takes no adapters for {', '.join(missing)} (--lora-target-modules)"
        return None


def needs_of(model: "PreTrainedModel", section: LoraSection | None) -> AdapterNeeds | None:
    """The needs of the adapter in `model`, or of the one that `section` would put into a model of this shape;
    None without an adapter."""
    if found := layers(model):
        rank = max(layer.r[ADAPTER] for layer in found.values())
        return AdapterNeeds(rank, _leaves(found))
    if section is None or not embeddings(model).is_meta:
        return None
    return AdapterNeeds(section.rank, _leaves(target_names(model, section.layers, section.exclude, section.vision)))


def why_merged(needs: AdapterNeeds, servers: Sequence[tuple[str, AdapterRoom]]) -> str | None:
    """Why whole weights are sent to these servers (URL, room); None: the adapter alone is."""
    if needs.unknown is not None:
        return needs.unknown
    return next((f"{url} {why}" for url, room in servers if (why := room.lacks(needs)) is not None), None)


def _leaves(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.rpartition(".")[2] for name in names)


def _fused(targets: Iterable[str]) -> set[str]:
    return {FUSED.get(name, name) for name in targets}
