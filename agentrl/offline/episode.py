"""`Episode`: a rollout whose turns come from outside, one at a time: what the driver does is done as in training.

The client of a served environment is the model here. So everything that bounds a rollout in a run (deadlines, what hooks
may raise and return, the limits of calls and turns, `release` exactly once) bounds it here.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.chat.base import ParsedCall, ParsedTurn
from agentrl.errors import InfrastructureError
from agentrl.jsonable import Json
from agentrl.plugins.types import Message, Task
from agentrl.rollout.driver import Driver
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.testing.agent import END, TextChat, TextEngine
from agentrl.trajectory import STEP, Trajectory


class ActionChat(TextChat):
    """Turns as JSON, of which nothing has to be read out of a text."""

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        """See `Chat.parse`."""
        turn = json.loads(self.decode([i for i in turn_ids if i < END]))
        calls = [ParsedCall(call["name"], call["arguments"], json.dumps(call)) for call in turn["calls"]]
        return ParsedTurn(turn["text"], tuple(calls))


@dataclass(frozen=True, slots=True)
class Action:
    """What a client does in one turn."""

    text: str = ""
    """What it says."""
    calls: tuple[tuple[str, Mapping[str, Json]], ...] = ()
    """The tools that it calls, by name, with their arguments."""

    def turn(self) -> str:
        """The turn that `ActionChat` reads."""
        calls = [{"name": name, "arguments": dict(arguments)} for name, arguments in self.calls]
        return json.dumps({"text": self.text, "calls": calls})


@dataclass(frozen=True, slots=True)
class View:
    """What a client is told after a turn."""

    messages: tuple[Message, ...]
    """Those since its last turn."""
    reward: float
    """What this turn was worth; at the end, with all that was still owed, so that the sum is the rollout's reward."""
    done: bool
    """Whether the rollout is over."""

    @property
    def text(self) -> str:
        """What the messages say, one after the other."""
        return "\n".join(filter(None, (content_text(message) for message in self.messages)))


def content_text(message: Message) -> str:
    """The content of a message as text, in which an image is named."""
    content = message["content"]
    if not isinstance(content, list):
        return content or ""
    return "\n".join(str(part["text"]) if "text" in part else f"[{part['type']}]" for part in content)


class Episode:
    """One rollout of a task. `begin` and `act` are called in turn; `end` always, once."""

    def __init__(self, driver: Driver, task: Task, seed: int) -> None:
        self._driver = driver
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._asked = asyncio.Event()
        self._seen = 0
        self._given = 0.0
        self.task = task
        """What is to be done."""
        self.turns = 0
        """Turns so far."""
        self.request: AsyncRolloutRequest = driver.request(task, 0, seed=seed)
        """The rollout."""
        assert isinstance(driver.engine, TextEngine)
        driver.engine.seat(self.request.id, self._turn)
        self._driven = asyncio.create_task(driver.drive(self.request))

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._driven.done()

    @property
    def reward(self) -> float:
        """What it has paid so far."""
        return self._given

    async def _turn(self, number: int) -> str:
        self._asked.set()
        return await self._said.get()

    async def begin(self, seconds: float) -> View:
        """The opening. Raises as `act`."""
        return await self._view(seconds)

    async def act(self, action: Action, seconds: float) -> View:
        """Take a turn, and wait for what follows, at most so long. Raises InfrastructureError, one line: whose fault it
        is that the rollout failed."""
        if self.over:
            raise InfrastructureError("the episode is over: reset begins another one")
        self.turns += 1
        self._asked.clear()
        self._said.put_nowait(action.turn())
        return await self._view(seconds)

    async def _view(self, seconds: float) -> View:
        asked = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({asked, self._driven}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if not self.over and not self._asked.is_set():
            boundary, where = self.request.main.at
            self._driven.cancel()
            raise InfrastructureError(f"{boundary}: {where} took longer than {seconds:g} s (rollout.turn_timeout)")
        return self._shown(self._ended() if self.over else None)

    def _ended(self) -> Trajectory:
        """What the rollout came to. Raises InfrastructureError."""
        if self._driven.cancelled():
            raise InfrastructureError("the rollout was cancelled")
        played = self._driven.result()
        if played.failure is not None:
            raise InfrastructureError(f"{played.failure.boundary}: {played.failure.message}")
        return played

    def _shown(self, played: Trajectory | None) -> View:
        main, weights = self.request.main, self._driver.scorer.weights
        paid = weights.get(STEP, 1.0) * self.request.step_reward if played is None else played.reward
        reward, self._given = paid - self._given, paid
        messages = main.messages[self._seen :]
        self._seen = len(main.messages)
        told = tuple(message for message in messages if message["role"] != "assistant")
        return View(told, reward, played is not None)

    async def end(self) -> None:
        """End it, if it is not over, and wait until its plugins are released."""
        if not self.over:
            self._driven.cancel()
        await asyncio.wait({self._driven})
        if not self._driven.cancelled():
            self._driven.exception()
