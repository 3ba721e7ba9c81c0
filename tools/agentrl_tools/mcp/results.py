"""What an MCP tool returns, as the model reads it."""

import base64
import binascii
import json
from typing import Any

from agentrl import InfrastructureError, ToolResponse


def response_of(result: Any) -> ToolResponse:
    """Text as text, images as images, other content by a line that says what it is; structured content as JSON where
    there is no other. Raises InfrastructureError for an image that is none."""
    texts: list[str] = []
    images: list[bytes] = []
    for block in result.content:
        if block.type == "image":
            images.append(_decoded(block.data))
        else:
            texts.append(_text(block))
    if not texts and not images and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(texts)
    if result.is_error:
        return ToolResponse(text or "the tool failed without a word", tuple(images), error=True)
    return ToolResponse(text, tuple(images))


def _text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "audio":
        return f"[audio, {block.mime_type}, which you cannot hear]"
    if block.type == "resource_link":
        return f"[resource {block.name}: {block.uri}]"
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return text if isinstance(text, str) else f"[resource {block.resource.uri}]"
    return f"[{block.type}]"


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InfrastructureError(f"the MCP server sent an image that is not base64: {error}") from error
