"""`agentrl continue`: sample on from a stored turn."""

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from agentrl.cli.common import (
    OwnOverrides,
    RequestId,
    SampleNumber,
    SplitName,
    StepNumber,
    TaskId,
    Text,
    console,
    shortened,
    without_output,
)

if TYPE_CHECKING:
    from agentrl.offline.go_on import GoneOn

STOPPED = 1


def continue_command(
    run: Annotated[str, Argument(metavar="RUN", help="A folder of a run, an evaluation or rollouts.")],
    turn: Annotated[
        int, Option("--turn", min=0, help="Turns of the model that are kept; what follows is sampled anew.")
    ],
    overrides: OwnOverrides = None,
    n: Annotated[int, Option("-n", "--samples", min=1, help="Ways to go on.")] = 4,
    model: Annotated[
        Text, Option("--model", metavar="DIR", help="Who goes on: a model, checkpoint or run folder (default: RUN's).")
    ] = None,
    request: RequestId = None,
    step: StepNumber = None,
    split: SplitName = None,
    task: TaskId = None,
    sample: SampleNumber = None,
    output: Annotated[
        Text, Option("--output", metavar="DIR", help="A new folder (default: RUN/continued-<number>).")
    ] = None,
) -> None:
    """Sample on from a turn of a stored rollout, several ways: what would have helped?

    The turns before are played again, their calls live; where these answer otherwise, nothing is sampled (exit code 1).
    """
    given, output = without_output(overrides, output)
    from agentrl.offline.go_on import go_on
    from agentrl.offline.replay import Which

    which = Which(request, step, split, task, sample)
    found = go_on(run, which, turn=turn, n=n, model=model, overrides=given, output=output)
    _print(found, turn, run)
    raise typer.Exit(STOPPED if found.folder is None else 0)


def _print(found: "GoneOn", turn: int, run: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    from agentrl.plugins.types import answer_of

    out, stored = console(), found.stored.trajectory
    title = f"{stored.request_id}, {turn} of {len(stored.turns)} turns kept"
    table = Table(title=escape(title), title_justify="left")
    for name in ("", "reward", "solved", "turns", "ended by", "answer"):
        table.add_column(name)
    rows = [("as stored", stored, found.solved, "")]
    rows += [
        (str(number), t, word, why)
        for number, (t, word, why) in enumerate(zip(found.samples, found.solved_now, found.stopped, strict=True))
    ]
    for name, t, word, why in rows:
        told = why or (t.failure.message if t.failure is not None else shortened(answer_of(t.messages), 80))
        reward = f"{t.reward:.4g}" if t.valid else "-"
        solved = {True: "yes", False: "no", None: "-"}[word]
        table.add_row(*map(escape, (name, reward, solved, str(len(t.turns)), str(t.finish), told)))
    out.print(table)
    valid = [t for t in found.samples if t.valid]
    if valid:
        mean, good = sum(t.reward for t in valid) / len(valid), sum(word is True for word in found.solved_now)
        then = f"{stored.reward:.4g}" if stored.valid else "none"
        out.print(f"reward {mean:.4g} in the mean, {then} as stored; {good} of {len(valid)} solved", markup=False)
    if any(found.stopped):
        told = f"where tools answer otherwise: agentrl replay {run} --id {stored.request_id}"
        out.print(told, markup=False, soft_wrap=True)
    if found.folder is not None:
        out.print(f"folder: {found.folder}", markup=False, soft_wrap=True)
