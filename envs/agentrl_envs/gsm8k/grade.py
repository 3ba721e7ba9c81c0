"""Reads the final answer that a text marks, as an exact number, and compares it with the truth.

An answer is marked with `#### x` or `\\boxed{x}`; the last mark counts. One mark holds one number: two numbers, as in
"5 or 6" or "3*24", are no answer, so hedging never pays and nothing is worked out for the model. A unit is ignored,
and a percent sign is a unit: 50% reads as 50. What changes the number beside it (a root, a power, pi, a second sign) is
no unit, and makes it no answer. Digits and signs of any script are read. Time is linear in the text: only the last
mark is parsed, and one above `_LONGEST` characters is no answer.
"""

import re
import unicodedata
from fractions import Fraction

_LONGEST = 200
_LARGEST_EXPONENT = 30

_NUMBER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|(?<![A-Za-z])\.[0-9]+"
_VALUE = re.compile(
    rf"(?P<sign>[-+]\s*)?(?:(?P<whole>[0-9]+)\s+(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)"
    rf"|(?P<number>{_NUMBER})(?:[eE](?P<exponent>[-+]?[0-9]+)|\s*/\s*(?P<divisor>{_NUMBER}))?)"
)
_PART = r"\s*(?:\{\s*([-+]?[0-9][0-9,.]*)\s*\}|([0-9]))"
_FRACTION = re.compile(rf"\\[dtc]?frac(?![A-Za-z]){_PART}{_PART}")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,|[\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
_MARKUP = re.compile(
    r"\\(?:(?:text|math)[a-z]*|[mhf]box|boxed|left|right|q?quad|space|displaystyle|approx|pounds|euro|rm|bf)(?![A-Za-z])"
    r"|\^?\s*\{?\s*(?:\\circ|\\degree)(?![A-Za-z])|\\[^A-Za-z]|[*_`$€£¥%{}()\[\]]"
)
_SQUARE_UNIT = re.compile(
    r"(\b(?:[mcdk]?m|in|ft|yd|mi|inch(?:es)?|feet|foot|(?:centi|kilo)?met(?:er|re)s?|yards?|miles?|units?))\s*\^\s*[23]\b"
)
_SPELLED_SIGN = re.compile(r"\b(?:minus|negative)\s+(?=[0-9.])", re.IGNORECASE)
_SAME = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–﹣－", "-"),
        **dict.fromkeys("⁄∕／", "/"),
        "＋": "+",
        "，": ",",
        "٬": ",",
        "．": ".",
        "٫": ".",
        "＝": "=",
    }
)
_CHANGES = re.compile(r"\\|[√∛∜±∓∞πφ]")  # the value of the number that it stands with
_OPERATORS = "+-/^×÷·⋅"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])(?:\s*(?P<open>\{)|(?=[ \t]*[-+−$.]*(?:\d|\\[dtc]?frac)))|\\[{}]|[{}]")
_BARE = re.compile(r"[^$}\n]*")


def read_answer(text: str) -> Fraction | None:
    """Return the number behind the last mark, exactly; None when there is no mark or not exactly one number behind
    it."""
    marked = _marked(text)
    return None if marked is None else read_number(marked)


def grade(text: str, truth: str | int | Fraction) -> bool:
    """Return whether the text's answer equals the truth. Raises ValueError when the truth is no number."""
    expected = read_truth(truth) if isinstance(truth, str) else Fraction(truth)
    return read_answer(text) == expected


def read_truth(truth: str) -> Fraction:
    """Return the truth of a data row: a number, or a worked solution that marks one. Raises ValueError for anything
    else."""
    marked = _marked(truth)
    value = read_number(truth if marked is None else marked)
    if value is None:
        raise ValueError(f"no answer in {truth[-60:]!r}: expected a number, or text that ends with '#### <number>'")
    return value


def read_number(text: str) -> Fraction | None:
    """Return the one number in a short text, as people write it: `$1,234.50`, `−3`, `1 1/2`, `\\frac{3}{4}`, `12
    apples`."""
    if len(text) > _LONGEST:
        return None
    plain = _plain(text).rpartition("=")[2]
    found = list(_VALUE.finditer(plain))
    return _value(found[0]) if len(found) == 1 and _stands_alone(plain, found[0]) else None


def hashed(text: str) -> tuple[int, str] | None:
    """Return where the last `####` stands, and what follows it on its line."""
    at = text.rfind("####")
    return None if at < 0 else (at, text[at + 4 :].partition("\n")[0])


def boxed(text: str) -> tuple[int, str] | None:
    """Where the last `\\boxed` (or `\\fbox`) stands, and what it holds: of nested ones the outermost; without braces,
    as in `\\boxed 72`, the rest of the formula or line. One that never closes is none."""
    if "box" not in text:
        return None
    last: tuple[int, int, int] | None = None  # where it stands, where its content begins and ends
    opened: list[tuple[int, int] | None] = []
    for token in _BOX.finditer(text):
        if token["open"]:
            opened.append(token.span())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}":
            if opened and (box := opened.pop()):
                last = (*box, token.start())
        elif len(token[0]) > 2:
            last = (*token.span(), _end_of_bare(text, token.end()))
    return None if last is None else (last[0], text[last[1] : last[2]])


def _end_of_bare(text: str, start: int) -> int:
    found = _BARE.match(text, start, start + _LONGEST + 1)
    return found.end() if found else start


def _marked(text: str) -> str | None:
    found = [mark for mark in (hashed(text), boxed(text)) if mark is not None]
    return max(found)[1] if found else None


def _plain(text: str) -> str:
    """Return the same number without markup, in ASCII digits, with plain signs and fractions."""
    text = _THOUSANDS.sub(",", "".join(map(_ascii, text.translate(_SAME))))
    text = _FRACTION.sub(lambda found: f" {found[1] or found[2]}/{found[3] or found[4]} ", text)
    return _SPELLED_SIGN.sub("-", _SQUARE_UNIT.sub(r"\1", _MARKUP.sub(" ", text)))


def _ascii(character: str) -> str:
    """Return a digit of any script as 0 to 9, a fraction of one character spelled out, any other as it is."""
    if character < "\x80":
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    spelled = unicodedata.normalize("NFKC", character)
    return f" {spelled.replace('⁄', '/')} " if "⁄" in spelled and len(spelled) > 1 else character


def _stands_alone(plain: str, match: re.Match[str]) -> bool:
    """Return whether nothing beside the number makes another of it: `\\sqrt{16}`, `--5`, `x/5`, `x - 5`, `5^x`,
    `5²`."""
    before, after = plain[: match.start()], plain[match.end() :]
    rest = before + " " + after
    if _CHANGES.search(rest) or before.rstrip()[-1:] in tuple(_OPERATORS) or after.lstrip()[:1] == "^":
        return False
    if (
        (sign := match["sign"])
        and before.rstrip()[-1:].isalpha()
        and (sign[-1:].isspace() or not before[-1:].isspace())
    ):
        return False
    return all(
        unicodedata.category(one) not in ("No", "Nl") or former.isalpha()  # m², but not 5²
        for former, one in zip(" " + rest, rest, strict=False)
    )


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
