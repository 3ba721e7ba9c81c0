"""A long run holds no more at its end than soon after its beginning."""

import gc
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from train_help import small

import agentrl
from agentrl.plugins.tracker import Tracker

STEPS = int(os.environ.get("AGENTRL_SOAK_STEPS", "2000"))
SETTLED = 0.2
"""Share of the steps after which nothing should grow: caches are filled, threads have been started."""
MB = 1e6


class Census(Tracker):
    """Counts what the process holds: at a tenth of the steps, and at the end."""

    rows: list[dict[str, float]] = []  # noqa: RUF012

    def start(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.rows.clear()
        self.folder = folder

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step and step % max(1, STEPS // 20) == 0:
            self.rows.append({"step": step, **self.count()})

    def count(self) -> dict[str, float]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {
            "memory_mb": pages * os.sysconf("SC_PAGE_SIZE") / MB,
            "objects": len(gc.get_objects()),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "children": sum(len(p.read_text().split()) for p in Path("/proc/self/task").glob("*/children")),
            "files": len(files),
            "metrics_kb": (self.folder / "metrics.jsonl").stat().st_size / 1e3,
            "other_mb": sum(path.stat().st_size for path in files if path.name != "metrics.jsonl") / MB,
        }


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["async", "one_step", "none"])
def test_nothing_grows_with_the_steps(overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "soak_trackers", sys.modules[__name__])
    often = max(1, STEPS // 20)
    recipe = small(
        tmp_path / "run", rollout__overlap=overlap, rollout__n=2, rollout__max_turns=2, rollout__max_turn_tokens=16,
        train__steps=STEPS, train__lr=1e-6, eval__tasks=2,
        train__save_every=often, eval__every=often, track__trackers=["soak_trackers:Census"],
        track__trajectories={"keep": 20},
    )  # fmt: skip
    result = agentrl.train(recipe)
    assert result.steps == STEPS
    rows = Census.rows
    with capsys.disabled():
        print(f"\n{overlap}, {STEPS} steps\n{'':14}" + "".join(f"{name:>12}" for name in rows[0]))
        for row in rows:
            print(f"{'':14}" + "".join(f"{value:12,.1f}" for value in row.values()))
    settled = [row for row in rows if row["step"] >= SETTLED * STEPS]
    first, last = settled[0], settled[-1]
    for name in ("threads", "descriptors", "children"):
        assert last[name] <= first[name] + 2, name
    assert last["files"] <= first["files"] + 20  # of the trajectories and evaluations that are kept
    assert last["objects"] <= 1.02 * first["objects"]
    assert last["memory_mb"] <= first["memory_mb"] + 30
    assert last["other_mb"] <= 1.2 * first["other_mb"] + 1
