"""What several commands share: their options, the console, KEY=VALUE arguments, and texts made short."""

import gc
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option, echo

from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from agentrl.recipe.schema import Recipe
    from agentrl.terminal import Terminal

Text = str | None
Texts = list[str] | None
Overrides = Annotated[Texts, Argument(metavar="[KEY=VALUE]...", help="Keys to change.")]
OwnOverrides = Annotated[Texts, Argument(metavar="[KEY=VALUE]...", help="Keys of its recipe to change.")]
OtherModel = Annotated[
    Text, Option("--model", metavar="DIR", help="A model, checkpoint or run folder, instead of the recipe's.")
]
ResumedRun = Annotated[
    Text, Option("--resume", metavar="RUN", help="Continue this run (a folder, or its mirror's URL).")
]
# which stored sample is meant
RequestId = Annotated[Text, Option("--id", metavar="REQUEST", help="The sample's id, such as step_3/train-7#0.12.")]
StepNumber = Annotated[int | None, Option("--step", min=0, help="The sample's step.")]
SplitName = Annotated[Text, Option("--split", metavar="NAME", help="Its split: train, or another.")]
TaskId = Annotated[Text, Option("--task", metavar="ID", help="Its task's id.")]
SampleNumber = Annotated[int | None, Option("--sample", min=0, help="Its number among the task's.")]


def console() -> "Terminal":
    """The terminal on stdout; rich is imported when this is called."""
    from agentrl.terminal import terminal

    return terminal()


@contextmanager
def importing() -> Iterator[None]:
    """Import what is heavy without looking for garbage: there is none, and to look takes a seventh of the time. Nor is
    what was imported looked through later, which takes a third of a second whenever it is."""
    first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        gc.enable()


def recipe_and_keys(arguments: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """The recipe that a command's arguments begin with, if they name one, and the keys to change."""
    given = list(arguments or ())
    return (given.pop(0) if given and not re.match(r"[\w.]+=", given[0]) else None), given


def without_output(overrides: Sequence[str] | None, output: str | None) -> tuple[list[str], str | None]:
    """The overrides of a command with an `--output` without the key `output`, and the folder that either names.
    Raises UserError: both do."""
    from agentrl.errors import UserError

    kept, named = [], output
    for text in overrides or ():
        key, equals, value = text.partition("=")
        if not equals or key.strip() != "output":
            kept.append(text)
        elif output is not None:
            raise UserError(f"{text} --output {output}: the same twice; leave out one of them")
        else:
            named = value.strip() or None
    return kept, named


def until_interrupted(train: Callable[[], bool]) -> None:
    """Exit with 130 where `train` says that it was interrupted, or ends by Ctrl-C, whose message typer would drop."""
    try:
        interrupted = train()
    except KeyboardInterrupt as interrupt:
        if message := str(interrupt):
            echo(message, err=True)
        interrupted = True
    if interrupted:
        raise Exit(130)


def key_values(texts: Sequence[str], option: str = "") -> dict[str, Json]:
    """`KEY=VALUE` texts as a mapping, the values read as YAML. option: begins the UserError."""
    import yaml

    from agentrl.errors import UserError

    found: dict[str, Json] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UserError(f"{option}{text}: expected KEY=VALUE, such as {option}max_operations=2")
        try:
            found[key.strip()] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            found[key.strip()] = value
    return found


SUBJECT = (
    "A run folder (its recipe and best checkpoint), a recipe's file or name, or a model: `tiny`, a folder, a hub name."
)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def recipe_and_model(what: str, overrides: Sequence[str], model: str | None) -> "tuple[Recipe, str | None]":
    """The recipe of a run folder, recipe or model `what` (SUBJECT), and the model in place of the recipe's, or
    None. model: replaces it. Raises UserError."""
    from agentrl.checkpoint.run_folder import recipe_of
    from agentrl.recipe.load import load_recipe

    path, run = recipe_of(what)
    is_model = run is None and _is_model(what)
    recipe = load_recipe(None if is_model else path, overrides)  # before anything heavy is imported
    from agentrl.eval.evaluate import model_of
    from agentrl.models.load import resolve_types

    named = model or run or (what if is_model else None)
    return resolve_types(recipe), model_of(named) if named else None


def _is_model(what: str) -> bool:
    from agentrl.models import EMBEDDED

    if Path(what).exists():
        return (Path(what) / "config.json").is_file()
    return what in EMBEDDED or (bool(_HUB_NAME.fullmatch(what)) and not what.endswith((".yaml", ".yml")))


def first_line(text: str | None) -> str:
    """The first line of a description or docstring."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")


def shortened(text: str, length: int = 100) -> str:
    """A text as one line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."
