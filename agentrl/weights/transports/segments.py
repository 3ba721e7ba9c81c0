"""How torch takes a GPU's memory: what others are to open, or to give back, must not lie in expandable segments."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch's allocator is set by; the first counts."""
EXPANDABLE, PLAIN = "expandable_segments:True", "expandable_segments:False"


@contextmanager
def plain_segments() -> Iterator[None]:
    """GPU memory that is allocated inside can be opened by another process. What torch takes in expandable segments can
    only where the system lets processes trace each other, which few do."""
    asked = _settings(os.environ)
    if asked is None:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(asked.replace(EXPANDABLE, PLAIN))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(asked)


def without_expandable(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ask for expandable segments, asking for plain ones."""
    asking = {name: environment[name] for name in ALLOCATOR if EXPANDABLE in environment.get(name, "")}
    return {name: said.replace(EXPANDABLE, PLAIN) for name, said in asking.items()}


def _settings(environment: Mapping[str, str]) -> str | None:
    """What the allocator is set to, where that asks for expandable segments."""
    said = next((environment[name] for name in ALLOCATOR if name in environment), "")
    return said if EXPANDABLE in said else None
