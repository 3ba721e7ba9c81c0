"""What the processes of the sandbox use together, read from its own /proc."""

import os

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_WRITABLE = ("/tmp", "/dev/shm", "/run")


def usage() -> tuple[float, int, int]:
    """CPU seconds so far, bytes of resident memory (shared pages counted each time), tasks: of all but ourselves."""
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
    """Bytes of resident memory, each shared page counted once."""
    total = 0
    for pid in pids():
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb", 0) as file:
                total += sum(int(line.split()[1]) for line in file.read(4096).splitlines() if line.startswith(b"Pss:"))
        except OSError:
            continue  # it ended
    return total << 10


def files() -> int:
    """How many there are on what can be written."""
    return sum(place.f_files - place.f_ffree for place in map(os.statvfs, _WRITABLE))


def pids() -> list[int]:
    """All but process 1."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def alive(pid: int) -> bool:
    """False for one that is gone, or dead and not yet reaped by its parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb", 0) as file:
            return file.read(1024).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
