"""`Workspaces`: those of a run. The state of a task is prepared once and kept; samples find their workspace opened.

The order in which samples begin is known before they do: `expect` is told, and what is opened ahead is for them.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.addresses import is_loopback
from agentrl.containment.deadline import GRACE, leave_behind
from agentrl.errors import UserError, WorkspaceError, contained, describe
from agentrl.jsonable import dumps
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_workspace_provider
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Task
from agentrl.recipe.sections.agent import AgentSection, host_and_port
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.workspace.provider import WorkspaceProvider, WorkspaceSpec
from agentrl.workspace.workspace import Snapshot, Workspace

CHANGES = "workspace"
"""The key of a trajectory's `extra` under which what its rollout changed is kept."""
WAIT = "workspace"
"""The name of the span in which a sample waits for its workspace."""
OPEN_SECONDS, PREPARE_SECONDS, CLOSE_SECONDS = 300.0, 300.0, 60.0
_ATTEMPTS = 2
_KEPT = 64
"""Prepared tasks whose snapshot is kept for the next sample, beyond those that samples wait for."""
_log = logging.getLogger("agentrl.rollout")


@dataclass(slots=True)
class _Prepared:
    """A task as it begins."""

    state: "asyncio.Task[tuple[WorkspaceSpec, Snapshot | None]]"
    """What its workspaces are opened from. Without a snapshot the image is the state."""
    ahead: "deque[asyncio.Task[Workspace]]" = field(default_factory=deque)

    @property
    def failed(self) -> bool:
        """Whether it could not be prepared."""
        return self.state.done() and (self.state.cancelled() or self.state.exception() is not None)


def provider_of(
    section: WorkspaceSection | None,
    environment: Environment,
    tools: Sequence[Tool],
    agent: AgentSection | None = None,
    tasks: Iterable[Task] = (),
) -> WorkspaceProvider | None:
    """The provider of a recipe, not started, which can do what the recipe, its agent and some tasks ask for; None where
    it has no section `workspace`. tools: those of the recipe. Raises UserError: something needs workspaces and there
    are none, or the provider cannot do what is asked for."""
    if section is None:
        users = [f"environment {environment.name!r}"] if environment.uses_workspace else []
        users += [f"tool {tool.name!r}" for tool in (*tools, *environment.tools()) if tool.uses_workspace]
        if users:
            raise UserError(f"{users[0]} works in a workspace, and the recipe has none: set workspace: bwrap")
        return None
    provider, spec = make_workspace_provider(section), section.spec()
    provider.check(spec)
    _check_reach(provider, spec, agent, "the recipe")
    for task in tasks:
        try:
            asked = spec_of(environment, task, spec)
        except BaseException as error:  # noqa: BLE001 - boundary: an environment may raise anything
            why = describe(contained(error))
            raise UserError(f"environment {environment.name!r}: workspace_spec of task {task.id}: {why}") from None
        try:
            provider.check(asked)
            _check_reach(provider, asked, agent, "it")
        except UserError as error:
            raise UserError(f"task {task.id}: {error}") from None
    return provider


def _check_reach(provider: WorkspaceProvider, spec: WorkspaceSpec, agent: AgentSection | None, who: str) -> None:
    """Raise UserError where an agent's program could not reach the gateway from its workspace."""
    if agent is None or not agent.command or provider.capabilities.listens:
        return
    why = f"{who} asks for no network" if spec.network.none else ""
    if agent.public_url is None and is_loopback(host_and_port(agent.host)[0]):
        why = "the gateway listens on the loopback of this machine (agent.host, agent.public_url)"
    if why:
        raise UserError(
            f"agent.command: from a workspace of the provider {provider.name!r} a program reaches the gateway over the "
            f"network alone, and {why}: see docs/tutorials/agent.md"
        )


def spec_of(environment: Environment, task: Task, spec: WorkspaceSpec) -> WorkspaceSpec:
    """What a task asks to be opened. spec: the recipe's. Raises UserError, and what the environment raises."""
    asked = environment.workspace_spec(task, spec)
    if not isinstance(asked, WorkspaceSpec):
        raise UserError(f"workspace_spec returned {type(asked).__name__}, not a WorkspaceSpec")
    return asked


async def workspaces_of(
    section: WorkspaceSection | None,
    environment: Environment,
    tools: Sequence[Tool],
    agent: AgentSection | None = None,
    run: str = "",
) -> "Workspaces | None":
    """The workspaces of a recipe, whose provider works; None where it has no section `workspace`. run: names it, in a
    provider's labels. Raises UserError, also as of `provider_of`."""
    provider = provider_of(section, environment, tools, agent)
    if section is None or provider is None:
        return None
    workspaces = Workspaces(provider, section, environment)
    await workspaces.start(run)
    return workspaces


class Workspaces:
    """Opens the workspaces of a run's rollouts, for one environment and one provider."""

    def __init__(self, provider: WorkspaceProvider, section: WorkspaceSection, environment: Environment) -> None:
        self.provider, self._environment = provider, environment
        self._spec, self._ready = section.spec(), section.ready
        self._prepared: OrderedDict[str, _Prepared] = OrderedDict()
        self._expected: deque[Task] = deque()
        self._announcing = 0
        self._closed = False

    async def start(self, run: str) -> None:
        """Make sure that the provider works, and can do what the recipe asks for. Raises UserError."""
        self.provider.check(self._spec)
        await self.provider.start(run)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Take what `expect` is told of in here. At the end of the last of several at once, samples that have not begun
        will not: what was opened for them is closed."""
        self._announcing += 1
        try:
            yield
        finally:
            self._announcing -= 1
            if not self._announcing:
                self._forget_expected()

    def expect(self, task: Task, count: int) -> None:
        """Note that `count` samples of a task will begin, after those that were noted before."""
        self._expected.extend([task] * count)
        self._open_ahead()

    def _forget_expected(self) -> None:
        self._expected.clear()
        for prepared in self._prepared.values():
            while prepared.ahead:
                _close_later(prepared.ahead.popleft())

    def _open_ahead(self) -> None:
        while self._expected and self._ahead < self._ready and not self._closed:
            task = self._expected.popleft()
            prepared = self._of(task)
            opening = asyncio.ensure_future(self._opened(prepared))
            opening.add_done_callback(_heard)
            prepared.ahead.append(opening)

    @property
    def _ahead(self) -> int:
        return sum(len(prepared.ahead) for prepared in self._prepared.values())

    async def open(self, task: Task) -> Workspace:
        """Open the workspace of one sample. Raises WorkspaceError, UserError, and what `prepare` raises."""
        if self._closed:
            raise WorkspaceError("the run's workspaces are closed")
        prepared = self._of(task)
        try:
            if prepared.ahead:
                opening = prepared.ahead.popleft()
                try:
                    return await asyncio.shield(opening)
                except asyncio.CancelledError:
                    _close_later(opening)
                    raise
                except WorkspaceError as error:
                    _log.debug("a workspace that was opened ahead is lost (%s): another is opened", error)
            else:
                with contextlib.suppress(ValueError):  # nobody said that it would come
                    self._expected.remove(task)
            return await self._opened(prepared)
        except WorkspaceError:
            self._prepare_anew(task, prepared)  # its snapshot may be lost with a daemon
            raise
        except BaseException:
            if prepared.failed:
                self._prepare_anew(task, prepared)
            raise
        finally:
            self._open_ahead()
            self._drop_old()

    def _prepare_anew(self, task: Task, prepared: _Prepared) -> None:
        """Let the next sample of a task prepare it again."""
        if self._prepared.get(key := _key(task)) is prepared:
            del self._prepared[key]
            while prepared.ahead:
                _close_later(prepared.ahead.popleft())

    async def _opened(self, prepared: _Prepared) -> Workspace:
        spec, snapshot = await asyncio.shield(prepared.state)
        for attempt in range(_ATTEMPTS):
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    return await self.provider.open(spec, snapshot)
            except TimeoutError:
                raise WorkspaceError(f"no workspace opened within {OPEN_SECONDS:g} s") from None
            except WorkspaceError:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("not reached")

    def _of(self, task: Task) -> _Prepared:
        if (key := _key(task)) not in self._prepared:
            preparing = asyncio.ensure_future(self._prepare(task))
            preparing.add_done_callback(_heard)
            self._prepared[key] = _Prepared(preparing)
        self._prepared.move_to_end(key)
        return self._prepared[key]

    async def _prepare(self, task: Task) -> tuple[WorkspaceSpec, Snapshot | None]:
        """The state that a task begins in: without a snapshot where the environment prepares nothing. Raises UserError,
        WorkspaceError, and what the environment raises, as an Exception: the task that runs this is nobody else's."""
        try:
            spec = spec_of(self._environment, task, self._spec)
            self.provider.check(spec)
            workspace = await self._opened_empty(spec)
            try:
                async with asyncio.timeout(PREPARE_SECONDS) as timer:
                    await self._environment.prepare(task, workspace)
                    await workspace.end_processes()
                    return spec, await workspace.snapshot() if await workspace.diff(1) else None
            except TimeoutError:
                if not timer.expired():
                    raise
                raise UserError(f"it takes longer than {PREPARE_SECONDS:g} s") from None
            finally:
                await _closed(workspace)
        except BaseException as error:  # noqa: BLE001 - boundary: an environment may raise anything
            raise contained(error) from None

    async def _opened_empty(self, spec: WorkspaceSpec) -> Workspace:
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await self.provider.open(spec)
        except TimeoutError:
            raise WorkspaceError(f"no workspace opened within {OPEN_SECONDS:g} s") from None

    def _drop_old(self) -> None:
        """Forget the snapshots of tasks that were not asked for in a while."""
        idle = [name for name, one in self._prepared.items() if not one.ahead and one.state.done()]
        for name in idle[: max(0, len(idle) - _KEPT)]:
            prepared = self._prepared.pop(name)
            if not prepared.failed and (snapshot := prepared.state.result()[1]) is not None:
                asyncio.ensure_future(self.provider.forget(snapshot)).add_done_callback(_heard)

    async def close(self) -> None:
        """Close all that is open. May be called twice."""
        self._closed = True
        self._forget_expected()
        pending = [one.state for one in self._prepared.values() if not one.state.done()]
        for preparing in pending:
            preparing.cancel()
        if pending:
            for preparing in (await asyncio.wait(pending, timeout=GRACE))[1]:
                leave_behind(preparing)  # it ignores its cancellation
        self._prepared.clear()
        await self.provider.close()


def _key(task: Task) -> str:
    """What two tasks have in common that are the same: those of two splits may have one id."""
    return f"{task.id} {hashlib.sha256(dumps(task.data, default=str).encode()).hexdigest()}"


async def _closed(workspace: Workspace) -> None:
    """Close one, and go on where that fails or hangs."""
    closing = asyncio.ensure_future(workspace.close())
    done, _ = await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
    if not done:
        leave_behind(closing)
    elif not closing.cancelled() and (error := closing.exception()) is not None:
        _log.warning("workspace %s: close: %s", workspace.id, describe(contained(error)))


def _close_later(opening: "asyncio.Task[Workspace]") -> None:
    """Close a workspace once it is open, if it will be."""

    def opened(task: "asyncio.Task[Workspace]") -> None:
        if not task.cancelled() and task.exception() is None:
            asyncio.ensure_future(_closed(task.result())).add_done_callback(_heard)

    opening.add_done_callback(opened)


def _heard(task: "asyncio.Future[Any]") -> None:
    """Hear of an error, which is raised where the result is wanted, if anywhere."""
    if not task.cancelled():
        task.exception()
