"""What several commands share: the console, KEY=VALUE arguments, and texts made short."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.terminal import Terminal


def console() -> "Terminal":
    """Return the terminal on stdout; rich is imported when this is called."""
    from agentrl.terminal import terminal

    return terminal()


def key_values(texts: Sequence[str], option: str = "") -> dict[str, Any]:
    """Return `KEY=VALUE` texts as a mapping, the values read as YAML. option: begins the UserError."""
    import yaml

    from agentrl.errors import UserError

    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UserError(f"{option}{text}: expected KEY=VALUE, such as {option}max_operations=2")
        try:
            found[key.strip()] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            found[key.strip()] = value
    return found


def first_line(text: str | None) -> str:
    """Return the first line of a description or docstring."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")


def shortened(text: str, length: int = 100) -> str:
    """Return a text as one line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."
