"""`StopWatch`: ends a turn at the token that completes a stop string, on any engine; what was sampled is kept."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl.chat.stream import certain
from agentrl.engine.base import Generation, GenerationFinish, OnTokens

UNFINISHED = "\ufffd"
"""What a decoder writes for a character of which bytes are missing."""


class StopWatch:
    """Reads one turn while it is sampled.

    stops: strings that end the turn, none of them empty. decode: makes text of ids. listener: is given the ids of which
    no text can be part of a stop string; None: nobody listens. end: called once, when one was completed.
    """

    def __init__(
        self,
        stops: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        listener: OnTokens | None,
        end: Callable[[], None],
    ) -> None:
        self._stops, self._decode, self._listener, self._end = tuple(stops), decode, listener, end
        self._text = ""
        self._known: list[int] = []  # the last ids of which the text is known
        self._new: list[int] = []  # ids behind them, whose last character is not whole
        self._held: list[tuple[int, int]] = []  # ids that were not passed on, and where the text of each ends
        self.seen = 0
        """Number of ids that were read."""
        self.stop: str | None = None
        """The string that ended the turn."""

    def add(self, ids: Sequence[int]) -> None:
        """Read ids that were sampled since the last call; what follows a stop string is ignored."""
        for one in ids:
            if self.stop is not None:
                return
            self.seen += 1
            self._read(one)
        if self.stop is None:
            self._pass_on()

    def cut(self, generation: Generation) -> Generation:
        """What was sampled up to the token that completed a stop string; all of it where none was."""
        self.add(generation.ids[self.seen :])
        if self.stop is None:
            return generation
        versions = generation.weight_version
        return replace(
            generation,
            ids=generation.ids[: self.seen],
            logprobs=generation.logprobs[: self.seen],
            weight_version=versions if isinstance(versions, int) else versions[: self.seen],
            allowed=None if generation.allowed is None else generation.allowed[: self.seen],
            finish=GenerationFinish.STOP,
        )

    def _read(self, one: int) -> None:
        before = len(self._text)
        self._new.append(one)
        text = self._decode([*self._known, *self._new])
        if not text.endswith(UNFINISHED):
            self._text += text[len(self._decode(self._known)) :]
            self._known, self._new = self._new, []
        self._held.append((one, len(self._text)))
        ends = [(end, -len(stop), stop) for stop in self._stops if (end := self._end_of(stop, before)) > 0]
        if ends:
            end, length, self.stop = min(ends)
            self._pass_on(end + length)
            self._end()

    def _end_of(self, stop: str, before: int) -> int:
        """Where a stop string ends that the text behind `before` completes; 0: it holds none."""
        at = self._text.find(stop, max(0, before - len(stop) + 1))
        return at + len(stop) if at >= 0 else 0

    def _pass_on(self, upto: int | None = None) -> None:
        """Tell the listener of the ids whose text ends at `upto` at the latest; None: before what may begin a stop."""
        if self._listener is None or not self._held:
            return
        if upto is None:
            longest = max(map(len, self._stops))
            tail = self._text[-longest:]
            upto = len(self._text) - len(tail) + certain(tail, self._stops)
        count = 0
        while count < len(self._held) - len(self._new) and self._held[count][1] <= upto:
            count += 1
        if count:
            self._listener([one for one, _ in self._held[:count]])
            del self._held[:count]


def shown(content: str, stop: str) -> str:
    """The part of a text before a stop string. content: of a turn that it ended, without white space around."""
    at = content.find(stop)
    if at < 0:  # white space at its edges was left out with that of the turn
        bare = stop.strip()
        at = len(content) - len(bare) if bare and content.endswith(bare) else -1
    return content if at < 0 else content[:at]
