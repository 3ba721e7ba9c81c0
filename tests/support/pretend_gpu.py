"""A GPU that is none: tensors that say they are on `cuda:0`, with their values in the memory of this process.

As on a GPU, an operation that is given tensors of both kinds raises; so does reading one from the host but by a copy.
The code under test asks `torch.cuda` what there is and takes its branches for a GPU. Kernels are the CPU's: what is
computed is right, how fast it is says nothing.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda", 0)
aten = torch.ops.aten

COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
"""They may take both kinds."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Their indices, and these alone, may lie on the host; a copy that waits is made of each."""
SCALARS = {Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__}
READ: list[str] = []
"""Names of what the host waited for the GPU by, in order: a copy to the host, a scalar, an index that lay there."""


class OnGpu(Tensor):
    """values: what it holds. To torch's own code it is on no device (meta), which needs no driver."""

    values: Tensor
    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, requires_grad: bool = False) -> "OnGpu":
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls, values.size(), values.stride(), values.storage_offset(), dtype=values.dtype, device="meta",
            requires_grad=requires_grad,
        )  # type: ignore[attr-defined]  # fmt: skip
        made.values = values
        return made

    def __repr__(self, **options: Any) -> str:
        return f"OnGpu({self.values!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SCALARS:  # they ask the driver for the device
            READ.append(func.__name__)
            return func(args[0].values, *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class PretendGpu(TorchDispatchMode):
    """Makes what is made there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    here = [x for x in given if isinstance(x, OnGpu)]
    wanted = kwargs.get("device")
    device = None if wanted is None else torch.device(wanted)
    if here and func not in COPIES:
        check_mix(func, args, given)
    to_gpu = (device is not None and device.type in ("cuda", "meta")) or (device is None and bool(here))
    if func is aten.copy_.default and not isinstance(args[0], OnGpu):
        to_gpu = False
        READ.append("copy_")
    if func is aten._to_copy.default and here and not to_gpu:
        READ.append("cpu")
    plain = {**kwargs, **({"device": torch.device("cpu")} if device is not None and (to_gpu or here) else {})}
    if plain.get("pin_memory"):
        plain["pin_memory"] = False
    inside = lambda x: x.values if isinstance(x, OnGpu) else x  # noqa: E731
    with torch.inference_mode(False), torch.no_grad():
        work = aten.conj_physical.default if func is aten._conj.default else func  # what is lazy would be lost here
        found = work(*tree_map(inside, args), **tree_map(inside, plain))
        if not to_gpu:
            return found
        wrapped = tree_map(lambda x: OnGpu(x) if isinstance(x, Tensor) else x, found)
        return return_and_correct_aliasing(func, args, dict(kwargs), wrapped) if here else wrapped


def check_mix(func: Any, args: Any, given: list[Tensor]) -> None:
    """Raises RuntimeError, as torch does: a tensor of the host with dimensions beside one of the GPU."""
    if func in INDEXED:
        if not isinstance(args[0], OnGpu):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        if any(isinstance(index, Tensor) and not isinstance(index, OnGpu) for index in args[1]):
            READ.append("index")
        given = [args[0], *(x for x in args[2:] if isinstance(x, Tensor))]
    for tensor in given:
        if not isinstance(tensor, OnGpu) and tensor.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu: {func}"
            )


def to_gpu(module: Any) -> Any:
    """A module's parameters and buffers there, in place."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(OnGpu(parameter.detach()), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnGpu(buffer)
    module.tie_weights()
    return module


class Generator(torch.Generator):
    """Of whatever device, on the CPU."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, "cpu")


@contextmanager
def dynamo_forgets() -> Iterator[None]:
    """Let dynamo forget at the end of the block: it skips for good what it met under a dispatch mode."""
    try:
        yield
    finally:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


@contextmanager
def pretending(patch: pytest.MonkeyPatch, memory: int = 24 << 30) -> Iterator[list[str]]:
    """One GPU with so many bytes, until the block ends."""
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "_lazy_init": lambda: None, "is_initialized": lambda: False,
        "mem_get_info": lambda device=None: (memory, memory),
        "synchronize": lambda device=None: None, "empty_cache": lambda: None,
        "max_memory_allocated": lambda device=None: 1 << 30, "reset_peak_memory_stats": lambda device=None: None,
        "get_device_name": lambda device=None: "NVIDIA H200",
        "is_bf16_supported": lambda including_emulation=True: True,
    }  # fmt: skip
    with dynamo_forgets(), patch.context() as patched:
        for name, answer in answers.items():
            patched.setattr(torch.cuda, name, answer)
        patched.setattr(torch, "Generator", Generator)
        make = torch.tensor
        patched.setattr(torch, "tensor", lambda data, device=None, **more: make(data, **more).to(device or "cpu"))
        READ.clear()
        with PretendGpu():
            yield READ


def flash(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What varlen_attn is documented to do."""
    assert torch.equal(cu_q, cu_k)
    assert cu_q.dtype == torch.int32
    assert max_q == max_k == int(cu_q.diff().max())
    assert window_size == (-1, 0)
    assert int(cu_q[-1]) == len(query)
    parts = []
    for low, high in zip(cu_q.tolist(), cu_q[1:].tolist(), strict=False):
        q, k, v = (x[low:high].transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
