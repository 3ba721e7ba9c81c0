"""Who made a workspace that lives outside of this process, in a label, and whether that run is dead."""

import os
import socket
from functools import cache
from pathlib import Path

LABEL_RUN, LABEL_OWNER, LABEL_PROVIDER = "agentrl.run", "agentrl.owner", "agentrl.provider"
_FIELDS = 5


@cache
def _kernel() -> tuple[str, str]:
    """What tells this boot of this machine, and this namespace of process ids, from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "unknown", "0"


def owner() -> str:
    """This process, as no other is called: host, boot, namespace of process ids, process id, when it started."""
    pid = os.getpid()
    return "/".join((socket.gethostname(), *_kernel(), str(pid), _started(pid)))


def is_dead(label: str) -> bool:
    """Whether the process of a label is known to have ended. What another machine runs cannot be known: False."""
    fields = label.split("/")
    if len(fields) != _FIELDS or not fields[3].isdigit():
        return False
    host, boot, namespace, pid, started = fields
    if boot != _kernel()[0]:
        return host == socket.gethostname()  # this machine has started anew since
    return namespace == _kernel()[1] and _started(int(pid)) != started


def _started(pid: int) -> str:
    """When a process started, in ticks since the machine did; empty where there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
