"""What ends a program, raised by a plugin: it is that plugin's failure, as an Exception would be. Signals excepted.

asyncio hands SystemExit and KeyboardInterrupt of any task or callback to whoever runs the event loop, which ends the
run. So they are caught before they leave the task of a request; those of tasks and callbacks that a plugin starts
itself come to `PluginProofLoop`, which goes on.
"""

import asyncio
import logging
import signal
import threading
import traceback
from collections.abc import Awaitable, Generator
from types import CodeType
from typing import Any, TypeVar

from agentrl.errors import PluginExitError, StoppedAgain

T = TypeVar("T")
_LINE = 500  # characters of a foreign error's text
_log = logging.getLogger("agentrl.plugins")


def contained(error: BaseException) -> Exception:
    """What came out of a plugin's code, as an Exception. Raises it again where it is not the plugin's: a cancellation,
    what the handler of a signal raised, the end of a coroutine that nobody runs any more."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, asyncio.CancelledError | StoppedAgain) or by_signal(error) or (
        isinstance(error, GeneratorExit) and not _in_task()
    ):  # fmt: skip
        raise error
    failure = PluginExitError(said(error))
    failure.__cause__ = error
    return failure


def by_signal(error: BaseException) -> bool:
    """Whether the handler of a signal raised it, which its traceback shows."""
    if isinstance(error, BaseExceptionGroup):
        return any(by_signal(one) for one in error.exceptions)
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
        return True
    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # written in C: it leaves no frame
    return plain and isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def said(error: BaseException) -> str:
    """Its type and its text, on one line; whatever its `__str__` does."""
    if isinstance(error, PluginExitError) and error.__cause__ is not None:
        error = error.__cause__
    return one_line(f"{type(error).__name__}: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """`str(error)`, also where that raises."""
    try:
        return str(error)
    except BaseException as another:  # noqa: BLE001 - boundary: a plugin's class may do anything here
        contained(another)
        return f"<its text cannot be had: {type(another).__name__}>"


def one_line(text: str, most: int = _LINE) -> str:
    """`text` without its line breaks, cut short."""
    return " ".join(text[: 4 * most].split())[:most]


class PluginProofLoop(asyncio.SelectorEventLoop):
    """An event loop that goes on when a task or a callback raises SystemExit or KeyboardInterrupt, unless it is the
    work that it runs, or a signal's handler, that raised it. Whoever awaits such a task is told as ever."""

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        work: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        while True:
            try:
                return super().run_until_complete(work)
            except (SystemExit, KeyboardInterrupt) as error:
                if by_signal(error):
                    raise
                if work.done():
                    return work.result()
                _log.warning("a task or a callback that a plugin started raised %s; the run goes on", said(error))


def _code(handler: Any) -> CodeType | None:
    """What a handler runs, out of partials and methods."""
    while hasattr(handler, "func"):
        handler = handler.func
    return getattr(getattr(handler, "__func__", handler), "__code__", None)


def _in_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop runs
        return False
