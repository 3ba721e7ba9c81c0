"""The peak memory of each phase of a step: of the process on a CPU, of torch's allocator on a GPU.

Phases may overlap (sampling goes on while the update runs): at every boundary the peak since the last one is counted
for each phase that was under way. Costs a fifth of a millisecond per boundary.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch

GIGA = 1e9
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """`with peaks.phase("train"): ...`, then `take()` gives the metrics of the step.

    device: of the tensors. On Linux the peak of the process is of the phase alone; elsewhere, since it began.
    """

    def __init__(self, device: Any = "cpu") -> None:
        self._device = torch.device(device)
        self._active: list[str] = []
        self._step: dict[str, float] = {}
        self._lock = Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
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
        """memory/<phase>_gb of the phases since the last call, in 10^9 bytes."""
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
    """Bytes: the high-water mark of the process's resident memory, which begins anew."""
    try:
        status = _STATUS.read_bytes()
        _RESET.write_bytes(b"5")  # proc(5): resets VmHWM, and nothing else
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    at = status.index(b"VmHWM:") + len(b"VmHWM:")
    return int(status[at : status.index(b"kB", at)]) * 1024.0
