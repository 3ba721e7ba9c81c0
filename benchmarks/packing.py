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
fast       our forward on prefix trees (BlockForward);   module   the Hugging Face module on them (ModuleForward).

Tokens are samples x (prompt + answer), the same for all methods. Times are CPU seconds of the process, the minimum of
the rounds, with alternating methods: on one thread, that is the time on a core of its own, whatever else runs on the
machine. The log-probs of all methods are compared before anything is timed.

A second table has conversations of turns of about 48 tokens behind a prompt of 100, our forward alone:

turns k    8 samples of 6 turns, of which either half has its first k in common
thinking   4 rollouts of 4 turns whose thinking is left out of later turns: a path each turn
retries    4 rollouts of 6 turns that went back after the second and after the fourth turn: 3 paths
compacted  4 rollouts that went on from a summary twice: 3 paths, which have the prompt alone in common
schemas    8 samples of 2 turns, and 500 tokens before the prompts that are the same in all groups, as those of tools

separate   every path by itself;   prompt   what all paths of a group have in common once
tree       every beginning once, of several groups, too
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.compute import batch as batch_module
from agentrl.compute.batch import Batch
from agentrl.compute.forward import BlockForward, Forward, ModuleForward
from agentrl.compute.packing import micro_batches

VOCABULARY = 832
LENGTHS = ((48, 48), (200, 50), (400, 25))
GROUPS = (8, 16)


def make_model(**more: Any) -> Any:
    """A model with random weights and the shape of the embedded model. more: of its configuration."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True, **more,
        )
    ).eval()  # fmt: skip


def make_batch(
    prompt: int, answer: int, samples: int, groups: int, varied: bool, vocabulary: int = VOCABULARY
) -> Batch:
    rng = np.random.default_rng(0)
    rows: list[list[np.ndarray]] = []
    prompts = []
    for _ in range(groups):
        rows.append([])
        length = int(rng.integers(prompt * 3 // 4, prompt * 5 // 4)) if varied else prompt
        opening = rng.integers(1, vocabulary, length)
        for _ in range(samples):
            drawn = rng.lognormal(-0.18, 0.6) if varied else 1.0
            own = rng.integers(1, vocabulary, max(1, round(answer * min(drawn, 4))))
            rows[-1].append(np.concatenate([opening, own]))
            prompts.append(length)
    return batch_of(rows, prompts)


def batch_of(groups: Sequence[Sequence[np.ndarray]], prompts: Sequence[int]) -> Batch:
    """A batch of the rows of all groups, which are sampled behind their prompts; column `weight` of the loss."""
    rows = [row for group in groups for row in group]
    mask = [np.arange(len(row)) >= length for row, length in zip(rows, prompts, strict=True)]
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    weight = np.random.default_rng(1).normal(size=int(offsets[-1])).astype(np.float32)
    return Batch(
        offsets,
        {"ids": np.concatenate(rows).astype(np.int32), "loss_mask": np.concatenate(mask).astype(np.uint8)},
        {
            "prompt_length": np.array(prompts, np.int32),
            "group": np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        },
    ).with_tokens(weight=weight)


Turns = Callable[[int], list[np.ndarray]]
"""Makes as many turns, of new ids."""


def forked(prompt: np.ndarray, turns: Turns, shared: int) -> Iterator[np.ndarray]:
    for common in (turns(shared), turns(shared)):
        yield from (np.concatenate([prompt, *common, *turns(6 - shared)]) for _ in range(4))


def thinking(prompt: np.ndarray, turns: Turns) -> Iterator[np.ndarray]:
    for _ in range(4):
        thoughts, answers = turns(4), turns(4)
        yield from (np.concatenate([prompt, *answers[:k], thoughts[k], answers[k]]) for k in range(4))


def retries(prompt: np.ndarray, turns: Turns) -> Iterator[np.ndarray]:
    for _ in range(4):
        first = turns(6)
        second = [*first[:4], *turns(2)]
        yield from (np.concatenate([prompt, *path]) for path in (first, second, [*first[:2], *turns(4)]))


def compacted(prompt: np.ndarray, turns: Turns) -> Iterator[np.ndarray]:
    for _ in range(4):
        summary: list[np.ndarray] = []
        for _ in range(3):
            path = [*summary, *turns(4)]
            summary = turns(1)
            yield np.concatenate([prompt, *path, *summary])


CONVERSATIONS: dict[str, Callable[[np.ndarray, Turns], Iterator[np.ndarray]]] = {
    **{f"turns {k}": lambda prompt, turns, k=k: forked(prompt, turns, k) for k in (1, 2, 4)},
    "thinking": thinking,
    "retries": retries,
    "compacted": compacted,
    "schemas": lambda prompt, turns: (np.concatenate([prompt, *turns(2)]) for _ in range(8)),
}
SYSTEM = {"schemas": 500}
"""Tokens before the prompts of all groups."""


def conversations(name: str, groups: int, turn: int = 48, prompt: int = 100, vocabulary: int = VOCABULARY) -> Batch:
    """Groups of a kind of CONVERSATIONS; turns have `turn` tokens, a quarter more or less."""
    rng = np.random.default_rng(0)

    def turns(count: int) -> list[np.ndarray]:
        return [rng.integers(1, vocabulary, rng.integers(turn * 3 // 4, turn * 5 // 4 + 1)) for _ in range(count)]

    system = rng.integers(1, vocabulary, SYSTEM.get(name, 0))
    prompts = [np.concatenate([system, rng.integers(1, vocabulary, prompt)]) for _ in range(groups)]
    rows = [list(CONVERSATIONS[name](opening, turns)) for opening in prompts]
    return batch_of(rows, [len(system) + prompt] * sum(map(len, rows)))


Result = TypeVar("Result")


def prompts_alone(work: Callable[[], Result]) -> Result:
    """Do it with a tree of one level for each group."""
    least, batch_module.LEAST = batch_module.LEAST, 1 << 40
    try:
        return work()
    finally:
        batch_module.LEAST = least


def packed(forward: Forward, batch: Batch, budget: int) -> np.ndarray:
    """The log-probs [T] of the batch; add the gradient of their weighted sum to that of the parameters."""
    found = np.zeros(int(batch.offsets[-1]), np.float32)
    for row in micro_batches(batch, budget):
        logprobs, _ = forward(row, 1.0)
        weight = torch.from_numpy(batch.tokens["weight"][row.source]).to(logprobs.device)
        (logprobs * weight).sum().backward()
        found[row.source] = logprobs.detach().cpu()
    return found


def computed(batch: Batch, budget: int) -> int:
    """Packed tokens of all micro-batches."""
    return sum(len(row.ids) for row in micro_batches(batch, budget))


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


def unshared(forward: Forward, batch: Batch, budget: int) -> np.ndarray:
    """Do the same as `packed` with every sample in a group of its own, so that no prefix is shared."""
    return prompts_alone(lambda: packed(forward, batch.with_samples(group=np.arange(len(batch))), budget))


def compared(sides: dict[str, Callable[[], np.ndarray]], tolerance: float) -> None:
    """Run each method once, which also warms it up, and exit if log-probs differ from the first's by more."""
    found = {name: work() for name, work in sides.items()}
    wanted = next(iter(found.values()))
    for name, logprobs in found.items():
        if (off := float(np.abs(logprobs - wanted).max())) > tolerance:
            raise SystemExit(f"log-probs of {name} are off by {off:.2g}: nothing to compare")


def seconds(
    sides: dict[str, Callable[[], np.ndarray]], model: Any, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """The minimum CPU seconds of each method over alternating rounds."""
    best = dict.fromkeys(sides, np.inf)
    for _ in range(rounds):
        for name, work in sides.items():
            model.zero_grad()
            start = clock()
            work()
            best[name] = min(best[name], clock() - start)
    return best


def measure(model: Any, batch: Batch, budget: int, rounds: int) -> dict[str, float]:
    """The tokens per second of each method."""
    fast, module = BlockForward(model), ModuleForward(model)
    sides: dict[str, Callable[[], np.ndarray]] = {
        "padded": lambda: padded(model, batch, budget),
        "unshared": lambda: unshared(fast, batch, budget),
        "fast": lambda: packed(fast, batch, budget),
        "module": lambda: packed(module, batch, budget),
    }
    compared(sides, 1e-4)
    times = seconds(sides, model, rounds, time.process_time)
    return {name: int(batch.offsets[-1]) / spent for name, spent in times.items()}


def measure_trees(model: Any, batch: Batch, budget: int, rounds: int) -> list[float]:
    """Packed tokens as shares of the paths', and speeds as multiples of that of separate paths: of the prompt
    alone, and of the tree."""
    fast = BlockForward(model)
    sides: dict[str, Callable[[], np.ndarray]] = {
        "separate": lambda: unshared(fast, batch, budget),
        "prompt": lambda: prompts_alone(lambda: packed(fast, batch, budget)),
        "tree": lambda: packed(fast, batch, budget),
    }
    compared(sides, 1e-4)
    times = seconds(sides, model, rounds, time.process_time)
    counts = [prompts_alone(lambda: computed(batch, budget)), computed(batch, budget)]
    shares = [count / int(batch.offsets[-1]) for count in counts]
    return [*shares, *(times["separate"] / times[side] for side in ("prompt", "tree"))]


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

    print("\nconversations          tokens of separate     times separate    tree times prompt")
    print("             paths      prompt    tree        prompt    tree")
    for name in CONVERSATIONS:
        batch = conversations(name, options.groups)
        found = measure_trees(model, batch, options.budget, options.rounds)
        print(
            f"{name:10s}  {len(batch):6d}      {found[0]:6.2f}  {found[1]:6.2f}        {found[2]:6.2f}  {found[3]:6.2f}"
            f"    {found[3] / found[2]:13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
