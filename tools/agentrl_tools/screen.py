"""What programs print on a terminal, as text for a model: bounded, without control sequences."""

import os
import re
import tempfile
from collections.abc import Iterator
from types import TracebackType

KEPT = 64 << 20
"""Bytes kept of the beginning of one output."""
TAIL = 1 << 20
"""Bytes kept of the end of a longer one."""
PIECE = 1 << 20
"""Bytes of it that are in memory at once; the others are in a file of this machine."""

_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\|(?=[\n\x1b])|\Z)"  # OSC and other strings
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile("[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
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


class Output:
    """Bytes that a program printed, of which the middle is dropped where they are too many. A context manager: what is
    kept goes with it."""

    def __init__(self) -> None:
        self.total = 0
        """Bytes that were added."""
        self.last = b""
        """The last byte; empty where there is none."""
        self._file = tempfile.SpooledTemporaryFile(PIECE)  # noqa: SIM115 - closed by __exit__
        self._tail = bytearray()

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, data: bytes) -> None:
        """Add what was printed next."""
        room = max(0, KEPT - self.total)
        self._file.write(data[:room])
        self._tail += data[room:]
        if len(self._tail) > 2 * TAIL:
            del self._tail[:-TAIL]
        self.total += len(data)
        self.last = data[-1:] or self.last

    @property
    def dropped(self) -> int:
        """Bytes of the middle that are not kept."""
        return max(0, self.total - KEPT - min(len(self._tail), TAIL))

    def pieces(self) -> Iterator[bytes]:
        """Yield what is kept, some whole lines at a time, with a line in place of what was dropped. Nothing may be
        added meanwhile."""
        self._file.seek(0)
        while data := self._file.read(PIECE):
            end = data.rfind(b"\n") + 1 or len(data)
            self._file.seek(end - len(data), os.SEEK_CUR)
            yield data[:end]
        if self.dropped:
            yield b"\n[%d bytes are not kept]\n" % self.dropped
        if self._tail:
            yield bytes(self._tail[-TAIL:])
