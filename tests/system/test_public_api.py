"""Hold what is public, as `docs/reference/api.md` lists it: names, signatures, plugin groups, commands, file formats.

    python tests/system/test_public_api.py > docs/reference/api.md

writes the page anew. Whoever changes a line that stood there names it in the changelog.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import agentrl
import agentrl.testing
from agentrl.checkpoint.run_folder import FORMAT
from agentrl.recipe.schema import Recipe
from agentrl.rollout.trajectory_file import VERSION

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "api.md"
HEAD = """# Public API

What stands here is public: it changes with a version, and `CHANGELOG.md` names what
breaks. Everything else is internal and may move at any time. The page is written by
`python tests/system/test_public_api.py > docs/reference/api.md`, and a test holds the code to it.
"""
FORMATS = f"""
## Files

| what | version | read |
|---|---|---|
| a run's folder (`recipe.yaml`, its first line) | {FORMAT} | those before too |
| [trajectories](trajectories.md) (metadata `agentrl.trajectories`) | {VERSION} | those before too |
| [recipes](recipe.md), [metrics](metrics.md) | of agentrl | unknown keys are refused, unknown metrics kept |
"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def signature(node: Function) -> str:
    """Of a function, without `self` or `cls`; a default that is computed is written `...`."""
    arguments = node.args
    for some in (arguments.posonlyargs, arguments.args):
        if some and some[0].arg in ("self", "cls"):
            del some[0]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{kind} {node.name}({ast.unparse(arguments)}){returns}"


def members(node: ast.ClassDef) -> Iterator[str]:
    """What of a class is public: constructor, fields, methods and properties."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            default = f" = {ast.unparse(each.value)}" if each.value is not None else ""
            yield f"{each.target.id}: {ast.unparse(each.annotation)}{default}"
        elif isinstance(each, Function) and (each.name[0] != "_" or each.name == "__init__"):
            decorators = [ast.unparse(one) for one in each.decorator_list]
            if "property" in decorators:
                yield "@property"
            if "overload" not in decorators:
                yield signature(each)


def described(name: str, value: object) -> str:
    """A name of a module as Python would declare it."""
    if value is Recipe:
        return f"class {name}  # its fields: the recipe reference"
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return name
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    if isinstance(node, Function):
        return signature(node)
    assert isinstance(node, ast.ClassDef)
    return "\n".join([f"class {name}:", *(f"    {line}" for line in members(node))])


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for module in (agentrl, agentrl.testing):
        declared = "\n\n".join(described(name, getattr(module, name)) for name in sorted(module.__all__))
        parts.append(f"\n## `{module.__name__}`\n\n```python\n{declared}\n```\n")
    with (ROOT / "pyproject.toml").open("rb") as file:
        groups = tomllib.load(file)["project"]["entry-points"]
    rows = "".join(
        f"| `{group}` | {', '.join(f'`{name}`' for name in sorted(groups[group]))} |\n" for group in sorted(groups)
    )
    parts.append(f"\n## Entry points\n\n| group | what ships |\n|---|---|\n{rows}")
    parts.append(f"\n## Commands\n\n{', '.join(f'`agentrl {name}`' for name in commands())}\n")
    return "".join([*parts, FORMATS])


def commands() -> list[str]:
    """Names of the commands of `agentrl`."""
    app = importlib.import_module("agentrl.cli.main").app
    typer = importlib.import_module("typer.main")
    return sorted(typer.get_command(app).commands)


def test_what_is_public_is_what_the_page_lists() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "name what breaks in CHANGELOG.md, then: python tests/system/test_public_api.py > docs/reference/api.md"
    )


def test_the_version_stands_in_the_changelog() -> None:
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert any(agentrl.__version__ in head for head in heads)


if __name__ == "__main__":
    sys.stdout.write(page())
