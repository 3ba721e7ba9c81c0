"""`sandboxed`: the command of an agent inside bubblewrap: no network but the gateway, no files but the system's and its
working folder's."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.errors import UserError
from agentrl.plugins import loopback

SOCKET = "/run/agentrl/gateway.sock"
"""The gateway's socket, inside."""
_PROGRAM = "/run/agentrl/loopback.py"
_SYSTEM = ("/usr", "/opt", "/nix/store")
_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC = ("alternatives", "ca-certificates", "ld.so.cache", "localtime", "mime.types", "pki", "ssl")
_KEPT = ("LANG", "LC_ALL", "PATH", "TERM", "TZ")
_TRY_SECONDS = 20.0


def check_sandbox(program: str, folders: Sequence[str]) -> None:
    """Raise UserError where bubblewrap does not work here, or the sandbox would not show the program."""
    for folder in folders:
        if not (os.path.isabs(folder) and os.path.isdir(folder)):
            raise UserError(f"agent.sandbox_folders: {folder} is no folder; give absolute paths")
    file = shutil.which(program)
    real = os.path.realpath(file) if file is not None else program
    if not any(Path(real).is_relative_to(os.path.realpath(shown)) for shown in _shown(folders)):
        raise UserError(
            f"agent.sandbox_folders: the sandbox does not show {real}: add the folder that it is installed in"
        )
    if shutil.which("bwrap") is None:
        raise UserError("agent.sandbox: bubblewrap is not installed (apt-get install bubblewrap)")
    if said := _refusal(folders):
        raise UserError(
            f"agent.sandbox: bubblewrap does not work here ({said}); it needs user namespaces "
            f"(kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0) and, in a "
            f"container, --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
        )


def _refusal(folders: Sequence[str]) -> str:
    """Try a sandbox, and return why it cannot be had; nothing where it can."""
    command = ["bwrap", *_namespaces(), *_binds(folders), "--", sys.executable, "-I", "-S", "-c", ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}"
    return " ".join(done.stderr.split())[:300] or f"exit code {done.returncode}" if done.returncode else ""


def sandboxed(
    command: Sequence[str], work: Path, opening: Path, socket: str, url: str, folders: Sequence[str]
) -> list[str]:
    """Return the command of a program in the sandbox. work: its folder. opening: a file that it reads. socket: the
    gateway's, which it reaches at `url` inside, too. folders: what it may read besides the system."""
    own = ["--bind", str(work), str(work), "--ro-bind", str(opening), str(opening), "--chdir", str(work)]
    own += ["--ro-bind", socket, SOCKET, "--ro-bind", str(loopback.__file__), _PROGRAM]
    run = [sys.executable, "-I", "-S", _PROGRAM, str(urlsplit(url).port), SOCKET]
    return ["bwrap", *_namespaces(), *_binds(folders), *own, "--", *run, *command]


def environment(work: Path) -> dict[str, str]:
    """Return what a program in the sandbox has of this process's environment: nothing that could be a secret."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "HOME": str(work), "TMPDIR": "/tmp"}


def _namespaces() -> list[str]:
    arguments = ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    return [*arguments, "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]


def _binds(folders: Sequence[str]) -> list[str]:
    arguments = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"]
    for link in _LINKS:
        if os.path.islink(link):
            arguments += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            arguments += ["--ro-bind", link, link]
    for place in (*_shown(folders), *(f"/etc/{name}" for name in _ETC)):
        if os.path.exists(place):
            arguments += ["--ro-bind", place, place]
    return arguments


def _shown(folders: Sequence[str]) -> list[str]:
    """Return the folders that it may read: the system's, this Python's, and `folders`."""
    executable = os.path.realpath(sys.executable)
    own = [sys.prefix, sys.base_prefix, str(Path(executable).parents[1])]
    return [*_SYSTEM, *(one for one in dict.fromkeys(own) if one != "/"), *folders]
