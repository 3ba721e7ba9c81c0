"""`agentrl tools`, `envs`, `rewards` ...: list what is installed, and where from. A broken plugin is listed with the
reason."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.plugins.registry import Plugin

LISTED = {
    "tools": "tools", "envs": "environments", "agents": "agents", "rewards": "reward functions",
    "advantages": "advantage estimators", "losses": "policy losses", "aggregations": "sums over tokens",
    "filters": "filters of groups", "orders": "orders of tasks", "trackers": "trackers", "engines": "engines",
    "trainers": "trainers of another make", "scanners": "scanners of stored conversations",
}  # fmt: skip
"""Command, and entry-point group below `agentrl.` -> what it lists, in words."""


def list_command(group: str) -> Callable[[], None]:
    """The command that lists a group."""

    def command() -> None:
        show_group(group)

    return command


def show_group(group: str) -> None:
    """Print a table of what is installed in an entry-point group, and of what is built in."""
    from rich.markup import escape
    from rich.table import Table

    from agentrl.cli.common import console, first_line
    from agentrl.errors import UserError
    from agentrl.plugins.registry import installed, load_path

    table = Table("name", "from", "object", "what it is", box=None, header_style="bold", pad_edge=False)
    plugins = [*_built_in(group), *installed(group)]
    names = [plugin.name for plugin in plugins]
    for plugin in plugins:
        try:
            what = escape(first_line(_description(load_path(plugin.value, plugin.name, plugin.distribution), group)))
        except UserError as error:
            what = f"[red]broken: {escape(str(error))}[/red]"
        if names.count(plugin.name) > 1:
            what = f"[red]clash: {names.count(plugin.name)} distributions offer this name[/red]"
        origin = f"{plugin.distribution} {plugin.version}"
        table.add_row(escape(plugin.name), escape(origin), escape(plugin.value), what)
    console().print(table if plugins else f"nothing is installed in the group agentrl.{group}")


def presets_command() -> None:
    """List the presets of `algorithm`: what each sets, its paper, and where it differs."""
    from rich.markup import escape
    from rich.table import Table

    from agentrl.cli.common import console
    from agentrl.recipe.presets import PRESETS

    table = Table("name", "sets", "what it is", box=None, header_style="bold", pad_edge=False)
    for name, preset in PRESETS.items():
        keys = ", ".join(f"{key}: {'null' if value is None else value}" for key, value in preset.keys.items())
        table.add_row(name, escape(keys), escape(preset.text))
    console().print(table)


def _built_in(group: str) -> "list[Plugin]":
    """The advantages, losses, aggregations and scanners of agentrl's own, which need no entry point."""
    from agentrl import __version__
    from agentrl.plugins.registry import Plugin

    if group == "scanners":
        from agentrl.eval.scanners import SCANNERS

        return [
            Plugin("agentrl.scanners", name, f"{scanner.__module__}:{name}", "agentrl", __version__)
            for name, scanner in sorted(SCANNERS.items())
        ]
    if group not in ("advantages", "losses", "aggregations"):
        return []
    from agentrl import algo

    return [
        Plugin(f"agentrl.{group}", name, f"{function.__module__}:{function.__qualname__}", "agentrl", __version__)
        for name, function in sorted(getattr(algo, group).functions.items())
        if function.__module__.startswith("agentrl.")
    ]


def _description(made: object, group: str) -> str | None:
    """A plugin's own words: its `description`, else its docstring; of an engine, that of its module."""
    import sys

    module = sys.modules.get(getattr(made, "__module__", None) or "")
    own = getattr(made, "description", None) if group == "tools" else None
    return own or (module.__doc__ if group == "engines" and module is not None else None) or made.__doc__
