"""What is sent: a model's weights, one whole tensor at a time, by the names that servers load."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

NamedTensor = tuple[str, Tensor]


class ModelWeights:
    """The weights of a transformers module, read anew by each iteration; what is tied is given once.

    Sharded parameters (FSDP2) are gathered one by one, so the whole model never stands twice: every rank must iterate,
    to the end and in step with the others (rank 0 publishes, the rest call `follow`).
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __iter__(self) -> Iterator[NamedTensor]:
        seen: set[int] = set()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield name, whole(tensor)

    def follow(self) -> None:
        """What ranks other than 0 do while rank 0 publishes."""
        for _ in self:
            pass


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one (a collective), detached."""
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather is not None else tensor).detach()


def buckets(weights: Iterable[NamedTensor], limit: int) -> Iterator[list[NamedTensor]]:
    """Runs of tensors of at most `limit` bytes together; a larger tensor stands alone."""
    batch: list[NamedTensor] = []
    size = 0
    for name, tensor in weights:
        if batch and size + tensor.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield batch
