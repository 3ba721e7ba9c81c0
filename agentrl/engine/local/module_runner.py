"""`ModuleRunner`: any Hugging Face causal LM whose state consists of keys and values, with the module's own forward."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicLayer
from transformers.cache_utils import Cache

from agentrl.engine.local.cache import CachedRunner, SlotCache
from agentrl.engine.local.runner import Chunk, Ints, Work
from agentrl.models.load import embeddings
from agentrl.models.routing import Routing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = {"full_attention", "sliding_attention"}


class _SlotView(Cache):
    """A `SlotCache` as transformers' cache for one call of the module.

    rows: [R], the slot of each row of the batch. columns: [R, Q], the column of each query. width: number of columns
    that are returned; the attention mask selects among them.
    """

    def __init__(self, slots: SlotCache, rows: Tensor, columns: Tensor, width: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.slots, self.rows, self.columns, self.width = slots, rows, columns, width

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object) -> Any:
        keys, values = self.slots.layer(layer_idx, key_states[:, :, 0], value_states[:, :, 0])
        keys[self.rows[:, None], :, self.columns] = key_states.transpose(1, 2)
        values[self.rows[:, None], :, self.columns] = value_states.transpose(1, 2)
        return (
            keys[:, :, : self.width].index_select(0, self.rows),
            values[:, :, : self.width].index_select(0, self.rows),
        )

    def get_seq_length(self, *_: object, **__: object) -> int:
        return self.width - self.columns.shape[1]

    def get_mask_sizes(self, *_: object, **__: object) -> tuple[int, int]:
        return self.width, 0


@contextmanager
def evaluating(model: "PreTrainedModel") -> Iterator[None]:
    """Put the module into evaluation mode, without dropout and gradients, and restore its mode afterwards."""
    training = model.training
    if training:
        model.eval()
    try:
        with torch.no_grad():  # not inference_mode: a module may keep tensors, which the trainer uses later
            yield
    finally:
        if training:
            model.train()


class ModuleRunner(CachedRunner):
    """A `Runner` that calls the module once for a step's rows and once for its chunks, padded to the longest.

    routing: records which experts are chosen; None: it is not asked for.
    """

    def __init__(self, model: "PreTrainedModel", routing: Routing | None = None) -> None:
        super().__init__()
        self.model, self.routing = model, routing
        weight = embeddings(model)
        self.device, self.dtype = weight.device, weight.dtype
        config = model.config.get_text_config()
        self._kinds = set(getattr(config, "layer_types", None) or ())
        self._window = getattr(config, "sliding_window", None)
        self._keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.token_bytes = 0  # set after the first step

    def refresh(self) -> None:
        """Do nothing: nothing is derived from the weights."""

    def unsupported(self) -> str | None:
        """Why the module cannot use a slot cache, judged by its signature and configuration; None if it can."""
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            return "its forward takes no position_ids"
        if not self._kinds <= KINDS:
            return f"it has layers of kind {', '.join(sorted(self._kinds - KINDS))}"
        return None

    def forward(self, work: Work) -> Tensor:
        parts = []
        with evaluating(self.model):
            if len(work.ids):
                columns = np.where(work.active, work.positions, self.cache.columns)
                rows = np.arange(len(work.ids))
                one = np.ones(len(work.ids), np.int64)
                parts.append(self._call(work.ids[:, None], work.positions[:, None], columns[:, None], rows, one))
            if work.chunks:
                parts.append(self._chunks(work.chunks))
            if not self.token_bytes:
                cache = self.cache
                buffers = [b for b in (*cache.keys, *cache.values, *cache.experts) if b is not None]
                self.token_bytes = sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)
            return torch.cat(parts)

    def _chunks(self, chunks: tuple[Chunk, ...]) -> Tensor:
        lengths = np.array([len(c.ids) for c in chunks], np.int64)
        inside = np.arange(lengths.max()) < lengths[:, None]
        positions = np.array([c.start for c in chunks], np.int64)[:, None] + np.arange(lengths.max())
        ids = np.zeros_like(positions)
        ids[inside] = np.concatenate([c.ids for c in chunks])
        columns = np.where(inside, positions, self.cache.columns)
        return self._call(ids, np.where(inside, positions, 0), columns, np.array([c.slot for c in chunks]), lengths)

    def _call(self, ids: Ints, positions: Ints, columns: Ints, rows: Ints, lengths: Ints) -> Tensor:
        """The logits after the first lengths[r] tokens of each row, float32 [R, vocab].

        ids, positions, columns: [R, Q]. rows: [R], the slot of each row.
        """
        width = int(positions.max()) + 1
        view = _SlotView(self.cache, self._tensor(rows), self._tensor(columns), width)
        return self._logits(view, ids, positions, rows, lengths, self._masks(positions, width))

    def _logits(self, view: Any, ids: Ints, positions: Ints, rows: Ints, lengths: Ints, mask: Any) -> Tensor:
        """See `_call`. mask: of the attention."""
        last, where = np.unique(lengths - 1, return_inverse=True)
        kept = {"logits_to_keep": self._tensor(last)} if self._keep else {}
        with self._recorded(view):
            out = self.model(
                input_ids=self._tensor(ids),
                attention_mask=mask,
                position_ids=self._tensor(positions),
                past_key_values=view,
                use_cache=True,
                **kept,
            )
        where = where if self._keep else lengths - 1
        logits: Tensor = out.logits[torch.arange(len(rows), device=self.device), self._tensor(where)].float()
        return logits

    @contextmanager
    def _recorded(self, view: Any) -> Iterator[None]:
        """Store what the routers choose in the block for the queries of a call, where that is asked for."""
        if self.routing is None:
            yield
            return
        with self.routing.recording() as chosen:
            yield
        self._keep_experts(torch.cat([c for c in chosen if c is not None], dim=-1), view)

    def _keep_experts(self, chosen: Tensor, view: _SlotView) -> None:
        """Store what the routers chose for the queries of a call, [R * Q, layers * experts a token]."""
        cache, buffers = self.cache, self.cache.experts
        if (buffer := buffers[0]) is None:
            size = (cache.slots, 1, cache.columns + 1, chosen.shape[-1])
            buffer = buffers[0] = torch.zeros(size, dtype=torch.int16, device=self.device)
        buffer[view.rows[:, None], 0, view.columns] = chosen.view(*view.columns.shape, -1).to(torch.int16)

    def experts(self, slot: int, tokens: int) -> npt.NDArray[np.int16] | None:
        if self.routing is None or (buffer := self.cache.experts[0]) is None:
            return None
        found: npt.NDArray[np.int16] = buffer[slot, 0, :tokens].cpu().numpy()
        return found.reshape(tokens, self.routing.layers, -1)

    def _masks(self, positions: Ints, width: int) -> Any:
        """The additive mask, [R, 1, Q, width], or a dictionary with one for each kind of layer."""
        if len(self._kinds) > 1:
            windows = {"full_attention": None, "sliding_attention": self._window}
            return {kind: self._mask(positions, width, windows[kind]) for kind in self._kinds}
        return self._mask(positions, width, None if self._kinds == {"full_attention"} else self._window)

    def _mask(self, positions: Ints, width: int, window: int | None) -> Tensor:
        back = positions[:, None, :, None] - np.arange(width)
        hidden = back < 0 if window is None else (back < 0) | (back >= window)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(self._tensor(hidden), torch.finfo(self.dtype).min)

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)
