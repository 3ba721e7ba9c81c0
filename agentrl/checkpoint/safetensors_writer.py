"""Write safetensors files tensor by tensor: only one tensor at a time is in memory.

The format: eight bytes with the header's length, a header in JSON (name -> dtype, shape, offsets), then the values.
https://github.com/huggingface/safetensors#format
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from agentrl.jsonable import dumps

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """Name, dtype and shape of a tensor that is written later."""

    name: str
    """Name of the tensor in the file."""
    dtype: torch.dtype
    """Its dtype."""
    shape: tuple[int, ...]
    """Its shape."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def write_file(path: Path, slots: Sequence[Slot], tensors: Iterable[Tensor]) -> None:
    """Write `tensors`, in the order of `slots`. Raises OSError; ValueError for one that does not match its slot."""
    with path.open("wb") as file:
        file.write(_header(slots))
        for slot, tensor in zip(slots, tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (slot.dtype, slot.shape):
                raise ValueError(f"{slot.name} is {tensor.dtype} {tuple(tensor.shape)}, not {slot.dtype} {slot.shape}")
            _write_values(file, tensor)


def _header(slots: Sequence[Slot]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for slot in slots:
        begin, end = end, end + slot.size
        entries[slot.name] = {"dtype": NAMES[slot.dtype], "shape": slot.shape, "data_offsets": [begin, end]}
    text = dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _write_values(file: IO[bytes], tensor: Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    file.write(flat.view(torch.uint8).numpy().data)


def shards(slots: Iterable[Slot], limit: int) -> Iterator[list[Slot]]:
    """Split `slots`, in order, into runs of at most `limit` bytes; a larger tensor is a run of its own."""
    run: list[Slot] = []
    size = 0
    for slot in slots:
        if run and size + slot.size > limit:
            yield run
            run, size = [], 0
        run.append(slot)
        size += slot.size
    if run:
        yield run


def write_model(folder: Path, slots: Sequence[Slot], tensors: Iterable[Tensor], limit: int) -> None:
    """Write `model.safetensors`, or numbered files of at most `limit` bytes and the index that `from_pretrained`
    reads. `tensors` come in the order of `slots`."""
    runs = list(shards(slots, limit))
    names = ["model.safetensors"]
    if len(runs) != 1:
        names = [f"model-{i:05d}-of-{len(runs):05d}.safetensors" for i in range(1, len(runs) + 1)]
    coming = iter(tensors)
    for name, run in zip(names, runs, strict=True):
        write_file(folder / name, run, (next(coming) for _ in run))
    if len(runs) > 1:
        weight_map = {slot.name: name for name, run in zip(names, runs, strict=True) for slot in run}
        index = {"metadata": {"total_size": sum(slot.size for slot in slots)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(dumps(index, indent=2), encoding="utf-8")
