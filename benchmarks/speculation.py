"""Whether drafts would make the embedded engine faster: tokens that are guessed, computed together, and kept as far as
the model samples them.

    python benchmarks/speculation.py RUN [--step 0.5b]

A draft is what followed the last place in the conversation with the same two or three tokens before (prompt lookup).
RUN is the folder of a run: of each of its sampled tokens it is known whether such a draft has it, which happens as
often as rejection sampling would accept it. Kept: the tokens of a step, the one sampled after the draft included.

Cost: the time of a step of so many rows in which each computes a draft besides, times that of a step without one, after
200 tokens, on one thread; logits of the draft's tokens, which take an output layer more, are left out. Gain: kept over
cost; below 1 drafts make it slower. --step 0.5b: the steps of a model of that shape with random weights (2 GB), for
which RUN's drafts are no more than an example.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.engine.local.block_runner import BlockRunner
from agentrl.engine.local.runner import Chunk, Work
from agentrl.models.load import load_model
from agentrl.recipe.sections.model import ModelSection
from agentrl.rollout.stored import read_groups

DRAFTS, ROWS = (1, 2, 4), (1, 4, 16)
MATCHED = (3, 2)
"""Tokens before a draft that have to be the same: the most that are tried first."""
BEFORE, STEPS = 200, 30


def sampled(run: Path) -> Iterator[tuple[list[int], list[bool]]]:
    """The ids of each rollout of the run's steps, and which were sampled."""
    for file in sorted(run.glob("trajectories/step_*.parquet")):
        for group in read_groups(file):
            for trajectory in group.trajectories:
                yield trajectory.ids.tolist(), (trajectory.loss_mask == 1).tolist()


def kept(ids: list[int], own: list[bool], most: int) -> tuple[int, int]:
    """How many tokens were sampled, and in how many steps, with drafts of up to `most` tokens."""
    places: dict[tuple[int, ...], int] = {}
    known = tokens = steps = 0
    at = 0
    while at < len(ids):
        if not own[at]:
            at += 1
            continue
        for end in range(known, at):  # what is before, without its last token, which nothing follows yet
            for width in MATCHED:
                if end >= width:
                    places[tuple(ids[end - width : end])] = end
        known = at
        found = (places.get(tuple(ids[at - width : at])) for width in MATCHED)
        start = next((place for place in found if place is not None), at)
        accepted, longest = 0, min(most, at - start, len(ids) - at)
        while accepted < longest and own[at + accepted] and ids[start + accepted] == ids[at + accepted]:
            accepted += 1
        beyond = at + accepted < len(ids) and own[at + accepted]  # the token that the model samples after the draft
        at += accepted + beyond
        tokens, steps = tokens + accepted + beyond, steps + 1
    return tokens, steps


def seconds(runner: Any, rows: int, draft: int) -> float:
    """The median time of a step in which each of `rows` computes 1 + draft tokens."""
    ids = np.arange(1, 2 + draft) % 50 + 1
    if draft:
        chunks = tuple(Chunk(row, BEFORE, ids) for row in range(rows))
        work = Work(*(np.zeros(0, np.int64),) * 2, np.zeros(0, bool), chunks)
    else:
        work = Work(np.ones(rows, np.int64), np.full(rows, BEFORE), np.ones(rows, bool), ())
    took = []
    for _ in range(STEPS):
        began = time.perf_counter()
        runner.forward(work)
        took.append(time.perf_counter() - began)
    return statistics.median(took[STEPS // 3 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", choices=["embedded", "0.5b"], default="embedded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rollouts = list(sampled(options.run))
    if options.step == "embedded":
        model = load_model(ModelSection(device="cpu", dtype="float32"))[0]
    else:
        from real_model import SHAPE, make_model

        model = make_model(SHAPE, torch.float32)
    runner = BlockRunner(model)
    runner.resize(max(ROWS), BEFORE + 64)
    past = np.arange(BEFORE) % 50 + 1
    nothing = np.zeros(0, np.int64)
    for row in range(max(ROWS)):
        runner.forward(Work(nothing, nothing, np.zeros(0, bool), (Chunk(row, 0, past),)))
    print(f"{len(rollouts)} rollouts, {sum(sum(own) for _, own in rollouts):,} sampled tokens")
    print(f"{'draft':>6}{'kept':>8}" + "".join(f"{f'cost, {rows} rows':>16}{'gain':>8}" for rows in ROWS))
    alone = {rows: seconds(runner, rows, 0) for rows in ROWS}
    for draft in DRAFTS:
        counts = [kept(ids, own, draft) for ids, own in rollouts]
        tokens = sum(count for count, _ in counts) / sum(steps for _, steps in counts)
        costs = [seconds(runner, rows, draft) / alone[rows] for rows in ROWS]
        print(f"{draft:6}{tokens:8.2f}" + "".join(f"{cost:16.2f}{tokens / cost:8.2f}" for cost in costs), flush=True)


if __name__ == "__main__":
    main()
