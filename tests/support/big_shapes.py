"""Configurations of models that nobody loads here, by their published ones."""

from typing import Any

from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig


def qwen3(hidden: int, wide: int, layers: int, heads: int, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=tied,
    )  # fmt: skip


BIG: dict[str, Any] = {
    "qwen3-4b": qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": qwen3(4096, 12288, 36, 32),
    "qwen3-32b": qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
    "qwen2.5-72b": Qwen2Config(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, tie_word_embeddings=False,
    ),
}  # fmt: skip
