"""What a model needs in memory, from its configuration: shapes are counted on the meta device, nothing is loaded."""

from dataclasses import dataclass
from typing import Any

from agentrl.models.load import resolve
from agentrl.recipe.schema import ModelSection, Recipe

BYTES = {"float32": 4, "bfloat16": 2}
ADAM_BYTES = 8  # two float32 moments a parameter
MASTER_BYTES = 4  # a float32 copy of each parameter of less precision
LAYER_TENSORS = 16
"""Hidden-sized activations a layer that the backward pass keeps for a token: projections, norms, residuals, and the
feed-forward's, counted by its ratio to the hidden size below."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of the trainer: weights, gradients, optimizer (moments and masters), reference, activations (of one
    micro-batch, the widest moment). cache_token: bytes of keys and values a token in the engine.

    parameters, trained: how many there are, and how many of them an adapter has, which then are float32 and the only
    ones with gradients (None: every one is trained). It needs no reference of its own."""

    parameters: int
    trained: int | None
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    cache_token: int

    @property
    def trainer(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference + self.activations


def plan_memory(recipe: Recipe) -> MemoryPlan | None:
    """None where the model's configuration is not on this machine. Raises UserError for a path that is no model."""
    config = _config(recipe)
    if config is None:
        return None
    (base, adapter), size = _count(config, recipe.model), BYTES[recipe.model.dtype]
    text = config.get_text_config()
    whole = recipe.model.lora is None
    return MemoryPlan(
        parameters=base + adapter,
        trained=None if whole else adapter,
        weights=base * size + adapter * 4,
        gradients=base * size if whole else adapter * 4,
        optimizer=base * (ADAM_BYTES + (MASTER_BYTES if size < 4 else 0)) if whole else adapter * ADAM_BYTES,
        reference=base * size if whole and recipe.algorithm.kl_coef > 0 else 0,
        activations=_activations(text, recipe.train.micro_batch_tokens, size),
        cache_token=_cache_token(text, size),
    )


def _config(recipe: Recipe) -> Any:
    from transformers import AutoConfig

    section = recipe.model
    try:
        return AutoConfig.from_pretrained(
            resolve(section.path), local_files_only=True, trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError):
        return None


def _count(config: Any, section: ModelSection) -> tuple[int, int]:
    """Parameters of the model, and of its adapter."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentrl.models.lora import add_adapter

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=section.trust_remote_code)
        base = sum(p.numel() for p in model.parameters())
        if section.lora is not None:
            add_adapter(model, section.lora.model_copy(update={"start": None}), section.path)
    return base, sum(p.numel() for p in model.parameters()) - base


def _activations(text: Any, tokens: int, size: int) -> int:
    """Of a forward and backward pass over `tokens` packed tokens, log-probs from hidden states in chunks."""
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    kept = LAYER_TENSORS * text.hidden_size + 4 * wide
    return tokens * size * kept * text.num_hidden_layers


def _cache_token(text: Any, size: int) -> int:
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * head * size)
