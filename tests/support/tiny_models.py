"""Models of random weights that are computed in no time."""

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
"""Of a model without a tokenizer."""


def qwen3(seed: int = 0, **changes: Any) -> Any:
    """SIZES, but for `changes`, which are keys of the configuration."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | changes)).eval()
