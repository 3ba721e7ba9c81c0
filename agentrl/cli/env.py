"""`agentrl env`: environments of others, and ours for others."""

import typer

from agentrl.cli.env_add import env_add_command
from agentrl.cli.env_serve import env_serve_command

env_app = typer.Typer(rich_markup_mode=None, help="Install environments of others, serve one to them.")
env_app.command("add")(env_add_command)
env_app.command("serve")(env_serve_command)
