"""Distillation of the embedded model from a trained one, beside GRPO and SFT on the same number of steps and samples.

    python benchmarks/distill.py                          trains the teacher first, 80 steps of GRPO
    python benchmarks/distill.py --teacher runs/x/checkpoints/step_80 --steps 20 --seeds 1 2 3
    python benchmarks/distill.py --ways opd/full opd/sampled train.lr=1e-4

grpo: reward alone. opd/FORM: the policy's own samples, each token compared with the teacher's distribution. sft: cross
entropy on samples of the teacher's that are right. All start from the embedded model; the student of `opd` and of
`grpo` samples itself, that of `sft` reads as many samples of the teacher's for the same tasks. Reported: the tokens
that were learned from, and the accuracy on the split `validation` at every evaluation.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import agentrl
from agentrl.offline.sample import sample_rollouts
from agentrl.recipe.schema import Recipe

WAYS = ("grpo", "opd/full", "opd/top_k", "opd/sampled", "sft")
RECIPE = "recipes/gsm8k_tool.yaml"
SPLIT = "validation"
TEACHER_STEPS = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", help="a model folder; default: the embedded model after GRPO")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        teacher = options.teacher or trained_teacher(root, options.overrides)
        rows = []
        for way in options.ways:
            for seed in options.seeds:
                plan = [
                    f"train.steps={options.steps}", f"eval.every={options.every}", f"eval.splits=[{SPLIT}]",
                    f"train.seed={seed}", "train.save_every=0", *options.overrides,
                ]  # fmt: skip
                tokens, curve = learned(way, root / f"{way.replace('/', '_')}_{seed}", teacher, plan)
                shown = "  ".join(f"{step}: {value:.0%}" for step, value in curve)
                rows.append((way, str(seed), f"{tokens:,}", shown))
                console.print(*rows[-1], soft_wrap=True)
    table = Table("way", "seed", "tokens learned from", f"accuracy on {SPLIT} by step")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def trained_teacher(root: Path, overrides: Sequence[str]) -> str:
    plan = [f"train.steps={TEACHER_STEPS}", "eval.every=0", *overrides, f"output={root / 'teacher'}"]
    return str(agentrl.train(RECIPE, overrides=plan).checkpoint)


def learned(way: str, folder: Path, teacher: str, plan: Sequence[str]) -> tuple[int, list[tuple[int, float]]]:
    """Train in one way; return the tokens that were learned from, and the accuracy by step."""
    stored: tuple[str, ...] = ()
    changes = ["algorithm=grpo", "algorithm.kl_coef=0"]
    if way.startswith("opd"):
        changes = ["algorithm=opd", f"teacher={{path: {teacher}, form: {way.partition('/')[2]}}}"]
    elif way == "sft":
        changes = ["algorithm.streams={policy: 0, imitate: 1}", "algorithm.imitate_from=1"]
        whole = Recipe.load(RECIPE, [*plan, f"output={folder}_teacher"])
        stored = (str(sample_rollouts(whole, steps=whole.train.steps, model=teacher).folder),)
    recipe = Recipe.load(RECIPE, [*plan, *changes, f"output={folder}"])
    agentrl.train(recipe, stored=stored)
    rows: list[dict[str, Any]] = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    key = f"eval/{SPLIT}/accuracy"
    return sum(tokens_of(row) for row in rows), [(row["step"], row[key]) for row in rows if key in row]


def tokens_of(row: dict[str, Any]) -> int:
    """The sampled tokens of a step that had a say in its update."""
    names = ("distill/tokens", "imitate/tokens", "rollout/tokens")
    return int(next((row[name] for name in names if name in row), 0))


if __name__ == "__main__":
    main()
