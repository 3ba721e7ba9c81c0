"""`model`: what is trained, and in which types."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from agentrl.jsonable import Json
from agentrl.recipe.sections.section import Positive, Section, listed

VISION = "vision"
"""Of model.lora.targets: the layers of the vision tower too."""


class LoraSection(Section):
    """A LoRA adapter (arXiv:2106.09685), trained in place of the model's own weights."""

    rank: Positive = 16
    """Rank of the two matrices that the adapter adds to each layer."""
    alpha: Positive = 32
    """Scale of what the adapter adds: it is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(listed)] = ("all-linear",)
    """Layers to adapt, by the end of their names, such as [q_proj, v_proj]. all-linear: all but the output layer.
    vision: those of the vision tower too, which else stays as it is."""
    exclude: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    """Layers of those to leave as they are, by the end of their names, or a part of them between dots, such as
    [router, layers.0]."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input during training."""
    start: str | None = None
    """A folder in peft's format, or its URL, to start from. null: a new adapter."""

    @property
    def vision(self) -> bool:
        """Whether the layers of the vision tower are adapted too."""
        return VISION in self.targets

    @property
    def layers(self) -> tuple[str, ...]:
        """The ends of the names of the layers to adapt."""
        return tuple(target for target in self.targets if target != VISION)

    @model_validator(mode="after")
    def _some_layers(self) -> "LoraSection":
        if not self.layers:
            raise ValueError("targets: vision goes with layers of some name: write [all-linear, vision]")
        return self


class ModelSection(Section):
    """The model to train."""

    path: str = "tiny"
    """`tiny` (calls a calculator), `tiny_vision` (sees) or `tiny_tools` (calls tools that it has never seen), which
    ship with the package; a Hugging Face folder, the URL of one (s3://, gs://), or a name on the hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that are trained."""
    device: str = "auto"
    """Device of the trainer and of the engine `local`: auto (a GPU where there is one), cpu, cuda, cuda:1."""
    chat: str = "auto"
    """How messages become tokens: auto, bridge (the model's own template), or a family of `renderers` such as qwen3."""
    chat_template: str | None = None
    """A jinja file that replaces the tokenizer's own chat template, relative to the recipe that names it where
    it is there, else to the working directory."""
    config: dict[str, Json] = Field(default_factory=dict)
    """Settings of the model's configuration that have another value, by their names there, such as
    {max_position_embeddings: 65536, rope_parameters: {rope_type: yarn, factor: 4.0}}. Servers are told by flags."""
    trust_remote_code: bool = False
    """Run the code that a model folder or the hub brings."""
    lora: LoraSection | None = None
    """Train an adapter; `{}` takes the defaults of its keys. null: every weight is trained."""
    freeze: tuple[Literal["vision"], ...] = ()
    """Parts that are not trained: `vision`, the tower that turns images into features."""
    compute: Literal["auto", "same", "bfloat16"] = "auto"
    """Type that the trainer computes in. same: that of dtype. bfloat16: mixed precision; trained weights keep theirs,
    frozen models are kept in it. auto: bfloat16 on a GPU where weights of float32 are trained, else same."""
    checkpointing: bool = False
    """Activation checkpointing: compute activations again in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile the layers by `torch.compile` for the trainer's passes. The first passes take a minute more."""

    @model_validator(mode="after")
    def _one_wish_for_the_tower(self) -> "ModelSection":
        if "vision" in self.freeze and self.lora is not None and self.lora.vision:
            raise ValueError("`freeze` has vision, and lora.targets too: leave one out")
        return self

    @property
    def mixed(self) -> bool:
        """Whether the trainer computes in another type than that of the weights it trains."""
        return self.compute == "bfloat16" and (self.dtype != "bfloat16" or self.lora is not None)

    @property
    def frozen(self) -> "ModelSection":
        """The section of a model that is not trained: without an adapter, kept in the type that it is computed
        in."""
        kept = {"dtype": "bfloat16", "compute": "same"} if self.compute == "bfloat16" else {}
        return self.model_copy(update={"lora": None, **kept})
