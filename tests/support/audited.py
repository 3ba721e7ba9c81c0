"""Environments that an audit in a process of its own must survive, and one that is broken in plain ways."""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from planted import SaysIt, plant  # noqa: F401 - for module:attribute
from sound import WORDS, Sums

from agentrl import Session, Task


class Exits(Sums):
    """Ends its process when it is asked for a reward."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        os._exit(3)


class Hangs(Sums):
    """Holds the event loop for ever when it is asked for a reward."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        while True:
            time.sleep(0.1)


class Prints(Sums):
    """Prints a page for each rollout."""

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        print("x" * 20_000)
        return await super().calc_reward(session, **kwargs)


class OneByOne(Sums):
    """Serves one rollout at a time, and waits in each hook, as one does who asks a server."""

    def __init__(self) -> None:
        self.room = asyncio.Lock()

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        await self.room.acquire()
        await asyncio.sleep(0.2)
        return await super().create(session)

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        await asyncio.sleep(0.2)
        return await super().calc_reward(session)

    async def release(self, session: Session, **kwargs: Any) -> None:
        self.room.release()


class NamesThem(Sums):
    """Greets who is there, in an order of their own."""

    async def create(self, session: Session, **create_kwargs: Any) -> list[Any]:
        return [{"role": "user", "content": f"Hello {', '.join(self.there())}. {session.task.data['question']}"}]

    def there(self) -> Sequence[str]:
        """The names."""
        return sorted(set(WORDS))


class NamesAny(NamesThem):
    """Greets them in the order of a set of texts, which is another in each process."""

    def there(self) -> Sequence[str]:
        return list(set(WORDS))


class Unordered(Sums):
    """Tasks in the order of a set of texts, which is another in each process."""

    def tasks(self, split: str) -> Sequence[Task]:
        made = super().tasks(split)
        return [Task(f"{split}-{word}", made[i].data) for i, word in enumerate(set(WORDS[: min(40, len(made))]))]
