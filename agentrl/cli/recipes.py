"""`agentrl recipes`: the recipes that ship."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from agentrl.cli.common import Text


def recipes_command(
    name: Annotated[Text, Argument(help="Print this recipe; without it, list all.")] = None,
    copy: Annotated[bool, Option("--copy", help="Write it to a file instead, to be changed.")] = False,
    into: Annotated[Path, Option("--into", metavar="DIR", help="With --copy: the folder to write to.")] = Path(),
) -> None:
    """List the recipes that ship, print one, or copy one to change it."""
    from agentrl.cli.common import console
    from agentrl.errors import UserError, nearest
    from agentrl.recipe.shipped import files_of, shipped_recipes, summary

    shipped = shipped_recipes()
    if name is None:
        if copy:
            raise UserError("--copy needs a name: agentrl recipes NAME --copy")
        for each, path in shipped.items():
            console().print(f"{each:<{max(map(len, shipped)) + 2}}{summary(path)}", markup=False, soft_wrap=True)
    elif name not in shipped:
        raise UserError(f"no recipe {name!r} ships with agentrl{nearest(name, shipped)}")
    elif copy:
        for path in _copy(files_of(shipped[name]), into):
            console().print(f"wrote {path}", markup=False, soft_wrap=True)
    else:
        typer.echo(shipped[name].read_text(encoding="utf-8"), nl=False)


def _copy(files: list[Path], into: Path) -> list[Path]:
    """Copy files into a folder: all or none. A recipe or template that another copy left there unchanged may stay.

    Raises UserError where a file would be overwritten or cannot be written.
    """
    from agentrl.errors import UserError

    try:
        texts = {into / file.name: file.read_bytes() for file in files}
        recipe = into / files[0].name
        new = {path: text for path, text in texts.items() if not path.exists() or path.read_bytes() != text}
        if there := [path for path in texts if path.exists() and (path == recipe or path in new)]:
            raise UserError(f"{there[0]} already exists: remove it, or choose another folder by --into DIR")
        into.mkdir(parents=True, exist_ok=True)
        for path, text in new.items():
            path.write_bytes(text)
    except OSError as error:
        raise UserError(f"{error.filename or into}: cannot be written: {error.strerror or error}") from error
    return list(new)
