"""Calls that block, over asynchronous work: from a plain program, and from inside a running event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def blocking(work: Callable[[], T]) -> T:
    """`work()`, which runs an event loop of its own: here, or in a thread where this one has a loop already, as in a
    notebook. What a signal's handler raises while the thread is waited for is raised at once."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    thread = ThreadPoolExecutor(1, "agentrl")
    try:
        return thread.submit(work).result()
    finally:
        thread.shutdown(wait=False)
