"""The embedded model, which ships with the package, and how any model is loaded."""

from pathlib import Path

EMBEDDED = "tiny"
"""The `model.path` of the embedded model."""


def embedded_path() -> Path:
    """Return the folder of the embedded model, which `from_pretrained` loads."""
    return Path(__file__).parent / EMBEDDED
