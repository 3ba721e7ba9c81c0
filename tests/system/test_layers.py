"""Hold imports to one strict downward order, and modules to no circle: lazy and type-checking imports included."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "agentrl"

ROOMS = (
    "cli", "audit", "doctor", "fine_tuning", "offline", "training", "distributed", "profiling", "testing", "learner",
    "view", "eval",
    "rollout", "gateway", "compute", "checkpoint", "engine", "weights", "trajectory", "data", "chat", "algo",
    "models",
    "plugins", "cluster", "recipe", "scaffold", "constraint", "images", "remote", "terminal", "http_server",
    "workspace", "containment", "addresses", "jsonable", "errors", "secrets",
)  # fmt: skip
"""From the top; a room imports itself and what lies below it, nothing else."""

FACADE = "__init__.py"  # of agentrl itself: the names that it offers come from everywhere
SHIPPED = {"agentrl_tools", "agentrl_envs", "tools", "envs"}


@functools.cache
def import_nodes(source: str) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a module, at whatever depth."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import in a module of `package`."""
    for node in import_nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        else:
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def mistakes(source: str, place: str) -> list[str]:
    """List what a module at `place` (dotted, below agentrl) imports although it must not."""
    mine = ROOMS.index(place.split(".")[0])
    found = []
    for line, module in imported(source, f"agentrl.{place}".rpartition(".")[0]):
        top, _, rest = module.partition(".")
        room = rest.split(".")[0]
        if top in SHIPPED:
            found.append(f"{place}:{line} imports {module}, which is a plugin")
        elif top == "agentrl" and room in ROOMS and ROOMS.index(room) < mine:
            found.append(f"{place}:{line} imports {module}, which lies above it")
    return found


def dotted(path: Path, package: Path = PACKAGE) -> str:
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / FACADE}
PLUGINS = {
    dotted(path, folder): path for folder in (ROOT / "tools", ROOT / "envs") for path in sorted(folder.rglob("*.py"))
}
"""The modules of what ships: `agentrl_tools`, which the environments use, and `agentrl_envs`, which it does not."""


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others."""
    reach = {module: set(targets) for module, targets in imports.items()}
    for middle in reach:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    return sorted({tuple(sorted(b for b in reach[a] if a in reach[b])) for a in reach if a in reach[a]})  # type: ignore[misc]


def own_imports(place: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    package = place if path.name == "__init__.py" else place.rpartition(".")[0]
    names = {name for _, name in imported(path.read_text(encoding="utf-8"), package)}
    return {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys() - {place}


def test_every_room_has_its_place() -> None:
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES.values()} == set(ROOMS)


def test_the_architecture_page_lists_the_rooms_in_their_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\| `agentrl/(\w+)(?:/|\.py)` \|", page, re.M)) == ROOMS


@pytest.mark.slow
def test_imports_run_downwards_only() -> None:
    assert len(MODULES) > 80
    found = []
    for place, path in MODULES.items():
        found += mistakes(path.read_text(encoding="utf-8"), place)
    assert found == []


@pytest.mark.slow
def test_no_modules_import_each_other() -> None:
    modules = {f"agentrl.{place}": path for place, path in MODULES.items()} | PLUGINS
    imports = {place: own_imports(place, path, modules) for place, path in modules.items()}
    assert "agentrl_tools.rewards.grade" in imports["agentrl_envs.gsm8k.environment"]
    assert circles(imports) == []


@pytest.mark.slow
def test_shipped_tools_know_no_environment() -> None:
    found = [
        f"{place}:{line} imports {module}"
        for place, path in PLUGINS.items()
        for line, module in imported(path.read_text(encoding="utf-8"), place.rpartition(".")[0])
        if place.startswith("agentrl_tools") and module.startswith("agentrl_envs")
    ]
    assert found == []


@pytest.mark.slow
def test_rollouts_without_a_model_in_their_process_need_no_torch() -> None:
    """It takes longer to import than an audit, or the test of an environment, takes otherwise."""
    code = (
        "import sys, agentrl.audit.run, agentrl.testing, agentrl.offline.env_server; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [("a", "b", "c")]


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("from agentrl.training.run import train", "rollout.player"),
        ("import agentrl.cli.main", "training.run"),
        ("from agentrl import training", "eval.evaluate"),
        ("from agentrl.rollout import driver", "engine.local.engine"),
        ("def f():\n    from agentrl.engine.base import Engine", "recipe.schema"),
        ("if TYPE_CHECKING:\n    from agentrl.learner.learner import Learner", "compute.batch"),
        ("from ..training import run", "rollout.player"),
        ("from agentrl_tools.calculator import Calculator", "cli.check"),
        ("def f():\n    import agentrl_envs.gsm8k", "eval.evaluate"),
    ],
)
def test_a_wrong_import_is_found(source: str, place: str) -> None:
    assert len(mistakes(source, place)) == 1


@pytest.mark.parametrize("source", ["from agentrl import __version__", "import torch", "from agentrl.algo import loss"])
def test_a_right_import_is_not(source: str) -> None:
    assert mistakes(source, "algo.registry") == []
