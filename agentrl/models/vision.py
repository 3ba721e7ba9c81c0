"""What a model that sees needs besides text: pixels, features in the place of placeholders, positions in three axes.

The vision tower and the text model of transformers are called apart, so that each image is computed once, wherever it
stands, and that a token which is sampled is text, also where it is the placeholder's.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl.images import STORE, Ints, Recent, runs
from agentrl.models.image_input import ImageInput

_KEPT = 512 << 20  # bytes of features
_Made = tuple[Tensor, tuple[Tensor, ...]]  # of an image its embeddings [n, D], and those of the deeper layers


class Features(NamedTuple):
    """Of n placeholders in a row of ids."""

    embeddings: Tensor
    """[n, D]: what stands in place of their embeddings."""
    deep: Sequence[Tensor]
    """[n, D] for each of the first layers: what is added to their hidden states behind it."""


class Vision:
    """Images for one model. keep: features are those of weights that do not change until `refresh`, without gradients,
    and are computed once an image; else with gradients, once a call, unless no parameter of the tower has any.

    max_over_ranks: returns the maximum of a count over the ranks that share the model's shards (None: one process).
    Where any of them computes features all do, of a blank picture if need be, so that their collectives match.
    """

    def __init__(self, model: Any, keep: bool = False, max_over_ranks: Callable[[int], int] | None = None) -> None:
        self.model, self.base = model, model.model
        self.input: ImageInput = model.image_input
        self._keep, self._max_over_ranks = keep, max_over_ranks
        self._known: Recent[_Made] = Recent(_KEPT)

    @staticmethod
    def of(model: Any) -> bool:
        """Whether a model sees."""
        return getattr(model, "image_input", None) is not None

    @property
    def frozen(self) -> bool:
        """Whether the vision tower is not trained."""
        return not any(p.requires_grad for tower in towers(self.model) for p in tower.parameters())

    def refresh(self) -> None:
        """Drop what was computed with weights that have changed."""
        self._known.clear()

    def features(self, ids: Ints) -> Features | None:
        """The features of keyed ids [P]; None: there is no image in them. A cut image gives its part."""
        found = runs(ids)
        keep = self._keep or self.frozen
        known = self._computed(list(dict.fromkeys(run.key for run in found)), keep)
        shown = [(known[run.key], slice(run.first, run.first + run.end - run.start)) for run in found]
        if not found:  # nothing of a blank picture, which gives the tower gradients of 0
            shown = [(blank, slice(0)) for blank in known.values()]
        if not shown:
            return None
        embeddings = torch.cat([features[part] for (features, _), part in shown])
        deep = [torch.cat([made[1][layer][part] for made, part in shown]) for layer in range(len(shown[0][0][1]))]
        return Features(embeddings, deep)

    def _computed(self, keys: Sequence[str], keep: bool) -> dict[str, _Made]:
        found = {key: made for key in keys if keep and (made := self._known.get(key)) is not None}
        missing = [key for key in keys if key not in found]
        if self._max_over_ranks is not None and self._max_over_ranks(len(missing)) and not missing:
            missing = [_blank()]
            keys = [*keys, *missing]
        if missing:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not keep):
                new = dict(zip(missing, self._encode(missing), strict=True))
            if keep and len(new) > 1:  # parts of one tensor would keep all of it
                new = {key: (one.clone(), tuple(layer.clone() for layer in deep)) for key, (one, deep) in new.items()}
            for key, (one, deep) in new.items() if keep else ():
                self._known.put(key, (one, deep), one.nbytes + sum(layer.nbytes for layer in deep))
            found |= new
        return {key: found[key] for key in keys}

    def _encode(self, keys: Sequence[str]) -> list[_Made]:
        return self.input.family.encode(self.base, [self.input.pixels(STORE.of_key(key)) for key in keys])

    def embedded(self, ids: Ints) -> dict[str, Any]:
        """The arguments of the text model that say keyed ids [R, Q]."""
        device = self.base.language_model.embed_tokens.weight.device
        text = torch.from_numpy(np.where(ids < 0, self.input.placeholder, ids)).to(device)
        images = torch.from_numpy(ids < 0).to(device)
        embeddings = self.base.language_model.embed_tokens(text)
        deep: Sequence[Tensor] = ()
        if (features := self.features(ids.reshape(-1))) is not None:
            where = images.view(-1).nonzero()[:, 0]
            flat = embeddings.flatten(0, 1).index_put((where,), features.embeddings.to(embeddings.dtype))
            embeddings, deep = flat.view_as(embeddings), features.deep
        return {"inputs_embeds": embeddings, **self.input.family.arguments(self.base, text, images, deep)}

    def positions(self, ids: Ints) -> Ints:
        """The positions of a sequence of keyed ids from its beginning, int64 [axes, P]; its last image may be
        cut."""
        if self.input.family.axes == 1:
            return np.arange(len(ids), dtype=np.int64)[None]
        steps = np.ones(len(ids), np.int64)
        places: list[tuple[slice, Ints, int]] = []
        for run in runs(ids):
            cells = self.input.cells(self.input.grid(STORE.of_key(run.key)))
            axes = np.stack(np.unravel_index(np.arange(np.prod(cells)), cells))
            here = slice(run.start, run.end)
            steps[here] = 0
            if run.end - run.start == axes.shape[1]:
                steps[run.end - 1] = max(cells[1:])
            places.append((here, axes[:, : run.end - run.start], run.start))
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])
        found = np.repeat(begins[None, :-1], 3, axis=0)
        for here, axes, start in places:
            found[:, here] = begins[start] + axes
        return found

    def position_ids(self, positions: Ints) -> Tensor:
        """The argument `position_ids` of the text model, of positions [axes, R, Q]."""
        found = torch.from_numpy(positions).to(self.model.device)
        return found if len(found) > 1 else found[0]

    def states(self, ids: Ints) -> Tensor:
        """The hidden states [P, D] of a sequence of keyed ids, with the unchanged text model."""
        said = self.embedded(ids[None])
        mask = self.input.family.mask(self.base, said["inputs_embeds"], torch.from_numpy(ids[None] < 0))
        positions = self.position_ids(self.positions(ids)[:, None])
        made = self.base.language_model(position_ids=positions, attention_mask=mask, use_cache=False, **said)
        states: Tensor = made.last_hidden_state[0]
        return states

    def logits(self, ids: Ints) -> Tensor:
        """The logits [P, V] of a sequence of keyed ids, with the unchanged text model."""
        return self.head(self.states(ids))

    def head(self, states: Tensor) -> Tensor:
        """The logits of hidden states [..., D]."""
        logits: Tensor = self.model.lm_head(states)
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _blank() -> str:
    """The hash of a picture without content."""
    from PIL import Image

    return STORE.put(Image.new("RGB", (32, 32)))


def towers(model: Any) -> list[Any]:
    """The modules of a model which make features of pixels; none where it reads text."""
    return [getattr(model.model, name) for name in model.image_input.family.towers] if Vision.of(model) else []
