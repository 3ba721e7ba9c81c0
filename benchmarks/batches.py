"""Batches for benchmarks: what a rollout would have given, with random tokens and advantages. As a script, how evenly
they are cut into micro-batches:

    python benchmarks/batches.py [--ranks 8] [--tasks 256] [--samples 16]

Prompts of about 416 tokens (a quarter more or less), answers log-normal (sigma 0.6, cut at 4 times the mean of 2370): a
step of 11.3 million tokens by default, split over the ranks as `Batch.distribute` does. Nothing is computed but the
cuts.

greedy     groups in their order until a micro-batch is full, as this project did at first
even       `agentrl.compute.packing.bins`: as many even bins on every rank as the fullest needs, the largest first

Since FSDP2 lets ranks meet in every layer, the i-th micro-batch of all ranks takes as long as the largest of them:

path       the sum of these largest, in packed tokens
computed   the packed tokens of all ranks: a group that is cut repeats its prompt
busy       the share of the path in which a rank computes
operations the path with attention, in operations of a shape of 3 billion parameters: bins are even in tokens alone
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from agentrl.compute.batch import Batch, prefix_trees
from agentrl.compute.packing import bins
from agentrl.compute.prefix_tree import PrefixTree

BODY, PAIR = 2_774_000_000, 4 * 36 * 16 * 128
"""Of Qwen2.5-3B: parameters in matrices that each token passes, and operations of a token that attends to another."""
LIMITS = (32_768, 16_384)
Bins = list[list[PrefixTree]]


def make_batch(groups: int, samples: int, prompt: int, answer: int, vocabulary: int, seed: int = 0) -> Batch:
    """A batch of `groups` prompts of about `prompt` tokens, each with `samples` answers of about `answer` tokens
    (25 % more or less).

    Log-probs are those of a uniform distribution over `vocabulary`; advantages are standard normal, one per sample.
    """
    rng = np.random.default_rng(seed)
    rows, prompts = [], []
    for _ in range(groups):
        opening = rng.integers(1, vocabulary, int(rng.integers(prompt * 3 // 4, prompt * 5 // 4 + 1)))
        for _ in range(samples):
            length = int(rng.integers(max(1, answer * 3 // 4), answer * 5 // 4 + 1))
            rows.append(np.concatenate([opening, rng.integers(1, vocabulary, length)]))
            prompts.append(len(opening))
    mask = np.concatenate([np.arange(len(row)) >= p for row, p in zip(rows, prompts, strict=True)]).astype(np.uint8)
    batch = Batch(
        np.cumsum([0, *(len(row) for row in rows)]),
        {
            "ids": np.concatenate(rows).astype(np.int32),
            "loss_mask": mask,
            "logprobs": (-np.log(vocabulary) * mask).astype(np.float32),
        },
        {"prompt_length": np.array(prompts, np.int32), "group": np.repeat(np.arange(groups), samples)},
    )
    return batch.with_tokens(advantages=batch.spread(rng.normal(size=len(batch)).astype(np.float32)))


def make_step(tasks: int, samples: int, seed: int = 0) -> Batch:
    """A step of `tasks` groups of `samples`, at the shape that the docstring names."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(rng.integers(312, 520, tasks), samples)
    answers = np.clip(2370 * rng.lognormal(-0.18, 0.6, tasks * samples), 8, 4 * 2370).astype(np.int64)
    lengths = prompts + answers
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    group = np.repeat(np.arange(tasks), samples)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    answered = position >= np.repeat(prompts, lengths)
    answer = tasks + np.repeat(np.arange(tasks * samples), lengths)  # what samples of a group share is the prompt alone
    ids = np.where(answered, answer, np.repeat(group, lengths)).astype(np.int32)
    return Batch(
        offsets,
        {"ids": ids, "loss_mask": answered.astype(np.uint8)},
        {"prompt_length": prompts.astype(np.int32), "group": group},
    )


def greedy(batch: Batch, tokens: int) -> Bins:
    """The cut that `bins` is compared with."""
    found: Bins = []
    used = tokens
    for tree in _bounded(prefix_trees(batch), tokens):
        if used + tree.tokens > tokens:
            found.append([])
            used = 0
        found[-1].append(tree)
        used += tree.tokens
    return found


def _bounded(trees: Sequence[PrefixTree], tokens: int) -> Iterator[PrefixTree]:
    for tree in trees:
        low = 0
        for place in range(1, len(tree.samples)):
            if tree.cost_between(low, place + 1) > tokens:
                yield tree.subset(range(low, place))
                low = place
        yield tree.subset(range(low, len(tree.samples)))


def even(parts: Sequence[Batch], tokens: int) -> list[Bins]:
    """The bins of each rank, as `aligned_micro_batches` cuts them."""
    found = [bins(part, tokens) for part in parts]
    most = max(map(len, found))
    again = [cut if len(cut) == most else bins(part, tokens, most) for part, cut in zip(parts, found, strict=True)]
    return [new if len(new) <= most else cut for new, cut in zip(again, found, strict=True)]


def tokens_of(trees: Sequence[PrefixTree]) -> int:
    """The packed tokens of a micro-batch."""
    return sum(tree.tokens for tree in trees)


def operations_of(trees: Sequence[PrefixTree]) -> int:
    """The operations of its forward and backward pass, without the output layer."""
    return 6 * BODY * tokens_of(trees) + 3 * PAIR * sum(tree.pairs for tree in trees)


def path(cut: Sequence[Bins], size: Callable[[Sequence[PrefixTree]], int]) -> np.ndarray:
    """The sizes of micro-batches, [ranks, passes], 0 where a rank has none."""
    sizes = np.zeros((len(cut), max(map(len, cut))))
    for rank, trees in enumerate(cut):
        sizes[rank, : len(trees)] = [size(t) for t in trees]
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=256)
    parser.add_argument("--samples", type=int, default=16)
    options = parser.parse_args()
    batch = make_step(options.tasks, options.samples)
    print(f"{len(batch)} samples, {int(batch.offsets[-1]) / 1e6:.1f} M tokens, {options.ranks} ranks")
    print("limit   updates  cut     passes  computed M  path M  busy  |  operations 1e15  busy  |  s a rank   times")
    for limit in LIMITS:
        for updates in (1, 4):
            parts = batch.split(updates)[0].distribute(options.ranks).parts
            base = 0.0
            for name in ("greedy", "even"):
                began = time.process_time()
                cut = [greedy(part, limit) for part in parts] if name == "greedy" else even(parts, limit)
                took = (time.process_time() - began) / options.ranks
                tokens, work = (path(cut, size) for size in (tokens_of, operations_of))
                whole, flops = tokens.max(0).sum(), work.max(0).sum()
                base = base or whole
                print(
                    f"{limit:6d}  {updates:7d}  {name:6s}  {tokens.shape[1]:6d}  {tokens.sum() / 1e6:10.2f}"
                    f"  {whole / 1e6:6.3f}  {tokens.mean(0).sum() / whole:4.2f}  |  {flops / 1e15:15.2f}"
                    f"  {work.mean(0).sum() / flops:4.2f}  |  {took:8.2f}      {base / whole:5.2f}"
                )


if __name__ == "__main__":
    main()
