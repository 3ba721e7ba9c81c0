"""`ScriptedWorkspace`: one whose files and processes are handled by scripts that run inside as root, where a service
offers no more than to run programs and to carry files. An image needs what Debian has; see `inside` for the rest."""

import asyncio
import gzip
import math
import secrets
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentrl.workspace.provider import WorkspaceSpec
from agentrl.workspace.workspace import (
    HOME,
    MIB,
    READ,
    Change,
    ChangeKind,
    FileInfo,
    FileKind,
    PathError,
    Workspace,
    WorkspaceError,
)
from agentrl_tools.workspaces import inside, tars

_LISTING_BYTES = 64 * MIB
_A_SECOND = 2 << 20  # bytes of files that the service carries at least
SPOOL = "/var/lib/agentrl-spool"
"""Where files are before they are where they belong, which root alone lists."""
_KINDS = {"f": FileKind.FILE, "d": FileKind.FOLDER, "l": FileKind.LINK}
_PATH_ERRORS = {41: "no such file or folder", 42: "is no folder", 44: "is a folder", 45: "is no file",
                46: "a folder above it cannot be made"}  # fmt: skip
STOPS = {"memory": "the memory of the workspace is used up", "disk": "more was written than may be",
         "processes": "there are more processes than may be"}  # fmt: skip
"""What the watch says, and what it means."""
ROOT = "root"
"""As whom our scripts run."""

_EACH = r"""
for file in /proc/[0-9]*/stat; do IFS= read -r line 2>/dev/null <"$file" || continue
pid=${line%% *}; set -- ${line##*) }; [ "$1" = Z ] && continue; [ "$pid" = $$ ] && continue
[ "$pid" = "$PPID" ] && continue; [ "$2" = "$watch" ] && continue; [ $(($7 & 2097152)) -ne 0 ] && continue
"""
"""Begins a loop over processes that are neither zombies, the kernel's, this shell, nor the watch's."""

_FOUND = (
    _EACH
    + r"""
case " $keep $watch:" in *" $pid:${20} "*|*" $pid:") ;; *) found="$found $pid";; esac; done
"""
)
"""Puts those that were not there when the workspace was opened into `found`."""

_BEGIN = (
    r"""
mkdir -p /var/lib && rm -rf "$1" && mkdir -m 700 "$1" || exit 1
awk '{s += $2} END {print s * 4}' /proc/[0-9]*/statm
df -Pk / | awk 'NR == 2 {print $3}'
watch=none
"""
    + _EACH
    + r"""
printf '%s:%s ' "$pid" "${20}"; done; echo
sleep 0.02; date +%s.%N
"""
)
"""Prepares a workspace: prints what is used, in KiB, which processes there are, and the time."""

END = (
    r"""
keep=$1 watch=$2 tries=0; while [ $tries -lt 100 ]; do found=
"""
    + _FOUND
    + r"""
[ -z "$found" ] && exit 0; kill -9 $found 2>/dev/null; tries=$((tries + 1)); done; exit 1
"""
)
"""Kills all processes but those that were there when the workspace was opened."""

_WATCH = (
    r"""
memory=$1 disk=$2 base_memory=$3 base_disk=$4 keep=$5 processes=$6 excess=$2 watch=$$; echo $$
set -- $keep; processes=$((processes + $# + 16))
while :; do sleep 0.5; why=
used=$(awk '{s += $2} END {print s * 4}' /proc/[0-9]*/statm 2>/dev/null)
[ "$((used - base_memory))" -gt "$memory" ] && why=memory
written=$(($(df -Pk / | awk 'NR == 2 {print $3}') - base_disk))
[ "$written" -gt "$excess" ] && why=disk
excess=$disk; [ "$written" -gt "$disk" ] && excess=$written
set -- /proc/[0-9]*; [ $# -gt "$processes" ] && why=processes
[ -z "$why" ] && continue
echo "$why"; tries=0
while [ $tries -lt 20 ]; do found=
"""
    + _FOUND
    + r"""
[ -z "$found" ] && break; kill -9 $found 2>/dev/null; tries=$((tries + 1)); done
done
"""
)
"""Kills everything where more memory or disk (KiB) or processes are used than may be, and says why."""

_READ = r"""
[ -e "$1" ] || exit 41; [ -d "$1" ] && exit 44; [ -f "$1" ] || exit 45
tail -c "+$2" -- "$1" | head -c "$3"
"""

_WRITE = r"""
path=$1 spool=$2 mode=$3 owner=$4; trap 'rm -f "$spool"' EXIT
follow=-m; if [ -L "$path" ]; then follow=-f; fi
target=$(readlink $follow -- "$path" && echo .) || exit 46
target=${target%??}
[ -d "$target" ] && exit 44
if [ -e "$target" ]; then
[ -f "$target" ] || exit 45
[ -z "$mode" ] && mode=$(stat -c %a -- "$target")
fi
above=${target%/*}; above=${above:-/}; first=; look=$above
while [ ! -e "$look" ]; do first=$look; look=${look%/*}; look=${look:-/}; done
mkdir -p -- "$above" 2>/dev/null || exit 46
[ -n "$first" ] && chown -R "$owner" -- "$first"
chown "$owner" "$spool" && chmod "${mode:-644}" "$spool" && mv -fT -- "$spool" "$target" || exit 46
"""
"""Puts a file that was brought where it belongs, as the user's, with the folders above it."""

_PACK = r"""
cd / && xargs -0 -a "$1" sh -c 'for path; do
if [ -e "$path" ] || [ -L "$path" ]; then printf "%s\\0" "$path"; fi; done' sh >"$1.there"
tar --null --verbatim-files-from --one-file-system --ignore-failed-read -cf - -T "$1.there" 2>/dev/null |
head -c "$2" >"$1.tar"
rm -f "$1" "$1.there"
"""
"""Packs the paths that a file names and that are there, up to so many bytes."""

_UNPACK = r"""
trap 'rm -f "$1" "$2"' EXIT
cd / && xargs -0 -a "$2" sh -c 'for path; do
if [ -d "$path" ] && [ ! -L "$path" ]; then rm -rf -- "$path"; fi; done' sh
said=$(tar -xpf "$1" --numeric-owner --no-overwrite-dir --keep-directory-symlink 2>&1) && exit 0
printf '%s' "$said" | head -n 1; exit 1
"""
"""Unpacks a tar, whose files take the place of folders, too."""

_ENTRIES = r"""
find / -xdev -path "$1" -prune -o -printf '%y %s %C@ %p\0' 2>/dev/null | gzip -1 >"$2"; exit 0
"""
"""Lists the root's file system: kind, size, time of the last change and path of each entry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands at a path."""

    kind: str
    """A letter of `find`."""
    size: int
    """Bytes."""
    changed: float
    """When it, or what is known of it, was changed last, by the sandbox's clock."""


class ScriptedWorkspace(Workspace):
    """name: its id. spec: what it was opened with. deadline: seconds of an ordinary call."""

    service: ClassVar[str]
    """Who runs it, for errors."""

    def __init__(self, name: str, spec: WorkspaceSpec, deadline: float) -> None:
        self.id = name
        self._spec, self._deadline = spec, deadline
        self._why, self._begun_with, self._began = "", "", 0.0
        self._owner = (0, 0)
        self._base_memory = self._base_disk = "0"
        self._watch_pid, self._stops, self._stopped = "none", 0, ""
        self._blobs = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    async def _script(
        self, script: str, *words: str, user: str = ROOT, seconds: float = 0.0, most: int = _LISTING_BYTES
    ) -> tuple[int, bytes]:
        """Run a script of ours: its exit code and output. user: empty for the image's. Raises WorkspaceError."""

    @abstractmethod
    async def _brought(self, data: bytes) -> str:
        """Bring bytes to a file in SPOOL: its path. Raises WorkspaceError."""

    @abstractmethod
    async def _fetched(self, path: str, most: int) -> bytes:
        """Bytes of a file in SPOOL, which is removed. Raises PathError: it is larger than `most`. WorkspaceError."""

    @abstractmethod
    async def _before(self) -> dict[str, str]:
        """The kind of each path as it was when the workspace was opened. Raises WorkspaceError."""

    async def _prepare(self) -> None:
        """Learn what is there as it is opened. Raises WorkspaceError."""
        code, said = await self._script("id -u; id -g; pwd", user="")
        fields = said.decode(errors="replace").splitlines()
        if code or len(fields) != 3 or not fields[0].isdigit() or not fields[1].isdigit():
            raise WorkspaceError(f"workspace {self.id}: it does not say who its user is")
        self._owner, home = (int(fields[0]), int(fields[1])), fields[2]
        self.home = self._spec.folder or (home if home.startswith("/") and home != "/" else HOME)
        if self._spec.folder:
            own = f"{self._owner[0]}:{self._owner[1]}"
            await self._script('[ -d "$1" ] || { mkdir -p -- "$1" && chown "$2" -- "$1"; }', self.home, own)

    async def _begin(self) -> None:
        """Note what is used and what runs before anybody else does anything. Raises WorkspaceError."""
        code, said = await self._script(_BEGIN, SPOOL)
        fields = said.decode(errors="replace").splitlines()
        if code or len(fields) != 4 or not fields[3].replace(".", "", 1).isdigit():
            raise WorkspaceError(
                f"workspace {self.id}: it cannot be prepared; an image needs what Debian has: GNU's date, find, tar"
            )
        self._base_memory, self._base_disk, self._begun_with, self._began = *fields[:3], float(fields[3])

    def _watch_words(self) -> list[str]:
        """The watch of the limits, as a command."""
        limits = self._spec.limits
        words = [str(limits.memory // 1024), str(limits.disk // 1024), self._base_memory, self._base_disk]
        return ["/bin/sh", "-c", _WATCH, "sh", *words, self._begun_with, str(limits.processes)]

    def _end_in_time(self) -> None:
        """Close it when its time is over."""
        if self._spec.limits.seconds != math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._spec.limits.seconds, self._end_of_time)

    def _end_of_time(self) -> None:
        self._why = "its time is over"
        self._later(self.close())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _check(self) -> None:
        if self._why:
            raise WorkspaceError(f"workspace {self.id}: {self._why}")

    def failed(self, what: str, error: BaseException) -> WorkspaceError:
        """The error for what was raised there."""
        self._check()
        line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return WorkspaceError(f"workspace {self.id}: {self.service} failed to {what}: {line}")

    def _patience(self, size: int) -> float:
        """Seconds that files of a size may take."""
        return self._deadline + size / _A_SECOND

    async def read(self, path: str, *, offset: int = 0, limit: int = READ) -> bytes:
        size = max(0, min(limit, READ))
        words = (self.absolute(path), str(max(0, offset) + 1), str(size))
        code, data = await self._script(_READ, *words, seconds=self._patience(READ), most=READ)
        if code:
            raise PathError(f"{path}: {_PATH_ERRORS.get(code, 'cannot be read')}")
        return data[:size]

    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        if len(data) > self._spec.limits.disk:
            raise PathError(f"{path}: more than {self._spec.limits.disk // MIB} MiB")
        spool = await self._brought(data)
        bits = "" if mode is None else f"{mode & 0o7777:o}"
        owner = f"{self._owner[0]}:{self._owner[1]}"
        code, _ = await self._script(_WRITE, self.absolute(path), spool, bits, owner)
        if code:
            raise PathError(f"{path}: {_PATH_ERRORS.get(code, 'cannot be written')}")

    async def unpack(self, tar: bytes) -> None:
        if len(tar) > 2 * self._spec.limits.disk:
            raise PathError(f"a tar of more than {2 * self._spec.limits.disk // MIB} MiB")
        clean = await asyncio.to_thread(tars.cleaned, tar, self._owner)
        names = b"".join(f"/{name}\0".encode(errors="surrogateescape") for name in tars.others_than_folders(clean))
        spool, listed = await self._brought(clean), await self._brought(names)
        code, said = await self._script(_UNPACK, spool, listed, seconds=self._patience(self._spec.limits.disk))
        if code:
            raise PathError(f"the tar: {said.decode(errors='replace')[:200]}")

    async def pack(self, paths: Sequence[str]) -> bytes:
        most = 2 * self._spec.limits.disk
        names = dict.fromkeys(self.absolute(path).lstrip("/") or "." for path in paths)
        spool = await self._brought(b"".join(name.encode(errors="surrogateescape") + b"\0" for name in names))
        await self._script(_PACK, spool, str(most + 1), seconds=self._patience(self._spec.limits.disk))
        tar = await self._fetched(f"{spool}.tar", most)
        if not tar:
            return await asyncio.to_thread(tars.joined, {}, {})
        return await asyncio.to_thread(tars.joined, {"/": tar}, {})

    async def listing(self, path: str = ".", *, depth: int = 1, limit: int = 10_000) -> list[FileInfo]:
        mark = secrets.token_hex(8)
        code, said = await self._script(inside.LIST, self.absolute(path), str(depth), mark)
        inside.check_listing(path, code)
        return inside.parsed_listing(said, mark)[:limit]

    async def end_processes(self) -> None:
        code, _ = await self._script(END, self._begun_with, self._watch_pid)
        if code:
            raise WorkspaceError(f"workspace {self.id}: its processes cannot be ended")

    async def entries(self) -> dict[str, Entry]:
        """All entries of the root's file system by path. Raises WorkspaceError."""
        self._blobs += 1
        place = f"{SPOOL}/{self._blobs}.gz"
        await self._script(_ENTRIES, SPOOL, place, seconds=self._patience(self._spec.limits.disk))
        try:
            packed = await self._fetched(place, _LISTING_BYTES)
            return await asyncio.to_thread(_parsed, packed)
        except (PathError, OSError, EOFError, ValueError) as error:
            raise self.failed("compare files", error) from None

    async def diff(self, limit: int = 10_000) -> list[Change]:
        self._check()
        before, now = await self._before(), await self.entries()
        changes = [
            Change(path, ChangeKind.DELETED, _KINDS.get(kind, FileKind.OTHER))
            for path, kind in before.items()
            if path not in now
        ]
        for path, entry in now.items():
            file, known = _KINDS.get(entry.kind, FileKind.OTHER), path in before
            if known and (entry.changed <= self._began or file is FileKind.FOLDER):
                continue
            size = entry.size if file is FileKind.FILE else 0
            changes.append(Change(path, ChangeKind.MODIFIED if known else ChangeKind.ADDED, file, size))
        return sorted(changes, key=lambda change: change.path)[:limit]


def _parsed(packed: bytes) -> dict[str, Entry]:
    """What `_ENTRIES` found. Raises OSError, EOFError, ValueError."""
    found = {}
    for part in gzip.decompress(packed).decode(errors="surrogateescape").split("\0"):
        kind, _, rest = part.partition(" ")
        size, _, rest = rest.partition(" ")
        changed, _, path = rest.partition(" ")
        if path and path != "/":
            found[path] = Entry(kind, int(size), float(changed))
    return found
