"""Trajectories on disk: one JSON object a line, compressed with zstd where the file would be large."""

import glob
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import zstandard

from agentrl.errors import contained
from agentrl.recipe.schema import TrajectoriesSection
from agentrl.trajectory import Group, Trajectory

_DEPTH = 100  # lists and mappings in each other that are written out
_VALUES = 100_000  # values in all that are written out, of one thing
_BITS = 10_000  # of an integer; Python reads and writes no longer ones as text
STEP, EVALUATION = "step_", "eval_"  # how names of files begin
LARGE = 4_000_000  # bytes; a larger file is compressed, and its name ends in .zst


class Journal:
    """The trajectories of a run, in files by step and evaluation, as `track.trajectories` says."""

    def __init__(self, policy: TrajectoriesSection, folder: Callable[[], Path]) -> None:
        """folder: returns that of the files, and makes it where it is not there."""
        self._policy, self._folder = policy, folder

    def step(self, step: int, groups: Sequence[Group]) -> None:
        """Write the step, if it is due, and remove files that are no longer kept."""
        if not self._policy.every or step % self._policy.every:
            return
        if 0 < (most := self._policy.sample) < len(groups):
            groups = [groups[i * len(groups) // most] for i in range(most)]
        write_journal(self._folder(), f"{STEP}{step}", groups)
        self._prune(STEP)

    def evaluation(self, split: str, step: int, groups: Sequence[Group], solved: Callable[[Trajectory], bool]) -> None:
        """Write the evaluation of `split` after `step`; the first one of the run is kept, for the report."""
        if self._policy.every:
            write_journal(self._folder(), f"{EVALUATION}{split}_{step}", groups, solved)
            self._prune(f"{EVALUATION}{split}_", first=1)

    def _prune(self, prefix: str, first: int = 0) -> None:
        """Remove all but the `first` oldest and the `keep` newest files `<prefix><step>`."""
        if not self._policy.keep:
            return
        found: dict[int, list[Path]] = {}
        for path in self._folder().glob(f"{glob.escape(prefix)}*.jsonl*"):
            number = path.name.removeprefix(prefix).partition(".")[0]
            if number.isdecimal():
                found.setdefault(int(number), []).append(path)
        for step in sorted(found)[first : max(first, len(found) - self._policy.keep)]:
            for path in found[step]:
                path.unlink(missing_ok=True)


def write_journal(
    folder: Path, name: str, groups: Sequence[Group], solved: Callable[[Trajectory], bool] | None = None
) -> Path:
    """Return all samples of `groups`, the failed ones too, as `<name>.jsonl` or `<name>.jsonl.zst`; returns the path.

    solved: asked of every sample that is whole."""
    each = [t for g in groups for t in (*g.trajectories, *g.failed)]
    words = [solved(t) if solved and t.valid else None for t in each]
    lines = [json.dumps(record(t, solved=word), ensure_ascii=False) for t, word in zip(each, words, strict=True)]
    data = "".join(line + "\n" for line in lines).encode("utf-8", "replace")
    plain, packed = folder / f"{name}.jsonl", folder / f"{name}.jsonl.zst"
    path, other = (packed, plain) if len(data) > LARGE else (plain, packed)
    path.write_bytes(zstandard.compress(data) if path == packed else data)
    other.unlink(missing_ok=True)
    return path


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that `write_journal` wrote."""
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.decompress(data)
    return [json.loads(line) for line in data.split(b"\n") if line]


def record(trajectory: Trajectory, *, tokens: bool = False, solved: bool | None = None) -> dict[str, Any]:
    """Return the object; every value can be written as JSON. tokens: with ids, mask, logprobs and versions a token.
    solved: the environment's word, None where it was not asked for."""
    t = trajectory
    line: dict[str, Any] = {
        "request": t.request_id,
        "task": _plain(t.task.id),
        "data": _plain(t.task.data),
        "sample": t.sample,
        "reward": t.reward,
        "rewards": dict(t.rewards),
        "weights": dict(t.weights),
        "solved": solved,
        "finish": str(t.finish),
        "failure": None if t.failure is None else {"boundary": str(t.failure.boundary), "message": t.failure.message},
        "turns": [
            {"start": turn.start, "end": turn.end, "reward": turn.reward, "trained": turn.trained} for turn in t.turns
        ],
        "segments": [[segment.start, segment.end, segment.parent] for segment in t.segments],
        "tokens": {"prompt": t.prompt_length, "sampled": t.sampled_tokens, "all": len(t.ids)},
        "messages": _plain(t.messages),
        "tools": list(t.tools),
        "tool_uses": [
            {
                "name": u.name,
                "turn": u.turn,
                "seconds": round(u.seconds, 6),
                "error": u.error,
                "cut": u.cut,
                "metrics": dict(u.metrics),
            }
            for u in t.tool_uses
        ],
        "seconds": {name: round(value, 6) for name, value in t.seconds.items()},
        "extra": _plain(t.extra),
    }
    if tokens:
        line["ids"] = t.ids.tolist()
        line["loss_mask"] = t.loss_mask.tolist()
        line["logprobs"] = [round(p, 6) for p in t.logprobs.tolist()]
        line["weight_version"] = t.weight_version.tolist()
    return line


def _plain(value: Any) -> Any:
    """Convert anything to JSON's own types: what has no such form (an image, an object, a list in itself) is written as
    its name, and so is what raises as it is read."""
    return _written(value, (), count())


def _written(value: Any, inside: tuple[Any, ...], written: Iterator[int]) -> Any:
    """Convert a value. inside: what it is in, outermost first. written: counts the values."""
    if next(written) >= _VALUES:
        return "<left out>"
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _BITS else f"<integer of {value.bit_length()} bits>"
    if isinstance(value, float):
        return value if math.isfinite(value) else f"<{value}>"
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if not isinstance(value, Mapping | Sequence):
        return f"<{type(value).__name__}>"
    if len(inside) == _DEPTH or any(one is value for one in inside):
        return f"<{type(value).__name__} nested too deeply>"
    inside = (*inside, value)
    try:
        if isinstance(value, Mapping):
            return {str(key): _written(item, inside, written) for key, item in _some(value.items(), written)}
        return [_written(item, inside, written) for item in _some(value, written)]
    except BaseException as error:  # noqa: BLE001 - boundary: somebody's own mapping or sequence may do anything here
        contained(error)
        return f"<{type(value).__name__}>"


def _some(items: Any, written: Iterator[int]) -> Iterator[Any]:
    """Return `items`, as long as there is room."""
    for item in items:
        yield item
        if next(written) >= _VALUES:
            return
