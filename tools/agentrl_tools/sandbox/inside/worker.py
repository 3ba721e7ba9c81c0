"""The interpreter that runs the model's code: cell after cell in one `__main__`, in a child of the supervisor.

It trusts nothing that a cell may have touched: streams and descriptors are set up anew for each. What it cannot repair
ends it, and the supervisor starts another.
"""

from __future__ import annotations

import builtins
import linecache
import os
import signal
import struct
import sys
import traceback
import types
from _ast import Expr, Expression, Module
from io import FileIO, TextIOWrapper

TYPE_CHECKING = False  # `typing` costs milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

VALUE, ERROR, IMAGE, CUT = b"V", b"E", b"I", b"C"
NONCE = 16
_ONLY_AST, _TOP_LEVEL_AWAIT = 0x0400, 0x2000
_COROUTINE = 0x0080  # in a code object's flags
_PNG = b"\x89PNG\r\n\x1a\n"


class Worker:
    """channel: the supervisor's socket. outputs: (descriptor, its place) of stdout and stderr. shown: how many images
    of a call, and their bytes together."""

    def __init__(self, channel: int, outputs: tuple[tuple[int, int], ...], output: int, shown: tuple[int, int]) -> None:
        self.channel = channel
        self.outputs = outputs
        self.output = output
        self.most_images, self.image_bytes = shown
        self.pid = os.getpid()
        self.running = False
        self.count = 0
        self.images: list[bytes] = []
        self.cut = False
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        self.names = module.__dict__
        builtins.__dict__.update(display=self.display, exit=sys.exit, quit=sys.exit)

    def serve(self) -> None:
        """Serve until the supervisor is gone, or the code cut the connection."""
        while True:
            size, nonce = struct.unpack(f"<I{NONCE}s", self.read(4 + NONCE))
            reply = self.cell(self.read(size).decode("utf-8", "surrogatepass"))
            self.write(struct.pack(f"<I{NONCE}s", len(reply), nonce) + reply)

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes of the supervisor; ends the process where it is gone."""
        data = b""
        while len(data) < size:
            part = os.read(self.channel, size - len(data))
            if not part:
                os._exit(0)
            data += part
        return data

    def write(self, data: bytes) -> None:
        """Send all of `data` to the supervisor."""
        while data:
            data = data[os.write(self.channel, data) :]

    def cell(self, code: str) -> bytes:
        """Run one and return the fields of the reply."""
        self.count += 1
        self.images, self.cut = [], False
        self.connect()
        value = error = None
        try:
            self.running = True
            value = self.run(code)
            self.figures()
        except BaseException as problem:  # noqa: BLE001 - whatever the model's code raises is told to it
            self.running = False  # before anything is called, where an interrupt could hit our own code
            self.leave_if_forked()
            error = self.described(problem)
        finally:
            self.running = False
        self.leave_if_forked()
        self.flush()
        return self.fields(value, error)

    def connect(self) -> None:
        """Set up streams and the handler of an interrupt as they should be, whatever the last cell did to them; its
        processes are dead by now, and are reaped."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        for fd, place in self.outputs:
            os.dup2(fd, place)
        sys.stdout, sys.stderr = (
            TextIOWrapper(FileIO(place, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
            for _, place in self.outputs
        )
        sys.__dict__.update(__stdout__=sys.stdout, __stderr__=sys.stderr)
        signal.signal(signal.SIGINT, self.interrupted)

    def interrupted(self, number: int, frame: object) -> None:
        """Raise KeyboardInterrupt in the cell, once a call."""
        if self.running and os.getpid() == self.pid:
            self.running = False  # one is enough: another could hit our own code
            raise KeyboardInterrupt

    def flush(self) -> None:
        """Flush both streams; what cannot be flushed counts as cut."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # noqa: BLE001 - closed, or full, or replaced by anything
                self.cut = True

    def run(self, code: str) -> str | None:
        """The text of the last expression's value, or None."""
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = compile(code, name, "exec", _ONLY_AST | _TOP_LEVEL_AWAIT, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], Expr) else None
        if tree.body:
            self.evaluate(tree, name, "exec")
        if last is None:
            return None
        value = self.evaluate(Expression(last.value), name, "eval")
        return None if value is None or self.as_image(value) else self.shortened(repr(value))

    def evaluate(self, tree: Module | Expression, name: str, mode: str) -> Any:
        """Run code in `__main__`, and await what it returns where it is a coroutine."""
        code = compile(tree, name, mode, _TOP_LEVEL_AWAIT, dont_inherit=True)
        result = eval(code, self.names)
        if code.co_flags & _COROUTINE:
            import asyncio

            return asyncio.run(result)
        return result

    def shortened(self, text: str) -> str:
        """A text without its middle where it is longer than `output` characters."""
        if len(text) <= self.output:
            return text
        self.cut = True
        half = self.output // 2
        return f"{text[:half]} ... {text[-half:]}"

    def display(self, *values: object) -> None:
        """Do what a notebook's `display` does: images as images, all else printed."""
        for value in values:
            if not self.as_image(value):
                print(repr(value))

    def as_image(self, value: Any) -> bool:
        """Keep it as a PNG if it is a picture: PNG bytes, a PIL image, a figure, or anything with `_repr_png_`."""
        data = None
        if isinstance(value, bytes):
            data = value if value.startswith(_PNG) else None
        elif not isinstance(value, type):
            if callable(getattr(value, "savefig", None)):
                data = _saved(value.savefig)
            elif callable(getattr(value, "_repr_png_", None)):
                data = value._repr_png_()
            elif type(value).__module__.startswith("PIL.") and callable(getattr(value, "save", None)):
                data = _saved(value.save)
        if not isinstance(data, bytes) or not data.startswith(_PNG):
            return False
        if data in self.images:
            return True  # a figure that is the last value is among the open ones too
        room = self.image_bytes - sum(map(len, self.images))
        if len(self.images) < self.most_images and len(data) <= room:
            self.images.append(data)
        else:
            self.cut = True
        return True

    def figures(self) -> None:
        """Keep and close what matplotlib has open, as a notebook does at the end of a cell."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            try:
                for number in pyplot.get_fignums():
                    self.as_image(pyplot.figure(number))
            finally:
                pyplot.close("all")

    def described(self, problem: BaseException) -> str:
        """The traceback as Python prints it, with the frames of cells only."""
        try:
            told = traceback.TracebackException(type(problem), problem, problem.__traceback__)
            _keep_cells(told, set())
            return self.shortened("".join(told.format()).strip())
        except BaseException:  # noqa: BLE001 - an interrupt, or no memory
            return type(problem).__name__

    def leave_if_forked(self) -> None:
        """End here in a fork of this process, which must not speak with the supervisor."""
        if os.getpid() != self.pid:
            self.flush()
            os._exit(0)

    def fields(self, value: str | None, error: str | None) -> bytes:
        """The fields of a reply: images, value, error, and whether something was cut."""
        parts = [(IMAGE, image) for image in self.images]
        parts += [(tag, text.encode("utf-8", "backslashreplace"))
                  for tag, text in ((VALUE, value), (ERROR, error)) if text is not None]  # fmt: skip
        if self.cut:
            parts.append((CUT, b""))
        return b"".join(field(tag, data) for tag, data in parts)


def field(tag: bytes, data: bytes) -> bytes:
    """One field of a reply: a letter, the length, the bytes."""
    return tag + struct.pack("<I", len(data)) + data


def _saved(save: Callable[..., object]) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    save(buffer, format="png")
    return buffer.getvalue()


def _keep_cells(told: traceback.TracebackException | None, seen: set[int]) -> None:
    if told is None or id(told) in seen:
        return
    seen.add(id(told))
    told.stack[:] = [frame for frame in told.stack if frame.filename.startswith("<cell ")]
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        _keep_cells(other, seen)
