"""The console for all output, which keeps printed text from controlling the terminal.

Text from tools, models, data and errors is untrusted. In a terminal, an escape sequence can move the cursor, rewrite
the screen or set the clipboard; a carriage return can overwrite a line; bidirectional marks can reverse it.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from agentrl.errors import printable

PIPED_WIDTH = 160  # columns of output to a file or a pipe


class Terminal(Console):
    """A rich console that prints control characters as visible escapes (see `printable`)."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Return `text` as rich text, with control characters escaped."""
        return super().render_str(printable(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable`, with control characters escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def terminal(stderr: bool = False) -> Terminal:
    """Return a console on the current stdout (or stderr), PIPED_WIDTH columns wide if that is not a terminal.

    It does not colour numbers and paths, and leaves emoji codes as they are.
    """
    made = Terminal(stderr=stderr, highlight=False, emoji=False)
    return made if made.is_terminal else Terminal(stderr=stderr, highlight=False, emoji=False, width=PIPED_WIDTH)
