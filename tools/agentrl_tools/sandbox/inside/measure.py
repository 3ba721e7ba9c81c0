"""What the processes of the sandbox use together, read from its own /proc."""

import contextlib
import os

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HALF_A_PIPE = 32 << 10
_TCP = 4 << 20  # its buffers grow by themselves
_MAPPING, _MOST_MAPPINGS = 2048, 65530  # bytes of one that is shared, which has a file of its own
_LISTED = 1 << 19  # bytes of the list of mappings that are read: of some thousands
_WRITABLE = ("/tmp", "/dev/shm", "/run")


def usage() -> tuple[float, int, int]:
    """Return CPU seconds so far, bytes of resident memory (shared pages counted each time), tasks: of all but
    ourselves."""
    ticks = pages = tasks = 0
    for pid in pids():
        try:
            with open(f"/proc/{pid}/stat", "rb", 0) as file:
                fields = file.read(1024).rpartition(b")")[2].split()
        except OSError:
            continue  # it ended
        ticks += int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
        tasks += int(fields[17])
        pages += int(fields[21])
    times = os.times()
    return ticks / _TICKS + times.children_user + times.children_system, pages * _PAGE, tasks


def proportional_memory() -> int:
    """Return bytes of resident memory, each shared page counted once; of a process that hides them, each time."""
    total = 0
    for pid in pids():
        try:
            total += _sum_of(f"/proc/{pid}/smaps_rollup", b"Pss:")
        except PermissionError:
            with contextlib.suppress(OSError):
                total += _sum_of(f"/proc/{pid}/status", b"VmRSS:")
        except OSError:
            continue  # it ended
    return total


def kernel_memory(per_socket: int, descriptors: int, enough: int) -> int:
    """Return bytes that the kernel may hold for the processes, of which each may have so many descriptors: the buffers
    of all sockets as if they were full (of those in no process's table too), what TCP has queued, and what `_held`
    says. Nothing further is looked at once it is more than `enough`."""
    streams = _streams()
    total = _buffers(per_socket, streams)
    for table, count in streams.items():
        if count and total <= enough:  # the table takes milliseconds
            with open(f"/proc/net/{table}", "rb") as lines:
                next(lines)
                total += 2 * sum(sum(int(queue, 16) for queue in line.split(None, 5)[4].split(b":")) for line in lines)
    for pid in pids() if total <= enough else ():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended
            total += _held(pid, descriptors)
    return total


def socket_memory(per_socket: int) -> int:
    """Return bytes of the buffers of all sockets as if they were full; takes a tenth of a millisecond."""
    return _buffers(per_socket, _streams())


def _streams() -> dict[str, int]:
    return {"tcp": _in_use("sockstat", b"TCP:"), "tcp6": _in_use("sockstat6", b"TCP6:")}


def _buffers(per_socket: int, streams: dict[str, int]) -> int:
    return _in_use("sockstat", b"sockets:") * per_socket + sum(streams.values()) * _TCP


def _in_use(stat: str, name: bytes) -> int:
    """Return how many sockets of a kind there are in this network; none where the kernel lacks the kind."""
    try:
        with open(f"/proc/net/{stat}", "rb", 0) as file:
            return next((int(line.split()[2]) for line in file.read(4096).splitlines() if line.startswith(name)), 0)
    except FileNotFoundError:
        return 0


def _held(pid: int, descriptors: int) -> int:
    """Return bytes for one process: page tables, mappings, and each descriptor as half of a full pipe; of a process
    that hides them, as many as there may be."""
    total = _sum_of(f"/proc/{pid}/status", b"VmPTE:")
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            listed = file.read(_LISTED)
        mappings = listed.count(b"\n") if len(listed) < _LISTED else _MOST_MAPPINGS
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        mappings = _MOST_MAPPINGS
    return total + _MAPPING * mappings + _HALF_A_PIPE * descriptors


def _sum_of(path: str, name: bytes) -> int:
    with open(path, "rb", 0) as file:
        return sum(int(line.split()[1]) for line in file.read(8192).splitlines() if line.startswith(name)) << 10


def files() -> int:
    """Return how many there are on what can be written."""
    return sum(place.f_files - place.f_ffree for place in map(os.statvfs, _WRITABLE))


def pids() -> list[int]:
    """Return all but process 1."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def alive(pid: int) -> bool:
    """Return False for one that is gone, or dead and not yet reaped by its parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb", 0) as file:
            return file.read(1024).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
