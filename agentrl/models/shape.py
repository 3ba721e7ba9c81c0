"""`Shape`: what a model's configuration says about its size. Counted on the meta device, nothing is loaded."""

from dataclasses import dataclass
from typing import Any

from agentrl.models.load import class_for, overridden, resolve
from agentrl.recipe.schema import LoraSection, ModelSection


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model."""

    parameters: int
    """The number of parameters, without the adapter's."""
    adapter: int
    """The number of parameters of its LoRA adapter."""
    layers: int
    """The number of blocks."""
    layer: int
    """The number of parameters of the largest block."""
    root: int
    """The number of parameters outside of blocks: embeddings, final norm, output layer."""
    hidden: int
    """The width of the residual stream."""
    wide: int
    """The width of the feed-forward."""
    vocabulary: int
    """Number of rows of the embeddings."""
    kv: int
    """Numbers that a token's keys and values take, over all layers."""

    @classmethod
    def of(cls, config: Any, lora: LoraSection | None = None, trust_remote_code: bool = False) -> "Shape":
        """Count a causal language model. config: its transformers configuration. lora: the adapter to count with it."""
        import torch

        from agentrl.models.lora import add_adapter

        with torch.device("meta"):
            model = class_for(config).from_config(config, trust_remote_code=trust_remote_code)
            parameters = _count(model)
            blocks = [_count(block) for block in _blocks(model)]
            if lora is not None:
                add_adapter(model, lora.model_copy(update={"start": None}), "")
        text = config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            parameters=parameters,
            adapter=_count(model) - parameters,
            layers=len(blocks),
            layer=max(blocks, default=0),
            root=parameters - sum(blocks),
            hidden=text.hidden_size,
            wide=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            vocabulary=text.vocab_size,
            kv=int(2 * text.num_hidden_layers * heads * head),
        )


def read_shape(section: ModelSection) -> Shape | None:
    """Return the shape of a recipe's model; None if its configuration is not on this machine.

    Raises UserError for a path that is no model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            resolve(section.path), local_files_only=True, trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError):
        return None
    return Shape.of(overridden(config, section), section.lora, section.trust_remote_code)


def _count(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def _blocks(model: Any) -> list[Any]:
    """Return the longest list of modules that is in no other list."""
    from torch.nn import ModuleList

    lists = {name: module for name, module in model.named_modules() if isinstance(module, ModuleList)}
    outer = [list(m) for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return max(outer, key=lambda blocks: len(blocks), default=[])
