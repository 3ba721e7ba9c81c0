"""Answers that are forced: calls of tools in the template's own format, and JSON, as a `Constraint`.

How a call is written is found by rendering one of sentinels, as the format itself is (`parse.find_format`).
"""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.chat.calls import Schemas
from agentrl.chat.formats import CHANNELS, Format
from agentrl.chat.probe import THINKING, generation_prompt
from agentrl.chat.template import (
    CONTENT,
    KEY,
    USER,
    Template,
    TemplateRefusalError,
    call_id,
    call_name,
    call_value,
    probe_turn,
    shared,
)
from agentrl.constraint import Constraint, Shape
from agentrl.errors import UserError
from agentrl.plugins.types import Json, Message

_NAME = re.compile(r"[\w.-]{1,128}")
_VALUE = json.JSONDecoder().raw_decode


class CallText(NamedTuple):
    """How a template writes a call around its arguments, which are JSON: with the sentinel of a name in it."""

    before: str
    """What stands before the arguments."""
    after: str
    """What stands behind them, up to the end of the turn."""


def closed(tool: dict[str, Json]) -> dict[str, Json]:
    """The schema of a tool with no arguments but those that it names, unless it says itself what others may be."""
    function = tool["function"]
    parameters = {"additionalProperties": False, **function["parameters"]}
    return {**tool, "function": {**function, "parameters": parameters}}


class Forced:
    """Writes constraints for one template. form: how it writes calls; None: unknown. ends: texts that end a turn."""

    def __init__(self, template: Template, form: Format | None, ends: Sequence[str]) -> None:
        self._call = None if form is None else _call_text(template, form, ends)
        self._form = form
        self._header = _header(template) if form is not None and form.name == CHANNELS else ""
        prompt = generation_prompt(template)
        pairs = [(opening.strip(), closing) for opening, closing in THINKING]
        known = [pair for pair in pairs if pair[0] in template.source + prompt and pair[1] in template.source + prompt]
        self._thought = known[0] if known else None
        self._begun = any(prompt.rfind(opening) > prompt.rfind(closing) for opening, closing in known[:1])

    def constraint(self, schema: str | None, tools: Sequence[dict[str, Json]]) -> Constraint:
        """See `Constraining.constraint`."""
        shapes = [self._shape(tool) for tool in tools]
        if schema is not None:
            shapes.append(Shape(self._header, schema, ""))
        return Constraint(tuple(shapes), self._thought, self._begun)

    def _shape(self, tool: dict[str, Json]) -> Shape:
        function = tool["function"]
        if self._call is None:
            why = f"calls as {self._form.name}" if self._form is not None else "calls in no known format"
            raise UserError(f"a call cannot be forced: this model writes {why}, whose arguments are no JSON")
        if not _NAME.fullmatch(function["name"]):
            raise UserError(
                f"a call of {function['name'][:60]!r} cannot be forced: a name has letters, digits, _ and -"
            )
        before, after = (part.replace(call_name(0), function["name"]) for part in self._call)
        return Shape(before, json.dumps(function["parameters"], ensure_ascii=False), after)


def _call_text(template: Template, form: Format, ends: Sequence[str]) -> CallText | None:
    """How the template writes a call; None where its arguments are no JSON, or its reader does not read it."""
    for identity in (call_id(0), f"functions.{call_name(0)}:0"):  # some templates write a call's id and not its name
        turn = probe_turn(1)
        turn["tool_calls"][0]["id"] = identity
        user: Message = {"role": "user", "content": USER}
        try:
            opening = template.text([user], template.tools, generate=True)
            text = template.text([user, turn], template.tools, generate=False)
        except TemplateRefusalError:
            return None
        found = _around(text[shared(opening, text) :], form, ends)
        if found is not None and call_id(0) not in "".join(found):  # an id would be the same in every call
            return found if _reads(form, found) else None
    return None


def _header(template: Template) -> str:
    """What a template of channels writes before the text of an answer."""
    user: Message = {"role": "user", "content": USER}
    opening = template.text([user], template.tools, generate=True)
    text = template.text([user, probe_turn(0, CONTENT)], template.tools, generate=False)
    return text[shared(opening, text) :].partition(CONTENT)[0]


def _around(written: str, form: Format, ends: Sequence[str]) -> CallText | None:
    """What stands around the arguments in an answer that is one call."""
    name = written.find(call_name(0))
    start = written.find("{", name)
    while 0 <= name < start:
        try:
            value, end = _VALUE(written, start)
        except ValueError:
            value, end = None, start
        if value == {KEY: call_value(0)}:
            break
        start = written.find("{", start + 1)
    else:
        return None
    marks = [at for mark in (form.marker, *form.dropped) if 0 <= (at := written.find(mark)) <= start]
    begin = 0 if form.name == CHANNELS else min(marks, default=0)
    stops = [at for stop in ends if (at := written.find(stop, end)) >= 0]
    return CallText(written[begin:start], written[end : min(stops, default=len(written))].rstrip())


def _reads(form: Format, found: CallText) -> bool:
    text = found.before + json.dumps({KEY: call_value(0)}) + found.after
    calls = form.read(text, True, Schemas(())).calls
    return [(call.name, call.arguments, call.error) for call in calls] == [(call_name(0), {KEY: call_value(0)}, None)]
