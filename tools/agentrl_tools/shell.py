"""`Shell`: commands typed into the shell of a terminal, one at a time, each known when it is done.

A command is typed as the argument of `eval`, escaped, so that what it leaves open (a quote, a here-document) ends with
it. Before and after it the shell prints markers, control sequences that hold a nonce of the command; the prompt is such
a marker, too, for a command that was interrupted. What is typed never holds a marker as it is printed, so its echo is
not taken for one. Works in bash, dash and busybox.
"""

import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from agentrl.errors import WorkspaceError
from agentrl.workspace.workspace import Terminal, Workspace
from agentrl_tools.screen import KEPT, Output

_START = 10.0  # seconds for a shell to come up
_PROMPT, _BACK = 0.3, 1.5  # after an interrupt: for a prompt, and for the answer to a probe
_LINE = 2000  # characters typed in a line: a terminal takes 4096
_MARKER = 64  # bytes of a marker, at most
_QUIET = 0.5  # seconds without output after which it is asked what the program does
_ENV = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "PS1": "", "PROMPT_COMMAND": ""}
_SETUP = (
    "command set +o emacs +o vi 2>/dev/null;command set +o history 2>/dev/null;unset HISTFILE PROMPT_COMMAND;"
    "stty -echo 2>/dev/null;PS2=;PS1=;__s=0;printf '\\033]%s;%s\\007' {nonce} $$\n"
)
_TYPED = (
    "__a=$(printf '%b.' \"$__a\");PS2=;PS1='\x1b]{nonce};$?\x07';__b='\\033]%s;%s\\007';"
    '{{ printf "$__b" {nonce} S >/dev/tty;}} 2>/dev/null||printf "$__b" {nonce} S;'
    '(exit $__s) 2>/dev/null;command eval "${{__a%.}}";__s=$?;'
    '{{ printf "$__b" {nonce} $__s >/dev/tty;}} 2>/dev/null||printf "$__b" {nonce} $__s\n'
)
_PROBE = "__s=130;stty sane -echo 2>/dev/null;printf '\\033]%s;%s\\007' {nonce} 130 >/dev/tty\n"
_ESCAPED = re.compile(rb"[^ -&(-\[\]-~]")
_UNITS = re.compile(r"\\0...|\\\\|.")
_AT = r"""at() { read -r line 2>/dev/null </proc/$1/stat && echo "${line##*) }"; }; shell=$1
"""
# What the foreground processes of the shell $1 wait for: `read` of its terminal, `poll` for whatever, or neither.
_ASK = (
    _AT
    + r"""
set -- $(at $shell); group=$6; said=
for folder in /proc/[0-9]*; do
  set -- $(at ${folder#/proc/})
  [ "$3" = "$group" ] && read -r call fd rest 2>/dev/null <$folder/syscall || continue
  case $call in
    0|63) if [ $folder/fd/$((fd)) -ef /proc/$shell/fd/0 ]; then echo read; exit; fi; said=poll ;;
    7|23|232|270|271|281|22|72|73) said=poll ;;
    *) said=${said:-busy} ;;
  esac
done
echo $said
"""
)

_KILL = (
    _AT
    + r"""
set -- $(at $shell); [ "$6" -gt 1 ] && [ "$6" != "$3" ] && kill -9 -$6
"""
)
_END = (
    _AT
    + r"""
for folder in /proc/[0-9]*; do
  set -- $(at ${folder#/proc/}); [ "$4" = "$shell" ] && kill -9 ${folder#/proc/}
done
"""
)


class Ending(StrEnum):
    """Why `Shell` returned."""

    DONE = "done"
    """The command has ended."""
    WAITING = "waiting"
    """It runs, and waits for what is typed."""
    TIME = "time"
    """It took too long and was interrupted."""
    FLOOD = "flood"
    """It printed far too much and was interrupted."""
    ENDED = "ended"
    """The shell ended."""
    LOST = "lost"
    """The shell did not come back after an interrupt and was ended."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a command, or of what was typed."""

    ending: Ending
    """Why it is told now."""
    printed: Iterator[bytes]
    """What was printed since the last call, as `Output.pieces` yields it."""
    code: int = 0
    """The exit code, where it is done."""


class Shell:
    """A shell in a workspace, opened when it is first needed and again after it ended."""

    def __init__(self, workspace: Workspace, seconds: float) -> None:
        """Make one. seconds: that a command may take."""
        self._workspace, self._seconds = workspace, seconds
        self._terminal: Terminal | None = None
        self._pid = ""
        self._nonce = self._former = ""
        self._pending = b""
        self.running = False
        """Whether a command has begun and not ended."""
        self.waiting = False
        """Whether it was last seen to wait for input."""

    async def run(self, command: str, output: Output) -> Ran:
        """Run a command until it is done, waits for input or has taken too long. Nothing may be running. output: takes
        what is printed, as in the other calls, and is read before it is closed. Raises WorkspaceError."""
        terminal = await self._opened()
        await self._between(terminal, output)
        self._former, self._nonce = self._nonce, secrets.token_hex(8)
        self.running = True
        await terminal.send(_typed(command.encode(errors="replace"), self._nonce))
        if not await self._until(terminal, self._nonce, b"S", _START):
            await self.close()
            return self._told(Ending.LOST, output)
        return await self._follow(terminal, output)

    async def type(self, data: bytes, output: Output) -> Ran:
        """Type into what runs, and wait on."""
        assert self._terminal is not None
        await self._terminal.send(data)
        return await self._follow(self._terminal, output)

    async def interrupt(self, output: Output) -> Ran:
        """End what runs."""
        assert self._terminal is not None
        return await self._interrupted(self._terminal, output, Ending.DONE)

    async def end(self) -> None:
        """End the shell and what it started, in the background, too."""
        if self._terminal is not None:
            await self._ask(_END)
        await self.close()

    async def close(self) -> None:
        """End the shell; what runs in the background ends with the workspace."""
        terminal, self._terminal, self.running = self._terminal, None, False
        if terminal is not None:
            await terminal.close()

    async def _opened(self) -> Terminal:
        if self._terminal is None:
            self._terminal = await self._workspace.terminal(env=_ENV)
            self._pending, nonce = b"", secrets.token_hex(8)
            await self._terminal.send(_SETUP.format(nonce=nonce).encode())
            end = await self._until(self._terminal, nonce, rb"\d+", _START)
            if not end:
                await self.close()
                raise WorkspaceError("the shell of the workspace does not answer")
            self._pid = end[1].decode()
        return self._terminal

    async def _until(self, terminal: Terminal, nonce: str, value: bytes, seconds: float) -> re.Match[bytes] | None:
        """Drop what is printed up to a marker; None where it does not come."""
        end = time.monotonic() + seconds
        wanted = _marker(nonce, value)
        while not (match := wanted.search(self._pending)):
            data = await terminal.read(max(0.0, end - time.monotonic()))
            if data is None or time.monotonic() > end:
                return None
            self._pending = self._pending[-4096:] + data
        self._pending = self._pending[match.end() :]
        return match

    async def _between(self, terminal: Terminal, output: Output) -> None:
        """Take what was printed since the last command ended, by what runs in the background."""
        output.add(self._pending)
        self._pending = b""
        while output.total < KEPT and (more := await terminal.read(0.0)):
            output.add(more)

    async def _follow(self, terminal: Terminal, output: Output) -> Ran:
        """Gather output until there is something to tell."""
        self.waiting = False
        begun = quiet_since = time.monotonic()
        quiet = _QUIET
        while True:
            if (code := self._taken(output, self._nonce)) is not None:
                self.running = False
                return self._told(Ending.DONE, output, code)
            left = begun + self._seconds - time.monotonic()
            if left <= 0 or output.total > KEPT:
                return await self._interrupted(terminal, output, Ending.TIME if left <= 0 else Ending.FLOOD)
            data = await terminal.read(min(left, max(0.0, quiet_since + quiet - time.monotonic())))
            if data is None:
                output.add(self._pending)
                await self.close()
                return self._told(Ending.ENDED, output)
            if data:
                self._pending += data
                quiet_since, quiet = time.monotonic(), _QUIET
            elif time.monotonic() >= quiet_since + quiet:
                if await self._waits(output):
                    output.add(self._pending)
                    self._pending, self.waiting = b"", True
                    return self._told(Ending.WAITING, output)
                quiet *= 3

    def _taken(self, output: Output, nonce: str) -> int | None:
        """Move what has come to `output`, up to the marker of the end; the exit code where that has come."""
        end = _marker(nonce, rb"\d{1,3}").search(self._pending)
        if end:
            upto, after = end.span()
        else:
            upto = after = _begun_marker(self._pending)
        output.add(self._pending[:upto])
        self._pending = self._pending[after:]
        return int(end[1]) if end else None

    async def _interrupted(self, terminal: Terminal, output: Output, why: Ending) -> Ran:
        """End what runs: by an interrupt, else by killing it. The shell answers a probe, or is lost."""
        former, self._nonce = self._nonce, secrets.token_hex(8)
        await terminal.interrupt()
        for kill in (False, True):
            if kill:
                await self._ask(_KILL)
            await self._gather(terminal, output, former, _PROMPT)
            await terminal.send(_PROBE.format(nonce=self._nonce).encode())
            code = await self._gather(terminal, output, self._nonce, _BACK)
            if code is not None:
                self.running = self.waiting = False
                break
        else:
            await self.end()
        ending = why if code is not None else Ending.LOST
        return self._told(ending, output, code or 0, former)

    async def _gather(self, terminal: Terminal, output: Output, nonce: str, seconds: float) -> int | None:
        """Gather output until a marker comes; None where it does not within `seconds`, or the shell has ended."""
        end = time.monotonic() + seconds
        while (code := self._taken(output, nonce)) is None and (left := end - time.monotonic()) > 0:
            data = await terminal.read(left)
            if data is None:
                return None
            self._pending += data
        return code

    def _told(self, ending: Ending, output: Output, code: int = 0, *nonces: str) -> Ran:
        return Ran(ending, _shown(output, self._former, (self._nonce, *nonces)), code)

    async def _waits(self, output: Output) -> bool:
        """Whether the program waits for what is typed: it reads the terminal, or it waits for something and has left
        a line unfinished, as prompts are."""
        unfinished = (self._pending or output.last)[-1:] not in (b"", b"\n")
        does = await self._ask(_ASK)
        return does == b"read" or (unfinished and does in (b"poll", b""))

    async def _ask(self, script: str) -> bytes:
        """What a script about the processes of the shell prints."""
        asked = await self._workspace.exec(["sh", "-c", script, "sh", self._pid], cwd="/", seconds=5.0)
        return asked.stdout.strip()


def _marker(nonce: str, value: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"\x1b\]%s;(%s)\x07" % (nonce.encode(), value))


def _shown(output: Output, former: str, nonces: tuple[str, ...]) -> Iterator[bytes]:
    """Yield an output without what is the shell's. former: the nonce of the prompt before it."""
    for index, piece in enumerate(output.pieces()):
        data = piece if index else _without_prompt(piece, former)
        for nonce in nonces:
            data = _without_traces(data, nonce)
        yield data


def _without_traces(data: bytes, nonce: str) -> bytes:
    """`data` without the lines that are not the command's: echoes of what was typed, traces of `set -x`."""
    if nonce.encode() not in data and b"+ __" not in data:  # so it is nearly always, and quick to see
        return data
    data = _marker(nonce, rb"[^\x07]*").sub(b"", data)
    return re.sub(rb"(?m)^(?:.*%s.*|\++ __[abs]=.*)\n?" % nonce.encode(), b"", data)


def _without_prompt(data: bytes, nonce: str) -> bytes:
    """`data` without the prompt before it, of which busybox may draw the end alone."""
    ends = "|".join(nonce[i:] for i in range(len(nonce) - 1))
    return re.sub(rb"\A(?:\x1b\])?(?:%s);[0-9]{1,3}\x07?" % ends.encode(), b"", data) if nonce else data


def _begun_marker(data: bytes) -> int:
    """Where the end of `data` may be the beginning of a marker; its length where it is none."""
    at = data.rfind(b"\x1b", -_MARKER)
    return at if at >= 0 and b"\x07" not in data[at:] else len(data)


def _typed(command: bytes, nonce: str) -> bytes:
    """The lines that run a command."""
    escaped = _ESCAPED.sub(lambda match: b"\\0%03o" % match[0][0], command).decode()
    chunks, units = [""], _UNITS.findall(escaped)
    for unit in units:
        if len(chunks[-1]) > _LINE:
            chunks.append("")
        chunks[-1] += unit
    first, *others = chunks
    lines = [f"__a='{first}'", *(f"__a=$__a'{chunk}'" for chunk in others)]
    return ("\n".join(lines) + ";" + _TYPED.format(nonce=nonce)).encode()
