"""`Capture`: what an agent left in its workspace, without what would run in a grader unasked.

A grader works in a fresh workspace, to which only files come from the agent's. Files that interpreters, shells and test
runners read by themselves, changed programs, and what lies where tests and rewards do are left behind and named.
"""

import io
import posixpath
import re
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from agentrl.errors import PathError
from agentrl.workspace.workspace import MIB, Change, ChangeKind, FileKind, Workspace

STARTUP = (
    "conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "pytest.ini", ".pytest.ini", ".bashrc",
    ".bash_profile", ".bash_login", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".pythonrc*", ".pdbrc",
)  # fmt: skip
"""Names of files that are run, or steer what runs, without being asked for."""
SYSTEM = (
    "/etc/ld.so.*", "/etc/environment", "/etc/profile", "/etc/profile.d/*", "/etc/bash.bashrc", "/etc/cron*",
    "/etc/at.*", "/var/spool/cron/*", "/etc/inittab", "/etc/rc.local", "/etc/init.d/*", "/etc/systemd/*",
)  # fmt: skip
"""Files of a system that do the same."""
RUNNERS = ("pytest", "_pytest", "pluggy", "iniconfig", "py", "unittest", "xdist", "pytest_*")
"""Modules that decide for tests."""
_PROGRAMS = re.compile(r"(python|pytest|py\.test|pip|bash|dash|sh$|env$|busybox)")  # where the image has none, too
_SECTIONS = {"setup.cfg": b"[tool:pytest", "tox.ini": b"[pytest", "pyproject.toml": b"[tool.pytest"}
_PLUGINS = b"[pytest11]"
_IMAGES = ("/usr/", "/bin/", "/sbin/", "/lib")
_KERNELS = ("/proc", "/sys", "/dev")
_CACHES = ("__pycache__",)
_SITE = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Protection:
    """What of an agent's files a grader never gets."""

    paths: tuple[str, ...] = ()
    """Absolute paths; all below them is meant."""
    allowed: tuple[str, ...] = ()
    """Patterns of paths that a task asks its agent to write, whatever else they would be."""
    files: int = 20_000
    """Files, folders and links that are taken at most."""
    size: int = 64 * MIB
    """Bytes that are taken at most."""


@dataclass(frozen=True, slots=True)
class Capture:
    """What was taken."""

    tar: bytes
    """Files, folders and links."""
    replaced: tuple[str, ...]
    """Paths to be removed first: they are gone, or of another kind."""
    paths: tuple[str, ...]
    """What `tar` holds."""
    tampering: tuple[str, ...]
    """What was left behind, as `kind: path`."""
    excess: str = ""
    """Why nothing was taken, in words; empty: all was."""


class Guard:
    """Tells what of an agent's changes would decide for a grader. cwd: where the grader runs. programs: by folder of
    PATH, the names that the image has there."""

    def __init__(self, protection: Protection, cwd: str, programs: dict[str, frozenset[str]]) -> None:
        self._protection, self._cwd, self._programs = protection, cwd, programs
        self._named = frozenset().union(*programs.values())

    def why(self, path: str, file: FileKind, kind: ChangeKind) -> str:
        """The kind of tampering; empty: none. Content is not looked at."""
        if self.guarded(path) or ((file is not FileKind.FOLDER or kind is ChangeKind.DELETED) and self.above(path)):
            return "protected"
        if any(fnmatchcase(path, pattern) for pattern in self._protection.allowed):
            return ""
        folder, name = posixpath.split(path)
        if file is FileKind.OTHER:
            return "special file"
        if any(fnmatchcase(name, pattern) for pattern in STARTUP):
            return "startup file"
        if any(fnmatchcase(path, pattern) for pattern in SYSTEM):
            return "system file"
        if kind is not ChangeKind.ADDED and self._of_image(path):
            return "system file"
        if folder in self._programs and (name in self._named or _PROGRAMS.match(name)):
            return "program"
        return "module" if self._shadows(path, folder, name) else ""

    def guarded(self, path: str) -> bool:
        """Whether it lies at or below a protected path."""
        return any(path == one or path.startswith(f"{one}/") for one in self._protection.paths)

    def above(self, path: str) -> bool:
        """Whether a protected path lies below it."""
        return any(one.startswith(f"{path.rstrip('/')}/") for one in self._protection.paths)

    def leads_out(self, path: str, target: str) -> bool:
        """Whether a link leads to, or may be a way to, what is protected or the kernel's."""
        parts = [part for part in target.split("/") if part not in ("", ".")]
        if ".." in parts[next((i for i, part in enumerate(parts) if part != ".."), len(parts)) :]:
            return True  # what stands before it may be a link itself
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        place = "/" + place.lstrip("/")
        kernel = any(place == one or place.startswith(f"{one}/") for one in _KERNELS) and place != "/dev/null"
        return kernel or self.guarded(place) or self.above(place)

    def _of_image(self, path: str) -> bool:
        library = re.search(r"/lib/python3[.\d]*/", path) is not None
        return path.startswith(_IMAGES) or (library and not any(f"/{site}/" in path for site in _SITE))

    def _shadows(self, path: str, folder: str, name: str) -> bool:
        stem, _, ending = name.partition(".")
        if stem == "__init__":
            folder, stem = posixpath.split(folder)
        if folder == self._cwd and ending.rpartition(".")[2] in ("py", "so") and stem != "test":
            return stem in sys.stdlib_module_names or _is_runner(stem)
        inside = re.search(r"/(?:site|dist)-packages/([^/.-]+)", path)
        return inside is not None and _is_runner(inside[1])


async def capture(workspace: Workspace, guard: Guard, limit: Protection, paths: Sequence[str] | None) -> Capture:
    """Take what the agent changed. paths: absolute ones that are taken instead, as they are. Raises WorkspaceError."""
    if paths is None:
        try:
            changes = await workspace.diff(limit.files + 1)
        except PathError as error:
            return Capture(b"", (), (), (), str(error))
    else:
        changes = [Change(path, ChangeKind.ADDED, FileKind.FOLDER) for path in paths]
    if len(changes) > limit.files:
        return Capture(b"", (), (), (), f"more than {limit.files} files were changed")
    changes = [change for change in changes if not _is_cache(change.path)]
    why = {change.path: guard.why(change.path, change.file, change.kind) for change in changes}
    kept = [change for change in changes if not why[change.path]]
    try:
        tar = await workspace.pack(_topmost(c.path for c in kept if c.kind is not ChangeKind.DELETED))
        tar, taken, left = _filtered(tar, guard, {change.path: change.kind for change in changes}, limit)
    except PathError as error:
        return Capture(b"", (), (), (), str(error))
    tampering = {path: kind for path, kind in why.items() if kind} | left
    replaced = tuple(c.path for c in kept if c.kind is not ChangeKind.ADDED and c.path not in left)
    return Capture(tar, replaced, taken, tuple(f"{kind}: {path}" for path, kind in sorted(tampering.items())))


def _filtered(
    tar: bytes, guard: Guard, kinds: dict[str, ChangeKind], limit: Protection
) -> tuple[bytes, tuple[str, ...], dict[str, str]]:
    """A tar of what may be taken, its paths, and what was left by path. Raises PathError beyond the limits."""
    buffer, size = io.BytesIO(), 0
    taken: list[str] = []
    left: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as source, tarfile.open(fileobj=buffer, mode="w") as target:
        for member in source:
            path = "/" + posixpath.normpath(member.name).lstrip("/")
            if _is_cache(path):
                continue
            content = _content(source, member)
            size += len(content or b"")
            if len(taken) >= limit.files or size > limit.size:
                raise PathError(f"more than {limit.files} files or {limit.size // MIB} MiB were changed")
            if why := _member(member, path, content, guard, kinds.get(path, ChangeKind.ADDED)):
                left[path] = why
                continue
            clean = tarfile.TarInfo(path.lstrip("/"))
            clean.type, clean.linkname, clean.mode = member.type, member.linkname, member.mode & 0o1777
            clean.uid, clean.gid, clean.mtime = member.uid, member.gid, member.mtime
            if content is not None:
                clean.type, clean.linkname, clean.size = tarfile.REGTYPE, "", len(content)
            target.addfile(clean, io.BytesIO(content or b""))
            taken.append(path)
    return buffer.getvalue(), tuple(taken), left


def _member(member: tarfile.TarInfo, path: str, content: bytes | None, guard: Guard, kind: ChangeKind) -> str:
    file = FileKind.FOLDER if member.isdir() else FileKind.LINK if member.issym() else FileKind.FILE
    if content is None and file is FileKind.FILE:
        file = FileKind.OTHER
    if why := guard.why(path, file, kind):
        return why
    if file is FileKind.LINK and guard.leads_out(path, member.linkname):
        return "link"
    name = posixpath.basename(path)
    steers = _SECTIONS.get(name, _PLUGINS if name == "entry_points.txt" else None)
    return "startup file" if steers is not None and steers in (content or b"") else ""


def _content(source: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | None:
    """The bytes of a file, also where it is packed as a hard link to another; None of all else."""
    if not member.isreg() and not member.islnk():
        return None
    try:
        file = source.extractfile(member)
    except KeyError:  # its other name was not packed
        return None
    return None if file is None else file.read()


def _topmost(paths: Iterable[str]) -> list[str]:
    """Paths without those below another one."""
    chosen: list[str] = []
    for path in sorted(paths, key=lambda path: path.split("/")):
        if not chosen or not path.startswith(f"{chosen[-1]}/"):
            chosen.append(path)
    return chosen


def _is_runner(module: str) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in RUNNERS)


def _is_cache(path: str) -> bool:
    return path.endswith(".pyc") or any(part in _CACHES for part in path.split("/"))
