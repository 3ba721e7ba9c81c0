"""`Subject`: an environment opened for an audit, and how one of its tasks is played through the real driver."""

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

from agentrl.containment.deadline import DeadlineTimer
from agentrl.errors import UserError, contained, describe
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import tasks_of
from agentrl.plugins.rewards import Rewards, make_rewards
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import Toolbox, offered
from agentrl.plugins.types import Json, Message, Session, Task, ToolResponse
from agentrl.recipe.schema import Recipe
from agentrl.rollout.agent import AgentRequest
from agentrl.rollout.hooks import calc_rewards
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.scorer import Scorer
from agentrl.rollout.workspaces import Workspaces, workspaces_of
from agentrl.testing.play import Holder, Stage, asked, holder_of
from agentrl.trajectory import FinishReason, Trajectory

Make = Callable[[], Environment]
"""Makes the environment anew."""
HOOK_SECONDS, PLAY_SECONDS = 20.0, 40.0
"""Deadlines of a turn or hook, and of a rollout, where the recipe's are longer."""
AT_ONCE = 8
"""Rollouts that are played at the same time, at most."""
GAP = 0.15
"""Seconds for which code may hold the event loop before it counts as blocking."""
_BEAT = 0.01
_LETTERS = 400  # of a message that a finding shows


class Offered(Tool):
    """A tool that an agent offers in its call, which it runs itself."""

    def __init__(self, schema: Mapping[str, Json]) -> None:
        function = schema["function"]
        self.name, self.description = function["name"], function.get("description") or ""
        self.parameters = function.get("parameters") or {"type": "object", "properties": {}}

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        raise NotImplementedError("the agent runs its tools itself")


@dataclass(slots=True)
class Seat:
    """Where a player sits: one request, before one of its turns."""

    task: Task
    """The task that is played."""
    request: AsyncRolloutRequest
    """The request."""
    rng: Random
    """Seeded by the task and the sample."""
    number: int = 0
    """The turn, counted from 0."""

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tools that the task offers, by name; those of the call that is to be answered, where an agent calls."""
        if isinstance(self.request, AgentRequest):
            return {tool.name: tool for tool in map(Offered, self.request.tree.nodes[-1].call.tools)}
        return self.request.main.tools

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return asked(self.request)


Voice = Callable[[Seat], Awaitable[str]]
"""What a player says in its next turn, as text that `agentrl.testing.agent` reads."""
Script = Voice | Sequence[str]
"""A player: a function, or its turns, of which the last is repeated."""


@dataclass(frozen=True, slots=True)
class Play:
    """One rollout that was played."""

    task: Task
    """The task."""
    trajectory: Trajectory
    """What came of it."""
    solved: bool
    """Whether the environment counts it as solved."""
    again: str = ""
    """How the rewards differed when they were asked for twice; empty: they did not, or were not asked for."""

    @property
    def ok(self) -> bool:
        """Whether it came to a reward."""
        return self.trajectory.failure is None

    @property
    def reward(self) -> float:
        """The weighted sum of its reward parts."""
        return self.trajectory.reward if self.ok else 0.0

    def heard(self) -> list[tuple[str, str]]:
        """What the environment and its tools said, as role and text."""
        return [(m["role"], text_of(m)) for m in self.trajectory.messages if m["role"] != "assistant"]

    def outcome(self) -> tuple[object, ...]:
        """What must be the same whenever the same is said: what was heard, the rewards, how it ended."""
        t = self.trajectory
        return tuple(self.heard()), tuple(sorted(t.rewards.items())), str(t.finish)


def text_of(message: Message) -> str:
    """The content of a message as one text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def shortened(text: str, most: int = _LETTERS) -> str:
    """A text of at most `most` characters, its middle left out."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class AskingScorer(Scorer):
    """Asks the plugins of the requests in `twice` for their rewards a second time, and notes what differs."""

    def __init__(self, rewards: Rewards, seconds: float) -> None:
        super().__init__(rewards, seconds)
        self._limit = seconds
        self.twice: set[str] = set()
        """Ids of requests."""
        self.differing: dict[str, str] = {}
        """By request how its rewards differed."""

    async def score(
        self, request: AsyncRolloutRequest, rewards: dict[str, float], finish: FinishReason, timer: DeadlineTimer
    ) -> dict[str, float]:
        """See `Scorer.score`."""
        if request.id in self.twice:
            first = dict(rewards)
            try:
                second = await calc_rewards(request, timer, self._limit)
            except Exception:  # noqa: BLE001 - the contract lets it be asked once
                second = first
            if second != first:
                self.differing[request.id] = f"{first}, then {second}"
        return await super().score(request, rewards, finish, timer)


@dataclass(slots=True)
class Clock:
    """When hooks held the event loop, and how long they took, by the hook."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By part (`hooks`, `tools`, `environment`): seconds of each rollout."""
    gaps: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By hook: seconds for which the loop stood still in it."""

    def middle(self) -> float:
        """The median seconds of a rollout, those of the player left out; 0 where none was timed."""
        totals = list(map(sum, zip(*self.seconds.values(), strict=True)))
        return median(totals) if totals else 0.0

    async def watch(self, request: AsyncRolloutRequest) -> None:
        """Note where the loop stands still, until it is cancelled."""
        before = time.monotonic()
        try:
            while True:
                await asyncio.sleep(_BEAT)
                self._note_gap(before, request)
                before = time.monotonic()
        finally:
            self._note_gap(before, request)

    def _note_gap(self, before: float, request: AsyncRolloutRequest) -> None:
        gap = time.monotonic() - before - _BEAT
        if gap > GAP:
            self.gaps[request.main.at[1]].append(gap)


@dataclass(slots=True)
class Subject:
    """An environment, its tools, rewards and workspaces, as a recipe has them."""

    name: str
    """As it was asked for."""
    recipe: Recipe
    make: Make
    """Makes the environment anew."""
    env: Environment
    """The environment."""
    toolbox: Toolbox
    """The recipe's tools, opened."""
    scorer: AskingScorer
    """The recipe's reward functions."""
    workspaces: Workspaces | None
    holder: Holder | None
    """Who calls the model in place of the built-in driver."""
    stage: Stage
    """Plays with the recipe's limits."""
    closing: AsyncExitStack
    """Closes what was opened."""
    say: Callable[[str], None]
    """Told where the audit is, before strangers' code is called."""
    clock: Clock = field(default_factory=Clock)
    """How long hooks took."""
    failures: list[Play] = field(default_factory=list)
    """Rollouts that came to no reward."""
    tool_errors: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """By tool and error the tasks in which a tool raised."""
    agents_tools: dict[str, Tool] = field(default_factory=dict)
    """By name the tools that the recipe's agent has offered so far."""
    at_once: int = AT_ONCE
    """Rollouts that are played at the same time: one, where they wait for each other for long."""
    counts: Counter[str] = field(default_factory=Counter)
    """`plays`: how many rollouts were played."""

    @classmethod
    async def open(cls, name: str, recipe: Recipe, make: Make, say: Callable[[str], None]) -> "Subject":
        """Open all that a rollout needs. Raises UserError where something cannot be had."""
        async with AsyncExitStack() as stack:
            say("making the environment")
            env = make()
            stack.push_async_callback(_closed, env.close)
            rewards = make_rewards(recipe.rewards)
            stack.push_async_callback(_closed, rewards.close)
            toolbox = await Toolbox.open(recipe.tools, env)
            stack.push_async_callback(_closed, toolbox.close)
            workspaces = await workspaces_of(recipe.workspace, env, toolbox.tools)
            if workspaces is not None:
                stack.push_async_callback(_closed, workspaces.close)
            scorer, holder = AskingScorer(rewards, HOOK_SECONDS), await holder_of(recipe, stack)
            stage = Stage(env, toolbox.tools, recipe.rollout, scorer, bounded(recipe), holder, workspaces)
            return cls(name, recipe, make, env, toolbox, scorer, workspaces, holder, stage, stack.pop_all(), say)
        raise AssertionError("the stack swallows nothing")

    async def again(self) -> "Subject":
        """The same, opened once more."""
        return await Subject.open(self.name, self.recipe, self.make, self.say)

    async def close(self) -> None:
        """Close all that was opened."""
        self.say("closing the environment")
        await self.closing.aclose()

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split. Raises UserError."""
        self.say(f"tasks({split!r})")
        return tasks_of(self.env, split)

    def tools_of(self, task: Task) -> dict[str, Tool]:
        """The tools that a task offers, and those that the agent has offered. Raises UserError."""
        return {**offered(task, self.toolbox.tools, self.env), **self.agents_tools}

    @property
    def hangs(self) -> int:
        """Rollouts that a hook kept from coming to an end."""
        return sum("took too long" in str(play.trajectory.failure) for play in self.failures)

    def wide(self) -> Stage:
        """A stage where calls are not counted."""
        changes = {**bounded(self.recipe), "max_turns": 400, "max_tool_calls": 1 << 20, "max_tool_calls_per_turn": 64}
        return Stage(
            self.env, self.toolbox.tools, self.recipe.rollout, self.scorer, changes, self.holder, self.workspaces
        )

    async def play(
        self,
        task: Task,
        script: Script,
        *,
        sample: int = 0,
        stage: Stage | None = None,
        twice: bool = False,
        timed: bool = False,
        label: str = "",
    ) -> Play:
        """Play a task from the first hook to the last. twice: ask for the rewards twice. timed: note where the event
        loop stands still, which says something only where nothing else is played. label: what it is for."""
        stage = stage or self.stage
        request: AsyncRolloutRequest | None = None
        rng = Random(f"{task.id} {sample}")

        async def turn(number: int) -> str:
            assert request is not None
            seat = Seat(task, request, rng, number)
            if self.holder is not None:
                self.agents_tools |= seat.tools
            text = await voice(seat)
            self.say(f"{label or 'a rollout'}, task {task.id}, turn {number + 1}")
            return text

        voice = script if callable(script) else _said(script)
        request = stage.request(task, turn, seed=0, sample=sample)
        stage.engine.seat(request.id, turn, branches=not isinstance(request, AgentRequest))
        if twice:
            self.scorer.twice.add(request.id)
        self.say(f"{label or 'a rollout'}, task {task.id}")
        watching = asyncio.create_task(self.clock.watch(request)) if timed else None
        try:
            trajectory = await stage.driver.drive(request)
            await asyncio.sleep(0)
        finally:
            if watching is not None:
                watching.cancel()
        self.counts["plays"] += 1
        return self._noted(task, trajectory, timed)

    def _noted(self, task: Task, trajectory: Trajectory, timed: bool) -> Play:
        """The play, with what it says about the environment noted."""
        solved = False
        if trajectory.failure is None:
            try:
                solved = bool(self.env.solved(trajectory.rewards, task))
            except BaseException as error:  # noqa: BLE001 - boundary: an environment may raise anything
                why = describe(contained(error))
                self.tool_errors.setdefault(("solved", why), []).append(task.id)
        play = Play(task, trajectory, solved, self.scorer.differing.pop(trajectory.request_id, ""))
        if not play.ok or trajectory.extra.get("release_errors"):
            self.failures.append(play)
        for use in trajectory.tool_uses:
            if use.error is not None and use.error.startswith("tool:"):
                self.tool_errors.setdefault((use.name, use.error), []).append(task.id)
        if timed:
            for part in ("hooks", "tools", "environment"):
                self.clock.seconds[part].append(float(trajectory.seconds.get(part, 0.0)))
        return play

    async def play_all(
        self,
        tasks: Sequence[Task],
        script: Callable[[Task], Script],
        *,
        label: str,
        until: float = math.inf,
    ) -> list[Play]:
        """Play each task once, some at the same time. until: when nothing more is begun, on the clock of
        `time.monotonic`."""
        room = asyncio.Semaphore(self.at_once)

        async def one(task: Task) -> Play | None:
            async with room:
                if time.monotonic() > until:
                    return None
                return await self.play(task, script(task), label=label)

        return [play for play in await asyncio.gather(*map(one, tasks)) if play is not None]

    async def play_each(
        self, tasks: Sequence[Task], script: Callable[[Task], Script], *, label: str, until: float, timed: bool = False
    ) -> list[Play]:
        """Play each task once, alone, and at the same time those for which half of the time does not suffice. until:
        as of `play_all`; one is played in any case. timed: see `play`."""
        began = time.monotonic()
        plays: list[Play] = []
        for task in tasks:
            if plays and time.monotonic() > (began + until) / 2:
                break
            plays.append(await self.play(task, script(task), timed=timed, label=label))
        alone = (time.monotonic() - began) / max(1, len(plays))
        for some in (tasks[len(plays) :][:2], tasks[len(plays) + 2 :]):
            began = time.monotonic()
            plays += await self.play_all(some, script, label=label, until=until)
            if len(some) == 2 and alone * AT_ONCE > HOOK_SECONDS / 2 and time.monotonic() - began > 1.5 * alone:
                self.at_once = 1  # one waits for the other: the last of many would seem to hang
        return plays


def bounded(recipe: Recipe) -> dict[str, Json]:
    """The recipe's limits in seconds, none of them longer than an audit waits."""
    limits = recipe.rollout
    return {
        "timeout": min(limits.timeout, PLAY_SECONDS),
        "turn_timeout": min(limits.turn_timeout, HOOK_SECONDS),
        "tool_timeout": min(limits.tool_timeout, HOOK_SECONDS),
        "retries": 0,
    }


def _said(turns: Sequence[str]) -> Voice:
    async def voice(seat: Seat) -> str:
        return turns[min(seat.number, len(turns) - 1)]

    return voice


async def _closed(close: Callable[[], Awaitable[Any]]) -> None:
    """Close one part, whatever it raises, in time."""
    closing = asyncio.ensure_future(close())
    await asyncio.wait({closing}, timeout=HOOK_SECONDS)
    if closing.done() and not closing.cancelled():
        closing.exception()


def guarded(what: str, call: Callable[[], Any]) -> Any:
    """What a synchronous hook returns. Raises UserError, whatever it raises."""
    try:
        return call()
    except BaseException as error:
        raise UserError(f"{what}: {describe(contained(error))}") from error
