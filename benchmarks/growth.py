"""How the time of each part of a run grows: with tasks, turns, history, branches, samples, rollouts at once, and steps.
Nothing may grow faster than the work.

    python benchmarks/growth.py                      every row; about twelve minutes
    python benchmarks/growth.py --only turns,why     those whose names hold one of these

CPU seconds of this process, the least of three runs, at sizes that are 2 to 4 times apart. The exponent is the slope
of log seconds over log work between the last size and one at least eight times smaller: 1 says that twice the work
takes twice the time, 0 that it takes no more. Above 1.05 a row is marked. Where the work is not the size itself (a
gateway that is sent all of the history with each call, attention over what is behind a token) the table says what is
counted: bytes, or operations. Short runs are left out of the slope: under 5 ms it would be that of the clock. Of a
marked row the exponent of the calls of functions says whether more is done, or the same takes longer, presumably
as what is held at a large size no longer fits the processor's caches.
"""

import argparse
import asyncio
import cProfile
import gc
import json
import logging
import math
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from driver import Gate, InstantEngine, Question, build_chat, history_text, multiply
from gateway import Instant, Talk, Words, clients

from agentrl import Recipe
from agentrl.checkpoint.run_folder import RunFolder
from agentrl.compute.batch import Batch, prefix_trees
from agentrl.compute.packing import bins
from agentrl.data.sampler import TaskSampler, make_sampler
from agentrl.data.source import open_source
from agentrl.engine.base import Generation, GenerationFinish, Sampling
from agentrl.eval.why import diagnose
from agentrl.gateway.call import Call
from agentrl.learner.monitors import Health
from agentrl.plugins.types import Task
from agentrl.recipe.sections.env import DataSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.conversation_tree import ConversationTree
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import rare_collections, roll_out
from agentrl.rollout.journal import Journal
from agentrl.rollout.stream import Plan, Stream
from agentrl.trajectory import FinishReason, Group, Learned, ToolUse, Trajectory, Turn
from agentrl.view.store import RunStore

Run = Callable[[], object]
"""What is timed."""
LIMIT = 1.05
LEAST = 0.005  # seconds from which on a run counts
APART = 8  # times between the sizes that the slope is taken from


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    """What grows, and with what."""
    sizes: Sequence[int]
    """Ascending."""
    prepare: Callable[[int, Path], Run]
    """Makes what is timed for a size, in a folder of its own; its own time does not count."""
    work: Callable[[int], float] = float
    """From a size to the work that it is."""
    of: str = ""
    """What the work is; empty: the size."""


# ---- tasks


def read_rows(count: int, folder: Path) -> Run:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} times 3?", "answer": 3 * i}) + "\n" for i in range(count)))

    def run() -> None:
        rows = open_source(str(path)).rows("train")
        assert sum(len(rows.row(i)) for i in range(len(rows))) == 2 * len(rows)

    return run


def epoch(count: int, folder: Path) -> Run:
    def run() -> None:
        sampler = TaskSampler(count, 0)
        for _ in range(count // 16 + 1):
            sampler.draw(16)
            sampler.state()

    return run


def curriculum(count: int, folder: Path) -> Run:
    tasks = [Task(str(i), {}) for i in range(count)]
    section = DataSection.model_validate({"order": {"name": "curriculum"}})

    def run() -> None:
        sampler = make_sampler(section, tasks, 0)
        for _ in range(20):
            for index in sampler.draw(16):
                sampler.learn(index, 0.5, [0.0, 1.0])

    return run


# ---- rollouts


def rollouts(kind: str, requests: int, turns: int, history: int) -> Run:
    chat, call, last = build_chat(kind, history)
    limits = RolloutSection(
        max_turns=turns + 1, max_tool_calls=turns, max_tokens=1 << 30, concurrency=requests, timeout=3600
    )

    def run() -> None:
        gates = Gate(requests), Gate(requests)
        driver = Driver(
            engine=InstantEngine(call, last, turns, *gates),  # type: ignore[arg-type]
            chat=chat, limits=limits, environment=Question(history_text(history)), tools=[multiply],
        )  # fmt: skip
        groups = asyncio.run(roll_out(driver, [Task(str(i), {}) for i in range(max(1, requests // 10))], 10))
        assert all(len(t.turns) == turns + 1 for g in groups for t in g.trajectories)

    return run


def stream(groups: int, folder: Path) -> Run:
    """Steps of so many groups of two samples, one update behind."""
    environment = Talk()
    limits = RolloutSection(max_tokens=1 << 29, max_turns=8, timeout=3600, concurrency=2 * groups)

    async def play() -> None:
        driver = Driver(engine=Instant(), chat=Words(), environment=environment, tools=(), limits=limits)
        tasks = [Task(str(i), {}) for i in range(groups)]
        sampler = TaskSampler(groups, 0)
        one = Stream(driver, tasks, lambda: sampler.draw(1)[0], Plan(2, groups, 2, 0, 1))
        for step in range(2):
            assert len(await one.take()) == groups
            one.advance(step + 1)
        await one.close()

    return lambda: asyncio.run(play())


def agent_calls(turns: int, folder: Path) -> Run:
    """An agent's conversation of so many turns through the gateway; the agent is in another process."""

    def run() -> float:
        with clients() as bench:
            asyncio.run(bench.gateway(1, 2))  # what the first call imports
            return asyncio.run(bench.gateway(1, turns)) * turns / 1e6

    return run


def branches(count: int, folder: Path) -> Run:
    """So many answers to one prompt of a rollout, each gone on from once, to a batch and its prefix tree."""
    chat = Words()
    opening = {"role": "user", "content": "What is to be done? " * 20}

    def run() -> None:
        tree = ConversationTree("t", chat)  # type: ignore[arg-type]
        for index in range(count):
            said = {"role": "assistant", "content": f"Plan {index}."}
            node = tree.add(Call((opening,)))
            ids = [*map(ord, said["content"]), 1]
            tree.answer(node, Generation(ids, [-0.5] * len(ids), GenerationFinish.STOP), said)
            tree.add(Call((opening, said, {"role": "user", "content": "Go on."})))
            tree.relatives(tree.nodes[-1])
        assert len(list(tree.segments())) == count

    return run


# ---- samples


def trajectory(rng: np.random.Generator, task: Task, sample: int, prompt: np.ndarray, length: int = 200) -> Trajectory:
    ids = np.concatenate([prompt, rng.integers(0, 512, length, np.int32)]).astype(np.int32)
    mask = np.zeros(len(ids), np.uint8)
    mask[len(prompt) :] = 1
    mask[len(prompt) + 80 : len(prompt) + 120] = 0
    turns = Turn(len(prompt), len(prompt) + 80), Turn(len(prompt) + 120, len(ids))
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": f"{sample}+1"}}}
    text = " ".join(map(str, rng.integers(0, 1000, 40)))
    messages = (
        {"role": "user", "content": task.data["question"]},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": str(sample + 1)},
        {"role": "assistant", "content": text},
    )
    return Trajectory(
        f"{task.id}#{sample}", task, sample, ids, mask, -rng.exponential(0.3, len(ids)).astype(np.float32) * mask,
        np.where(mask, 1, -1).astype(np.int32), len(prompt), turns, messages, {"answer": float(rng.integers(2))},
        FinishReason.STOP, tool_uses=(ToolUse("calculator", 0, 0.01, "no number" if sample % 7 == 0 else None),),
        seconds={"total": 1.0, "engine": 0.6, "tools": 0.1, "environment": 0.0, "hooks": 0.01}, tools=("calculator",),
    )  # fmt: skip


def groups_of(count: int, n: int) -> list[Group]:
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        task = Task(f"t{i}", {"question": f"What is {i} plus one?", "kind": f"kind {i % 12}"})
        prompt = rng.integers(0, 512, 80, np.int32)
        made.append(Group(task, tuple(trajectory(rng, task, s, prompt) for s in range(n)), ()))
    return made


def batch(count: int, n: int) -> Run:
    """From groups to micro-batches, shared by four workers."""
    groups = groups_of(count, n)

    def run() -> None:
        made = Batch.from_groups(groups)
        for part in made.distribute(4).parts:
            bins(part, 8192)

    return run


def one_group(n: int, folder: Path) -> Run:
    groups = groups_of(1, n)

    def run() -> None:
        made = Batch.from_groups(groups)
        (tree,) = prefix_trees(made)
        assert tree.root == 80
        made.distribute(4)

    return run


# ---- the engine


def decode(history: int, folder: Path) -> Run:
    """64 tokens in each of four conversations behind so long a history, which the cache holds."""
    return _engine(history, 64)


def prefill(history: int, folder: Path) -> Run:
    """A prompt of so many tokens, and one token."""
    return _engine(history, 0)


def _engine(history: int, decoded: int) -> Run:
    import torch
    from packing import VOCABULARY, make_model

    from agentrl.engine.local.engine import LocalEngine

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make_model()
    model.config.max_position_embeddings = 65_536  # positions are computed, so the weights are the same
    engine = LocalEngine(model, max_batch=4, cache_bytes=1 << 30)
    rng, version = np.random.default_rng(0), 0
    loop = asyncio.new_event_loop()

    async def play() -> None:
        nonlocal version
        version += 1
        names = [f"{version}/{i}" for i in range(4 if decoded else 1)]
        for name in names:
            ids = rng.integers(1, VOCABULARY, history).tolist()
            found = await engine.generate(ids, Sampling(max_tokens=1), name)
            known[name] = ids + found.ids

    async def go_on() -> None:
        more = Sampling(max_tokens=decoded, stop_ids=())
        await asyncio.gather(*(engine.generate(ids, more, name) for name, ids in known.items()))

    known: dict[str, list[int]] = {}

    def run() -> float:
        if not decoded:
            began = time.process_time()
            loop.run_until_complete(play())
            return time.process_time() - began
        loop.run_until_complete(play())
        began = time.process_time()
        loop.run_until_complete(go_on())
        spent = time.process_time() - began
        for name in list(known):
            engine.finish(name)
            del known[name]
        return spent

    return run


# ---- a run folder


def journal(steps: int, folder: Path) -> Run:
    """Eight more steps of a run that wrote so many, of which it keeps all."""
    groups, path = groups_of(2, 4), folder / "trajectories"
    path.mkdir()
    one = Journal(TrajectoriesSection(keep=0), lambda: path)
    one.step(1, groups, _learned(groups))
    for step in range(2, steps + 1):
        (path / f"step_{step}.parquet").hardlink_to(path / "step_1.parquet")

    def run() -> None:
        for step in range(steps + 1, steps + 9):
            one.step(step, groups, _learned(groups))

    return run


def _learned(groups: Sequence[Group]) -> list[Learned]:
    return [
        Learned(True, (t.reward - 0.5) * t.loss_mask.astype(np.float32), t.logprobs)
        for g in groups
        for t in g.trajectories
    ]


def stored(samples: int, folder: Path) -> Path:
    path = folder / "trajectories"
    path.mkdir()
    groups = groups_of(samples // 8, 8)
    Journal(TrajectoriesSection(keep=0), lambda: path).step(1, groups, _learned(groups))
    return path / "step_1.parquet"


def write_step(samples: int, folder: Path) -> Run:
    groups, path = groups_of(samples // 8, 8), folder / "trajectories"
    path.mkdir()
    one = Journal(TrajectoriesSection(keep=0), lambda: path)
    return lambda: one.step(1, groups, _learned(groups))


def why(samples: int, folder: Path) -> Run:
    path = stored(samples, folder)
    return lambda: diagnose(path)


def index(samples: int, folder: Path) -> Run:
    path = stored(samples, folder)
    (folder / "recipe.yaml").write_text("model: {path: tiny}\n")

    def run() -> None:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        assert RunStore(folder, "run").index([path.name])

    return run


def search(samples: int, folder: Path) -> Run:
    path = stored(samples, folder)
    (folder / "recipe.yaml").write_text("model: {path: tiny}\n")
    return lambda: RunStore(folder, "run").search("no number", [path.name])


def metrics(rows: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "step": step, "reward/mean": 0.4 + 0.1 * float(rng.random()), "train/grad_norm": float(rng.random()),
            "rollout/response_tokens_mean": 40 + 5 * float(rng.random()), "tool/error_rate": 0.1, "train/updates": 1,
            **({"eval/test/accuracy": 0.5} if step % 20 == 0 else {}),
            **{f"part{k % 6}/metric{k}": float(rng.random()) for k in range(60)},
        }
        for step in range(1, rows + 1)
    ]  # fmt: skip


def health(rows: int, folder: Path) -> Run:
    """Every step of a run of so many."""
    made = metrics(rows)

    def run() -> None:
        one = Health(Recipe.model_validate({"train": {"steps": rows}}))
        for row in made:
            one.step(row)

    return run


def read_metrics(rows: int, folder: Path) -> Run:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics(rows)))
    (folder / "recipe.yaml").write_text("model: {path: tiny}\n")

    def run() -> None:
        assert len(RunFolder(folder).metrics()) == rows
        RunStore(folder, "run").metrics()

    return run


def state_of_a_run(files: int, folder: Path) -> Run:
    """What the page of runs asks for again and again, of a run of so many steps."""
    path = stored(8, folder)
    (folder / "recipe.yaml").write_text("model: {path: tiny}\n")
    (folder / "metrics.jsonl").write_text("")
    for step in range(2, files + 1):
        (path.parent / f"step_{step}.parquet").hardlink_to(path)
    store = RunStore(folder, "run")
    return store.state


def attention(history: int) -> float:
    """Operations a token of the embedded model's shape with the keys before it (`packing.make_model`), a prompt's."""
    from packing import make_model

    model = make_model()
    config = model.config
    body = 2 * sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
    pair = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return history * (body + pair * history / 2)


def doubled(low: int, high: int, times: int = 2) -> list[int]:
    sizes = [low]
    while sizes[-1] * times <= high:
        sizes.append(sizes[-1] * times)
    return sizes


def messages_sent(turns: int) -> float:
    """An agent sends its whole conversation with each call."""
    return turns * (turns + 1) / 2


ROWS = (
    Row("tasks: read a file of rows", [1000, 10_000, 100_000], read_rows),
    Row("tasks: an epoch of draws", [1000, 10_000, 100_000], epoch),
    Row("tasks: 320 draws of the curriculum", [1000, 10_000, 100_000], curriculum),
    Row("turns: driver, no chat", doubled(8, 1024, 4), lambda n, _: rollouts("null", 10, n, 100)),
    Row("turns: driver, chat of our own", doubled(8, 2048, 4), lambda n, _: rollouts("bridge", 10, n, 100)),
    Row("turns: driver, renderers' chat", doubled(8, 512, 4), lambda n, _: rollouts("qwen3", 10, n, 100)),
    Row("turns: an agent's calls", doubled(8, 512, 4), agent_calls, messages_sent, "messages sent"),
    Row("history: driver, 8 turns behind it", doubled(1000, 64_000, 4), lambda n, _: rollouts("bridge", 20, 8, n)),
    Row("history: 256 decoded tokens", doubled(1024, 16_384, 2), decode),
    Row("history: prefill of a prompt", doubled(1024, 32_768, 2), prefill, attention, "operations"),
    Row("branches: a rollout's tree", doubled(16, 2048, 4), branches),
    Row("rollouts at once: driver, 8 turns", [10, 50, 250, 1000, 2000], lambda n, _: rollouts("null", n, 8, 100)),
    Row("groups at once: a stream of steps", doubled(16, 2048, 2), stream),
    Row("samples: groups of 8 to micro-batches", doubled(8, 4096, 2), lambda n, _: batch(n, 8)),
    Row("samples: of one group", doubled(64, 8192, 2), one_group),
    Row("samples: write a step", doubled(64, 8192, 2), write_step),
    Row("samples: why", doubled(64, 4096, 2), why),
    Row("samples: index of the page", doubled(64, 8192, 2), index),
    Row("samples: search of the page", doubled(64, 8192, 2), search),
    Row("steps: health, all of them", doubled(50, 3200, 2), health),
    Row("steps: read the metrics", doubled(250, 16_000, 2), read_metrics),
    Row("steps: 8 more of the journal", doubled(16, 16_384, 4), journal),
    Row("steps: the page asks for news", doubled(16, 16_384, 4), state_of_a_run),
)


def seconds(row: Row, size: int) -> float:
    """The least CPU seconds of three runs; of one that takes ten or more, of that."""
    best = math.inf
    folder = Path(tempfile.mkdtemp())
    try:
        run = row.prepare(size, folder)
        for _ in range(3):
            gc.collect()
            began = time.process_time()
            own = run()
            spent = own if isinstance(own, float) else time.process_time() - began
            best = min(best, spent)
            if spent > 10:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return best


def calls(row: Row, size: int) -> int:
    """The functions that a run calls in this thread, Python's and those of C that Python calls."""
    folder = Path(tempfile.mkdtemp())
    try:
        run, profile = row.prepare(size, folder), cProfile.Profile()
        profile.runcall(run)
        return sum(entry.callcount for entry in profile.getstats())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def exponents(row: Row, measured: dict[int, float]) -> tuple[float | None, float | None]:
    """The slope behind the last size, None where runs are too short to say; where that is above LIMIT, the slope of
    calls besides."""
    counted = {size: spent for size, spent in measured.items() if spent >= LEAST}
    last = max(row.sizes)
    before = [size for size in counted if APART * row.work(size) <= row.work(last)]
    if last not in counted or not before:
        return None, None
    first = max(before)
    work = math.log(row.work(last) / row.work(first))
    slope = math.log(counted[last] / counted[first]) / work
    return slope, math.log(calls(row, last) / calls(row, first)) / work if slope > LIMIT else None


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    """The table, and of each line whether it is marked."""
    for row in rows:
        measured = {size: seconds(row, size) for size in row.sizes}
        slope, called = exponents(row, measured)
        first, last = row.sizes[0], row.sizes[-1]
        ends = f"{first:>7,}: {1e3 * measured[first]:>9.2f} ms   {last:>7,}: {1e3 * measured[last]:>9.1f} ms"
        more = "" if called is None else f" <<< calls {called:.2f}"
        told = "under 5 ms" if slope is None else f"{slope:.2f}"
        yield f"{row.name:<40} {ends}   {told:>10} {row.of:<14}{more}", bool(more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    wanted = [part for part in options.only.split(",") if part]
    rows = [row for row in ROWS if not wanted or any(part in row.name for part in wanted)]
    print(f"{'':<40} {'smallest':>21}   {'largest':>21}     exponent")
    marked = 0
    with rare_collections():  # as in a run
        for line, bad in lines(rows):
            marked += bad
            print(line, flush=True)
    print(f"\n{marked} of {len(rows)} above {LIMIT}")


if __name__ == "__main__":
    main()
