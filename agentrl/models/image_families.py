"""What differs between models that see, by their model type: pixels, placeholders, features, positions.

A further model type is a further entry of `FAMILIES`. Nothing here imports torch before a model is at hand.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput

Pixels = npt.NDArray[np.float32]
Grid = tuple[int, int, int]


class Processor(Protocol):
    """An image processor of transformers; those of each type have some of these."""

    merge_size: int
    pooling_kernel_size: int

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, object], /) -> int:
        """Patches of an image of this size in pixels."""


class ImageFeatures(Protocol):
    """What a tower makes of images."""

    pooler_output: "Iterable[Tensor]"
    """The features [n, D] of each."""


class TextModel(Protocol):
    """The part of a model that reads text."""

    embed_tokens: "nn.Embedding"

    def get_per_layer_inputs(self, ids: "Tensor", /) -> "Tensor":
        """Embeddings for each layer."""

    def __call__(self, **arguments: object) -> "BaseModelOutput":
        """The hidden states."""


class Base(Protocol):
    """A model that sees before its output layer, as transformers has it; those of each type have some of these."""

    config: "PretrainedConfig"
    language_model: TextModel
    visual: "PreTrainedModel"
    vision_tower: "PreTrainedModel"

    def get_image_features(self, pixels: "Tensor", places: "Tensor", /, *, return_dict: bool) -> ImageFeatures:
        """What the tower makes of patches."""


class Family(Protocol):
    """How models of a type see."""

    towers: tuple[str, ...]
    """The modules of the base that make features of pixels."""
    axes: int
    """Positions of a token: 3 (time, height, width), or 1, where tokens of images are counted like those of text."""

    def patches(self, made: Mapping[str, npt.NDArray[np.number]]) -> tuple[Pixels, Grid]:
        """The patches [n, D] of one image, and its grid. made: what the image processor returned for it."""
        ...

    def cells(self, processor: Processor, grid: Grid) -> Grid:
        """The features of an image in time, height and width; each takes a placeholder."""
        ...

    def count(self, processor: Processor, width: int, height: int) -> int | None:
        """The number of features of an image of this size in pixels; None: only processing one says it."""
        ...

    def ends(self, config: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """The ids before and after an image's placeholders that its template does not write."""
        ...

    def encode(self, base: Base, given: Sequence[tuple[Pixels, Grid]]) -> "list[tuple[Tensor, tuple[Tensor, ...]]]":
        """Of each image its features [n, D], and those that are added behind the first layers."""
        ...

    def arguments(self, base: Base, text: "Tensor", images: "Tensor", deep: "Sequence[Tensor]") -> dict[str, object]:
        """Further arguments of the text model. text: ids int64 [R, Q]. images: bool [R, Q], which of them are
        placeholders. deep: see `encode`, those of all of them."""
        ...

    def mask(self, base: Base, embeddings: "Tensor", images: "Tensor") -> object:
        """The attention mask of whole sequences, whose embeddings are [R, Q, D]; None: that of text."""
        ...

    def looks_ahead(self, base: Base) -> bool:
        """Whether tokens of an image attend to later ones, so that no keys and values can be kept."""
        ...


class QwenVL:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL and its mixtures: positions in three axes, patches merged to features."""

    towers: tuple[str, ...] = ("visual",)
    axes = 3

    def patches(self, made: Mapping[str, npt.NDArray[np.number]]) -> tuple[Pixels, Grid]:
        """See `Family.patches`."""
        time, height, width = made["image_grid_thw"][0].tolist()
        return made["pixel_values"].astype(np.float32), (time, height, width)

    def cells(self, processor: Processor, grid: Grid) -> Grid:
        """See `Family.cells`."""
        merge = int(processor.merge_size)
        return grid[0], grid[1] // merge, grid[2] // merge

    def count(self, processor: Processor, width: int, height: int) -> int | None:
        """See `Family.count`."""
        return int(processor.get_number_of_image_patches(height, width, {})) // int(processor.merge_size) ** 2

    def ends(self, config: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """See `Family.ends`: the template writes them."""
        return [], []

    def encode(self, base: Base, given: Sequence[tuple[Pixels, Grid]]) -> "list[tuple[Tensor, tuple[Tensor, ...]]]":
        """See `Family.encode`."""
        import torch

        device = base.visual.device
        pixels = torch.cat([torch.from_numpy(pixels) for pixels, _ in given]).to(device)
        grids = torch.tensor([grid for _, grid in given], device=device)
        made = base.get_image_features(pixels, grids, return_dict=True)
        deep = getattr(made, "deepstack_features", None) or ()
        return [(features, tuple(layer[i] for layer in deep)) for i, features in enumerate(made.pooler_output)]

    def arguments(self, base: Base, text: "Tensor", images: "Tensor", deep: "Sequence[Tensor]") -> dict[str, object]:
        """See `Family.arguments`."""
        return {"visual_pos_masks": images, "deepstack_visual_embeds": list(deep)} if deep else {}

    def mask(self, base: Base, embeddings: "Tensor", images: "Tensor") -> object:
        """See `Family.mask`."""
        return None

    def looks_ahead(self, base: Base) -> bool:
        """See `Family.looks_ahead`."""
        return False


class Qwen35(QwenVL):
    """Qwen3.5 and its mixtures: the positions of Qwen3-VL, no features behind the first layers. Most layers of the text
    model hold a state that runs along a sequence, which branches of a tree and slots of a cache cannot share."""


class Gemma4:
    """Gemma 4: tokens of images are counted like text. Large ones attend to those of an image in both directions, in
    layers with a window; a cache by position is not exact then."""

    towers: tuple[str, ...] = ("vision_tower", "embed_vision")
    axes = 1

    def patches(self, made: Mapping[str, npt.NDArray[np.number]]) -> tuple[Pixels, Grid]:
        """See `Family.patches`."""
        places = made["image_position_ids"][0]
        there = (places >= 0).all(-1)  # the others fill the row
        width, height = (places[there].max(0) + 1).tolist()
        return made["pixel_values"][0][there].astype(np.float32), (1, height, width)

    def cells(self, processor: Processor, grid: Grid) -> Grid:
        """See `Family.cells`."""
        pooled = int(processor.pooling_kernel_size)
        return grid[0], grid[1] // pooled, grid[2] // pooled

    def count(self, processor: Processor, width: int, height: int) -> int | None:
        """See `Family.count`."""
        return None

    def ends(self, config: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """See `Family.ends`: the processor of transformers writes them."""
        return [config["boi_token_id"]], [config["eoi_token_id"]]

    def encode(self, base: Base, given: Sequence[tuple[Pixels, Grid]]) -> "list[tuple[Tensor, tuple[Tensor, ...]]]":
        """See `Family.encode`."""
        import torch

        device = base.vision_tower.device
        most = max(len(pixels) for pixels, _ in given)
        rows = np.zeros((len(given), most, given[0][0].shape[1]), np.float32)
        places = np.full((len(given), most, 2), -1, np.int64)
        for row, (pixels, (_, _, width)) in enumerate(given):
            rows[row, : len(pixels)] = pixels
            y, x = np.divmod(np.arange(len(pixels)), width)
            places[row, : len(pixels)] = np.stack([x, y], -1)
        made = base.get_image_features(
            torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device), return_dict=True
        )
        return [(features, ()) for features in made.pooler_output]

    def arguments(self, base: Base, text: "Tensor", images: "Tensor", deep: "Sequence[Tensor]") -> dict[str, object]:
        """See `Family.arguments`: embeddings for each layer, for placeholders those of padding."""
        config = base.config.get_text_config()
        if not config.hidden_size_per_layer_input:
            return {}
        read = text.masked_fill(images, config.pad_token_id)
        return {"per_layer_inputs": base.language_model.get_per_layer_inputs(read)}

    def mask(self, base: Base, embeddings: "Tensor", images: "Tensor") -> object:
        """See `Family.mask`."""
        if not self.looks_ahead(base):
            return None
        from transformers.models.gemma4 import modeling_gemma4 as gemma4

        return gemma4.create_masks_for_vision_model(
            config=base.config.get_text_config(),
            inputs_embeds=embeddings,
            attention_mask=None,
            past_key_values=None,
            position_ids=None,
            block_sequence_ids=gemma4.get_block_sequence_ids_for_mask(images.int(), device=embeddings.device),
        )

    def looks_ahead(self, base: Base) -> bool:
        """See `Family.looks_ahead`."""
        return bool(base.config.get_text_config().use_bidirectional_attention == "vision")


FAMILIES: dict[str, Family] = {
    "qwen2_vl": QwenVL(),
    "qwen2_5_vl": QwenVL(),
    "qwen3_vl": QwenVL(),
    "qwen3_vl_moe": QwenVL(),
    "qwen3_5": Qwen35(),
    "qwen3_5_moe": Qwen35(),
    "gemma4": Gemma4(),
}
"""Model types whose positions and features are known."""


def family_of(config: Mapping[str, Any], name: str) -> Family | None:
    """How models of a configuration see; None: they read text alone. name: of the model, for the error line.
    Raises UserError: they see, and nothing is known of their type."""
    kind = config.get("model_type", "")
    if kind in FAMILIES or not _sees(config):
        return FAMILIES.get(kind)
    raise UserError(
        f"model.path: {name} is a {kind!r}, which sees: of such models {', '.join(FAMILIES)} are known, and nothing "
        "of the positions and features of others (docs/vision.md, Training)"
    )


def _sees(config: Mapping[str, object]) -> bool:
    """Whether transformers has a configuration's type among those that see, or it has a vision part, or a token
    for images, by the names that they have."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING

    if config.get("model_type") in SEEING:
        return True
    parts = (name for name, value in config.items() if isinstance(value, Mapping) and value)
    tokens = (config.get(name) for name in _IMAGE_TOKENS)
    return any(word in name for name in parts for word in _VISION_PARTS) or any(isinstance(i, int) for i in tokens)


_VISION_PARTS = ("vision", "visual", "image")
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
