"""`Journal`: the trajectories of a run as it goes: each step and evaluation whole, and what is in flight as it ends."""

import glob
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from agentrl.plugins.types import Task
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.groups import Contrast, contrast
from agentrl.rollout.trajectory_file import IN_FLIGHT, TRAIN, Row, encode_plain, row, write_trajectories
from agentrl.rollout.trajectory_file import left_out as why_left_out
from agentrl.trajectory import Group, Learned, Trajectory

STEP, EVALUATION = "step_", "eval_"  # how names of files begin
IN_FLIGHT_SECONDS = 1.0
"""Least time between two writes of what is in flight: steps that are shorter pay nothing for it."""


class Journal:
    """The trajectories of a run, in files by step and evaluation, as `track.trajectories` says."""

    def __init__(
        self,
        policy: TrajectoriesSection,
        folder: Callable[[], Path],
        environment: Callable[[Task], str] = lambda task: "",
    ) -> None:
        """folder: returns that of the files, and makes it where it is not there. environment: the name of that of a
        task."""
        self._policy, self._folder, self._environment = policy, folder, environment
        self._rows: dict[int, tuple[Group, list[Row]]] = {}  # of the groups in flight, by identity
        self._unwritten: dict[int, list[Row]] = {}
        """Of `_rows`, what is not in the file of those in flight."""
        self._wrote = time.monotonic()
        self._refused: OSError | None = None

    def finished(self, group: Group) -> None:
        """Note a group of a step that is not whole yet, and write down those noted, once a second. What the disk
        refuses is raised by `step`."""
        if not self._policy.every:
            return
        rows = [self._row(t) for t in _all(group)]
        self._rows[id(group)] = group, rows
        self._unwritten[id(group)] = rows
        if time.monotonic() - self._wrote < IN_FLIGHT_SECONDS:
            return
        try:
            with (self._folder() / IN_FLIGHT).open("ab") as file:
                file.write(b"".join(map(_lines, self._unwritten.values())))
            self._unwritten.clear()
            self._wrote = time.monotonic()
        except OSError as error:
            self._refused = error

    def step(
        self,
        step: int,
        groups: Sequence[Group],
        learned: Sequence[Learned] = (),
        *,
        left_out: Mapping[str, Sequence[Group]] = MappingProxyType({}),
        split: str = TRAIN,
    ) -> None:
        """Write a step that is whole, if it is due, and remove files that are no longer kept.

        learned: what the update made of the valid trajectories of `groups`, in their order. left_out: by why, the
        groups that the update did not see. split: of the tasks.
        """
        if not self._policy.every:
            return
        if self._refused is not None:
            raise self._refused
        if step % self._policy.every == 0:
            place = {"step": step, "evaluation": False, "split": split}
            self._write(f"{STEP}{step}", place, *self._step(groups, learned, left_out))
            self._prune(STEP)
        self._forget([*groups, *chain(*left_out.values())])
        written = (rows for key, (_, rows) in self._rows.items() if key not in self._unwritten)
        left = b"".join(map(_lines, written))
        path = self._folder() / IN_FLIGHT
        if left:
            path.write_bytes(left)
        else:
            path.unlink(missing_ok=True)

    def _forget(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._rows.pop(id(group), None)
            self._unwritten.pop(id(group), None)

    def _step(
        self, groups: Sequence[Group], learned: Sequence[Learned], left_out: Mapping[str, Sequence[Group]]
    ) -> tuple[list[Trajectory], list[Row], list[Learned | None]]:
        made = dict(zip((id(t) for group in groups for t in group.trajectories), learned, strict=bool(learned)))
        every: list[tuple[Group, str | None]] = [(group, None) for group in groups]
        every += [(group, why) for why, others in left_out.items() for group in others]
        most = min(self._policy.sample or len(every), len(every))
        chosen = [i * len(every) // most for i in range(most)]
        trajectories: list[Trajectory] = []
        rows: list[Row] = []
        for index in chosen:
            group, unseen = every[index]
            _, known = self._rows.get(id(group)) or (group, [self._row(t) for t in _all(group)])
            teaches = contrast(group)
            why = None if teaches is Contrast.VARIED else str(teaches)
            for t, facts in zip(_all(group), known, strict=True):
                rows.append({**facts, "group": index, "left_out": why_left_out(t, made.get(id(t)), why) or unseen})
                trajectories.append(t)
        return trajectories, rows, [made.get(id(t)) for t in trajectories]

    def evaluation(self, split: str, step: int, groups: Sequence[Group], solved: Callable[[Trajectory], bool]) -> None:
        """Write the evaluation of `split` after `step`; the first one of the run is kept, for the report.

        solved: asked of every sample that is whole."""
        if not self._policy.every:
            return
        each = [(index, t) for index, group in enumerate(groups) for t in _all(group)]
        words = [solved(t) if t.valid else None for _, t in each]
        rows = [
            {**self._row(t), "solved": word, "group": index, "left_out": why_left_out(t, None, None)}
            for (index, t), word in zip(each, words, strict=True)
        ]
        place = {"step": step, "evaluation": True, "split": split}
        self._write(f"{EVALUATION}{split}_{step}", place, [t for _, t in each], rows)
        self._prune(f"{EVALUATION}{split}_", first=1)

    def _row(self, trajectory: Trajectory) -> Row:
        return row(trajectory, environment=self._environment(trajectory.task))

    def _write(
        self,
        name: str,
        place: Row,
        trajectories: Sequence[Trajectory],
        rows: Sequence[Row],
        learned: Sequence[Learned | None] = (),
    ) -> None:
        folder = self._folder()
        placed = [{**facts, **place} for facts in rows]
        write_trajectories(folder / f"{name}.parquet", placed, trajectories, learned)
        for ending in ("jsonl", "jsonl.zst"):  # of an older version, which was here before
            (folder / f"{name}.{ending}").unlink(missing_ok=True)

    def _prune(self, prefix: str, first: int = 0) -> None:
        """Remove all but the `first` oldest and the `keep` newest files `<prefix><step>`."""
        if not self._policy.keep:
            return
        found: dict[int, list[Path]] = {}
        for path in self._folder().glob(f"{glob.escape(prefix)}*"):
            number, _, ending = path.name.removeprefix(prefix).partition(".")
            if number.isdecimal() and ending in ("parquet", "jsonl", "jsonl.zst"):
                found.setdefault(int(number), []).append(path)
        for step in sorted(found)[first : max(first, len(found) - self._policy.keep)]:
            for path in found[step]:
                path.unlink(missing_ok=True)


def _all(group: Group) -> tuple[Trajectory, ...]:
    return (*group.trajectories, *group.failed)


def _lines(rows: Sequence[Row]) -> bytes:
    return "".join(encode_plain(row) + "\n" for row in rows).encode()
