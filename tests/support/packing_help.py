"""Batches and models for tests of packing and of what computes packed rows."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.compute.batch import Batch
from agentrl.compute.forward import BlockForward

VOCABULARY = 96


class TorchForward(BlockForward):
    """Our own forward as it is without a compiler."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.compiled = None


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2,
}  # fmt: skip


def make_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: Any
    match family:
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
        case "llama":
            rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64, "rope_theta": 1e4}  # fmt: skip
            model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))
        case "windowed":
            model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))
        case _:
            model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=2048))
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.eval()
    return model


def make_batch(shapes: list[tuple[int, list[int]]], seed: int = 0) -> Batch:
    """Groups of (prompt length, answer lengths); about a third of each answer is not sampled."""
    rng = np.random.default_rng(seed)
    rows, masks, prompts, groups = [], [], [], []
    for group, (prompt, answers) in enumerate(shapes):
        opening = rng.integers(0, VOCABULARY, prompt)
        for answer in answers:
            rows.append(np.concatenate([opening, rng.integers(0, VOCABULARY, answer)]))
            masks.append(np.concatenate([np.zeros(prompt, bool), rng.random(answer) < 0.7]))
            prompts.append(prompt)
            groups.append(group)
    return Batch(
        np.cumsum([0, *(len(r) for r in rows)]),
        {"ids": np.concatenate(rows).astype(np.int32), "loss_mask": np.concatenate(masks).astype(np.uint8)},
        {"prompt_length": np.array(prompts, np.int32), "group": np.array(groups, np.int64)},
    )


def make_deep(depth: int, seed: int = 0, groups: int = 2) -> Batch:
    """Groups of samples, in no order, that fork `depth` times and more, in mid-sequence too. One stands twice, and one
    ends where another goes on. What is sampled in one is context in another, or sampled in both."""
    rng = np.random.default_rng(seed)

    def longer(row: np.ndarray, most: int = 20) -> np.ndarray:
        return np.concatenate([row, rng.integers(0, VOCABULARY, rng.integers(1, most + 1))])

    rows: list[np.ndarray] = []
    sizes: list[int] = []
    for _ in range(groups):
        stem, own = longer(np.zeros(1, np.int64), 8), []
        for _ in range(depth):
            own += [longer(stem) for _ in range(1 + (rng.random() < 0.3))]
            stem = longer(stem)
        own += [stem, longer(stem)]
        own += [longer(row[: rng.integers(1, len(row))]) for row in (own[0], own[-1])]
        own += [own[int(rng.integers(len(own)))], own[-3][: rng.integers(2, len(own[-3]))]]
        rows += [own[i] for i in rng.permutation(len(own))]
        sizes.append(len(own))
    masks = [np.arange(len(row)) > 0 for row in rows]
    masks = [mask & (rng.random(len(mask)) < 0.6) for mask in masks]
    return Batch(
        np.cumsum([0, *(len(r) for r in rows)]),
        {"ids": np.concatenate(rows).astype(np.int32), "loss_mask": np.concatenate(masks).astype(np.uint8)},
        {"prompt_length": np.ones(len(rows), np.int32), "group": np.repeat(np.arange(groups), sizes)},
    )


def prefixes(batch: Batch) -> int:
    """How many different beginnings the samples of each group have, by their definition: what a tree computes."""
    rows = [(int(g), batch.tokens["ids"][batch.span(i)].tobytes()) for i, g in enumerate(batch.samples["group"])]
    return len({(group, row[:end]) for group, row in rows for end in range(4, len(row) + 1, 4)})


SHAPES = [(9, [12, 5, 1, 7]), (4, [3]), (15, [30, 2]), (1, [6, 6, 6])]


shapes = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 15), min_size=1, max_size=5)), min_size=1, max_size=5
)


class Live(TorchDispatchMode):
    """How many bytes of the tensors made inside are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and func is not torch.ops.aten.detach.default:
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return out

    @property
    def bytes(self) -> int:
        return sum(size for reference, size in self.storages.values() if not reference.expired())
