"""`History`: recognise the old messages of a request by their bytes, so that none is parsed twice.

An agent sends its whole conversation with each call. Its body begins, byte for byte, like that of the call before, up
to the end of the messages that both hold. Only what follows is parsed.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentrl.gateway.call import Call, GatewayError

KEPT = 8
"""Calls of a key whose bytes are kept: as many branches may grow side by side."""
_decoder = json.JSONDecoder()


class Dialect(Protocol):
    """What reads a body: `history` is the key of its messages."""

    history: str

    def parse(self, body: Mapping[str, Any]) -> Call: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """A call, and its body up to the end of its last message."""

    prefix: bytes
    """The body up to there."""
    head: int
    """Bytes up to the first message."""
    dialect: type
    """What read it."""
    call: Call
    """What it was."""


class History:
    """The latest calls of one key."""

    def __init__(self) -> None:
        self._seen: deque[Seen] = deque(maxlen=KEPT)

    def parse(self, body: bytes, dialect: Dialect) -> Call:
        """Return the call of a body, with `earlier` where its messages go on from those of a call before. Raises
        GatewayError."""
        for seen in self._seen:
            if seen.dialect is type(dialect) and body.startswith(seen.prefix):
                found = self._continued(body, seen, dialect)
                if found is not None:
                    self._seen.remove(seen)
                    self._seen.appendleft(found)
                    return found.call
        call = dialect.parse(json_object(body))
        if (placed := _place(body, dialect.history)) is not None:
            self._seen.appendleft(Seen(body[: placed[1]], placed[0], type(dialect), call))
        return call

    def _continued(self, body: bytes, seen: Seen, dialect: Dialect) -> Seen | None:
        """Return what a body is that begins with the messages of `seen`; None where that does not help."""
        rest = body[len(seen.prefix) :].lstrip()
        if not rest.startswith(b","):
            return None
        short = seen.prefix[: seen.head] + rest[1:]
        placed = _place(short, dialect.history)
        if placed is None or placed[0] != seen.head:
            return None
        given = json_object(short)
        if given.get("previous_response_id"):
            return None
        new, old = dialect.parse(given), seen.call
        system = int(bool(new.messages) and new.messages[0]["role"] == "system")
        if new.messages[:system] != old.messages[:system] or new.tools != old.tools:
            return None
        call = replace(new, messages=(*old.messages, *new.messages[system:]), tools=old.tools, earlier=old)
        end = len(body) - len(short) + placed[1]
        return Seen(body[:end], seen.head, type(dialect), call)


def json_object(body: bytes) -> dict[str, Any]:
    """Return a body as an object. Raises GatewayError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise GatewayError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise GatewayError("the body is not a JSON object")
    return found


def _place(body: bytes, key: str) -> tuple[int, int] | None:
    """Return where the array of messages begins and where its last message ends; None where there is none."""
    text = body.decode("latin-1")  # a character a byte: only where values end is asked
    at = _skipped(text, 0) + 1
    try:
        while True:
            name, at = _decoder.raw_decode(text, _skipped(text, at))
            start = _skipped(text, _skipped(text, at) + 1)
            value, at = _decoder.raw_decode(text, start)
            if name == key:
                end = len(text[: at - 1].rstrip())
                return (start + 1, end) if isinstance(value, list) and text[end - 1] == "}" else None
            at = _skipped(text, at) + 1
    except (ValueError, RecursionError):
        return None


def _skipped(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is no white space."""
    while text[at : at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    return at
