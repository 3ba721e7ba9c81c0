"""Images of rows: which part of which message each one is, and where its file lies.

`<image>` in a text, and a part of type `image` that holds none, stand for the images of a row's column, in their order.
Files behind a URL are fetched only where a recipe allows it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import UserError
from agentrl.images import STORE, ImageError, is_image, unwrapped
from agentrl.plugins.types import Json, Message
from agentrl.remote import downloaded

Urls = Literal["refuse", "public", "any"]
"""What is done about images that are http addresses: refused; fetched from machines that all the world can reach; or
fetched from any, those of one's own network included."""

COLUMN = "images"
"""The column with images, where nobody says."""
_TAG = re.compile(r"<image>")
_HELD = ("image", "image_url", "bytes", "path", "url")  # keys of a part that holds its image


@dataclass(frozen=True, slots=True)
class Images:
    """How rows bring images."""

    column: str = COLUMN
    """Column with one, or a list of them: paths, `{bytes, path}`, `data:` URLs, addresses."""
    folder: str | None = None
    """Folder against which paths stand. None: that of the row's file, else the current one."""
    urls: Urls = "refuse"
    """What is done about addresses."""

    def placed(self, messages: Sequence[Message], row: Mapping[str, Json], folder: Path | None) -> list[Message]:
        """Messages with the row's images as parts, where they stand. folder: of the row's file. Raises
        UserError: images and their places are not equally many, or one is nothing that can be read."""
        if self.column != COLUMN and self.column not in row and tagged(messages):
            raise UserError(
                f"its prompt says <image>, and there is no field {self.column!r} (env.args.images); the row has "
                f"{', '.join(map(repr, row))}"
            )
        column = row.get(self.column)
        left = [] if column is None else list(column) if isinstance(column, list | tuple) else [column]
        given = _Given(self, left, bool(left), Path(self.folder) if self.folder else folder)
        made: list[Message] = [{**message, "content": given.content(message.get("content"))} for message in messages]
        if given.places != given.count:
            raise UserError(
                f"has {_counted(given.count, 'image')} in field {self.column!r}, and its messages have "
                f"{_counted(given.places, '<image> tag')} for them"
            )
        return made

    def fetched(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with the files behind the addresses of their images. Raises ImageError: one cannot be
        had."""
        return [_fetched(message, self.urls == "any") for message in messages]


def tagged(messages: Sequence[Message]) -> bool:
    """Whether a text of the messages says `<image>`."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return any(isinstance(text, str) and _TAG.search(text) for text in texts)


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


@dataclass(slots=True)
class _Given:
    """The images of a row while they are placed. tags: whether `<image>` is one, and no text."""

    how: Images
    left: list[object]
    tags: bool
    folder: Path | None
    places: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        self.count = len(self.left)

    def content(self, content: object) -> Any:
        """A content with images in their places; a text without any as it is."""
        if isinstance(content, str):
            parts = self._cut(content)
            return parts if any(map(is_image, parts)) else content
        if not isinstance(content, list):
            return content
        return [made for part in content for made in self._part(part)]

    def _part(self, part: object) -> list[object]:
        if not isinstance(part, Mapping):
            return [part]
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return self._cut(part["text"])
        if not is_image(part):
            return [part]
        held = next((part[key] for key in _HELD if part.get(key) is not None), None)
        return [{"type": "image", "image": self._source(held)} if held is not None else self._next()]

    def _cut(self, text: str) -> list[object]:
        """A text as parts, cut at its tags."""
        texts = _TAG.split(text) if self.tags else [text]
        parts: list[object] = []
        for i, piece in enumerate(texts):
            parts += [self._next()] if i else []
            parts += [{"type": "text", "text": piece}] if piece else []
        return parts

    def _next(self) -> dict[str, Json]:
        """The next image of the column; one too many is told once all places are counted."""
        self.places += 1
        return {"type": "image", "image": self._source(self.left.pop(0)) if self.left else None}

    def _source(self, given: object) -> object:
        given = unwrapped(given)
        if not isinstance(given, str) or given.startswith("data:"):
            return given
        if given.startswith(("http://", "https://")):
            if self.how.urls == "refuse":
                raise UserError(
                    f"an image is an address, {given[:100]}, and nothing allows fetching it: set image_urls to public"
                )
            return given
        path = Path(given.removeprefix("file://"))
        if self.folder is not None and not path.is_absolute():
            beside = self.folder / path
            return str(beside if self.how.folder or beside.exists() or not path.exists() else path)
        return str(path)


def _fetched(message: Message, anywhere: bool) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not any(map(_is_address, content)):
        return message
    return {**message, "content": [_file(part, anywhere) if _is_address(part) else part for part in content]}


def _is_address(part: Any) -> bool:
    return is_image(part) and isinstance(part.get("image"), str) and part["image"].startswith(("http://", "https://"))


def _file(part: Mapping[str, Json], anywhere: bool) -> dict[str, Json]:
    try:
        return {"type": "image", "image": str(downloaded(part["image"], most=STORE.limits.bytes, anywhere=anywhere))}
    except OSError as error:
        raise ImageError(f"the image at {part['image'][:200]} cannot be fetched: {error}") from error
