"""Tokens per second of the local engine, compared with transformers' `generate` and its continuous batching.

    python benchmarks/engine.py [--rounds 3] [--threads 1] [--rows 64]

(a) equal: prompts of 50 tokens and 64 new tokens each, all at once.
(b) job: groups of 8 samples per prompt, two to four turns per conversation, answers of 8 to 60 tokens, tool results of
15 to 25 tokens between them, temperature 1. Lengths are forced, so that all engines do the same work: `generate` takes
the turns of all conversations in lockstep and drops finished rows between turns (as a trainer would use it), the others
take each turn when it is ready.

The model is a Qwen3 with the shape of the embedded model and random weights. The engines alternate, and the best round
of each counts, because other load can only slow a round down; under much load, use the CPU time. Only sampled tokens
are counted. With --processes the engine samples in so many, and beside it engines that share nothing do, each its
part of the work, as a measure of what processes could gain.
"""

import argparse
import asyncio
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packing import VOCABULARY, make_model
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from agentrl.compute.flops import Cost, Workload, peak_flops
from agentrl.engine.base import Sampling
from agentrl.engine.local.engine import LocalEngine

ALONE = ("local x 1", "local, 1 apart")
MODEL = {"initializer_range": 0.04, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True)
class Conversation:
    """The fixed parts of a conversation."""

    prompt: list[int]
    """Ids of the prompt."""
    answers: tuple[int, ...]
    """Number of tokens of each answer."""
    results: tuple[list[int], ...]
    """Ids of the tool result after each answer."""

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(self.answers)


def equal_work(rows: int) -> list[Conversation]:
    rng = np.random.default_rng(0)
    return [Conversation(rng.integers(1, VOCABULARY, 50).tolist(), (64,), ()) for _ in range(rows)]


def job_work(groups: int, samples: int = 8) -> list[Conversation]:
    rng = np.random.default_rng(1)
    work = []
    for _ in range(groups):
        prompt = rng.integers(1, VOCABULARY, int(rng.integers(40, 61))).tolist()
        for _ in range(samples):
            turns = int(rng.integers(2, 5))
            answers = tuple(int(n) for n in rng.integers(8, 61, turns))
            results = tuple(rng.integers(1, VOCABULARY, int(rng.integers(15, 26))).tolist() for _ in range(turns - 1))
            work.append(Conversation(prompt, answers, results))
    return work


class Local:
    """The local engine, kept for all rounds as in a training run, with an update of the weights before each round."""

    def __init__(self, model: Any, rows: int, processes: int = 1) -> None:
        self.engine = LocalEngine(model, max_batch=rows, processes=processes)
        self.round = 0

    def __call__(self, work: list[Conversation]) -> None:
        self.round += 1
        asyncio.run(self._all(work))

    async def _all(self, work: list[Conversation]) -> None:
        await self.engine.update_weights(self.round)
        await asyncio.gather(*(self._one(c, f"{self.round}/{i}") for i, c in enumerate(work)))

    async def _one(self, c: Conversation, request_id: str) -> None:
        ids = list(c.prompt)
        for turn, length in enumerate(c.answers):
            generation = await self.engine.generate(ids, Sampling(max_tokens=length), request_id)
            assert len(generation.ids) == length
            ids = ids + generation.ids + (c.results[turn] if turn < len(c.results) else [])
        self.engine.finish(request_id)


class Apart:
    """Engines in processes that have nothing in common, each with its part of the work: what this machine lets several
    processes gain."""

    def __init__(self, rows: int, processes: int) -> None:
        context = get_context("spawn")
        self._ends: list[Any] = []
        self.processes: list[int] = []
        for _ in range(processes):
            own, other = context.Pipe()
            process = context.Process(target=_sample_apart, args=(rows // processes, other), daemon=True)
            process.start()
            self._ends.append(own)
            self.processes.append(process.pid or 0)

    def __call__(self, work: list[Conversation]) -> None:
        part = -(-len(work) // len(self._ends))
        for index, end in enumerate(self._ends):
            end.send(work[index * part : (index + 1) * part])
        for end in self._ends:
            end.recv()

    def close(self) -> None:
        for end in self._ends:
            end.close()


def _sample_apart(rows: int, end: Any) -> None:
    torch.set_num_threads(1)
    side = Local(make_model(**MODEL), rows)
    with suppress(EOFError):
        while True:
            side(end.recv())
            end.send(None)


class _Lengths(StoppingCriteria):
    """Stopping criterion: row i ends after lengths[i] new tokens."""

    def __init__(self, prompt: int, lengths: torch.Tensor) -> None:
        self.prompt, self.lengths = prompt, lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] - self.prompt >= self.lengths


class Generate:
    """`model.generate`, called for one turn of all unfinished conversations at a time, left-padded."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, work: list[Conversation]) -> None:
        histories = [list(c.prompt) for c in work]
        for turn in range(max(len(c.answers) for c in work)):
            live = [i for i, c in enumerate(work) if turn < len(c.answers)]
            width = max(len(histories[i]) for i in live)
            ids = torch.zeros(len(live), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(live):
                ids[row, width - len(histories[i]) :] = torch.tensor(histories[i])
                mask[row, width - len(histories[i]) :] = 1
            lengths = torch.tensor([work[i].answers[turn] for i in live])
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=int(lengths.max()), do_sample=True, top_k=0,
                stopping_criteria=StoppingCriteriaList([_Lengths(width, lengths)]),
            )  # fmt: skip
            for row, i in enumerate(live):
                result = work[i].results[turn] if turn < len(work[i].results) else []
                histories[i] += out[row, width : width + int(lengths[row])].tolist() + result


class Continuous:
    """transformers' continuous batching, with a manager started once. Each turn of a conversation is a new request,
    which shares the blocks of earlier turns if they are in the manager's prefix cache."""

    def __init__(self, model: Any) -> None:
        config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
        self.manager = model.init_continuous_batching(generation_config=config)
        self.manager.start()

    def __call__(self, work: list[Conversation]) -> None:
        turn = [0] * len(work)
        history = [list(c.prompt) for c in work]
        names: dict[str, int] = {}

        def ask(i: int) -> None:
            names[self.manager.add_request(history[i], max_new_tokens=work[i].answers[turn[i]])] = i

        for i in range(len(work)):
            ask(i)
        while names:
            result = self.manager.get_result(timeout=60)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            if not result.is_finished():
                continue
            i = names.pop(result.request_id)
            assert len(result.generated_tokens) == work[i].answers[turn[i]]
            history[i] += result.generated_tokens
            turn[i] += 1
            if turn[i] < len(work[i].answers):
                history[i] += work[i].results[turn[i] - 1]
                ask(i)

    def close(self) -> None:
        self.manager.stop(block=True)


def cpu_seconds(side: object) -> float:
    """CPU time of this process and of those that sample for a side."""
    spent = time.process_time()
    for pid in side.engine.processes if isinstance(side, Local) else side.processes if isinstance(side, Apart) else ():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def arithmetic(work: list[Conversation]) -> float:
    """The FLOPs of the tokens that have to be computed: each but the last of a conversation, shared prompts once."""
    tokens = pairs = 0
    prompts = {tuple(c.prompt) for c in work}
    for start, end in [
        *((0, len(p)) for p in prompts),
        *((len(c.prompt), len(c.prompt) + c.tokens + sum(map(len, c.results)) - 1) for c in work),
    ]:
        tokens, pairs = tokens + end - start, pairs + sum(range(start + 1, end + 1))
    return Cost.of(make_model(**MODEL)).forward(Workload(tokens, sum(c.tokens for c in work), pairs))


def measure(sides: dict[str, Callable[[list[Conversation]], None]], work: list[Conversation], rounds: int) -> None:
    """Print the tokens per second of each engine, the ratio of `local` to it, and the limit."""
    peak = peak_flops(torch.device("cpu"), torch.float32) or 0.0
    wall: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for index in range(rounds + 1):
        for name, side in sides.items():
            began, began_cpu = time.perf_counter(), cpu_seconds(side)
            side(work)
            if index:  # the first round warms up
                wall[name] = min(wall.get(name, 1e9), time.perf_counter() - began)
                cpu[name] = min(cpu.get(name, 1e9), cpu_seconds(side) - began_cpu)
    tokens = sum(c.tokens for c in work)
    print(f"  {'':<14}{'tokens/s':>12}{'ratio':>8}{'tokens/cpu-s':>16}{'ratio':>8}")
    for name in sides:
        ratios = wall[name] / wall["local"], cpu[name] / cpu["local"]
        print(f"  {name:<14}{tokens / wall[name]:>12.0f}{ratios[0]:>8.2f}{tokens / cpu[name]:>16.0f}{ratios[1]:>8.2f}")
    peak = max(peak, peak_flops(torch.device("cpu"), torch.float32) or 0.0)
    share = arithmetic(work) / peak / wall["local"]
    limit = tokens * peak / arithmetic(work)
    print(f"  the limit at {peak / 1e9:.0f} GFLOP/s{limit:>10.0f} tokens/s: local {share:.0%} of it")
    others = [n for n in sides if not n.startswith("local")]
    if not others:
        return
    least = [min(clock[n] for n in others) / clock["local"] for clock in (wall, cpu)]
    print(f"  local against the better of the others: {least[0]:.2f} times by the clock, {least[1]:.2f} by cpu time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64, help="rows of (a); (b) has twice as many conversations")
    parser.add_argument("--only", choices=["local", "generate", "continuous"], help="measure one side")
    parser.add_argument("--processes", type=int, default=1, help="of a further side, the local engine in so many")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    for title, work in (("(a) equal lengths", equal_work(options.rows)), ("(b) the job", job_work(options.rows // 4))):
        print(f"{title}: {len(work)} conversations, {sum(c.tokens for c in work)} tokens, {options.threads} thread(s)")
        rows, sides = len(work), dict[str, Callable[[list[Conversation]], None]]()
        made: dict[str, Callable[[], Callable[[list[Conversation]], None]]] = {
            "local": lambda rows=rows: Local(make_model(**MODEL), rows),  # type: ignore[misc]
            f"local x {options.processes}": lambda rows=rows: Local(make_model(**MODEL), rows, options.processes),  # type: ignore[misc]
            f"local, {options.processes} apart": lambda rows=rows: Apart(rows, options.processes),  # type: ignore[misc]
            "generate": lambda: Generate(make_model(**MODEL)),
            "continuous": lambda: Continuous(
                make_model(**MODEL)
            ),  # its thread takes a core, also while others are measured
        }
        for name, make in made.items():
            if (name.startswith("local") or options.only in (None, name)) and name not in ALONE:
                sides[name] = make()
        measure(sides, work, options.rounds)
        for side in sides.values():
            if isinstance(side, Apart | Continuous):
                side.close()


if __name__ == "__main__":
    main()
