"""Triton kernels of liger-kernel, if it is installed, for the norms and gated layers of a model on a CUDA device.

Its other kernels are not used: the fused output layer gives neither entropies nor a weight for each token, so log-probs
are those of kernels.py; its rotary embedding would replace that of all models in the process, also of those on a CPU.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DESCRIPTION = "norms and gates by liger-kernel"
"""Part of the description of a forward that uses it."""


def fits(model: "PreTrainedModel", device: torch.device) -> bool:
    """Whether liger-kernel is installed and supports the architecture, and the device is a CUDA device."""
    if device.type != "cuda" or find_spec("liger_kernel") is None:
        return False
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return model.config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def apply_kernels(model: "PreTrainedModel") -> None:
    """Replace the norms and gated layers of this model, in place, and of no other model."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    family = vars(sys.modules[type(model).__module__])
    before = dict(family)
    _apply_liger_kernel_to_instance(
        model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=True, swiglu=True
    )
    family.update(before)  # it also names its classes as the family's, for models that are yet to be made


def apply_and_compare(
    model: "PreTrainedModel", logprobs: Callable[[], Tensor], judge: Callable[[Tensor, Tensor], str | None]
) -> None:
    """Apply the kernels, and compare the log-probs before and after.

    judge: returns why the log-probs after (first argument) differ from those before; None if they do not. Raises
    UserError: they differ, or the kernels do not run.
    """
    before = logprobs()
    apply_kernels(model)
    try:
        after = logprobs()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"liger-kernel is installed, but its kernels do not run here ({reason}); uninstall it"
        ) from error
    if (why := judge(after, before)) is not None:
        raise UserError(
            f"liger-kernel is installed, but the model does not compute with it as without: {why}; install another "
            "version of it, or uninstall it"
        )
