"""Hold every public class, function, method and dataclass field of the packages to a docstring."""

import ast
import functools
from collections.abc import Iterator

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow

FOLDERS = ("agentrl", "tools/agentrl_tools", "envs/agentrl_envs")
RECORDS = {"NamedTuple", "TypedDict", "BaseModel", "dataclass"}
"""Bases and decorators of classes whose annotated names are fields."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """A module and its statements at any depth; to walk through their expressions takes seconds."""
    left: list[ast.AST] = [tree]
    while left:
        yield (node := left.pop())
        left += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt | ast.ExceptHandler)]


def last_name(node: ast.expr) -> str:
    """Of a base class or a decorator, without arguments."""
    return ast.unparse(node).split("(")[0].split("[")[0].rpartition(".")[2]


@functools.cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Class name -> its bases, and its methods with a docstring; classes of one name are taken as one."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for node in (node for tree in trees().values() for node in statements(tree) if isinstance(node, ast.ClassDef)):
        bases, documented = found.setdefault(node.name, (set(), set()))
        bases |= {last_name(base) for base in node.bases} - {node.name}
        documented |= {each.name for each in node.body if isinstance(each, Function) and ast.get_docstring(each)}
    return found


@functools.cache
def contracts() -> set[str]:
    """Names of the methods that some Protocol documents."""
    return set().union(*(documented for bases, documented in classes().values() if "Protocol" in bases))


def is_contract(method: str, bases: set[str]) -> bool:
    """Whether a base class, or some Protocol, documents the method: it is described there."""
    known = [classes()[base] for base in bases if base in classes()]
    return method in contracts() or any(
        method in documented or is_contract(method, above) for above, documented in known
    )


def undocumented(body: list[ast.stmt], bases: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield `line: name` of what has no docstring. A field may also be named in the docstring of its class."""
    for node in body:
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        overloaded = "overload" in map(last_name, node.decorator_list)
        if not (overloaded or ast.get_docstring(node) or is_contract(node.name, set(bases))):
            yield f"{node.lineno}: {node.name}"
        if isinstance(node, ast.ClassDef):
            own = frozenset(map(last_name, node.bases))
            yield from undocumented(node.body, own)
            if RECORDS & {*own, *map(last_name, node.decorator_list)}:
                yield from undocumented_fields(node)


def undocumented_fields(node: ast.ClassDef) -> Iterator[str]:
    described = set((ast.get_docstring(node) or "").replace("`", " ").replace(":", " ").replace(",", " ").split())
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and not isinstance(after, ast.Expr):
            name = ast.unparse(field.target)
            if not name.startswith("_") and name not in described:
                yield f"{field.lineno}: {node.name}.{name}"


def test_what_is_public_is_documented() -> None:
    found = {path: list(undocumented(tree.body)) for path, tree in trees().items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_what_has_no_docstring_is_found() -> None:
    source = """
@dataclass
class Open:
    '''Has a `left`.'''
    left: int
    right: int
    def close(self): ...
    def own(self): ...
"""
    assert list(undocumented(ast.parse(source).body)) == ["8: own", "6: Open.right"]


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    """None begins with a mechanical `Return`."""
    documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    found = [
        f"{name}:{getattr(node, 'lineno', 1)}"
        for name, tree in trees().items()
        for node in statements(tree)
        if isinstance(node, documented) and (ast.get_docstring(node) or "").startswith("Return")
    ]
    assert found == []
