"""Mutations of a function in its syntax tree: mistakes that people make. All but the mistake keeps its form."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(), ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(), ast.NotIn: ast.In(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is(),
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Add(), ast.FloorDiv: ast.Mod(), ast.Mod: ast.FloorDiv(),
    ast.Div: ast.Mult(), ast.Pow: ast.Mult(), ast.BitAnd: ast.BitOr(), ast.BitOr: ast.BitAnd(),
    ast.LShift: ast.RShift(), ast.RShift: ast.LShift(),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutation:
    """A part of a file that is replaced."""

    kind: str
    """The mistake, in a word."""
    line: int
    """Where it begins, from 1."""
    start: int
    """First byte."""
    end: int
    """First byte after it."""
    text: str
    """What stands there instead."""

    def applied(self, source: str) -> str:
        """The file with the mistake."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def functions(source: str) -> dict[str, ast.FunctionDef]:
    """The functions at the top of a module, by name; of several of one name the last. Raises SyntaxError."""
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def mutations(source: str, function: ast.FunctionDef) -> list[Mutation]:
    """Every mutation of a function of `source`, in the order of the file."""
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    found = []
    for node, kind, text in _visited(function):
        end_line, end = node.end_lineno or 0, node.end_col_offset or 0
        place = starts[node.lineno - 1] + node.col_offset, starts[end_line - 1] + end
        found.append(Mutation(kind, node.lineno, *place, text))
    return sorted(set(found), key=lambda one: (one.start, one.end, one.text))


Change = tuple[ast.expr | ast.stmt, str, str]


def _visited(function: ast.FunctionDef) -> Iterator[Change]:
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring
    for default in [*function.args.defaults, *(one for one in function.args.kw_defaults if one is not None)]:
        if isinstance(default, ast.Constant):
            yield from ((node, "default", text) for node, _, text in _constants(default))
    pending: list[ast.AST] = list(reversed(body))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.JoinedStr | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue  # positions inside of f-strings are not the file's before Python 3.12
        yield from _of(node)
        skipped = [node.annotation] if isinstance(node, ast.AnnAssign) else []
        pending += [child for child in ast.iter_child_nodes(node) if child not in skipped]


def _of(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, "comparison", _text(ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]], node.comparators))
    elif isinstance(node, ast.BoolOp):
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield node, "boolean", f"({_text(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, "boolean", f"({_text(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield node, "operator", f"({_text(ast.BinOp(node.left, _OPERATORS[type(node.op)], node.right))})"
    elif isinstance(node, ast.If) and not isinstance(node.test, ast.Constant):
        yield node.test, "branch", "False"
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args):
        yield node, "arguments", _text(ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords))
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield node, "return", _text(node.value)
    elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        yield node, "operator", _text(ast.AugAssign(node.target, _OPERATORS[type(node.op)], node.value))
    elif isinstance(node, ast.Constant):
        yield from _constants(node)


def _constants(node: ast.Constant) -> Iterator[Change]:
    value = node.value
    if isinstance(value, bool):
        yield node, "boolean", repr(not value)
    elif isinstance(value, int):
        yield node, "off_by_one", repr(value + 1)
        if value > 0:
            yield node, "off_by_one", repr(value - 1)
    elif isinstance(value, str) and value and "\n" not in value:
        yield node, "constant", repr(value[:-1])


def _text(node: ast.AST) -> str:
    return ast.unparse(node)
