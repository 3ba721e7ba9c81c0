"""`agentrl serve`: a trained model as an OpenAI and Anthropic endpoint."""

from typing import Annotated

from typer import Argument, Option

from agentrl.cli.common import SUBJECT, OtherModel, Overrides, Text


def serve_command(
    what: Annotated[str, Argument(metavar="RUN_OR_MODEL", help=SUBJECT)],
    overrides: Overrides = None,
    model: OtherModel = None,
    host: Annotated[str, Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    key: Annotated[
        Text, Option("--key", help="What clients must send as API key. On other hosts than loopback, one is made.")
    ] = None,
) -> None:
    """Serve a model to any client of the OpenAI or Anthropic API, until Ctrl-C. Without a key, pages in a browser are
    kept out: requests must name this machine, and their bodies say `Content-Type: application/json`."""
    import secrets

    from agentrl.cli.common import console, recipe_and_model

    checked, path = recipe_and_model(what, overrides or [], model)
    from agentrl.addresses import is_loopback
    from agentrl.containment.event_loop import Runner
    from agentrl.rollout.serve import serve

    if key is None:
        key = "" if is_loopback(host) else secrets.token_urlsafe(24)
    out = console()

    def say(line: str) -> None:
        out.print(line, markup=False, highlight=False, soft_wrap=True)

    with Runner() as runner:
        runner.run(serve(checked, path, host, port, key, say))
