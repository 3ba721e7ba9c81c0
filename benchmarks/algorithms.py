"""Learning curves of the presets of `algorithm` on the embedded jobs: one table and one picture.

    python benchmarks/algorithms.py                                    every preset, gsm8k_tool, three seeds
    python benchmarks/algorithms.py --job text_game --seeds 0          text_game: its model is made first
    python benchmarks/algorithms.py --presets grpo,dapo,gspo --steps 40

Each run is a process of its own with one thread; `--parallel` of them work at a time. Runs stay in `--folder`, and one
that is there already is not made again. Reported: steps, sampled tokens and CPU seconds until the mean training reward
of five steps reaches 0.8 (the mean over the seeds; "-" where one of them does not), the last five steps' reward, and
held-out accuracy before and after. The learning rate is the recipe's for all presets.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.recipe.presets import PRESETS

DEFAULT = "default"
"""The recipe as it is."""
WINDOW, GOAL = 5, 0.8
NEEDED = {"ppo": ["critic={}"]}
"""What a preset needs beside itself."""
CHILD = """
import json, resource, sys, agentrl
from agentrl.recipe.schema import Recipe
folder = sys.argv[1]
agentrl.train(Recipe.load(sys.argv[2], sys.argv[3:] + [f"output={folder}"]))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"cpu_seconds": used.ru_utime + used.ru_stime}))
"""
COLORS = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7",
    "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0", "#1b1e23", "#c2410c",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: what its metrics say, step by step."""

    reward: list[float]
    """Mean training reward of each step, over WINDOW steps."""
    tokens: list[float]
    """Sampled tokens until the end of each step."""
    cpu_seconds: float
    """CPU time of the whole run."""
    accuracy: tuple[float, float]
    """Held-out, before and after."""

    @property
    def reached(self) -> int | None:
        """The first step (1, 2, ...) at which the reward reaches GOAL; None if none does."""
        return next((i + 1 for i, reward in enumerate(self.reward) if i + 1 >= WINDOW and reward >= GOAL), None)


def train(recipe: str, preset: str, seed: int, options: argparse.Namespace, model: Sequence[str]) -> Curve:
    """Train once, unless the run is there."""
    run: Path = options.folder / options.job / f"{preset}_{seed}"
    done = run.with_suffix(".json")
    if not done.exists():
        overrides = [
            f"train.seed={seed}", f"train.steps={options.steps}", "train.threads=1", "train.save_every=0",
            "eval.every=0", "eval.splits=[test]", *model, *NEEDED.get(preset, []), *options.overrides,
        ]  # fmt: skip
        overrides += [] if preset == DEFAULT else [f"algorithm.preset={preset}"]
        run.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", CHILD, str(run), recipe, *overrides]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        if child.returncode:
            raise SystemExit(f"{preset}, seed {seed}: {child.stderr[-2000:]}")
        done.write_text(child.stdout.splitlines()[-1])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = rows[1:]
    rewards = [row["reward/" + options.goal] for row in steps]
    sums = [sum(row["rollout/tokens"] for row in steps[: i + 1]) for i in range(len(steps))]
    means = [fmean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]
    before, after = rows[0]["eval/test/accuracy"], rows[-1]["eval/test/accuracy"]
    return Curve(means, sums, json.loads(done.read_text())["cpu_seconds"], (before, after))


def row_of(curves: Sequence[Curve]) -> tuple[str, ...]:
    """The cells of one preset."""
    reached = [curve.reached for curve in curves]
    until = ["-"] * 3
    if all(reached):
        at = [(curve, step) for curve, step in zip(curves, reached, strict=True) if step is not None]
        until = [
            f"{fmean(step for _, step in at):.0f}",
            f"{fmean(curve.tokens[step - 1] for curve, step in at) / 1e3:,.0f}",
            f"{fmean(curve.cpu_seconds * step / len(curve.reward) for curve, step in at):,.0f}",
        ]
    last = [curve.reward[-1] for curve in curves]
    spread = f" ({min(last):.2f} to {max(last):.2f})" if len(curves) > 1 else ""
    before, after = (fmean(curve.accuracy[i] for curve in curves) for i in (0, 1))
    return (*until, f"{fmean(last):.2f}{spread}", f"{before:.0%} to {after:.0%}")


def picture(found: dict[str, list[Curve]], title: str) -> str:
    """An SVG of the mean reward of each preset by step."""
    wide, high, left, top = 640, 360, 50, 30
    steps = max(len(curve.reward) for curves in found.values() for curve in curves)

    def place(step: float, reward: float) -> str:
        return f"{left + wide * step / steps:.1f},{top + high * (1 - reward):.1f}"

    parts = [f'<text x="{left}" y="18" font-weight="600">{title}</text>']
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1):
        (x, y), (end, _) = (place(step, share).split(",") for step in (0, steps))
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4}" text-anchor="end">{share:g}</text>')
    for step in range(0, steps + 1, max(1, steps // 4)):
        x, y = place(step, 0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 18}" text-anchor="middle">{step}</text>')
    for i, (name, curves) in enumerate(found.items()):
        color, shortest = COLORS[i % len(COLORS)], min(len(curve.reward) for curve in curves)
        means = [fmean(curve.reward[step] for curve in curves) for step in range(shortest)]
        points = " ".join(place(step + 1, reward) for step, reward in enumerate(means))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        y = top + 12 + 18 * i
        parts.append(f'<line x1="{left + wide + 12}" y1="{y}" x2="{left + wide + 32}" y2="{y}" stroke="{color}"')
        parts.append(f' stroke-width="3"/><text x="{left + wide + 38}" y="{y + 4}">{name}</text>')
    size = f'width="{left + wide + 160}" height="{high + top + 40}"'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{paper}{"".join(parts)}</svg>\n'


def made_model(options: argparse.Namespace) -> list[str]:
    """The overrides that name the job's model; text_game's is made first."""
    if options.job != "text_game":
        return []
    model: Path = options.folder / "text_game_model"
    if not (model / "config.json").exists():
        command = ["agentrl", "sft", f"recipes/{options.job}.yaml", "--out", str(model)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [f"model.path={model}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=["gsm8k_tool", "text_game"], default="gsm8k_tool")
    parser.add_argument("--presets", default=",".join([DEFAULT, *PRESETS]))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("overrides", nargs="*", help="of the recipe, such as train.lr=1e-4")
    options = parser.parse_args()
    options.goal = "answer" if options.job == "gsm8k_tool" else "goal"
    presets, seeds = options.presets.split(","), [int(seed) for seed in options.seeds.split(",")]
    model, recipe = made_model(options), f"recipes/{options.job}.yaml"
    with ThreadPoolExecutor(options.parallel) as pool:
        futures: dict[str, Any] = {
            name: [pool.submit(train, recipe, name, seed, options, model) for seed in seeds] for name in presets
        }
        found = {name: [future.result() for future in row] for name, row in futures.items()}
    title = f"{options.job}: training reward, mean of {WINDOW} steps and {len(seeds)} seeds"
    table = Table(title=title)
    for column in ("preset", "steps to 0.8", "1000 tokens", "CPU s", "reward at the end", "held out"):
        table.add_column(column, justify="left" if column == "preset" else "right")
    for name, curves in found.items():
        table.add_row(name, *row_of(curves))
    Console().print(table)
    path = options.folder / f"{options.job}.svg"
    path.write_text(picture(found, title))
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
