"""A model of real size beside transformers: decoding, prefill, a training step and one of LoRA, in tokens per second;
a whole update beside TRL's, with its memory; and what a step of 64 long rollouts costs on this machine.

    python benchmarks/real_model.py [--rounds 3] [--threads 1] [--only decode] [--compute float32] [--rows 1 16]
        [--quick]

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
update   an update of agentrl's actor and one of TRL's `GRPOTrainer`, whose `rollout_func` hands it the same
         trajectories: 8 samples of one prompt, with activation checkpointing on both sides; then with an adapter. Each
         side has a process of its own, whose peak of memory is printed. Tokens are samples x (prompt + answer).
         Of train, lora and update the last column says the share of what products of the same type reach here that
         this is; layers computed again for checkpointing are not counted.
a step   64 rollouts of 1,000 tokens in 8 groups, by what decoding 64 rows and the update took: hours.

On one thread, times are CPU seconds of the process, else seconds of the clock; the sides take turns, and the best round
of each counts, because other load can only slow a round down. --compute float32 leaves out bfloat16, in which
transformers and TRL take hours on a processor without instructions for it; --only decode --rows 1 16 takes minutes in
it. --quick: a small shape, one round, to try the script.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packing import compared, make_batch, packed, padded
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from agentrl.compute.batch import Batch
from agentrl.compute.flops import Cost, Workload, peak_flops
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

UPDATED = (256, 128, 8)
"""The same of the update beside TRL's."""
STEP = (64, 1000)
"""Rollouts of a step, and tokens of each."""
WORDS = 800
"""Ids that trajectories are made of: those of the embedded model's tokenizer, which TRL wants to decode them by."""

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


def decode(model: Any, rows: int, rounds: int, clock: Clock, gigabytes: float) -> float:
    """Print a line on decoding, and on the prefill of 16 rows; return our tokens a second."""
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
    return rows * NEW / ours


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


def of_limit(model: Any, batch: Batch, seconds: float, dtype: torch.dtype) -> str:
    """The share of what products allow that a forward and backward pass over `batch` in so many seconds reaches."""
    reached = Cost.of(model).update(Workload.of(batch)) / seconds
    return (
        f"{reached / 1e9:.0f} GFLOP/s, {reached / (peak_flops(torch.device('cpu'), dtype) or np.inf):.0%} of products"
    )


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
    share = of_limit(model, batch, took["ours"], compute)
    line("lora" if lora else "train", kind, int(batch.offsets[-1]), took["ours"], took["theirs"], share)


def update_by_agentrl(model: Any, options: argparse.Namespace) -> list[float]:
    """The seconds of each update."""
    from agentrl.learner.actor import Actor
    from agentrl.recipe.load import load_recipe

    prompt, answer, samples = UPDATED
    recipe = load_recipe(
        None,
        [f"model.compute={'bfloat16' if options.compute == 'bfloat16' else 'same'}", "model.checkpointing=true"]
        + (["model.lora.rank=16"] if options.lora else []),
    )
    if options.lora:
        add_adapter(model, LoraSection(rank=16), "base")
    batch: Batch = make_batch(prompt, answer, samples, 1, varied=False, vocabulary=WORDS)
    sampled = batch.tokens["loss_mask"].astype(np.float32)
    columns = {
        "weight": sampled / sampled.sum(), "logprobs": -sampled,
        "advantages": np.repeat(np.linspace(-1, 1, samples), batch.lengths).astype(np.float32),
    }  # fmt: skip
    actor = Actor(model, recipe)
    took = []
    for _ in range(options.rounds + 1):
        began = time.perf_counter()
        actor.update(batch.with_tokens(**columns), 1e-6)
        took.append(time.perf_counter() - began)
    return took


def update_by_trl(model: Any, options: argparse.Namespace) -> list[float]:
    """The seconds of each update."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from agentrl.models import embedded_path

    prompt, answer, samples = UPDATED
    batch: Batch = make_batch(prompt, answer, samples, 1, varied=False, vocabulary=WORDS)
    rows = [batch.tokens["ids"][batch.span(sample)].tolist() for sample in range(samples)]
    began, took = 0.0, []

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            took.append(time.perf_counter() - began)

    def trajectories(prompts: list[str], _: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [row[:prompt] for row in rows],
            "completion_ids": [row[prompt:] for row in rows],
            "logprobs": [[-1.0] * answer for _ in rows],
        }

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(embedded_path()),
            train_dataset=Dataset.from_list([{"prompt": "1"}] * 64),
            rollout_func=trajectories,
            reward_funcs=lambda completions, **_: np.linspace(-1, 1, len(completions)).tolist(),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if options.lora else None,
            callbacks=[Steps()],
            args=GRPOConfig(
                output_dir=folder, max_steps=options.rounds + 1, learning_rate=1e-6, lr_scheduler_type="constant",
                per_device_train_batch_size=samples, num_generations=samples, gradient_accumulation_steps=1,
                max_completion_length=answer, temperature=1.0, beta=0.0, loss_type="dapo",
                bf16=options.compute == "bfloat16", use_cpu=True, gradient_checkpointing=True, logging_steps=100,
                save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
            ),
        )  # fmt: skip
        trainer.train()
    return took


SIDES = {"agentrl": update_by_agentrl, "trl": update_by_trl}


def update(options: argparse.Namespace, lora: bool) -> float:
    """Print a line on an update by both sides, each in a process of its own; return our seconds."""
    found = {}
    given = ["--rounds", options.rounds, "--threads", options.threads, "--compute", options.compute or "float32"]
    given += ["--quick"] * options.quick + ["--lora"] * lora
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, *map(str, given)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        if done.returncode:
            raise SystemExit(f"{side}: {done.stderr[-2000:]}")
        found[side] = json.loads(done.stdout.splitlines()[-1])
    prompt, answer, samples = UPDATED
    batch: Batch = make_batch(prompt, answer, samples, 1, varied=False, vocabulary=WORDS)
    with torch.device("meta"):
        model = make_model(QUICK if options.quick else SHAPE, torch.float32)
        if lora:
            add_adapter(model, LoraSection(rank=16), "base")
    ours, theirs = (statistics.median(found[side]["seconds"][1:]) for side in SIDES)
    memory = ", ".join(f"{side} {found[side]['gigabytes']:.1f} GB" for side in SIDES)
    what = "update, LoRA" if lora else "update"
    share = of_limit(model, batch, ours, getattr(torch, options.compute or "float32"))
    more = f"{memory}; {ours:.1f} s, {share}"
    line(what, options.compute or "float32", samples * (prompt + answer), ours, theirs, more)
    return ours


def one_side(options: argparse.Namespace, shape: dict[str, int]) -> None:
    """Print the seconds of each of its updates, the first of which warms up, and the peak of this process's memory."""
    seconds = SIDES[options.side](make_model(shape, torch.float32), options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"seconds": seconds, "gigabytes": peak}))


def step(sampled: float, trained: float) -> None:
    """Print what a step of long rollouts costs. sampled: tokens a second; trained: likewise, of an update."""
    rollouts, length = STEP
    tokens = rollouts * length
    hours = tokens / sampled / 3600, tokens / trained / 3600
    took = f"{hours[0]:.2f} h of sampling, {hours[1]:.2f} h of training"
    print(f"a step of {rollouts} rollouts of {length:,} tokens: {took}")


def memory_speed(clock: Clock) -> float:
    """The GB that a sum reads a second."""
    numbers = torch.ones(1 << 26)
    return numbers.nbytes / 1e9 / best({"sum": lambda: numbers.sum()}, 5, clock)["sum"]  # type: ignore[dict-item, return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["decode", "train", "lora", "update"], help="a part of the table")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 16, 64), help="rows that are decoded")
    parser.add_argument("--compute", choices=["bfloat16", "float32"], help="one type alone")
    parser.add_argument("--quick", action="store_true", help="a small shape and one round")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--lora", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    shape, rounds = (QUICK, 1) if options.quick else (SHAPE, options.rounds)
    if options.side is not None:
        one_side(options, shape)
        return
    gigabytes = memory_speed(clock)
    amx = "with" if torch.cpu._is_amx_tile_supported() else "without"
    load = os.getloadavg()[0]
    print(f"{options.threads} thread(s), {amx} AMX, memory read at {gigabytes:.1f} GB/s, load {load:.1f}")
    print(f"{'tokens/s':24}{'agentrl':>10}{'transformers':>14}{'ratio':>8}")
    sampled = trained = 0.0
    if options.only in (None, "update"):  # first, while this process holds no model beside theirs
        prompt, answer, samples = UPDATED
        trained = samples * (prompt + answer) / update(options, lora=False)
        update(options, lora=True)
    if options.only in (None, "decode"):
        model = make_model(shape, torch.bfloat16)
        if options.compute != "float32":
            for rows in options.rows:
                sampled = decode(model, rows, rounds, clock, gigabytes)
            refresh(model, clock)
        if options.compute != "bfloat16":
            model = model.float()
            for rows in options.rows:
                found = decode(model, rows, rounds, clock, gigabytes)
            sampled = max(sampled, found)
    for part in ("train", "lora"):
        if options.only in (None, part):
            for compute in (torch.bfloat16, torch.float32):
                if options.compute in (None, str(compute).removeprefix("torch.")):
                    train(shape, part == "lora", compute, rounds, clock)
    if sampled and trained:
        step(sampled, trained)


if __name__ == "__main__":
    main()
