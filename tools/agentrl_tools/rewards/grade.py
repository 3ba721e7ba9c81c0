"""Reads the final answer that a text marks, as an exact number, and compares it with the truth.

An answer is marked with `#### x` or `\\boxed{x}`; the last mark counts. One mark holds one number: two numbers, as in
"5 or 6" or "3*24", are no answer, so hedging never pays and nothing is worked out for the model.

| taken | no answer, since it may be another number or none |
|---|---|
| `1,234.50`, `1 234`, `.5`, `1.5e3`, `1.5 x 10^3`, any script | `1,23`, `12 34`, `0.33...`, `10^3` |
| `3/4`, `1 1/2`, `1½`, `\\frac{3}{4}` | `5 and a half`, `5 tenths`, `5 quarters`, `5th` |
| `-5`, `− 5`, `minus 5`, `profit -5` | `5 - x`, `x minus 5`, `--5`, `5-`, `\\pm 5`, `5 below` |
| a unit: `$5`, `5 km/h`, `12cm`, `5 apples`, `5-day trip`, `5%` (as 5) | `5 million`, `5 dozen`, `$5m`, `5k`, `5‰` |
| what follows `=`: `6*7 = 42`, `x = 5` | `x != 5`, `x >= 5`, `x = 5 or x = 6` |
| words: `the answer is 5.`, `No.5`, `5 a day` | `sqrt(16)`, `log 5`, `f(5)`, `twice 5`, `5 squared`, `twenty 5` |
| markup: `**5**`, `\\text{...}`, `<b>5</b>`, `(5)` | `5!`, `2pi`, `5x`, `5i`, `5^x`, `5²`, bars, other LaTeX |
| | `not 5`, `< 5`, `at least 5`, `5 or more`, `about 5`, `~5`, `5?` |

What is not known to leave a number as it is makes it no answer: a right answer that is refused costs less than a wrong
one that is taken. Time is linear in the text: only the last mark is parsed, and one above `_LONGEST` characters is no
answer.
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
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,|[\u2009\u202f]|[ \u00a0](?![0-9]{3}\s*/))(?=[0-9]{3}(?![0-9]))")
_SCIENTIFIC = re.compile(
    r"(?<=[0-9.])\s*(?:\\(?:times|cdot)(?![A-Za-z])|[xX×*·⋅])\s*10\s*"
    r"(?:(?:\^|\*\*)\s*(?:\{\s*([-+]?[0-9]{1,3})\s*\}|([-+]?[0-9]{1,3}))|([⁺⁻]?[⁰¹²³⁴-⁹]{1,3}))(?![0-9.,/^⁰¹²³⁴-⁹])"
)
_SUPERSCRIPT = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_MARKUP = re.compile(
    r"\\(?:(?:text|math)[a-z]*|[mhf]box|boxed|left|right|q?quad|space|displaystyle|pounds|euro|rm|bf)(?![A-Za-z])"
    r"|\^?\s*\{?\s*(?:\\circ|\\degree)(?![A-Za-z])|\\[^A-Za-z]|</?[A-Za-z]+>|[_`$€£¥%{}()\[\]]"
)
_EMPHASIS = re.compile(r"(\*{1,3})([^*]+)\1")
_SQUARE_UNIT = re.compile(
    r"(\b(?:[mcdk]?m|in|ft|yd|mi|inch(?:es)?|feet|foot|(?:centi|kilo)?met(?:er|re)s?|yards?|miles?|units?))\s*\^\s*[23]\b"
)
_IS = r"is|are|was|were|be|equals?|gives?|makes?|has|have|had|got"
_SPELLED_SIGN = re.compile(rf"(^|[=:]|\b(?:{_IS})\b)(\s*)(?:minus|negative)\s+(?=[0-9.])", re.IGNORECASE)
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


def _listed(words: str) -> frozenset[str]:
    return frozenset(words.split())


_CHANGES = re.compile(  # the value of the number that it stands with
    r"[A-Za-z]\(\s*[-+]?[0-9.]|[0-9]\(|[0-9]\s*(?:\.\.|…)|[∞?‰‱⌊⌋⌈⌉]|[$€£¥]\s*[0-9][0-9.,]*\s*(?:[kKmMbBtT]|mm|MM)\b"
)
_OPERATORS = "+-/^*!×÷·⋅"
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_CONNECTIVE = re.compile(rf".*(?:[:.]|\b(?:{_IS})\b)", re.IGNORECASE | re.DOTALL)
_CHANGING_WORDS = _listed(
    """
    sqrt cbrt ln lg exp sin cos tan cot csc sinh cosh tanh arcsin arccos arctan mod modulo root roots squared cubed
    factorial choose power raised multiplied divided plus minus negative infinity infinite pi tau phi theta alpha beta
    gamma delta epsilon lambda sigma omega
    hundred thousand million billion trillion quadrillion dozen lakh crore hundreds thousands millions billions
    trillions dozens lakhs crores mn bn tn mln bln mil
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    half halves quarter quarters third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths
    ninth ninths tenth tenths twentieth hundredth hundredths thousandth thousandths millionth millionths
    not never neither nor none cannot nothing isnt arent wasnt or either between least most below
    approximately approx roughly circa ish maybe perhaps probably possibly might guess unknown wrong incorrect unless
    except
    """
)
_BEFORE = _listed(
    """
    log max min abs floor ceil ceiling round gcd lcm det sec square cube twice double triple times than over under above
    about around nearly almost some near close exceeds exceeding within without no inverse reciprocal opposite negation
    complement from until till estimated
    """
)
"""Words that change the number that follows them."""
_AFTER = _listed("st nd rd th ths max maximum minimum tops")
"""Words that change the number before them."""
_UNITS = _listed(
    """
    mm cm dm km ft yd mi in lb lbs oz kg mg ml cl dl hr hrs min mins sec secs ms am pm mph kph kmh usd eur gbp cad aud
    inr cts gb mb kb tb hz khz mhz cal kw kwh mw sq gal qt pt yr yrs wk wks mo mos rpm bps deg pcs
    """
)
"""What may stand right behind a number, besides words of four letters and more."""
_UNIT_LETTERS = frozenset("mgshlLtACFVWNJdpcµμΩ")
_CURRENCIES = _listed("usd us eur gbp rs rm cad ca aud au hk nt chf sgd inr cny rmb")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])(?:\s*(?P<open>\{)|(?=[ \t]*[-+−$.]*(?:\d|\\[dtc]?frac)))|\\[{}]|[{}]")
_BARE = re.compile(r"[^$}\n]*")


def read_answer(text: str) -> Fraction | None:
    """The number behind the last mark, exactly; None when there is no mark or not exactly one number behind
    it."""
    marked = _marked(text)
    return None if marked is None else read_number(marked)


def grade(text: str, truth: str | int | Fraction) -> bool:
    """Whether the text's answer equals the truth. Raises ValueError when the truth is no number."""
    expected = read_truth(truth) if isinstance(truth, str) else Fraction(truth)
    return read_answer(text) == expected


def read_truth(truth: str) -> Fraction:
    """The truth of a data row: a number, or a worked solution that marks one. Raises ValueError for anything
    else."""
    marked = _marked(truth)
    value = read_number(truth if marked is None else marked)
    if value is None:
        raise ValueError(f"no answer in {truth[-60:]!r}: expected a number, or text that ends with '#### <number>'")
    return value


def read_number(text: str) -> Fraction | None:
    """The one number in a short text, as people write it: `$1,234.50`, `−3`, `1 1/2`, `\\frac{3}{4}`, `12
    apples`. None for anything else: see the table above."""
    if len(text) > _LONGEST or _CHANGES.search(text):
        return None
    before, equals, plain = _plain(text).rpartition("=")
    if equals and _hedged(before):
        return None
    found = list(_VALUE.finditer(plain))
    return _value(found[0]) if len(found) == 1 and _stands_alone(plain, found[0]) else None


def hashed(text: str) -> tuple[int, str] | None:
    """Where the last `####` stands, and what follows it on its line."""
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
    """The same number without markup, in ASCII digits, with plain signs, powers of ten and fractions."""
    text = "".join(map(_ascii, text.translate(_SAME)))
    text = _THOUSANDS.sub(",", _SCIENTIFIC.sub(_exponent, text))
    text = _EMPHASIS.sub(r" \2 ", text).strip(" *_`")
    text = _FRACTION.sub(lambda found: f" {found[1] or found[2]}/{found[3] or found[4]} ", text)
    return _SPELLED_SIGN.sub(r"\1\2-", _SQUARE_UNIT.sub(r"\1", _MARKUP.sub(" ", text)))


def _exponent(found: re.Match[str]) -> str:
    return "e" + (found[1] or found[2] or found[3].translate(_SUPERSCRIPT))


def _hedged(before: str) -> bool:
    """Whether what stands before the last `=` makes what follows it no answer: `x !=`, `x = 5 or x =`."""
    if before.rstrip()[-1:] in tuple("!<>/~¬≠≈"):
        return True
    words = {word.group().lower() for word in _WORD.finditer(before)}
    if any(_is_not(word) for word in words):
        return True
    several = re.search(r";|,(?![0-9]{3})", before) or words & {"or", "and"}
    return bool(several) and any(map(str.isdigit, before))


def _is_not(word: str) -> bool:
    return word in ("not", "never", "cannot") or word.endswith(("n't", "n’t"))


def _ascii(character: str) -> str:
    """A digit of any script as 0 to 9, a fraction of one character spelled out, any other as it is."""
    if character < "\x80":
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    spelled = unicodedata.normalize("NFKC", character)
    return f" {spelled.replace('⁄', '/')} " if "⁄" in spelled and len(spelled) > 1 else character


def _stands_alone(plain: str, match: re.Match[str]) -> bool:
    """Whether nothing beside the number makes another of it."""
    before, after = plain[: match.start()], plain[match.end() :]
    return _signs_leave(before, after, match["sign"]) and _words_leave(before, after, bool(match["sign"]))


def _signs_leave(before: str, after: str, sign: str | None) -> bool:
    """Whether the signs beside a number leave it as it is: not those of `x - 5`, `--5`, `5!`, `5²`."""
    rest, following = before + " " + after, after.lstrip()
    if any(unicodedata.category(one) == "Sm" or one == "\\" for one in rest):
        return False
    if before.rstrip()[-1:] in tuple(_OPERATORS) or unicodedata.category(after[:1] or " ") in ("Mn", "Me"):
        return False
    if sign and before.rstrip()[-1:].isalpha() and (sign[-1:].isspace() or not before[-1:].isspace()):
        return False
    if following[:1] in tuple(_OPERATORS):
        unit = re.match(r"-[^\W\d_]{2}", after) or re.match(r"/\s*[^\W\d_]", following)  # 5-day, $5/hour
        if unit is None:
            return False
    return all(
        unicodedata.category(one) not in ("No", "Nl") or previous.isalpha()  # m², but not 5²
        for previous, one in zip(" " + rest, rest, strict=False)
    )


def _words_leave(before: str, after: str, signed: bool) -> bool:
    """Whether the words beside a number leave it as it is: not those of `log 5`, `5 million`, `not 5`, `5x`."""
    if any(one.isalpha() and unicodedata.numeric(one, None) is not None for one in before + after):  # 万
        return False
    first, following = _words(before), _words(after)
    words = {word.lower() for word in (*first, *following)}
    if words & _CHANGING_WORDS or any(map(_is_not, words)) or {word.lower() for word in following} & _AFTER:
        return False
    if any(word.lower() in _BEFORE and not re.search(rf"\b{word}\.", before) for word in first):  # No.5
        return False
    if re.search(r"\bup\s+to\b", before, re.IGNORECASE) or following[:1] == ["and"]:
        return False
    if not signed and _cased(before[-1:]) and first[-1].lower() not in _CURRENCIES:
        return False
    attached = _cased(after[:1])
    if attached and 1 < len(following[0]) < 4 and following[0].lower() not in _UNITS:
        return False
    tail = before[found.end() :] if (found := _CONNECTIVE.match(before)) else before
    if any(len(word) == 1 and _cased(word) and word not in "aAI" for word in _words(tail)):
        return False
    letters = _UNIT_LETTERS if attached or following[-1:] == ["a"] else _UNIT_LETTERS | {"a"}  # 5 a day
    return all(len(word) > 1 or not _cased(word) or word in letters for word in following)


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _cased(letter: str) -> bool:
    """Whether it is a letter of a script that has two cases, in which a lone letter is a name."""
    return letter.lower() != letter.upper()


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if (match["sign"] or "").startswith("-") else 1
    if match["whole"]:
        over, under = int(match["over"]), int(match["under"])
        if under == 0 or (len(match["over"]) == 3 and over >= under):  # 1 234/5 may be 1234/5
            return None
        return sign * (int(match["whole"]) + Fraction(over, under))
    number = _decimal(match["number"])
    if match["divisor"]:
        divisor = _decimal(match["divisor"])
        return sign * number / divisor if divisor else None
    exponent = int(match["exponent"] or 0)
    return sign * number * Fraction(10) ** exponent if abs(exponent) <= _LARGEST_EXPONENT else None


def _decimal(text: str) -> Fraction:
    whole, _, part = text.replace(",", "").partition(".")
    return Fraction(int(whole + part or "0"), 10 ** len(part))
