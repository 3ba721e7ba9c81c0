"""How images become pixels and placeholders: a model's own image processor, without torch and torchvision."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError
from agentrl.images import MAX_TOKENS, STORE
from agentrl.recipe.schema import Recipe

FAMILIES = ("qwen3_vl",)
"""Model types whose positions and features are known."""
_KEPT = 512  # images whose pixels are kept


@dataclass(eq=False)
class ImageInput:
    """How a model's images become pixels and placeholders: its image processor and the id of the placeholder."""

    processor: Any
    """The image processor of transformers."""
    placeholder: int
    """The id that stands for a feature."""

    def __post_init__(self) -> None:
        self._pixels: OrderedDict[str, tuple[npt.NDArray[np.float32], tuple[int, int, int]]] = OrderedDict()

    def pixels(self, key: str) -> tuple[npt.NDArray[np.float32], tuple[int, int, int]]:
        """Return the patches [n, D] of a stored image, float32, and its grid (time, height, width)."""
        if key not in self._pixels:
            made = self.processor(images=[STORE.load(key)], return_tensors="np")
            grid = tuple(made["image_grid_thw"][0].tolist())
            self._pixels[key] = made["pixel_values"].astype(np.float32), grid
            while len(self._pixels) > _KEPT:
                self._pixels.popitem(last=False)
        self._pixels.move_to_end(key)
        return self._pixels[key]

    def grid(self, key: str) -> tuple[int, int, int]:
        """Return the grid of an image. Raises UserError: it makes too many tokens."""
        grid = self.pixels(key)[1]
        if self.tokens(grid) > MAX_TOKENS:
            raise UserError(f"an image of {self.tokens(grid)} tokens; at most {MAX_TOKENS} are allowed")
        return grid

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Return the number of placeholders of an image."""
        return int(np.prod(grid)) // int(self.processor.merge_size) ** 2


def image_input(path: str, trust_remote_code: bool = False) -> ImageInput | None:
    """Return how a model takes images; None: it takes none. path: of its folder or on the hub."""
    from transformers import AutoImageProcessor, PretrainedConfig

    config = PretrainedConfig.get_config_dict(path)[0]
    if config.get("model_type") not in FAMILIES:
        return None
    processor = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=trust_remote_code)
    return ImageInput(processor, config["image_token_id"])


def check_sight(recipe: Recipe) -> None:
    """Raise UserError for what a model that sees cannot be trained with."""
    section = recipe.model
    refused = {
        "cluster": recipe.cluster.used,
        "critic": recipe.critic is not None,
        "rewards.model": recipe.rewards.model is not None,
        "model.lora": section.lora is not None,
        "model.checkpointing": section.checkpointing,
        "agent": recipe.agent is not None,
    }
    if wrong := [key for key, there in refused.items() if there]:
        raise UserError(
            f"{wrong[0]}: not yet for a model that sees ({section.path}): leave it out, or take a model that reads text"
        )
