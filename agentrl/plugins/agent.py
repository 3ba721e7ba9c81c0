"""The agent: whoever holds the conversation with the model in place of the built-in driver.

An agent is a function `solve(task, client)`, async or not. It talks to the model through the gateway, by any client of
the OpenAI or Anthropic API, and calls the environment's tools itself. What it returns reaches `calc_reward`.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.errors import UserError
from agentrl.plugins.registry import construct, load
from agentrl.plugins.types import Json, Message, Task
from agentrl.recipe.schema import AgentSection
from agentrl.threads import Abandoned, DaemonThreads

_THREADS = 64  # synchronous agents at once
_REMEDY = "give its requests time-outs, or write it `async def`"
CallTool = Callable[[str, Mapping[str, Json] | str], Any]


@dataclass(frozen=True, slots=True)
class AgentClient:
    """What an agent is given beside its task."""

    base_url: str
    """Of the gateway's OpenAI dialects, such as http://127.0.0.1:40001/v1."""
    anthropic_url: str
    """Of its Anthropic dialect, without /v1."""
    api_key: str
    """The key of this rollout."""
    model: str
    """The name to give as `model`; any other is taken as well."""
    messages: tuple[Message, ...]
    """The opening messages of the environment."""
    tools: tuple[dict[str, Json], ...]
    """Schemas of the task's tools, in the form of the Chat Completions API."""
    call_tool: CallTool
    """`await client.call_tool(name, arguments)` runs one of the task's tools and returns its text, also where the model
    made a mistake; without `await` in an agent that is not async. arguments: an object, or JSON text. Step rewards go
    to the last answer."""
    timeout: float
    """Seconds that the rollout may still take."""

    def openai(self, **options: Any) -> Any:
        """Return an `openai.AsyncOpenAI` for the gateway; use it in `async with`. options: further arguments of it.

        The gateway speaks plain HTTP, so the client is made without certificates, whose loading costs 50 ms of CPU."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        plain = DefaultAsyncHttpxClient(verify=False, trust_env=False)
        given = {"http_client": plain, "timeout": self.timeout, **options}
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **given)

    def anthropic(self, **options: Any) -> Any:
        """Return an `anthropic.AsyncAnthropic` for the gateway; use it in `async with`. options: as of `openai`."""
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
    """Of a program."""
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

    async def close(self) -> None:  # noqa: B027 - a hook with a default
        """Free what the whole run held, once, when the run ends."""


@dataclass(slots=True)
class FunctionAgent(Agent):
    """A function as an agent."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call: `agent.args`."""
    _threads: DaemonThreads | None = None

    async def solve(self, task: Task, client: AgentClient) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(task, client, **self.arguments)
        if self._threads is None:
            self._threads = DaemonThreads(f"agent-{self.name}", _THREADS, Abandoned("agent", _REMEDY))
        loop = asyncio.get_running_loop()

        def call_tool(name: str, arguments: Mapping[str, Json] | str) -> str:
            text: str = asyncio.run_coroutine_threadsafe(client.call_tool(name, arguments), loop).result()
            return text

        own = replace(client, call_tool=call_tool)
        return await asyncio.wrap_future(self._threads.submit(lambda: self.function(task, own, **self.arguments)))

    async def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def make_agent(section: AgentSection) -> Agent:
    """Return the agent of a recipe: a class (or object) of `Agent`, or a function. Raises UserError."""
    made = load("agents", section.name or "")
    if isinstance(made, type) and issubclass(made, Agent):
        made = construct(made, section.args, "agent.args")
    if isinstance(made, Agent):
        return made
    if not callable(made):
        raise UserError(f"agent {section.name!r} is {type(made).__name__}; expected a function solve(task, client)")
    _check_signature(made, section)
    return FunctionAgent(str(section.name).rpartition(":")[2], made, dict(section.args))


def _check_signature(function: Callable[..., Any], section: AgentSection) -> None:
    try:
        inspect.signature(function).bind(None, None, **section.args)
    except TypeError as error:
        raise UserError(f"agent {section.name!r}: solve(task, client, **agent.args): {error}") from None
    except ValueError:
        return  # a builtin without a signature
