"""The embedded model, which ships with the package, and how any model is loaded."""

from pathlib import Path

EMBEDDED = "tiny"
"""What `model.path` says for the embedded model."""


def embedded_path() -> Path:
    """The folder of the embedded model, in Hugging Face's form."""
    return Path(__file__).parent / EMBEDDED
