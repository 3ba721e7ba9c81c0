"""A Hugging Face folder of a model, sharded or not, written tensor by tensor.

Names and shapes are fixed when `HuggingFace` is constructed; the values are read when they are written, from a snapshot
if the model goes on learning. Only one tensor at a time is whole, and only on rank 0.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.checkpoint.gather import Gatherer
from agentrl.checkpoint.safetensors_writer import Slot, write_file, write_model
from agentrl.jsonable import dumps
from agentrl.models import lora
from agentrl.models.qwen3 import Qwen3
from agentrl.weights.source import as_saved

if TYPE_CHECKING:
    import torch.distributed as dist
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADAPTER = "adapter"
SHARD = 4_000_000_000
"""Maximum bytes of a file with weights."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the model without its adapter."""

    name: str
    tensor: Tensor
    layer: Any
    """The layer whose adapter is merged into the tensor; None: there is none."""
    slots: tuple[Slot, ...]
    """Its names on disk, mostly one: the experts of a layer are one tensor, but saved one by one."""

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that it is computed from."""
        return (self.tensor,) if self.layer is None else _parts(self.layer)


class HuggingFace:
    """Writes the folder of `model`. `snapshot` returns the tensor whose values are written for a parameter: its float32
    master, a copy, or itself."""

    def __init__(self, model: "PreTrainedModel", snapshot: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        self._model = model
        self._entries = sorted(
            _entries(model), key=lambda entry: -entry.slots[0].dtype.itemsize
        )  # keeps values aligned
        self._adapter = _adapter_slots(model)
        self._values = {id(part): snapshot(part) for entry in self._entries for part in entry.parts()}
        self._layers = {entry.name: _frozen(entry.layer) for entry in self._entries if entry.layer is not None}

    def begin(self, folder: Path, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        """Write everything but the weights, on one rank. Raises OSError."""
        if not isinstance(self._model, Qwen3):
            from transformers.utils import logging as progress

            progress.disable_progress_bar()
        self._model.save_pretrained(folder, state_dict={})
        for leftover in folder.glob("*.safetensors*"):
            leftover.unlink()
        if lora.layers(self._model):
            (folder / ADAPTER).mkdir()
            config = dumps(lora.adapter_config(self._model), indent=2, sort_keys=True)
            (folder / ADAPTER / lora.CONFIG).write_text(config, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if (images := getattr(self._model, "image_input", None)) is not None:
            images.processor.save_pretrained(folder)

    def write(self, folder: Path, group: "dist.ProcessGroup | None" = None, shard: int = SHARD) -> None:
        """Write the weights; every rank of `group` calls this (see Gatherer). Raises OSError on rank 0."""
        import torch.distributed as dist

        gather = Gatherer(group)
        weights, adapter = self._weights(gather), self._adapters(gather)
        if group is not None and dist.get_rank(group) != 0:
            _exhaust(weights)
            _exhaust(adapter)
            return
        try:
            slots = [slot for entry in self._entries for slot in entry.slots]
            write_model(folder, slots, weights, shard)
            if self._adapter:
                write_file(folder / ADAPTER / lora.WEIGHTS, [slot for slot, _ in self._adapter], adapter)
        except (OSError, ValueError):
            _exhaust(weights)  # the other ranks still send their parts
            _exhaust(adapter)
            raise

    def _weights(self, gather: Gatherer) -> Iterator[Tensor]:
        """Yield the tensors in the order of the slots; on ranks other than 0 on the meta device."""
        for entry in self._entries:

            def whole(tensor: Tensor) -> Tensor:
                return gather(self._values[id(tensor)]).to(tensor.dtype)

            layer = self._layers.get(entry.name)
            with torch.no_grad():
                full = whole(entry.tensor) if layer is None else lora.merged(layer, whole)
                yield from _on_disk(self._model, entry.name, full).values()

    def _adapters(self, gather: Gatherer) -> Iterator[Tensor]:
        for _, tensor in self._adapter:
            yield gather(self._values[id(tensor)]).to(tensor.dtype)


def save_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write a folder that `from_pretrained` loads: config.json, model.safetensors in the model's dtype, the tokenizer.

    An adapter is merged into the weights, and also written to `adapter/` in peft's format.
    """
    found = HuggingFace(model)
    folder.mkdir(parents=True, exist_ok=True)
    found.begin(folder, tokenizer)
    found.write(folder)


def _entries(model: "PreTrainedModel") -> Iterator[_Entry]:
    seen: set[int] = set()
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name, tensor, layer in lora.plain_tensors(model):
        if id(tensor) in seen or name in ignored:
            continue
        seen.add(id(tensor))
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        found = _on_disk(model, name, meta)
        slots = tuple(Slot(key, value.dtype, tuple(value.shape)) for key, value in found.items())
        yield _Entry(name, tensor, layer, slots)


def _on_disk(model: "PreTrainedModel", name: str, tensor: Tensor) -> dict[str, Tensor]:
    return as_saved(model, {name: tensor})


def _parts(layer: Any) -> tuple[Tensor, ...]:
    return layer.lora_A[lora.ADAPTER].weight, layer.lora_B[lora.ADAPTER].weight, layer.base_layer.weight


def _frozen(layer: Any) -> Any:
    """The layer's parameters as they are registered now: FSDP2 replaces them while it computes."""
    a, b, base = (SimpleNamespace(weight=part) for part in _parts(layer))
    return SimpleNamespace(lora_A={lora.ADAPTER: a}, lora_B={lora.ADAPTER: b}, base_layer=base, scaling=layer.scaling)


def _adapter_slots(model: "PreTrainedModel") -> list[tuple[Slot, Tensor]]:
    names, parameters = lora.adapter_state(model), lora.adapter_parameters(model)
    return [
        (Slot(name, p.dtype, tuple(p.shape)), p) for name, p in zip(names, parameters, strict=True)
    ]  # both list the layers in the same order


def _exhaust(tensors: Iterator[Tensor]) -> None:
    for _ in tensors:
        pass
