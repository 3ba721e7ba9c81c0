"""The console for all output, which keeps printed text from controlling the terminal, and secrets out of it.

Text from tools, models, data and errors is untrusted. In a terminal, an escape sequence can move the cursor, rewrite
the screen or set the clipboard; a carriage return can overwrite a line; bidirectional marks can reverse it. What the
terminal's encoding lacks is replaced, so that no text can end a run.
"""

import codecs
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from agentrl.errors import printable
from agentrl.secrets import without_known

PIPED_WIDTH = 160  # columns of output to a file or a pipe


_REPLACED = {"→": "->", "…": "...", "·": "-", **dict(zip("▁▂▃▄▅▆▇█", "_.-:=+*#", strict=True))}
"""What stands for our own signs where an encoding lacks them. Other characters are printed as escapes."""


def _replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_REPLACED.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking), error.end


codecs.register_error("agentrl.terminal", _replace)


class Terminal(Console):
    """A rich console that prints control characters as visible escapes (see `printable`), known secrets masked, and
    characters that its encoding lacks as others or escapes."""

    def _shown(self, text: str) -> str:
        text = printable(text)
        return text if text.isascii() else text.encode(self.encoding, "agentrl.terminal").decode(self.encoding)

    def render_str(self, text: str, **how: Any) -> Text:
        """`text` as rich text, with control characters escaped."""
        return super().render_str(self._shown(without_known(text)), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable`, with control characters escaped."""
        if isinstance(renderable, Text) and (shown := without_known(renderable.plain)) != renderable.plain:
            renderable = Text(shown, style=renderable.style)  # before it is cut into lines
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=self._shown(segment.text))


def terminal(stderr: bool = False) -> Terminal:
    """A console on the current stdout (or stderr), PIPED_WIDTH columns wide if that is not a terminal.

    It stays there when a plugin redirects stdout for a while, as other requests of the run go on meanwhile. It does not
    colour numbers and paths, and leaves emoji codes as they are.
    """
    file = sys.stderr if stderr else sys.stdout
    made = Terminal(file=file, stderr=stderr, highlight=False, emoji=False)
    return made if made.is_terminal else Terminal(file=file, highlight=False, emoji=False, width=PIPED_WIDTH)
