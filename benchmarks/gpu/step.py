"""What a training step of a recipe for GPUs costs, by phase: sampling, update, sending the weights; and peak memory.

    AGENTRL_SGLANG_VENV=VENV python benchmarks/gpu/step.py                 two steps of recipes/gsm8k_tool_1gpu.yaml
    AGENTRL_SGLANG_VENV=VENV python benchmarks/gpu/step.py --steps 5 model.lora.rank=16 train.lr=1e-5

The first step compiles and warms up; the others are reported, every metric of time, rate and memory that the run wrote,
and how far the server's log-probs are from the trainer's.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from need import need

NAME = "step on a GPU"
RECIPE = str(Path(__file__).parents[2] / "recipes" / "gsm8k_tool_1gpu.yaml")
SHOWN = ("time/", "memory/", "mismatch/", "rollout/tokens_per_s", "train/tokens_per_s", "train/mfu", "train/tflops")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the recipe")
    options = parser.parse_args(arguments)
    need(NAME)
    import agentrl
    from agentrl.recipe.schema import Recipe

    with tempfile.TemporaryDirectory() as folder:
        changes = [f"train.steps={options.steps}", "eval.every=0", "eval.tasks=8", "train.save_every=0"]
        result = agentrl.train(Recipe.load(options.recipe, [*changes, f"output={folder}/run", *options.overrides]))
        rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 1] or rows[-1:]
    for key in sorted({key for row in rows for key in row if key.startswith(SHOWN)}):
        found = [row[key] for row in rows if key in row]
        print(f"{key:32} {sum(found) / len(found):12.4g}")


if __name__ == "__main__":
    main()
