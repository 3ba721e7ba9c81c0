"""Regular expressions that others wrote (a tool's schema, a recipe), on what a model wrote, in bounded time.

Python's own engine may backtrack for hours, and nothing can stop it; this one stops by a clock of CPU time.
"""

import threading
import time

import regex

SECONDS = 0.2
"""What one search, or one check of a call's arguments, may take of CPU time: the event loop stands still meanwhile."""

_LONGEST = 4096  # characters of a pattern: compiling takes time too
_effort = threading.local()


class TooHardError(Exception):
    """The time is spent."""


class Pattern:
    """As `re` reads it, and `\\p{...}` too. Raises ValueError for what is no regular expression."""

    def __init__(self, pattern: str, *, ignore_case: bool = False, dot_all: bool = False) -> None:
        if not isinstance(pattern, str) or len(pattern) > _LONGEST:
            raise ValueError(f"pattern {pattern!r:.60} is not a regular expression of up to {_LONGEST} characters")
        flags = regex.VERSION0 | (regex.IGNORECASE if ignore_case else 0) | (regex.DOTALL if dot_all else 0)
        try:
            self._pattern = regex.compile(pattern, flags)
        except (regex.error, RecursionError, OverflowError, MemoryError) as error:
            raise ValueError(f"pattern {pattern!r:.60} is not a regular expression: {error}") from error
        self.groups: int = self._pattern.groups

    def found(self, text: str) -> bool:
        """Whether it occurs in a text. Raises TooHardError."""
        try:
            return self._pattern.search(text, timeout=left()) is not None
        except (TimeoutError, MemoryError):
            raise TooHardError from None

    def last(self, text: str) -> str | None:
        """The first group (without groups: all) of the last match. Raises TooHardError."""
        match = None
        try:
            for match in self._pattern.finditer(text, timeout=SECONDS):  # noqa: B007 - the last one is wanted
                pass
        except (TimeoutError, MemoryError):
            raise TooHardError from None
        return None if match is None else match[1 if self.groups else 0]


def begin(seconds: float = SECONDS) -> None:
    """Let all that this thread does with `found` and `left` share these seconds, until `end`."""
    _effort.until = time.thread_time() + seconds


def end() -> None:
    """End what `begin` began."""
    _effort.until = None


def left() -> float:
    """Seconds that are left. Raises TooHardError when none are."""
    until = getattr(_effort, "until", None)
    rest: float = SECONDS if until is None else until - time.thread_time()
    if rest <= 0:
        raise TooHardError
    return rest
