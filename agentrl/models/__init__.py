"""The embedded models, which ship with the package, and how any model is loaded."""

from collections.abc import Iterable, Mapping
from pathlib import Path

EMBEDDED = ("tiny", "tiny_vision", "tiny_tools")
"""The `model.path` of the embedded models: it calls a calculator, it sees, or it calls tools that it has never seen."""

LESSONS: Mapping[str, tuple[str, ...]] = {"tiny": ("calculator",), "tiny_vision": ("move", "pick_up")}
"""The tools of which the lessons of an embedded model consist, where it can call no others."""


def never_seen(path: str, tools: Iterable[str], own_format: bool) -> str | None:
    """What a model is given that it has never seen, in a line; None for a model that is not embedded, or can take it.

    path: `model.path`. tools: the names of those that are offered. own_format: whether the recipe names another chat
    template or format than the model's."""
    if path not in EMBEDDED:
        return None
    known = LESSONS.get(path)
    new = [] if known is None else sorted(set(tools) - set(known))
    given = [f"the tools {', '.join(new)}" if len(new) > 1 else f"the tool {new[0]}"] if new else []
    given += ["a chat format of its own (model.chat, model.chat_template)"] if own_format else []
    if not given:
        return None
    learned = "" if known is None else f": it learned to call {', '.join(known)} alone"
    other = "another model" if known is None else "a model that calls any tools, such as tiny_tools"
    return (
        f"the embedded model {path} has never seen {' and '.join(given)}{learned}. "
        f"Teach it first (start: demonstrations in the recipe, docs/fine_tuning.md), or take {other}"
    )


def embedded_path(name: str = "tiny") -> Path:
    """The folder of an embedded model, which `from_pretrained` loads."""
    return Path(__file__).parent / name
