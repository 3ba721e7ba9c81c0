"""What the processes of the sandbox use together, read from its own /proc, and the limits of each."""

from __future__ import annotations

import contextlib
import os
import resource

TYPE_CHECKING = False  # `typing` costs milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterator

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HALF_A_PIPE = 32 << 10
_TCP = 4 << 20  # its buffers grow by themselves
_MAPPING, _MOST_MAPPINGS = 2048, 65530  # bytes of one that is shared, which has a file of its own
_LISTED = 1 << 19  # bytes of the list of mappings that are read: of some thousands
_DEAD = (b"Z", b"X")
_WRITABLE = ("/tmp", "/dev/shm", "/run")
proc = "/proc"
"""Where the processes are seen: a keeper outside of a sandbox sets the place at which it sees those inside."""


def confine(limits: dict[str, int]) -> None:
    """Set limits that the kernel enforces, by their names without RLIMIT_, for us and so for all that we start."""
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def usage() -> tuple[float, int, int]:
    """CPU seconds so far, bytes of resident memory (shared pages counted each time), tasks: of all but
    ourselves."""
    ticks = pages = tasks = 0
    for pid in pids():
        fields = _stat(pid)
        if not fields:
            continue  # it ended
        ticks += int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
        tasks += int(fields[17])
        if fields[0] in _DEAD and (thread := _running_thread(pid, fields)):
            fields = _stat(thread) or fields
        pages += int(fields[21])
    times = os.times()
    return ticks / _TICKS + times.children_user + times.children_system, pages * _PAGE, tasks


def proportional_memory() -> int:
    """Bytes of resident memory, each shared page counted once; of a process that hides them, each time."""
    total = 0
    for pid in _holders():
        try:
            total += _sum_of(f"{proc}/{pid}/smaps_rollup", b"Pss:")
        except PermissionError:
            with contextlib.suppress(OSError):
                total += _sum_of(f"{proc}/{pid}/status", b"VmRSS:")
        except OSError:
            continue  # it ended
    return total


def kernel_memory(per_socket: int, descriptors: int, enough: int) -> int:
    """Bytes that the kernel may hold for the processes, of which each may have so many descriptors: what
    `quick_memory` counts, what TCP has queued, and what `_held` says. Nothing further is looked at once it is more than
    `enough`."""
    total = quick_memory(per_socket)
    for table, count in _streams().items():
        if count and total <= enough:  # the table takes milliseconds
            with open(f"{proc}/1/net/{table}", "rb") as lines:
                next(lines)
                total += 2 * sum(sum(int(queue, 16) for queue in line.split(None, 5)[4].split(b":")) for line in lines)
    for pid in _holders() if total <= enough else ():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended
            total += _held(pid, descriptors)
    return total


def quick_memory(per_socket: int) -> int:
    """Bytes of what grows fastest: `socket_memory` and `page_tables`."""
    return socket_memory(per_socket) + page_tables()


def socket_memory(per_socket: int) -> int:
    """Bytes of the buffers of all sockets as if they were full (of those in no process's table too), in a tenth of a
    millisecond."""
    return _in_use("sockstat", b"sockets:") * per_socket + sum(_streams().values()) * _TCP


def page_tables() -> int:
    """Bytes of the page tables of all processes, in a thirtieth of a millisecond for each."""
    total = 0
    for pid in _holders():
        with contextlib.suppress(OSError):  # it ended
            total += _sum_of(f"{proc}/{pid}/status", b"VmPTE:")
    return total


def _streams() -> dict[str, int]:
    return {"tcp": _in_use("sockstat", b"TCP:"), "tcp6": _in_use("sockstat6", b"TCP6:")}


def _in_use(stat: str, name: bytes) -> int:
    """How many sockets of a kind there are in this network; none where the kernel lacks the kind."""
    try:
        with open(f"{proc}/1/net/{stat}", "rb", 0) as file:
            return next((int(line.split()[2]) for line in file.read(4096).splitlines() if line.startswith(name)), 0)
    except FileNotFoundError:
        return 0


def _held(pid: int, descriptors: int) -> int:
    """Bytes for one process: mappings, and each descriptor as half of a full pipe; of a process that hides them,
    as many as there may be. One that is about to end holds nothing, and hides it."""
    try:
        with open(f"{proc}/{pid}/maps", "rb") as file:
            listed = file.read(_LISTED)
        mappings = listed.count(b"\n") if len(listed) < _LISTED else _MOST_MAPPINGS
        descriptors = len(os.listdir(f"{proc}/{pid}/fd"))
    except PermissionError:
        if not _sum_of(f"{proc}/{pid}/status", b"VmPTE:"):
            return 0
        mappings = _MOST_MAPPINGS
    return _MAPPING * mappings + _HALF_A_PIPE * descriptors


def _sum_of(path: str, name: bytes) -> int:
    with open(path, "rb", 0) as file:
        return sum(int(line.split()[1]) for line in file.read(8192).splitlines() if line.startswith(name)) << 10


def files() -> int:
    """How many there are on what can be written."""
    return sum(place.f_files - place.f_ffree for place in map(os.statvfs, _WRITABLE))


def pids() -> list[int]:
    """All but process 1."""
    return [int(name) for name in os.listdir(proc) if name.isdigit() and name != "1"]


def alive(pid: int) -> bool:
    """False for one that is gone, or dead with all its threads and not yet reaped by its parent."""
    fields = _stat(pid)
    return bool(fields) and (fields[0] not in _DEAD or bool(_running_thread(pid, fields)))


def _holders() -> Iterator[int]:
    """Yield for each process that holds anything an id by which /proc shows it: its own, or that of a thread where its
    first thread has ended, as which it would look dead."""
    for pid in pids():
        fields = _stat(pid)
        if fields and (thread := pid if fields[0] not in _DEAD else _running_thread(pid, fields)):
            yield thread


def _running_thread(pid: int, fields: list[bytes]) -> int:
    """A thread of a process whose first one has ended; 0 where none is left."""
    if int(fields[17]) < 2:
        return 0
    with contextlib.suppress(OSError):
        for thread in map(int, os.listdir(f"{proc}/{pid}/task")):
            if (found := _stat(thread)) and found[0] not in _DEAD:
                return thread
    return 0


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; none where it has ended."""
    try:
        with open(f"{proc}/{pid}/stat", "rb", 0) as file:
            return file.read(1024).rpartition(b")")[2].split()
    except OSError:
        return []
