"""`Mixture`: several environments as one. A task belongs to exactly one of them, which alone serves its requests."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

from agentrl.errors import UserError
from agentrl.plugins.environment import Environment, LazyTasks, declared_parts, not_carried
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Reply, RewardParts, Session, Task
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.env import EnvPart
from agentrl.workspace.provider import WorkspaceSpec
from agentrl.workspace.workspace import Workspace


class Mixture(Environment):
    """Task ids and splits are prefixed by the environment's name: `gsm8k/train-7`, split `gsm8k.test`."""

    def __init__(self, parts: Sequence[tuple[EnvPart, Environment]]) -> None:
        seen: Counter[str] = Counter()
        self.parts: dict[str, tuple[EnvPart, Environment]] = {}
        """By label, in the order of `env.mix`."""
        for part, env in parts:
            seen[env.name] += 1
            label = env.name if seen[env.name] == 1 else f"{env.name}-{seen[env.name]}"
            self.parts[label] = part, env
        self.name = " + ".join(self.parts)
        self.splits = tuple(f"{label}.{split}" for label, (_, env) in self.parts.items() for split in env.splits)
        self._tools = self._own_tools()
        self.pays = all(env.pays for _, env in self.parts.values())
        self.cannot = {
            f"{what} of {label}": why for label, (_, env) in self.parts.items() for what, why in env.cannot.items()
        }

    @property
    def reward_parts(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """All of theirs, where each says its own."""
        each = [declared_parts(env) for _, env in self.parts.values()]
        return None if None in each else tuple(dict.fromkeys(name for names in each for name in names or ()))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the environments, in the order of `env.mix`."""
        return tuple(self.parts)

    def _own_tools(self) -> tuple[Tool, ...]:
        """The tools by name: two environments may bring the same tool, each serving its own tasks, but not two
        unlike ones."""
        tools: dict[str, Tool] = {}
        for label, (_, env) in self.parts.items():
            for tool in env.tools():
                if tools.setdefault(tool.name, tool).schema != tool.schema:
                    raise UserError(f"env.mix: {label} and another bring different tools called {tool.name!r}")
        return tuple(tools.values())

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split: `train` mixes all by weight; a held-out split belongs to one environment."""
        if split != "train":
            label, _, own = split.partition(".")
            part, env = self.parts[label]
            return _Labelled(label, part, env.tasks(own))
        mixed = [_Labelled(label, part, env.tasks("train")) for label, (part, env) in self.parts.items()]
        if empty := next((tasks.label for tasks in mixed if not len(tasks)), None):
            raise UserError(f"env.mix: environment {empty} has no training task")
        return _Mixed(mixed, [part.weight for part, _ in self.parts.values()])

    def tools(self) -> Sequence[Tool]:
        return self._tools

    def tools_for(self, task: Task) -> Sequence[Tool]:
        return self._of(task).tools_for(task)

    def _of(self, task: Task) -> Environment:
        return self.parts[task.id.partition("/")[0]][1]

    def workspace_spec(self, task: Task, spec: WorkspaceSpec) -> WorkspaceSpec:
        return self._of(task).workspace_spec(task, spec)

    async def prepare(self, task: Task, workspace: Workspace) -> None:
        await self._of(task).prepare(task, workspace)

    async def create(self, session: Session, **create_kwargs: Json) -> Sequence[Message]:
        return await self._of(session.task).create(session, **create_kwargs)

    def images(self, task: Task) -> Sequence[object]:
        return self._of(task).images(task)

    async def execute(self, session: Session, message: Message) -> Reply:
        return await self._of(session.task).execute(session, message)

    async def next_step(self, session: Session) -> Sequence[Message]:
        return await self._of(session.task).next_step(session)

    def state_key(self, session: Session) -> str:
        return self._of(session.task).state_key(session)

    async def calc_reward(self, session: Session, **kwargs: Json) -> RewardParts:
        env = self._of(session.task)
        reward = await env.calc_reward(session, **kwargs)
        return reward if isinstance(reward, Mapping) else {env.name: reward}

    async def release(self, session: Session, **kwargs: Json) -> None:
        await self._of(session.task).release(session, **kwargs)

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        return self._of(task).solved(rewards, task)

    def demonstrate(self, task: Task, rng: Random, style: str) -> Sequence[Message]:
        return self._of(task).demonstrate(task, rng, style)

    async def solve(self, task: Task, workspace: Workspace, step: int = 0) -> object:
        return await self._of(task).solve(task, workspace, step)

    async def close(self) -> None:
        for _, env in self.parts.values():
            await env.close()


def environment_of(env: Environment, task: Task) -> str:
    """The name of a task's environment: `env`, or the one of a mixture that serves it."""
    return task.id.partition("/")[0] if isinstance(env, Mixture) else env.name


def part_of(env: Environment, task: Task) -> int:
    """The index in `env.mix` of the environment that serves a task; 0 without a mixture."""
    return env.labels.index(task.id.partition("/")[0]) if isinstance(env, Mixture) else 0


def not_asked(env: Environment, agent: AgentSection | None) -> list[str]:
    """A line for each environment whose own `execute` a recipe's agent leaves unasked, without a `next_step` for it."""
    if agent is None:
        return []
    if isinstance(env, Mixture):
        return [line for _, part in env.parts.values() for line in not_asked(part, agent)]
    kind = type(env)
    if kind.execute is Environment.execute or kind.next_step is not Environment.next_step:
        return []
    return [
        f"not asked with agent: execute of {env.name}: a rollout is over when its agent ends, whatever the environment "
        "would answer (its next_step can go on)"
    ]


def left_out(env: Environment, tools: Iterable[Tool], agent: AgentSection | None) -> list[str]:
    """What a rollout goes without, each in a line: `not_carried`, then `not_asked`; said where a command begins."""
    return [*not_carried(env, tools), *not_asked(env, agent)]


class _Labelled(LazyTasks):
    """The tasks of one environment, with its label in their ids and with the tools that the recipe gives it."""

    def __init__(self, label: str, part: EnvPart, tasks: Sequence[Task]) -> None:
        super().__init__(len(tasks), self._task)
        self.label, self._part, self._tasks = label, part, tasks

    def _task(self, index: int) -> Task:
        task = self._tasks[index]
        return replace(task, id=f"{self.label}/{task.id}", tools=self._part.tools if task.tools is None else task.tools)


class _Mixed(LazyTasks):
    """Every task of every part at least once, smaller parts as often as their weight asks for."""

    def __init__(self, parts: Sequence[_Labelled], weights: Sequence[float]) -> None:
        scale = max(len(part) / weight for part, weight in zip(parts, weights, strict=True))
        self._parts = parts
        self._ends = list(accumulate(max(len(p), round(w * scale)) for p, w in zip(parts, weights, strict=True)))
        super().__init__(self._ends[-1], self._task)

    def _task(self, index: int) -> Task:
        which = bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        part = self._parts[which]
        return part[(index - start) % len(part)]
