"""An assistant's ids taken apart into content, thinking and calls. No text makes it raise; its cost is linear."""

from collections.abc import Callable, Sequence

from agentrl.chat.base import ParsedTurn
from agentrl.chat.calls import Schemas
from agentrl.chat.encode import PartialText
from agentrl.chat.formats import BARE, CHANNELS, FORMATS, HERMES, Format
from agentrl.chat.probe import THINKING, after, generation_prompt
from agentrl.chat.stream import TurnStream
from agentrl.chat.template import KEY, USER, Template, TemplateRefusalError, call_name, call_value, probe_turn, shared
from agentrl.plugins.types import Json, Message

_EXTRA: dict[str, Json] = {"zqn": 4, "zqd": {"zqa": [1, "zqb"]}}


class TurnParser:
    """Reads the turns of one template. format: how calls are written; None: unknown, all tagged formats are tried."""

    def __init__(
        self,
        template: Template,
        decode: Callable[[Sequence[int]], str],
        stop_ids: Sequence[int],
        structural: dict[str, int],
        tools: Sequence[dict[str, Json]],
    ) -> None:
        self.format = find_format(template)
        unknown = [f for f in FORMATS if f.name != BARE and (f.name != CHANNELS or f.marker in template.source)]
        self._formats = (self.format,) if self.format else tuple(unknown)
        self._decode, self.stops, self._schemas = decode, frozenset(stop_ids), Schemas(tools)
        prompt = generation_prompt(template)
        pairs = [(opening.strip(), closing) for opening, closing in THINKING]
        known = [p for p in pairs if any(tag in template.source for tag in p) or p[0] in prompt] or pairs[:1]
        self._thinking = [(*pair, prompt.rfind(pair[0]) > prompt.rfind(pair[1])) for pair in known]
        self._thought_ids = [
            (frozenset(i for token, i in structural.items() if opening.startswith(token)), structural[closing], begun)
            for opening, closing, begun in self._thinking
            if closing in structural
        ]
        self._structural = frozenset(structural.values())

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        """See `Chat.parse`."""
        closed = len(turn_ids) > 0 and turn_ids[-1] in self.stops
        text = self._decode(turn_ids[:-1] if closed else turn_ids)
        return self.parse_text(text, closed=closed)

    def stream(self, text: PartialText) -> TurnStream:
        """A reader of one turn while it is sampled. text: of its ids."""
        return TurnStream(text, self._formats, self._thinking, self.stops)

    def parse_text(self, text: str, *, closed: bool) -> ParsedTurn:
        """The same from text without its stop token."""
        reasoning, text = self._split_thought(text)
        form = self._formats[0]
        if len(self._formats) > 1:
            form = next((form for form in self._formats if form.marker in text), HERMES)
        if form.marker not in text:
            return ParsedTurn(text.strip(), (), reasoning)
        reading = form.read(text, closed, self._schemas)
        if reading.reasoning:
            reasoning = "\n".join([*([reasoning] if reasoning else []), *reading.reasoning])
        return ParsedTurn("".join(reading.content).strip(), tuple(reading.calls), reasoning)

    def _split_thought(self, text: str) -> tuple[str | None, str]:
        """The thought with which the turn begins, and what follows it. One that is not closed ends where a call
        begins, or with the text."""
        for opening, closing, begun in self._thinking:
            if begun or text.lstrip().startswith(opening):
                end, following = self._thought_end(text, closing)
                return text[:end].lstrip().removeprefix(opening).strip() or None, text[following:]
        return None, text

    def _thought_end(self, text: str, closing: str) -> tuple[int, int]:
        """Where the thought ends, and where what follows it begins. What closes it stands in no call that is
        whole."""
        end = text.find(closing)
        markers = [at for form in self._formats if (at := text.find(form.marker)) >= 0 and len(form.marker) > 1]
        call = min(markers, default=len(text))
        if end < 0 or (call < end and self._holds(text[call:], closing)):
            return call, call
        return end, end + len(closing)

    def _holds(self, text: str, closing: str) -> bool:
        """Whether the first call of the text is whole and its own text holds `closing`."""
        for form in self._formats:
            calls = form.read(text, True, self._schemas).calls[:1] if text.startswith(form.marker) else []
            if any(call.error is None and closing in call.raw for call in calls):
                return True
        return False

    def open_thought(self, turn_ids: Sequence[int]) -> tuple[int, ...]:
        """The id that closes the thought in which a turn was cut off; none where it was not, or has no such
        id."""
        first = next((i for i in turn_ids if i in self._structural), None)
        for opening, closing, begun in self._thought_ids:
            if closing not in turn_ids and (begun or first in opening):
                return (closing,)
        return ()


def find_format(template: Template) -> Format | None:
    """The format that reads back what the template writes of a known call."""
    for identity in (None, f"functions.{call_name(0)}:0"):  # some templates write a call's id and not its name
        turn = probe_turn(1)
        turn["tool_calls"][0]["function"]["arguments"] = {KEY: call_value(0), **_EXTRA}
        if identity:
            turn["tool_calls"][0]["id"] = identity
        user: Message = {"role": "user", "content": USER}
        try:
            opening = template.text([user], template.tools, generate=True)
            text = template.text([user, turn], template.tools, generate=False)
        except TemplateRefusalError:
            return None
        written = [text[shared(opening, text) :], after(text, USER)]
        if form := _reader_of([cut for whole in written for cut in (whole, *_endings(whole))]):
            return form
    return None


def _reader_of(texts: Sequence[str]) -> Format | None:
    expected = [(call_name(0), {KEY: call_value(0), **_EXTRA}, None)]
    for text in texts:
        for form in FORMATS:
            calls = form.read(text, True, Schemas(())).calls if form.marker in text else []
            if [(call.name, call.arguments, call.error) for call in calls] == expected:
                return form
    return None


def _endings(text: str) -> list[str]:
    """The text without its last token or two: bare calls end where their turn does."""
    cuts = [text[:at].rstrip() for token in ("<", "[") if (at := text.rfind(token)) > 0]
    return cuts
