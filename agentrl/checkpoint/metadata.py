"""The `.metadata` of a torch distributed checkpoint, read as data.

torch writes it as a pickle, and a pickle runs what its writer likes. Here its names stand for nothing but records,
which are then checked, and torch's own objects are made of what they hold: a run folder may come from anybody.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

T = TypeVar("T")
FILE = ".metadata"
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
"""Every class and function that torch writes there for tensors -> what a record of it is called."""


class Reader(dcp.FileSystemReader):
    """torch's, which unpickles nothing."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises OSError; pickle.UnpicklingError for anything but what is written for tensors."""
        metadata = read(Path(self.path) / FILE)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read(path: Path) -> Metadata:
    """Raises OSError; pickle.UnpicklingError for anything but what is written for tensors."""
    with path.open("rb") as file:
        try:
            return _metadata(_Unpickler(file).load())
        except OSError:
            raise
        except Exception as error:  # boundary: what a damaged or a hostile pickle does to a reader is without number
            line = str(error).strip().partition("\n")[0] or type(error).__name__
            raise pickle.UnpicklingError(f"{path.name} is not what is written for tensors: {line}") from error


class _Record:
    """What stands for an object of torch's: its name, the arguments that it was made with, its state."""

    name = ""

    def __new__(cls, *arguments: Any) -> "_Record":
        record = super().__new__(cls)
        record.arguments, record.state = arguments, {}
        return record

    arguments: tuple[Any, ...]
    state: Any

    def __init__(self, *arguments: Any) -> None:
        """`__new__` has kept them."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (known := _RECORDS.get((module, name))) is not None:
            return type("_Record", (_Record,), {"name": known})
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no business there")


def _metadata(record: Any) -> Metadata:
    state = _state(record, "Metadata")
    tensors: dict[str, Any] = {
        _checked(name, str): _tensor(entry) for name, entry in state["state_dict_metadata"].items()
    }
    places = dict(_place(index, info) for index, info in state["storage_data"].items())
    return Metadata(tensors, planner_data={name: (name,) for name in tensors}, storage_data=places)


def _tensor(record: Any) -> TensorStorageMetadata:
    state = _state(record, "TensorStorageMetadata")
    dtype = _named(state["properties"], "TensorProperties").state[0]
    return TensorStorageMetadata(
        TensorProperties(dtype=_checked(dtype, torch.dtype)), _size(state["size"]), [_chunk(c) for c in state["chunks"]]
    )


def _chunk(record: Any) -> ChunkStorageMetadata:
    state = _state(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_size(state["offsets"]), _size(state["sizes"]))


def _place(index: Any, info: Any) -> tuple[MetadataIndex, _StorageInfo]:
    at, where = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
    name = _checked(where["relative_path"], str)
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no file beside it")
    if where.get("transform_descriptors"):
        raise ValueError("its files are compressed, which none of ours is")
    offset = None if at.get("offset") is None else _size(at["offset"])
    number = at.get("index")
    return (
        MetadataIndex(_checked(at["fqn"], str), offset, None if number is None else _checked(number, int)),
        _StorageInfo(name, _checked(where["offset"], int), _checked(where["length"], int)),
    )


def _size(record: Any) -> torch.Size:
    (numbers,) = _named(record, "Size").arguments
    return torch.Size([_checked(number, int) for number in numbers])


def _state(record: Any, name: str) -> Mapping[str, Any]:
    return _checked(_named(record, name).state, dict)


def _named(record: Any, name: str) -> _Record:
    if not isinstance(record, _Record) or record.name != name:
        raise TypeError(f"{getattr(record, 'name', type(record).__name__)} stands in the place of {name}")
    return record


def _checked(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} stands in the place of {kind.__name__}")
    return value
