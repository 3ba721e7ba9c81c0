"""What a tool returned, bounded in tokens at a cost that does not depend on how much it returned."""

from collections.abc import Callable, Sequence

_WINDOW = 16
"""Characters a token that are looked at: a text of more than this many times its limit is cut unseen."""


def bound_text(text: str, limit: int, encode: Callable[[str], Sequence[int]]) -> str:
    """`text`, at most `limit` tokens long: a longer one loses its middle, and a note there says how many characters.

    `encode` sees at most _WINDOW x `limit` characters at once, so ten megabytes cost what ten kilobytes cost.
    """
    if len(text) <= limit and len(text.encode("utf-8", "surrogatepass")) <= limit:
        return text  # a token holds at least a byte
    window = _WINDOW * limit
    if len(text) <= window:
        tokens = len(encode(text))
        if tokens <= limit:
            return text
        keep = len(text) * limit // tokens
    else:
        sample = text[: window // 2] + text[-(window - window // 2) :]
        keep = len(sample) * limit // max(1, len(encode(sample)))
    return _cut(text, keep, limit, encode)


def _cut(text: str, keep: int, limit: int, encode: Callable[[str], Sequence[int]]) -> str:
    keep = min(keep, len(text) - 1)
    while keep > 0:
        tail = keep // 2
        note = f"\n[... {len(text) - keep} characters left out ...]\n"
        shorter = text[: keep - tail] + note + (text[-tail:] if tail else "")
        tokens = len(encode(shorter))
        if tokens <= limit:
            return shorter
        keep = min(keep - 1, keep * limit // tokens)
    return _start_of(text, limit, encode)


def _start_of(text: str, limit: int, encode: Callable[[str], Sequence[int]]) -> str:
    """For limits that have no room for a note: the first characters that fit."""
    start = text[:limit]
    while start and len(encode(start)) > limit:
        start = start[:-1]
    return start
