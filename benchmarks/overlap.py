"""Comparison of `rollout.overlap` none, one_step and async, with a tool of random latency (mean 0.5 s).

    python benchmarks/overlap.py                              the embedded engine, 30 steps
    python benchmarks/overlap.py engine.name=sglang           one server, launched by AGENTRL_SGLANG_VENV
    python benchmarks/overlap.py engine.name=sglang 'engine.args.urls=[http://127.0.0.1:30000]'
    python benchmarks/overlap.py --latency 2 --steps 60 train.seed=1

Each mode runs the same recipe, seed and number of steps, one after another, on the same server. Reported: steps per
minute without the evaluations, held-out accuracy before and after, staleness of the samples in updates, and the
mismatch of trainer and engine on them: KL (k3), largest difference of a log-prob, effective sample size.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl_tools.calculator import Calculator
from rich.console import Console
from rich.table import Table

import agentrl
from agentrl.models.load import resolve
from agentrl.plugins.types import Session, ToolResponse
from agentrl.recipe.schema import Recipe

WAYS = ("none", "one_step", "async")
RECIPE = "recipes/gsm8k_tool.yaml"


class SlowCalculator(Calculator):
    """The calculator with a delay before each call, drawn from an exponential distribution of mean `mean` seconds."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.mean = mean

    async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
        await asyncio.sleep(session.rng.expovariate(1 / self.mean))
        return await super().execute(session, **arguments)


def measure(way: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train once; return the steps per minute, the accuracies and the means of the metrics."""
    tools = json.dumps([{"name": "overlap:SlowCalculator", "args": {"mean": options.latency}}])
    overrides = [
        f"tools={tools}", f"rollout.overlap={way}", f"train.steps={options.steps}",
        "train.threads=1", "train.save_every=0", "eval.every=0", "eval.splits=[test]", f"eval.tasks={options.tasks}",
        f"output={folder / way}", "rollout.tool_timeout=60", *options.overrides,
    ]  # fmt: skip
    result = agentrl.train(Recipe.load(RECIPE, overrides))
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()][1:]

    def mean(key: str) -> float:
        return sum(row.get(key, 0.0) for row in rows) / len(rows)

    return {
        "steps a minute": 60 / mean("time/step_s"),
        "before": result.before["test"],
        "after": result.after["test"],
        "waited": mean("time/rollout_s"),
        "staleness": mean("rollout/staleness_mean"),
        "kl": mean("mismatch/kl"),
        "furthest": max(row.get("mismatch/logprob_max", 0.0) for row in rows),
        "ess": mean("mismatch/ess"),
    }


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[None]:
    """Start one server for all modes; each run publishes its own weights to it first."""
    recipe = Recipe.load(RECIPE, options.overrides)
    if recipe.engine.name != "sglang" or recipe.engine.args.get("urls"):
        yield
        return
    from agentrl.engine.servers.client import Sessions
    from agentrl.engine.servers.server import Server
    from agentrl.engine.servers.settings import Settings
    from agentrl.engine.sglang.command import SglangPlan
    from agentrl.models.load import load_model

    model = load_model(recipe.model)[0]
    plan = Settings(**recipe.engine.args).plan(
        SglangPlan, model, resolve(recipe.model.path), recipe.engine.max_batch, None
    )
    assert plan is not None
    sessions = Sessions()
    server = Server(plan, 0, log := Path(tempfile.gettempdir()) / "overlap_sglang.log", sessions)
    print(f"starting one server, output in {log}", flush=True)

    async def start() -> None:
        try:
            await server.start(900.0, lambda line: None)
        finally:
            await sessions.close()

    asyncio.run(start())
    options.overrides += ["engine.args={}", f"engine.args.urls=[{server.url}]"]
    try:
        yield
    finally:
        server.kill()


def show(rows: dict[str, dict[str, Any]]) -> None:
    base = rows[WAYS[0]]["steps a minute"]
    table = Table(
        "rollout.overlap", "steps/min", "ratio", "test before", "test after", "waited a step", "staleness",
        "KL", "max |d|", "ESS",
    )  # fmt: skip
    for way, row in rows.items():
        table.add_row(
            way,
            f"{row['steps a minute']:.1f}",
            f"{row['steps a minute'] / base:.2f}x",
            f"{row['before']:.1%}",
            f"{row['after']:.1%}",
            f"{row['waited']:.2f} s",
            f"{row['staleness']:.2f}",
            f"{row['kl']:.1e}",
            f"{row['furthest']:.1e}",
            f"{row['ess']:.3f}",
        )
    Console(width=120).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.5, help="mean seconds a call")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tasks", type=int, default=128, help="held-out tasks")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the recipe")
    options = parser.parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory() as folder, serving(options):
        show({way: measure(way, options, Path(folder)) for way in WAYS})


if __name__ == "__main__":
    main()
