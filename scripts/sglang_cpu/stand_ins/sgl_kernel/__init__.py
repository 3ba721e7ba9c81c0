"""Stand-ins, in plain torch, for the compiled functions that SGLang's scheduler calls on a CPU.

`sgl_kernel` has no build for this case. Names that are only imported, never called, are served by `__getattr__`.

Page-locked memory, which SGLang keeps LoRA adapters in, is there only with an accelerator: without one, whoever asks
torch for it in this process is given ordinary memory.

SGLang starts its processes anew, as CUDA wants it: each would import all of it once more. Without an accelerator they
are forked.
"""

import ctypes
import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.0.0+agentrl.cpu"

_ALLOCATING = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def allocate(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return allocate


if not torch.accelerator.is_available():
    for _name in _ALLOCATING:
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda tensor, *device: tensor
    multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")


_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_sigmoid_mul", "fused_qk_gemma_rmsnorm", "fused_qk_gemma_rmsnorm_with_gate",
    "fused_qkvzba_split_reshape_cat_contiguous",
):  # fmt: skip
    _LIBRARY.define(_name + "_cpu(Tensor given) -> Tensor")  # looked up where Qwen's models that see are imported


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    width: int,
) -> None:
    """table[rows[i], starts[i]:ends[i]] = the next ends[i] - starts[i] of `places`."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=False):
        count = end - start
        table[row, start:end] = places[taken : taken + count].to(table.dtype)
        taken += count


def copy_all_layer_kv_cache_cpu(
    pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """In each layer's buffer (its address, and the bytes of a row) copy rows `sources` to rows `targets`."""
    moves = list(zip(targets.tolist(), sources.tolist(), strict=True))
    for pointer, size in zip(pointers.tolist(), strides.tolist(), strict=False):
        kept = [ctypes.string_at(pointer + source * size, size) for _, source in moves]  # before any is written over
        for (target, _), row in zip(moves, kept, strict=True):
            ctypes.memmove(pointer + target * size, row, size)


def __getattr__(name: str) -> Callable[..., None]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for a CPU")

    return missing
