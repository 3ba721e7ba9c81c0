"""What a sandbox is: it gives sessions, each an interpreter of its own that keeps its state from call to call.

What the code does wrong is told in its `Execution`, and the next call works. What the machinery does wrong raises
InfrastructureError. Nothing here is tied to an event loop: a sandbox may serve one loop after another, from one thread
at a time; a session belongs to the loop that opened it.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20


class Stop(StrEnum):
    """Why the code did not run to its end."""

    WALL = "wall"  # Limits.wall_seconds, or what the caller allowed
    CPU = "cpu"
    MEMORY = "memory"
    PROCESSES = "processes"
    FILES = "files"  # more files than Limits.files
    OUTPUT = "output"  # printed far more than is kept
    ENDED = "ended"  # the interpreter's process ended, or its connection was cut, by the code itself


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one session. Seconds are per call; bytes are totals over all processes of the session unless said otherwise.

    wall_seconds, cpu_seconds: the code is interrupted, as by Ctrl-C; killed when it goes on. memory: one process gets a
    MemoryError there, several together are killed; what the kernel holds for them counts (buffers of sockets and pipes,
    page tables), and is measured every 50 ms. processes: with threads. file_size: of one file. disk: of all files;
    they lie in memory, beside `memory`. files: how many. output: characters kept of stdout and of stderr, each, and of
    the value; what is beyond is left out of the middle. image_bytes: of all images of one call. images: how many it
    may show.
    """

    wall_seconds: float = 20.0
    cpu_seconds: float = 10.0
    memory: int = 512 * MIB
    processes: int = 32
    file_size: int = 32 * MIB
    disk: int = 64 * MIB
    files: int = 4096
    output: int = 20_000
    image_bytes: int = 4 * MIB
    images: int = 16

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")


@dataclass(frozen=True, slots=True)
class Execution:
    """What one call came to.

    value: the last expression's, as `repr` writes it; None where there is none (or it is None). error: the traceback,
    with the code's own frames only. images: files. stop: why the code was stopped; None when it ran to its end or
    raised. lost: the interpreter was started anew after this call, and the variables are gone. lost_before: it was
    started anew since the former call, because that one was cut off. cut: some of the output was left out.
    """

    stdout: str = ""
    """What was printed, within Limits.output characters."""
    stderr: str = ""
    """What was written to stderr, within Limits.output characters."""
    value: str | None = None
    error: str | None = None
    images: tuple[bytes, ...] = ()
    stop: Stop | None = None
    lost: bool = False
    lost_before: bool = False
    cut: bool = False
    seconds: float = 0.0
    """Wall time."""

    @property
    def ok(self) -> bool:
        """True when the code ran to its end without an exception."""
        return self.error is None and self.stop is None


def shortened(text: str, most: int) -> str:
    """`text`, or its beginning and its end where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


class SandboxSession(ABC):
    """One interpreter. Calls run one after another; a second call waits for the first."""

    @abstractmethod
    async def run(self, code: str, *, seconds: float | None = None) -> Execution:
        """Run `code` in the interpreter, in `seconds` of wall time at most (never more than Limits.wall_seconds).

        A caller that is cancelled ends what runs; the next call finds a new interpreter (`lost_before`).
        Raises InfrastructureError when the machinery failed, not the code."""

    @abstractmethod
    async def close(self) -> None:
        """End everything that runs in it and drop its files. May be called twice, and during a call."""


class Sandbox(ABC):
    """A source of sessions."""

    @abstractmethod
    async def open(self) -> SandboxSession:
        """A session whose interpreter nobody has used. Raises InfrastructureError when it cannot be had."""

    @abstractmethod
    async def close(self) -> None:
        """End all sessions and what was started ahead. May be called twice; `open` works again afterwards."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        """Open a session, and close it whatever happens: `async with sandbox.session() as session:`."""
        session = await self.open()
        try:
            yield session
        finally:
            await session.close()
