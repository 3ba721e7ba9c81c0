"""Scripts for `/bin/sh` of an image, and how what they say is read. An image needs nothing else than common programs:
`grep`, `head`, `sleep`, `kill`; `find` and `stat` for listings. Busybox has them."""

import posixpath
import stat

from agentrl.errors import PathError
from agentrl.workspace.workspace import FileInfo, FileKind

MARK = "AGENTRL_CALL"
"""The environment variable by which what a call started is found, whatever became of its parents."""
NO_FOLDER = 125
"""The exit code of `EXEC`, with the mark alone on standard error, where its folder is none."""

EXEC = r"""
IFS= read -r mark; stdin=$1 descriptors=$2 blocks=$3 folder=$4; shift 4
exec 3>&2 2>/dev/null
ulimit -c 0; ulimit -n "$descriptors"; ulimit -f "$blocks"
cd -- "$folder" || { printf '%s' "$mark" >&3; exit 125; }
if [ "$stdin" = 0 ]; then ( exec "$@" ) </dev/null 2>&3 3>&-; else
head -c "$stdin" | { ( exec "$@" ) 2>&3 3>&-; code=$?; cat >/dev/null; exit $code; }; fi
code=$?; printf '%s' "$mark"; printf '%s' "$mark" >&3; exit $code
"""
"""Runs a program with so many bytes of standard input, which stay open behind them. The first line of it is a mark that
is printed when the program has ended: what it left in the background may hold its outputs open."""

SHELL = r"""
stty rows "$1" cols "$2" 2>/dev/null; ulimit -c 0; ulimit -n "$3"; ulimit -f "$4"; cd -- "$5"
for shell in /bin/bash /usr/bin/bash; do [ -x "$shell" ] && exec "$shell"; done; exec /bin/sh -i
"""
"""Becomes a shell on the terminal that it was started on."""

KILL = r"""
tries=0; while [ $tries -lt 100 ]; do found=
for file in $(grep -ls "$1" /proc/[0-9]*/environ 2>/dev/null); do
file=${file#/proc/}; found="$found ${file%/environ}"; done
[ -z "$found" ] && exit 0; kill -9 $found 2>/dev/null; tries=$((tries + 1)); done; exit 1
"""
"""Kills all processes that carry a mark."""

INTERRUPT = r"""
tries=0; while [ $tries -lt 15 ]; do group= own=
for file in $(grep -ls "$1" /proc/[0-9]*/environ 2>/dev/null); do
IFS= read -r line 2>/dev/null <"${file%environ}stat" || continue; set -- "$1" ${line##*) }
[ "$6" = 0 ] || grep -qs "$1" "/proc/$3/environ" || { own=$4; group=$7; break; }; done
[ -z "$group" ] && exit 1; [ "$group" = "$own" ] && exit 0
sleep 0.1 2>/dev/null || sleep 1; tries=$((tries + 1)); done; kill -9 "-$group"
"""
"""Kills what stays in the foreground of the terminal whose shell carries a mark."""

LIST = r"""
[ -e "$1" ] || [ -L "$1" ] || exit 41
if [ "$2" = 0 ]; then stat -c "$3%f %s ." -- "$1"; exit; fi
[ -d "$1" ] || exit 42
cd -- "$1" 2>/dev/null || exit 43
find . -mindepth 1 -maxdepth "$2" -exec stat -c "$3%f %s %n" -- {} + 2>/dev/null
exit 0
"""
"""Lists a folder: a mark, the mode, the size and the name of each entry."""

LINKS = r"""
mark=$1; shift
for path in "$@"; do printf '%s' "$mark"; [ -L "$path" ] && readlink -- "$path"; done
exit 0
"""
"""Prints a mark for each path, and where it leads if it is a link."""

_LIST_ERRORS = {41: "no such file or folder", 42: "is no folder", 43: "may not be read"}
_KINDS = {stat.S_IFREG: FileKind.FILE, stat.S_IFDIR: FileKind.FOLDER, stat.S_IFLNK: FileKind.LINK}


def kind_of(mode: int) -> FileKind:
    """What a mode is that of."""
    return _KINDS.get(stat.S_IFMT(mode), FileKind.OTHER)


def check_listing(path: str, code: int) -> None:
    """Raise PathError for the exit code of `LIST`."""
    if code:
        raise PathError(f"{path}: {_LIST_ERRORS.get(code, 'cannot be listed')}")


def parsed_listing(said: bytes, mark: str) -> list[FileInfo]:
    """The entries that `LIST` printed, sorted by path. What is no entry is left out."""
    entries = []
    for part in said.decode(errors="replace").split(mark)[1:]:
        mode_text, _, rest = part.partition(" ")
        size, _, name = rest.partition(" ")
        name = name.removesuffix("\n")
        if not name or not size.isdigit():
            continue
        try:
            mode = int(mode_text, 16)
        except ValueError:
            continue
        kind = kind_of(mode)
        path = name if name.startswith("/") else posixpath.normpath(name)
        entries.append(FileInfo(path, kind, int(size) if kind is FileKind.FILE else 0, stat.S_IMODE(mode)))
    return sorted(entries, key=lambda entry: entry.path)
