"""The embedded models, which ship with the package, and how any model is loaded."""

from pathlib import Path

EMBEDDED = ("tiny", "tiny_tools", "tiny_vision")
"""The `model.path` of the embedded models: one that calls a calculator, one that calls any tool, and one that sees."""


def embedded_path(name: str = "tiny") -> Path:
    """The folder of an embedded model, which `from_pretrained` loads."""
    return Path(__file__).parent / name
