"""What programs print on a terminal, as text for a model: bounded, without control sequences."""

import re
from dataclasses import dataclass, field

KEPT = 1 << 20
"""Bytes kept of the beginning and of the end of one output."""

_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\|(?=[\n\x1b])|\Z)"  # OSC and other strings
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile("[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_BINARY = re.compile("\ufffd{4,}")
_ERASED = re.compile("[^\x08\n\r]\x08")


def clean_text(data: bytes) -> str:
    """What a terminal would show of `data`, roughly: without colours and control characters, carriage returns and
    backspaces applied within their line, runs of bytes that are no text put together."""
    text = _SEQUENCES.sub("", data.decode(errors="replace")).replace("\r\n", "\n")
    if "\x08" in text:
        while (shorter := _ERASED.sub("", text, count=10_000)) != text:
            text = shorter
    if "\r" in text:
        text = "\n".join(_overwritten(line) for line in text.split("\n"))
    return _BINARY.sub("\ufffd\ufffd\ufffd", _CONTROLS.sub("", text))


def _overwritten(line: str) -> str:
    """A line in which each carriage return has begun it anew, as progress bars do."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def cut_middle(text: str, most: int) -> tuple[str, str] | None:
    """The beginning and the end of a text that has more than `most` characters, cut at lines where there are any; None
    where it is short enough."""
    if len(text) <= most:
        return None
    head, tail = text[: most // 2], text[-(most - most // 2) :]
    head = head[: head.rfind("\n") + 1] or head
    return head, tail[tail.find("\n") + 1 :] or tail


@dataclass(slots=True)
class Output:
    """Bytes that a program printed, of which the middle is dropped where they are many."""

    total: int = 0
    """Bytes that were added."""
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        """Add what was printed next."""
        self.total += len(data)
        room = KEPT - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * KEPT:
            del self._tail[:-KEPT]

    @property
    def dropped(self) -> int:
        """Bytes of the middle that are not kept."""
        return max(0, self.total - len(self._head) - min(len(self._tail), KEPT))

    @property
    def last(self) -> bytes:
        """The last byte; empty where there is none."""
        return bytes((self._tail or self._head)[-1:])

    def data(self) -> bytes:
        """What is kept, with a line in place of what was dropped."""
        gap = b"\n[%d bytes are not kept]\n" % self.dropped if self.dropped else b""
        return bytes(self._head) + gap + bytes(self._tail[-KEPT:])
