"""The embedded models, which ship with the package, and how any model is loaded."""

from pathlib import Path

EMBEDDED = ("tiny", "tiny_vision")
"""The `model.path` of the embedded models: one that reads text, and one that sees."""


def embedded_path(name: str = "tiny") -> Path:
    """The folder of an embedded model, which `from_pretrained` loads."""
    return Path(__file__).parent / name
