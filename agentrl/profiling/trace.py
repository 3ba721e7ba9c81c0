"""Traces of selected steps, one file per role and rank: `<run>/profile/step_N_<role>_<rank>.json.gz`, for
chrome://tracing or ui.perfetto.dev, and a text file with the slowest operations next to it.

torch can record one trace per process at a time. If two roles of a process work at the same time (rollout.overlap),
the one that starts first is recorded, with the threads of both, and the other's file counts the calls not recorded.
"""

import gzip
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING

import torch

from agentrl.jsonable import Json, dumps, loads

if TYPE_CHECKING:
    from torch.profiler import profile

TOP = 25  # operations in the table
OwnTimes = dict[str, tuple[int, float, float]]
"""Operation -> (calls, own CPU time, own device time), in microseconds without the operations that it calls."""
ON_CPU, ON_DEVICE = ("cpu_op", "user_annotation"), ("kernel", "gpu_memcpy", "gpu_memset")
_RECORDING = Lock()  # one per process: two recordings at once crash torch


@dataclass(slots=True)
class _Sums:
    """The recordings of one role in one step, added up."""

    trace: dict[str, Json] | None = None
    by_name: OwnTimes = field(default_factory=dict)
    parts: int = 0
    missed: int = 0


class Profiler:
    """Recorder of one role in one process, active in the steps `steps` only.

    `with profiler.step(n): ...` may be entered any number of times per step: the step's files hold all of them.
    """

    def __init__(self, folder: Path, role: str, rank: int = 0, steps: Collection[int] = ()) -> None:
        self.folder, self.role, self.rank, self.steps = folder, role, rank, steps
        self._step: int | None = None
        self._sums = _Sums()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the block if step `number` is to be recorded, and rewrite the step's files."""
        if number not in self.steps:
            yield
            return
        if number != self._step:
            self._step, self._sums = number, _Sums()
        if not _RECORDING.acquire(blocking=False):
            self._sums.missed += 1
            self._write_table()
            yield
            return
        try:
            recording = _recording()
            with recording:
                yield
            self._add(recording)
        finally:
            _RECORDING.release()

    def path(self, ending: str) -> Path:
        """The path of the current step's file with this ending, `json.gz` or `txt`."""
        return self.folder / f"step_{self._step}_{self.role}_{self.rank}.{ending}"

    def _add(self, recording: "profile") -> None:
        """Rewrite the step's files with this recording added."""
        sums = self._sums
        sums.parts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=self.folder) as aside:
            recording.export_chrome_trace(f"{aside}/trace.json")
            trace = loads(Path(aside, "trace.json").read_text(encoding="utf-8"))
            add_own_times(trace["traceEvents"], sums.by_name)
            if sums.trace is None:
                sums.trace = trace
            else:
                sums.trace["traceEvents"] += trace["traceEvents"]
            whole = Path(aside, "whole.gz")
            whole.write_bytes(gzip.compress(dumps(sums.trace).encode(), 2))
            whole.replace(self.path("json.gz"))
        self._write_table()

    def _write_table(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path("txt").write_text(self._table(), encoding="utf-8")

    def _table(self) -> str:
        """A table of the TOP operations by own time, the larger of CPU and device time."""
        sums = self._sums
        rows = sorted(sums.by_name.items(), key=lambda row: max(row[1][1:]), reverse=True)
        on_cpu = sum(cpu for _, (_, cpu, _) in rows)
        on_device = sum(device for _, (_, _, device) in rows)
        lines = [f"step {self._step}, {self.role} {self.rank}: {sums.parts} recordings"]
        if sums.missed:
            lines.append(f"{sums.missed} calls were not recorded: another role of this process was")
        lines += [f"own time: CPU {on_cpu / 1e3:.1f} ms, device {on_device / 1e3:.1f} ms", ""]
        lines.append(f"{'calls':>8} {'CPU ms':>10} {'device ms':>10}  operation")
        for name, (calls, cpu, device) in rows[:TOP]:
            lines.append(f"{calls:>8} {cpu / 1e3:>10.2f} {device / 1e3:>10.2f}  {name}")
        return "\n".join(lines) + "\n"


def add_own_times(events: Sequence[Mapping[str, Json]], found: OwnTimes) -> None:
    """Add the own times of a trace's events to `found`; a thousand times as fast as torch's `key_averages`."""
    threads: dict[object, list[Mapping[str, Json]]] = {}
    for event in events:
        if event.get("cat") in (*ON_CPU, *ON_DEVICE) and event.get("ph") == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for thread_events in threads.values():
        open_: list[tuple[float, str]] = []  # (end, name) of the operations that may contain the next one
        for event in sorted(thread_events, key=lambda e: (e["ts"], -e["dur"])):
            name, took = event["name"], event["dur"]
            while open_ and open_[-1][0] <= event["ts"]:
                open_.pop()
            calls, cpu, device = found.get(name, (0, 0.0, 0.0))
            if event["cat"] in ON_DEVICE:
                found[name] = (calls + 1, cpu, device + took)
                continue
            found[name] = (calls + 1, cpu + took, device)
            if open_:
                calls, cpu, device = found[open_[-1][1]]
                found[open_[-1][1]] = (calls, cpu - took, device)
            open_.append((event["ts"] + took, name))


def _recording() -> "profile":
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # All threads of the process: the engine and backward passes compute in threads of their own.
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=activities, experimental_config=config)
