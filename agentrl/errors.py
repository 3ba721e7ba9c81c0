"""Errors that a person can act on, each one line: what was wrong, where, what to do; and the exceptions of plugins.

A plugin may raise anything, what ends a program included. `contained` makes an Exception of it, `call_plugin` a
UserError, and `describe` one line; what a real Ctrl-C or another signal raised goes through.
"""

import difflib
import re
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")

_LINE = 500  # characters of a foreign error, its type included
_PLAIN_LINE = 2_000  # characters of an error whose text is a whole line
_LIBRARIES = (str(Path(__file__).parent), sysconfig.get_path("stdlib"))
_INSTALLED = ("site-packages", "dist-packages")

_ORDERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
"""What a terminal obeys or hides instead of showing it: control characters but tab and newline, marks of direction,
tags, halves of surrogate pairs."""


class PlainError(Exception):
    """An error whose text is a whole line for people: `describe` adds neither its type nor where it was raised."""


class UserError(PlainError):
    """Bad input: a recipe, a data row, a plugin, a folder. The command line prints it as one line and exits with 2."""


class PluginExitError(Exception):
    """A plugin raised what is no Exception (SystemExit, a panic of native code); `__cause__` is what."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'calculator'?`, or the known names when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return f"; known: {', '.join(names)}" if names else ""


def contained(error: BaseException) -> Exception:
    """Return what came out of a plugin's asynchronous code as an Exception.

    Raises it again where it is not the plugin's: a cancellation, what the handler of a signal raised, the end of a
    coroutine that nobody runs any more.
    """
    if isinstance(error, Exception):
        return error
    import asyncio  # takes longer than all of this module

    closed = isinstance(error, GeneratorExit) and not _in_task()
    if closed or isinstance(error, asyncio.CancelledError) or from_signal(error):
        raise error
    failure = PluginExitError(describe(error, place=False))
    failure.__cause__ = error
    return failure


def call_plugin(whose: str, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, a plugin's synchronous function.

    Raises UserError for whatever it raises, an exit included: whose function, what it raised, and where. What the
    handler of a signal raised stays as it is, and so does want of memory, which has remedies of its own.
    """
    try:
        return function(*arguments)
    except BaseException as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or from_signal(error):
            raise
        inside = error.__traceback__.tb_next if error.__traceback__ is not None else None
        joint = ": " if isinstance(error, PlainError) else " raised "
        place = _defined(function) if inside is None else ""
        raise UserError(f"{whose}{joint}{describe(error.with_traceback(inside))}{place}") from error


def from_signal(error: BaseException) -> bool:
    """Return whether the handler of a signal raised it to end the program, as a real Ctrl-C does."""
    if isinstance(error, Exception):
        return False
    if isinstance(error, BaseExceptionGroup):
        return any(from_signal(one) for one in error.exceptions)
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
        return True
    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # written in C: it leaves no frame
    return plain and isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _code(handler: Any) -> CodeType | None:
    """Return what a handler runs, out of partials and methods."""
    while hasattr(handler, "func"):
        handler = handler.func
    return getattr(getattr(handler, "__func__", handler), "__code__", None)


def _in_task() -> bool:
    import asyncio

    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop runs
        return False


def describe(error: BaseException, *, place: bool = True, plain: bool = True) -> str:
    """Return an exception as one line: its type, its text and the line of code that it comes from.

    Of a PlainError, the text alone. place: whether to name the line of code: the last that belongs to no library, else
    the first that is neither agentrl's nor Python's. plain: False treats a PlainError as any other.
    """
    if isinstance(error, PluginExitError) and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(message_of(error)[: 4 * _PLAIN_LINE].split())
    if plain and isinstance(error, PlainError):
        return text[:_PLAIN_LINE]
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_LINE] + (_place(error) if place else "")


def message_of(error: BaseException) -> str:
    """Return `str(error)`, also where that raises."""
    try:
        return str(error)
    except BaseException as another:  # noqa: BLE001 - boundary: a plugin's class may do anything here
        contained(another)
        return f"its message cannot be read ({type(another).__name__})"


def _place(error: BaseException) -> str:
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    outside = [line for line in lines if not line[0].startswith(("<", *_LIBRARIES)) or _installed(line[0])]
    own = [line for line in outside if not _installed(line[0])]
    found = own[-1:] or outside[:1] or lines[-1:]
    return "".join(f" ({Path(file).name}:{number})" for file, number in found)


def _installed(file: str) -> bool:
    return any(part in _INSTALLED for part in Path(file).parts)


def _defined(function: Callable[..., Any]) -> str:
    """Return where a function begins that could not even be called."""
    code = getattr(function, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""


def printable(text: str) -> str:
    """`text` as a terminal may have it: its control characters as escapes, such as `\\x1b`."""
    return _ORDERS.sub(_escape, text.replace("\r\n", "\n")) if _ORDERS.search(text) else text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
