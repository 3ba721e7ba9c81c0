"""`agentrl data NAME --out DIR`: write a dataset as Parquet files, one per split.

NAME is an entry point of the group `agentrl.data`: a function called with `source` and the further arguments, which
returns the rows of every split: a mapping of sequences of mappings, or a generator of such. NAME may also be a run
folder: then what people labelled in it is written, for `agentrl sft` and `agentrl reward-model`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from agentrl.cli.common import Text, Texts
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from rich.console import Console


def data_command(
    name: Annotated[
        Text, Argument(help="Dataset to prepare, such as gsm8k, or a run folder with labels; without it, list all.")
    ] = None,
    arguments: Annotated[Texts, Argument(metavar="[KEY=VALUE]...", help="Further arguments of the dataset.")] = None,
    out: Annotated[Path | None, Option("--out", help="Folder to write to.")] = None,
    source: Annotated[Text, Option("--source", help="Source of its rows: a file, or a name on the hub.")] = None,
    limit: Annotated[int | None, Option("--limit", min=1, help="Most rows to write of each split.")] = None,
) -> None:
    """Write a dataset as Parquet files, one per split, to train on with env.name=dataset.

    Of a run folder: the conversations that people labelled `good` in `agentrl view`, and pairs of good and bad ones
    (other labels: good=LABEL bad=LABEL).
    """
    from agentrl.checkpoint.run_folder import TRAJECTORIES
    from agentrl.cli.common import console, key_values
    from agentrl.cli.listing import show_group
    from agentrl.errors import UserError
    from agentrl.plugins.registry import find

    if name is None:
        show_group("data")
        return
    folder = Path(name)
    of_run = (folder / TRAJECTORIES).is_dir()
    if not of_run:
        find("data", name)
    if out is None:
        raise UserError(f"--out is missing: agentrl data {name} --out DIR")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file, expected a folder")
    if of_run:
        if source is not None or limit is not None:
            raise UserError("--source, --limit: of a run folder, what is labelled is written, all of it")
        return _write_labelled(folder, key_values(arguments or []), out)
    splits = _prepare(name, key_values(arguments or []) | ({} if source is None else {"source": source}))
    shown = console()
    for split, rows in splits.items():
        path = out / f"{split}.parquet"
        count = _write(path, rows[:limit] if limit else rows, split, shown)
        shown.print(f"{path}: {count} rows", markup=False, soft_wrap=True)
    shown.print(f"to train on it: agentrl train RECIPE env.name=dataset env.source={out}", markup=False, soft_wrap=True)


def _write_labelled(folder: Path, labels: Mapping[str, Json], out: Path) -> None:
    from agentrl.checkpoint.disk import write_whole
    from agentrl.cli.common import console
    from agentrl.errors import UserError, nearest
    from agentrl.eval.labelled import Labelled
    from agentrl.jsonable import dumps

    for key, label in labels.items():
        if key not in ("good", "bad") or not isinstance(label, str):
            raise UserError(f"{key}: a run folder takes good=LABEL and bad=LABEL{nearest(key, ('good', 'bad'))}")
    found = Labelled(folder, **labels)
    shown = console()
    for name, rows, command in (
        ("conversations", found.conversations(), "agentrl sft RECIPE sft.source="),
        ("pairs", found.pairs(), "agentrl reward-model RECIPE reward_model.source="),
    ):
        path = out / f"{name}.jsonl"
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_whole(path, "".join(dumps(row) + "\n" for row in rows))
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
        learn = f"; learn them: {command}{path}" if rows else ""
        shown.print(f"{path}: {len(rows)} {name}{learn}", markup=False, soft_wrap=True)


def _prepare(name: str, values: Mapping[str, Json]) -> Mapping[str, Sequence[Mapping[str, Json]]]:
    from agentrl.errors import UserError
    from agentrl.plugins.registry import construct, load

    made = construct(load("data", name), values, f"data {name}")
    if not isinstance(made, Mapping) or not made:
        raise UserError(f"data {name!r} returned {made!r:.60}; expected the rows of each split by its name")
    return made


def _write(path: Path, rows: Sequence[Mapping[str, Json]], split: str, shown: "Console") -> int:
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from agentrl.data.files import write_parquet
    from agentrl.errors import UserError

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task(escape(split), total=len(rows))
        try:
            write_parquet(path, rows, lambda count: progress.advance(task, count))
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
    return len(rows)
