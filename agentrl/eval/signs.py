"""Signs of a sample by which unsolved ones are told apart: what went wrong with its calls, how it ended, which numbers
it copied wrongly, where its most unlikely token stands. `why.py` counts them.

A sign is a kind and a value, such as ("miscopied", "number in a call of calculator"); a sample has a note for each of
its signs, which says what exactly was found.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from agentrl.plugins.types import Json

Sign = tuple[str, str]
"""A kind of sign, and which of its kind."""

UNSURE = 0.5
"""Probability below which a sample's most unlikely token counts as a place where the model was not sure."""
_CANDIDATES = 64  # of what was read last, with which a miscopied number or word is compared
_LENGTH = 32  # characters of a number or word that are looked at; longer ones are left out
_FOUND = 20  # miscopied numbers and words that are looked at in one text
_NOTE = 100  # characters of a note's quotation
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_WORD = re.compile(r"[^\W\d_][\w./-]{3,}")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\d+(?:\.\d+)?")


class Said(NamedTuple):
    """A message, as far as signs are read from it."""

    sampled: bool
    """Whether it is the model's own."""
    text: str
    """Its text; images and the like have none."""
    calls: list[tuple[str, list[str]]]
    """Name and arguments of each call; of arguments that are nested, every value as text."""
    reasoning: str
    """The text of its reasoning."""


def said(message: Mapping[str, Json]) -> Said:
    """A message in the format of the OpenAI API, as stored: anything may be missing, or of another type."""
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
    return Said(
        message.get("role") == "assistant",
        _text(message.get("content")),
        _calls(calls) if isinstance(calls, list) else [],
        _text(reasoning) if reasoning else "",
    )


def _text(content: Json) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def _calls(calls: list[Json]) -> list[tuple[str, list[str]]]:
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            found.append((str(function.get("name") or ""), list(_leaves(function.get("arguments")))))
    return found


def _leaves(value: Json) -> Iterator[str]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += reversed(list(one.values()))
        elif isinstance(one, list):
            waiting += reversed(one)
        elif isinstance(one, str):
            yield one
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield str(one)


# What was changed


def changed(extra: Json) -> Iterator[tuple[Sign, str]]:
    """Yield a sign for each path that the sample changed in its workspace, or for having changed none. extra: of the
    trajectory."""
    kept = extra.get("workspace") if isinstance(extra, Mapping) else None
    if not isinstance(kept, Mapping):
        return
    changes = kept.get("changes") or ()
    if not changes:
        yield ("files", "none changed"), ""
    for kind, path, size in changes:
        yield ("files", f"{kind} {path}"), f"{size} bytes" if size else ""


# What was copied


def miscopied(messages: Sequence[Said], tools: Sequence[str]) -> Iterator[tuple[Sign, str]]:
    """Yield a sign for each number or word of a call, and for the last number of the answer, that stands nowhere in
    what the model had read until then. It is `miscopied` where it nearly equals something that was read, and, if a
    number, `made up` otherwise: what the model computed by itself is among these."""
    numbers, words = _Read(_numbers), _Read(_words)
    last = max((index for index, message in enumerate(messages) if message.sampled), default=-1)
    for index, message in enumerate(messages):
        if not message.sampled:
            numbers.waiting.append(message.text)
            words.waiting.append(message.text)
        for name, arguments in message.calls if message.sampled else ():
            for text in arguments:
                for what, found, read in (("number", _numbers(text), numbers), ("word", _words(text), words)):
                    if found:
                        yield from _wrong(what, found, read, f"a call of {known(name, tools)}", text)
        if index == last and not message.calls:
            yield from _wrong("number", _numbers(message.text)[-1:], numbers, "the answer", message.text)


class _Read:
    """What has been read: numbers or words, the latest last. of: finds them in a text."""

    def __init__(self, of: Callable[[str], list[str]]) -> None:
        self._of = of
        self._all: dict[str, None] = {}
        self.waiting: list[str] = []
        """Texts that were read and not looked at yet."""

    def lacks(self, found: Sequence[str]) -> list[str]:
        """Those that have not been read."""
        for text in self.waiting:
            for one in self._of(text):
                self._all.pop(one, None)
                self._all[one] = None
        self.waiting.clear()
        return [one for one in found if one not in self._all]

    def nearest(self, one: str, share: float) -> str | None:
        """What was read and differs from `one` in at most this share of its characters, the nearest."""
        found = [(_distance(one, other), other) for other in list(self._all)[: -_CANDIDATES - 1 : -1]
                 if abs(len(one) - len(other)) <= share * max(len(one), len(other))]  # fmt: skip
        distance, other = min(found, key=lambda pair: pair[0], default=(len(one), ""))
        return other if distance <= share * max(len(one), len(other)) else None


def _wrong(what: str, found: Sequence[str], read: _Read, place: str, text: str) -> Iterator[tuple[Sign, str]]:
    for one in read.lacks(found)[:_FOUND]:
        near = read.nearest(one, 0.5 if what == "number" else 0.25)
        told = f"{one} in {_quoted(text)}"
        if near is not None:
            yield ("miscopied", f"{what} in {place}"), f"{near} -> {told}"
            yield ("miscopied", f"{what} anywhere"), f"{near} -> {told}"
        elif what == "number":
            yield ("made up", f"{what} in {place}"), told


def _numbers(text: str) -> list[str]:
    found = [number for number in _NUMBER.findall(text) if len(number) <= _LENGTH]
    return [number if number.isdigit() and number[0] != "0" else _plain(number) for number in found]


def _plain(number: str) -> str:
    whole, _, rest = number.replace(",", "").partition(".")
    rest = rest.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{rest}" if rest else "")


def _words(text: str) -> list[str]:
    return [word.rstrip("./-") for word in _WORD.findall(text) if len(word) <= _LENGTH]


@lru_cache(100_000)
def _distance(a: str, b: str) -> int:
    """The Levenshtein distance of two short texts."""
    before = list(range(len(b) + 1))
    for i, one in enumerate(a, 1):
        now = [i]
        for j, other in enumerate(b, 1):
            now.append(min(before[j] + 1, now[-1] + 1, before[j - 1] + (one != other)))
        before = now
    return before[-1]


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line if len(line) <= _NOTE else line[: _NOTE - 1] + "…"}"'


# How calls and the sample ended


def known(name: str, tools: Sequence[str]) -> str:
    """The name of a tool that the task offered; else what it is."""
    return name if name in tools else "an unknown tool"


def ended(row: Mapping[str, Json]) -> Iterator[tuple[Sign, str]]:
    """Yield the signs of a sample's finish reason and of its tool calls. row: with the columns `finish`, `tools` and
    `tool_uses`."""
    yield ("finish", str(row["finish"])), ""
    uses = row["tool_uses"] or ()
    if not uses and row["tools"]:
        yield ("calls", "no tool was called"), ""
    for use in uses:
        if use["error"] is not None:
            line = " ".join(str(use["error"]).split())
            what = _QUOTED.sub("…", line[:1000])[:80]
            yield ("tool error", f"{known(str(use['name']), row['tools'] or ())}: {what}"), line[:_NOTE]
        if use["cut"]:
            yield ("calls", f"the answer of {known(str(use['name']), row['tools'] or ())} was shortened"), ""


def repeated(messages: Sequence[Said]) -> Iterator[tuple[Sign, str]]:
    """Yield a sign where the model made a call that it had made before."""
    seen = set()
    for message in messages:
        for name, arguments in message.calls if message.sampled else ():
            call = (name, *arguments)
            if call in seen:
                yield ("calls", "the same call again"), f"{name}({_quoted(', '.join(arguments))})"
            seen.add(call)


# Where the model was not sure


def unsure(pieces: Sequence[str], at: int, message: Said, *, last: bool, tools: Sequence[str]) -> Sign:
    """The sign of a token by the place where it stands in its turn.

    pieces: the text of each of the turn's tokens. at: index of the token. message: the turn as it was read. last:
    whether it is the sample's last turn.
    """
    own, whole, low = _bare(pieces[at]), _bare("".join(pieces)), len(_bare("".join(pieces[:at])))
    number = "a number in " if any(letter.isdigit() for letter in own) else ""
    text = "a text before a call" if message.calls else "the answer" if last else "a turn without a call"
    places = [(f"the arguments of {known(name, tools)}", one) for name, those in message.calls for one in those]
    for place, one in (*places, ("reasoning", message.reasoning), (text, message.text)):
        if _covers(whole, one, low, own):
            return "unsure", f"{number}{place}"
    if low >= len(whole) or not own:
        return "unsure", "the end of a turn"
    return "unsure", "how a call is written" if message.calls else text


def _bare(text: str) -> str:
    """A text without white space, which tokens keep or lose as their tokenizer likes."""
    return "".join(text.split())


def _covers(whole: str, text: str, low: int, own: str) -> bool:
    """Whether a text, or JSON's form of it, stands in `whole` where the token `own` at `low` is part of it."""
    for part in dict.fromkeys((_bare(text), _bare(json.dumps(text, ensure_ascii=False)[1:-1]))):
        start = whole.find(part, max(0, low - len(part) + 1))
        if part and own and 0 <= start < low + len(own):
            return True
    return False
