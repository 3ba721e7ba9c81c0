"""Errors that a person can act on. Each is one line: what was wrong, where, what to do."""

import difflib
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_LINE = 500  # characters of a foreign error's text
_LIBRARIES = (str(Path(__file__).parent), sysconfig.get_path("stdlib"))
_INSTALLED = ("site-packages", "dist-packages")

_ORDERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
"""What a terminal obeys or hides instead of showing it: control characters but tab and newline, marks of direction,
tags, halves of surrogate pairs."""


class UserError(Exception):
    """Bad input: a recipe, a data row, a plugin, a folder. The command line prints it as one line and exits with 2."""


class StoppedAgain(KeyboardInterrupt):
    """A person asked a second time that the run stop. Any other KeyboardInterrupt was raised by code."""


class PluginExitError(Exception):
    """A plugin raised what is no Exception; `__cause__` is what."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'calculator'?`, or the known names when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return f"; known: {', '.join(names)}" if names else ""


def ask(whose: str, function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)`, which is a stranger's code.

    Raises UserError for whatever it raises, an exit included: whose function, what it raised, and where. Only want of
    memory stays as it is, for that has remedies of its own.
    """
    try:
        return function(*arguments)
    except StoppedAgain:
        raise
    except BaseException as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        frames = traceback.extract_tb(error.__traceback__)[1:]
        told = f": {reason(error)}" if isinstance(error, UserError) else f" raised {reason(error)}"
        raise UserError(f"{whose}{told}{_at(_blamed(frames, 0)) if frames else _defined(function)}") from error


def reason(error: BaseException) -> str:
    """An exception as one line: its type and its message."""
    if isinstance(error, PluginExitError) and error.__cause__ is not None:
        error = error.__cause__
    try:
        text = " ".join(str(error).split())[:_LINE]
    except Exception:  # noqa: BLE001 - it is a stranger's, whose `__str__` may raise too
        text = "it has no message that can be read"
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def described(error: BaseException) -> str:
    """`reason`, and the line of code that it comes from: the last that belongs to no library, where there is one."""
    if isinstance(error, PluginExitError) and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    return reason(error) + (_at(_blamed(frames, -1)) if frames else "")


def _blamed(frames: Sequence[traceback.FrameSummary], otherwise: int) -> traceback.FrameSummary:
    theirs = [frame for frame in frames if not _in_library(frame.filename)]
    return theirs[-1] if theirs else frames[otherwise]


def _in_library(file: str) -> bool:
    return file.startswith(("<", *_LIBRARIES)) or any(part in _INSTALLED for part in Path(file).parts)


def _at(frame: traceback.FrameSummary) -> str:
    return f" ({Path(frame.filename).name}:{frame.lineno})"


def _defined(function: Callable[..., Any]) -> str:
    """Where a function begins that could not even be called."""
    code = getattr(function, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""


def printable(text: str) -> str:
    """`text` as a terminal may have it: its control characters as escapes, such as `\\x1b`."""
    return _ORDERS.sub(_escape, text.replace("\r\n", "\n")) if _ORDERS.search(text) else text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
