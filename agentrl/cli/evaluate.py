"""`agentrl eval`: measure accuracy on held-out tasks."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from agentrl.cli.common import Overrides, Text, Texts, without_output
from agentrl.errors import UserError

if TYPE_CHECKING:
    from agentrl.recipe.schema import Recipe


def eval_command(
    recipe: Annotated[
        Text, Argument(help="A recipe's file or name, or a run folder: its recipe and best checkpoint.")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        Text,
        Option(
            "--model",
            metavar="DIR",
            help="A model, checkpoint or run folder, instead of the recipe's; openai:NAME: behind OPENAI_BASE_URL.",
        ),
    ] = None,
    split: Annotated[
        Texts, Option("--split", help="A held-out split to evaluate; can be repeated (default: all).")
    ] = None,
    samples: Annotated[int | None, Option("--samples", min=1, help="Samples per task, for pass@k.")] = None,
    json_file: Annotated[Text, Option("--json", metavar="FILE", help="Also write the results to this file.")] = None,
    by: Annotated[
        Text, Option("--by", metavar="FIELD", help="Accuracy by the values of a field of the tasks' data, too.")
    ] = None,
    output: Annotated[
        Text,
        Option(
            "--output",
            "--keep",
            metavar="DIR",
            help="Keep conversations and results there (default: RUN/evals/N_MODEL, evals/RECIPE-N).",
        ),
    ] = None,
    no_keep: Annotated[bool, Option("--no-keep", help="Keep nothing.")] = False,
    resume: Annotated[
        Text, Option("--resume", metavar="DIR", help="Go on with the evaluation there: play what is not done.")
    ] = None,
    fail_below: Annotated[
        Texts,
        Option("--fail-below", metavar="SPLIT=SHARE", help="Exit with 1 if its accuracy is lower; can be repeated."),
    ] = None,
) -> None:
    """Evaluate a model on held-out tasks."""
    given, output = without_output([*([recipe] if resume and recipe else []), *(overrides or [])], output)
    if resume is not None:
        if model or output or no_keep:
            raise UserError(
                f"--resume {resume}: the model and the folder stay what they are: leave out the other options"
            )
        checked = _resumed(resume, given, split or (), samples)
        run = split = samples = None
    elif recipe is None:
        raise typer.BadParameter("name a recipe, a run folder, or --resume DIR")
    else:
        checked, run = _named(recipe, given)
    from agentrl.eval.show import check_writable, least_accuracies, show, too_low, write_json

    least = least_accuracies(fail_below or ())
    if json_file is not None:
        check_writable(json_file)
    from agentrl.eval.evaluate import check_evaluated, evaluate, model_of
    from agentrl.eval.folder import API, new_folder

    check_evaluated(checked, split, least)
    model = model_of(model or run or "") or None
    keep: Path | None = Path(output) if output else None
    if keep is None and not no_keep and resume is None:
        keep = new_folder(run, Path(model.removeprefix(API)).name if run and model else Path(recipe or "").stem)
    try:
        result = evaluate(checked, model=model, splits=split, samples=samples, by=by, keep=keep, resume=resume)
    except BaseException:
        _leave(keep or (Path(resume) if resume else None), made=keep is not None and output is None)
        raise
    show(result)
    if json_file is not None:
        write_json(result, json_file)
    if result.folder is not None:
        place = shlex.quote(str(result.folder))
        typer.echo(f"kept in {place}: agentrl show {place} --split {result.splits[0].split}")
    if lines := too_low(result, least):
        for line in lines:
            typer.echo(line, err=True)
        raise typer.Exit(1)


def _named(recipe: str, overrides: list[str]) -> "tuple[Recipe, str | None]":
    """A recipe, and the run folder that it is of."""
    from agentrl.checkpoint.run_folder import recipe_of
    from agentrl.recipe.load import load_recipe

    path, run = recipe_of(recipe)
    return load_recipe(path, overrides), run  # before anything heavy is imported


def _resumed(folder: str, overrides: list[str], splits: Sequence[str], samples: int | None) -> "Recipe":
    """The recipe of an evaluation that goes on. splits: played beside its own."""
    if lost := next((text for text in overrides if "=" not in text), None):
        raise UserError(f"--resume {folder} {lost}: it has its recipe already; only KEY=VALUE may follow")
    from agentrl.eval.folder import EvaluationFolder

    given = [] if samples is None else [f"eval.samples={samples}"]
    recipe = EvaluationFolder.existing(Path(folder)).recipe([*overrides, *given])
    every = tuple(dict.fromkeys((*(recipe.eval.splits or ()), *splits)))
    return recipe.changed(eval={"splits": every})


def _leave(folder: Path | None, made: bool) -> None:
    """Say how to go on with what is kept; remove the folder that was made for nothing."""
    if folder is None:
        return
    if (folder / "recipe.yaml").is_file():
        typer.echo(f"what was played is kept: agentrl eval --resume {shlex.quote(str(folder))}", err=True)
    elif made:
        with suppress(OSError):
            folder.rmdir()
            folder.parent.rmdir()
