"""The console of everything that is printed: no text can control the terminal.

Tools, models, data and errors bring text that nobody has read. In a terminal an escape sequence moves the cursor,
rewrites the screen or fills the clipboard; a carriage return covers a line; bidirectional marks reverse it.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from agentrl.errors import printable

PIPED_WIDTH = 160  # columns, in a file or a pipe


class Terminal(Console):
    """rich's console, but with the control characters of texts made visible (see `printable`)."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def terminal(stderr: bool = False) -> Terminal:
    """Return a console on the current stdout (or stderr), PIPED_WIDTH columns wide if that is not a terminal; without
    colours for numbers and paths, without emoji."""
    made = Terminal(stderr=stderr, highlight=False, emoji=False)
    return made if made.is_terminal else Terminal(stderr=stderr, highlight=False, emoji=False, width=PIPED_WIDTH)
