"""How images become pixels and placeholders: a model's own image processor, without torch and torchvision."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError, contained, describe
from agentrl.images import MAX_TOKENS, STORE, ImageError, ImageLimits, ImageSize, Recent
from agentrl.models.image_families import Family, Grid, Pixels, family_of
from agentrl.recipe.schema import Recipe

T = TypeVar("T")
_KEPT = 512 << 20  # bytes of pixels
_SIZES = ("patch_size", "merge_size", "size", "min_pixels", "max_pixels", "pooling_kernel_size", "max_soft_tokens")
"""What the number of features depends on, by the names of image processors."""


@dataclass(eq=False)
class ImageInput:
    """How a model's images become pixels and placeholders: its image processor and the id of the placeholder."""

    processor: Any
    """The image processor of transformers."""
    placeholder: int
    """The id that stands for a feature."""
    family: Family
    """How models of its type see."""
    ends: tuple[list[int], list[int]] = ([], [])
    """The ids before and after an image's placeholders that its chat template does not write."""

    def __post_init__(self) -> None:
        self._pixels: Recent[tuple[Pixels, Grid]] = Recent(_KEPT)
        self._grids: dict[str, Grid] = {}
        self._tokens: dict[ImageSize, int] = {}

    def pixels(self, key: str) -> tuple[Pixels, Grid]:
        """The patches [n, D] of a stored image, float32, and its grid (time, height, width). Raises ImageError:
        the processor does not take it."""
        if (made := self._pixels.get(key)) is None:
            made = self._processed(STORE.load(key))
            self._pixels.put(key, made, made[0].nbytes)
            self._grids[key] = made[1]
        return made

    def raw(self, key: str) -> tuple[npt.NDArray[np.uint8], Grid]:
        """The patches [n, D] of a stored image before they are scaled and normalized, and its grid."""
        made = self.processor(images=[STORE.load(key)], do_rescale=False, do_normalize=False, return_tensors="np")
        patches, grid = self.family.patches(made)
        return patches.astype(np.uint8), grid

    def _processed(self, image: object) -> tuple[Pixels, Grid]:
        return self.family.patches(_understood(lambda: self.processor(images=[image], return_tensors="np")))

    def grid(self, key: str) -> Grid:
        """The grid of an image. Raises ImageError: it makes too many tokens, or the processor does not take
        it."""
        grid = self._grids.get(key) or self.pixels(key)[1]
        if self.tokens(grid) > MAX_TOKENS:
            raise ImageError(f"it makes {self.tokens(grid)} tokens; at most {MAX_TOKENS} are allowed")
        return grid

    def tokens(self, grid: Grid) -> int:
        """The number of placeholders of an image."""
        return int(np.prod(self.cells(grid)))

    def cells(self, grid: Grid) -> Grid:
        """The features of an image in time, height and width."""
        return self.family.cells(self.processor, grid)

    def tokens_of(self, size: ImageSize) -> int:
        """The number of placeholders of an image of this size, which need not be decoded. Raises ImageError: the
        processor takes none of this shape."""
        from PIL import Image

        if size not in self._tokens:
            count = _understood(lambda: self.family.count(self.processor, size.width, size.height))
            self._tokens[size] = self.tokens(self._processed(Image.new("RGB", size))[1]) if count is None else count
        return self._tokens[size]


def _understood(work: Callable[[], T]) -> T:
    """What an image processor makes of an image. Raises ImageError: it does not take it, as one of 1 x 1000
    pixels."""
    try:
        return work()
    except BaseException as error:  # the boundary to code that a model may bring
        why = describe(contained(error), place=False)
        raise ImageError(f"the model's image processor does not take it: {why}") from error


def image_input(path: str, trust_remote_code: bool = False) -> ImageInput | None:
    """How a model takes images; None: it takes none. path: of its folder or on the hub. Raises UserError: it
    sees, and its type is not known."""
    from transformers import AutoImageProcessor, PretrainedConfig

    config = PretrainedConfig.get_config_dict(path)[0]
    family = family_of(config, path)
    if family is None:
        return None
    processor = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=trust_remote_code)
    return ImageInput(processor, config["image_token_id"], family, family.ends(config))


def limit_images(recipe: Recipe) -> None:
    """Take in, from now on, no image that the recipe does not allow."""
    STORE.limits = ImageLimits(recipe.rollout.max_image_pixels, recipe.rollout.max_image_bytes)


def check_sight(recipe: Recipe) -> None:
    """Raise UserError for what a model that sees cannot be trained with."""
    teachers = [teacher for teacher in recipe.part_teachers if teacher is not None]
    if any(teacher.served for teacher in teachers):
        raise UserError("teacher.path: a server is not yet sent images: name a model to load here")
    if recipe.algorithm.routing_replay and recipe.engine.name != "local":
        raise UserError("algorithm.routing_replay: of a model that sees only the engine local records experts")


def check_alike(ours: ImageInput, theirs: ImageInput | None, name: str) -> None:
    """Raise UserError: a further model, whose input `theirs` is, does not make as many features of an image as the
    policy does. name: of the recipe's key and the model."""
    if theirs is None:
        raise UserError(f"{name} reads text alone, and the policy sees: name a model that does")
    differ = [key for key in _SIZES if getattr(ours.processor, key, None) != getattr(theirs.processor, key, None)]
    if differ:
        raise UserError(
            f"{name} cuts images in another way than the policy: its image processor has another {differ[0]}"
        )
