"""The state of a role that one process trains: a safetensors file of whole tensors, which any number of ranks reads.

Several ranks write a torch distributed checkpoint (sharded.py), whose import takes a second, and which takes a
millisecond a tensor.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentrl.checkpoint.gather import is_sharded, part_of
from agentrl.checkpoint.safetensors_writer import NAMES, Slot, write_file

UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""Raised for a file that is missing, damaged or of another kind."""

Described = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> whole shape and dtype."""

FILE = "state.safetensors"
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the tensors into a folder, which is made. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    slots = [Slot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_file(folder / FILE, slots, tensors.values())


def describe(folder: Path) -> Described:
    """Names, shapes and dtypes. Raises one of UNREADABLE."""
    with safe_open(folder / FILE, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        return {name: (tuple(each.get_shape()), _DTYPES[each.get_dtype()]) for name, each in slices.items()}


def missing(folder: Path) -> str | None:
    """The file's name where it is missing or not whole."""
    try:
        describe(folder)
    except UNREADABLE:
        return FILE
    return None


def read(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill `tensors` in place, each rank its own part, without collectives. A dtype may differ from the written one.

    Raises one of UNREADABLE.
    """
    with safe_open(folder / FILE, framework="pt") as file, torch.no_grad():
        for name, tensor in tensors.items():
            if is_sharded(tensor):
                size, offset = part_of(tensor)
                if size != tuple(tensor.shape):
                    if all(size):
                        part = tuple(slice(begin, begin + n) for begin, n in zip(offset, size, strict=True))
                        tensor.to_local().copy_(file.get_slice(name)[part])
                    continue
                tensor = tensor.to_local()
            tensor.copy_(file.get_tensor(name))
