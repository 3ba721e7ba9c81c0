"""The environment: where tasks come from, the same four hooks as a tool, and who decides that it is over."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import overload

from agentrl.errors import UserError
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Reply, RewardParts, Session, Task
from agentrl.workspace.provider import WorkspaceSpec
from agentrl.workspace.workspace import Workspace

VALIDATION = ("validation", "valid", "val", "dev")


def is_validation(split: str) -> bool:
    """Whether a held-out split is there to choose checkpoints by, as its name says (also within a mixture)."""
    return split.rpartition(".")[2] in VALIDATION


class Environment(ABC):
    """Built once a run as `cls(source=..., **env.args)`; serves all requests at once.

    `splits` are the held-out splits, the first of them the one that leads. One of the names in VALIDATION is evaluated
    during training, and the best checkpoint is chosen on it; the others are what is reported. `train` always exists.
    `uses_workspace`: whether it needs `session.workspace`, without which no run begins.
    `pays` is False where `calc_reward` has nothing to give, and only tools and `rewards.functions` do.
    `reward_parts`: every name that `calc_reward` may give, where they are known; None: they are not. A class that
    overrides `calc_reward` says them anew. `example`: arguments (`source` among them) by which `agentrl try` plays an
    environment that cannot be made without any. `cannot`: what its source has and it does not carry, by name, and what
    becomes of it; said where a command begins.
    """

    name: str
    splits: tuple[str, ...] = ("test",)
    pays: bool = True
    uses_workspace: bool = False
    reward_parts: tuple[str, ...] | None = None
    example: Mapping[str, Json] = MappingProxyType({})
    cannot: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split (`train` or one of `splits`): a sequence with random access; it may be lazy and
        long.

        Raises UserError (file, line, field) for a row that cannot be used.
        """

    def workspace_spec(self, task: Task, spec: WorkspaceSpec) -> WorkspaceSpec:
        """What the workspaces of a task are opened from, where `workspace.provider` is set. spec: the recipe's, which
        is also the default."""
        return spec

    async def prepare(self, task: Task, workspace: Workspace) -> None:  # noqa: B027 - a hook with a default
        """Bring a workspace into the state that a task begins in, once for all samples of a task that run together:
        each starts from a snapshot of it. Tests and solutions do not belong there."""

    @abstractmethod
    async def create(self, session: Session, **create_kwargs: Json) -> Sequence[Message]:
        """The opening messages, once a request, before the first token. `session.workspace` is
        prepared; it is None where the opening alone is asked for, to be measured."""

    def images(self, task: Task) -> Sequence[object]:
        """The images of a task's opening that may turn out to be broken, as those of data: they are decoded
        before the task is played, and another is drawn where one cannot be shown. By default none. Called in
        threads, for several tasks at the same time."""
        return ()

    async def execute(self, session: Session, message: Message) -> Reply:
        """Answer an assistant's turn that holds no tool call. By default it ends the episode."""
        return Reply(done=True)

    async def next_step(self, session: Session) -> Sequence[Message]:
        """What is asked for next where an agent (`agent` of a recipe) drives the rollout and has ended: it is started
        again with these messages, behind those of the system that opened the rollout. `execute` is not called then.
        `session.outcome` is what the agent came to. By default nothing, which ends the rollout."""
        return ()

    def state_key(self, session: Session) -> str:
        """A name of the state that the next turn begins in: equal for two rollouts of a task in which the same
        choice is to be made. Called before each turn, for advantages that compare turns (`gigpo`). By default empty:
        turns are then compared by what the model was just told."""
        return ""

    @abstractmethod
    async def calc_reward(self, session: Session, **kwargs: Json) -> float | RewardParts:
        """The reward, or its named parts, once, after the last token, when the processes in `session.workspace` have
        been ended: see `agentrl.workspace.grading`. A part `seats`, itself a mapping, holds
        the rewards of seats that an agent called for (`X-Agentrl-Role`), a number each, apart from the sum."""

    async def release(self, session: Session, **kwargs: Json) -> None:  # noqa: B027 - a hook with a default
        """Free what `create` took. Called exactly once for each `create`, whatever happened."""

    def tools(self) -> Sequence[Tool]:
        """Tools that the environment brings itself, besides those of the recipe: the same objects at every call.
        Their `session.environment.state` is this environment's state of the request."""
        return ()

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Those that one task offers: some of `tools()`, or tools of its own, the same objects at every call. By
        default all of `tools()`."""
        return self.tools()

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        """Whether a finished trajectory counts as correct in evaluation, by its reward parts before they are
        weighted. By default: they sum to 1 or more."""
        return sum(rewards.values()) >= 1.0 - 1e-6

    def demonstrate(self, task: Task, rng: Random, style: str) -> Sequence[Message]:
        """A demonstration after the opening messages, for `agentrl sft`. Optional. A result of a tool that holds
        conversations may bring its own as `conversation`."""
        raise NotImplementedError(f"environment {self.name!r} has no demonstrations")

    def summarize(self, task: Task, messages: Sequence[Message], rng: Random, style: str) -> str:
        """A demonstration of a summary, where `rollout.compact` is set. Optional. messages: those so far of what
        `demonstrate` returned."""
        raise NotImplementedError(f"environment {self.name!r} has no summaries")

    def stored(self, task: Task) -> Mapping[str, Json]:
        """What the source of a task keeps as right beside `task.data`, by its place there, for `agentrl audit`; None
        where the place is empty. Optional."""
        return {}

    async def solve(self, task: Task, workspace: Workspace, step: int = 0) -> object:
        """Do a task in its workspace as one who knows how would, for `agentrl audit`. Optional. step: turns before this
        one, of a task that has several."""
        raise NotImplementedError(f"environment {self.name!r} has no solutions")

    async def close(self) -> None:  # noqa: B027 - a hook with a default
        """Free what the whole run held, once, when the run ends."""


def declared_parts(plugin: Environment | Tool) -> tuple[str, ...] | None:
    """Its `reward_parts`; None where it declares none, or where a class below the one that does overrides
    `calc_reward`. Raises UserError: they are one text."""
    for kind in type(plugin).__mro__:
        if "reward_parts" in vars(kind):
            if isinstance(plugin.reward_parts, str):
                raise UserError(
                    f"{kind.__name__}: `reward_parts` is {plugin.reward_parts!r}; expected a tuple of texts"
                )
            return plugin.reward_parts
        if "calc_reward" in vars(kind):
            return None
    return None


def not_carried(env: Environment, tools: Iterable[Tool]) -> list[str]:
    """What an environment and tools say that they do not carry, each in a line."""
    lines = [f"not carried by {env.name}: {what}: {why}" for what, why in env.cannot.items()]
    return lines + [f"not carried by {tool.name}: {what}: {why}" for tool in tools for what, why in tool.cannot.items()]


class LazyTasks(Sequence[Task]):
    """`size` tasks; `make(index)` makes one, always the same for an index in 0 .. size - 1."""

    def __init__(self, size: int, make: Callable[[int], Task]) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._size))]
        at = index + self._size if index < 0 else index
        if not 0 <= at < self._size:
            raise IndexError(f"there are {self._size} tasks, asked for {index}")
        return self._make(at)
