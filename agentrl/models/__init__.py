"""The embedded models, which ship with the package, and how any model is loaded."""

from collections.abc import Iterable, Mapping
from pathlib import Path

EMBEDDED = ("tiny", "tiny_vision")
"""The `model.path` of the embedded models: one that reads text, and one that sees."""

LESSONS: Mapping[str, tuple[str, ...]] = {"tiny": ("calculator",), "tiny_vision": ("move", "pick_up")}
"""The tools of which the lessons of an embedded model consist, where it can call no others."""


def never_seen(path: str, tools: Iterable[str], own_format: bool) -> str | None:
    """What a model is given that it has never seen, in a line; None for a model that is not embedded, or can take it.

    path: `model.path`. tools: the names of those that are offered. own_format: whether the recipe names another chat
    template or format than the model's."""
    if path not in LESSONS:
        return None
    known, new = LESSONS[path], sorted(set(tools) - set(LESSONS[path]))
    given = [f"the tools {', '.join(new)}" if len(new) > 1 else f"the tool {new[0]}"] if new else []
    given += ["a chat format of its own (model.chat, model.chat_template)"] if own_format else []
    if not given:
        return None
    return (
        f"the embedded model {path} has never seen {' and '.join(given)}: it learned to call {', '.join(known)} alone. "
        "Teach it first (start: demonstrations in the recipe, docs/fine_tuning.md), or take another model"
    )


def embedded_path(name: str = "tiny") -> Path:
    """The folder of an embedded model, which `from_pretrained` loads."""
    return Path(__file__).parent / name
