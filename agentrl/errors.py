"""Errors for users, each one line that says what was wrong, where, and what to do; handling of plugins' exceptions.

A plugin may raise anything, including SystemExit. `contained` turns it into an Exception, `call_plugin` into a
UserError, and `describe` into one line; exceptions raised by a real Ctrl-C or another signal pass through.
"""

import difflib
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, CoroutineType
from typing import Any, TypeVar

from agentrl.secrets import masked_text, without_known

T = TypeVar("T")

_LINE = 500  # maximum characters of an error that is not ours, with its type
_LISTED = 32  # names that a hint lists
_PLAIN_LINE = 2_000  # maximum characters of a PlainError
_LIBRARIES = (str(Path(__file__).parent), sysconfig.get_path("stdlib"))
_INSTALLED = ("site-packages", "dist-packages")

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
"""Characters that a terminal interprets or hides: control characters except tab and newline, direction marks, tags,
lone surrogates."""


class PlainError(Exception):
    """An error whose text is a complete line: `describe` adds neither its type nor its place in the code."""


class UserError(PlainError):
    """Bad input: a recipe, a data row, a plugin or a folder. The command line prints one line and exits with 2."""


class ArgumentError(Exception):
    """The model's arguments are wrong. The text goes back to the model, which may try again; it is counted."""


class InfrastructureError(PlainError):
    """A plugin cannot do its work for reasons that are not the model's: a server is down, a sandbox is lost. The
    request becomes FAILED, and is tried again; the model is told nothing."""


class WorkspaceError(InfrastructureError):
    """A workspace is gone, does not answer, or cannot be had: the machinery's fault."""


class EnvironmentLostError(InfrastructureError):
    """The environment of a rollout is gone, does not answer, or went wrong by itself, whichever hook or tool of it was
    called: the machinery's fault."""


class PathError(ArgumentError):
    """A path in a workspace that is not there, is of another kind, or may not be read or written: one line for the
    model."""


class StateChangedError(PlainError):
    """A plugin's code changed a setting of torch that the whole process has. It is set back."""


class PluginExitError(Exception):
    """A plugin raised a BaseException that is no Exception, such as SystemExit or a native panic: `__cause__`."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'calculator'?`; if no name is similar the known ones, of many the nearest."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    if close and difflib.get_close_matches(name, close, n=1, cutoff=0.8):  # a slip: what is far from it is not meant
        close = difflib.get_close_matches(name, close, n=2, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    if len(names) > _LISTED:
        return f"; the nearest of {len(names)}: {', '.join(difflib.get_close_matches(name, names, n=3, cutoff=0.0))}"
    return f"; known: {', '.join(names)}" if names else ""


def contained(error: BaseException) -> Exception:
    """An exception of a plugin's asynchronous code as an Exception.

    Raises `error` again if it does not come from the plugin: a cancellation, an exception from a signal handler, or
    GeneratorExit in a coroutine that is closed without a running task.
    """
    if isinstance(error, Exception):
        return error
    import asyncio  # imported here because it takes longer than the rest of this module

    closed = isinstance(error, GeneratorExit) and not _in_task()
    if closed or isinstance(error, asyncio.CancelledError) or from_signal(error):
        raise error
    failure = PluginExitError(describe(error, place=False))
    failure.__cause__ = error
    return failure


def call_plugin(owner: str, function: Callable[..., T], *arguments: object) -> T:
    """Call a plugin's synchronous function and return its result; a coroutine is closed, since nobody awaits it.
    owner: names the function in an error.

    Raises UserError for every exception of it, including SystemExit: whose function, what it raised, and where.
    Exceptions from signal handlers and out-of-memory errors, which are handled elsewhere, are raised unchanged.
    """
    settings = torch_settings()
    try:
        result = function(*arguments)
        check_settings(settings)
    except BaseException as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or from_signal(error):
            raise
        inside = error.__traceback__.tb_next if error.__traceback__ is not None else None
        joint = ": " if isinstance(error, PlainError) else " raised "
        place = _defined(function) if inside is None else ""
        raise UserError(f"{owner}{joint}{describe(error.with_traceback(inside))}{place}") from error
    if isinstance(result, CoroutineType):
        result.close()
    return result


def torch_settings() -> tuple[Any, bool, str] | None:
    """Torch's default type, whether gradients are computed, and its default device; None where torch is not in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    plain = torch._C._len_torch_function_stack() == 0  # a device that was set is one of these modes
    device = "cpu" if plain else str(torch.get_default_device())
    return torch.get_default_dtype(), torch.is_grad_enabled(), device


def check_settings(before: tuple[Any, bool, str] | None) -> None:
    """Set back what a plugin's code has changed of `torch_settings` since. Raises StateChangedError where it did."""
    now = torch_settings()
    if now is None or now == before:
        return
    import torch

    wanted = before or (torch.float32, True, "cpu")
    dtype, gradients, device = wanted
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(gradients)
    if now[2] != device:
        torch.set_default_device(None if device == "cpu" else device)
    if now != wanted:
        names = ("torch.set_default_dtype", "torch.set_grad_enabled", "torch.set_default_device")
        what = next(name for name, is_, was in zip(names, now, wanted, strict=True) if is_ != was)
        raise StateChangedError(f"it changed {what} for the whole process, and did not set it back")


def from_signal(error: BaseException) -> bool:
    """Whether a signal handler raised `error` to end the program, as a real Ctrl-C does."""
    if isinstance(error, Exception):
        return False
    if isinstance(error, BaseExceptionGroup):
        return any(from_signal(one) for one in error.exceptions)
    handlers = signal_handlers()
    if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
        return True
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # written in C: it leaves no frame
    return default and isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def signal_handlers() -> set[CodeType | None]:
    """The code of the handlers of this process's signals, by which their frames are known."""
    return {_code(signal.getsignal(number)) for number in signal.valid_signals()}


def _code(handler: object) -> CodeType | None:
    """The code that a handler runs, unwrapped from partials and methods."""
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
    """An exception as one line without secrets: its type, its text and the line of code that it comes from.

    For a PlainError, only the text. place: whether to name the line of code: the last one outside of libraries, else
    the first one outside of agentrl and Python. plain: False treats a PlainError as any other exception.
    """
    if isinstance(error, PluginExitError) and error.__cause__ is not None:
        error = error.__cause__
    text = masked_text(" ".join(without_known(message_of(error))[: 4 * _PLAIN_LINE].split()))
    if plain and isinstance(error, PlainError):
        return text[:_PLAIN_LINE]
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_LINE] + (_place(error) if place else "")


def message_of(error: BaseException) -> str:
    """`str(error)`, or a replacement if that raises."""
    try:
        return str(error)
    except BaseException as another:  # noqa: BLE001 - boundary: a plugin's class may do anything here
        contained(another)
        return f"its message cannot be read ({type(another).__name__})"


def is_own(file: str) -> bool:
    """Whether a file of code is neither a library's nor ours: a plugin's, mostly."""
    return not file.startswith(("<", *_LIBRARIES)) and not _installed(file)


def _place(error: BaseException) -> str:
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    outside = [line for line in lines if not line[0].startswith(("<", *_LIBRARIES)) or _installed(line[0])]
    own = [line for line in outside if not _installed(line[0])]
    found = own[-1:] or outside[:1] or lines[-1:]
    return "".join(f" ({Path(file).name}:{number})" for file, number in found)


def _installed(file: str) -> bool:
    return any(part in _INSTALLED for part in Path(file).parts)


def _defined(function: Callable[..., object]) -> str:
    """The place where a function is defined, for a call that failed before its first line."""
    code = getattr(function, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""


def printable(text: str) -> str:
    """`text` with its control characters as escapes, such as `\\x1b`, so that a terminal shows them."""
    return _CONTROLS.sub(_escape, text.replace("\r\n", "\n")) if _CONTROLS.search(text) else text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
