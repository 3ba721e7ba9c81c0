"""Parts of a transformers model, as what they are: its module says of an attribute that it is a tensor or a module."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def embeddings(model: "PreTrainedModel") -> "Tensor":
    """The weights of its input embeddings, [V, D]."""
    from torch import Tensor

    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight
