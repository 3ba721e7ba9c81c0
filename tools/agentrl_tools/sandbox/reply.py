"""The bytes between the host and a sandbox's supervisor. What comes from there is not believed beyond its bounds."""

import struct
from collections.abc import Iterator

from agentrl_tools.sandbox.base import Execution, Limits, Stop

_PNG = b"\x89PNG\r\n\x1a\n"


class BrokenReplyError(Exception):
    """What the supervisor says is no reply."""


def request(code: str, seconds: float) -> bytes:
    """A call, as the supervisor reads it."""
    data = code.encode("utf-8", "surrogatepass")
    return struct.pack("<Id", len(data), seconds) + data


def longest_reply(limits: Limits) -> int:
    """Bytes that no reply exceeds."""
    return 16 * limits.output + 2 * limits.image_bytes + (1 << 20)


def read_reply(data: bytes, limits: Limits, lost_before: bool, seconds: float) -> tuple[Execution, bool]:
    """The execution, and whether the sandbox itself is spoilt. Raises BrokenReplyError."""
    texts: dict[bytes, str] = {}
    images: list[bytes] = []
    cut = False
    for tag, value in _fields(data):
        if tag == b"I":
            images.append(value)
        else:
            text = value.decode("utf-8", "replace")
            cut = cut or tag == b"C"
            texts[tag] = text
    try:
        stop = Stop(texts[b"S"]) if b"S" in texts else None
    except ValueError as error:
        raise BrokenReplyError(str(error)) from None
    shown = tuple(image for image in images if image.startswith(_PNG))
    if sum(map(len, shown)) > limits.image_bytes:
        shown, cut = (), True
    execution = Execution(
        stdout=_bounded(texts.get(b"o", ""), limits), stderr=_bounded(texts.get(b"e", ""), limits),
        value=_bounded(texts[b"V"], limits) if b"V" in texts else None,
        error=_bounded(texts[b"E"], limits) if b"E" in texts else None,
        images=shown, stop=stop, lost=b"L" in texts or b"X" in texts, lost_before=lost_before or b"B" in texts,
        cut=cut, seconds=seconds,
    )  # fmt: skip
    return execution, b"X" in texts


def _bounded(text: str, limits: Limits) -> str:
    most = 2 * limits.output  # the sandbox has cut it already, unless it has been tampered with
    return text if len(text) <= most else text[:most]


def _fields(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(data):
        if len(data) < at + 5:
            raise BrokenReplyError("a field without a head")
        tag, size = struct.unpack_from("<cI", data, at)
        if len(data) < at + 5 + size:
            raise BrokenReplyError("a field that is cut off")
        yield tag, data[at + 5 : at + 5 + size]
        at += 5 + size
