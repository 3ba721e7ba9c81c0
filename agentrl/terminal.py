"""The one console of whatever is printed: no text can give it orders.

Tools, models, data and errors bring text that nobody has read. On a terminal an escape sequence moves the cursor,
rewrites what stands there or fills the clipboard; a carriage return covers a line; bidirectional marks turn it around.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from agentrl.errors import printable

PIPED_WIDTH = 160  # columns when the output goes to a file or a pipe


class Terminal(Console):
    """rich's console, which shows the control characters of texts (see `printable`); styles and cursor are rich's."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def terminal(stderr: bool = False) -> Terminal:
    """Made anew so that it follows a redirected stdout; wide enough to be read where it is no terminal. Numbers and
    paths are not coloured, `:smile:` stays what it is."""
    made = Terminal(stderr=stderr, highlight=False, emoji=False)
    return made if made.is_terminal else Terminal(stderr=stderr, highlight=False, emoji=False, width=PIPED_WIDTH)
