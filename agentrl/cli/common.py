"""What the commands print with."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.terminal import Terminal


def console() -> "Terminal":
    """The terminal on stdout; rich is imported when it is asked for."""
    from agentrl.terminal import terminal

    return terminal()


def first_line(text: str | None) -> str:
    """The first line of a description or docstring."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")


def shortened(text: str, length: int = 100) -> str:
    """One line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."
