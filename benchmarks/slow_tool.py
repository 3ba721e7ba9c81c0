"""Cost of a slow tool: 32 rollouts with three tool calls each, of a tool that sleeps 0.2 s or answers immediately.

    python benchmarks/slow_tool.py                              an engine that takes 1 ms per token
    python benchmarks/slow_tool.py --recipe recipes/gsm8k_tool.yaml     the recipe's own model, engine and tools

Tools of different requests sleep at the same time, and no request waits for another's tool: each turn with a call
should cost about 0.2 s. Reported: wall time of the step with either tool, and the difference per turn.
"""

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from agentrl.engine.base import Generation, GenerationFinish, Sampling
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Message, Session, Task, ToolResponse
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import roll_out
from agentrl.trajectory import Group

TASKS, SAMPLES, TURNS = 4, 8, 3


class Slow(Tool):
    """A tool that sleeps before each call of the tool `inner`."""

    def __init__(self, inner: Tool, seconds: float) -> None:
        self.name, self.description, self.parameters = inner.name, inner.description, inner.parameters
        self._inner, self._seconds = inner, seconds
        self.create, self.calc_reward = inner.create, inner.calc_reward  # type: ignore[method-assign]
        self.release, self.check = inner.release, inner.check  # type: ignore[method-assign]

    async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
        await asyncio.sleep(self._seconds)
        return await self._inner.execute(session, **arguments)


class TimedEngine:
    """An engine that calls the tool in three turns and then answers, with a fixed time per token."""

    max_context = 1 << 20

    def __init__(self, call: list[int], last: list[int], seconds_a_token: float) -> None:
        self._call, self._last, self._seconds = call, last, seconds_a_token
        self._turns: dict[str, int] = {}

    async def generate(self, ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        turn = self._turns[request_id] = self._turns.get(request_id, 0) + 1
        answer = self._last if turn > TURNS else self._call
        await asyncio.sleep(self._seconds * len(answer))
        return Generation(answer, [-0.5] * len(answer), GenerationFinish.STOP, 0)

    def finish(self, request_id: str) -> None:
        self._turns.pop(request_id, None)

    def abort(self, request_id: str | None = None) -> None:
        raise NotImplementedError("nothing here takes long enough to be aborted")


class Question(Environment):
    name = "question"

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(str(i), {}) for i in range(TASKS)]

    async def create(self, session: Session, **create_kwargs: Any) -> Sequence[Message]:
        return [{"role": "user", "content": "What is 127 times 38?"}]

    async def calc_reward(self, session: Session, **kwargs: Any) -> float:
        return 1.0


async def scripted(seconds: float) -> tuple[float, list[Group]]:
    from driver import build_chat, multiply

    chat, call, last = build_chat("bridge", 0)
    engine = TimedEngine(call.ids, last.ids, 0.001)
    env = Question()
    driver = Driver(
        engine=engine, chat=chat, environment=env, tools=[Slow(multiply, seconds)], limits=RolloutSection()  # type: ignore[arg-type]
    )  # fmt: skip
    began = time.perf_counter()
    groups = await roll_out(driver, env.tasks("train"), SAMPLES)
    return time.perf_counter() - began, groups


async def of_recipe(path: str, seconds: float) -> tuple[float, list[Group]]:
    from agentrl.rollout.player import Player

    player = await Player.build(Recipe.load(path, [f"rollout.max_turns={TURNS + 1}"]))
    slow = tuple(Slow(tool, seconds) for tool in player.toolbox.tools)
    player.toolbox = dataclasses.replace(player.toolbox, tools=slow)
    train = player.env.tasks("train")
    await player.play([train[0]], 1, seed=0)  # warm up
    began = time.perf_counter()
    groups = await player.play([train[i] for i in range(TASKS)], SAMPLES, seed=1)
    seconds = time.perf_counter() - began
    await player.close()
    return seconds, groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="play this recipe instead of a script")
    parser.add_argument("--seconds", type=float, default=0.2, help="that the tool sleeps")
    options = parser.parse_args()
    walls = {}
    for name, seconds in (("instant", 0.0), ("slow", options.seconds)):
        run = of_recipe(options.recipe, seconds) if options.recipe else scripted(seconds)
        walls[name], groups = asyncio.run(run)
        done = [t for group in groups for t in group.trajectories]
        calls = sum(len(t.tool_uses) for t in done)
        turns = max(len({use.turn for use in t.tool_uses}) for t in done)
        print(f"{name:8} {walls[name]:6.3f} s   {len(done)} rollouts, at most {turns} turns with a call, {calls} calls")
    more = (walls["slow"] - walls["instant"]) / turns
    print(f"a turn   {more:+6.3f} s with the slow tool (at most +0.300 wanted)")


if __name__ == "__main__":
    main()
