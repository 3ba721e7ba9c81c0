"""The attention of a transformers module, replaced by another while a block of code runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface


class Unsupported(ValueError):  # noqa: N818 - a reason, not a failure: the next implementation is tried
    """Why an implementation does not support a model."""


Mix = Callable[..., Tensor]
"""(query [P, H, D], key [P, G, D], value [P, G, D], scale=) -> [P, H * D]: attention over one row of P tokens."""

_MIX: ContextVar[Mix] = ContextVar("mix")
_NAME = "agentrl_forest"


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """In the shape that AttentionInterface wants: query [1, H, P, D] to [1, P, H, D]."""
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if options.get(name) is not None:
            raise Unsupported(f"its attention uses {name}")
    if attention_mask is not None or query.shape[0] != 1:
        raise Unsupported("its attention brings a mask of its own")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    kind = value.dtype  # in mixed precision, positions may have widened the others
    q, k, v = (x[0].transpose(0, 1).to(kind) for x in (query, key, value))
    mixed = _MIX.get()(q, k, v, scale=scale)
    return mixed.view(1, *q.shape[:2], v.shape[-1]), None


AttentionInterface.register(_NAME, _attention)


@contextmanager
def attending(model: Any, mix: Mix) -> Iterator[None]:
    """Replace the module's attention by `mix` inside the block; the engine, which shares it, sees no change after."""
    before = model.config._attn_implementation
    token = _MIX.set(mix)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _MIX.reset(token)


def recomputing(model: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of activation checkpointing: a layer that the backward pass computes again attends as it did the
    first time, although that `attending` block is left by then."""
    mix = _MIX.get(None)
    return nullcontext(), nullcontext() if mix is None else attending(model, mix)
