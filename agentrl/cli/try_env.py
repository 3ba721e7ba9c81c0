"""`agentrl try ENV`: play one task with the driver, from the first hook to the last."""

import asyncio
import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from agentrl.cli.try_agents import HINT, HINT_CALL, Person, read_replies
from agentrl.cli.try_show import Images, Narrator, rewards_line
from agentrl.errors import UserError, nearest

if TYPE_CHECKING:
    from agentrl.engine.base import Engine, Generation
    from agentrl.plugins.environment import Environment
    from agentrl.plugins.tool import Tool
    from agentrl.plugins.types import Task
    from agentrl.recipe.schema import Recipe
    from agentrl.rollout.request import AsyncRolloutRequest
    from agentrl.trajectory import Trajectory

FAILED = 1
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Choice:
    """The task, and the player: a person where replies and model are None."""

    split: str
    """The split of the task."""
    task: str
    """Its number in the split, or its id."""
    replies: str | None
    """File with the agent's turns."""
    model: str | None
    """Path of the model that plays."""
    seed: int
    """Seed of the model's sampling and of the plugins."""
    images: str | None
    """Folder to write images to; None: a temporary one."""


def try_env(recipe: "Recipe", choice: Choice) -> int:
    """The exit code: 1 if the task was not played to its end."""
    from agentrl.containment.event_loop import run
    from agentrl.plugins.registry import make_environment

    turns = None if choice.replies is None else read_replies(choice.replies)
    env = make_environment(recipe.env)
    person = turns is None and choice.model is None
    narrator = Narrator(Images(choice.images), silent=("assistant",) if person else ())
    try:
        return run(_try(recipe, env, choice, turns, narrator))
    except KeyboardInterrupt:
        narrator.say("\ninterrupted: the environment and its tools were released", style="red")
        return INTERRUPTED


async def _try(
    recipe: "Recipe", env: "Environment", choice: Choice, turns: Sequence[str] | None, narrator: Narrator
) -> int:
    if choice.model is not None:
        return await _by_model(recipe, env, choice, narrator)
    from agentrl.plugins.rewards import make_rewards
    from agentrl.plugins.toolbox import Toolbox, offered
    from agentrl.rollout.scorer import Scorer
    from agentrl.rollout.talk import PATIENCE
    from agentrl.rollout.workspaces import workspaces_of
    from agentrl.testing.agent import scripted
    from agentrl.testing.play import Stage, holder_of

    async with AsyncExitStack() as stack:
        stack.push_async_callback(env.close)
        rewards = make_rewards(recipe.rewards)
        stack.push_async_callback(rewards.close)
        toolbox = await Toolbox.open(recipe.tools, env)
        stack.push_async_callback(toolbox.close)
        task = _task(env, choice.split, choice.task)
        tools = offered(task, toolbox.tools, env)
        changes = {"timeout": PATIENCE, "turn_timeout": PATIENCE} if turns is None else {}
        workspaces = await workspaces_of(recipe.workspace, env, toolbox.tools, recipe.agent)
        if workspaces is not None:
            stack.push_async_callback(workspaces.close)
        scorer = Scorer(rewards, recipe.rollout.turn_timeout)
        holder = await holder_of(recipe, stack)
        stage = Stage(env, toolbox.tools, recipe.rollout, scorer, changes, holder, workspaces)
        _introduce(task, list(tools.values()), narrator, recipe, env)
        play = Person(_hint(tools), narrator.say).turn if turns is None else scripted(turns)
        one_by_one = asyncio.Lock()  # an agent may ask for several answers at once

        async def turn(number: int) -> str | None:
            async with one_by_one:
                narrator.follow(request)
                text = await play(number)
                if text is None and recipe.agent is not None:  # the person leaves, whoever waits for answers
                    request.own.stop()
                return text

        request = stage.request(task, turn, seed=choice.seed)
        if turns is None:
            narrator.say(_hint(tools), style="dim")
        played = await stage.driver.drive(request)
        return _conclude(narrator, request, played, env)


async def _by_model(recipe: "Recipe", env: "Environment", choice: Choice, narrator: Narrator) -> int:
    from agentrl.plugins.toolbox import offered
    from agentrl.rollout.player import Player

    try:
        task = _task(env, choice.split, choice.task)  # before a model is loaded
    except UserError:
        await env.close()
        raise
    player = await Player.build(recipe, model_path=choice.model, env=env)
    try:
        _introduce(task, list(offered(task, player.toolbox.tools, env).values()), narrator, recipe, env)
        engine = Watched(player.engine)
        player.engine = cast("Engine", engine)
        driver = player.driver()
        request = driver.request(task, 0, seed=choice.seed)
        engine.before = lambda: narrator.follow(request)
        return _conclude(narrator, request, await driver.drive(request), env)
    finally:
        for line in await player.close():
            narrator.say(line)


class Watched:
    """An engine that calls `before` each time it is asked for a turn."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.before: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **kwargs: Any) -> "Generation":
        self.before()
        return await self._engine.generate(*args, **kwargs)


def _task(env: "Environment", split: str, which: str) -> "Task":
    """A task by its number in the split or by its id. Raises UserError."""
    from agentrl.plugins.registry import tasks_of

    splits = ("train", *env.splits)
    if split not in splits:
        raise UserError(f"--split {split}: environment {env.name!r} has no such split{nearest(split, splits)}")
    tasks = tasks_of(env, split)
    count = len(tasks)
    if which.lstrip("-").isdecimal():
        if not 0 <= int(which) < count:
            most = f"expected 0 to {count - 1}" if count else "it has none"
            raise UserError(f"--task {which}: {split} of {env.name!r} has {count} tasks: {most}")
        return tasks[int(which)]
    found = next((tasks[i] for i in range(count) if tasks[i].id == which), None)
    if found is None:
        raise UserError(f"--task {which}: {split} of {env.name!r} has no task with that id; use its number")
    return found


def _introduce(task: "Task", tools: "Sequence[Tool]", narrator: Narrator, recipe: "Recipe", env: "Environment") -> None:
    from agentrl.plugins.mixture import left_out
    from agentrl.plugins.schema import outline

    for line in left_out(env, tools, recipe.agent):
        narrator.say(line, style="dim")
    narrator.say(f"task {task.id}", style="bold")
    for tool in tools:
        narrator.say(f"tool {tool.name} {outline(tool.parameters)}", style="dim")
    if recipe.agent is not None:
        narrator.say(f"agent {recipe.agent.name or shlex.join(recipe.agent.command)}", style="dim")


def _hint(tools: "dict[str, Tool]") -> str:
    if not tools:
        return HINT
    tool = next(iter(tools.values()))
    keys = tool.parameters.get("required") or list(tool.parameters.get("properties", {}))
    return HINT + HINT_CALL.format(tool=tool.name, example=json.dumps(dict.fromkeys(keys, "...")))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _conclude(narrator: Narrator, request: "AsyncRolloutRequest", played: "Trajectory", env: "Environment") -> int:
    from agentrl.trajectory import FinishReason

    failed = narrator.failed(request, played)
    narrator.agent_ended(request)
    if failed:
        return FAILED
    turns, calls = _count(len(played.turns), "turn"), _count(len(played.tool_uses), "tool call")
    if played.finish is FinishReason.ABORTED:
        narrator.say(f"\nquit after {turns}: released, without a reward", style="red")
        return FAILED
    narrator.say(f"ended by {played.finish} after {turns} and {calls}", style="bold")
    narrator.say(rewards_line(played), style="bold")
    narrator.say(f"solved: {'yes' if env.solved(played.rewards, played.task) else 'no'}", style="bold")
    return 0
