"""`agentrl why`: what unsolved samples of a run have in common, and what failed."""

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
    """Say why samples are unsolved: what their calls came to, what they have more often than solved samples, and what
    changed since the start."""
    chosen = _chosen(Path(run), split or [], step)
    from agentrl.eval.why import CHANCE, diagnose, turn_limit_of

    piece, chance = _pieces(Path(run)), CHANCE / len(chosen)
    found = []
    for now, first in chosen:
        limit = turn_limit_of(Path(run), now.evaluation)
        found.append(diagnose(now.path, first and first.path, piece=piece, turn_limit=limit, chance=chance))
    if as_json:
        pairs = zip(chosen, found, strict=True)
        told = [{"split": now.split, "step": now.step, **diagnosis.json()} for (now, _), diagnosis in pairs]
        typer.echo(json.dumps(told, indent=1))
        return
    for (now, first), diagnosis in zip(chosen, found, strict=True):
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
    out.print(_title(now, first, found), markup=False, soft_wrap=True, style="bold")
    for fault in found.faults:
        out.print(
            f"  {fault.line}. Likely cause: {fault.remedy.replace('RUN', shlex.quote(run))}",
            markup=False,
            soft_wrap=True,
        )
    for line, count in [*found.errors.items()][:_LISTED]:
        out.print(f"  {count} failed: {line}", markup=False, soft_wrap=True)
    shown = found.causes[:_LISTED]
    if shown:
        out.print(_table(shown, first is not None))
    if line := _remainder(found, bool(shown)):
        out.print(f"  {line}", soft_wrap=True, markup=False)
    if found.gone and first is not None:
        gone = "; ".join(
            f"{_name(cause)} ({cause.unsolved_before} -> {cause.unsolved} samples)" for cause in found.gone[:_GONE]
        )
        out.print(f"  no longer: {gone}", markup=False, soft_wrap=True)
    for note in found.notes:
        out.print(f"  {note}", markup=False, soft_wrap=True, style="dim")
    chosen = [["--task", shown[0].examples[0].task]] if shown else [["--unsolved"]] if found.unsolved else []
    for words in [*chosen, *([["--failed"]] if found.lost else [])]:
        split = ["--split", now.split] if now.evaluation else []
        command = shlex.join(["agentrl", "show", run, *split, "--step", str(now.step), *words])
        out.print(f"  {command}", markup=False, soft_wrap=True, style="dim")
    out.print()


def _title(now: "Stored", first: "Stored | None", found: "Diagnosis") -> str:
    """How many samples are unsolved, by what is called so, and how many failed."""
    then = f"; after step {first.step}: {found.first_unsolved} of {found.first_samples}" if first else ""
    lost = f"; {found.lost} more failed by errors that are not the model's" if found.lost else ""
    place = "step" if not now.evaluation else f"{now.split}, after step"
    if not found.samples:
        return f"{place} {now.step}: all {found.lost} samples failed by errors that are not the model's{then}"
    how = "are unsolved" if found.below is None else f"earned less than the mean ({found.below:.3g})"
    if found.below is not None and found.unsolved == found.samples:
        how = f"earned the same ({round(found.below, 9):g})"
    return f"{place} {now.step}: {found.unsolved} of {found.samples} samples {how}{then}{lost}"


def _remainder(found: "Diagnosis", shown: bool) -> str:
    """What the causes leave open; empty where they leave nothing."""
    if not found.samples:
        return ""
    if not found.unsolved:
        return "nothing to compare: every sample is solved"
    if found.unsolved == found.samples:
        did = "above is what many of them did" if shown else "many did nothing wrong that can be told from outside"
        return f"no sample is solved, so there is none to compare with; {did}"
    if not found.unexplained:
        return ""
    none = "none of these" if shown else "nothing more often than solved samples, beyond what chance explains"
    return f"{found.unexplained} of the {found.unsolved} have {none}"


def _name(cause: "Cause") -> str:
    return cause.value if cause.kind in ("calls", "field") else f"{cause.kind}: {cause.value}"


def _table(causes: "tuple[Cause, ...]", changed: bool) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("  unsolved", justify="right")
    table.add_column("of unsolved", justify="right")
    table.add_column("of solved", justify="right")
    if changed:
        table.add_column("at first", justify="right")
    table.add_column("cause, and examples by task", overflow="fold")
    for cause in causes:
        before = [] if not changed else ["" if cause.before is None else f"{cause.before:.0%}"]
        notes = [shortened(f"{one.task}: {one.note}" if one.note else one.task, 70) for one in cause.examples[:2]]
        told = f"[bold]{escape(shortened(_name(cause)))}[/bold]\n[dim]{escape(chr(10).join(notes))}[/dim]"
        table.add_row(str(cause.unsolved), f"{cause.share:.0%}", f"{cause.solved:.0%}", *before, told)
    return table
