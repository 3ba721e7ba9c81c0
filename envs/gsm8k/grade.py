"""Reads the final answer that a text marks, as an exact number, and compares it with the truth.

An answer is marked with `#### x` or `\\boxed{x}`; the last mark counts. One mark holds one number: two numbers, as in
"5 or 6", are no answer, so hedging never pays. A unit is ignored, and a percent sign is a unit: 50% reads as 50.
Time is linear in the text: only the last mark's line is parsed, and a line above `_LONGEST` characters is no answer.
"""

import re
import unicodedata
from fractions import Fraction

_LONGEST = 200
_LARGEST_EXPONENT = 30

_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_VALUE = re.compile(
    rf"(?P<sign>[-+]\s*)?(?:(?P<whole>[0-9]+)\s+(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)"
    rf"|(?P<number>{_NUMBER})(?:[eE](?P<exponent>[-+]?[0-9]+)|\s*/\s*(?P<divisor>{_NUMBER}))?)"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\b|\\[,;:!% $]|[*_`$€£¥%{}()\[\]]")
_MINUS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-", "⁄": "/"})


def read_answer(text: str) -> Fraction | None:
    """The number behind the last mark, exactly; None when there is no mark or not exactly one number behind it."""
    marked = _marked(text)
    return None if marked is None else read_number(marked)


def grade(text: str, truth: str | int | Fraction) -> bool:
    """Whether the text's answer equals the truth. Raises ValueError when the truth is no number."""
    expected = read_truth(truth) if isinstance(truth, str) else Fraction(truth)
    return read_answer(text) == expected


def read_truth(truth: str) -> Fraction:
    """The truth of a data row: a number, or a worked solution that marks one. Raises ValueError for anything else."""
    marked = _marked(truth)
    value = read_number(truth if marked is None else marked)
    if value is None:
        raise ValueError(f"no answer in {truth[-60:]!r}: expected a number, or text that ends with '#### <number>'")
    return value


def read_number(text: str) -> Fraction | None:
    """The one number in a short text, as people write it: `$1,234.50`, `−3`, `1 1/2`, `\\frac{3}{4}`, `12 apples`."""
    if len(text) > _LONGEST:
        return None
    found = list(_VALUE.finditer(_plain(text.rpartition("=")[2])))
    return _value(found[0]) if len(found) == 1 else None


def _marked(text: str) -> str | None:
    hashes, box = text.rfind("####"), text.rfind("\\boxed{")
    if hashes < 0 and box < 0:
        return None
    if box > hashes:
        return _braced(text, box + len("\\boxed{"))
    start = hashes + len("####")
    end = text.find("\n", start)
    return text[start:] if end < 0 else text[start:end]


def _braced(text: str, start: int) -> str:
    """What stands before the brace that closes the one before `start`; the rest of the text when none does."""
    depth = 1
    for at in range(start, min(len(text), start + _LONGEST + 1)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return text[start:]


def _plain(text: str) -> str:
    """The same number without markup, with plain minus signs and fractions."""
    text = "".join(_vulgar(c) for c in text).translate(_MINUS).replace("{,}", ",")
    text = _FRACTION.sub(r" \1/\2 ", text)
    return _MARKUP.sub("", text)


def _vulgar(character: str) -> str:
    """A fraction of one character, such as the half, spelled out; any other character as it is."""
    spelled = unicodedata.normalize("NFKC", character)
    return f" {spelled}" if "⁄" in spelled and len(spelled) > 1 else character


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if (match["sign"] or "").startswith("-") else 1
    if match["whole"]:
        under = int(match["under"])
        return sign * (int(match["whole"]) + Fraction(int(match["over"]), under)) if under else None
    number = _decimal(match["number"])
    if match["divisor"]:
        divisor = _decimal(match["divisor"])
        return sign * number / divisor if divisor else None
    exponent = int(match["exponent"] or 0)
    return sign * number * Fraction(10) ** exponent if abs(exponent) <= _LARGEST_EXPONENT else None


def _decimal(text: str) -> Fraction:
    whole, _, part = text.replace(",", "").partition(".")
    return Fraction(int(whole + part or "0"), 10 ** len(part))
