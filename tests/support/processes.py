"""Processes of this machine, and waiting for them."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable

import psutil

SECONDS = 120.0
"""Longest wait of `until` and `eventually`."""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: Iterable[int], seconds: float = SECONDS) -> bool:
    """Whether all of them end within so many seconds."""
    try:
        until(lambda: not any(map(alive, pids)), seconds)
    except TimeoutError:
        return False
    return True


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """The processes below one (this one where `pid` is None), at whatever depth, but for dead ones."""
    return [process for process in psutil.Process(pid).children(recursive=True) if alive(process.pid)]


def command(process: psutil.Process) -> str:
    """The words of a process's command line, joined by blanks; empty where it is gone."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def children(word: str) -> list[int]:
    """This process's live children with `word` in their command lines."""
    below = psutil.Process(os.getpid()).children()
    return sorted(process.pid for process in below if word in command(process) and alive(process.pid))


def until(done: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait for a condition. Raises TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError("the condition was not met in time")
        time.sleep(0.05)


async def eventually(done: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait for a condition while the event loop runs. Raises TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.001)
