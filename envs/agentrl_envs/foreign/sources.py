"""The reviewed table of `agentrl env add`: sources of environments, and the exact packages of each."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from agentrl.errors import UserError
from agentrl.plugins.source import Source
from agentrl.plugins.types import Json

PINS = Path(__file__).parent / "pins"
_OWN = ("harbor", "nemo_gym", "openenv", "textarena")  # tasksets that verifiers 0.4 brings, and looks for first
_FEW = 4  # tasks for training of a set that has no split for it


class Verifiers(Source):
    """Tasksets of verifiers 0.4, from a folder that the user names."""

    about = "a taskset of verifiers 0.4, from its folder"
    what = "PATH"
    pins = PINS / "verifiers.txt"

    def folder(self, what: str) -> Path | None:
        path = _folder(what)
        return path if (path / "pyproject.toml").is_file() else None

    def sections(self, what: str, python: str) -> Mapping[str, Json]:
        path = _folder(what)
        packaged = (path / "pyproject.toml").is_file()
        if not packaged and not (path / "__init__.py").is_file():
            raise UserError(f"{what}: expected a package: a folder with a pyproject.toml, or with an __init__.py")
        called = _project(path) if packaged else path.name
        name = called.replace("-", "_").lower()  # as verifiers imports it
        if name in _OWN:
            raise UserError(f"{what}: verifiers would load its own taskset {name!r} instead: rename this one")
        if not packaged and name != called:
            raise UserError(f"{what}: verifiers imports {name!r}: rename the folder to that")
        args: dict[str, Json] = {"config": {"taskset": {"id": name}}}
        if not packaged:
            args["path"] = str(path.parent)
        given = {"python": python, "module": "verifiers", "args": args}
        return {"env": {"name": "foreign", "args": given}, "agent": {"name": "foreign", "args": given}}


def _project(path: Path) -> str:
    """The name of a project, by which its module is imported: its folder may be called otherwise. Raises UserError."""
    file = path / "pyproject.toml"
    try:
        name = tomllib.loads(file.read_text("utf-8")).get("project", {}).get("name")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    if not isinstance(name, str):
        raise UserError(f"{file}: expected `name` under [project]")
    return name


def _folder(what: str, kind: str = "a taskset's folder") -> Path:
    """The folder that `what` names. Raises UserError: nothing is installed by a name that somebody may have taken."""
    path = Path(what).expanduser()
    if not path.is_dir():
        raise UserError(
            f"{what} is no folder, and no package of the reviewed table is called so: give the path of {kind} "
            "(download it first); other names are not looked up, since a package may be somebody else's"
        )
    return path.resolve()


class _Named(Source):
    """A source whose adapter takes one name."""

    argument: str
    """What the adapter calls it."""
    module: str
    """The shipped adapter."""

    def sections(self, what: str, python: str) -> Mapping[str, Json]:
        args = {"python": python, "module": self.module, "args": {self.argument: what}}
        return {"env": {"name": "foreign", "args": args}}


class ReasoningGym(_Named):
    """Sets of reasoning-gym 0.1.25."""

    about = "a set of reasoning-gym 0.1.25"
    what = "SET"
    pins = PINS / "reasoning_gym.txt"
    argument = "dataset"
    module = "reasoning_gym"


class Bfcl(Source):
    """Categories of BFCL v4, without the clients of models that its package wants."""

    about = "BFCL v4: a category, or a collection such as multi_turn"
    what = "CATEGORY"
    pins = PINS / "bfcl.txt"
    python = ((3, 11), (3, 12))  # of tree-sitter 0.21

    def sections(self, what: str, python: str) -> Mapping[str, Json]:
        args = {"python": python, "module": "bfcl", "args": {"categories": [what], "train": [what]}}
        return {"env": {"name": "foreign", "args": args}}


class Tau2(Source):
    """Domains of a clone of tau2-bench, which the user names. The clone is read, not installed: its data lie in it."""

    about = "tau2-bench, from a clone: PATH@DOMAIN, by default of the domain retail"
    what = "PATH"
    pins = PINS / "tau2.txt"

    def sections(self, what: str, python: str) -> Mapping[str, Json]:
        given, _, domain = what.partition("@")
        path = _folder(given, "a clone")
        if not (path / "src/tau2/registry.py").is_file():
            raise UserError(f"{path} is no clone of tau2-bench: there is no src/tau2/registry.py")
        args: dict[str, Json] = {"checkout": str(path), "domain": domain or "retail", "train": _FEW}
        return {"env": {"name": "foreign", "args": {"python": python, "module": "tau2", "args": args}}}


class TextArena(_Named):
    """Games of textarena 0.7.4."""

    about = "a game of textarena 0.7.4"
    what = "GAME"
    pins = PINS / "textarena.txt"
    argument = "game"
    module = "textarena"


class MiniWob(_Named):
    """Pages of MiniWoB++ 1.1.0, which want the system package chromium."""

    about = "a page of MiniWoB++ 1.1.0 (with the system package chromium)"
    what = "PAGE"
    pins = PINS / "miniwob.txt"
    argument = "task"
    module = "miniwob"


class Gymnasium(_Named):
    """Environments of Gymnasium 1.4.0 that are told in words."""

    about = "an environment of Gymnasium 1.4.0: an id, or file.py:Class"
    what = "ENV"
    pins = PINS / "gymnasium.txt"
    argument = "env"
    module = "gymnasium"
