"""What a model that sees needs besides text: pixels, features in the place of placeholders, positions in three axes.

Qwen3-VL of transformers. Its vision tower and its text model are called apart, so that each image is computed once,
wherever it stands, and that a token which is sampled is text, also where it is the placeholder's.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl.images import STORE, Ints, runs
from agentrl.models.image_input import ImageInput

_KEPT = 512  # images whose features are kept


class Features(NamedTuple):
    """Of n placeholders in a row of ids."""

    where: Tensor
    """bool [P]: which ids are placeholders."""
    embeddings: Tensor
    """[n, D]: what stands in place of their embeddings."""
    deep: Sequence[Tensor]
    """[n, D] for each of the first layers: what is added to their hidden states behind it."""


class Vision:
    """Images for one model. keep: features are those of weights that do not change until `refresh`, without gradients,
    and are computed once an image; else with gradients, once a call, unless no parameter of the tower has any."""

    def __init__(self, model: Any, keep: bool = False) -> None:
        self.model, self.base = model, model.model
        self.input: ImageInput = model.image_input
        self._keep = keep
        self._known: OrderedDict[str, tuple[Tensor, tuple[Tensor, ...]]] = OrderedDict()

    @staticmethod
    def of(model: Any) -> bool:
        """Return whether a model sees."""
        return getattr(model, "image_input", None) is not None

    @property
    def frozen(self) -> bool:
        """Whether the vision tower is not trained."""
        return not any(p.requires_grad for p in self.base.visual.parameters())

    def refresh(self) -> None:
        """Drop what was computed with weights that have changed."""
        self._known.clear()

    def features(self, ids: Ints) -> Features | None:
        """Return the features of keyed ids [P]; None: there is no image in them. A cut image gives its part."""
        found = runs(ids)
        if not found:
            return None
        keep = self._keep or self.frozen
        known = self._computed(list(dict.fromkeys(run.key for run in found)), keep)
        parts = [slice(run.first, run.first + run.end - run.start) for run in found]
        embeddings = torch.cat([known[run.key][0][part] for run, part in zip(found, parts, strict=True)])
        layers = range(len(known[found[0].key][1]))
        deep = [
            torch.cat([known[run.key][1][layer][part] for run, part in zip(found, parts, strict=True)])
            for layer in layers
        ]
        return Features(torch.from_numpy(ids < 0).to(embeddings.device), embeddings, deep)

    def _computed(self, keys: Sequence[str], keep: bool) -> "dict[str, tuple[Tensor, tuple[Tensor, ...]]]":
        missing = [key for key in keys if not (keep and key in self._known)]
        new: dict[str, tuple[Tensor, tuple[Tensor, ...]]] = {}
        if missing:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not keep):
                new = dict(zip(missing, self._encode(missing), strict=True))
        if keep:
            self._known |= new
        found = {key: self._known[key] if keep else new[key] for key in keys}
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    def _encode(self, keys: Sequence[str]) -> "list[tuple[Tensor, tuple[Tensor, ...]]]":
        """Return of each image its embeddings [n, D] and those of the deeper layers."""
        given = [self.input.pixels(STORE.of_key(key)) for key in keys]
        device = self.base.visual.device
        pixels = torch.cat([torch.from_numpy(pixels) for pixels, _ in given]).to(device)
        grids = torch.tensor([grid for _, grid in given], device=device)
        made = self.base.get_image_features(pixels, grids, return_dict=True)
        return [
            (embeddings, tuple(layer[i] for layer in made.deepstack_features))
            for i, embeddings in enumerate(made.pooler_output)
        ]

    def embedded(self, ids: Ints) -> dict[str, Any]:
        """Return the arguments of the text model that say keyed ids [P], as a batch of one row."""
        device = self.base.language_model.embed_tokens.weight.device
        text = torch.from_numpy(np.where(ids < 0, self.input.placeholder, ids)).to(device)
        embeddings = self.base.language_model.embed_tokens(text)
        features = self.features(ids)
        if features is None:
            return {"inputs_embeds": embeddings[None]}
        embeddings = embeddings.index_put((features.where.nonzero()[:, 0],), features.embeddings.to(embeddings.dtype))
        return {
            "inputs_embeds": embeddings[None],
            "visual_pos_masks": features.where[None],
            "deepstack_visual_embeds": list(features.deep),
        }

    def positions(self, ids: Ints) -> Ints:
        """Return the positions in time, height and width of a sequence of keyed ids from its beginning, int64 [3, P];
        its last image may be cut."""
        merge = int(self.input.processor.merge_size)
        steps = np.ones(len(ids), np.int64)
        places: list[tuple[slice, Ints, int]] = []
        for run in runs(ids):
            time, height, width = self.input.grid(STORE.of_key(run.key))
            height, width = height // merge, width // merge
            axes = np.stack(np.unravel_index(np.arange(time * height * width), (time, height, width)))
            here = slice(run.start, run.end)
            steps[here] = 0
            if run.end - run.start == axes.shape[1]:
                steps[run.end - 1] = max(height, width)
            places.append((here, axes[:, : run.end - run.start], run.start))
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])
        found = np.repeat(begins[None, :-1], 3, axis=0)
        for here, axes, start in places:
            found[:, here] = begins[start] + axes
        return found

    def logits(self, ids: Ints) -> Tensor:
        """Return the logits [P, V] of a sequence of keyed ids, with the unchanged text model."""
        positions = torch.from_numpy(self.positions(ids)).to(self.model.device)[:, None]
        states = self.base.language_model(position_ids=positions, use_cache=False, **self.embedded(ids))
        logits: Tensor = self.model.lm_head(states.last_hidden_state[0])
        return logits
