"""A server of the package `openenv`, in an interpreter that has it: `python openenv_server.py KIND PORT`.

`guess`: an environment with actions and a list of tasks. `shop`: tools over MCP. `odd`: what goes wrong.
"""

import os
import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """Guess the number."""

    number: int


class Hint(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret, self._state = 0, State()

    def list_splits(self) -> list[str]:
        return ["train", "test"]

    def num_tasks(self, split: str) -> int:
        return {"train": 20, "test": 5}[split]

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._secret = (kwargs.get("index", 0) + (100 if kwargs.get("split") == "test" else 0)) % 7
        self._state = State(episode_id=episode_id, step_count=0, score=0)
        return Hint(hint="Which number from 0 to 6?")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        right = action.number == self._secret
        self._state = State(step_count=self._state.step_count + 1, score=7 if right else 0)
        if action.number == 666:
            raise RuntimeError("the devil is in it")
        said = "right" if right else "more" if action.number < self._secret else "less"
        return Hint(hint=said, reward=1.0 if right else -0.1, done=right)

    @property
    def state(self) -> State:
        return self._state


class ShopEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("shop")
        self._sum, self._state = 0, State()

        @mcp.tool
        def add(price: int, name: str = "thing") -> str:
            """Add a thing to the basket."""
            self._sum += price
            return f"{name} added: {self._sum} in all"

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._sum, self._state = 0, State(step_count=0)
        return Observation(metadata={"seed": seed})

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._paid(super().step(action, timeout_s=timeout_s, **kwargs))

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._paid(await super().step_async(action, timeout_s=timeout_s, **kwargs))

    def _paid(self, observed: Observation) -> Observation:
        if isinstance(observed, CallToolObservation) and self._sum >= 10:
            observed.reward, observed.done = 1.0, True
        return observed

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"error": "no such action"})

    @property
    def state(self) -> State:
        return self._state


class Deed(Action):
    deed: str


class OddEnvironment(GuessEnvironment):
    """Does what its action says."""

    def list_splits(self) -> list[str]:
        raise NotImplementedError

    def step(self, action: Deed, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        if action.deed == "hang":
            time.sleep(30)
        if action.deed == "exit":
            os._exit(3)
        if action.deed == "flood":
            return Hint(hint="x" * (20 << 20))
        return Hint(hint=action.deed)


KINDS = {
    "guess": (GuessEnvironment, Guess, Hint),
    "shop": (ShopEnvironment, CallToolAction, CallToolObservation),
    "odd": (OddEnvironment, Deed, Hint),
}


def main() -> None:
    kind, port = sys.argv[1:]
    environment, action, observation = KINDS[kind]
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
