"""Our own chat for a model that sees: a picture is written as the template writes it, and its placeholder expanded."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl.chat.base import Opening
from agentrl.chat.bridge import BridgeChat
from agentrl.chat.encode import IMAGE, Encoder
from agentrl.chat.template import CONTENT, USER, Template, TemplateRefusalError, probe_result, probe_turn
from agentrl.errors import UserError
from agentrl.images import ImageSpan, hashes, is_image
from agentrl.models.image_input import ImageInput
from agentrl.plugins.types import Json, Message


def find_image_text(template: Template, encoder: Encoder, placeholder: int) -> str:
    """Return what the template writes for an image, wherever one stands. Raises UserError where that cannot be relied
    on: it must be the same in users' messages and in tools', whatever stands around it."""
    image = {"type": "image"}
    one = _parts([USER, image, CONTENT])
    try:
        shown = template.text([{"role": "user", "content": one}], [], generate=True)
        text = shown.partition(USER)[2].partition(CONTENT)[0]
        ids = encoder.whole(text)
        ends = [encoder.structural.get(encoder.decode([i])) for i in (*ids[:1], *ids[-1:])]
        if ids.count(placeholder) != 1 or None in ends:
            raise UserError(f"the chat template writes {text!r} for an image, not one placeholder between two tokens")
        for contents in ([image, USER], [USER, image, image], [image, USER, image, CONTENT]):
            written = "".join(text if part is image else str(part) for part in contents)
            for talk in ([], [_user(USER), probe_turn(1)]):
                last = _user if not talk else (lambda content: {**probe_result(0, ""), "content": content})
                given, wanted = (
                    template.text([*talk, last(content)], template.tools, generate=True)  # type: ignore[list-item]
                    for content in (_parts(contents), _parts([written]) if template.parts else written)
                )
                if given != wanted:
                    where = "a tool's message" if talk else "a user's message"
                    raise UserError(f"the chat template does not write images of {where} in their place")
    except TemplateRefusalError as error:
        raise UserError(f"the chat template refuses images: {error}") from error
    return text


def _parts(contents: Sequence[Any]) -> Any:
    return [part if isinstance(part, dict) else {"type": "text", "text": part} for part in contents]


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


class ImageChat(BridgeChat):
    """A `Chat` and a `Seeing` (see base) whose messages may hold images of the store, by hash."""

    images = True

    def __init__(self, bridge: BridgeChat, image_input: ImageInput, encoder: Encoder, image_text: str) -> None:
        """Take over all that `bridge` knows. image_text: see `find_image_text`."""
        self.__dict__.update(bridge.__dict__)
        self._input = image_input
        encoder.image = image_text, encoder.whole(image_text)
        self.description += "; images by the model's own processor"

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> list[int]:
        """See `Chat.render`."""
        return self._expanded(super().render(_flat(messages), tools), messages)

    def lengths(self, openings: Sequence[Opening]) -> list[int]:
        """See `Measuring.lengths`."""
        short = super().lengths([(_flat(messages), tools) for messages, tools in openings])
        return [
            length + sum(span - 1 for span in map(self._tokens, hashes(messages)))
            for length, (messages, _) in zip(short, openings, strict=True)
        ]

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """See `Chat.bridge`."""
        return self._expanded(super().bridge(turn_ids, _flat(messages)), messages)

    def images_in(self, ids: Sequence[int], messages: Sequence[Message]) -> list[ImageSpan]:
        """See `Seeing.images_in`."""
        spans, at = [], 0
        for key in hashes(messages):
            grid = self._input.grid(key)
            at = ids.index(self._input.placeholder, at)
            spans.append(ImageSpan(at, self._input.tokens(grid), grid, key))
            at += spans[-1].tokens
        return spans

    def _tokens(self, key: str) -> int:
        return self._input.tokens(self._input.grid(key))

    def _expanded(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Return ids with as many placeholders for each image as it has features."""
        keys, placeholder = hashes(messages), self._input.placeholder
        found = ids.count(placeholder)
        if found != len(keys):
            raise UserError(
                f"the messages hold {len(keys)} images, but the chat template writes {found} placeholders for them: "
                "a system prompt may spell one"
            )
        if not keys:
            return ids
        expanded: list[int] = []
        left = iter(keys)
        for i in ids:
            expanded += [i] * self._tokens(next(left)) if i == placeholder else [i]
        return expanded


def _flat(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose contents are texts, with IMAGE where an image stands."""
    return [_flat_message(message) for message in messages]


def _flat_message(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return message if IMAGE not in content else {**message, "content": content.replace(IMAGE, "\ufffd")}
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    for part in content:
        if not is_image(part) and part.get("type") != "text":
            raise UserError(f"a message holds a part of type {part.get('type')!r}: this chat takes text and images")
    texts = [IMAGE if is_image(p) else str(p.get("text", "")).replace(IMAGE, "\ufffd") for p in content]
    return {**message, "content": "".join(texts)}


def moved(spans: Sequence[ImageSpan], by: int) -> list[ImageSpan]:
    """Return spans of ids that `by` others were put before."""
    return [replace(span, start=span.start + by) for span in spans]
