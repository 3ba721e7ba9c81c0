"""A task of one's own, from a model that has not seen it: held-out accuracy by minutes of reinforcement learning.

    python benchmarks/own_task.py                                  the three worlds of domains.py, three seeds
    python benchmarks/own_task.py --env package.module:Environment --seeds 0
    python benchmarks/own_task.py --seeds '' --model tiny                  where a model starts

Each run is a process of its own with one thread; `--parallel` of them work at a time. Runs stay in `--folder`, and one
that is there already is not made again. Reported: held-out accuracy before and after, and the minutes of the whole run,
evaluations included.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from time import monotonic

from rich.console import Console
from rich.table import Table

DOMAINS = ("domains:OrderDesk", "domains:Library", "domains:UnitConversion")
RECIPE = {
    "rollout": {
        "tasks": 8, "n": 16, "max_turns": 6, "max_tool_calls_per_turn": 1, "max_turn_tokens": 80,
        "max_tool_tokens": 80, "max_tokens": 800, "strict_calls": True,
    },
    "train": {"lr": 2e-4, "save_every": 0, "threads": 1},
    "eval": {"tasks": 256, "every": 25},
}  # fmt: skip
CHILD = """
import sys, agentrl
from agentrl.recipe.schema import Recipe
work, recipe, overrides = sys.argv[1], sys.argv[2], sys.argv[3:]
read = Recipe.load(recipe, overrides)
agentrl.train(read) if work == "train" else print(agentrl.evaluate(read, splits=["test"]).splits[0].accuracy)
"""


def child(work: str, *arguments: str) -> str:
    """The standard output of a process that trains or evaluates. Ends the benchmark where it fails."""
    command = [sys.executable, "-c", CHILD, work, *arguments]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{work} {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def accuracy(env: str, recipe: Path, options: argparse.Namespace) -> float:
    """Held-out accuracy of the model that is begun with."""
    return float(child("evaluate", str(recipe), f"env.name={env}", *options.overrides).split()[-1])


def curve(env: str, seed: int, recipe: Path, options: argparse.Namespace) -> tuple[list[tuple[int, float]], float]:
    """Held-out accuracy by step, and the minutes that the run took. Trains unless the run is there."""
    run = options.folder / f"{env.replace(':', '.')}_{seed}"
    done = run.with_name(f"{run.name}.json")
    if not done.exists():
        begin = monotonic()
        child("train", str(recipe), f"env.name={env}", f"train.seed={seed}", f"train.steps={options.steps}",
              f"output={run}", *options.overrides)  # fmt: skip
        done.write_text(json.dumps({"minutes": (monotonic() - begin) / 60}))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(row["step"], row["eval/test/accuracy"]) for row in rows if "eval/test/accuracy" in row]
    return points, json.loads(done.read_text())["minutes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", action="append", help="module:class; may be given several times")
    parser.add_argument("--model", default="tiny_tools", help="where it begins")
    parser.add_argument("--seeds", default="0,1,2", help="empty: nothing is trained")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/own_task"))
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as train.lr=1e-4")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    recipe = options.folder / "recipe.yaml"
    recipe.write_text(json.dumps(RECIPE))
    envs, seeds = options.env or DOMAINS, [int(seed) for seed in options.seeds.split(",") if seed]
    table = Table(title=f"held out, before and after {options.steps} steps")
    for column in ("environment", "before", "after", "gain", "minutes"):
        table.add_column(column, justify="left" if column == "environment" else "right")
    options.overrides.append(f"model.path={options.model}")
    with ThreadPoolExecutor(options.parallel) as pool:
        runs = {env: [pool.submit(curve, env, seed, recipe, options) for seed in seeds] for env in envs}
        starts = {} if seeds else {env: pool.submit(accuracy, env, recipe, options) for env in envs}
        for env, start in starts.items():
            table.add_row(env, f"{start.result():.1%}", "", "", "")
        for env, row in runs.items() if seeds else ():
            found = [run.result() for run in row]
            before, after = ([points[i][1] for points, _ in found] for i in (0, -1))
            table.add_row(
                env, f"{fmean(before):.1%}", ", ".join(f"{value:.1%}" for value in after),
                f"{100 * (fmean(after) - fmean(before)):+.1f}", f"{max(minutes for _, minutes in found):.1f}",
            )  # fmt: skip
            for seed, (points, _) in zip(seeds, found, strict=True):
                print(f"{env} seed {seed}: " + "  ".join(f"{step}: {value:.1%}" for step, value in points))
    Console().print(table)


if __name__ == "__main__":
    main()
