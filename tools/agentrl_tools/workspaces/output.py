"""`HeadTail`: the beginning and the end of a stream that may be endless."""


class HeadTail:
    """Keeps `most` bytes: one half of the beginning, one of the end. mark: bytes that end the stream where they are the
    last that came; they are left out."""

    def __init__(self, most: int, mark: bytes = b"") -> None:
        self._most, self._mark = most, mark
        self._first = most - most // 2
        self._head, self._tail, self._held = bytearray(), bytearray(), b""
        self._left_out = 0
        self.ended = False
        """Whether the mark has come."""

    def add(self, data: bytes) -> None:
        """Take what comes next."""
        data = self._held + data
        self.ended = bool(self._mark) and data.endswith(self._mark)
        split = max(0, len(data) - len(self._mark))
        self._held = data[split:]
        self._keep(data[:split])

    def _keep(self, data: bytes) -> None:
        room = max(0, self._first - len(self._head))
        self._head += data[:room]
        self._tail += data[room:]
        over = len(self._tail) - (self._most - self._first)
        if over > 0:
            del self._tail[:over]
            self._left_out += over

    @property
    def cut(self) -> bool:
        """Whether something was left out."""
        return self._left_out > 0

    def data(self) -> bytes:
        """What was kept, with a line where something is missing. The stream is at its end."""
        if not self.ended:
            self._keep(self._held)
        self._held = b""
        gap = f"\n... {self._left_out} bytes left out ...\n".encode() if self._left_out else b""
        return bytes(self._head) + gap + bytes(self._tail)
