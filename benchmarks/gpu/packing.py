"""Training tokens per second of the packed forest on a CUDA device, beside a padded batch and packing without sharing.

    python benchmarks/gpu/packing.py [--model Qwen/Qwen3-0.6B] [--rounds 3] [--budget 16384]

As `benchmarks/packing.py`, whose sides and tokens these are, in bfloat16 with longer sequences; without --model the
model is a Qwen3 of 0.6 billion random weights. All sides run through the Hugging Face module (padded: sdpa with a mask;
unshared: varlen flash attention; packed: flex_attention), so that they differ in the batch alone. Times are those of
the wall, the device synchronized. Says which attention served: where a kernel does not work, buckets do.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))  # first: it has a file of this one's name

import packing
from need import need

from agentrl.compute.forward import ModuleForward
from agentrl.compute.tree_attention import kernel_for

NAME = "packing on a GPU"
LENGTHS = ((1024, 1024), (2048, 512), (4096, 256))
BUDGET, LONGEST = 32_768, 6144
"""Computed tokens of a micro-batch: at most, and at least, so that one sequence fits."""


def budget_for(model: Any) -> int:
    """What half of the free memory holds of the padded side, which keeps a row of logits for every other token."""
    config = model.config.get_text_config()
    layer = 16 * config.hidden_size + 4 * config.intermediate_size
    token = 2 * layer * config.num_hidden_layers + 7 * config.vocab_size
    return max(LONGEST, min(BUDGET, torch.cuda.mem_get_info()[0] // 2 // token // 1024 * 1024))


def make_model(name: str | None) -> Any:
    torch.manual_seed(0)
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).cuda().eval()
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).eval()


def clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def kernels(model: Any) -> str:
    """Which attention serves with and without a shared prompt."""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query, key = (
        torch.empty(1, heads, size, device="cuda", dtype=model.dtype)
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    chosen = [getattr(kernel_for(shared, query, key), "__name__", "buckets") for shared in (True, False)]
    return f"shared prompts: {chosen[0]}, others: {chosen[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub name; by default random weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=0, help="computed tokens of a micro-batch; 0: by the memory")
    parser.add_argument("--groups", type=int, default=2)
    options = parser.parse_args()
    need(NAME, sglang=False)
    warnings.filterwarnings("ignore")
    model = make_model(options.model)
    forward = ModuleForward(model)
    options.budget = options.budget or budget_for(model)
    print(f"{torch.cuda.get_device_name()}; {kernels(model)}; micro-batches of {options.budget:,} tokens")
    print("prompt:answer  group  lengths    padded  unshared    packed  |  times padded  times unshared  peak GiB")
    for prompt, answer in LENGTHS:
        for samples in packing.GROUPS:
            for varied in (False, True):
                vocabulary = model.config.get_text_config().vocab_size
                batch = packing.make_batch(prompt, answer, samples, options.groups, varied, vocabulary)
                sides: dict[str, Callable[[], np.ndarray]] = {
                    "padded": lambda batch=batch: packing.padded(model, batch, options.budget),
                    "unshared": lambda batch=batch: packing.unshared(forward, batch, options.budget),
                    "packed": lambda batch=batch: packing.packed(forward, batch, options.budget),
                }
                packing.compared(sides, 0.5)
                torch.cuda.reset_peak_memory_stats()
                times = packing.seconds(sides, model, options.rounds, clock)
                speed = {name: int(batch.offsets[-1]) / spent for name, spent in times.items()}
                print(
                    f"{prompt:5d}:{answer:<7d} {samples:5d}  {'varied' if varied else 'equal':7s}"
                    f" {speed['padded']:9.0f} {speed['unshared']:9.0f} {speed['packed']:9.0f}  |"
                    f" {speed['packed'] / speed['padded']:13.2f}  {speed['packed'] / speed['unshared']:14.2f}"
                    f" {torch.cuda.max_memory_allocated() / 2**30:9.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
