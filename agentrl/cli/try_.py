"""`agentrl try`: call a tool, play a task through the driver that training uses, or hold a trainer to its contract."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from agentrl.cli.common import Text, Texts, key_values
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from agentrl.recipe.schema import Recipe

_RECIPES = (".yaml", ".yml")


def try_command(
    what: Annotated[
        str, Argument(help="A tool, an environment or a trainer (installed, or module:attribute), or a recipe.")
    ],
    rest: Annotated[
        Texts,
        Argument(
            metavar="[ARGUMENTS]...",
            help="For a tool: the arguments of each call, as JSON. For a recipe: keys to change, as KEY=VALUE. For a "
            "trainer: keys of `cluster`, such as workers=2.",
        ),
    ] = None,
    args: Annotated[
        Texts, Option("--args", metavar="KEY=VALUE", help="An argument of its class; can be repeated.")
    ] = None,
    create: Annotated[
        Texts, Option("--create", metavar="KEY=VALUE", help="For a tool: an argument of its `create` hook.")
    ] = None,
    tool: Annotated[
        Text, Option("--tool", metavar="NAME", help="For a source of several tools: the one to call.")
    ] = None,
    images: Annotated[
        Text, Option("--images", metavar="DIR", help="Folder for images (default: a temporary one).")
    ] = None,
    source: Annotated[Text, Option("--source", help="For an environment: source of its tasks (env.source).")] = None,
    tools: Annotated[Texts, Option("--tools", metavar="NAME", help="For an environment: a tool to offer.")] = None,
    task: Annotated[str, Option("--task", help="The task: its number in the split, or its id.")] = "0",
    split: Annotated[str, Option("--split", help="Split of the task: train, or a held-out one.")] = "train",
    replies: Annotated[
        Text,
        Option(
            "--replies", metavar="FILE", help="File of the model's turns: .jsonl, or text with --- lines between turns."
        ),
    ] = None,
    model: Annotated[
        Text,
        Option(
            "--model",
            metavar="PATH",
            help="Let a model play: `tiny`, a folder, or a hub name. For a trainer: the one that it is tried on.",
        ),
    ] = None,
    seed: Annotated[int, Option("--seed", help="Seed of the model's sampling and of the plugins.")] = 0,
) -> None:
    """Call a tool, or play one task: yourself, from a file of replies, or by a model. An agent that a recipe names does
    the task, and you are its model. A trainer is driven beside ours, and the first promise that it breaks is named.

    agentrl try calculator '{"expression": "2*3"}'

    agentrl try gsm8k --task 0 --tools calculator

    agentrl try agent_openai --model tiny

    agentrl try my_trainer workers=2
    """
    from agentrl.errors import UserError

    given, keys = list(rest or []), key_values(args or [], "--args ")
    if replies is not None and model is not None:
        raise UserError("--replies and --model exclude each other; without either you play yourself")
    kind = kind_of(what)
    if kind == "tool":
        from agentrl.cli.try_tool import try_tool

        code = try_tool(
            what, keys, given, create=key_values(create or [], "--create "), tool=tool, images=images, seed=seed
        )
    elif kind == "trainer":
        if keys or create or tools or source is not None or replies is not None:
            raise UserError("a trainer takes keys of `cluster`, such as workers=2, and --model alone")
        code = _try_trainer(what, given, model)
    else:
        from agentrl.cli.try_env import Choice, try_env

        choice = Choice(split, task, replies, model, seed, images)
        code = try_env(played_recipe(what, kind, given, keys, source, tools or []), choice)
    raise typer.Exit(code)


def kind_of(what: str) -> str:
    """`tool`, `environment`, `trainer` or `recipe`; what is installed wins over a shipped recipe of the same name. What
    module:attribute names is a tool if it is no class of an environment and makes no `RoleHost`."""
    from agentrl.errors import UserError, nearest
    from agentrl.plugins.registry import installed, load
    from agentrl.recipe.shipped import shipped_recipes

    if what.endswith(_RECIPES) or Path(what).is_file():
        return "recipe"
    if ":" in what:
        from agentrl.plugins.environment import Environment

        made = load("envs", what)
        if isinstance(made, type) and issubclass(made, Environment):
            return "environment"
        return "trainer" if _makes_roles(made) else "tool"
    tools, envs = ({plugin.name for plugin in installed(group)} for group in ("tools", "envs"))
    if what in tools and what in envs:
        raise UserError(f"{what!r} names a tool and an environment: write it as module:attribute")
    if what not in tools | envs:
        if what in (trainers := {plugin.name for plugin in installed("trainers")}):
            return "trainer"
        if what in shipped_recipes():
            return "recipe"
        if what in {plugin.name for plugin in installed("agents")}:
            raise UserError(f"{what!r} is an agent: try a recipe with it, such as agentrl try gsm8k_tool agent={what}")
        near = nearest(what, tools | envs | trainers)
        raise UserError(f"no tool, environment, trainer or recipe {what!r} is installed{near}")
    return "tool" if what in tools else "environment"


def _makes_roles(made: object) -> bool:
    """Whether it is a class with the methods of a `RoleHost`, or a function that says that it returns one."""
    if isinstance(made, type):
        return all(callable(getattr(made, method, None)) for method in ("weights", "save", "load", "close"))
    returned = getattr(made, "__annotations__", {}).get("return")
    return returned is not None and getattr(returned, "__name__", str(returned)).endswith("RoleHost")


def _try_trainer(name: str, given: list[str], model: str | None) -> int:
    """Hold a trainer to what the controller relies on. Raises UserError for the first promise that it breaks."""
    from agentrl.errors import UserError
    from agentrl.testing.trainer import check_trainer

    try:
        check_trainer(name, model=model or "tiny", cluster=key_values(given))
    except AssertionError as error:
        raise UserError(str(error)) from error
    typer.echo(
        f"trainer {name!r} keeps the contract on {model or 'tiny'}: log-probs, weights by name and layout, updates and "
        f"gradient norms as ours, loss masks, checkpoints. Servers and your parallelism on GPUs were not tried: see "
        f"docs/another_trainer.md"
    )
    return 0


def _example(what: str) -> dict[str, Json]:
    """The arguments of an environment's `example`."""
    from agentrl.plugins.environment import Environment
    from agentrl.plugins.registry import load

    made = load("envs", what)
    return dict(made.example) if isinstance(made, type) and issubclass(made, Environment) else {}


def _needs_workspace(what: str) -> bool:
    from agentrl.plugins.environment import Environment
    from agentrl.plugins.registry import load

    made = load("envs", what)
    return isinstance(made, type) and issubclass(made, Environment) and made.uses_workspace


def played_recipe(
    what: str, kind: str, given: list[str], args: dict[str, Json], source: str | None, tools: list[str]
) -> "Recipe":
    """The recipe that is played for an environment or a recipe. kind: as of `kind_of`. given: keys to change. args,
    source, tools: of an environment alone. Raises UserError."""
    from agentrl.errors import UserError
    from agentrl.recipe.load import load_recipe
    from agentrl.recipe.schema import Recipe
    from agentrl.recipe.sections.env import EnvSection, ToolSection
    from agentrl.recipe.sections.workspace import WorkspaceSection

    if kind == "recipe":
        if args or source is not None or tools:
            raise UserError(
                "a recipe names its environment and tools itself: change its keys instead, such as env.source=FILE"
            )
        return load_recipe(what, given)
    if given:
        raise UserError(f"{given[0]!r}: an environment takes no positional arguments; see agentrl try --help")
    if not args and source is None and (args := _example(what)):
        given_as = " ".join(f"{key}={value}" for key, value in args.items())
        typer.echo(f"(nothing is given: plays its example, {given_as})")
        source = str(args.pop("source")) if "source" in args else None
    section = EnvSection(name=what, args=args) if source is None else EnvSection(name=what, source=source, args=args)
    workspace = WorkspaceSection() if _needs_workspace(what) else None
    named = tuple(ToolSection(name=name) for name in tools or (("terminal",) if workspace else ()))
    return Recipe(env=section, tools=named, workspace=workspace)
