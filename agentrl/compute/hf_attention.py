"""Replace the attention of a transformers module while a block of code runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Unsupported(ValueError):  # noqa: N818 - a reason, not a failure: the next implementation is tried
    """The reason why an implementation does not support a model, in a few words."""


AttentionFunction = Callable[..., Tensor]
"""(query [P, H, D], key [P, G, D], value [P, G, D], scale=) -> [P, H * D]: attention over one row of P tokens."""

_ATTENTION: ContextVar[AttentionFunction] = ContextVar("attention")
_NAME = "agentrl_prefix_trees"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Call the replacement in the form of AttentionInterface: query [1, H, P, D] to [1, P, H, D]. Raises
    Unsupported."""
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if options.get(name) is not None:
            raise Unsupported(f"its attention uses {name}")
    if attention_mask is not None or query.shape[0] != 1:
        raise Unsupported("its attention brings a mask of its own")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    kind = value.dtype  # in mixed precision, positions may have widened the others
    q, k, v = (x[0].transpose(0, 1).to(kind) for x in (query, key, value))
    attended = _ATTENTION.get()(q, k, v, scale=scale)
    return attended.view(1, *q.shape[:2], v.shape[-1]), None


def attention_is_replaced() -> bool:
    """Whether the caller is inside a `replaced_attention` block."""
    return _ATTENTION.get(None) is not None


@contextmanager
def replaced_attention(model: "PreTrainedModel", attention: AttentionFunction) -> Iterator[None]:
    """Replace the attention of `model` by `attention` inside the block, and restore it after: an engine may share the
    module."""
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    token = _ATTENTION.set(attention)
    try:
        for config, _ in before:
            config._attn_implementation_internal = _NAME
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own
        _ATTENTION.reset(token)


_CONFIGS: "WeakKeyDictionary[PreTrainedModel, list[PretrainedConfig]]" = WeakKeyDictionary()


def _configs(model: "PreTrainedModel") -> "list[PretrainedConfig]":
    """The configurations in which the layers of `model` look up their attention.

    They are found once, since `set_attn_implementation` walks all modules (1.2 ms for 36 layers), and a block is
    entered for each pass and each recomputed layer. Raises as that function does, for a module with fixed attention.
    """
    if (found := _CONFIGS.get(model)) is None:
        from transformers import AttentionInterface

        AttentionInterface.register(_NAME, torch.compiler.disable(_attention))  # between two parts of a compiled layer
        found_in = (getattr(module, "config", None) for module in model.modules())
        configs = {id(config): config for config in found_in if config is not None}.values()
        before = [(config, config._attn_implementation) for config in configs]
        try:
            model.set_attn_implementation(_NAME)
            found = [config for config, _ in before if config._attn_implementation == _NAME]
        finally:
            for config, own in before:
                config._attn_implementation_internal = own
        _CONFIGS[model] = found
    return found


def checkpoint_contexts(model: "PreTrainedModel") -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first pass and of recomputation, as the `context_fn` of activation checkpointing: a
    recomputed layer has the attention of its first pass, although the `replaced_attention` block is left by then."""
    attention = _ATTENTION.get(None)
    return nullcontext(), nullcontext() if attention is None else replaced_attention(model, attention)
