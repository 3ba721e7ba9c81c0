"""`agentrl new`: write a small installable package with a tool, an environment or an agent, to be changed."""

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from string import Template
from typing import Annotated, Literal

import typer

from agentrl.errors import UserError

FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "source.py": "src/{name}.py",
    "test.py": "tests/test_{name}.py",
    "recipe.yaml": "recipes/{name}.yaml",
    "tasks.jsonl": "tasks.jsonl",
}
"""Template (with `.tmpl` behind it) -> file; not every kind has each."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")

new_app = typer.Typer(rich_markup_mode=None, help="Write a small package with a new tool, environment or agent.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of its Python module: small letters, digits and _.")]
Into = Annotated[str, typer.Option("--into", metavar="DIR", help="Folder in which to make the folder NAME.")]


@new_app.command("tool")
def new_tool_command(name: Name, into: Into = ".") -> None:
    """Write a package with a new tool."""
    _new("tool", name, into)


@new_app.command("env")
def new_env_command(name: Name, into: Into = ".") -> None:
    """Write a package with a new environment."""
    _new("env", name, into)


@new_app.command("agent")
def new_agent_command(name: Name, into: Into = ".") -> None:
    """Write a package with a new agent: a function that holds the conversation with the model."""
    _new("agent", name, into)


_TRIED = {
    "tool": '{name} \'{{"expression": "2*3"}}\'',
    "env": "{name} --task 0",
    "agent": "recipes/{name}.yaml --model tiny",
}


def _new(kind: Literal["tool", "env", "agent"], name: str, into: str) -> None:
    _check_name(kind, name)
    folder = Path(into) / name
    write_package(kind, name, folder)
    typer.echo(f"wrote {folder}: change src/{name}.py")
    typer.echo(f"next: cd {folder} && pip install -e '.[test]' && pytest")
    tried = _TRIED[kind].format(name=name)
    typer.echo(f"then: agentrl try {tried}; agentrl train recipes/{name}.yaml")


def write_package(kind: str, name: str, folder: Path) -> None:
    """Write the package of a new tool, env or agent (kind). Raises UserError if the folder exists or cannot be
    written."""
    from importlib.resources import files

    words = {"name": name, "class_name": _class_name(name), "distribution": f"agentrl-{name.replace('_', '-')}"}
    templates = files("agentrl.scaffold") / kind
    texts = {
        target.format(name=name): Template((templates / f"{source}.tmpl").read_text(encoding="utf-8"))
        for source, target in FILES.items()
        if (templates / f"{source}.tmpl").is_file()
    }
    if folder.exists():
        raise UserError(f"{folder} already exists: choose another name, or another folder by --into")
    try:
        for target, template in texts.items():
            file = folder / target
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(template.substitute(words), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error


def _class_name(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _check_name(kind: str, name: str) -> None:
    """Raise UserError unless the name can be a module, an entry point and part of a distribution's name."""
    from agentrl.plugins.registry import installed

    if not _NAME.fullmatch(name) or name.endswith("_"):
        raise UserError(f"{name!r} cannot name a module: use a small letter, then small letters, digits and _")
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise UserError(f"{name!r} is a Python keyword: choose another name")
    for plugin in installed(f"{kind}s"):
        if plugin.name == name:
            raise UserError(f"{name!r} is already installed from {plugin.origin}: choose another name")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise UserError(f"a module {name!r} already exists and would hide it: choose another name")
