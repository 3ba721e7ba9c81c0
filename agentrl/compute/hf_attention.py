"""The attention of a transformers module, replaced by another while a block of code runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

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
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    token = _MIX.set(mix)
    try:
        for config, _ in before:
            config._attn_implementation_internal = _NAME
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own
        _MIX.reset(token)


_CONFIGS: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def _configs(model: Any) -> list[Any]:
    """Return the configurations in which the layers of `model` look their attention up.

    They are found once: `set_attn_implementation` walks all modules (1.2 ms for 36 layers), and a block is entered for
    each pass and each layer that is computed again. Raises what it raises for a module that cannot attend otherwise.
    """
    if (found := _CONFIGS.get(model)) is None:
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
        before = [(config, config._attn_implementation) for config in configs]
        try:
            model.set_attn_implementation(_NAME)
            found = [config for config, _ in before if config._attn_implementation == _NAME]
        finally:
            for config, own in before:
                config._attn_implementation_internal = own
        _CONFIGS[model] = found
    return found


def recomputing(model: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of activation checkpointing: a layer that the backward pass computes again attends as it did the
    first time, although that `attending` block is left by then."""
    mix = _MIX.get(None)
    return nullcontext(), nullcontext() if mix is None else attending(model, mix)
