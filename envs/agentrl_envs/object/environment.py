"""The environment `object`: one Python object a request, whose public methods are the tools.

What TRL's `environment_factory` takes runs as it is: `reset(**row)` may add to the prompt, `get_reward()` pays, and
reward functions find the object in `environments`.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from agentrl.containment.threads import Abandoned
from agentrl.data.source import open_source
from agentrl.errors import UserError
from agentrl.plugins.environment import Environment, LazyTasks
from agentrl.plugins.registry import load_path
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Content, Json, Message, Session, Task
from agentrl_envs.object.methods import Lane, Live, Method, closes, tool_methods
from agentrl_envs.object.scoring import call_function, load_functions

Files = str | list[str]
NO_REWARD = "none"
TEST_SEEDS = 1_000_000_007  # where the seeds of held-out tasks begin when there is no data
HELD_OUT = 100


class ObjectEnvironment(Environment):
    """Methods of an ordinary Python object as tools; one object a request.

    factory: `package.module:Class`, or a function that returns an object; called with `args`.
    source: rows as `agentrl.data.source` reads them, each given to `reset(**row)`. `generated`: no data, `tasks` rows
    that hold a `seed` each. prompt: the column with the opening, text or messages, to whose end `reset` may add text.
    opening: the user's message where a row has no prompt.
    methods: those that are tools (None: all public ones but reset, get_reward and close).
    reward: the method or attribute that holds the reward (None: `get_reward`, else `reward`; `none`: others pay).
    rewards: import paths of functions as TRL calls them. done: an attribute that, once true, ends the episode.
    solved: the reward from which a task counts as solved. reuse: keep objects for later requests, for those that are
    dear to make: `reset` alone must make them new. splits, config, seed: as for `dataset`.
    """

    name = "object"
    example = MappingProxyType({"factory": "agentrl_envs.object.example:Shelf"})
    cannot = MappingProxyType({"rollout_func": "the loop over turns is ours"})

    def __init__(
        self,
        factory: str,
        source: str = "generated",
        args: dict[str, Json] | None = None,
        prompt: str = "prompt",
        opening: str = "",
        methods: list[str] | None = None,
        reward: str | None = None,
        rewards: list[str] | None = None,
        done: str | None = None,
        solved: float = 1.0,
        reuse: bool = False,
        tasks: int = 10_000,
        splits: dict[str, Files] | None = None,
        config: str | None = None,
        seed: int = 0,
    ) -> None:
        made = load_path(factory, "env.args.factory")
        if not callable(made):
            raise UserError(f"env.args.factory: {factory} is {type(made).__name__}; expected a class or a function")
        self._make: Callable[[], object] = functools.partial(made, **(args or {}))
        self._spare: list[Live] = []
        self._abandoned = Abandoned("environment object:", "give what it waits for a time-out of its own")
        self._owner = made if isinstance(made, type) else type(self._probe(factory))
        self.name = self._owner.__name__
        self._prompt, self._opening, self._reward = prompt, opening, reward
        self._solved, self._reuse = solved, reuse
        self._functions = load_functions(rewards or [])
        not_tools = [name for name in (reward, done) if name is not None]
        self._tools = tuple(Method(self._owner, name, done) for name in tool_methods(self._owner, methods, not_tools))
        self._closes = closes(self._owner)
        self._source = None
        if source != "generated" or splits:
            self._source = open_source(
                None if source == "generated" else source, splits=splits, config=config, seed=seed
            )
        self._count, self._seed = tasks, seed
        self.splits = self._source.splits if self._source else ("test",)

    def _probe(self, factory: str) -> object:
        """The first object of a function, which tells its class, and serves the first request."""
        try:
            made = self._make()
        except Exception as error:
            raise UserError(f"env.args.factory: {factory} raised {type(error).__name__}: {error}") from error
        self._spare.append(Live(made, Lane(factory, self._abandoned)))
        return made

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks: rows of the data, or seeds."""
        if self._source is not None:
            rows = self._source.rows(split)
            return LazyTasks(len(rows), lambda i: Task(f"{split}-{rows.number(i)}", rows.row(i)))
        if split not in ("train", "test"):
            raise UserError(f"{self.name} has no split {split!r}: without data there are train and test")
        first, count = (self._seed, self._count) if split == "train" else (TEST_SEEDS, HELD_OUT)
        return LazyTasks(count, lambda i: Task(f"{split}-{i}", {"seed": first + i}))

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def create(self, session: Session, **create_kwargs: Json) -> Sequence[Message]:
        session.state = live = self._spare.pop() if self._spare else await self._new()
        row = {**session.task.data, **create_kwargs}
        said = await live.call("reset", _taken(live.made.reset, row)) if hasattr(live.made, "reset") else None
        opening = _opening(row.get(self._prompt), self._opening, said, self.name)
        live.opening = len(opening)
        self._check_reward(live.made)
        return opening

    async def _new(self) -> Live:
        lane = Lane(self.name, self._abandoned)
        return Live(await lane.call(self._make), lane)

    def _check_reward(self, made: object) -> None:
        if self._reward == NO_REWARD or self._functions:
            return
        if not any(hasattr(made, name) for name in self._own_reward()):
            wanted = repr(self._reward) if self._reward else "get_reward() and no `reward`"
            raise UserError(
                f"{self.name} has no {wanted}: name its reward by env.args.reward, or set that to none and let "
                f"rewards.functions pay"
            )

    def _own_reward(self) -> tuple[str, ...]:
        return (self._reward,) if self._reward else ("get_reward", "reward")

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        live: Live = session.state
        parts: dict[str, float] = {}
        if self._reward != NO_REWARD:
            parts |= await self._own(live)
        for name, function in self._functions.items():
            value = await call_function(function, live, session.task.data, session.messages)
            if value is not None:
                parts[name] = value
        return parts

    async def _own(self, live: Live) -> dict[str, float]:
        """What the object itself pays; an attribute counts only where no function was named to read it."""
        for name in self._own_reward():
            if not hasattr(live.made, name) or (name == "reward" and not self._reward and self._functions):
                continue
            value = getattr(live.made, name)
            value = await live.call(name, {}) if callable(value) else value
            return dict(value) if isinstance(value, Mapping) else {self.name: value}
        return {}

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        return sum(rewards.values()) >= self._solved - 1e-6

    async def release(self, session: Session, **kwargs: Json) -> None:
        live: Live | None = session.state
        if live is None:
            return
        if self._reuse and live.running == 0:
            self._spare.append(live)
        else:
            await self._close(live)

    async def _close(self, live: Live) -> None:
        try:
            if self._closes:
                await asyncio.shield(live.call("close", {}))  # behind a call that hangs, it is made when that one ends
        finally:
            live.lane.end()

    async def close(self) -> None:
        spare, self._spare = self._spare, []
        try:
            for live in spare:
                await self._close(live)
        finally:
            self._abandoned.close()


def _taken(function: Callable[..., object], row: Mapping[str, Json]) -> dict[str, object]:
    """What `reset` takes of a row: all of it where it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(row)
    return {p.name: row[p.name] for p in parameters if p.name in row}


def _opening(prompt: Json, default: str, said: object, name: str) -> list[Message]:
    """The prompt with what `reset` said at the end of its last message. `said`: None, text, or content parts."""
    prompt = default if prompt is None else prompt
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if said is not None:
        if not isinstance(said, str | list):
            raise UserError(
                f"{name}.reset returned {type(said).__name__}; expected None, text or a list of content parts"
            )
        last = messages[-1]
        messages[-1] = {**last, "content": _joined(last["content"] or "", said)}
    if not any(message["content"] for message in messages):
        raise UserError(
            f"{name}: the opening is empty: give data with a prompt, or env.args.opening, or let reset return text"
        )
    return messages


def _joined(content: Content, said: str | list[dict[str, Json]]) -> Content:
    if isinstance(content, str) and isinstance(said, str):
        return content + said
    parts = ([{"type": "text", "text": content}] if content else []) if isinstance(content, str) else content
    return [*parts, *([{"type": "text", "text": said}] if isinstance(said, str) else said)]
