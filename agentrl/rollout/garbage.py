"""Python's cyclic garbage collector, held back while requests are in flight.

A request makes no cycles: counting references frees it. But the collector walks over all that is alive whenever that
has grown by a quarter, and with ten thousand requests in flight those walks cost more than the driver does.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS = 500_000  # objects more than were freed, before the young ones are walked over
_held: list[tuple[int, int, int]] = []  # the thresholds before the first of those that hold it back now


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely in here. What cycles a plugin makes are found later. Nested and concurrent uses are fine."""
    _held.append(gc.get_threshold() if not _held else _held[0])
    if 0 < _held[0][0] < _ALLOCATIONS:
        gc.set_threshold(_ALLOCATIONS, *_held[0][1:])
    try:
        yield
    finally:
        before = _held.pop()
        if not _held:
            gc.set_threshold(*before)
