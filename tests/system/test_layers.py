"""Imports run downwards only, inside functions too; what ships is found like a stranger's package."""

import ast
from collections.abc import Iterator

import pytest
from paths import ROOT

PACKAGE = ROOT / "agentrl"

LAYERS = (
    ("cli",),
    ("training", "testing"),
    ("report",),
    ("eval",),
    ("rollout",),
    ("data", "engine", "models", "cluster"),
    ("plugins", "chat", "algo"),
    ("recipe", "scaffold"),
    ("terminal",),
    ("errors", "threads"),
)
"""From the top; a package imports itself, its neighbours in a layer, and what lies below."""

HEIGHT = {name: len(LAYERS) - depth for depth, layer in enumerate(LAYERS) for name in layer}
FACADE = "__init__.py"  # of agentrl itself: the names that it offers come from everywhere
SHIPPED = {"agentrl_tools", "agentrl_envs", "tools", "envs"}


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in a module of `package`, at whatever depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            yield node.lineno, ".".join([*base, *filter(None, [node.module])])
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def mistakes(source: str, place: str) -> list[str]:
    """What a module at `place` (dotted, below agentrl) imports although it must not."""
    mine = HEIGHT[place.split(".")[0]]
    found = []
    for line, module in imported(source, f"agentrl.{place}".rpartition(".")[0]):
        top, _, rest = module.partition(".")
        if top in SHIPPED:
            found.append(f"{place}:{line} imports {module}, which is a plugin")
        elif top == "agentrl" and (theirs := HEIGHT.get(rest.split(".")[0], 0)) > mine:
            found.append(f"{place}:{line} imports {module}, {theirs - mine} up")
    return found


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / FACADE)


def test_every_package_has_its_layer() -> None:
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES} == set(HEIGHT)


def test_imports_run_downwards_only() -> None:
    assert len(MODULES) > 80
    found = []
    for path in MODULES:
        place = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found += mistakes(path.read_text(encoding="utf-8"), place)
    assert found == []


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("from agentrl.training.run import train", "rollout.player"),
        ("import agentrl.cli.main", "training.run"),
        ("from agentrl import training", "eval.evaluate"),
        ("from agentrl.rollout import driver", "engine.local.engine"),
        ("def f():\n    from agentrl.engine.base import Engine", "recipe.schema"),
        ("from ..training import run", "rollout.player"),
        ("from agentrl_tools.calculator import Calculator", "cli.check"),
        ("def f():\n    import agentrl_envs.gsm8k", "eval.evaluate"),
    ],
)
def test_a_wrong_import_is_found(source: str, place: str) -> None:
    assert len(mistakes(source, place)) == 1


@pytest.mark.parametrize("source", ["from agentrl import __version__", "import torch", "from agentrl.chat import base"])
def test_a_right_import_is_not(source: str) -> None:
    assert mistakes(source, "algo.registry") == []
