"""A model of real size beside transformers: decoding, prefill, a training step and one of LoRA, in tokens per second.

    python benchmarks/real_model.py [--rounds 3] [--threads 1] [--only decode] [--compute float32] [--quick]

The model has the shape of Qwen2.5-0.5B (494 million parameters, a vocabulary of 151,936) and random weights, made here.

decode   the local engine and `generate`, both sampling at temperature 1 from the whole vocabulary, with 1, 16 and 64
         rows after prompts of 64 tokens: the time of 17 tokens less that of 1. A step reads every weight once: `bound`
         is the share of the memory's speed, as measured here, that this alone takes up.
prefill  the time of 1 token after the prompts of 16 rows. What the engine copies of new weights is counted in neither
         and printed below.
train    forward, backward, clipping and AdamW on a group of 8 samples: our packed row, which computes the prompt once,
         and the Hugging Face module on the padded batch, which computes logits of the answers only. Weights in float32;
         bfloat16 is mixed precision (autocast) on both sides.
lora     likewise with an adapter of rank 16 on all linear layers; in bfloat16, the frozen weights are bfloat16.

On one thread, times are CPU seconds of the process, else seconds of the clock; the sides take turns, and the best round
of each counts, because other load can only slow a round down. --compute float32 leaves out bfloat16, which takes hours
on a processor without instructions for it. --quick: a small shape, one round, to try the script.
"""

import argparse
import asyncio
import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from packing import compared, make_batch, packed, padded
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from agentrl.compute.batch import Batch
from agentrl.compute.forward import choose
from agentrl.engine.base import Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.learner.optimizer import Optimizer
from agentrl.models.lora import add_adapter
from agentrl.recipe.sections.model import LoraSection

PROMPT, NEW = 64, 16
SHAPE = {
    "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2,
}  # fmt: skip
QUICK = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
TRAINED = (384, 48, 8)
"""Tokens of the prompt, tokens of an answer, answers."""

Clock = Callable[[], float]


def make_model(shape: dict[str, int], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        **shape, max_position_embeddings=32_768, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype).eval()


def best(sides: dict[str, Callable[[], None]], rounds: int, clock: Clock) -> dict[str, float]:
    """The least seconds of each side over alternating rounds, after one that warms up."""
    least: dict[str, float] = {}
    for index in range(rounds + 1):
        for name, work in sides.items():
            began = clock()
            work()
            if index:
                least[name] = min(least.get(name, np.inf), clock() - began)
    return least


def line(what: str, kind: str, tokens: float, ours: float, theirs: float, more: str = "") -> None:
    print(f"{what:14}{kind:10}{tokens / ours:10.1f}{tokens / theirs:14.1f}{theirs / ours:8.2f}  {more}", flush=True)


def decode(model: Any, rows: int, rounds: int, clock: Clock, gigabytes: float) -> None:
    """Print a line on decoding, and on the prefill of 16 rows."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, model.config.vocab_size, PROMPT).tolist() for _ in range(rows)]
    engine = LocalEngine(model, max_batch=rows, max_context=512)
    ids = torch.tensor(prompts)

    async def sampled(tokens: int) -> None:
        await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=tokens), str(i)) for i, p in enumerate(prompts)))
        for i in range(rows):
            engine.finish(str(i))

    def generate(tokens: int) -> None:
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0)

    sides: dict[str, Callable[[], None]] = {}
    for tokens in (1, 1 + NEW):
        sides[f"ours {tokens}"] = lambda n=tokens: asyncio.run(sampled(n))  # type: ignore[misc]
        sides[f"theirs {tokens}"] = lambda n=tokens: generate(n)  # type: ignore[misc]
    took = best(sides, rounds, clock)
    ours, theirs = (max(took[f"{side} {1 + NEW}"] - took[f"{side} 1"], 1e-9) for side in ("ours", "theirs"))
    kind = str(model.dtype).removeprefix("torch.")
    size = sum(p.nbytes for p in model.parameters()) / 1e9
    bound = f"{1e3 * ours / NEW:.0f} ms a step, bound {size / gigabytes / (ours / NEW):.0%}"
    line(f"decode, {rows}", kind, rows * NEW, ours, theirs, bound)
    if rows == 16:
        line(f"prefill, {rows}", kind, rows * PROMPT, took["ours 1"], took["theirs 1"])


def refresh(model: Any, clock: Clock) -> None:
    """Print what it takes until the engine samples from new weights."""
    engine = LocalEngine(model, max_batch=1, max_context=64)

    async def first() -> None:
        await engine.update_weights(1)
        await engine.generate([1], Sampling(max_tokens=1), "a")
        engine.finish("a")

    async def again() -> None:
        await engine.generate([1], Sampling(max_tokens=1), "a")
        engine.finish("a")

    took = best({"first": lambda: asyncio.run(first()), "again": lambda: asyncio.run(again())}, 2, clock)
    print(f"new weights   {'bfloat16':10}{max(0.0, took['first'] - took['again']):10.2f} s until the engine has them")


def train(shape: dict[str, int], lora: bool, compute: torch.dtype, rounds: int, clock: Clock) -> None:
    """Print a line on a training step."""
    half = compute == torch.bfloat16
    model = make_model(shape, compute if lora else torch.float32)
    if lora:
        add_adapter(model, LoraSection(rank=16), "base")
    prompt, answer, samples = TRAINED
    batch: Batch = make_batch(prompt, answer, samples, 1, varied=False, vocabulary=shape["vocab_size"])
    forward, _ = choose(model, torch.bfloat16 if half else None)
    optimizer = Optimizer(model.named_parameters(), (0.9, 0.999), 0.0, 1.0)

    def theirs() -> np.ndarray:
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            return padded(model, batch, samples * (prompt + answer))

    def ours() -> np.ndarray:
        return packed(forward, batch, 1 << 20)

    def stepped(work: Callable[[], np.ndarray]) -> Callable[[], None]:
        def step() -> None:
            work()
            optimizer.step(1e-6)

        return step

    compared({"padded": theirs, "ours": ours}, 1.0 if half else 1e-2)
    optimizer.step(1e-6)
    took = best({"ours": stepped(ours), "theirs": stepped(theirs)}, rounds, clock)
    kind = str(compute).removeprefix("torch.")
    line("lora" if lora else "train", kind, int(batch.offsets[-1]), took["ours"], took["theirs"])


def memory_speed(clock: Clock) -> float:
    """The GB that a sum reads a second."""
    numbers = torch.ones(1 << 26)
    return numbers.nbytes / 1e9 / best({"sum": lambda: numbers.sum()}, 5, clock)["sum"]  # type: ignore[dict-item, return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["decode", "train", "lora"], help="a part of the table")
    parser.add_argument("--compute", choices=["bfloat16", "float32"], help="one type alone")
    parser.add_argument("--quick", action="store_true", help="a small shape and one round")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    shape, rounds = (QUICK, 1) if options.quick else (SHAPE, options.rounds)
    gigabytes = memory_speed(clock)
    amx = "with" if torch.cpu._is_amx_tile_supported() else "without"
    load = os.getloadavg()[0]
    print(f"{options.threads} thread(s), {amx} AMX, memory read at {gigabytes:.1f} GB/s, load {load:.1f}")
    print(f"{'tokens/s':24}{'agentrl':>10}{'transformers':>14}{'ratio':>8}")
    if options.only in (None, "decode"):
        model = make_model(shape, torch.bfloat16)
        if options.compute != "float32":
            for rows in (1, 16, 64):
                decode(model, rows, rounds, clock, gigabytes)
            refresh(model, clock)
        if options.compute != "bfloat16":
            decode(model.float(), 16, rounds, clock, gigabytes)
    for part in ("train", "lora"):
        if options.only in (None, part):
            for compute in (torch.bfloat16, torch.float32):
                if options.compute in (None, str(compute).removeprefix("torch.")):
                    train(shape, part == "lora", compute, rounds, clock)


if __name__ == "__main__":
    main()
