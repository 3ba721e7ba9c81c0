"""The tool server, which verifiers starts as a program of its own."""

from fractions import Fraction
from typing import Annotated

from pydantic import Field
from verifiers import v1 as vf

WORKS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


class Uses(vf.State):
    uses: int = 0


class Calculator(vf.Toolset[vf.SharedToolsetConfig, Uses]):
    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: Annotated[str, Field(description="such as 12*3")]) -> str:
        """Works out an arithmetic expression, one operation a call."""
        self.state.uses += 1
        for sign, work in WORKS.items():
            left, found, right = expression.strip().partition(sign)
            if found and left:
                try:
                    value = work(Fraction(left.strip()), Fraction(right.strip()))
                except (ValueError, ZeroDivisionError):
                    return "error: expected two numbers"
                return str(value) if value.denominator == 1 else f"{float(value):g}"
        return "error: one operation a call"


if __name__ == "__main__":
    Calculator.run()
