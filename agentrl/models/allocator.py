"""How torch's allocator of GPU memory is configured: in expandable segments for training, in plain ones for what other
processes open or what SGLang's memory saver releases."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from agentrl.models.load import on_gpu
from agentrl.recipe.schema import Recipe

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that configure it; the first counts."""
EXPANDABLE, PLAIN = "expandable_segments:True", "expandable_segments:False"


@contextmanager
def plain_segments() -> Iterator[None]:
    """Allocate GPU memory inside such that another process can open it. Expandable segments can be opened only where
    the system lets processes trace each other, which few do."""
    settings = _expandable_settings()
    if settings is None:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(settings.replace(EXPANDABLE, PLAIN))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def without_expandable(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ask for expandable segments, changed to ask for plain ones. SGLang's memory saver
    cannot release expandable ones."""
    asking = {name: environment[name] for name in ALLOCATOR if EXPANDABLE in environment.get(name, "")}
    return {name: value.replace(EXPANDABLE, PLAIN) for name, value in asking.items()}


def _expandable_settings() -> str | None:
    """The allocator's settings where they ask for expandable segments."""
    value = next((os.environ[name] for name in ALLOCATOR if name in os.environ), None)
    if value is None:
        value = torch._C._accelerator_getAllocatorSettings()
    return value if EXPANDABLE in value else None


def expand_segments(recipe: Recipe) -> None:
    """Have a trainer of this process allocate GPU memory in expandable segments, since micro-batches differ in size and
    blocks would fragment, unless the user chose otherwise. To be called before CUDA is initialized. Servers that this
    process launches do not inherit it."""
    if on_gpu(recipe) and not recipe.cluster.used and not any(name in os.environ for name in ALLOCATOR):
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)
