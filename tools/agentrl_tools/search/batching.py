"""Questions that come at the same time, answered together, by so many workers at once."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar, cast

Q = TypeVar("Q")
A = TypeVar("A")


class Batcher(Generic[Q, A]):
    """`answer` is given up to `size` questions, and is under way at most `concurrency` times. Belongs to one loop.

    A batch is what has come while all workers were busy: nobody waits for it to fill. Who is cancelled is left out.
    """

    def __init__(self, answer: Callable[[Sequence[Q]], Awaitable[Sequence[A]]], size: int, concurrency: int) -> None:
        self._answer, self._size, self._concurrency = answer, size, concurrency
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._workers: set[asyncio.Task[None]] = set()

    async def ask(self, question: Q) -> A:
        """Its answer. Raises what `answer` raised for its batch."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if len(self._workers) < self._concurrency:
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
        return await future

    async def close(self) -> None:
        """Stop what is under way."""
        for worker in set(self._workers):
            worker.cancel()
        if workers := set(self._workers):
            await asyncio.wait(workers)

    async def _work(self) -> None:
        try:
            await self._work_off()
        finally:  # at once, so that whoever asks next does not count on a worker that goes home
            self._workers.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _work_off(self) -> None:
        while batch := self._take():
            futures = [future for _, future in batch]
            try:
                answers = await self._answer([question for question, _ in batch])
                for future, answer in zip(futures, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
            except asyncio.CancelledError:
                for future in futures:
                    future.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - it belongs to those who asked
                for future in futures:
                    if not future.done():
                        future.set_exception(error)

    def _take(self) -> list[tuple[Q, "asyncio.Future[A]"]]:
        batch: list[tuple[Q, asyncio.Future[A]]] = []
        while self._waiting and len(batch) < self._size:
            question, future = self._waiting.popleft()
            if not future.done():
                batch.append((question, future))
        return batch
