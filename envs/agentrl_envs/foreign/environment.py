"""The environment `foreign`: somebody else's, unchanged, in an interpreter of its own, played by our driver."""

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from agentrl.errors import UserError, nearest
from agentrl.plugins.environment import Environment, LazyTasks
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Reply, RewardParts, Session, Task, ToolResponse
from agentrl_envs.conversation import check_generated
from agentrl_envs.foreign.pool import Pool
from agentrl_envs.foreign.process import Foreign, ForeignError, ForeignProcess


@dataclass(slots=True)
class Episode:
    """What serves one rollout: the environment's `session.state`."""

    process: ForeignProcess
    """Where it runs."""
    number: int
    """Its number there."""
    state: str = ""
    """How it names the state that it is in."""

    async def ask(self, call: str, *given: Json) -> Any:
        """What a method of the episode returned. Raises ForeignError."""
        answer = await self.process.wait(call, self.number, *given)
        if not isinstance(answer, dict):
            raise ForeignError(f"{call}() was answered by {type(answer).__name__}")
        state = answer.get("state")
        self.state = state if isinstance(state, str) else ""
        return answer.get("value")


_FIELDS = {"text": str | None, "images": list | None, "reward": int | float | None, "metrics": dict | None}
"""What `call` of an episode may return, of which kinds; `done` and `error` are read as true or false."""


class ForeignTool(Tool):
    """A tool of the foreign environment, by the schema that its adapter describes. checked: whether arguments that do
    not fit it are refused before the adapter hears of them."""

    def __init__(self, schema: Mapping[str, Json], checked: bool = True) -> None:
        function = schema.get("function", schema)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(f"the adapter describes a tool without a name: {str(schema)[:100]}")
        self.name = function["name"]
        self.description = function.get("description") or ""
        self.parameters = function.get("parameters") or {"type": "object", "properties": {}}
        self._checked = checked

    def check(self, arguments: Mapping[str, Json]) -> dict[str, Json]:
        """See `Tool.check`."""
        return super().check(arguments) if self._checked else dict(arguments)

    # a parameter of theirs may be called session
    async def execute(self, session: Session, /, **arguments: Json) -> ToolResponse:  # type: ignore[override]
        assert session.environment is not None, "an environment's own tool has its session"
        episode: Episode = session.environment.state
        said = await episode.ask("call", self.name, arguments)
        if not isinstance(said, Mapping):
            return ToolResponse("" if said is None else str(said))
        if unknown := sorted({*said} - {"text", "images", "reward", "metrics", "done", "error"}):
            raise ForeignError(f"call() of {self.name} returned {unknown[0]!r}, which is no field of an answer")
        for field, kinds in _FIELDS.items():
            if not isinstance(said.get(field), kinds):
                raise ForeignError(f"call() of {self.name} returned {type(said[field]).__name__} as `{field}`")
        return ToolResponse(
            said.get("text") or "", tuple(said.get("images") or ()), said.get("reward"), said.get("metrics") or {},
            bool(said.get("done")), bool(said.get("error")),
        )  # fmt: skip


class ForeignEnvironment(Environment):
    """Somebody else's environment, by an adapter that runs in its interpreter (docs/foreign.md).

    python: the interpreter, such as venv/bin/python. module: the adapter, the name of a shipped one (`textarena`), or
    `package.module` or `file.py`, with `:Class` where it is not called Adapter. args: the adapter's. processes: at most
    so many at once. alone: each serves one rollout at a time, in its main thread; otherwise it serves many. fresh: it
    ends with its rollout. memory_gb: the address space that a process may have.
    start_seconds: until the adapter is imported, and for each task. variables: environment variables.
    """

    name = "foreign"
    reward_parts: tuple[str, ...] | None = None

    def __init__(
        self,
        python: str,
        module: str,
        args: dict[str, Json] | None = None,
        source: str = "generated",
        processes: int = 1,
        alone: bool = False,
        start_seconds: float = 120.0,
        variables: dict[str, str] | None = None,
        fresh: bool = False,
        memory_gb: float | None = None,
    ) -> None:
        check_generated(self, source)
        foreign = foreign_of(python, module, args, processes, variables, "env.args")
        foreign = replace(foreign, alone=alone or fresh, fresh=fresh, memory_gb=memory_gb)
        self._pool = Pool.shared(foreign, processes, start_seconds)
        described = self._pool.describe()
        self.name = described.get("name") or foreign.name
        self._sizes = _sizes(described, self.name)
        self.splits = tuple(split for split in self._sizes if split != "train")
        parts = described.get("reward_parts")
        self.reward_parts = None if parts is None else tuple(map(str, parts))
        self._solved = described.get("solved", 1.0)
        self.cannot = _lacking(described.get("cannot"))
        self._offers = frozenset(described.get("offers", ()))
        self._checked = bool(described.get("checked", True))
        tools = [ForeignTool(schema, self._checked) for schema in described.get("tools") or ()]
        self._tools = {tool.name: tool for tool in tools}
        self._own: dict[str, ForeignTool] = {}  # of tasks that bring their own, by their schemas

    def tools(self) -> Sequence[Tool]:
        return tuple(self._tools.values())

    def tools_for(self, task: Task) -> Sequence[Tool]:
        named = task.data.get("tools")
        if not isinstance(named, list):
            return self.tools()
        return tuple(self._tool_of(task, one) for one in named)

    def _tool_of(self, task: Task, named: Json) -> ForeignTool:
        """A tool that a task names, or brings by its schema: the same object for the same schema."""
        if isinstance(named, Mapping):
            key = json.dumps(named, sort_keys=True)
            return self._own.setdefault(key, ForeignTool(named, self._checked))
        if named not in self._tools:
            raise UserError(f"{self.name}: task {task.id} offers {named!r}{nearest(str(named), self._tools)}")
        return self._tools[named]

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._sizes:
            raise UserError(f"{self.name} has no split {split!r}{nearest(split, self._sizes)}")
        return LazyTasks(self._sizes[split], lambda index: self._task(split, index))

    def _task(self, split: str, index: int) -> Task:
        if "task" not in self._offers:
            return Task(f"{split}-{index}", {"split": split, "index": index})
        data = self._pool.ask("task", split, index)
        if not isinstance(data, dict):
            raise UserError(f"{self.name}: task({split!r}, {index}) returned {type(data).__name__}, not a dictionary")
        return Task(str(data.get("id", f"{split}-{index}")), {"split": split, "index": index, **data})

    async def create(self, session: Session, **create_kwargs: Json) -> Sequence[Message]:
        if "play" in self._offers:
            return _messages(session.task.data.get("messages"))
        process, number = await self._pool.take()
        session.state = episode = Episode(process, number)
        try:
            async with asyncio.timeout(self._pool.seconds):
                opened = await process.wait("open", number, dict(session.task.data), session.rng.getrandbits(32))
        except TimeoutError:
            raise ForeignError(f"{self.name}: open() took more than {self._pool.seconds:g} s") from None
        if not isinstance(opened, dict):
            raise ForeignError(f"{self.name}: open() was answered by {type(opened).__name__}")
        state = opened.get("state")
        episode.state = state if isinstance(state, str) else ""
        return _messages(opened.get("messages"))

    async def execute(self, session: Session, message: Message) -> Reply:
        episode: Episode | None = session.state
        if episode is None:
            raise ForeignError(
                f"{self.name} holds its conversations itself: give the recipe `agent: {{name: foreign, args: ...}}`, "
                "with the arguments of env.args"
            )
        said = await episode.ask("step", dict(message))
        if said is None:
            return Reply(done=True)
        if isinstance(said, Mapping):
            return Reply(tuple(_messages(said.get("messages"))), said.get("reward"), bool(said.get("done")))
        return Reply(tuple(_messages(said)))

    def state_key(self, session: Session) -> str:
        episode: Episode | None = session.state
        return "" if episode is None else episode.state

    async def calc_reward(self, session: Session, **kwargs: Json) -> float | RewardParts:
        episode: Episode | None = session.state
        if episode is None:
            graded = None if session.outcome is None else session.outcome.returned
        else:
            graded = await episode.ask("grade", list(session.messages))
        if not isinstance(graded, Mapping):
            return {} if graded is None and episode is None else graded  # type: ignore[return-value]
        if not isinstance(graded.get("rewards"), Mapping):
            return graded
        session.metrics.update(graded.get("metrics") or {})
        seats = graded.get("seats") or {}
        return {**graded["rewards"], **({"seats": seats} if seats else {})}

    async def release(self, session: Session, **kwargs: Json) -> None:
        episode: Episode | None = session.state
        if episode is None:
            return
        process = episode.process
        try:
            if not process.over and not process.hangs_in(episode.number):
                await process.wait("close", episode.number)
        finally:
            if self._pool.give_back(process):
                await process.end_in_thread("a call hung in its process, which was ended")

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        if isinstance(self._solved, Mapping):
            return all(rewards.get(part, 0.0) >= float(least) - 1e-6 for part, least in self._solved.items())
        return sum(rewards.values()) >= float(self._solved) - 1e-6

    def demonstrate(self, task: Task, rng: Random, style: str) -> Sequence[Message]:
        if "demonstrate" not in self._offers:
            raise NotImplementedError(f"the adapter of {self.name!r} has no demonstrations")
        return _messages(self._pool.ask("demonstrate", dict(task.data), rng.getrandbits(32), style))

    def stored(self, task: Task) -> Mapping[str, Json]:
        if "stored" not in self._offers:
            return {}
        kept = self._pool.ask("stored", dict(task.data))
        if not isinstance(kept, Mapping):
            raise UserError(f"{self.name}: stored() returned {type(kept).__name__}; expected values by their place")
        return kept

    async def close(self) -> None:
        await self._pool.close()


def foreign_of(
    python: str,
    module: str,
    args: dict[str, Json] | None,
    processes: int,
    variables: dict[str, str] | None,
    where: str,
) -> Foreign:
    """What runs where, by the arguments of a recipe, at `where`. Raises UserError."""
    if processes < 1:
        raise UserError(f"{where}.processes is {processes}: it must be 1 or more")
    return Foreign(_interpreter(python, where), module, args or {}, variables or {})


def _interpreter(python: str, where: str) -> str:
    """The path of an interpreter. Raises UserError."""
    path = Path(python).expanduser()
    found = str(path.absolute()) if path.is_file() and os.access(path, os.X_OK) else shutil.which(python)
    if found is None:
        raise UserError(
            f"{where}.python: there is no interpreter {python}: make its virtual environment (`agentrl env add`, or "
            f"python -m venv), and give VENV/bin/python"
        )
    return found


def _sizes(described: Mapping[str, Json], name: str) -> dict[str, int]:
    """How many tasks each split has. Raises UserError."""
    sizes = described.get("splits")
    if not isinstance(sizes, dict) or "train" not in sizes:
        raise UserError(
            f"{name}: describe() gives splits {sizes!r:.60}; expected numbers of tasks by split, with train"
        )
    for split, size in sizes.items():
        if not isinstance(size, int) or size < 0:
            raise UserError(f"{name}: describe() says that {split!r} has {size!r:.40} tasks; expected a number")
    return sizes


def _lacking(given: object) -> dict[str, str]:
    """What an adapter says that it does not carry, each in a line."""
    return {str(what)[:60]: str(why)[:200] for what, why in given.items()} if isinstance(given, Mapping) else {}


def _messages(said: object) -> list[Message]:
    """Messages of an adapter; a text is what the user says. What is neither is refused by the driver."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    return said if said is not None else []  # type: ignore[return-value]
