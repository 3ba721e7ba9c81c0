"""Our own chat for a model that sees: a picture is written as the template writes it, and its placeholder expanded."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from agentrl.chat.base import Opening
from agentrl.chat.bridge import BridgeChat
from agentrl.chat.encode import IMAGE, Encoder
from agentrl.chat.template import CONTENT, USER, Template, TemplateRefusalError, probe_result, probe_turn
from agentrl.errors import UserError
from agentrl.images import ImageSize, ImageSpan, hashes, is_image
from agentrl.models.image_input import ImageInput
from agentrl.plugins.types import Json, Message


class ImageWriting(NamedTuple):
    """How a template writes images."""

    text: str
    """What it writes for one."""
    strips: bool
    """Whether the white space around each text of a content with images is left out."""
    behind: int | None
    """The id that images of a tool's message stand behind; None: they stand in their place."""


def find_image_writing(template: Template, encoder: Encoder, placeholder: int) -> ImageWriting:
    """How the template writes images. Raises UserError where that cannot be relied on: it must be the same
    whatever stands around them, in users' messages in their place, in tools' there or behind the result."""
    try:
        shown = template.text([_user(_parts([USER, _IMAGE, CONTENT]))], [], generate=True)
        text = shown.partition(USER)[2].partition(CONTENT)[0]
        ids = encoder.whole(text)
        ends = [encoder.structural.get(encoder.decode([i])) for i in (*ids[:1], *ids[-1:])]
        if ids.count(placeholder) != 1 or None in ends:
            raise UserError(f"the chat template writes {text!r} for an image, not one placeholder between two tokens")
        users = [_fits(template, text, [], _user, strips) for strips in (False, True)]
        if not any(users):
            raise UserError("the chat template does not write images of a user's message in their place")
        strips = not users[0]
        conversation = [_user(USER), probe_turn(1)]
        if _fits(template, text, conversation, _result, strips):
            return ImageWriting(text, strips, None)
        behind = _behind(template, encoder, text, conversation) if ids == [placeholder] else None
        if behind is None:
            raise UserError(
                "the chat template does not write images of a tool's message, in their place or behind the result"
            )
        return ImageWriting(text, strips, behind)
    except TemplateRefusalError as error:
        raise UserError(f"the chat template refuses images: {error}") from error


_IMAGE: dict[str, Json] = {"type": "image"}
_CONTENTS: tuple[list[Json], ...] = (
    [_IMAGE, USER],
    [USER, _IMAGE, _IMAGE],
    [_IMAGE, USER, _IMAGE, CONTENT],
    [f" {USER}\n", _IMAGE, f"\n{CONTENT} "],
)


def _fits(template: Template, text: str, conversation: list[Json], last: Json, strips: bool) -> bool:
    """Whether images of a last message stand in their place."""
    for contents in _CONTENTS:
        texts = [text if part is _IMAGE else part.strip() if strips else part for part in contents]
        written = "".join(texts)
        given, wanted = (
            template.text([*conversation, last(content)], template.tools if conversation else [], generate=True)
            for content in (_parts(contents), _parts([written]) if template.parts else written)
        )
        if given != wanted:
            return False
    return True


def _behind(template: Template, encoder: Encoder, text: str, conversation: list[Json]) -> int | None:
    """The id behind which the images of a tool's message stand; None: there is no such."""
    found = set()
    for contents in _CONTENTS:
        texts = "".join(part for part in contents if part is not _IMAGE)
        given, bare = (
            template.text([*conversation, _result(content)], template.tools, generate=True)
            for content in (_parts(contents), texts)
        )
        images = text * (len(contents) - sum(part is not _IMAGE for part in contents))
        before = given.partition(text)[0]
        names = [name for name in encoder.structural if before.endswith(name)]
        if given != before + images + bare[len(before) :] or not bare.startswith(before) or not names:
            return None
        found.add(encoder.structural[max(names, key=len)])
    return found.pop() if len(found) == 1 else None


def _result(content: Json) -> Message:
    return {**probe_result(0, ""), "content": content}


def _parts(contents: Sequence[object]) -> Json:
    return [part if isinstance(part, dict) else {"type": "text", "text": part} for part in contents]


def _user(content: Json) -> Message:
    return {"role": "user", "content": content}


class ImageChat(BridgeChat):
    """A `Chat` and a `Seeing` (see base) whose messages may hold images of the store, by hash."""

    images = True

    def __init__(self, bridge: BridgeChat, image_input: ImageInput, encoder: Encoder, writing: ImageWriting) -> None:
        """Take over all that `bridge` knows."""
        self.__dict__.update(bridge.__dict__)
        self._input, self._writing = image_input, writing
        encoder.image = writing.text, encoder.whole(writing.text)
        self.description += "; images by the model's own processor"

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> list[int]:
        """See `Chat.render`."""
        return self._expanded(super().render(self._flat(messages), tools), messages)

    def lengths(self, openings: Sequence[Opening]) -> list[int]:
        """See `Measuring.lengths`."""
        short = super().lengths([(self._flat(messages), tools) for messages, tools in openings])
        return [
            length + sum(self.image_tokens(image) - 1 + sum(map(len, self._input.ends)) for image in hashes(messages))
            for length, (messages, _) in zip(short, openings, strict=True)
        ]

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """See `Chat.bridge`."""
        return self._expanded(super().bridge(turn_ids, self._flat(messages)), messages)

    def images_in(self, ids: Sequence[int], messages: Sequence[Message]) -> list[ImageSpan]:
        """See `Seeing.images_in`."""
        spans, at = [], 0
        for key in hashes(messages):
            grid = self._input.grid(key)
            at = ids.index(self._input.placeholder, at)
            spans.append(ImageSpan(at, self._input.tokens(grid), grid, key))
            at += spans[-1].tokens
        return spans

    def image_tokens(self, image: str | ImageSize) -> int:
        """See `Seeing.image_tokens`."""
        if isinstance(image, ImageSize):
            return self._input.tokens_of(image)
        return self._input.tokens(self._input.grid(image))

    def _expanded(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Ids with as many placeholders for each image as it has features."""
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
        later: list[int] = []  # of tools, to stand behind the result
        left, (before, after), behind = iter(keys), self._input.ends, self._writing.behind
        of_tools = iter([m.get("role") == "tool" for m in messages for _ in hashes([m])])
        for i in ids:
            if i == placeholder:
                written = [*before, *[i] * self.image_tokens(next(left)), *after]
                (later if next(of_tools) and behind is not None else expanded).extend(written)
                continue
            expanded.append(i)
            if i == behind:
                expanded += later
                later = []
        return expanded

    def _flat(self, messages: Sequence[Message]) -> list[Message]:
        """Messages whose contents are texts, with IMAGE where an image stands."""
        return [self._flat_message(message) for message in messages]

    def _flat_message(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            return message if IMAGE not in content else {**message, "content": content.replace(IMAGE, "\ufffd")}
        if not isinstance(content, list) or not any(map(is_image, content)):
            return message
        for part in content:
            if not is_image(part) and part.get("type") != "text":
                raise UserError(f"a message holds a part of type {part.get('type')!r}: this chat takes text and images")
        texts = [IMAGE if is_image(p) else str(p.get("text", "")).replace(IMAGE, "\ufffd") for p in content]
        if message.get("role") == "tool" and self._writing.behind is not None:
            texts.sort(key=lambda text: text == IMAGE)
        elif self._writing.strips:
            texts = [text.strip() for text in texts]
        return {**message, "content": "".join(texts)}


def moved(spans: Sequence[ImageSpan], by: int) -> list[ImageSpan]:
    """Spans of ids that `by` others were put before."""
    return [replace(span, start=span.start + by) for span in spans]
