"""bubblewrap as every sandbox starts it: what is kept apart, hidden, read-only, and bounded."""

import contextlib
import importlib.util
import os
import py_compile
import stat
from collections.abc import Mapping
from pathlib import Path

from agentrl.containment.seccomp import filter_program
from agentrl.jsonable import Json

SANDBOX_USER = 1000
"""Inside."""
ORDINARY_USER = 65534
"""Outside, in place of root."""
INSIDE = Path(__file__).parent / "inside"
"""Modules that run in a sandbox."""
LAUNCHER = Path(__file__).parent / "launcher.py"
NEEDS = (
    "it needs user namespaces (sysctl user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0) and, in a container, --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined"
)
"""What to say where it does not work."""
Bind = tuple[str, str, str]
"""`--ro-bind` or `--bind`, the place here, the place there."""
_KEYS = ("keys", "key-users")  # the host's, and who has some


def launch_config(
    bwrap: str,
    ordinary: bool,
    *,
    before: list[str],
    binds: list[Bind],
    after: list[str],
    home: str,
    watching: bool = False,
) -> dict[str, Json]:
    """What the launcher is told. ordinary: run as an ordinary user although we are root. before: options before
    the binds, beside `isolation`. after: options after them, and the program. home: of the user inside. watching: as of
    `filter_program`."""
    return {
        "bwrap": bwrap, "uid": ORDINARY_USER if ordinary else None, "binds": [list(bind) for bind in binds],
        "before": before, "filter": filter_program(watching=watching).hex(),
        "passwd": f"user:x:{SANDBOX_USER}:{SANDBOX_USER}::{home}:/bin/sh\n", "group": f"user:x:{SANDBOX_USER}:\n",
        "after": ["--remount-ro", "/dev", "--remount-ro", "/", *after],
    }  # fmt: skip


def isolation(memory_files: Mapping[str, int], *, network: bool = False, init: bool = False) -> list[str]:
    """Options for namespaces of its own, no capabilities, and file systems in memory: bytes by place. network: leave
    it the machine's. init: let bubblewrap be process 1, which reaps, instead of the program."""
    arguments = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts"]
    arguments += [] if network else ["--unshare-net"]
    arguments += ["--unshare-cgroup-try", "--die-with-parent", "--new-session"]
    arguments += [] if init else ["--as-pid-1"]
    arguments += ["--uid", str(SANDBOX_USER), "--gid", str(SANDBOX_USER), "--hostname", "sandbox"]
    arguments += ["--cap-drop", "ALL", "--proc", "/proc", *_covers(), "--dev", "/dev"]
    for place, size in memory_files.items():
        arguments += ["--size", str(size), "--tmpfs", place]
    return arguments


def _covers() -> list[str]:
    """Options that make read-only what root could write in /proc, and hide what only root could read there:
    where bubblewrap is started by root, the user inside is the owner of both."""
    arguments = []
    for name in sorted(os.listdir("/proc")):
        place = f"/proc/{name}"
        if name.isdecimal() or os.path.islink(place):
            continue
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(place).st_mode
            if stat.S_ISDIR(mode):
                arguments += ["--ro-bind", place, place]
            elif name in _KEYS or not mode & stat.S_IROTH:
                arguments += ["--ro-bind", os.devnull, place]
            elif mode & 0o222:
                arguments += ["--ro-bind", place, place]
    return arguments


def socket_bytes() -> int:
    """What a socket's buffers may hold, which a sandbox cannot enlarge."""
    return sum(int(Path(f"/proc/sys/net/core/{one}_default").read_text()) for one in ("wmem", "rmem"))


def compile_modules(folder: Path) -> None:
    """Spare every sandbox the compilation of what runs in it, where its folder can be written."""
    for path in folder.glob("*.py"):
        with contextlib.suppress(OSError):
            if os.path.getmtime(importlib.util.cache_from_source(str(path))) < path.stat().st_mtime:
                raise FileNotFoundError
            continue
        with contextlib.suppress(OSError, py_compile.PyCompileError):
            py_compile.compile(str(path))
