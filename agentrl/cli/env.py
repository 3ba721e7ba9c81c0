"""`agentrl env`: environments of others."""

import typer

from agentrl.cli.env_add import env_add_command

env_app = typer.Typer(rich_markup_mode=None, help="Install environments of others.")
env_app.command("add")(env_add_command)
