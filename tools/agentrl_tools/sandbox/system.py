"""What a sandboxed interpreter sees of this machine, read-only: itself, its library, the system's libraries."""

import contextlib
import importlib.util
import os
import py_compile
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from agentrl.errors import UserError
from agentrl.plugins.types import Json
from agentrl_tools.sandbox.base import Limits
from agentrl_tools.sandbox.seccomp import filter_program

SANDBOX_USER = 1000  # inside
ORDINARY_USER = 65534  # outside, in place of root
_SESSION = 3  # the descriptor of the host's socket
_OUTPUT_BYTES = 16 << 20
_SHARED_BYTES = 16 << 20
_RUNTIME = "/runtime"
_HOME = "/tmp"
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib32")
_ROOT_LINKS = ("/lib", "/lib64")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives")  # where libraries are, and links to some of Debian's
_ENVIRONMENT = {
    "PATH": "/python/bin", "HOME": _HOME, "TMPDIR": _HOME, "USER": "user", "LOGNAME": "user", "LANG": "C.UTF-8",
    "TZ": "UTC", "MPLBACKEND": "Agg", "MPLCONFIGDIR": _HOME, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1", "LD_LIBRARY_PATH": "/python/lib",
}  # fmt: skip


def find_bwrap() -> str:
    """Return the path of bubblewrap. Raises UserError when it is not installed."""
    path = shutil.which("bwrap")
    if path is None:
        raise UserError(
            "sandbox backend 'bwrap': bubblewrap is not installed; install the package `bubblewrap` of your "
            "distribution (apt-get install bubblewrap), or set E2B_API_KEY and use the backend 'e2b'"
        )
    return path


def launch_config(bwrap: str, limits: Limits, packages: Sequence[str], *, ordinary: bool) -> dict[str, Json]:
    """Return what the launcher needs to know. ordinary: run as an ordinary user although we are root."""
    places = [f"/packages/{n}" for n in range(len(packages))]
    binds = [*_interpreter(), (str(Path(__file__).parent / "inside"), _RUNTIME)]
    binds += [(_folder(source), place) for source, place in zip(packages, places, strict=True)]
    path = [_RUNTIME, *places]
    known = asdict(limits) | {"count_processes": ordinary or os.getuid() != 0, "socket_bytes": _socket_bytes()}
    start = f"import sys; sys.path[:0] = {path[:1]!r}; sys.path += {path[1:]!r}; import supervisor; "
    start += f"supervisor.main({_SESSION}, {known!r})"
    _compile_runtime()
    return {
        "bwrap": bwrap, "uid": ORDINARY_USER if ordinary else None, "binds": [list(bind) for bind in binds],
        "before": _namespaces(limits), "filter": filter_program().hex(),
        "passwd": f"user:x:{SANDBOX_USER}:{SANDBOX_USER}::{_HOME}:/bin/false\n", "group": f"user:x:{SANDBOX_USER}:\n",
        "after": [*_afterwards(), "/python/bin/python3", "-I", "-S", "-B", "-c", start],
    }  # fmt: skip


def _socket_bytes() -> int:
    """Return what a socket's buffers may hold, which a sandbox cannot enlarge."""
    return sum(int(Path(f"/proc/sys/net/core/{one}_default").read_text()) for one in ("wmem", "rmem"))


def _namespaces(limits: Limits) -> list[str]:
    arguments = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--as-pid-1"]
    arguments += ["--uid", str(SANDBOX_USER), "--gid", str(SANDBOX_USER), "--hostname", "sandbox"]
    arguments += ["--cap-drop", "ALL", "--clearenv"]
    for name, value in _ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for size, place in ((_SHARED_BYTES, "/dev/shm"), (limits.disk, "/tmp"), (_OUTPUT_BYTES, "/run")):
        arguments += ["--size", str(size), "--tmpfs", place]
    return arguments


def _afterwards() -> list[str]:
    """Return options for the two file systems that bubblewrap made and that could still be written."""
    return ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _HOME, "--"]


def _interpreter() -> list[tuple[str, str]]:
    """Return (place here, place there) of the interpreter, its libraries and the system's."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    binds = [(folder, folder) for folder in _LIBRARIES if os.path.isdir(folder)]
    binds += [(os.path.realpath(link), link) for link in _ROOT_LINKS if os.path.isdir(link)]
    binds.append((executable, "/python/bin/python3"))
    for folder in dict.fromkeys((f"{sys.base_prefix}/lib", f"{sys.base_prefix}/{sys.platlibdir}")):
        if os.path.isdir(folder):
            binds.append((folder, f"/python/{os.path.basename(folder)}"))
    binds += [(place, place) for place in _ETC if os.path.exists(place)]
    return binds


def _folder(path: str) -> str:
    if not os.path.isdir(path):
        raise UserError(f"sandbox: there is no folder {path!r} of packages; name folders that hold importable packages")
    return os.path.realpath(path)


def _compile_runtime() -> None:
    """Spare every sandbox the compilation, where this package's folder can be written."""
    for path in (Path(__file__).parent / "inside").glob("*.py"):
        with contextlib.suppress(OSError):
            if os.path.getmtime(importlib.util.cache_from_source(str(path))) < path.stat().st_mtime:
                raise FileNotFoundError
            continue
        with contextlib.suppress(OSError, py_compile.PyCompileError):
            py_compile.compile(str(path))
