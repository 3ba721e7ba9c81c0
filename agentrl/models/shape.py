"""`Shape`: what a model's configuration says about its size. Counted on the meta device, nothing is loaded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.models.load import check_family, model_of, overridden, resolve
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.recipe.sections.model import LoraSection, ModelSection

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from agentrl.models.qwen3 import Config


@dataclass(frozen=True, slots=True)
class Tower:
    """The size of the part of a model that turns images into features."""

    parameters: int
    """Its number of parameters, which are among the model's."""
    layers: int
    """The number of blocks."""
    hidden: int
    """The width of its residual stream."""
    wide: int
    """The width of its feed-forward."""
    patches: int
    """Patches of an image that become one token."""
    pixels: int
    """Numbers that say the pixels of a patch, in float32."""


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
    tower: Tower | None = None
    """Of a model that sees."""
    experts: int = 0
    """The number of parameters of all experts of a mixture."""
    routed: int = 0
    """Number of experts that a token goes through in a layer."""

    @classmethod
    def of(
        cls, config: "PretrainedConfig | Config", lora: LoraSection | None = None, trust_remote_code: bool = False
    ) -> "Shape":
        """Count a causal language model. config: its configuration. lora: the adapter to count with it."""
        import torch

        from agentrl.models.lora import add_adapter

        with torch.device("meta"):
            model = model_of(config, trust_remote_code)
            parameters = _count(model)
            tower = _tower(model, config)
            blocks = [_count(block) for block in longest_list(model, outside=tower[0])]
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
            tower=tower[1],
            experts=sum(p.numel() for name, p in model.named_parameters() if ".experts." in name),
            routed=getattr(text, "num_experts_per_tok", None) or 0,
        )


def read_shape(section: ModelSection) -> Shape | None:
    """The shape of a recipe's model; None if its configuration is not on this machine.

    Raises UserError for a path that is no model, or one that sees in a way that is not known.
    """
    config = read_config(section)
    return None if config is None else Shape.of(config, section.lora, section.trust_remote_code)


def read_config(section: ModelSection, fetch: bool = False) -> "PretrainedConfig | Config | None":
    """A model's configuration with the recipe's settings; None: it cannot be had. fetch: whether to ask the hub."""
    from agentrl.models.qwen3 import read_config as read_light
    from agentrl.models.qwen3 import reads

    path = resolve(section.path)
    if reads(path, section):
        return read_light(path)
    from transformers import AutoConfig

    try:
        check_family(path, section, local_files_only=not fetch)
        config = AutoConfig.from_pretrained(
            path, local_files_only=not fetch, trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError):
        return None
    return overridden(config, section)


EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names that configurations have for the number of experts in a layer."""
DEFAULT_CONTEXT = 4096
"""Tokens, for a model whose configuration names no maximum."""
_OF_ENGINE = ("max_context", "context-length", "max-model-len")
"""The engine's own: arguments, and flags of servers."""


def context_of(config: "PretrainedConfig | Config") -> int:
    """The maximum context of a model's configuration in tokens, or DEFAULT_CONTEXT if it names none."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return DEFAULT_CONTEXT


def expected_context(recipe: Recipe) -> int | None:
    """The context that the recipe's engine will have, in tokens; None if the model's configuration is not on
    this machine. Raises as `read_shape` does."""
    config, flags = read_config(recipe.model), recipe.engine.args.get("flags")
    if config is None:
        return None
    given = {**recipe.engine.args, **(flags if isinstance(flags, Mapping) else {})}
    own = [value for name in _OF_ENGINE if isinstance(value := given.get(name), int) and value > 0]
    made = recipe.new_model
    return min([context_of(config) if made is None else made.config["max_position_embeddings"], *own])


def short_context(recipe: Recipe, context: int) -> str | None:
    """A line that says that conversations end before `rollout.max_tokens`, where they do."""
    most = recipe.rollout.max_tokens
    if context >= most:
        return None
    return f"rollout.max_tokens {most} is more than the model's context: conversations end at {context} tokens"


def undivided(section: ModelSection, cluster: ClusterSection) -> str | None:
    """Why the workers cannot share a model's sequences, matrices or experts as `cluster` says; None: they can, or its
    configuration is not on this machine."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            resolve(section.path), local_files_only=True, trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError):
        return None
    config = overridden(config, section)
    return (
        heads_fault(config, cluster.sequence_parallel)
        or heads_fault(config, cluster.tensor_parallel, "tensor_parallel")
        or experts_fault(config, cluster.expert_parallel)
    )


def experts_fault(config: "PretrainedConfig", ranks: int) -> str | None:
    """Why the experts of a model cannot be dealt over `ranks` workers; None: they can."""
    text = config.get_text_config()
    count = next((n for name in EXPERTS if isinstance(n := getattr(text, name, None), int)), 0)
    if ranks == 1 or (count and count % ranks == 0):
        return None
    if not count:
        return f"cluster.expert_parallel is {ranks}, and the model has no experts ({text.model_type}): leave it at 1"
    return f"cluster.expert_parallel: {count} experts are not shared evenly by {ranks} workers"


def heads_fault(config: "PretrainedConfig", ranks: int, key: str = "sequence_parallel") -> str | None:
    """Why the attention heads of a model cannot be dealt out to `ranks` workers; None: they can. config: its
    transformers configuration. key: of `cluster`; tensors are divided by heads of keys, too."""
    text = config.get_text_config()
    heads: int = text.num_attention_heads
    if key == "tensor_parallel":
        heads = math.gcd(heads, getattr(text, "num_key_value_heads", None) or heads)
    if heads % ranks == 0:
        return None
    return (
        f"cluster.{key}: {ranks} workers cannot share {heads} attention heads evenly;"
        f" choose one of {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
    )


def _count(module: "nn.Module") -> int:
    return sum(p.numel() for p in module.parameters())


def _tower(model: "nn.Module", config: "PretrainedConfig | Config") -> "tuple[nn.Module | None, Tower | None]":
    """The vision tower and its size; (None, None): the model has none."""
    vision = getattr(config, "vision_config", None)
    modules = dict(model.named_modules())
    tower = next((m for name, m in modules.items() if name.rpartition(".")[2] in ("visual", "vision_tower")), None)
    if vision is None or tower is None:
        return None, None
    blocks, hidden = longest_list(tower), int(vision.hidden_size)
    wide = getattr(vision, "intermediate_size", None) or 4 * hidden
    merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "pooling_kernel_size", None) or 1
    frames, colors = getattr(vision, "temporal_patch_size", 1), getattr(vision, "in_channels", 3)
    pixels = frames * colors * vision.patch_size**2
    return tower, Tower(_count(tower), len(blocks), hidden, int(wide), int(merge) ** 2, int(pixels))


def longest_list(model: "nn.Module", outside: "nn.Module | None" = None) -> "list[nn.Module]":
    """The longest list of modules that is in no other list. outside: a module whose lists do not count."""
    from torch.nn import ModuleList

    left_out = set() if outside is None else set(outside.modules())
    lists = {name: m for name, m in model.named_modules() if isinstance(m, ModuleList) and m not in left_out}
    outer = [list(m) for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return max(outer, key=lambda blocks: len(blocks), default=[])
