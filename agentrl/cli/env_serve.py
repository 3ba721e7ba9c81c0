"""`agentrl env serve`: one of our environments as an OpenEnv server."""

from typing import Annotated

from typer import Argument, Option

from agentrl.cli.common import Overrides, Text, console


def env_serve_command(
    what: Annotated[str, Argument(metavar="RECIPE_OR_ENV", help="A recipe, or an installed environment.")],
    overrides: Overrides = None,
    host: Annotated[str, Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    key: Annotated[
        Text, Option("--key", help="What clients must send as Bearer. On other hosts than loopback, one is made.")
    ] = None,
    sessions: Annotated[int, Option("--sessions", min=1, max=4096, help="Sessions at once.")] = 64,
    idle: Annotated[float, Option("--idle", min=1.0, help="Seconds of silence after which a session ends.")] = 900.0,
) -> None:
    """Serve an environment, its tools and rewards as an OpenEnv server, until Ctrl-C. Each session is a rollout, with
    the recipe's limits; its steps' rewards add up to the rollout's."""
    import secrets

    from agentrl.plugins.registry import installed
    from agentrl.recipe.load import load_recipe

    named = ":" in what or what in {plugin.name for plugin in installed("envs")}
    given = list(overrides or [])
    recipe = load_recipe(None, [f"env.name={what}", *given]) if named else load_recipe(what, given)
    from agentrl.addresses import is_loopback
    from agentrl.containment.event_loop import Runner
    from agentrl.offline.env_server import serve_environment

    if key is None:
        key = "" if is_loopback(host) else secrets.token_urlsafe(24)
    out = console()

    def say(line: str) -> None:
        out.print(line, markup=False, highlight=False, soft_wrap=True)

    with Runner() as runner:
        runner.run(serve_environment(recipe, host, port, key, sessions, idle, say))
