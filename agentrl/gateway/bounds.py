"""What a request may be, decided before any of it is parsed, and where long work on it is done.

The gateway shares the event loop of a run, in which all rollouts wait for what one of them does. So a body is bounded
by the model's context before it is read, by its values and their depth before it is parsed, and what a body of some
size costs is done in threads: strings are fast there, whatever their length, and the number of values is bounded since
one call of the JSON parser holds the interpreter.
"""

import asyncio
import zlib
from collections.abc import Callable
from typing import TypeVar

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from agentrl.containment.threads import DaemonThreads
from agentrl.gateway.call import Call, Endpoint, GatewayError

BODY_BYTES = 32 << 20
"""Largest request that is read, images included."""
CHARACTERS = 40
"""More characters than a token of any text stands for: a context of N tokens cannot hold N times as many."""
TEXT_BYTES = 8 << 20
"""The most characters of a conversation, however large the context is."""
SPARE_BYTES = 256 << 10
"""Bytes of a body besides what the context can hold: names, ids, what is ignored."""
SIGNS = 200_000
"""The most brackets, commas and colons of a body, outside of its strings."""
DEPTH = 64
"""The most arrays and objects of a body that lie within each other."""
MESSAGES = 4096
"""The most messages of a conversation."""
IN_LOOP = 16 << 10
"""Bytes or characters that are parsed or tokenized in the event loop; what is larger goes to a thread, which costs more
than it does for a few."""
READ_SECONDS = 120.0
"""Time in which a client must have sent a body."""
LARGE = 1 << 20
"""Bytes from which a body is large: few of a key are read at a time, while further ones wait in their connections."""
LARGE_AT_ONCE = 4
"""Large bodies of a key that are read, or parsed, at a time."""

T = TypeVar("T")
_threads = DaemonThreads("agentrl-gateway", 2)
_OPEN = frozenset(b"[{")
_NO_SIGN = bytes(set(range(256)) - set(b"[]{},:"))


async def off_loop(function: Callable[..., T], /, *args: object) -> T:
    """Call what parses or tokenizes much in a thread, of which there are few."""
    return await _threads.call(function, *args)


def most_characters(context: int) -> int:
    """The most characters that a conversation may have for a model of `context` tokens."""
    return min(CHARACTERS * context, TEXT_BYTES)


def characters(call: Call) -> int:
    """The characters of a call's messages and tools that a prompt may hold: images apart."""
    return characters_in((call.messages, call.tools, call.prompt or ""))


def characters_in(value: object) -> int:
    """The characters of the texts and keys of a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + characters_in(one) for key, one in value.items())
    return sum(map(characters_in, value)) if isinstance(value, list | tuple) else 1


class Reader:
    """Reads the bodies of one key's requests. images: whether they may hold some."""

    def __init__(self, endpoint: Endpoint, images: bool) -> None:
        self._endpoint = endpoint
        self._most = BODY_BYTES if images else most_characters(endpoint.context) + SPARE_BYTES
        self.large = asyncio.Semaphore(LARGE_AT_ONCE)
        """Of those that are large."""

    async def body(self, request: web.Request) -> bytes:
        """The body of a request. Raises GatewayError: it is too large, comes too slowly, or is not compressed as
        it says."""
        content = request.content
        if content.is_eof() and "Content-Encoding" not in request.headers:  # as nearly all of them come
            whole = content.read_nowait()
            self._check(len(whole))
            return whole
        self._check(request.content_length or 0)
        body = bytearray()
        try:
            async with asyncio.timeout(READ_SECONDS):
                while len(body) < LARGE and (part := await content.readany()):
                    body += part
                    self._check(len(body))
                if len(body) >= LARGE:
                    async with self.large:
                        while part := await content.readany():
                            body += part
                            self._check(len(body))
        except TimeoutError:
            raise GatewayError(f"the body did not come within {READ_SECONDS:g} s", 408, "request_timeout") from None
        except (OSError, web.RequestPayloadError, HttpProcessingError, ClientError):
            raise GatewayError("the body broke off") from None
        coding = request.headers.get("Content-Encoding", "identity").lower()
        if coding == "identity":
            return bytes(body)
        plain = await off_loop(_decompressed, bytes(body), coding, min(self._most, BODY_BYTES) + 1)
        self._check(len(plain))
        return plain

    def _check(self, size: int) -> None:
        if size > BODY_BYTES:
            raise GatewayError(f"the request is larger than {BODY_BYTES >> 20} MiB", 413, "request_too_large")
        if size > self._most:
            context = self._endpoint.context
            raise self._endpoint.too_long(f"a body of {size} bytes is longer than any conversation of {context} tokens")


def _decompressed(body: bytes, coding: str, most: int) -> bytes:
    """The first `most` bytes of what was compressed. Raises GatewayError."""
    if coding not in ("gzip", "deflate"):
        raise GatewayError(f"Content-Encoding: {coding[:40]!r} is not served; send the body as it is, or gzip", 415)
    try:
        stream = zlib.decompressobj(wbits=47 if coding == "gzip" else zlib.MAX_WBITS)
        plain = stream.decompress(body, most)
    except zlib.error:
        raise GatewayError(f"the body is not what Content-Encoding says: {coding}") from None
    if not stream.eof and len(plain) < most:
        raise GatewayError(f"the body ends within its {coding}")
    return plain


def check_shape(body: bytes, where: str = "the body") -> None:
    """Raise GatewayError for JSON of more than SIGNS signs, or deeper than DEPTH. What is no JSON may pass."""
    if len(body) <= SIGNS and body.count(b"{") + body.count(b"[") <= DEPTH:
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') <= 2 * SIGNS:
        signs = b"".join(body.split(b'"')[::2]).translate(None, _NO_SIGN)
        if len(signs) <= SIGNS:
            return _check_depth(signs, where)
    raise GatewayError(f"{where} holds more than {SIGNS} values, or brackets and commas")


def _check_depth(signs: bytes, where: str) -> None:
    depth = 0
    for sign in signs.translate(None, b",:"):
        depth += 1 if sign in _OPEN else -1
        if depth > DEPTH:
            raise GatewayError(f"{where} is nested deeper than {DEPTH} arrays and objects")
