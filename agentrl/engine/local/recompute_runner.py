"""`RecomputeRunner`: any causal language model, by computing the whole sequence again for every token.

For architectures whose state is not keys and values by position (state-space and linear-attention layers, hybrids).
Exact but slow: a slot holds only the ids.
"""

import inspect
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agentrl.engine.local.module_runner import evaluating
from agentrl.engine.local.runner import Ints, Work
from agentrl.models.load import embeddings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_AT_ONCE = 8192  # maximum tokens, with padding, of one call of the module


class RecomputeRunner:
    """A `Runner` without a cache. Rows are padded on the right, where padding does not affect a causal model."""

    token_bytes = 8
    batch_invariant = False
    any_slots = False

    def __init__(self, model: "PreTrainedModel") -> None:
        self.model = model
        self.ids: Ints = np.zeros((0, 0), np.int64)
        self.device = embeddings(model).device
        self._keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def slots(self) -> int:
        return len(self.ids)

    @property
    def columns(self) -> int:
        return int(self.ids.shape[1])

    def resize(self, slots: int, columns: int) -> None:
        ids = np.zeros((slots, columns), np.int64)
        s, c = min(slots, self.slots), min(columns, self.columns)
        ids[:s, :c] = self.ids[:s, :c]
        self.ids = ids

    def copy(self, source: list[int], target: list[int], columns: int) -> None:
        self.ids[target, :columns] = self.ids[source, :columns]

    def share(self, processes: int) -> None:
        """Do nothing: the ids take little memory."""

    def clear(self) -> None:
        """Do nothing: the ids take little memory."""

    def experts(self, slot: int, tokens: int) -> None:
        """None: nothing is recorded."""

    def refresh(self) -> None:
        """Do nothing: nothing is derived from the weights."""

    def forward(self, work: Work) -> Tensor:
        n = len(work.ids)
        rows = np.flatnonzero(work.active)
        self.ids[rows, work.positions[rows]] = work.ids[rows]
        for c in work.chunks:
            self.ids[c.slot, c.start : c.start + len(c.ids)] = c.ids
        slots = np.concatenate([rows, np.array([c.slot for c in work.chunks], np.int64)])
        ends = np.array([c.start + len(c.ids) for c in work.chunks], np.int64)
        lengths = np.concatenate([work.positions[rows] + 1, ends])
        place = np.concatenate([rows, n + np.arange(len(work.chunks))])
        at_once = max(1, TOKENS_AT_ONCE // int(lengths.max()))
        order = np.argsort(lengths, kind="stable")
        parts = [self._last(slots[o], lengths[o]) for o in np.split(order, range(at_once, len(order), at_once))]
        logits = parts[0].new_zeros(n + len(work.chunks), parts[0].shape[-1])
        logits[torch.from_numpy(place[order]).to(self.device)] = torch.cat(parts)
        return logits

    def _last(self, slots: Ints, lengths: Ints) -> Tensor:
        """The logits after the first lengths[r] ids of slots[r], float32 [R, vocab]."""
        ids = torch.from_numpy(self.ids[slots, : int(lengths.max())]).to(self.device)
        last, where = np.unique(lengths - 1, return_inverse=True)
        kept = {"logits_to_keep": torch.from_numpy(last).to(self.device)} if self._keep else {}
        with evaluating(self.model):
            logits = self.model(input_ids=ids, use_cache=False, **kept).logits
            where = where if self._keep else lengths - 1
            rows = torch.arange(len(slots), device=self.device)
            picked: Tensor = logits[rows, torch.from_numpy(where).to(self.device)].float()
        return picked
