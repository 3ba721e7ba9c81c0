"""Small whole runs: the embedded model, its engine, real problems and the real calculator."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.recipe.schema import Recipe
from agentrl.rollout.trajectory_file import read_records

NOISY = "train_plugins:Noisy"


def small(output: Path | str | None = None, **changes: Any) -> Recipe:
    """Three steps of two tasks, four samples each; `changes` are keys with `__` for the dot: `train__steps=6`."""
    recipe: dict[str, Any] = {
        "env": {"name": NOISY},
        "tools": ["calculator"],
        "rollout": {
            "tasks": 2, "n": 4, "max_turns": 5, "max_turn_tokens": 48, "max_tool_tokens": 24, "max_tokens": 256,
        },
        "train": {"steps": 3, "lr": 1e-3, "save_every": 0, "threads": 1},
        "eval": {"every": 0, "tasks": 4, "splits": ["test"]},
        "output": None if output is None else str(output),
    }  # fmt: skip
    for key, value in changes.items():
        place = recipe
        *sections, last = key.split("__")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return Recipe.model_validate(recipe)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().split("\n") if line]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    """What a run folder holds of a step or evaluation, such as `step_1`."""
    return read_records(folder / "trajectories" / f"{name}.parquet")


def steady(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics without what depends on the clock, the machine or its memory: what a run that is resumed, or
    done elsewhere, must repeat."""
    return {
        key: value
        for key, value in row.items()
        if not key.startswith(("time/", "memory/")) and not key.endswith(("_per_s", "/seconds", "/tflops", "/mfu"))
    }


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What is steady of a line of metrics as numbers, which are compared nearly: a 1 for each finding of its health,
    and no texts, in which numbers stand too."""
    found = steady(row)
    findings = {f"health/{finding['name']}": 1.0 for finding in found.pop("health", ())}
    return findings | {key: value for key, value in found.items() if not isinstance(value, str)}
