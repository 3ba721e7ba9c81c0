"""A calculator: exact arithmetic on numbers as people write them, bounded in length, nesting and size.

It is a parser of its own over a handful of tokens: nothing that the model writes is ever evaluated as code. By default
it does ONE operation a call, so that a problem of several steps takes several turns. Errors are terse, because a small
model reads them.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from agentrl import Session, Tool, ToolResponse
from agentrl.plugins.types import Json

Number = int | Fraction

MAX_LENGTH = 200  # characters of an expression
MAX_DEPTH = 20  # nested brackets, signs and powers
MAX_BITS = 512  # of a numerator or denominator, about 154 digits
PLACES = 6  # decimals of a result that does not end, counted from its first digit where it is below 1
EXACT_PLACES = 12  # decimals up to which a result that ends is printed whole

_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?\.[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+"
_TOKEN = re.compile(rf"\s*(?:({_NUMBER})|(\*\*|\S))")
_PLAINEST = re.compile(rf"\s*({_NUMBER})\s*([-+*/])\s*({_NUMBER})\s*")  # what nearly every call holds
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


class CalculatorError(Exception):
    """What is wrong with an expression, in a few words for the model."""


class Calculator(Tool):
    """max_operations: how many of + - * / ^ one call may hold."""

    name = "calculator"
    description = "Works out an arithmetic expression."

    def __init__(self, max_operations: int = 1) -> None:
        if max_operations < 1:
            raise ValueError("max_operations must be 1 or more")
        self.max_operations = max_operations
        self.limit = _limit(max_operations)
        self.description = f"{self.description.rstrip('.')}, {self.limit}."
        expression = {"type": "string", "description": "such as 12*3"}
        self.parameters = {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse | str:
        try:
            value, operations = evaluate(arguments["expression"])
            if operations > self.max_operations:
                raise CalculatorError(self.limit)
        except CalculatorError as error:
            return ToolResponse(text=f"error: {error}", error=True)
        return written(value)


def evaluate(expression: str) -> tuple[Number, int]:
    """The exact value and the number of operations (signs are none). Raises CalculatorError."""
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"more than {MAX_LENGTH} characters")
    if match := _PLAINEST.fullmatch(expression):
        left, sign, right = match.groups()
        return _apply(sign, _number(left), _number(right)), 1
    parser = _Parser(_TOKEN.findall(expression.translate(_SPELLINGS)))
    return parser.whole(), parser.operations


def written(value: Number) -> str:
    """A whole number as it is, a short decimal where it ends soon, else rounded."""
    if isinstance(value, int):
        return str(value)
    top, bottom, places = abs(value.numerator), value.denominator, EXACT_PLACES
    if 10**places % bottom:
        places = PLACES + max(0, len(str(bottom)) - len(str(top)))
    scaled = (2 * top * 10**places + bottom) // (2 * bottom)
    whole, decimals = divmod(scaled, 10**places)
    digits = f"{decimals:0{places}d}".rstrip("0")
    sign = "-" if value < 0 and scaled else ""
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"


def _limit(operations: int) -> str:
    return "one operation a call" if operations == 1 else f"at most {operations} operations a call"


class _Parser:
    """Recursive descent: sum of products of signed powers of numbers and brackets. tokens: (number, sign) pairs."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.operations = 0

    def whole(self) -> Number:
        if not self.tokens:
            raise CalculatorError("empty expression")
        value = self.sum()
        if self.at < len(self.tokens):
            raise self.unexpected()
        return value

    def sum(self) -> Number:
        value = self.product()
        while (sign := self.next_of("+", "-")) is not None:
            value = self.apply(sign, value, self.product())
        return value

    def product(self) -> Number:
        value = self.signed()
        while (sign := self.next_of("*", "/")) is not None:
            value = self.apply(sign, value, self.signed())
        return value

    def signed(self) -> Number:
        sign = self.next_of("+", "-")
        if sign is None:
            return self.power()
        value = self.deeper(self.signed)
        return -value if sign == "-" else value

    def power(self) -> Number:
        value = self.single()
        if self.next_of("^", "**") is None:
            return value
        return self.apply("^", value, self.deeper(self.signed))

    def single(self) -> Number:
        if self.at == len(self.tokens):
            raise CalculatorError("it ends too early")
        number, sign = self.tokens[self.at]
        if number:
            self.at += 1
            return _number(number)
        if sign != "(":
            raise self.unexpected()
        self.at += 1
        value = self.deeper(self.sum)
        if self.next_of(")") is None:
            raise CalculatorError("missing )") if self.at == len(self.tokens) else self.unexpected()
        return value

    def deeper(self, part: Callable[[], Number]) -> Number:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise CalculatorError("nested too deeply")
        value = part()
        self.depth -= 1
        return value

    def next_of(self, *signs: str) -> str | None:
        if self.at < len(self.tokens) and (sign := self.tokens[self.at][1]) in signs:
            self.at += 1
            return sign
        return None

    def apply(self, sign: str, a: Number, b: Number) -> Number:
        self.operations += 1
        return _apply(sign, a, b)

    def unexpected(self) -> CalculatorError:
        number, sign = self.tokens[self.at]
        if number or sign in "+-*/^**()":
            return CalculatorError(f"unexpected {number or sign!r}")
        rest = "".join(n or s for n, s in self.tokens[self.at :])
        word = re.match(r"\w+|.", rest)
        return CalculatorError(f"not a number: {word.group()[:12] if word else sign!r}")


def _number(text: str) -> Number:
    whole, point, part = text.replace(",", "").partition(".")
    return _plain(Fraction(int(whole + part), 10 ** len(part)) if point else int(whole))


def _apply(sign: str, a: Number, b: Number) -> Number:
    match sign:
        case "+":
            value = a + b
        case "-":
            value = a - b
        case "*":
            value = a * b
        case "/":
            value = _quotient(a, b)
        case _:
            value = _power(a, b)
    return _plain(value)


def _quotient(a: Number, b: Number) -> Number:
    if b == 0:
        raise CalculatorError("division by zero")
    if isinstance(a, int) and isinstance(b, int):
        whole, rest = divmod(a, b)
        return Fraction(a, b) if rest else whole
    return Fraction(a) / b


def _power(base: Number, exponent: Number) -> Number:
    if not isinstance(exponent, int):
        raise CalculatorError("the exponent must be a whole number")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    bits = max(abs(base.numerator), base.denominator, 1).bit_length() - 1
    if abs(exponent) > 10 * MAX_BITS or bits * abs(exponent) > MAX_BITS:
        raise CalculatorError("too large")
    return Fraction(base) ** exponent


def _plain(value: Number) -> Number:
    """An int where it is whole. Raises CalculatorError where it is too large to go on with."""
    if isinstance(value, int):
        numerator, denominator = value, 1
    else:
        numerator, denominator = value.numerator, value.denominator
    if numerator.bit_length() > MAX_BITS or denominator.bit_length() > MAX_BITS:
        raise CalculatorError("too large")
    return numerator if denominator == 1 else value
