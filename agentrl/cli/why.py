"""`agentrl why`: what failed samples of a run have in common."""

import json
import shlex
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from agentrl.cli.common import Texts, console, shortened
from agentrl.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from agentrl.eval.why import Cause, Diagnosis
    from agentrl.rollout.trajectory_file import Stored

_LISTED = 8  # causes of a split
_GONE = 3  # former causes of a split


def why_command(
    run: Annotated[str, Argument(metavar="RUN", help="A folder of a run or an evaluation.")],
    split: Annotated[
        Texts, Option("--split", metavar="NAME", help="Evaluations of this split (default: all); `train`: a step.")
    ] = None,
    step: Annotated[int | None, Option("--step", min=0, help="After this step (default: the last).")] = None,
    as_json: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say why samples fail: what failures have more often than solved samples, and what changed since the start."""
    chosen = _chosen(Path(run), split or [], step)
    from agentrl.eval.why import diagnose

    piece = _pieces(Path(run))
    found = [(now, diagnose(now.path, first and first.path, piece=piece)) for now, first in chosen]
    if as_json:
        told = [{"split": now.split, "step": now.step, **diagnosis.json()} for now, diagnosis in found]
        typer.echo(json.dumps(told, indent=1))
        return
    for (now, first), (_, diagnosis) in zip(chosen, found, strict=True):
        _print(run, now, first, diagnosis)


def _chosen(run: Path, splits: list[str], step: int | None) -> "list[tuple[Stored, Stored | None]]":
    """What to look at: of each split the file of this step or of the last one, and that of the first."""
    from agentrl.checkpoint.run_folder import TRAJECTORIES
    from agentrl.rollout.trajectory_file import TRAIN, stored_files

    stored = stored_files(run / TRAJECTORIES)
    if not stored:
        raise UserError(f"{run}: no folder of a run or an evaluation (it has no {TRAJECTORIES}/ with conversations)")
    known = sorted({one.split for one in stored if one.evaluation})
    for name in splits:
        if name not in (*known, TRAIN):
            raise UserError(f"--split {name}: no evaluation of it is stored in {run}{nearest(name, known)}")
    found: list[tuple[Stored, Stored | None]] = []
    for name in splits or known or [TRAIN]:
        own = [one for one in stored if one.split == name and one.evaluation == (name != TRAIN)]
        at = [one for one in own if step in (None, one.step)]
        if at:
            found.append((at[-1], own[0] if own[0].step < at[-1].step else None))
        elif splits:
            raise UserError(f"--step {step}: nothing of {name} is stored there; try one of {_some(own)}")
    if not found:
        looked_at = [one for one in stored if one.evaluation] or stored
        raise UserError(f"--step {step}: no evaluation of it is stored there; try one of {_some(looked_at)}")
    return found


def _some(stored: "list[Stored]") -> str:
    return ", ".join(str(step) for step in sorted({one.step for one in stored})[-20:]) or "no step"


def _pieces(run: Path) -> "Callable[[int], str] | None":
    """The text of each token by the run's tokenizer; None where it has none."""
    from agentrl.cli.show import _tokenizer

    try:
        tokenizer = _tokenizer(run)
    except UserError:
        return None
    return lru_cache(None)(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))


def _print(run: str, now: "Stored", first: "Stored | None", found: "Diagnosis") -> None:
    out = console()
    then = f"; after step {first.step}: {found.first_failed} of {found.first_samples}" if first else ""
    lost = f"; {found.lost} more lost to errors that are not the model's" if found.lost else ""
    how = "failed" if found.below is None else f"earned less than the mean ({found.below:.3g})"
    if found.below is not None and found.failed == found.samples:
        how = f"earned the same ({round(found.below, 9):g})"
    place = "step" if not now.evaluation else f"{now.split}, after step"
    title = f"{place} {now.step}: {found.failed} of {found.samples} samples {how}{then}{lost}"
    out.print(title, markup=False, soft_wrap=True, style="bold")
    shown = found.causes[:_LISTED]
    if shown:
        out.print(_table(shown, first is not None))
    if not found.failed or found.failed == found.samples:
        all_failed = "all failed" + ("; above is what many of them did" if shown else "")
        out.print("  nothing to compare: " + (all_failed if found.failed else "none failed"))
    elif found.unexplained:
        none = "none of these" if shown else "nothing more often than solved samples, beyond what chance explains"
        out.print(f"  {found.unexplained} of the {found.failed} have {none}", soft_wrap=True)
    if found.gone and first is not None:
        gone = "; ".join(
            f"{_name(cause)} ({cause.failed_before} -> {cause.failed} samples)" for cause in found.gone[:_GONE]
        )
        out.print(f"  no longer: {gone}", markup=False, soft_wrap=True)
    for note in found.notes:
        out.print(f"  {note}", markup=False, soft_wrap=True, style="dim")
    if shown:
        split = ["--split", now.split] if now.evaluation else []
        words = ["agentrl", "show", run, *split, "--step", str(now.step), "--task", shown[0].examples[0].task]
        out.print(f"  {shlex.join(words)}", markup=False, soft_wrap=True, style="dim")
    out.print()


def _name(cause: "Cause") -> str:
    return cause.value if cause.kind in ("calls", "field") else f"{cause.kind}: {cause.value}"


def _table(causes: "tuple[Cause, ...]", changed: bool) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("  failed", justify="right")
    table.add_column("of failures", justify="right")
    table.add_column("of solved", justify="right")
    if changed:
        table.add_column("at first", justify="right")
    table.add_column("cause, and examples by task", overflow="fold")
    for cause in causes:
        before = [] if not changed else ["" if cause.before is None else f"{cause.before:.0%}"]
        notes = [shortened(f"{one.task}: {one.note}" if one.note else one.task, 70) for one in cause.examples[:2]]
        told = f"[bold]{escape(shortened(_name(cause)))}[/bold]\n[dim]{escape(chr(10).join(notes))}[/dim]"
        table.add_row(str(cause.failed), f"{cause.share:.0%}", f"{cause.solved:.0%}", *before, told)
    return table
