"""`Watchdog`: names the plugin's function that keeps the event loop, and with it every request, from going on, and ends
what waits for it.

A thread looks whether the loop has run. Code that holds the interpreter (a catastrophic regular expression, a C
extension) stops that thread too: `faulthandler`, which needs no interpreter, then writes where all threads are into a
pipe, and the small process at its other end says it, and kills this one in the end. This module is also that process's
program.
"""

import asyncio
import ctypes
import faulthandler
import math
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

from agentrl.jsonable import dumps, loads

SECONDS = 30.0
"""Without a turn of the loop after which it is said."""
LET_GO = 30.0
"""Seconds for code that is interrupted to let go of the loop, before the process ends without it."""
KEY = "rollout.stuck_timeout"
_BEAT = 1.0
_OFTEN = 0.05  # seconds between two interruptions: a turn of the loop may hold many calls of the same code
_NAMED = 3  # functions, where it may be any of several

_PACKAGE = Path(__file__).parents[1]
_STANDARD = sysconfig.get_path("stdlib")
_CALLERS = ("rollout", "plugins", "data", "eval", "testing", "containment")
"""Where agentrl calls plugins; what is slow elsewhere (loading a model) is its own business."""
_STARTING = _PACKAGE / "plugins" / "registry.py"  # a plugin may take its time to be made


class Frame(NamedTuple):
    """One frame of a thread's stack."""

    file: str
    """Path of the source file."""
    line: int
    """Line in the file."""
    function: str
    """Name of the function."""

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}:{self.line})"


Stack = Sequence[Frame]
"""The innermost frame first."""


def blocking_code(stacks: Mapping[int, Stack], loop: int, held: bool) -> str | None:
    """Name the code that keeps the loop that runs in thread `loop` from running, in a few words; None where it is no
    plugin. held: no thread runs, so that it may be any."""
    own = stacks.get(loop, ())
    if (found := _stranger(own)) is not None:
        return _placed(found, own[0])
    if not held and _turn(own) is not None:
        return None
    others = [(found, stack[0]) for ident, stack in stacks.items() if ident != loop and (found := _stranger(stack))]
    named = list(dict.fromkeys(_placed(*other) for other in others))
    if not named:
        return None
    several = "" if len(named) == 1 else "one of "
    return several + " and ".join(named[:_NAMED]) + " in a thread"


def _placed(frame: Frame, innermost: Frame) -> str:
    return str(frame) if frame == innermost else f"{frame}, at {innermost}"


def _stranger(stack: Stack) -> Frame | None:
    """The outermost frame of a plugin in what the loop, or a thread of plugins, does right now."""
    turn = _turn(stack)
    caller: Path | None = None
    for frame in reversed(stack[:turn]):
        path = Path(frame.file)
        if path.is_relative_to(_PACKAGE):
            caller = path
        elif not frame.file.startswith("<frozen") and not _standard(frame.file):
            if caller is None:
                return frame if turn is not None else None
            ours = caller.relative_to(_PACKAGE).parts[0] in _CALLERS and caller != _STARTING
            return frame if ours else None
    return None


def _turn(stack: Stack) -> int | None:
    """Where a turn of the loop begins."""
    return next((i for i, frame in enumerate(stack) if frame.file.endswith("asyncio/events.py")), None)


def _standard(file: str) -> bool:
    return file.startswith(_STANDARD) and "site-packages" not in file


class HeldError(Exception):
    """Raised in a plugin's function that holds up every request."""

    def __str__(self) -> str:
        return "it held up every request for too long, and was interrupted"


class Ending(Protocol):
    """How what runs in a loop ends when a plugin holds it up for `seconds`."""

    seconds: float
    """The time until then."""
    last_words: Sequence[str]
    """A command that prints what is left of the work, run where this process can only be killed; empty: none."""

    def begin(self, line: str, thread: int) -> None:
        """End it as soon as the loop, in `thread`, goes on, and raise HeldError in what keeps it from that. line: what
        happened. Called in another thread, again and again, as is `leave`."""

    def leave(self, line: str) -> None:
        """Save what can be saved, and end this process: the loop does not go on."""


class Watchdog:
    """say: told a line of each time that the loop stands still. seconds: for how long it may. ending: what happens when
    it goes on standing still; None: nothing."""

    def __init__(self, say: Callable[[str], None], seconds: float = SECONDS, ending: Ending | None = None) -> None:
        self._say, self._ending = say, ending
        self._seconds = seconds if ending is None else min(seconds, ending.seconds)
        self._ended = threading.Event()
        self._loop: int | None = None  # the thread of the loop while it runs
        self._turned = 0.0  # when it last did
        self._timer: asyncio.TimerHandle | None = None
        limit = ending.seconds if ending is not None else math.inf
        reading, self._pipe = os.pipe()
        program = [sys.executable, "-m", "agentrl.containment.watchdog"]
        try:
            self._reader = subprocess.Popen(
                [*program, str(self._seconds), str(limit), str(os.getpid())], stdin=reading, start_new_session=True
            )
        finally:
            os.close(reading)
        self._thread = threading.Thread(target=self._watch, name="agentrl-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Watch `loop`, which runs in this thread meanwhile."""

        def beat() -> None:
            self._turned = time.monotonic()
            self._timer = loop.call_later(min(_BEAT, self._seconds / 4), beat)

        self._loop = threading.get_ident()
        beat()
        self._arm(self._loop)  # the thread may never come to it
        try:
            yield
        finally:
            self._loop = None
            if self._timer is not None:
                self._timer.cancel()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        os.close(self._pipe)
        self._reader.wait()

    def _watch(self) -> None:
        said = looked = lost = named_at = 0.0
        tick = min(_BEAT, self._seconds / 4)
        while not self._ended.wait(tick):
            loop, turned, now = self._loop, self._turned, time.monotonic()
            self._arm(loop)
            if now - looked > self._seconds / 2:  # the whole process was stopped: time that nobody had
                lost = now
            looked, tick = now, min(_BEAT, self._seconds / 4)
            if loop is None or now - max(turned, lost) < self._seconds:
                named_at = 0.0
                continue
            named = blocking_code(_stacks(), loop, held=False)
            if named and said != turned:
                self._say(_line(f"{self._seconds:g} s", named))
            said, named_at = turned, (named_at or now) if named else 0.0
            if named and self._ending is not None:
                over = now - named_at - (self._ending.seconds - self._seconds)
                tick = self._end(self._ending, named, loop, over) or tick

    def _end(self, ending: Ending, named: str, loop: int, over: float) -> float | None:
        """End what runs, once `over` has come to 0 seconds; return when to go on with it."""
        if over < 0:
            return None
        line = _line(f"{ending.seconds:g} s ({KEY})", named)
        if over < LET_GO:
            ending.begin(line, loop)
            return _OFTEN
        with suppress(BrokenPipeError):
            os.write(self._pipe, b"alive 0\n")  # saving takes its time
        faulthandler.cancel_dump_traceback_later()
        ending.leave(line)
        return None

    def _arm(self, loop: int | None) -> None:
        """Have the process told, from now on, of `seconds` in which this thread does not run."""
        words = dumps(self._ending.last_words if self._ending is not None else ())
        with suppress(BrokenPipeError):  # somebody ended the process: what is left is said all the same
            os.write(self._pipe, f"alive {loop or 0} {words}\n".encode())
        faulthandler.dump_traceback_later(self._seconds, file=self._pipe)


def interrupt(thread: int) -> None:
    """Raise HeldError in a thread, once it executes Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(HeldError))


def held_in(frame: FrameType | None) -> bool:
    """Whether the loop that runs in a frame's thread is in a plugin's function."""
    return _stranger(_frames(frame)) is not None


def _line(time: str, named: str) -> str:
    return (
        f"no request has gone on for {time}, held up by {named}: bound what it does, or let it wait in `async`, "
        "in a thread (@tool(thread=True)) or in processes (rewards.functions: processes)"
    )


def _stacks() -> dict[int, list[Frame]]:
    return {ident: _frames(frame) for ident, frame in sys._current_frames().items()}


def _frames(frame: FrameType | None) -> list[Frame]:
    found = []
    while frame is not None:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def read_dump(text: str) -> dict[int, list[Frame]]:
    """The stacks of what `faulthandler` wrote, by thread."""
    stacks: dict[int, list[Frame]] = {}
    stack: list[Frame] = []
    for line in text.split("\n"):
        if thread := _THREAD.match(line):
            stack = stacks.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.match(line):
            stack.append(Frame(frame[1], int(frame[2]), frame[3]))
    return stacks


def main() -> None:
    """Read what a Watchdog writes until its end. What is followed by no sign of life for a while is said, and ends the
    process where it lasts: one that was only stopped gives a sign at once."""
    seconds, limit, text, left, line = float(sys.argv[1]), float(sys.argv[2]), "", math.inf, ""
    while True:
        waits = "\nThread" in text or text.startswith("Thread")
        patience = min(2.0, seconds) if waits else _BEAT if left < math.inf else None
        if not select.select([0], [], [], patience)[0]:
            if waits:
                named = _held_by(text)
                if named:
                    print(f"agentrl: {_line(f'{seconds:g} s', named)}", file=sys.stderr, flush=True)
                    left, line = limit - seconds, _line(f"{limit:g} s ({KEY})", named)
                text = text.split("\n", 1)[0] + "\n" if text.startswith("alive") else ""
            elif not _stopped():
                left -= _BEAT
                if left <= 0:
                    _kill(line, text)
                    left = math.inf
            continue
        if not (piece := os.read(0, 1 << 16)):
            return
        text += piece.decode(errors="replace")
        if (last := text.rfind("alive ")) > 0:
            text, left = text[last:], math.inf


def _held_by(text: str) -> str | None:
    first = text.split("\n", 1)[0].split()
    loop = int(first[1]) if first[:1] == ["alive"] else 0
    named = blocking_code(read_dump(text), loop, held=True) if loop else None
    return named and f"{named}, which holds the interpreter"


def _stopped() -> bool:
    """Whether the watched process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{sys.argv[3]}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except (OSError, IndexError):
        return False


def _kill(line: str, text: str) -> None:
    """Say what is left of the watched process's work, and kill it. text: the last that it wrote."""
    command = loads(text.split("\n", 1)[0].split(" ", 2)[2])
    left = ""
    with suppress(OSError, subprocess.SubprocessError):  # a disk that hangs does not keep it alive
        left = subprocess.check_output(command, text=True, timeout=LET_GO).strip() if command else ""
    what = f"error: {line}; the process is killed" + (f"; {left}" if left else "")
    if os.getppid() != int(sys.argv[3]) or select.select([0], [], [], 0)[0]:
        return  # it has ended, or goes on, meanwhile
    show = "\x1b[?25h" if sys.stderr.isatty() else ""  # the cursor, which a live display hides
    print(f"{show}{what}", file=sys.stderr, flush=True)
    os.kill(os.getppid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
