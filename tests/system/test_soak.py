"""A long run holds no more at its end than soon after its beginning."""

import gc
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from train_help import small

import agentrl
from agentrl.plugins.tracker import Tracker

STEPS = int(os.environ.get("AGENTRL_SOAK_STEPS", "2000"))
SERVED_STEPS = STEPS // 10
SETTLED = 0.4
"""Share of the steps after which nothing should grow: caches are filled, threads have been started."""
MB = 1e6


def often(steps: int) -> int:
    return max(1, steps // 20)


def size_of(path: Path) -> int:
    """Bytes of a file, 0 of one that has been renamed or deleted meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Census(Tracker):
    """Counts what the process and its descendants hold, twenty times in a run."""

    rows: list[dict[str, float]] = []  # noqa: RUF012

    def start(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.rows.clear()
        self.folder = folder
        self.often = often(recipe["train"]["steps"])

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step and step % self.often == 0:
            self.rows.append({"step": step, **self.count()})

    def count(self) -> dict[str, float]:
        gc.collect()
        children = psutil.Process().children(recursive=True)
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {
            "memory_mb": psutil.Process().memory_info().rss / MB,
            "children_mb": sum(child.memory_full_info().uss for child in children) / MB,
            "objects": len(gc.get_objects()) + gc.get_freeze_count(),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "children": len(children),
            "files": len(files),
            "metrics_kb": (self.folder / "metrics.jsonl").stat().st_size / 1e3,
            "other_mb": sum(size_of(path) for path in files if path.name != "metrics.jsonl") / MB,
        }


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["async", "one_step", "none"])
def test_nothing_grows_with_the_steps(overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    first, last = soaked(tmp_path, monkeypatch, capsys, STEPS, rollout__overlap=overlap)
    assert last["memory_mb"] <= first["memory_mb"] + 30
    assert last["children_mb"] <= first["children_mb"] + 30


@pytest.mark.long
@pytest.mark.sglang
def test_nothing_grows_with_two_servers(
    sglang_venv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    flags = {"max-total-tokens": 16384}
    first, last = soaked(
        tmp_path, monkeypatch, capsys, SERVED_STEPS, rollout__overlap="async", engine__name="sglang",
        engine__args={"servers": 2, "flags": flags}, engine__max_batch=16,
    )  # fmt: skip
    assert last["memory_mb"] <= first["memory_mb"] + 30
    assert last["children_mb"] <= 1.05 * first["children_mb"] + 30


def soaked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, steps: int, **changes: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Trains; returns what was counted once caches are filled, and at the end. Checks what all runs bound alike."""
    monkeypatch.setitem(sys.modules, "soak_trackers", sys.modules[__name__])
    recipe = small(
        folder / "run", rollout__n=2, rollout__max_turns=2, rollout__max_turn_tokens=16, train__steps=steps,
        train__lr=1e-6, eval__tasks=2, train__save_every=often(steps), eval__every=often(steps),
        track__trackers=["soak_trackers:Census"], track__trajectories={"keep": 20}, **changes,
    )  # fmt: skip
    result = agentrl.train(recipe)
    assert result.steps == steps
    rows = Census.rows
    with capsys.disabled():
        print(f"\n{changes}, {steps} steps\n{'':14}" + "".join(f"{name:>12}" for name in rows[0]))
        for row in rows:
            print(f"{'':14}" + "".join(f"{value:12,.1f}" for value in row.values()))
    assert rows[-1]["step"] == steps
    settled = [row for row in rows if row["step"] >= SETTLED * steps]
    first, last = settled[0], settled[-1]
    for name in ("threads", "descriptors", "children"):
        assert last[name] <= first[name] + 2, name
    assert last["files"] <= first["files"] + 20  # of the trajectories and evaluations that are kept
    assert last["objects"] <= 1.02 * first["objects"]
    assert last["other_mb"] <= 1.2 * first["other_mb"] + 1
    return first, last
