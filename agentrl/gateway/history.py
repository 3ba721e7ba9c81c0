"""`History`: recognise the old messages of a request by their bytes, so that none is parsed twice.

An agent sends its whole conversation with each call. Its body begins, byte for byte, like that of the call before, up
to the end of the messages that both hold. Only what follows is parsed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentrl.gateway.bounds import check_shape
from agentrl.gateway.call import Call, GatewayError
from agentrl.images import ImageError, hashes, stored
from agentrl.plugins.types import Json

KEPT = 8
"""Calls of a key that are kept: as many branches may grow side by side."""
KEPT_BYTES = 8 << 20
"""Bytes of the bodies of these, together; the latest is kept in any case."""


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_value = json.JSONDecoder(parse_constant=_no_json).raw_decode
_SPACE = frozenset(" \n\r\t")


class Dialect(Protocol):
    """What reads a body."""

    history: str
    """The key of its messages."""
    instructions: str
    """The key of a system message that comes before them; empty: the messages hold it."""

    def parse(self, body: Mapping[str, Json]) -> Call: ...


@dataclass(slots=True)
class Seen:
    """A call, and its body up to the end of its last message, of which a digest is kept."""

    length: int
    """Bytes up to there."""
    digest: bytes
    """Of these bytes, once it is kept."""
    head: int
    """Bytes up to the first message."""
    dialect: type
    """What read it."""
    call: Call
    """What it was."""


@dataclass(slots=True)
class Found:
    """A body, and what is known of it."""

    body: bytes
    """As it came."""
    digest: bytes
    """Of all of it."""
    seen: tuple[Seen, ...]
    """Earlier calls with whose bytes it begins, the longest first."""
    begun: Any
    """The hash of the bytes of the longest of them."""

    @property
    def fresh(self) -> int:
        """Bytes that no earlier call held."""
        return len(self.body) - (self.seen[0].length if self.seen else 0)


class History:
    """The latest calls of one key. images: whether its messages may hold images. Threads may share it."""

    def __init__(self, images: bool = False) -> None:
        self.images = images
        self._seen: tuple[Seen, ...] = ()

    def find(self, body: bytes, dialect: Dialect) -> Found:
        """What is known of a body, which is read once."""
        state, at, found = hashlib.blake2b(digest_size=16), 0, list[Seen]()
        view, begun = memoryview(body), state.copy()
        for seen in sorted(self._seen, key=lambda one: one.length):
            if seen.dialect is type(dialect) and seen.length <= len(body):
                state.update(view[at : seen.length])
                at = seen.length
                if state.digest() == seen.digest:
                    found.insert(0, seen)
                    begun = state.copy()
        state.update(view[at:])
        return Found(body, state.digest(), tuple(found), begun)

    def parse(self, found: Found, dialect: Dialect) -> Seen:
        """The call of a body, with `earlier` where its messages go on from those of a call before. Raises
        GatewayError."""
        for seen in found.seen:
            if (longer := self._continued(found.body, seen, dialect)) is not None:
                return longer
        given, head, end = _read(found.body, dialect.history)
        call, size = self.taken(dialect.parse(given)), len(found.body)
        call = replace(call, fresh=size, size=size + call.named)
        return Seen(end, b"", head, type(dialect), call)

    def keep(self, found: Found, read: Seen) -> None:
        """Keep what `parse` returned, in place of the call that it goes on from."""
        if not read.head:
            return
        begun = found.begun.copy()
        begun.update(memoryview(found.body)[found.seen[0].length if found.seen else 0 : read.length])
        read.digest = begun.digest()
        kept, size = [read], read.length
        for seen in self._seen:
            if seen.call is not read.call.earlier and seen.digest != read.digest:
                size += seen.length
                if size <= KEPT_BYTES and len(kept) < KEPT:
                    kept.append(seen)
        self._seen = tuple(kept)

    def taken(self, call: Call) -> Call:
        """A call with its images in the store. Raises GatewayError: one of them is broken, or the model sees
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
        """What a body is that begins with the messages of `seen`; None where that does not help."""
        rest = body[seen.length :].lstrip()
        if not rest.startswith(b","):
            return None
        short = body[: seen.head] + rest[1:]
        given, head, end = _read(short, dialect.history)
        if head != seen.head or given.get("previous_response_id"):
            return None
        new, old = self.taken(dialect.parse(given)), seen.call
        system = int(bool(given.get(dialect.instructions)))
        if new.messages[:system] != old.messages[:system] or new.tools != old.tools:
            return None
        messages = (*old.messages, *new.messages[system:])
        named, fresh = old.named + new.named, len(short)
        call = replace(
            new, messages=messages, tools=old.tools, earlier=old, fresh=fresh, named=named, size=len(body) + named
        )
        return Seen(len(body) - len(short) + end, b"", head, type(dialect), call)


def json_object(body: bytes) -> dict[str, Json]:
    """A body as an object. Raises GatewayError."""
    return _read(body, "")[0]


def _read(body: bytes, key: str) -> tuple[dict[str, Json], int, int]:
    """A body as an object, where the array of messages in it begins and where its last message ends, in bytes;
    0 where there is no such array at `key`. Raises GatewayError."""
    check_shape(body)
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
    """Where the objects of an array begin and end; 0 where it holds anything else at its end."""
    end = len(text[start : end - 1].rstrip()) + start
    return (start + 1, end) if isinstance(value, list) and text[end - 1] == "}" else (0, 0)


def _skipped(text: str, at: int) -> int:
    """The index of the first character from `at` on that is no white space."""
    while text[at : at + 1] in _SPACE:
        at += 1
    return at
