"""`agentrl env add SOURCE WHAT`: install an environment that others wrote, write its recipe, and try it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from agentrl.cli.common import Text, console

if TYPE_CHECKING:
    from agentrl.plugins.source import Source
    from agentrl.recipe.schema import Recipe

STEPS = 4


def env_add_command(
    source: Annotated[Text, Argument(help="Where it comes from, such as textarena; without it, list all.")] = None,
    what: Annotated[Text, Argument(help="Which: a game, a set, or the path of a taskset's folder.")] = None,
    into: Annotated[Path, Option("--into", metavar="DIR", help="Folder for interpreters and recipes.")] = Path(
        "foreign"
    ),
    python: Annotated[Text, Option("--python", metavar="PATH", help="Interpreter to make its own with.")] = None,
    tasks: Annotated[int, Option("--tasks", min=0, help="Tasks of each split to try it by; 0: none.")] = 2,
) -> None:
    """Make a virtual environment, install pinned packages (and the folder that you name), write a recipe, and run the
    contract test on it."""
    from agentrl.errors import UserError

    shown = console()

    def say(line: str) -> None:
        shown.print(line, markup=False, highlight=False, soft_wrap=True)

    if source is None:
        _list(say)
        return
    found = _source(source)
    if what is None:
        raise UserError(f"{found.what} is missing: agentrl env add {source} {found.what}")
    _add(source, found, what, into, python, tasks, say)


def _source(name: str) -> "Source":
    """A source by its name. Raises UserError."""
    from agentrl.errors import UserError
    from agentrl.plugins.registry import construct, load
    from agentrl.plugins.source import Source

    made = construct(load("sources", name), {}, f"source {name}")
    if not isinstance(made, Source):
        raise UserError(f"source {name!r} is {type(made).__name__}, not a Source")
    return made


def _list(say: Callable[[str], None]) -> None:
    from agentrl.plugins.registry import installed

    for plugin in installed("sources"):
        found = _source(plugin.name)
        say(f"agentrl env add {plugin.name} {found.what:<6} {found.about}")


def _add(
    name: str, source: "Source", what: str, into: Path, python: str | None, tasks: int, say: Callable[[str], None]
) -> None:
    from agentrl.errors import UserError
    from agentrl.plugins.source import install, interpreter_for
    from agentrl.recipe.document import dump
    from agentrl.recipe.load import load_recipe

    folder, given = into / name.rpartition(":")[2], Path(what).expanduser()
    recipe = folder / f"{(given.resolve() if given.is_dir() else given).name.lower()}.yaml"
    venv = folder / "venv"
    sections = source.sections(what, str((venv / "bin" / "python").absolute()))  # before anything is made
    if recipe.exists():
        raise UserError(f"{recipe} exists: remove it, or name another folder by --into")
    chosen = interpreter_for(source, python)
    pins = sum("==" in line for line in source.pins.read_text("utf-8").splitlines())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        say(f"[1/{STEPS}] a virtual environment in {venv} ({chosen}), with {pins} packages, each of a reviewed version")
        install(source, what, venv, chosen, say)
        say(f"[2/{STEPS}] the recipe {recipe}")
        head = f"# {source.about}: {what}. Written by `agentrl env add {name} {what}`.\n"
        recipe.write_text(head + dump({"model": {"path": "tiny"}, **sections}), "utf-8")
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written: {error.strerror or error}") from error
    loaded = load_recipe(recipe)
    say(f"[3/{STEPS}] its contract test")
    _try(loaded, tasks, say)
    say(f"[4/{STEPS}] done. Next: agentrl try {recipe} --model tiny")


def _try(recipe: "Recipe", tasks: int, say: Callable[[str], None]) -> None:
    """Play some tasks by a player who knows nothing. Raises UserError with what the environment does not keep."""
    from agentrl.errors import UserError
    from agentrl.plugins.environment import not_carried
    from agentrl.plugins.registry import make_environment
    from agentrl.testing import check_environment

    env = make_environment(recipe.env)
    sizes = {split: len(env.tasks(split)) for split in ("train", *env.splits)}
    say(f"  {env.name}: " + ", ".join(f"{size:,} tasks of {split}" for split, size in sizes.items()))
    for line in not_carried(env, env.tools()):
        say(f"  {line}")
    if not tasks:
        return
    try:
        logging.disable(logging.WARNING)  # of what it makes fail on purpose
        check_environment(
            env, None, lambda task, messages: "I do not know.", tasks=tasks, sessions=4, disjoint=False,
            limits={"max_turns": 3}, agent=recipe.agent,
        )  # fmt: skip
    except AssertionError as error:
        raise UserError(f"the contract test failed, the recipe is there all the same: {error}") from None
    finally:
        logging.disable(logging.NOTSET)
    say(
        f"  {tasks} tasks of each split were played, alone and at the same time, cut off and ended: all as it should be"
    )
