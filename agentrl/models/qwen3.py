"""A small Qwen3 in float32 on a CPU without `transformers`, whose import takes longer than the rest of a start.

It serves where our own forward and our own engine compute, which is what the embedded model needs (`reads` says of
which folders and recipes that holds). Parameters have the names, the order and the files of `Qwen3ForCausalLM`, so that
either reads what the other wrote.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.models import block, fast_tokenizer
from agentrl.models.fast_tokenizer import read_json, written
from agentrl.plugins.types import Json
from agentrl.recipe.sections.model import ModelSection

CONFIG, WEIGHTS, GENERATION = "config.json", "model.safetensors", "generation_config.json"
LARGEST = 200_000_000
"""Bytes of weights up to which a start is short enough for an import to matter."""

_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
_AS_THIS = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "attention_bias": False,
    "use_sliding_window": False, "attention_dropout": 0.0,
}  # fmt: skip
_ROPE = {"rope_theta", "rope_type"}


def reads(folder: str, section: ModelSection) -> bool:
    """Whether this module reads the model in `folder`, and `fast_tokenizer` its tokenizer, as transformers would, and
    it computes as `section` asks."""
    if section.dtype != "float32" or section.compute == "bfloat16" or section.lora is not None or section.config:
        return False
    if section.compile or section.checkpointing or section.freeze:
        return False
    if section.device not in ("auto", "cpu") or (section.device == "auto" and torch.cuda.is_available()):
        return False
    place = Path(folder)
    try:
        if (place / WEIGHTS).stat().st_size > LARGEST or not _is_plain_qwen3(read_json(place / CONFIG)):
            return False
    except (OSError, ValueError, AttributeError, TypeError):  # which transformers then explains, or can read
        return False
    return fast_tokenizer.reads(folder, section)


def _is_plain_qwen3(config: dict[str, Json]) -> bool:
    rope = config.get("rope_parameters") or {}
    return (
        all(config.get(key) == value for key, value in _AS_THIS.items())
        and all(type(config.get(key)) is int and config[key] > 0 for key in _SHAPE)
        and config["num_attention_heads"] % config["num_key_value_heads"] == 0
        and config["head_dim"] % 2 == 0
        and rope.keys() == _ROPE
        and rope["rope_type"] == "default"
        and type(rope["rope_theta"]) in (int, float)
        and type(config.get("tie_word_embeddings")) is bool
        and type(config.get("rms_norm_eps")) is float
        and set(config.get("layer_types") or ["full_attention"]) == {"full_attention"}
        and not config.keys() & {"quantization_config", "auto_map"}
    )


class Config(SimpleNamespace):
    """What config.json says, as attributes."""

    def get_text_config(self) -> "Config":
        """Itself: the model reads nothing but text."""
        return self

    def to_dict(self) -> dict[str, Json]:
        """What config.json says."""
        return dict(vars(self))


def read_config(folder: str) -> Config:
    """The configuration of a model that `reads` accepts. Raises OSError or ValueError."""
    return Config(**read_json(Path(folder, CONFIG)))


class Linear(nn.Linear):
    """A linear map whose weights are read, never drawn: to draw them on the meta device imports torch's compiler."""

    def reset_parameters(self) -> None:
        """Do nothing."""


class Embedding(nn.Embedding):
    """Embeddings, likewise."""

    def reset_parameters(self) -> None:
        """Do nothing."""


class Norm(nn.Module):
    """The gain [size] of an RMS norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    """Projections of an attention with norms of q and k by heads."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(c.head_dim), Norm(c.head_dim)


class Mlp(nn.Module):
    """Projections of a SwiGLU."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False)


class Layer(nn.Module):
    """One block."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c.hidden_size), Norm(c.hidden_size)


class Rotary(nn.Module):
    """The frequencies of rotary position embeddings."""

    inv_freq: Tensor

    def __init__(self, c: Any) -> None:
        super().__init__()
        exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float, device="cpu") / c.head_dim  # on meta, too
        self.register_buffer("inv_freq", 1.0 / (c.rope_parameters["rope_theta"] ** exponents), persistent=False)
        self.attention_scaling = 1.0


class Decoder(nn.Module):
    """All but the output layer."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm, self.rotary_emb = Norm(c.hidden_size), Rotary(c)


class Qwen3(nn.Module):
    """A causal language model; of the interface of transformers it has what this package uses of such a model.

    generation: what generation_config.json says, which is saved with it.
    """

    base_model_prefix = "model"

    def __init__(self, config: Config, generation: dict[str, Json] | None = None) -> None:
        super().__init__()
        self.config, self.generation, self.image_input = config, generation, None
        c: Any = config
        self.model = Decoder(c)
        self.lm_head = Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def from_pretrained(cls, folder: str) -> "tuple[Qwen3, list[str]]":
        """The model in a folder that `reads` accepts, in float32 and evaluation mode, and the names of parameters that
        the files lack. Raises OSError, ValueError or RuntimeError: the files cannot be read, or do not fit together."""
        from safetensors.torch import load_file

        place = Path(folder)
        known = read_json(place / GENERATION) if (place / GENERATION).is_file() else None
        config = read_config(folder)
        with torch.device("meta"):
            model = cls(config, known)
        found = {name: tensor.float() for name, tensor in load_file(place / WEIGHTS).items()}
        missing = model.load_state_dict(found, strict=False, assign=True).missing_keys
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
            missing = [name for name in missing if name != "lm_head.weight"]
        model.config.dtype = "float32"
        return model.requires_grad_(True).eval(), missing

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        """An object whose `logits` are [B, N, vocabulary], float32, of input_ids [B, N]."""
        assert not use_cache
        rows, length = input_ids.shape
        weights = block.weights_of(self, copy=False)
        rotation = block.Rope(self)(torch.arange(length).repeat(rows))

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.view(rows, length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2).reshape(rows * length, -1)

        states = block.hidden(weights, input_ids.reshape(-1), rotation, attend)
        return SimpleNamespace(logits=self.lm_head(states).view(rows, length, -1))

    def get_input_embeddings(self) -> nn.Embedding:
        """The input embeddings."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """The output layer."""
        return self.lm_head

    def save_pretrained(self, folder: Path, state_dict: object = None) -> None:
        """Write config.json and generation_config.json; the weights are written by `checkpoint.huggingface`. Raises
        OSError."""
        assert state_dict == {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(written(self.config.to_dict()), encoding="utf-8")
        if self.generation is not None:
            (folder / GENERATION).write_text(written(self.generation), encoding="utf-8")
