"""`ProgramSandbox`: a program of strangers inside bubblewrap: no network but the gateway, no files but the system's,
read-only, and its working folder's, and no more of the machine than it is allowed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.containment.bubblewrap import (
    INSIDE,
    LAUNCHER,
    NEEDS,
    ORDINARY_USER,
    Bind,
    compile_modules,
    isolation,
    launch_config,
    socket_bytes,
)
from agentrl.errors import UserError
from agentrl.jsonable import Json

SOCKET = "/run/agentrl/gateway.sock"
"""The gateway's socket, inside."""
_INSIDE = "/run/agentrl/inside"
_SYSTEM = ("/usr", "/opt", "/nix/store")
_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC = ("alternatives", "ca-certificates", "ld.so.cache", "localtime", "mime.types", "pki", "ssl")
_KEPT = ("LANG", "LC_ALL", "PATH", "TERM", "TZ")
_TRY_SECONDS = 60.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one program and all that it starts may use together, unless said otherwise."""

    memory: int = 4096 * MIB
    """Bytes, with what the kernel holds for it."""
    processes: int = 512
    """Processes and threads."""
    temporary: int = 512 * MIB
    """Bytes of /tmp, which lies in memory, beside `memory`."""
    shared: int = 64 * MIB
    """Bytes of /dev/shm, which does, too."""
    files: int = 65536
    """Files in both."""
    file_size: int = 1024 * MIB
    """Bytes of one file, wherever it is."""
    descriptors: int = 4096
    """Open files of one process."""


@dataclass(frozen=True, slots=True)
class ProgramSandbox:
    """How programs run. `tried` makes one that works here."""

    folders: tuple[str, ...] = ()
    """What they may read besides the system and their working folder."""
    bounds: Bounds = Bounds()
    """What each may use."""
    ordinary: bool = False
    """Run them as an ordinary user although we are root."""

    @classmethod
    def tried(cls, program: str, folders: Sequence[str]) -> "ProgramSandbox":
        """The sandbox of a program. Raises UserError where bubblewrap does not work here, or the sandbox would
        not show the program."""
        for folder in folders:
            if not (os.path.isabs(folder) and os.path.isdir(folder)):
                raise UserError(f"agent.sandbox: {folder} is no folder; give absolute paths")
        file = shutil.which(program)
        real = os.path.realpath(file) if file is not None else program
        if not any(Path(real).is_relative_to(os.path.realpath(shown)) for shown in _shown(folders)):
            raise UserError(f"agent.sandbox: the sandbox does not show {real}: add the folder that it is installed in")
        if shutil.which("bwrap") is None:
            raise UserError("agent.sandbox: bubblewrap is not installed (apt-get install bubblewrap)")
        compile_modules(INSIDE)
        said = ""
        for ordinary in (True, False) if os.getuid() == 0 else (False,):
            sandbox = cls(tuple(folders), ordinary=ordinary)
            if not (said := sandbox._refusal([real, *folders])):
                return sandbox
            if ordinary and not _lacks_namespaces(said):
                raise UserError(
                    f"agent.sandbox: a run of root's starts it as an ordinary user, who cannot read what it needs "
                    f"({said}): let others read it (chmod -R o+rX FOLDER)"
                )
        raise UserError(f"agent.sandbox: bubblewrap does not work here ({said}); {NEEDS}")

    def _refusal(self, needed: Sequence[str]) -> str:
        """Try it, and return why it cannot be had, or what is needed and cannot be read; nothing where it works."""
        look = f"import os, sys; sys.exit(next((p for p in {needed!r} if not os.access(p, os.X_OK)), 0))"
        command = self._command([sys.executable, "-I", "-S", "-c", look], [], "/tmp", 0)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TRY_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{error}"
        return " ".join(done.stderr.split())[:300] or f"exit code {done.returncode}" if done.returncode else ""

    def command(self, words: Sequence[str], work: Path, opening: Path, socket: str, url: str) -> list[str]:
        """What runs `words` in the sandbox. work: its folder, empty. opening: a file that it reads. socket: the
        gateway's, which it reaches at `url` inside, too. All three are given to the user that it runs as: they lie in
        folders that nobody else may enter."""
        if self.ordinary:
            os.chown(work, ORDINARY_USER, ORDINARY_USER)
            opening.chmod(0o644)
            os.chmod(socket, 0o666)
        binds = [("--bind", str(work), str(work)), ("--ro-bind", str(opening), str(opening))]
        return self._command(words, [*binds, ("--ro-bind", socket, SOCKET)], str(work), urlsplit(url).port or 0)

    def environment(self, work: Path) -> dict[str, str]:
        """What a program has of this process's environment: nothing that could be a secret."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        return {**kept, "HOME": str(work), "TMPDIR": "/tmp"}

    def _command(self, words: Sequence[str], binds: Sequence[Bind], work: str, port: int) -> list[str]:
        bounds = self.bounds
        before = isolation({"/tmp": bounds.temporary, "/dev/shm": bounds.shared, "/run": 16 * MIB})
        for link in filter(os.path.islink, _LINKS):
            before += ["--symlink", os.readlink(link), link]
        shown = [*(link for link in _LINKS if not os.path.islink(link)), *_shown(self.folders)]
        shown += [f"/etc/{name}" for name in _ETC]
        own = [("--ro-bind", place, place) for place in shown if os.path.exists(place)]
        guard = f"import sys; sys.path.insert(0, {_INSIDE!r}); import guard; "
        guard += f"guard.main({self._limits()!r}, {port}, {SOCKET!r})"
        config = launch_config(
            shutil.which("bwrap") or "bwrap", self.ordinary, before=[*before, "--symlink", "/tmp", "/var/tmp"],
            binds=[*own, *binds, ("--ro-bind", str(INSIDE), _INSIDE)],
            after=["--chdir", work, "--", sys.executable, "-I", "-S", "-B", "-c", guard], home=work, watching=True,
        )  # fmt: skip
        return [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps(config), *words]

    def _limits(self) -> dict[str, Json]:
        bounds = self.bounds
        limits = {
            "memory": bounds.memory, "processes": bounds.processes, "files": bounds.files,
            "descriptors": bounds.descriptors, "socket_bytes": socket_bytes(), "FSIZE": bounds.file_size,
            "NOFILE": bounds.descriptors, "CORE": 0, "MSGQUEUE": 0,
        }  # fmt: skip
        if self.ordinary or os.getuid() != 0:
            limits["NPROC"] = bounds.processes + 2
        return limits


def _lacks_namespaces(said: str) -> bool:
    """Whether bubblewrap, or what starts it, failed before it executed anything."""
    return said.startswith(("bwrap: ", "launcher: ")) and "execvp" not in said


def _shown(folders: Sequence[str]) -> list[str]:
    """The folders that a program may read: the system's, this Python's, and `folders`."""
    executable = os.path.realpath(sys.executable)
    own = [sys.prefix, sys.base_prefix, str(Path(executable).parents[1])]
    return [*_SYSTEM, *(one for one in dict.fromkeys(own) if one != "/"), *folders]
