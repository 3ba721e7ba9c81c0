"""Gemma's own way of writing values: `{key:<|"|>text<|"|>,n:3,list:[true,null]}`."""

import re

from agentrl.chat.calls import MAX_DEPTH, finite
from agentrl.plugins.types import Json

_QUOTE = '<|"|>'
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "None": None}  # some templates write Python's


class _WrongError(Exception):
    """What is wrong. at: how far the text was read."""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why)
        self.at = at


def read_gemma_arguments(text: str) -> tuple[dict[str, Json], str | None]:
    """The arguments and None, or {} and what is wrong. Linear; never raises."""
    try:
        value, at = _value(text, 0, 0)
        if text[at:].strip():
            raise _WrongError(f"nothing may follow the closing brace, but {text[at : at + 20]!r} does", at)
    except _WrongError as error:
        return {}, str(error)
    return value, None


def gemma_end(text: str, at: int) -> tuple[int, int]:
    """Where the arguments that begin at `at` end, -1 where none do, and how many characters were read."""
    try:
        end = _value(text, at, 0)[1]
    except _WrongError as error:
        return -1, error.at - at
    return end, end - at


def _value(text: str, at: int, depth: int) -> tuple[Json, int]:
    if depth > MAX_DEPTH:
        raise _WrongError("it is nested too deeply", at)
    if text.startswith(_QUOTE, at):
        return _string(text, at)
    if text.startswith("{", at):
        return _pairs(text, at + 1, depth)
    if text.startswith("[", at):
        return _items(text, at + 1, depth)
    for word, value in _WORDS.items():
        if text.startswith(word, at):
            return value, at + len(word)
    if (number := _NUMBER.match(text, at)) and number.end() - at < 400:
        whole = number.group(1) is None and number.group(2) is None
        try:
            return (int if whole else finite)(number.group()), number.end()
        except ValueError as error:
            raise _WrongError(str(error), number.end()) from error
    raise _WrongError(f"no value at {text[at : at + 20]!r}; text stands between {_QUOTE}", at)


def _string(text: str, at: int) -> tuple[str, int]:
    start = at + len(_QUOTE)
    end = text.find(_QUOTE, start)
    if end < 0:
        raise _WrongError(f"a text is not closed by {_QUOTE}", len(text))
    return text[start:end], end + len(_QUOTE)


def _pairs(text: str, at: int, depth: int) -> tuple[dict[str, Json], int]:
    found: dict[str, Json] = {}
    if text.startswith("}", at):
        return found, at + 1
    while True:
        if text.startswith(_QUOTE, at):
            key, at = _string(text, at)
        else:
            end = text.find(":", at, at + 200)
            if end < 0:
                raise _WrongError(f"no key at {text[at : at + 20]!r}", at)
            key, at = text[at:end].strip(), end
        if not text.startswith(":", at):
            raise _WrongError(f"no ':' after the key {key[:40]!r}", at)
        if key in found:
            raise _WrongError(f"the key {key[:40]!r} stands twice", at)
        found[key], at = _value(text, at + 1, depth + 1)
        if text.startswith("}", at):
            return found, at + 1
        if not text.startswith(",", at):
            raise _WrongError(f"no ',' or '}}' at {text[at : at + 20]!r}", at)
        at += 1


def _items(text: str, at: int, depth: int) -> tuple[list[Json], int]:
    found: list[Json] = []
    if text.startswith("]", at):
        return found, at + 1
    while True:
        value, at = _value(text, at, depth + 1)
        found.append(value)
        if text.startswith("]", at):
            return found, at + 1
        if not text.startswith(",", at):
            raise _WrongError(f"no ',' or ']' at {text[at : at + 20]!r}", at)
        at += 1
