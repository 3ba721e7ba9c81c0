"""`<image>` and `<video>` in a prompt become content parts, one for each image or video of the row, in their order."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import UserError
from agentrl.plugins.types import Message

_TAG = re.compile(r"<(image|video)>")


def with_media(messages: Sequence[Message], media: Mapping[str, Any], where: str) -> list[Message]:
    """media: what the row has for `image` and `video`: None, one, or a list. A tag of a kind that the row has none of
    stays text. Raises UserError when tags and media are not equally many."""
    left = {kind: list(_listed(value)) for kind, value in media.items() if value is not None}
    had = {kind: len(values) for kind, values in left.items()}
    if not any(had.values()):
        return list(messages)
    tags = dict.fromkeys(had, 0)
    shaped: list[Message] = [{**message, "content": _parts(message["content"], left, tags)} for message in messages]
    for kind, count in had.items():
        if tags[kind] != count:
            raise UserError(f"{where}: has {count} {kind}s, and the prompt has {tags[kind]} <{kind}> tags for them")
    return shaped


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _parts(content: Any, left: dict[str, list[Any]], tags: dict[str, int]) -> Any:
    """A text cut at the tags of what the row has; anything else as it is."""
    if not isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    at = 0
    for match in _TAG.finditer(content):
        kind = match[1]
        if not left.get(kind) and not tags.get(kind):
            continue
        parts += [{"type": "text", "text": content[at : match.start()]}] if match.start() > at else []
        tags[kind] += 1
        if left[kind]:
            parts.append({"type": kind, kind: _medium(left[kind].pop(0))})
        at = match.end()
    if not parts:
        return content
    return parts + ([{"type": "text", "text": content[at:]}] if at < len(content) else [])


def _medium(value: Any) -> Any:
    """A path or address, or the bytes of a file: parquet holds `{bytes, path}`."""
    if isinstance(value, Mapping) and {"bytes", "path", "image"} & set(value):
        return next((value[name] for name in ("bytes", "image", "path") if value.get(name) is not None), None)
    return value
