"""Trajectories on disk: one JSON object a line, compressed with zstd where the file would be large."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zstandard

from agentrl.rollout.record import record
from agentrl.trajectory import Group, Trajectory

LARGE = 4_000_000  # bytes; a larger file is compressed, and its name ends in .zst


def write_journal(
    folder: Path, name: str, groups: Sequence[Group], solved: Callable[[Trajectory], bool] | None = None
) -> Path:
    """All samples of `groups`, the failed ones too, as `<name>.jsonl` or `<name>.jsonl.zst`; returns the path.

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
    """The objects of a file that `write_journal` wrote."""
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.decompress(data)
    return [json.loads(line) for line in data.split(b"\n") if line]
