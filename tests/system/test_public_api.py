"""Hold what is public, as `docs/reference/api.md` lists it: names, signatures, plugin groups, commands, file formats.

    python tests/system/test_public_api.py > docs/reference/api.md

writes the page anew, and `python tests/system/test_public_api.py pages` those of `docs/reference/python/`, which hold
the docstrings of the same names. Whoever changes a line that stood on the first names it in the changelog.
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
PAGES = ROOT / "docs" / "reference" / "python"
TOPICS = {
    "running": ("Run, evaluate, compare", ("Recipe", "compare", "evaluate", "sft", "train")),
    "plugins": (
        "What you write",
        (
            "Agent",
            "Engine",
            "Environment",
            "GroupReward",
            "LazyTasks",
            "Reward",
            "Tool",
            "ToolSource",
            "Tracker",
            "span",
            "tool",
        ),
    ),
    "values": ("What hooks get and give", ()),  # every other name
    "testing": ("Tests for plugins", ()),  # those of agentrl.testing
}
"""The pages of docstrings: file -> its title, and the names on it."""
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


def told(node: ast.AST) -> str:
    """The docstring of a class or function as a page has it."""
    assert isinstance(node, ast.ClassDef | Function)
    text = ast.get_docstring(node) or ""
    return f"\n{text}\n" if text else ""


def fields(node: ast.ClassDef) -> Iterator[str]:
    """The public fields of a class, each with the docstring below it."""
    for each, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            default = f" = {ast.unparse(each.value)}" if each.value is not None else ""
            line = f"- `{each.target.id}: {ast.unparse(each.annotation)}{default}`"
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            yield f"{line}: {' '.join(text.split())}\n" if isinstance(text, str) else f"{line}\n"


def entry(module: str, name: str, value: object) -> str:
    """A name with its docstring, its fields and its methods."""
    head = f"\n## {name}\n\n`from {module} import {name}`\n"
    if value is Recipe:
        return f"{head}\nA run, checked. Its fields are the sections of [a recipe](../recipe.md).\n"
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return head
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    if isinstance(node, Function):
        text = told(node)
        return f"{head}\n```python\n{signature(node)}\n```\n{text}"
    assert isinstance(node, ast.ClassDef)
    parts = [head, told(node)]
    if listed := list(fields(node)):
        parts.append("\n" + "".join(listed))
    for each in node.body:
        if isinstance(each, Function) and each.name[0] != "_":
            decorators = [ast.unparse(one) for one in each.decorator_list]
            if "overload" not in decorators:
                text = told(each)
                parts.append(f"\n### {name}.{each.name}\n\n```python\n{signature(each)}\n```\n{text}")
    return "".join(parts)


def reference_pages() -> dict[str, str]:
    """The pages of docstrings as they should be, by file."""
    named = {name for _, names in TOPICS.values() for name in names}
    found = {}
    for file, (title, names) in TOPICS.items():
        module = agentrl.testing if file == "testing" else agentrl
        chosen = names or sorted(set(module.__all__) - (named if module is agentrl else set()))
        entries = (entry(module.__name__, name, getattr(module, name)) for name in chosen)
        made_by = "Written from docstrings by `python tests/system/test_public_api.py pages`."
        found[f"{file}.md"] = f"# {title}\n\n{made_by}\n{''.join(entries)}"
    return found


def commands() -> list[str]:
    """Names of the commands of `agentrl`."""
    app = importlib.import_module("agentrl.cli.main").app
    typer = importlib.import_module("typer.main")
    return sorted(typer.get_command(app).commands)


def test_what_is_public_is_what_the_page_lists() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "name what breaks in CHANGELOG.md, then: python tests/system/test_public_api.py > docs/reference/api.md"
    )


def test_the_pages_of_docstrings_are_those_of_the_code() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    assert pages == reference_pages(), "write them anew: python tests/system/test_public_api.py pages"


def test_every_public_name_stands_on_a_page_of_docstrings() -> None:
    heads = re.findall(r"^## (\w+)$", "".join(reference_pages().values()), re.MULTILINE)
    assert sorted(heads) == sorted([*agentrl.__all__, *agentrl.testing.__all__])


def test_the_version_stands_in_the_changelog() -> None:
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert any(agentrl.__version__ in head for head in heads)


if __name__ == "__main__":
    if sys.argv[1:] == ["pages"]:
        PAGES.mkdir(exist_ok=True)
        for file, text in reference_pages().items():
            (PAGES / file).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(page())
