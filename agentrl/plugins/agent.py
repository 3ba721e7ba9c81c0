"""The agent: whoever holds the conversation with the model in place of the built-in driver.

An agent is a function `solve(task, client)`, async or not, or a program. It talks to the model through the gateway, by
any client of the OpenAI or Anthropic API, and calls tools itself. What it comes to reaches `calc_reward`.
"""

import asyncio
import inspect
import os
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.containment.process_tree import ProcessTree, remove_tree
from agentrl.containment.program import ProgramSandbox
from agentrl.containment.threads import Abandoned, DaemonThreads, in_thread
from agentrl.errors import UserError
from agentrl.jsonable import dumps
from agentrl.plugins.registry import construct, load
from agentrl.plugins.types import Json, Message, Task
from agentrl.recipe.sections.agent import AgentSection
from agentrl.workspace.workspace import Workspace

_THREADS = 64  # synchronous agents at once
_POLL_SECONDS = 0.05
_STOP_SECONDS = 20.0  # for a supervisor to end its program
_OUTPUT_BYTES = 1 << 16
_MOST_READS = 16  # of 64 KiB: the most that a pipe holds
_OPENING = "/tmp/agentrl-task.json"  # in a workspace
_REMEDY = "give its requests time-outs, or write it `async def`"
CallTool = Callable[[str, Mapping[str, Json] | str], Any]


@dataclass(frozen=True, slots=True)
class AgentClient:
    """What an agent is given beside its task."""

    base_url: str
    """Of the gateway's OpenAI dialects, such as http://127.0.0.1:40001/v1."""
    anthropic_url: str
    """Of its Anthropic dialect, without /v1."""
    mcp_url: str
    """Of the task's tools as an MCP server (streamable HTTP); the key is its bearer token."""
    api_key: str
    """The key of this rollout."""
    model: str
    """The name to give as `model`; any other is taken as well."""
    messages: tuple[Message, ...]
    """The opening messages of the environment, as the Chat Completions API has them: images as `data:` URLs."""
    tools: tuple[dict[str, Json], ...]
    """Schemas of the task's tools, in the form of the Chat Completions API."""
    call_tool: CallTool
    """`await client.call_tool(name, arguments)` runs one of the task's tools and returns the content of its message,
    also where the model made a mistake: text, or parts of the Chat Completions API where it shows images. Without
    `await` in an agent that is not async. arguments: an object, or JSON text. Step rewards go to the last answer."""
    timeout: float
    """Seconds that the rollout may still take."""
    socket: str | None = None
    """Path of the gateway's Unix socket, where a sandbox needs one."""
    workspace: Workspace | None = None
    """Files and processes of the rollout, where the recipe has a section `workspace`."""

    def openai(self, **options: Any) -> Any:
        """An `openai.AsyncOpenAI` for the gateway; use it in `async with`. options: further arguments of it.

        The gateway speaks plain HTTP, so the client is made without certificates, whose loading costs 50 ms of CPU."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        plain = DefaultAsyncHttpxClient(verify=False, trust_env=False)
        given = {"http_client": plain, "timeout": self.timeout, **options}
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **given)

    def anthropic(self, **options: Any) -> Any:
        """An `anthropic.AsyncAnthropic` for the gateway; use it in `async with`. options: as of `openai`."""
        from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

        plain = DefaultAsyncHttpxClient(verify=False, trust_env=False)
        given = {"http_client": plain, "timeout": self.timeout, **options}
        return AsyncAnthropic(base_url=self.anthropic_url, api_key=self.api_key, **given)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent came to, as `Session.outcome` in `calc_reward`."""

    returned: Any = None
    """What `solve` returned."""
    exit_code: int | None = None
    """Of a program that ended by itself; None where it was killed at its deadline."""
    output: str = ""
    """What a program wrote to standard output and error: the end of it."""
    folder: str | None = None
    """The working folder of a program, which is removed after `release`."""


class Agent(ABC):
    """One object serves a whole run and all rollouts at once. Entry point group `agentrl.agents`.

    A plain function `solve(task, client, **args)`, async or not, does as well.
    """

    name: str

    @abstractmethod
    async def solve(self, task: Task, client: AgentClient) -> Any:
        """Do the task. What it raises makes the rollout FAILED with boundary `agent`, unless it had been refused a call
        beyond its limits: then the rollout ends there, and is judged."""

    async def release(self, outcome: Outcome) -> None:  # noqa: B027 - a hook with a default
        """Free what an outcome held, once the rollout was judged and the environment released."""

    async def close(self) -> None:  # noqa: B027 - a hook with a default
        """Free what the whole run held, once, when the run ends."""


@dataclass(slots=True)
class FunctionAgent(Agent):
    """A function as an agent."""

    name: str
    """Of the function, for messages."""
    function: Callable[..., object]
    """`solve(task, client, **arguments)`."""
    arguments: Mapping[str, Json] = field(default_factory=dict)
    """Keyword arguments of every call: `agent.args`."""
    abandoned: Abandoned = field(default_factory=lambda: Abandoned("agent", _REMEDY))
    """Calls in threads that go on after their rollouts."""
    _threads: DaemonThreads | None = None

    async def solve(self, task: Task, client: AgentClient) -> object:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(task, client, **self.arguments)
        if self._threads is None:
            self._threads = DaemonThreads(f"agent-{self.name}", _THREADS, self.abandoned)
        loop, here = asyncio.get_running_loop(), threading.current_thread()

        def call_tool(name: str, arguments: Mapping[str, Json] | str) -> Any:
            work = client.call_tool(name, arguments)
            if threading.current_thread() is here:  # of a coroutine that the function returned
                return work
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        own = replace(client, call_tool=call_tool)
        found = await asyncio.wrap_future(self._threads.submit(lambda: self.function(task, own, **self.arguments)))
        return await found if inspect.isawaitable(found) else found

    async def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)


@dataclass(slots=True)
class ProgramAgent(Agent):
    """A program in any language, started anew for each rollout, in a working folder of its own.

    It finds the gateway by OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and AGENTRL_MODEL,
    the task's tools as an MCP server at AGENTRL_MCP_URL, and the task in the JSON file that AGENTRL_TASK names: `id`,
    `data`, `messages` (the opening) and `tools`. What it started ends with it. One that takes too long is killed, and
    the rollout is judged by its folder as it is then.
    """

    command: tuple[str, ...]
    """Program and arguments; {prompt} stands for the text of the opening's last message."""
    name: str = ""
    """Of the program, for messages."""
    sandbox: ProgramSandbox | None = None
    """What it runs in, if in any."""
    inside: bool = False
    """Run it in the rollout's workspace, in its home folder."""
    _running: dict[str, ProcessTree] = field(default_factory=dict)  # by working folder

    def __post_init__(self) -> None:
        self.name = self.name or Path(self.command[0]).name

    async def solve(self, task: Task, client: AgentClient) -> Outcome:
        if self.inside:
            assert client.workspace is not None, "each rollout has one"
            return await self._solve_inside(task, client, client.workspace)
        outer = Path(tempfile.mkdtemp(prefix="agentrl-agent-"))
        folder, opening = outer / "work", outer / "task.json"
        folder.mkdir()
        opening.write_text(_opening_json(task, client), "utf-8")
        words = self._words(client)
        inherited: Mapping[str, str] = os.environ
        if self.sandbox is not None:
            assert client.socket is not None, "the gateway of a sandbox has a socket"
            words = self.sandbox.command(words, folder, opening, client.socket, client.base_url)
            inherited = self.sandbox.environment(folder)
        output = _Output()
        command = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(folder), *words]
        try:
            variables = {**inherited, **self._environment(client, opening)}
            tree = ProcessTree(command, output.writer, variables, folder=outer)
        except BaseException:
            output.close()
            remove_tree(outer)
            raise
        self._running[str(folder)] = tree
        output.read()
        try:
            while tree.running:
                await asyncio.sleep(_POLL_SECONDS)
        except asyncio.CancelledError:
            tree.stop_command()
            until = time.monotonic() + _STOP_SECONDS
            while tree.running and time.monotonic() < until:
                await asyncio.sleep(_POLL_SECONDS)
            if tree.running:  # a program that has stopped its supervisor
                tree.kill()
        output.close()
        return Outcome(exit_code=tree.exit_code, output=output.text, folder=str(folder))

    async def _solve_inside(self, task: Task, client: AgentClient, workspace: Workspace) -> Outcome:
        """Run the program in the workspace. Raises WorkspaceError."""
        await workspace.write(_OPENING, _opening_json(task, client).encode())
        try:
            done = await workspace.exec(
                self._words(client), env=self._environment(client, Path(_OPENING)),
                seconds=client.timeout + _STOP_SECONDS, output=_OUTPUT_BYTES // 2,
            )  # fmt: skip
        except asyncio.CancelledError:  # it was killed, and the rollout is judged by its files as they are
            return Outcome()
        return Outcome(exit_code=None if done.timed_out else done.exit_code, output=done.text())

    def _words(self, client: AgentClient) -> list[str]:
        prompt = next((text for message in reversed(client.messages) if (text := _text(message))), "")
        return [word.replace("{prompt}", prompt) for word in self.command]

    def _environment(self, client: AgentClient, opening: Path) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": client.base_url,
            "OPENAI_API_KEY": client.api_key,
            "ANTHROPIC_BASE_URL": client.anthropic_url,
            "ANTHROPIC_API_KEY": client.api_key,
            "AGENTRL_MODEL": client.model,
            "AGENTRL_MCP_URL": client.mcp_url,
            "AGENTRL_TASK": str(opening),
        }

    async def release(self, outcome: Outcome) -> None:
        tree = self._running.pop(outcome.folder or "", None)
        if tree is not None:
            await in_thread(tree.end)

    async def close(self) -> None:
        trees = list(self._running.values())
        self._running.clear()
        await asyncio.gather(*(in_thread(tree.end, True) for tree in trees))


def _opening_json(task: Task, client: AgentClient) -> str:
    """What a program is told of its task."""
    given = {"id": task.id, "data": task.data, "messages": client.messages, "tools": client.tools}
    return dumps(given, default=str)


def _text(message: Message) -> str:
    content = message["content"]
    return content or "" if not isinstance(content, list) else "".join(part.get("text", "") for part in content)


class _Output:
    """The end of what a program writes, read as it comes, so that no program fills a disk or stands still."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._reader: int | None = reader
        self.writer = os.fdopen(writer, "wb", buffering=0)
        self._kept = b""

    def read(self) -> None:
        """Begin to read; the program has its end of the pipe."""
        self.writer.close()
        assert self._reader is not None
        asyncio.get_running_loop().add_reader(self._reader, self._take)

    def _take(self) -> None:
        assert self._reader is not None
        try:
            data = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._reader)
        self._kept = (self._kept + data)[-_OUTPUT_BYTES:]

    def close(self) -> None:
        """Read what is left, and stop."""
        self.writer.close()
        if self._reader is None:
            return
        with suppress(OSError, RuntimeError):
            asyncio.get_running_loop().remove_reader(self._reader)
        with suppress(OSError):
            for _ in range(_MOST_READS):  # who writes on may do so faster than we read
                if not (data := os.read(self._reader, 1 << 16)):
                    break
                self._kept = (self._kept + data)[-_OUTPUT_BYTES:]
        os.close(self._reader)
        self._reader = None

    @property
    def text(self) -> str:
        """What was kept."""
        return self._kept.decode("utf-8", "replace")


def make_agent(section: AgentSection, inside: bool = False) -> Agent:
    """The agent of a recipe: its program, a class (or object) of `Agent`, or a function. inside: the recipe has a
    section `workspace`, in which a program runs. Raises UserError."""
    if section.command and (section.name or section.args):
        raise UserError("agent: give `command`, or `name` and `args`, not both")
    if section.command:
        if section.processes:
            raise UserError("agent.processes: a program has a process of its own already; leave it out")
        if inside and section.sandbox is not None:
            raise UserError("agent.sandbox: the program runs in a workspace already; leave it out")
        if inside:
            return ProgramAgent(section.command, inside=True)
        if shutil.which(section.command[0]) is None:
            raise UserError(f"agent.command: there is no program {section.command[0]!r} on the PATH")
        sandbox = ProgramSandbox.tried(section.command[0], section.sandbox) if section.sandbox is not None else None
        return ProgramAgent(section.command, sandbox=sandbox)
    if section.sandbox is not None:
        raise UserError("agent.sandbox: is for programs: give `command`")
    if not section.name:
        raise UserError("agent: needs `name` (an installed agent, or module:attribute) or `command` (a program)")
    return agent_of(load("agents", section.name), section.args, section.name)


def agent_of(made: object, args: Mapping[str, Json], name: str) -> Agent:
    """What `name` stands for as an agent: a class of `Agent`, made with `args`, an object of one, or a function
    `solve(task, client, **args)`. Raises UserError."""
    if isinstance(made, type) and issubclass(made, Agent):
        made = construct(made, args, "agent.args")
    if isinstance(made, Agent):
        return made
    if not callable(made):
        raise UserError(f"agent {name!r} is {type(made).__name__}; expected a function solve(task, client)")
    _check_signature(made, args, name)
    return FunctionAgent(name.rpartition(":")[2], made, dict(args))


def _check_signature(function: Callable[..., object], args: Mapping[str, Json], name: str) -> None:
    try:
        inspect.signature(function).bind(None, None, **args)
    except TypeError as error:
        raise UserError(f"agent {name!r}: solve(task, client, **agent.args): {error}") from None
    except ValueError:
        return  # a builtin without a signature
