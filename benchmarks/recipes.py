"""What each recipe that needs no GPU comes to: held-out accuracy before and after, and minutes, as a table for docs.

    python benchmarks/recipes.py                          every recipe, one seed; hours
    python benchmarks/recipes.py --only text_game --seeds 0,1,2
    python benchmarks/recipes.py --write                  writes docs/reference/recipes_measured.md

A recipe with an `sft` section and no `start` is warm-started by `agentrl sft` first, as its first lines say. Each run
is a process of its own with one thread, which also samples: it takes one core. Runs stay in `--folder`, and one that is
there already is not made again.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from time import monotonic

from agentrl import Recipe

RECIPES = (
    "gsm8k_tool", "gsm8k_ppo", "agent_openai", "text_game", "compact", "sub_agents", "search_qa", "user_sim",
    "code_tool", "vision_game", "terminal",
)  # fmt: skip
ONE_CORE = "engine.args.processes=1"
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "recipes_measured.md"
HEAD = """# What the recipes come to

Held-out accuracy of every recipe that needs no GPU: of the model that it starts from (after the warm start, where the
recipe has one) and of the last step; minutes on one core, with the warm start and evaluations (a run by itself takes
two). Made by `python benchmarks/recipes.py --write`{seeds}, on {machine}.

| recipe | seeds | before | after | minutes |
|---|---|---|---|---|
"""


def timed(*arguments: str, cache: Path) -> float:
    """The minutes that an `agentrl` command takes. cache: keeps what is taught. Ends the benchmark where it fails."""
    begin = monotonic()
    command = [sys.executable, "-m", "agentrl.cli.main", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"agentrl {' '.join(arguments)}: {done.stderr[-2000:]}")
    return (monotonic() - begin) / 60


def accuracies(run: Path) -> dict[str, tuple[float, float]]:
    """Of each held-out split, the first and the last accuracy."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("eval/") and key.endswith("/accuracy"):
                split = key.split("/")[1]
                found[split] = (found.get(split, (value, value))[0], value)
    return found


def measured(name: str, seed: int, folder: Path) -> dict[str, object]:
    """One recipe with one seed. Trains unless the run is there."""
    run = folder / f"{name}_{seed}"
    done = run.with_suffix(".json")
    if not done.exists():
        path, minutes, given = f"recipes/{name}.yaml", 0.0, [f"train.seed={seed}", ONE_CORE]
        start, cache = folder / f"{name}_{seed}_start", (folder / f"{name}_{seed}_cache").resolve()
        for left in (run, start, Path(f"{start}_run"), cache):  # of a benchmark that was cut off
            shutil.rmtree(left, ignore_errors=True)
        recipe = Recipe.load(path)
        if recipe.sft is not None and recipe.start is None:
            minutes = timed("sft", path, *given, "--out", str(start), f"output={start}_run", cache=cache)
            given.append(f"model.path={start}")
        minutes += timed("train", path, f"output={run}", *given, cache=cache)
        done.write_text(json.dumps({"minutes": minutes}))
    return {**json.loads(done.read_text()), "accuracy": accuracies(run)}


def row(name: str, found: Sequence[dict[str, object]]) -> str:
    """A line of the table."""
    splits = found[0]["accuracy"]
    assert isinstance(splits, dict)

    def share(place: int) -> str:
        parts = []
        for split in splits:
            values = [one["accuracy"][split][place] for one in found]  # type: ignore[index]
            parts.append(f"{split} " + ", ".join(f"{100 * value:.1f}" for value in values) + " %")
        return "; ".join(parts)

    minutes = fmean(one["minutes"] for one in found)  # type: ignore[misc]
    return f"| `{name}.yaml` | {len(found)} | {share(0)} | {share(1)} | {minutes:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RECIPES))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--write", action="store_true", help="write the page of docs")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    lines = []
    for name in options.only.split(","):
        lines.append(row(name, [measured(name, seed, options.folder) for seed in seeds]))
        print(lines[-1], flush=True)
    if options.write:
        cpus = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        named = re.search(r"model name\s*: (.+)", cpus)
        machine = named[1] if named else platform.machine()
        told = f" --seeds {options.seeds}" if options.seeds != "0" else ""
        _, _, notes = PAGE.read_text().rpartition(" |\n")  # what is said below the table stays
        PAGE.write_text(HEAD.format(machine=machine, seeds=told) + "\n".join(lines) + "\n" + notes)
        print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
