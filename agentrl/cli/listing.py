"""`agentrl tools`, `envs`, `rewards`: what is installed and where from. A broken plugin is listed with the reason."""

from collections.abc import Callable
from typing import Any


def tools_command() -> None:
    """List the tools that are installed, and where from."""
    show_group("tools", lambda made: getattr(made, "description", None) or made.__doc__)


def envs_command() -> None:
    """List the environments that are installed, and where from."""
    show_group("envs", lambda made: made.__doc__)


def rewards_command() -> None:
    """List the reward functions that are installed, and where from."""
    show_group("rewards", lambda made: made.__doc__)


def show_group(group: str, describe: Callable[[Any], str | None]) -> None:
    """A table of the plugins of an entry-point group; `describe` finds an imported one's own words."""
    from rich.markup import escape
    from rich.table import Table

    from agentrl.cli.common import console, first_line
    from agentrl.errors import UserError
    from agentrl.plugins.registry import installed, load_path

    table = Table("name", "from", "object", "what it is", box=None, header_style="bold", pad_edge=False)
    plugins = installed(group)
    names = [plugin.name for plugin in plugins]
    for plugin in plugins:
        try:
            what = escape(first_line(describe(load_path(plugin.value, plugin.name))))
        except UserError as error:
            what = f"[red]broken: {escape(str(error))}[/red]"
        if names.count(plugin.name) > 1:
            what = f"[red]clash: {names.count(plugin.name)} distributions offer this name[/red]"
        origin = f"{plugin.distribution} {plugin.version}"
        table.add_row(escape(plugin.name), escape(origin), escape(plugin.value), what)
    console().print(table if plugins else f"no plugin is installed in the group agentrl.{group}")
