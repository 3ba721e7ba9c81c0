"""A torch distributed checkpoint: a dictionary of tensors, sharded or whole, that any number of ranks wrote and any
other number reads.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from agentrl.checkpoint import metadata

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError, CheckpointException)
"""What comes of files that are missing, damaged, or of something else."""

Described = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> whole shape and dtype."""


def write(tensors: Mapping[str, Tensor], folder: Path, group: Any = None) -> None:
    """Every rank of `group` calls this with its parts (None: one process); what only one rank has is saved as well.

    Raises what the file system raises, inside of torch's CheckpointException on every rank.
    """
    writer = dcp.FileSystemWriter(folder, sync_files=False)  # who renames the folder flushes it first
    dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def describe(folder: Path) -> Described:
    """What was written there. Raises OSError, pickle.UnpicklingError and others where it is none or is damaged."""
    entries: Mapping[str, Any] = metadata.read(folder / metadata.FILE).state_dict_metadata
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}


def missing(folder: Path) -> str | None:
    """The first file that was written to `folder`, and is not there or not as long as it was; None: all are whole."""
    if not (folder / metadata.FILE).is_file():
        return metadata.FILE
    ends: dict[str, int] = {}
    for place in metadata.read(folder / metadata.FILE).storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    whole = {name for name, end in ends.items() if (folder / name).is_file() and (folder / name).stat().st_size >= end}
    return min(ends.keys() - whole, default=None)


def read(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Into `tensors`, in place, each rank its own part; no collective. A dtype may differ from what was written."""
    dcp.load(dict(tensors), storage_reader=metadata.Reader(folder), no_dist=True)


def line(error: BaseException) -> str:
    """One line of what an operation of this module raised."""
    while failures := getattr(error, "failures", None):  # of several ranks: the first
        error = next(iter(failures.values()))[0]
    return str(error).strip().partition("\n")[0] or type(error).__name__
