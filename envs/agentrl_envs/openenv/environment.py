"""The environment `openenv`: an environment behind an OpenEnv server, one session a rollout."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import aiohttp
from agentrl_tools.loops import PerLoop

from agentrl.errors import ArgumentError, InfrastructureError, UserError
from agentrl.plugins.environment import Environment, LazyTasks
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Reply, Session, Task, ToolResponse
from agentrl_envs.openenv.server import Offer, Server
from agentrl_envs.openenv.session import OVER, Link, Observed, RefusedError, opened

TEST_SEEDS = 1_000_000_007
"""Where the seeds of held-out tasks begin, at a server that has no tasks."""
_OWN = ("done", "reward", "metadata")
_MODELS_FAULT = ("VALIDATION_ERROR", OVER)
_ODD = re.compile(r"[^A-Za-z0-9_-]")


class OpenEnvTool(Tool):
    """An MCP tool of the server, or its actions as one tool. remote: the tool's name there; empty: an action."""

    def __init__(self, name: str, description: str, schema: Mapping[str, Json], remote: str, steps: bool) -> None:
        self.name = _ODD.sub("_", name)[:64]
        self.description = description
        self.parameters = _parameters(schema)
        self._remote, self._steps = remote, steps

    def check(self, arguments: Mapping[str, Json]) -> dict[str, Json]:
        """Check arguments. Where the schema says what our checks do not know, the server alone judges them."""
        try:
            return super().check(arguments)
        except (UserError, TypeError, AttributeError, KeyError, RecursionError):
            return dict(arguments)

    # a parameter of theirs may be called session
    async def execute(self, session: Session, /, **arguments: Json) -> ToolResponse:  # type: ignore[override]
        assert session.environment is not None
        link: Link = session.environment.state
        try:
            if self._remote and not self._steps:
                params = {"name": self._remote, "arguments": arguments}
                question = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
                return _rpc_response(await link.ask("mcp", question, "mcp"))
            action = {"type": "call_tool", "tool_name": self._remote, "arguments": arguments}
            observed = await link.observe("step", action if self._remote else arguments)
        except RefusedError as error:
            raise _blamed(error, link) from None
        text, failed = _called(observed) if self._remote else (described(observed, ()), False)
        return ToolResponse(text, reward=observed.reward, done=observed.done, error=failed)


class OpenEnv(Environment):
    """An environment behind an OpenEnv server.

    url: of the server (http, https, ws or wss). headers: sent with every request, such as `Authorization`.
    tasks, held_out: how many there are, each a seed for `reset`, where the server has no tasks of its own; seed: where
    the training ones begin. task_env: whose tasks are taken, where the server names several environments. splits: our
    names of its splits, such as `{train: train, test: validation}`. reset: further arguments of `reset`.
    opening: what the user's first message begins with; what `reset` shows follows. show: the observation's fields that
    the model reads (by default all).
    text: the field of an action that an answer in words is sent as; without it, an answer ends the rollout. tool: the
    name under which the model finds the actions of a server without tools; empty: it has no tool, and answers in words.
    tools: of those that the server offers; by default all.
    reward: `step`, each step's reward credited to its turn; `last`, the last one alone; or `state.NAME`, a field of the
    environment's state at the end. solved: the reward from which a task counts as solved.
    sessions: at once, at most. A server that is full is asked again until the rollout's time is over.
    """

    name = "openenv"
    cannot = MappingProxyType({"images": "observations are told as text", "harnesses": "the conversation is held here"})

    def __init__(
        self,
        url: str,
        source: str = "generated",
        headers: dict[str, str] | None = None,
        tasks: int = 10_000,
        held_out: int = 100,
        seed: int = 0,
        task_env: str | None = None,
        splits: dict[str, str] | None = None,
        reset: dict[str, Json] | None = None,
        opening: str = "",
        show: list[str] | None = None,
        text: str | None = None,
        tool: str = "act",
        tools: list[str] | None = None,
        reward: str = "step",
        solved: float = 1.0,
        sessions: int = 64,
    ) -> None:
        if source != "generated":
            raise UserError(f"env.source is {source!r}: openenv takes its tasks from the server, or makes seeds")
        if reward not in ("step", "last") and not reward.startswith("state."):
            raise UserError(f"env.args.reward: {reward!r}; expected step, last, or state.NAME")
        if sessions < 1 or tasks < 1 or held_out < 1:
            raise UserError("env.args: sessions, tasks and held_out must be 1 or more")
        self._headers = headers or {}
        self._server = Server(url, self._headers)
        offer = self._server.offer(task_env)
        self._tools = tuple(_tools(offer, tool, tools))
        self._counts = _named(offer.splits, splits, self._server.url) or {
            "train": ("train", tasks),
            "test": ("test", held_out),
        }
        self._has_tasks = bool(offer.splits)
        self.splits = tuple(split for split in self._counts if split != "train")
        self._seed, self._reset, self._opening, self._text = seed, reset or {}, opening, text
        self._show, self._reward, self._solved = tuple(show or ()), reward, solved
        if text is None and not self._tools:
            raise UserError("env.args: name the field of actions by `text`, or give them a `tool`: no model could act")
        self.reward_parts = () if reward == "step" else (reward,)
        self._http: PerLoop[aiohttp.ClientSession] = PerLoop(
            lambda: aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        )
        self._room: PerLoop[asyncio.Semaphore] = PerLoop(lambda: asyncio.Semaphore(sessions))

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._counts:
            raise UserError(f"openenv has no split {split!r}: {self._server.url} has {', '.join(self._counts)}")
        theirs, count = self._counts[split]
        if self._has_tasks:
            return LazyTasks(count, lambda i: Task(f"{split}-{i}", {"split": theirs, "index": i}))
        first = self._seed if split == "train" else TEST_SEEDS
        return LazyTasks(count, lambda i: Task(f"{split}-{i}", {"seed": first + i}))

    def tools(self) -> Sequence[Tool]:
        return self._tools

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        room = self._room.here()
        await room.acquire()
        try:
            reset = {**self._reset, **session.task.data, **create_kwargs}
            session.state, observed = await opened(self._http.here(), self._server.socket, reset)
        except RefusedError as error:
            raise InfrastructureError(f"{self._server.url}: reset: {error}") from None
        finally:
            if session.state is None:
                room.release()
        shown = described(observed, self._show)
        if not self._opening and not shown:
            raise UserError(f"{self._server.url} shows nothing at first: say what the task is by env.args.opening")
        return [{"role": "user", "content": "\n".join(filter(None, (self._opening, shown)))}]

    async def execute(self, session: Session, message: Message) -> Reply:
        """Send an answer in words as an action, where it is one."""
        if self._text is None:
            return Reply(done=True)
        link: Link = session.state
        content = message["content"]
        try:
            observed = await link.observe("step", {self._text: content if isinstance(content, str) else ""})
        except RefusedError as error:
            if isinstance(wrong := _blamed(error, link), ArgumentError):
                return Reply(({"role": "user", "content": f"Error: {wrong}"},))
            raise wrong from None
        said: Message = {"role": "user", "content": described(observed, self._show) or "(nothing)"}
        return Reply(() if observed.done else (said,), reward=observed.reward, done=observed.done)

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        link: Link = session.state
        if self._reward == "step":
            return {}
        if self._reward == "last":
            return {"last": link.rewards[-1] if link.rewards else 0.0}
        field = self._reward.removeprefix("state.")
        try:
            state = await link.ask("state", None, "state")
        except RefusedError as error:
            raise InfrastructureError(f"{self._server.url}: state: {error}") from None
        value = state.get(field)
        if not isinstance(value, int | float):
            known = ", ".join(sorted(state))[:200]
            raise InfrastructureError(f"{self._server.url}: its state has no number {field!r}; it has {known}")
        return {self._reward: float(value)}

    async def release(self, session: Session, **kwargs: Json) -> None:
        link: Link | None = session.state
        if link is None:
            return
        session.state = None
        try:
            await link.close()
        finally:
            self._room.here().release()

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        return sum(rewards.values()) >= self._solved - 1e-6

    async def close(self) -> None:
        self._http.orphans()
        if http := self._http.take():
            await http.close()


def described(observed: Observed, show: Sequence[str]) -> str:
    """What the model reads of an observation: its texts as they are, other fields as JSON, with their names where there
    are several. show: the fields; none: all that hold anything."""
    fields = {name: observed.observation.get(name) for name in show} if show else _fields(observed.observation)
    if len(fields) == 1:
        return _word(next(iter(fields.values())))
    return "\n".join(f"{name}: {_word(value)}" for name, value in fields.items())


def _fields(observation: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in observation.items() if name not in _OWN and value not in (None, "", [], {})}


def _word(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tools(offer: Offer, tool: str, wanted: Sequence[str] | None) -> Sequence[OpenEnvTool]:
    """The tools of a server, those that are wanted; its actions as a tool where it has none."""
    names = [str(one["name"]) for one in offer.tools]
    if unknown := [name for name in wanted or () if name not in names]:
        raise UserError(
            f"env.args.tools: the server offers no tool {unknown[0]!r}; it has {', '.join(names) or 'none'}"
        )
    if not offer.tools:
        schema = dict(offer.action)
        schema["properties"] = {k: v for k, v in dict(schema.get("properties") or {}).items() if k != "metadata"}
        told = str(offer.action.get("description") or "Act in the environment.")
        return [OpenEnvTool(tool, told, schema, "", True)] if tool else []
    return [
        OpenEnvTool(
            str(one["name"]),
            str(one.get("description") or ""),
            one.get("inputSchema") or one.get("input_schema") or {},
            str(one["name"]),
            offer.calls_are_steps,
        )
        for one in offer.tools
        if wanted is None or one["name"] in wanted
    ]


def _parameters(schema: Mapping[str, Json]) -> dict[str, Json]:
    """A schema with the keys that prompts and checks rely on."""
    made = {"properties": {}, **schema, "type": "object"}
    if not isinstance(made["properties"], Mapping):
        made["properties"] = {}
    return made


def _named(offered: Mapping[str, int], wanted: Mapping[str, str] | None, url: str) -> dict[str, tuple[str, int]]:
    """Our splits: what the server calls each, and how many tasks it has. Raises UserError."""
    names = dict(wanted) if wanted is not None else {name: name for name in offered}
    if unknown := [name for name in names.values() if name not in offered]:
        raise UserError(f"env.args.splits: {url} has no split {unknown[0]!r}; it has {', '.join(offered) or 'none'}")
    if names and "train" not in names:
        raise UserError(f"{url} has no split `train` but {', '.join(offered)}: name one by env.args.splits.train")
    return {name: (theirs, offered[theirs]) for name, theirs in names.items()}


def _called(observed: Observed) -> tuple[str, bool]:
    """The text of a call's observation, and whether the call failed."""
    error = observed.observation.get("error")
    if error:
        return f"Error: {error.get('message', error) if isinstance(error, Mapping) else error}", True
    if "result" not in observed.observation:
        return described(observed, ()), False
    return _result(observed.observation["result"])


def _result(result: Json) -> tuple[str, bool]:
    """The text of what a tool returned, in MCP's form or any other, and whether it says that it failed."""
    if not isinstance(result, Mapping) or not isinstance(result.get("content"), list):
        return ("" if result is None else _word(result)), False
    failed = result.get("is_error") is True or result.get("isError") is True
    texts = [str(part["text"]) for part in result["content"] if isinstance(part, Mapping) and "text" in part]
    if not texts:
        data = result.get("structured_content", result.get("data"))
        texts = [] if data is None else [_word(data)]
    return "\n".join(texts), failed


def _rpc_response(answer: Mapping[str, Json]) -> ToolResponse:
    """What a call over MCP came to. Raises ArgumentError where the server refuses it."""
    error = answer.get("error")
    if error:
        raise ArgumentError(str(error.get("message", error) if isinstance(error, Mapping) else error)[:1000])
    text, failed = _result(answer.get("result"))
    return ToolResponse(text, error=failed)


def _blamed(error: RefusedError, link: Link) -> Exception:
    """Whose fault a refusal is: an action that is none is the model's."""
    if error.code in _MODELS_FAULT:
        return ArgumentError(str(error))
    return InfrastructureError(f"{link.place}: {error.code}: {error}")
