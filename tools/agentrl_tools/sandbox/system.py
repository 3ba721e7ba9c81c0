"""What a sandboxed interpreter sees of this machine, read-only: itself, its library, the system's libraries."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from agentrl.containment.bubblewrap import INSIDE, compile_modules, isolation, launch_config, socket_bytes
from agentrl.errors import UserError
from agentrl.plugins.types import Json
from agentrl_tools.sandbox.base import Limits

_SESSION = 3  # the descriptor of the host's socket
_OUTPUT_BYTES = 16 << 20
_SHARED_BYTES = 16 << 20
_OWN = Path(__file__).parent / "inside"
_RUNTIME, _SHARED = "/runtime", "/containment"  # where its modules are, inside
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
    """The path of bubblewrap. Raises UserError when it is not installed."""
    path = shutil.which("bwrap")
    if path is None:
        raise UserError(
            "sandbox backend 'bwrap': bubblewrap is not installed; install the package `bubblewrap` of your "
            "distribution (apt-get install bubblewrap), or set E2B_API_KEY and use the backend 'e2b'"
        )
    return path


def sandbox_config(bwrap: str, limits: Limits, packages: Sequence[str], *, ordinary: bool) -> dict[str, Json]:
    """What the launcher needs to know. ordinary: run as an ordinary user although we are root."""
    places = [f"/packages/{n}" for n in range(len(packages))]
    shown = [*_interpreter(), (str(INSIDE), _SHARED), (str(_OWN), _RUNTIME)]
    shown += [(_folder(source), place) for source, place in zip(packages, places, strict=True)]
    known = asdict(limits) | {"count_processes": ordinary or os.getuid() != 0, "socket_bytes": socket_bytes()}
    start = f"import sys; sys.path[:0] = {[_RUNTIME, _SHARED]!r}; sys.path += {places!r}; import supervisor; "
    start += f"supervisor.main({_SESSION}, {known!r})"
    compile_modules(INSIDE)
    compile_modules(_OWN)
    before = ["--clearenv"]
    for name, value in _ENVIRONMENT.items():
        before += ["--setenv", name, value]
    before += isolation({"/dev/shm": _SHARED_BYTES, _HOME: limits.disk, "/run": _OUTPUT_BYTES})
    after = ["--chdir", _HOME, "--", "/python/bin/python3", "-I", "-S", "-B", "-c", start]
    binds = [("--ro-bind", source, place) for source, place in shown]
    return launch_config(bwrap, ordinary, before=before, binds=binds, after=after, home=_HOME)


def _interpreter() -> list[tuple[str, str]]:
    """(place here, place there) of the interpreter, its libraries and the system's."""
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
