"""Peak memory of each phase of a step: of the process on a CPU, of torch's allocator on a GPU.

Phases may overlap (sampling during the update): each start and end of a phase is a boundary, at which the peak since
the last boundary is counted for every active phase. A boundary takes 0.2 ms.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import torch

GIGA = 1e9  # bytes in a GB
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory by phase: `with peaks.phase("train"): ...`, then `take()` returns the metrics of the step.

    device: where the tensors are. On Linux, the peak of the process is that of the phase; on other systems, that since
    the process started.
    """

    def __init__(self, device: "torch.device | str" = "cpu") -> None:
        self._device = torch.device(device)
        self._active: list[str] = []
        self._step: dict[str, float] = {}
        self._lock = Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as phase `name`."""
        with self._lock:
            self._boundary()
            self._active.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._boundary()
                self._active.remove(name)

    def take(self) -> dict[str, float]:
        """memory/<phase>_gb, in 10^9 bytes, for the phases since the last call."""
        with self._lock:
            found = {f"memory/{name}_gb": value / GIGA for name, value in self._step.items()}
            self._step = {}
        return found

    def _boundary(self) -> None:
        peak = self._gpu() if self._device.type == "cuda" else _process()
        for name in self._active:
            self._step[name] = max(peak, self._step.get(name, 0.0))

    def _gpu(self) -> float:
        peak = float(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


def _process() -> float:
    """The peak resident memory of the process in bytes, and reset it."""
    try:
        status = _STATUS.read_bytes()
        _RESET.write_bytes(b"5")  # proc(5): resets VmHWM, and nothing else
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    start = status.index(b"VmHWM:") + len(b"VmHWM:")
    return int(status[start : status.index(b"kB", start)]) * 1024.0
