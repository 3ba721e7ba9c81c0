"""`replay`: a stored rollout played once more, step by step, with live hooks: what the model said is given, calls run.

The driver is that of training, and so are its deadlines and boundaries; in the engine's place is `StoredTurns`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agentrl.chat.base import Chat
from agentrl.chat.load import load_chat
from agentrl.checkpoint.run_folder import RunFolder
from agentrl.containment.event_loop import blocking, run
from agentrl.engine.base import engine_class
from agentrl.errors import UserError, call_plugin, nearest
from agentrl.models.load import load_tokenizer, resolve_types
from agentrl.offline.turns import Script, StoredTurns, as_typed, spoken_by
from agentrl.plugins.agent_process import agent_of_recipe
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_environment, tasks_of
from agentrl.plugins.rewards import MODEL, make_rewards
from agentrl.plugins.toolbox import Toolbox
from agentrl.plugins.types import Json, Message, Task
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.player import Player, check_tools_of_agent, gateway_of, prepare_torch
from agentrl.rollout.stored import StoredSample, chosen_files, read_samples
from agentrl.rollout.trajectory_file import Stored, as_json, read_rows, row
from agentrl.testing.agent import END, TextChat, without_token_limits
from agentrl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LISTED = 5  # ids that an error lists
_HINT = 200  # characters of the ids that are near to a wrong one; more are all that there are


class Step(NamedTuple):
    """The opening, or one turn of the model, and what followed it."""

    stored: Sequence[Message]
    """Of an assistant's turn, that first."""
    live: Sequence[Message]
    """Likewise; empty where it did not come to it."""

    @property
    def same(self) -> bool:
        """Whether environment and tools say the same."""
        return list(self.stored) == list(self.live)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of `replay`."""

    stored: StoredSample
    """As it is stored."""
    live: Trajectory
    """As it went now."""
    steps: tuple[Step, ...]
    """The opening, then the turns."""
    stopped: str
    """Why it was not played to its end; empty where it was."""
    group_parts: tuple[str, ...]
    """Reward parts that compare the samples of a group, and so are not computed of one."""

    @property
    def same(self) -> bool:
        """Whether environment and tools said the same, all the way."""
        return all(step.same for step in self.steps) and self.live.failure is None


@dataclass(frozen=True, slots=True)
class Which:
    """Which sample of a folder is meant: whatever is not None must agree."""

    request: str | None = None
    """Its id."""
    step: int | None = None
    """The training step, or the one after which was evaluated."""
    split: str | None = None
    """`train`, or one that was evaluated."""
    task: str | None = None
    """The task's id."""
    sample: int | None = None
    """Its index among the samples of the task."""

    def find(self, folder: Path) -> tuple[Stored, StoredSample]:
        """The one sample that is meant, and its file. Raises UserError: none, or more than one."""
        found: list[tuple[Stored, int, str]] = []
        seen: set[str] = set()
        for file in chosen_files(folder, self.step, self.split):
            for index, facts in enumerate(read_rows(file.path, ["request", "task", "sample"])):
                seen.add(str(facts["request"]))
                wanted = (self.request, self.task, self.sample)
                if all(w in (None, f) for w, f in zip(wanted, facts.values(), strict=True)):
                    found.append((file, index, str(facts["request"])))
        if not found:
            hint = nearest(self.request, seen) if self.request is not None else ""
            raise UserError(f"{folder}: no such sample is stored there{hint if len(hint) < _HINT else ''}")
        if len(found) > 1:
            some = ", ".join(name for _, _, name in found[:_LISTED])
            more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
            raise UserError(f"{folder}: {len(found)} samples match: name one by --id: {some}{more}")
        ((file, index, _),) = found
        return file, read_samples(file.path)[index]


def replay(folder: str | Path, which: Which, *, overrides: Sequence[str] = ()) -> Replayed:
    """Play a stored rollout again, against the environment and the tools as they are now.

    folder: of a run, an evaluation or rollouts; its recipe names environment, tools and rewards. overrides: `key=value`
    to change there. Raises UserError: no such sample, or its task is gone.
    """
    path = Path(folder)
    _, sample = which.find(path)
    recipe = resolve_types(load_recipe(str(RunFolder(path).recipe()), overrides))
    return blocking(lambda: run(_replay(recipe, sample)))


async def _replay(recipe: Recipe, sample: StoredSample) -> Replayed:
    env = make_environment(recipe.env)
    try:
        task = live_task(env, sample)
    except UserError:
        await env.close()
        raise
    engine = StoredTurns()
    player = await scripted_player(recipe, env, engine)
    try:
        return await play_again(player, engine, sample, task)
    finally:
        await player.close()


def live_task(env: Environment, sample: StoredSample) -> Task:
    """The task of a stored sample, as the environment has it. Raises UserError: it has it no more."""
    split, name = sample.facts["split"], sample.trajectory.task.id
    found = live_tasks(env, split, {name: sample.facts["task_data"]})
    if name not in found:
        raise UserError(
            f"task {name}: environment {env.name!r} has no such task in {split}, or with other data: it cannot be "
            "played again"
        )
    return found[name]


def live_tasks(env: Environment, split: str, stored: Mapping[str, str]) -> dict[str, Task]:
    """By their ids those of the stored tasks of a split that the environment still has, with the same data, and
    with what a file does not hold, such as images.

    stored: by a task's id its column `task_data`. Raises UserError where the tasks cannot be read.
    """
    tasks: Sequence[Task] = tasks_of(env, split) if split in ("train", *env.splits) else ()
    found = call_plugin(f"environment {env.name!r}: tasks({split!r})", _find, tasks, stored)
    return {name: task for name, task in found.items() if _same(task, stored[name])}


def _same(task: Task, data: str) -> bool:
    try:
        return bool(json.loads(as_json(task.data)) == json.loads(data))
    except (ValueError, RecursionError):  # of a damaged file
        return False


def _find(tasks: Sequence[Task], stored: Mapping[str, str]) -> dict[str, Task]:
    found = {name: task for name in stored if (task := _by_number(tasks, name)) is not None}
    wanted = set(stored) - set(found)
    for index in range(len(tasks)):
        if not wanted:
            break
        task = tasks[index]
        if task.id in wanted:
            wanted.remove(task.id)
            found[task.id] = task
    return found


def _by_number(tasks: Sequence[Task], name: str) -> Task | None:
    """The task whose id ends in its place, as most do: making all of them may take long."""
    digits = re.search(r"\d{1,12}$", name)
    if digits is None or int(digits[0]) >= len(tasks):
        return None
    task = tasks[int(digits[0])]
    return task if task.id == name else None


async def scripted_player(recipe: Recipe, env: Environment, engine: StoredTurns) -> Player:
    """A player without a model, whose engine says what is seated. Raises UserError."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(env.close)
        prepare_torch(recipe)
        rewards = make_rewards(recipe.rewards)
        toolbox = await Toolbox.open(recipe.tools, env)
        stack.push_async_callback(toolbox.close)
        tools = (*toolbox.tools, *env.tools())
        tokenizer, chat = _tokenizer_and_chat(recipe, [tool.schema for tool in tools])
        if isinstance(chat, TextChat):
            recipe = recipe.changed(rollout=without_token_limits(recipe.rollout))
        player = Player(recipe, env, toolbox, rewards, None, tokenizer, chat, engine)
        if recipe.agent is not None:
            check_tools_of_agent(tools)
            player.agent, player.gateway = agent_of_recipe(recipe.agent), gateway_of(recipe)
            await player.gateway.start()
        stack.pop_all()
    return player


def _tokenizer_and_chat(
    recipe: Recipe, schemas: Sequence[dict[str, Json]]
) -> "tuple[PreTrainedTokenizerBase | None, Chat]":
    """Those of the recipe's model; for an engine that takes messages, a chat of plain text."""
    if engine_class(recipe.engine.name).brings_chat:
        return None, TextChat()
    section = recipe.model
    tokenizer = load_tokenizer(section)
    chat = load_chat(
        tokenizer, model_path=section.path, kind=section.chat, chat_template=section.chat_template, tools=schemas
    )
    return tokenizer, chat


async def play_again(player: Player, engine: StoredTurns, sample: StoredSample, task: Task) -> Replayed:
    """Play a stored sample again with the seed that it had."""
    stored = sample.trajectory
    typed = isinstance(player.chat, TextChat)
    turns = as_typed(stored, END) if typed else spoken_by(stored)
    driver = player.driver(label="replay")
    request = driver.request(task, stored.sample)
    if stored.seed is not None:
        request.seed = request.main.seed = stored.seed
    script = Script(turns, len(turns), branches=bool(stored.segments) and not typed)
    engine.seat(request.id, script)
    live = await driver.drive(request)
    left = len(turns) - len(script.said)
    stopped = script.stopped or (f"it ended by {live.finish} with {left} stored turns left" if left else "")
    groups = (*player.rewards.groups, *((MODEL,) if player.recipe.rewards.model is not None else ()))
    return Replayed(sample, live, _steps(sample, live), stopped, groups)


def _steps(sample: StoredSample, live: Trajectory) -> tuple[Step, ...]:
    """What was said, stored and live, side by side."""
    now = row(live)
    sides = [_turns(_said(facts)) for facts in (sample.facts, now)]
    count = max(map(len, sides))
    stored, lived = ([*side, *[[]] * (count - len(side))] for side in sides)
    return tuple(Step(one, other) for one, other in zip(stored, lived, strict=True))


def _said(facts: Mapping[str, Json]) -> list[Message]:
    """The messages of a row; of a tree, those of all of its conversations."""
    branches = json.loads(facts["branches"] or "[]")
    found: list[Message] = [m for branch in branches for m in branch] if branches else json.loads(facts["messages"])
    return found


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages by the turns that they follow, the opening first."""
    found: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            found.append([])
        found[-1].append(message)
    return found
