"""What the commands print with: one console, wide enough to be read when it is no terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 160  # columns when the output goes to a file or a pipe


def console() -> "Console":
    """The console on stdout, made anew so that it follows a redirected stdout."""
    from rich.console import Console

    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PIPED_WIDTH)


def first_line(text: str | None) -> str:
    """The first line of a description or docstring."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")


def shortened(text: str, length: int = 100) -> str:
    """One line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."
