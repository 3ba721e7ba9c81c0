"""Measure the house: what a step of the main recipe executes, and what the code is made of.

    python scripts/house.py          # half a minute; the second of three small steps is traced, line by line

The limits are those that the project has set itself; the exit code is 1 where one of them is passed.
"""

import ast
import io
import re
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agentrl", "tools/agentrl_tools", "envs/agentrl_envs")
SMALL = ("train.steps=3", "rollout.tasks=8", "rollout.n=4", "eval.every=0", "eval.before=false", "eval.tasks=2")
MANY = 20
"""A file counts as one that a reader goes through if a step executes more lines of it."""
LIMITS = {
    f"files with more than {MANY} executed lines": 35,
    "lines executed in a step": 3000,
    "scalar recipe keys": 240,
    "longest function, lines": 60,
    "`Any` a thousand logical lines": 8,
    "docstrings that begin with `Return`": 0,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def executed(recipe: str) -> dict[str, set[int]]:
    """Lines of `agentrl/` that the second step of a small run executes, in any of its threads, by file."""
    package = str(ROOT / "agentrl") + "/"
    lines: dict[str, set[int]] = defaultdict(set)
    active = False

    def local(frame: FrameType, event: str, _: object) -> Any:
        if active and event == "line":
            lines[frame.f_code.co_filename.removeprefix(package)].add(frame.f_lineno)
        return local

    def of_call(frame: FrameType, event: str, _: object) -> Any:
        return local if frame.f_code.co_filename.startswith(package) else None

    from agentrl import train
    from agentrl.training.loop import Loop

    one_step: Callable[[Loop], None] = Loop._one_step

    def traced(loop: Loop) -> None:
        nonlocal active
        active = loop.step == 1
        try:
            one_step(loop)
        finally:
            active = False

    Loop._one_step = traced  # type: ignore[method-assign]
    threading.settrace(of_call)
    sys.settrace(of_call)
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(recipe, overrides=[*SMALL, f"output={folder}/run"])
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        Loop._one_step = one_step  # type: ignore[method-assign]
    return lines


@cache
def sources() -> dict[str, str]:
    """The text of every module, by its path."""
    files = (path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every node of every module."""
    return [(name, node) for name, text in sources().items() for node in ast.walk(ast.parse(text))]


def logical_lines(text: str) -> int:
    """Statements, as Python's tokenizer ends them."""
    return sum(token.type == tokenize.NEWLINE for token in tokenize.generate_tokens(io.StringIO(text).readline))


def scalar_keys() -> int:
    """Keys of a recipe that hold a value, and are no section."""
    from agentrl.recipe.mistakes import known_fields
    from agentrl.recipe.schema import Recipe

    keys = known_fields(Recipe, lists=True)
    return sum(not any(other.startswith(f"{key}.") for other in keys) for key in keys)


def functions() -> Iterator[tuple[int, str]]:
    """Lines of each function without its docstring, and where it stands."""
    for name, node in nodes():
        if isinstance(node, Function) and node.end_lineno is not None:
            first = node.body[1:2] if ast.get_docstring(node) and len(node.body) > 1 else node.body[:1]
            yield node.end_lineno - first[0].lineno + 1, f"{name}:{node.lineno} {node.name}"


def mechanical() -> int:
    """Docstrings whose first word is `Return`."""
    documented = (node for _, node in nodes() if isinstance(node, Function | ast.ClassDef | ast.Module))
    return sum((ast.get_docstring(node) or "").startswith("Return") for node in documented)


def private_in_tests() -> int:
    """Uses of another object's private attribute in the tests."""
    found = 0
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            own = (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            )
            found += isinstance(node, ast.Attribute) and not own and bool(re.match(r"_[a-z]", node.attr))
    return found


def main() -> int:
    """Print the table."""
    lines = executed("gsm8k_tool")
    many = {name: len(found) for name, found in lines.items() if len(found) > MANY}
    logical = Counter({name: logical_lines(text) for name, text in sources().items()})
    anys = sum(isinstance(node, ast.Name) and node.id == "Any" for _, node in nodes())
    by_length = sorted(functions(), reverse=True)
    values: dict[str, float] = {
        "files executed in a step": len(lines),
        f"files with more than {MANY} executed lines": len(many),
        "lines executed in a step": sum(map(len, lines.values())),
        "scalar recipe keys": scalar_keys(),
        "modules": len(sources()),
        "logical lines": sum(logical.values()),
        "longest function, lines": by_length[0][0],
        "`Any` a thousand logical lines": round(1000 * anys / sum(logical.values()), 1),
        "docstrings that begin with `Return`": mechanical(),
        "private attributes in tests": private_in_tests(),
    }
    print()
    for name, value in values.items():
        limit = LIMITS.get(name)
        said = "" if limit is None else f"   at most {limit}{'' if value <= limit else ', passed'}"
        print(f"{name:45}{value:>9,}{said}")
    print("\nlongest functions:")
    for length, where in by_length[:8]:
        print(f"{length:>6}  {where}")
    print("\nlines a step executes, by file:")
    for name, count in sorted(many.items(), key=lambda item: -item[1]):
        print(f"{count:>6}  {name}")
    return int(any(values[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
