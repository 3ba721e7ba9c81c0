"""Choose the chat of a model: a `renderers` family proven to write what the template writes, else our own bridge."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.chat.base import Chat
from agentrl.chat.bridge import BridgeChat
from agentrl.chat.encode import Encoder
from agentrl.chat.families import FamilyChat, find_family, known_families
from agentrl.chat.image_chat import ImageChat, find_image_writing
from agentrl.chat.parse import TurnParser
from agentrl.chat.probe import THINKING, check_tools, find_ends, find_rewrites, find_unshown
from agentrl.chat.template import Template
from agentrl.errors import UserError, nearest
from agentrl.models import EMBEDDED, embedded_path
from agentrl.models.image_input import ImageInput
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_chat(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    model_path: str,
    kind: str = "auto",
    chat_template: str | None = None,
    tools: Sequence[dict[str, Json]] = (),
) -> Chat:
    """The chat of a run. Renders some probe conversations; takes well under a second.

    model_path: where config.json and generation_config.json are looked for first; then where the tokenizer came from.
    kind: `auto`, `bridge`, or a family of `renderers` that must then prove itself. chat_template: a jinja file, or its
    text, in place of the tokenizer's own. tools: schemas (`Tool.schema`) of all tools that a task may offer. Raises
    UserError where the template cannot serve: there is none, it does not show tools, or it cannot express results.
    """
    template = Template(tokenizer, _template_text(chat_template), tools)
    check_tools(template)
    places = (model_path, str(getattr(tokenizer, "name_or_path", "")))
    encoder = Encoder(tokenizer, template.source + str(THINKING))
    ends = find_ends(template, encoder, _eos_ids(tokenizer, places))
    parser = TurnParser(template, encoder.decode, ends.stop_ids, encoder.structural, tools)
    calls = (
        f"calls as {parser.format.name}" if parser.format else "calls in any tagged format (the template shows none)"
    )
    bridge = BridgeChat(template, encoder, ends, parser, find_rewrites(template), f"own bridge; {calls}")
    if (image_input := getattr(tokenizer, "image_input", None)) is not None:
        chat: BridgeChat | FamilyChat = _seeing(bridge, template, encoder, image_input)
    else:
        chat = bridge if kind == "bridge" else _chosen(bridge, tokenizer, template, kind, places)
    if unshown := find_unshown(template):
        chat.description += f"; the template leaves out of the tools' schemas: {unshown}"
    return chat


def _seeing(bridge: BridgeChat, template: Template, encoder: Encoder, image_input: ImageInput) -> BridgeChat:
    """A chat that takes images, or the bridge, which says why its template takes none."""
    try:
        writing = find_image_writing(template, encoder, image_input.placeholder)
    except UserError as error:
        bridge.description += f"; no images: {error}"
        return bridge
    return ImageChat(bridge, image_input, encoder, writing)


def _chosen(
    bridge: BridgeChat, tokenizer: "PreTrainedTokenizerBase", template: Template, kind: str, places: tuple[str, str]
) -> BridgeChat | FamilyChat:
    """A proven family, or our bridge with the reason in its description."""
    if kind != "auto" and kind not in known_families():
        raise UserError(f"unknown chat {kind!r}{nearest(kind, ['auto', 'bridge', *known_families()])}")
    family, why = find_family(
        tokenizer, template, bridge, kind=kind, model_path=places[0], config=_read(places, "config.json")
    )
    if family is None:
        if kind != "auto":
            raise UserError(
                f"the chat family {kind!r} does not write what this model's template writes: {why}; use `auto`"
            )
        bridge.description += f"; {why}"
        return bridge
    return FamilyChat(bridge, family)


def _template_text(source: str | None) -> str | None:
    if source is None or "{{" in source or "{%" in source:
        return source
    try:
        return Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the chat template {source!r} cannot be read: {error.strerror}") from error


def _eos_ids(tokenizer: "PreTrainedTokenizerBase", places: Sequence[str]) -> frozenset[int]:
    """The ids that the tokenizer and the model's generation_config.json declare as ends."""
    declared = _read(places, "generation_config.json").get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(i for i in [tokenizer.eos_token_id, *ids] if isinstance(i, int))


def _find(place: str, name: str) -> Path:
    """A file of a folder, of an embedded model, or of the hub's local copy. Raises OSError."""
    folder = embedded_path(place) if place in EMBEDDED else Path(place)
    if folder.is_dir():
        return folder / name
    from transformers.utils.hub import cached_file

    return Path(str(cached_file(place, name, local_files_only=True)))


def _read(places: Sequence[str], name: str) -> dict[str, Json]:
    """Read a JSON file from the first folder, or local copy of the hub's, that has it; {} if none has."""
    for place in filter(None, places):
        try:
            found = json.loads(_find(place, name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}
