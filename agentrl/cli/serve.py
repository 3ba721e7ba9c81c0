"""`agentrl serve`: a trained model as an OpenAI and Anthropic endpoint."""

from typing import Annotated

import typer


def serve_command(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's file or name, or a run folder: its recipe and best checkpoint.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="DIR", help="A model, checkpoint or run folder, instead of the recipe's."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    key: Annotated[
        str | None,
        typer.Option("--key", help="What clients must send as API key. On other hosts than loopback, one is made."),
    ] = None,
) -> None:
    """Serve a model to any client of the OpenAI or Anthropic API, until Ctrl-C."""
    import secrets

    from agentrl.checkpoint.run_folder import recipe_of
    from agentrl.cli.common import console
    from agentrl.recipe.load import load_recipe

    path, run = recipe_of(recipe)
    checked = load_recipe(path, overrides or [])  # before anything heavy is imported
    from agentrl.eval.evaluate import model_of
    from agentrl.models.load import resolve_types
    from agentrl.rollout.event_loop import Runner
    from agentrl.rollout.serve import serve
    from agentrl.weights.addresses import is_loopback

    if key is None:
        key = "" if is_loopback(host) else secrets.token_urlsafe(24)
    named = model or run
    out = console()

    def say(line: str) -> None:
        out.print(line, markup=False, highlight=False, soft_wrap=True)

    with Runner() as runner:
        runner.run(serve(resolve_types(checked), model_of(named) if named else None, host, port, key, say))
