"""How much memory tensors take, also those without data (on the device `meta`)."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Held(TorchDispatchMode):
    """The most bytes that tensors made inside held at a time, and the elements of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out
