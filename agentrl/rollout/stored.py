"""Stored rollouts as the objects that they were: the trajectories and groups of a file, and the files of a folder.

A valid sample comes back as it was, to the bit in all that an update reads; `seconds` are rounded, texts have no
secrets. Files may be a stranger's: each valid sample is checked as one that was just sampled.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from agentrl.checkpoint.run_folder import TRAJECTORIES
from agentrl.constraint import Allowed
from agentrl.errors import UserError, nearest
from agentrl.images import FOLDER as IMAGES
from agentrl.images import STORE, ImageSpan
from agentrl.jsonable import loads
from agentrl.plugins.types import Json, Task
from agentrl.rollout.trajectory_file import (
    FACTS,
    FILTERED,
    SURPLUS,
    Row,
    Stored,
    messages_of,
    read_allowed,
    read_columns,
    stored_files,
)
from agentrl.trajectory import (
    Boundary,
    Failure,
    FinishReason,
    Group,
    InvariantError,
    Segment,
    Span,
    ToolUse,
    Trajectory,
    Turn,
    check_invariants,
)

_COLUMNS = ("ids", "loss_mask", "logprobs", "weight_version")
_LINES = ("retried", "release_errors", "tampering")  # of `extra`, tuples of lines


class StoredSample(NamedTuple):
    """A row of a file."""

    facts: Row
    """Its columns of FACTS."""
    trajectory: Trajectory
    """What it says."""


def read_samples(path: Path, weights: Mapping[str, float] | None = None) -> list[StoredSample]:
    """The samples of a Parquet file, in its order. Raises UserError: the file is damaged.

    weights: of the reward parts that a sample does not have, and whose weights are therefore not in the file.
    """
    rows, columns = read_columns(path, [*FACTS], _COLUMNS)
    allowed = read_allowed(path)
    STORE.look_in(path.parent.parent / IMAGES)
    found = []
    for number, row in enumerate(rows):
        try:
            tokens = {name: columns[name][number] for name in _COLUMNS}
            trajectory = _trajectory(row, tokens, allowed[number], weights or {})
            if trajectory.valid:
                check_invariants(trajectory)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError, InvariantError) as error:
            why = " ".join(str(error).split())[:300]
            raise UserError(f"{path}, row {number + 1}: damaged: {why}; move the file away") from error
        found.append(StoredSample(row, trajectory))
    return found


def read_groups(path: Path, weights: Mapping[str, float] | None = None, *, trained: bool = False) -> list[Group]:
    """The groups of a Parquet file, in their order. weights, errors: those of `read_samples`. trained: without
    those that the update of their step did not see."""
    samples = read_samples(path, weights)
    unseen = unseen_groups(samples) if trained else {}
    return as_groups(one for one in samples if one.facts["group"] not in unseen)


def unseen_groups(samples: Iterable[StoredSample]) -> dict[int, str]:
    """Why no update saw a group, by the numbers of those of which that is so."""
    reasons = ((one.facts["group"], one.facts["left_out"]) for one in samples)
    return {group: why for group, why in reasons if why in (FILTERED, SURPLUS)}


def as_groups(samples: Iterable[StoredSample]) -> list[Group]:
    """The samples of a file by their groups."""
    groups = []
    for _, rows in groupby(samples, key=lambda sample: sample.facts["group"]):
        each = [sample.trajectory for sample in rows]
        groups.append(Group.of(each[0].task, each))
    return groups


def _trajectory(
    row: Row, tokens: Mapping[str, npt.NDArray[Any]], allowed: Allowed | None, weights: Mapping[str, float]
) -> Trajectory:
    if missing := next((name for name in _NEEDED if row[name] is None), None):
        raise ValueError(f"its column {missing} is null")
    messages = tuple(messages_of(loads(row["messages"])))
    branches = tuple(tuple(messages_of(one)) for one in loads(row["branches"] or "[]"))
    segments = tuple(Segment(one["start"], one["end"], one["parent"]) for one in row["segments"])
    return Trajectory(
        request_id=row["request"],
        task=Task(row["task"], _mapping(loads(row["task_data"]))),
        sample=row["sample"],
        ids=tokens["ids"],
        loss_mask=tokens["loss_mask"],
        logprobs=tokens["logprobs"],
        weight_version=tokens["weight_version"],
        prompt_length=row["prompt_tokens"],
        turns=_turns(row),
        messages=messages,
        rewards={part["name"]: part["value"] for part in row["rewards"]},
        finish=FinishReason(row["finish"]),
        weights={**weights, **{part["name"]: part["weight"] for part in row["rewards"]}},
        tool_uses=tuple(_tool_use(one) for one in row["tool_uses"]),
        failure=None if row["boundary"] is None else Failure(Boundary(row["boundary"]), row["error"] or ""),
        seconds=dict(row["seconds"]),
        spans=tuple(Span(one["part"], one["start"], one["end"]) for one in row["spans"] or ()),
        tools=tuple(row["tools"]),
        extra=_extra(_mapping(loads(row["extra"]))),
        segments=segments,
        branches=branches,
        seed=row["seed"],
        leaf=_leaf(messages, branches, segments),
        images=tuple(
            ImageSpan(one["start"], one["tokens"], (one["time"], one["height"], one["width"]), str(one["hash"]))
            for one in row["images"] or ()
        ),
        seats={one["name"]: one["reward"] for one in row["seats"] or ()},
        allowed=allowed,
    )


def _turns(row: Row) -> tuple[Turn, ...]:
    calls = row["calls"] or [_NO_CALL] * len(row["turns"])
    return tuple(
        Turn(
            one["start"], one["end"], one["reward"], one["trained"], one.get("state") or "", call["role"] or "",
            _mapping(loads(call["asked"] or "{}")), call["untrained"] or "",
        )
        for one, call in zip(row["turns"], calls, strict=True)
    )  # fmt: skip


_NO_CALL = {"role": None, "asked": None, "untrained": None}


_NEEDED = (
    "group", "request", "task", "sample", "prompt_tokens", "finish", "task_data", "messages", "extra", "turns",
    "rewards", "segments", "tools", "tool_uses", "seconds",
)  # fmt: skip


def _mapping(value: object) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ValueError("its task data or extra is no object")
    return value


def _tool_use(use: Mapping[str, Json]) -> ToolUse:
    metrics = _mapping(loads(use["metrics"]))
    return ToolUse(use["name"], use["turn"], use["seconds"], use["error"], metrics, use["cut"])


def _extra(given: dict[str, Json]) -> dict[str, Json]:
    return {key: tuple(value) if key in (*_LINES, "depths") else value for key, value in given.items()}


def _leaf(messages: Sequence[Json], branches: Sequence[Sequence[Json]], segments: Sequence[Segment]) -> int:
    """The segment in which the conversation of `messages` ends: the last whose path says the same."""
    for leaf in range(len(branches) - 1, -1, -1):
        said: list[Json] = []
        index = leaf
        while index >= 0:
            said[:0] = branches[index]
            index = segments[index].parent if segments[index].parent < index else -1
        if said == list(messages):
            return leaf
    return -1


def folder_files(folder: Path) -> list[Stored]:
    """The Parquet files of a run folder, or any of its form. Raises UserError: it has none."""
    if not (folder / TRAJECTORIES).is_dir():
        raise UserError(f"{folder}: not a folder with stored rollouts ({TRAJECTORIES}/ is missing)")
    found = stored_files(folder / TRAJECTORIES)
    parquet = [one for one in found if one.path.suffix == ".parquet"]
    if found and not parquet:
        raise UserError(f"{folder}: an older version wrote its rollouts, as JSON lines without tokens")
    if not found:
        raise UserError(f"{folder}: no whole step or evaluation is stored there")
    return parquet


def chosen_files(folder: Path, step: int | None = None, split: str | None = None) -> list[Stored]:
    """Those of `folder_files` of this step and this split (`train`, or of evaluations), None: of all. Raises
    UserError: there is none."""
    found = folder_files(folder)
    found = found if split is None else of_split(found, split, f"--split {split}", folder)
    return found if step is None else of_step(found, step, folder)


def of_split(files: Sequence[Stored], split: str, key: str, folder: Path) -> list[Stored]:
    """The files of a split. key: begins the UserError where there is none."""
    if found := [one for one in files if one.split == split]:
        return found
    raise UserError(f"{key}: nothing of it is stored in {folder}{nearest(split, {one.split for one in files})}")


def of_step(files: Sequence[Stored], step: int, folder: Path) -> list[Stored]:
    """The files of a step, or those after which was evaluated. Raises UserError: there is none."""
    if found := [one for one in files if one.step == step]:
        return found
    stored = ranges(sorted({one.step for one in files}))
    raise UserError(f"--step {step}: not stored in {folder}; stored are {stored}")


def training_files(given: Sequence[str]) -> list[Path]:
    """The files to train on, a file a step: those that are named, and the training steps of folders.

    Raises UserError: nothing is stored there, or no tokens.
    """
    files: list[Path] = []
    for name in given:
        path = Path(name)
        if path.is_dir():
            own = [one.path for one in folder_files(path) if not one.evaluation]
            if not own:
                raise UserError(f"{path}: holds evaluations only; name their files to train on them")
            files += own
        elif path.suffix != ".parquet":
            why = "JSON lines hold no tokens" if ".jsonl" in path.name else "expected a run folder or .parquet files"
            raise UserError(f"--from {path}: {why if path.exists() else 'there is no such file or folder'}")
        elif not path.is_file():
            raise UserError(f"--from {path}: there is no such file")
        else:
            files.append(path)
    return [path.absolute() for path in files]


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text, such as `1-40, 60`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
