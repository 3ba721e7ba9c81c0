"""A tokenizer's own chat template: how it wants arguments and contents, and what it makes of a conversation."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from agentrl.errors import UserError
from agentrl.plugins.types import Json, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTENT, USER, KEY, ANSWER = "Zqa000x", "Zqu000x", "zqk000x", "Zqb000x"


def call_name(i: int) -> str:
    """The sentinel that stands for the name of the call with index `i`."""
    return f"zqn{i:03d}x"


def call_id(i: int) -> str:
    """The sentinel that stands for the id of the call with index `i`."""
    return f"zqID{i:05d}"  # nine letters and digits: what the strictest template asks for


def call_value(i: int) -> str:
    """The sentinel that stands for the argument of the call with index `i`."""
    return f"Zqv{i:03d}x"


class TemplateRefusalError(Exception):
    """The template raised on a conversation. The text is the template's own."""


def shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def probe_turn(calls: int, content: str = "", reasoning: str | None = None) -> Message:
    """An assistant turn of sentinels with this many calls."""
    turn: Message = {"role": "assistant", "content": content}
    if calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call_id(i),
                "function": {"name": call_name(i), "arguments": {KEY: call_value(i)}},
            }
            for i in range(calls)
        ]
    if reasoning is not None:
        turn["reasoning_content"] = reasoning
    return turn


def probe_result(i: int, content: str) -> Message:
    """A tool's message with `content` for the call with index `i`."""
    return {"role": "tool", "content": content, "tool_call_id": call_id(i), "name": call_name(i)}


class Template:
    """`text` renders; messages are first put into the form that the template wants.

    arguments: "dict" or "json", how it wants a call's arguments. parts: whether contents must be lists of parts.
    looks_for: finds in a content what the template looks for in contents; None where it looks for nothing.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", source: str | None, tools: Sequence[dict[str, Json]]
    ) -> None:
        self._tokenizer = tokenizer
        self.tools = list(tools)
        self.source = _source(tokenizer, source, self.tools)
        self.arguments, self.parts = "dict", False
        self.looks_for = _looks_for(self.source)
        user: Message = {"role": "user", "content": USER}
        if USER not in self._try([user]):
            self.parts = True
            if USER not in self._try([user]):
                raise UserError(
                    f"the chat template does not render a user's message{self._refusal}; "
                    "give another one (`model.chat_template`)"
                )
        self.arguments = self._arguments_form(user)

    def _try(self, messages: Sequence[Message]) -> str:
        try:
            return self.text(messages, self.tools, generate=True)
        except TemplateRefusalError as error:
            self._refusal = f" ({error})"
            return ""

    _refusal = ""

    def _arguments_form(self, user: Message) -> str:
        for form in ("dict", "json"):
            self.arguments = form
            text = self._try([user, probe_turn(1), probe_result(0, CONTENT)])
            if call_value(0) in text and f"{{'{KEY}'" not in text:
                return form
        return "dict"

    def text(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]], *, generate: bool) -> str:
        """The rendered conversation. Raises TemplateRefusalError."""
        from jinja2 import TemplateError

        shaped = [self._shaped(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                shaped,
                tools=list(tools) or None,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=generate,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # the template is foreign
            raise TemplateRefusalError(str(error).strip() or type(error).__name__) from error
        return cast("str", text)  # as it is where nothing is tokenized

    def _shaped(self, message: Message) -> dict[str, Json]:
        shaped: dict[str, Json] = dict(message)
        content = shaped.get("content")
        if content is None:
            shaped["content"] = content = ""
        if self.parts and isinstance(content, str):
            shaped["content"] = [{"type": "text", "text": content}] if content else []
        if shaped.get("tool_calls"):
            shaped["tool_calls"] = [self._shaped_call(call) for call in shaped["tool_calls"]]
        return shaped

    def _shaped_call(self, call: Mapping[str, Json]) -> dict[str, Json]:
        function = call["function"]
        arguments = function["arguments"]
        if self.arguments == "json" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif self.arguments == "dict" and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {}
        return {**call, "function": {**function, "arguments": arguments}}


_SOUGHT = re.compile(
    r"""(?P<q>['"])(?P<in>[^'"]+)(?P=q)\s+(?:not\s+)?in\s+[\w.\[\]'"()-]*(?:content|text|body|query|prompt)"""
    r"""|\.(?:startswith|endswith|split|replace|find|count)\(\s*(?P<p>['"])(?P<of>[^'"]+)(?P=p)"""
    r"""|\|\s*replace\(\s*(?P<r>['"])(?P<by>[^'"]+)(?P=r)"""
)


def _looks_for(source: str) -> re.Pattern[str] | None:
    """What the template tests contents for (`'/no_think' in message.content`): such contents change what it
    writes."""
    found = {match["in"] or match["of"] or match["by"] for match in _SOUGHT.finditer(source)}
    literals = sorted({text for text in found if len(text.strip()) > 1 and text.strip() != "\\n"})
    return re.compile("|".join(map(re.escape, literals)), re.IGNORECASE) if literals else None


def _source(tokenizer: "PreTrainedTokenizerBase", source: str | None, tools: Sequence[dict[str, Json]]) -> str:
    if source is not None:
        return source
    try:
        found: str = tokenizer.get_chat_template(None, tools=list(tools) or None)
    except ValueError as error:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(
            f"the tokenizer {name!r} has no chat template; give one with `model.chat_template` (a path or the text)"
        ) from error
    return found
