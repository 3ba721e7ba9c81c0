"""Training tokens per second of shared-prefix packing, compared with a padded batch and packing of whole rows.

    python benchmarks/packing.py [--rounds 3] [--budget 4096] [--groups 4]

Forward and backward pass on one core, prompt:answer 1:1, 4:1 and 16:1, groups of 8 and 16 answers; answers of equal
length (so that the padded batch has no padding) and of different lengths (log-normal, sigma 0.6, at most 4 times the
mean; prompts 25 % longer or shorter). All methods compute the same loss, a weighted sum of the log-probs of the
answers' tokens, on the same model, in micro-batches of at most `budget` computed tokens, and compute logits only for
positions that predict an answer's token.

padded     the Hugging Face module (sdpa), rows in the order of the batch, padded on the right to the longest of their
           micro-batch, with an attention mask if lengths differ.
unshared   our forward on the same rows packed one after another, each with its prompt.
fast       our forward on shared-prefix trees (BlockForward);  module   the Hugging Face module on them (ModuleForward).

Tokens are samples x (prompt + answer), the same for all methods. Times are CPU seconds of the process, the minimum of
the rounds, with alternating methods: on one thread, that is the time on a core of its own, whatever else runs on the
machine. The log-probs of all methods are compared before anything is timed.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.compute.batch import Batch
from agentrl.compute.block_forward import BlockForward
from agentrl.compute.forward import Forward, ModuleForward
from agentrl.compute.packing import micro_batches

VOCABULARY = 832
LENGTHS = ((48, 48), (200, 50), (400, 25))
GROUPS = (8, 16)


def make_model() -> Any:
    """Return a model with random weights and the shape of the embedded model."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip


def make_batch(
    prompt: int, answer: int, samples: int, groups: int, varied: bool, vocabulary: int = VOCABULARY
) -> Batch:
    rng = np.random.default_rng(0)
    rows, prompts = [], []
    for _ in range(groups):
        length = int(rng.integers(prompt * 3 // 4, prompt * 5 // 4)) if varied else prompt
        opening = rng.integers(1, vocabulary, length)
        for _ in range(samples):
            drawn = rng.lognormal(-0.18, 0.6) if varied else 1.0
            own = rng.integers(1, vocabulary, max(1, round(answer * min(drawn, 4))))
            rows.append(np.concatenate([opening, own]))
            prompts.append(length)
    mask = [np.arange(len(row)) >= length for row, length in zip(rows, prompts, strict=True)]
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    return Batch(
        offsets,
        {
            "ids": np.concatenate(rows).astype(np.int32),
            "loss_mask": np.concatenate(mask).astype(np.uint8),
            "weight": rng.normal(size=int(offsets[-1])).astype(np.float32),
        },
        {"prompt_length": np.array(prompts, np.int32), "group": np.repeat(np.arange(groups), samples)},
    )


def packed(forward: Forward, batch: Batch, budget: int) -> np.ndarray:
    """Return the log-probs [T] of the batch; add the gradient of their weighted sum to that of the parameters."""
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    for row in micro_batches(batch, budget):
        logprobs, _ = forward(row, 1.0)
        weight = torch.from_numpy(batch.tokens["weight"][row.source]).to(logprobs.device)
        (logprobs * weight).sum().backward()
        found[row.source] = logprobs.detach().cpu()
    return found


def padded(model: Any, batch: Batch, budget: int) -> np.ndarray:
    """Do the same as `packed` by the module, on padded rectangles."""
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    for samples in rectangles(batch.lengths, budget):
        part = batch.select(samples)
        longest = int(part.lengths.max())
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        real = torch.arange(longest) < torch.from_numpy(part.lengths)[:, None]
        ids[real] = torch.from_numpy(part.tokens["ids"].astype(np.int64))
        wanted, weight = torch.zeros_like(real), torch.zeros(ids.shape)
        wanted[real] = torch.from_numpy(part.tokens["loss_mask"].astype(bool))
        weight[real] = torch.from_numpy(part.tokens["weight"])
        mask = None if bool(real.all()) else real.long().to(model.device)
        states = model.model(input_ids=ids.to(model.device), attention_mask=mask, use_cache=False).last_hidden_state
        logits = model.lm_head(states[:, :-1][wanted[:, 1:].to(model.device)]).float()
        target = ids[wanted].to(model.device)
        logprobs = logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1)
        (logprobs * weight[wanted].to(model.device)).sum().backward()
        where = batch.positions(samples)
        found[where[part.tokens["loss_mask"].astype(bool)]] = logprobs.detach().cpu()
    return found


def rectangles(lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Split the samples into runs of at most `budget` tokens with padding; yield the indices of each run."""
    run: list[int] = []
    for sample, length in enumerate(lengths.tolist()):
        if run and max(length, *(int(lengths[s]) for s in run)) * (len(run) + 1) > budget:
            yield np.array(run)
            run = []
        run.append(sample)
    yield np.array(run)


def apart(batch: Batch) -> Batch:
    """Return the batch with every sample in a group of its own, so that no prefix is shared."""
    return batch.with_samples(group=np.arange(len(batch)))


def compared(sides: dict[str, Callable[[], np.ndarray]], tolerance: float) -> None:
    """Run each method once, which also warms it up, and exit if the log-probs differ by more than `tolerance`."""
    found = {name: work() for name, work in sides.items()}
    for name, logprobs in found.items():
        if (off := float(np.abs(logprobs - found["padded"]).max())) > tolerance:
            raise SystemExit(f"log-probs of {name} are off by {off:.2g}: nothing to compare")


def seconds(
    sides: dict[str, Callable[[], np.ndarray]], model: Any, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return the minimum CPU seconds of each method over alternating rounds."""
    best = dict.fromkeys(sides, np.inf)
    for _ in range(rounds):
        for name, work in sides.items():
            model.zero_grad()
            start = clock()
            work()
            best[name] = min(best[name], clock() - start)
    return best


def measure(model: Any, batch: Batch, budget: int, rounds: int) -> dict[str, float]:
    """Return the tokens per second of each method."""
    fast, module = BlockForward(model), ModuleForward(model)
    sides: dict[str, Callable[[], np.ndarray]] = {
        "padded": lambda: padded(model, batch, budget),
        "unshared": lambda: packed(fast, apart(batch), budget),
        "fast": lambda: packed(fast, batch, budget),
        "module": lambda: packed(module, batch, budget),
    }
    compared(sides, 1e-4)
    times = seconds(sides, model, rounds, time.process_time)
    return {name: int(batch.offsets[-1]) / spent for name, spent in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=4096, help="computed tokens of a micro-batch")
    parser.add_argument("--groups", type=int, default=4)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model = make_model()
    print("tokens/s, forward and backward, one core              times padded          times unshared")
    print("prompt:answer  group  lengths    padded  unshared  |  fast  module  |  fast  module")
    for prompt, answer in LENGTHS:
        for samples in GROUPS:
            for varied in (False, True):
                batch = make_batch(prompt, answer, samples, options.groups, varied)
                speed = measure(model, batch, options.budget, options.rounds)
                ratios = [speed[side] / speed[base] for base in ("padded", "unshared") for side in ("fast", "module")]
                print(
                    f"{prompt:5d}:{answer:<7d} {samples:5d}  {'varied' if varied else 'equal':7s}"
                    f" {speed['padded']:9.0f} {speed['unshared']:9.0f}  |"
                    f" {ratios[0]:5.2f} {ratios[1]:7.2f}  | {ratios[2]:5.2f} {ratios[3]:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
