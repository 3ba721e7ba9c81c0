"""`History`: recognise the old messages of a request by their bytes, so that none is parsed twice.

An agent sends its whole conversation with each call. Its body begins, byte for byte, like that of the call before, up
to the end of the messages that both hold. Only what follows is parsed.
"""

import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.gateway.call import Call, GatewayError
from agentrl.images import ImageError, hashes, stored
from agentrl.plugins.types import Json

KEPT = 8
"""Calls of a key whose bytes are kept: as many branches may grow side by side."""
_value = json.JSONDecoder().raw_decode
_SPACE = frozenset(" \n\r\t")


class Dialect(Protocol):
    """What reads a body: `history` is the key of its messages."""

    history: str

    def parse(self, body: Mapping[str, Json]) -> Call: ...


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
    """The latest calls of one key. images: whether its messages may hold images; then threads may share it."""

    def __init__(self, images: bool = False) -> None:
        self.images = images
        self._lock = threading.Lock()
        self._seen: deque[Seen] = deque(maxlen=KEPT)

    def parse(self, body: bytes, dialect: Dialect) -> Call:
        """Return the call of a body, with `earlier` where its messages go on from those of a call before. Raises
        GatewayError."""
        with self._lock:
            return self._parsed(body, dialect)

    def _parsed(self, body: bytes, dialect: Dialect) -> Call:
        kind = type(dialect)
        for place, seen in enumerate(self._seen):
            if seen.dialect is kind and body.startswith(seen.prefix):
                found = self._continued(body, seen, dialect)
                if found is not None:
                    del self._seen[place]
                    self._seen.appendleft(found)
                    return found.call
        given, head, end = _read(body, dialect.history)
        call = self.taken(dialect.parse(given))
        if head:
            self._seen.appendleft(Seen(body[:end], head, kind, call))
        return call

    def taken(self, call: Call) -> Call:
        """Return a call with its images in the store. Raises GatewayError: one of them is broken, or the model sees
        none."""
        if not hashes(call.messages):
            return call
        if not self.images:
            raise GatewayError("the messages hold images, but this model does not see: it reads text")
        try:
            return replace(call, messages=tuple(map(stored, call.messages)))
        except ImageError as error:
            raise GatewayError(str(error)) from None

    def _continued(self, body: bytes, seen: Seen, dialect: Dialect) -> Seen | None:
        """Return what a body is that begins with the messages of `seen`; None where that does not help."""
        rest = body[len(seen.prefix) :].lstrip()
        if not rest.startswith(b","):
            return None
        short = seen.prefix[: seen.head] + rest[1:]
        given, head, end = _read(short, dialect.history)
        if head != seen.head or given.get("previous_response_id"):
            return None
        new, old = self.taken(dialect.parse(given)), seen.call
        system = int(bool(new.messages) and new.messages[0]["role"] == "system")
        if new.messages[:system] != old.messages[:system] or new.tools != old.tools:
            return None
        call = replace(new, messages=(*old.messages, *new.messages[system:]), tools=old.tools, earlier=old)
        return Seen(body[: len(body) - len(short) + end], head, type(dialect), call)


def json_object(body: bytes) -> dict[str, Json]:
    """Return a body as an object. Raises GatewayError."""
    return _read(body, "")[0]


def _read(body: bytes, key: str) -> tuple[dict[str, Json], int, int]:
    """Return a body as an object, where the array of messages in it begins and where its last message ends, in bytes;
    0 where there is no such array at `key`. Raises GatewayError."""
    found: dict[str, Json] = {}
    head = end = 0
    try:
        text = body.decode("utf-8", "surrogatepass")
        at = _skipped(text, 0)
        if text[at : at + 1] != "{":
            json.loads(text)
            raise GatewayError("the body is not a JSON object")
        at = _skipped(text, at + 1)
        closed = text[at : at + 1] == "}"
        while not closed:
            if text[at : at + 1] != '"':
                raise ValueError("a key is no text")
            name, at = _value(text, at)
            start = _skipped(text, _after(text, at, ":"))
            found[name], at = _value(text, start)
            if name == key:
                head, end = _inside(text, start, at, found[name])
            at = _skipped(text, at)
            closed = text[at : at + 1] == "}"
            at = at if closed else _skipped(text, _after(text, at, ","))
        if _skipped(text, at + 1) != len(text):
            raise ValueError("more follows")
    except (ValueError, RecursionError):
        raise GatewayError("the body is not JSON") from None
    if len(text) != len(body) and head:
        head, end = len(text[:head].encode("utf-8", "surrogatepass")), len(text[:end].encode("utf-8", "surrogatepass"))
    return found, head, end


def _after(text: str, at: int, sign: str) -> int:
    at = _skipped(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign} is missing")
    return at + 1


def _inside(text: str, start: int, end: int, value: Json) -> tuple[int, int]:
    """Return where the objects of an array begin and end; 0 where it holds anything else at its end."""
    end = len(text[start : end - 1].rstrip()) + start
    return (start + 1, end) if isinstance(value, list) and text[end - 1] == "}" else (0, 0)


def _skipped(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is no white space."""
    while text[at : at + 1] in _SPACE:
        at += 1
    return at
