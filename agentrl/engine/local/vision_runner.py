"""`VisionRunner`: a model that sees, with features in the place of placeholders, and positions of its own."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from agentrl.engine.local.module_runner import ModuleRunner, evaluating
from agentrl.engine.local.recompute_runner import RecomputeRunner
from agentrl.engine.local.runner import Chunk, Ints, Work
from agentrl.models.routing import Routing
from agentrl.models.vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class VisionRunner(ModuleRunner):
    """A `Runner` whose ids may be negative, as `agentrl.images.keyed` makes them. Features are computed once an image.

    Invariant: `ahead` of a slot is how much further than its index the position of its next token is; images take fewer
    positions than tokens.
    """

    def __init__(self, model: "PreTrainedModel", routing: Routing | None = None) -> None:
        super().__init__(model, routing)
        self.vision = Vision(model, keep=True)
        self.ids: Ints = np.zeros((0, 0), np.int64)
        self.ahead: Ints = np.zeros(0, np.int64)
        self._axes: Ints | None = None  # of the chunks that are computed now, [axes, R, Q]

    def resize(self, slots: int, columns: int) -> None:
        super().resize(slots, columns)
        s, c = min(slots, self.ids.shape[0]), min(columns, self.ids.shape[1])
        ids, ahead = np.zeros((slots, columns), np.int64), np.zeros(slots, np.int64)
        ids[:s, :c], ahead[:s] = self.ids[:s, :c], self.ahead[:s]
        self.ids, self.ahead = ids, ahead

    def unsupported(self) -> str | None:
        if self.vision.input.family.looks_ahead(self.vision.base):
            return "tokens of an image attend to those behind them"
        return super().unsupported()

    def copy(self, source: list[int], target: list[int], columns: int) -> None:
        super().copy(source, target, columns)
        self.ids[target, :columns] = self.ids[source, :columns]
        self.ahead[target] = self.ahead[source]

    def refresh(self) -> None:
        self.vision.refresh()

    def forward(self, work: Work) -> Tensor:
        rows = np.flatnonzero(work.active)
        self.ids[rows, work.positions[rows]] = work.ids[rows]
        for c in work.chunks:
            self.ids[c.slot, c.start : c.start + len(c.ids)] = c.ids
        return super().forward(work)

    def _chunks(self, chunks: tuple[Chunk, ...]) -> Tensor:
        self._axes = np.zeros((self.vision.input.family.axes, len(chunks), max(len(c.ids) for c in chunks)), np.int64)
        for row, c in enumerate(chunks):
            end = c.start + len(c.ids)
            axes = self.vision.positions(self.ids[c.slot, :end])
            self._axes[:, row, : len(c.ids)] = axes[:, c.start :]
            self.ahead[c.slot] = int(axes[:, -1].max()) + 1 - end
        try:
            return super()._chunks(chunks)
        finally:
            self._axes = None

    def _logits(self, view: Cache, ids: Ints, positions: Ints, rows: Ints, lengths: Ints, mask: Any) -> Tensor:
        axes = self._axes
        if axes is None:
            axes = np.tile(positions + self.ahead[rows, None], (self.vision.input.family.axes, 1, 1))
        embedded = self.vision.embedded(ids)
        with self._recorded(view):
            states = self.vision.base.language_model(
                attention_mask=mask,
                position_ids=self.vision.position_ids(axes),
                past_key_values=view,
                use_cache=True,
                **embedded,
            ).last_hidden_state
        last = states[torch.arange(len(rows), device=self.device), self._tensor(lengths - 1)]
        return self.vision.head(last).float()


class VisionRecomputeRunner(RecomputeRunner):
    """The same by computing whole sequences again for every token, for models whose tokens of an image attend to each
    other, and those whose cache is not known."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__(model)
        self.vision = Vision(model, keep=True)

    def refresh(self) -> None:
        self.vision.refresh()

    def _last(self, slots: Ints, lengths: Ints) -> Tensor:
        with evaluating(self.model):
            found = [
                self.vision.logits(self.ids[slot, :length])[-1]
                for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True)
            ]
        return torch.stack(found).float()
