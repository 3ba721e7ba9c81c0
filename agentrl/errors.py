"""Errors that a person can act on. Each is one line: what was wrong, where, what to do."""

import difflib
import re
from collections.abc import Iterable

_ORDERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
"""What a terminal obeys or hides instead of showing it: control characters but tab and newline, marks of direction,
tags, halves of surrogate pairs."""


class UserError(Exception):
    """Bad input: a recipe, a data row, a plugin, a folder. The command line prints it as one line and exits with 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'calculator'?`, or the known names when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return f"; known: {', '.join(names)}" if names else ""


def printable(text: str) -> str:
    """`text` as a terminal may have it: its control characters as escapes, such as `\\x1b`."""
    return _ORDERS.sub(_escape, text.replace("\r\n", "\n")) if _ORDERS.search(text) else text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
