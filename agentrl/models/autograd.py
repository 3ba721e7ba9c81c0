"""What torch hands to the two passes of a `torch.autograd.Function`, whose own type lets nothing be kept."""

from typing import Protocol

from torch import Tensor


class Context(Protocol):
    """Of one call. A function that keeps more than tensors has a context of its own."""

    needs_input_grad: tuple[bool, ...]
    """Of each argument of `forward`."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """What `save_for_backward` was given."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors for the backward pass."""

    def set_materialize_grads(self, value: bool) -> None:
        """Whether the gradient of an output that nobody uses is a tensor of zeros; else it is None."""
