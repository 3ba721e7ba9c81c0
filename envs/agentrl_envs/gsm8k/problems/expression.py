"""Arithmetic as a tree, and the single operations that a one-operation calculator needs for it, in order."""

import ast
from collections.abc import Mapping

Expression = int | tuple[str, "Expression", "Expression"]

_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def parse(formula: str, numbers: Mapping[str, int]) -> Expression:
    """The tree of a formula such as `n + a*c - m`, its names replaced by numbers."""
    return _tree(ast.parse(formula, mode="eval").body, numbers)


def _tree(node: ast.expr, numbers: Mapping[str, int]) -> Expression:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)], _tree(node.left, numbers), _tree(node.right, numbers)
    if isinstance(node, ast.Name):
        return numbers[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(f"not part of a formula: {ast.dump(node)}")


def apply(operator: str, left: int, right: int) -> int:
    """Apply one operation. Raises ArithmeticError when the result is not a whole number."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    quotient, rest = divmod(left, right)
    if rest:
        raise ArithmeticError(f"{left}/{right} is not whole")
    return quotient


def steps(expression: Expression) -> tuple[tuple[str, int], ...]:
    """The operations in the order a person does them: `(("12*7", 84), ("84+5", 89))`. The last result is the
    value."""
    done: list[tuple[str, int]] = []

    def value(node: Expression) -> int:
        if isinstance(node, int):
            return node
        operator, left, right = node[0], value(node[1]), value(node[2])
        result = apply(operator, left, right)
        done.append((f"{left}{operator}{right}", result))
        return result

    value(expression)
    return tuple(done)


_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


def show(expression: Expression) -> str:
    """The whole tree as one line, with the brackets that it needs: `(12+7)*3`."""
    return _show(expression, 0)


def _show(node: Expression, binding: int) -> str:
    if isinstance(node, int):
        return str(node)
    operator, left, right = node
    own = _PRECEDENCE[operator]
    text = f"{_show(left, own)}{operator}{_show(right, own + 1)}"
    return f"({text})" if own < binding else text
