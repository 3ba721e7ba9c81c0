"""A torch distributed checkpoint: named tensors, sharded or whole, written and read by any numbers of ranks.

torch writes its `.metadata` as a pickle, and unpickling runs what the writer likes. As a run folder may come from
anybody, it is read as data here: names in the pickle become plain records, which are checked and converted.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agentrl.checkpoint import disk
from agentrl.checkpoint.state_file import Described

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError, CheckpointException)
"""Raised for files that are missing, damaged or of another kind."""

T = TypeVar("T")
METADATA = ".metadata"
_OF_TORCH = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    **{
        (_OF_TORCH, name): name
        for name in (
            "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "TensorProperties",
            "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "_StorageInfo",
    ("torch", "Size"): "Size",
    ("torch.serialization", "_get_layout"): "_get_layout",
    ("pathlib", "PosixPath"): "Path",
    ("pathlib", "WindowsPath"): "Path",
    ("pathlib._local", "PosixPath"): "Path",
    ("pathlib._local", "WindowsPath"): "Path",
}  # fmt: skip
"""Every class and function that torch writes there for tensors -> the name of its record."""


def write(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the tensors of every rank of `group`, all of which call this (None: one process).

    Raises OSError, or RuntimeError on every rank: its cause holds what the file system raised on any of them.
    """
    writer = FileSystemWriter(folder, sync_files=False)  # the folder is flushed before it is renamed
    try:
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # which is no Exception
        raise RuntimeError(disk.line(error)) from error


def describe(folder: Path) -> Described:
    """Names, shapes and dtypes. Raises one of UNREADABLE."""
    entries: Mapping[str, Any] = read_metadata(folder / METADATA).state_dict_metadata
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}


def missing(folder: Path) -> str | None:
    """The first file of the checkpoint that is missing or too short; None: all are complete."""
    if not (folder / METADATA).is_file():
        return METADATA
    ends: dict[str, int] = {}
    for place in read_metadata(folder / METADATA).storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    whole = {name for name, end in ends.items() if (folder / name).is_file() and (folder / name).stat().st_size >= end}
    return min(ends.keys() - whole, default=None)


def read(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill `tensors` in place, each rank its own part, without collectives. A dtype may differ from the written one."""
    load(dict(tensors), storage_reader=Reader(folder), no_dist=True)


class Reader(FileSystemReader):
    """torch's reader, but it unpickles nothing."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The metadata, read as data. Raises one of UNREADABLE."""
        metadata = read_metadata(Path(self.path) / METADATA)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_metadata(path: Path) -> Metadata:
    """Raises OSError; pickle.UnpicklingError for a file that is not a checkpoint of tensors."""
    with path.open("rb") as file:
        try:
            return _metadata(_Unpickler(file).load())
        except OSError:
            raise
        except Exception as error:  # boundary: a damaged or hostile pickle may raise anything
            line = str(error).strip().partition("\n")[0] or type(error).__name__
            raise pickle.UnpicklingError(f"{path.name} is not what is written for tensors: {line}") from error


class _Record:
    """Replaces an object of torch: the class's name, the constructor's arguments, the state."""

    name = ""

    def __new__(cls, *arguments: object) -> "_Record":
        record = super().__new__(cls)
        record.arguments, record.state = arguments, {}
        return record

    arguments: tuple[Any, ...]
    state: Any

    def __init__(self, *arguments: object) -> None:
        """Do nothing: `__new__` has stored them."""

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> object:
        if (known := _RECORDS.get((module, name))) is not None:
            return type("_Record", (_Record,), {"name": known})
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed there")


def _member(kind: object, name: object) -> _Record:
    """A member of an enum, as Python before 3.11.4 pickles it: by `getattr`, of the enum, and its name."""
    if not (isinstance(kind, type) and issubclass(kind, _Record)):
        raise TypeError(f"an attribute of {kind!r} is asked for")
    return kind(name)


def _metadata(record: object) -> Metadata:
    state = _state(record, "Metadata")
    tensors: dict[str, Any] = {
        _checked(name, str): _tensor(entry) for name, entry in state["state_dict_metadata"].items()
    }
    storage = dict(_storage(index, info) for index, info in state["storage_data"].items())
    return Metadata(tensors, planner_data={name: (name,) for name in tensors}, storage_data=storage)


def _tensor(record: object) -> TensorStorageMetadata:
    state = _state(record, "TensorStorageMetadata")
    dtype = _named(state["properties"], "TensorProperties").state[0]
    return TensorStorageMetadata(
        TensorProperties(dtype=_checked(dtype, torch.dtype)), _size(state["size"]), [_chunk(c) for c in state["chunks"]]
    )


def _chunk(record: object) -> ChunkStorageMetadata:
    state = _state(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(state["offsets"]), _size(state["sizes"]))


def _storage(index: object, info: object) -> tuple[MetadataIndex, _StorageInfo]:
    at, where = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
    name = _checked(where["relative_path"], str)
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file beside it")
    if where.get("transform_descriptors"):
        raise ValueError("its files are compressed, which is not supported")
    offset = None if at.get("offset") is None else _size(at["offset"])
    number = at.get("index")
    return (
        MetadataIndex(_checked(at["fqn"], str), offset, None if number is None else _checked(number, int)),
        _StorageInfo(name, _checked(where["offset"], int), _checked(where["length"], int)),
    )


def _size(record: object) -> torch.Size:
    (numbers,) = _named(record, "Size").arguments
    return torch.Size([_checked(number, int) for number in numbers])


def _state(record: object, name: str) -> Mapping[str, Any]:
    return _checked(_named(record, name).state, dict)


def _named(record: object, name: str) -> _Record:
    if not isinstance(record, _Record) or record.name != name:
        raise TypeError(f"{getattr(record, 'name', type(record).__name__)} found instead of {name}")
    return record


def _checked(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} found instead of {kind.__name__}")
    return value
