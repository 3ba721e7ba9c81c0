"""`Pictures`: prompts with images, as servers are given them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from agentrl.engine.base import EngineError
from agentrl.errors import UserError
from agentrl.images import STORE, ImageSpan, Recent, runs
from agentrl.models.image_families import QwenVL
from agentrl.models.image_input import ImageInput

_KEPT_BYTES = 256 << 20


class Pictured(NamedTuple):
    """A prompt whose images are named apart."""

    ids: list[int]
    """The prompt, with placeholders."""
    spans: list[ImageSpan]
    """Its images, in order; none of their places lies in another."""


class Pictures:
    """Images for the servers of one model: each is encoded once, as long as there is room for what was made. Raises
    UserError for a model that no server was proven to see with: another than Qwen2-VL to Qwen3-VL."""

    def __init__(self, image_input: ImageInput) -> None:
        if type(image_input.family) is not QwenVL:
            raise UserError(
                f"engine: servers are not given the images of a {type(image_input.family).__name__} model "
                f"({type(image_input.processor).__name__}) yet, those of Qwen2-VL to Qwen3-VL only: use "
                "engine.name=local"
            )
        self.input = image_input
        self._made: Recent[str] = Recent(_KEPT_BYTES)

    def read(self, keyed: Sequence[int]) -> Pictured:
        """Tell the images of keyed ids from their text. Raises EngineError: one of them is cut."""
        ids = np.array(keyed, np.int64)
        spans = []
        for run in runs(ids):
            key = STORE.of_key(run.key)
            grid = self.input.grid(key)
            if run.first or run.end - run.start != self.input.tokens(grid):
                raise EngineError(f"the prompt holds image {key[:12]} only in part")
            spans.append(ImageSpan(run.start, run.end - run.start, grid, key))
        return Pictured(np.where(ids < 0, self.input.placeholder, ids).tolist(), spans)

    def encoded(self, form: str, key: str, encode: Callable[[str], str]) -> str:
        """What `encode` makes of the image `key`. form: names what that is."""
        if (made := self._made.get((form, key))) is None:
            made = encode(key)
            self._made.put((form, key), made, len(made))
        return made
