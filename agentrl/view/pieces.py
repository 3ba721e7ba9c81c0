"""The text of each token, by a tokenizer.json alone: neither torch nor transformers is imported."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import UserError, contained

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BROKEN = "\ufffd"  # what a decoder writes where bytes are no whole character
_WINDOW = 6  # tokens that one character is spread over, at most
_SPACE = "\u2581"  # a space, as SentencePiece writes it


def reader(path: Path) -> Callable[[Sequence[int]], list[str]]:
    """A function from token ids to the text of each. Raises UserError: the file is damaged.

    Of a character that is spread over tokens, the last one has it, and the others are empty.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:
        contained(error)
        raise UserError(f"{path}: cannot be read as a tokenizer") from error
    return lambda ids: _texts(tokenizer, ids)


def _texts(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[str]:
    found: list[str] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = _text(tokenizer, waiting)
        if _BROKEN in text and len(waiting) < _WINDOW:
            found.append("")
            continue
        found.append(text)
        waiting = []
    if waiting:
        found[-1] = _text(tokenizer, waiting)
    return found


def _text(tokenizer: "Tokenizer", ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    name = tokenizer.id_to_token(ids[0])
    if name is None:
        return f"<{ids[0]}>"
    return f" {text}" if name.startswith(_SPACE) and not text.startswith(" ") else text
