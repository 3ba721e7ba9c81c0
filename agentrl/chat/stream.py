"""`TurnStream`: what is certain of an assistant turn while it is sampled, whatever follows.

What it returns is, joined, the beginning of what `Chat.parse` makes of the whole turn. Text that may begin a call, a
thought or the end of a thought is held back until that is decided; from the first call on everything is.
"""

from collections.abc import Callable, Sequence

from agentrl.chat.base import Said
from agentrl.chat.encode import PartialText
from agentrl.chat.formats import BARE, CHANNELS, MESSAGE, MESSAGE_ENDS, MUSE, START, Format, recipient

_PYTHON_TAG = "<|python_tag|>"
_NAME_WITHIN = 400  # characters in which a bare call names itself, as `formats` reads it


class TurnStream:
    """One turn. text: of its ids. formats: in which calls may be written; of several, the text decides. thinking: of
    each kind of thought what opens and what closes it, and whether the prompt has opened it. stops: ids that end it."""

    def __init__(
        self,
        text: PartialText,
        formats: Sequence[Format],
        thinking: Sequence[tuple[str, str, bool]],
        stops: frozenset[int],
    ) -> None:
        self._decoded, self._thinking, self._stops = text, thinking, stops
        self._formats = formats
        self._marks = tuple({mark for form in formats for mark in (form.marker, *form.dropped) if len(mark) > 1})
        self._stop: list[int] = []  # the last id, where it may be what ends the turn
        self._text = ""  # what is not decided
        self._closing = ""  # what ends the thought
        self._thoughts = 0  # pieces of thinking so far
        self._said: list[Said] = []
        self._content, self._reasoning = _Trimmed(), _Trimmed()
        self._step: Callable[[], bool] | None = self._begin

    def add(self, ids: Sequence[int]) -> list[Said]:
        """What is certain now and was not before. ids: sampled since the last call."""
        if self._step is None or not ids:
            return []
        ids = [*self._stop, *ids]
        self._stop = ids[-1:] if ids[-1] in self._stops else []
        self._text += self._decoded.add(ids[: len(ids) - len(self._stop)])
        while self._step is not None and self._step():
            pass
        said, self._said = self._said, []
        return said

    def _say(self, kind: str, text: str) -> None:
        if text:
            self._said.append(Said(kind, text))

    def _say_content(self, text: str) -> None:
        self._say("content", self._content.add(text))

    def _hold(self) -> bool:
        """Say nothing any more: the rest is decided at the end of the turn."""
        self._step, self._text = None, ""
        return False

    def _begin(self) -> bool:
        """Find out whether the turn begins with a thought."""
        lead = self._text.lstrip()
        for opening, closing, begun in self._thinking:
            undecided = len(lead) < len(opening) and opening.startswith(lead)
            if undecided:
                return False
            if begun or lead.startswith(opening):
                self._text, self._closing, self._step = lead.removeprefix(opening), closing, self._thought
                return True
        self._step = self._choose()
        return True

    def _thought(self) -> bool:
        end, call = self._text.find(self._closing), _first(self._text, self._marks)
        if call >= 0 and (end < 0 or call < end):  # whether the thought ends there, the text after it says
            self._say("reasoning", self._reasoning.add(self._text[:call]))
            return self._hold()
        ready = end if end >= 0 else certain(self._text, (self._closing, *self._marks))
        self._say("reasoning", self._reasoning.add(self._text[:ready]))
        if end < 0:
            self._text = self._text[ready:]
            return False
        self._text = self._text[end + len(self._closing) :]
        self._thoughts = int(self._reasoning.began)
        self._step = self._choose()
        return True

    def _choose(self) -> Callable[[], bool]:
        """How to read what follows the thought."""
        names = {form.name for form in self._formats}
        if names == {BARE}:
            return self._bare
        if CHANNELS not in names:
            return self._tagged
        return self._channels if len(names) == 1 else self._hold

    def _tagged(self) -> bool:
        call = _first(self._text, self._marks)
        ready = call if call >= 0 else certain(self._text, self._marks)
        self._say_content(self._text[:ready])
        self._text = self._text[ready:]
        return self._hold() if call >= 0 else False

    def _bare(self) -> bool:
        lead = self._text.lstrip()
        if len(lead) <= len(_PYTHON_TAG) and _PYTHON_TAG.startswith(lead):
            return False
        body = lead.removeprefix(_PYTHON_TAG).lstrip()
        if not body:
            return False
        if body[0] != "{":
            self._step = self._free
        elif lead.startswith(_PYTHON_TAG) or '"name"' in body[:_NAME_WITHIN]:
            return self._hold()
        elif len(body) < _NAME_WITHIN:
            return False
        self._step = self._free
        return True

    def _free(self) -> bool:
        self._say_content(self._text)
        self._text = ""
        return False

    def _channels(self) -> bool:
        """Wait for the first message: without any, all of the turn is content."""
        if MESSAGE not in self._text:
            return False
        self._step = self._header
        return True

    def _header(self) -> bool:
        text = self._text
        if len(text) < len(START) and START.startswith(text):
            return False
        start = len(START) if text.startswith(START) else 0
        following, mark = text.find(START, start), text.find(MESSAGE, start)
        if following >= 0 and (mark < 0 or following < mark):
            self._say_content(text[start:following])
            self._text = text[following:]
            return True
        if mark < 0:
            return False
        to, thought = recipient(text[start:mark])
        self._text = text[mark + len(MESSAGE) :]
        if thought:
            self._say("reasoning", "\n" if self._thoughts else "")
            self._thoughts += 1
            self._step = self._thought_message
        elif to in ("", "user"):
            self._step = self._message_kind
        else:
            return self._hold()
        return True

    def _thought_message(self) -> bool:
        return self._message(lambda text: self._say("reasoning", text), ())

    def _message_kind(self) -> bool:
        """Find out whether a message to the user may hold calls: one that begins like JSON does not."""
        lead = self._text.lstrip()
        if not lead:
            return False
        self._step = self._plain_message if lead[0] == "{" else self._text_message
        return True

    def _text_message(self) -> bool:
        return self._message(self._say_content, (MUSE,))

    def _plain_message(self) -> bool:
        return self._message(self._say_content, ())

    def _message(self, say: Callable[[str], None], calls: tuple[str, ...]) -> bool:
        end, call = _first(self._text, MESSAGE_ENDS), _first(self._text, calls)
        if call >= 0 and (end < 0 or call < end):
            say(self._text[:call])
            return self._hold()
        ready = end if end >= 0 else certain(self._text, (*MESSAGE_ENDS, *calls))
        say(self._text[:ready])
        self._text = self._text[ready:]
        if end >= 0:
            self._step = self._between
        return end >= 0

    def _between(self) -> bool:
        """Drop what stands between two messages."""
        start = self._text.find(START)
        self._text = self._text[start if start >= 0 else certain(self._text, (START,)) :]
        if start >= 0:
            self._step = self._header
        return start >= 0


class _Trimmed:
    """A text without the white space around it, piece by piece. began: whether anything else came yet."""

    def __init__(self) -> None:
        self.began = False
        self._space = ""

    def add(self, piece: str) -> str:
        text = self._space + piece if self.began else piece.lstrip()
        found = text.rstrip()
        self._space = text[len(found) :]
        self.began = self.began or bool(found)
        return found


def _first(text: str, marks: Sequence[str]) -> int:
    """Where the first of the marks stands; -1: none does."""
    return min((at for mark in marks if (at := text.find(mark)) >= 0), default=-1)


def certain(text: str, marks: Sequence[str]) -> int:
    """The length of the text without what may begin a mark at its end."""
    longest = max(map(len, marks), default=0) - 1
    tails = range(max(0, len(text) - longest), len(text))
    return next((at for at in tails if any(mark.startswith(text[at:]) for mark in marks)), len(text))
