"""`Watchdog`: names the plugin's function that keeps the event loop, and with it every request, from going on.

A thread looks whether the loop has run. Code that holds the interpreter (a catastrophic regular expression, a C
extension) stops that thread too: `faulthandler`, which needs no interpreter, then writes where all threads are into a
pipe, and the small process at its other end says it. This module is also that process's program.
"""

import asyncio
import faulthandler
import os
import re
import select
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

SECONDS = 30.0
"""Without a turn of the loop after which it is said."""
_BEAT = 1.0
_NAMED = 3  # functions, where it may be any of several

_PACKAGE = Path(__file__).parents[1]
_STANDARD = sysconfig.get_path("stdlib")
_CALLERS = ("rollout", "plugins", "data", "eval", "testing", "threads.py")
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
    """Return the outermost frame of a plugin in what the loop, or a thread of plugins, does right now."""
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
    """Return where a turn of the loop begins."""
    return next((i for i, frame in enumerate(stack) if frame.file.endswith("asyncio/events.py")), None)


def _standard(file: str) -> bool:
    return file.startswith(_STANDARD) and "site-packages" not in file


class Watchdog:
    """say: told a line of each time that the loop stands still. seconds: for how long it may."""

    def __init__(self, say: Callable[[str], None], seconds: float = SECONDS) -> None:
        self._say, self._seconds = say, seconds
        self._ended = threading.Event()
        self._loop: int | None = None  # the thread of the loop while it runs
        self._turned = 0.0  # when it last did
        self._timer: asyncio.TimerHandle | None = None
        reading, self._pipe = os.pipe()
        try:
            self._reader = subprocess.Popen(
                [sys.executable, "-m", "agentrl.rollout.watchdog", str(seconds)], stdin=reading, start_new_session=True
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

        first, self._loop = self._turned == 0.0, threading.get_ident()
        beat()
        if first:  # the thread may never come to it
            self._arm(self._loop)
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
        said = looked = 0.0
        while not self._ended.wait(min(_BEAT, self._seconds / 4)):
            loop, turned, now = self._loop, self._turned, time.monotonic()
            self._arm(loop)
            stopped, looked = now - looked > self._seconds / 2, now  # the whole process was
            if stopped or loop is None or turned == said or now - turned < self._seconds:
                continue
            said = turned
            if named := blocking_code(_stacks(), loop, held=False):
                self._say(_line(self._seconds, named))

    def _arm(self, loop: int | None) -> None:
        """Have the process told, from now on, of `seconds` in which this thread does not run."""
        with suppress(BrokenPipeError):  # somebody ended the process: what is left is said all the same
            os.write(self._pipe, f"alive {loop or 0}\n".encode())
        faulthandler.dump_traceback_later(self._seconds, file=self._pipe)


def _line(seconds: float, named: str) -> str:
    return (
        f"no request has gone on for {seconds:g} s, held up by {named}: bound what it does, or let it wait in `async`, "
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
    """Return the stacks of what `faulthandler` wrote, by thread."""
    stacks: dict[int, list[Frame]] = {}
    stack: list[Frame] = []
    for line in text.split("\n"):
        if thread := _THREAD.match(line):
            stack = stacks.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.match(line):
            stack.append(Frame(frame[1], int(frame[2]), frame[3]))
    return stacks


def main() -> None:
    """Read what a Watchdog writes until its end. What is followed by no sign of life for a while is said: a process
    that was only stopped gives one at once."""
    seconds, text = float(sys.argv[1]), ""
    while True:
        waits = "\nThread" in text or text.startswith("Thread")
        if waits and not select.select([0], [], [], min(2.0, seconds))[0]:
            _accuse_in_dump(text, seconds)
            text = text.split("\n", 1)[0] + "\n" if text.startswith("alive") else ""
            continue
        if not (piece := os.read(0, 1 << 16)):
            return
        text += piece.decode(errors="replace")
        if (last := text.rfind("alive ")) > 0:
            text = text[last:]


def _accuse_in_dump(text: str, seconds: float) -> None:
    first = text.split("\n", 1)[0].split()
    loop = int(first[1]) if first[:1] == ["alive"] else 0
    if named := blocking_code(read_dump(text), loop, held=True) if loop else None:
        print(f"agentrl: {_line(seconds, f'{named}, which holds the interpreter')}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
