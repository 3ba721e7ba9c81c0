"""A chat of one id a character, a scripted engine that checks what it is given, and plugins that count their hooks."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from processes import eventually

from agentrl.chat.base import ParsedCall, ParsedTurn
from agentrl.engine.base import Generation, GenerationFinish, Sampling
from agentrl.errors import UserError
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import ArgumentError, Message, Reply, Session, Task, ToolResponse
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.workspaces import Workspaces

END = 1_200_000
ROLES = {"system": 1_200_001, "user": 1_200_002, "assistant": 1_200_003, "tool": 1_200_004}
_CALL = re.compile(r"<call>([\w-]*) ?(.*?)(</call>|$)", re.S)


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the fake model writes it."""
    return f"<call>{name} {json.dumps(arguments)}</call>"


class CharChat:
    """Ids are code points; END ends a turn and a newline follows it, as in many templates."""

    stop_ids = (END,)
    images = False
    rewrites_history = None

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        head = "".join(tool["function"]["name"] for tool in tools)
        return [*self.encode_text(head), *self._messages(messages), ROLES["assistant"]]

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        close = [] if turn_ids[-1] == END else [END]
        return [*close, ord("\n"), *self._messages(messages), ROLES["assistant"]]

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        text = self.decode([i for i in turn_ids if i < END])
        calls = tuple(_parse_call(m) for m in _CALL.finditer(text))
        return ParsedTurn(_CALL.sub("", text), calls)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) if i < END else f"<{i - END}>" for i in ids)

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        pieces = re.split(r"(<\d>)", prompt) if isinstance(prompt, str) else []
        ids = [i for k, piece in enumerate(pieces) for i in ([END + int(piece[1])] if k % 2 else map(ord, piece))]
        ids = ids if isinstance(prompt, str) else list(prompt)
        if not all(0 <= i < END + 10 for i in ids):
            raise UserError("prompt: no token id")
        return ids

    def encode_text(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def _messages(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [ROLES[message["role"]], *self.encode_text(str(message["content"])), END, ord("\n")]
        return ids


def _parse_call(match: "re.Match[str]") -> ParsedCall:
    name, body, close = match.groups()
    if not close:
        return ParsedCall(name, {}, match.group(), "the call was cut off")
    try:
        arguments = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ParsedCall(name, {}, match.group(), f"the arguments are no JSON: {error}")
    return ParsedCall(name, arguments, match.group())


Script = Callable[[str, int], str]


class ScriptedEngine:
    """Says what `script(request_id, turn)` returns, and asserts that each prompt goes on from the former turn."""

    streams = False
    constrains = False

    def __init__(self, script: Script | Sequence[str], *, max_context: int = 1_000_000, seconds: float = 0.0) -> None:
        self.script: Script = script if callable(script) else lambda _, turn: script[turn]
        self.max_context = max_context
        self.seconds = seconds
        self.version = 0
        self.known: dict[str, list[int]] = {}
        self.turns: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.samplings: list[Sampling] = []
        self.stopping: dict[str, asyncio.Event] = {}
        self.forks: dict[str, Sequence[str]] = {}

    def fork(self, request_id: str, others: Sequence[str]) -> None:
        self.forks[request_id] = others

    async def generate(self, ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        known = self.known.get(request_id, [])
        assert list(ids[: len(known)]) == known, "a prompt does not go on from the former turn"
        self.samplings.append(sampling)
        text = self.script(request_id, self.turns[request_id])
        self.turns[request_id] += 1
        whole = [*map(ord, text), END]
        answer = whole[: sampling.max_tokens]
        finish = GenerationFinish.STOP if len(answer) == len(whole) else GenerationFinish.LENGTH
        if await self._stopped(request_id):
            answer, finish = answer[: len(answer) // 2], GenerationFinish.ABORT
        self.known[request_id] = [*ids, *answer]
        return Generation(answer, [logprob(i) for i in answer], finish, self.version)

    async def _stopped(self, request_id: str) -> bool:
        """Whether it was aborted while it waited for `seconds`."""
        if self.seconds == 0:
            await asyncio.sleep(0)
            return False
        event = self.stopping.setdefault(request_id, asyncio.Event())
        event.clear()
        try:
            await asyncio.wait_for(event.wait(), self.seconds)
        except TimeoutError:
            return False
        return True

    def finish(self, request_id: str) -> None:
        self.finished[request_id] += 1

    def abort(self, request_id: str | None = None) -> None:
        for name in [request_id] if request_id else list(self.stopping):
            self.stopping.setdefault(name, asyncio.Event()).set()

    async def update_weights(self, version: int, weights: Any = None) -> None:
        self.version = version

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def health(self) -> None: ...

    async def close(self) -> None: ...


def logprob(token: int) -> float:
    """The logprob that the scripted engine gives a token: negative, and different from token to token."""
    return -0.25 - (token % 64) / 64


class Hooks:
    """Counts the hooks by plugin and session; every plugin here writes into one of these."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def note(self, plugin: str, hook: str, session: Session) -> None:
        self.counts[plugin, hook, session.id] += 1

    async def act(self, plugin: Any, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Note the call, and do the plugin's action of this hook."""
        self.note(plugin.name, hook, args[0])
        return await _act(plugin.actions[hook], *args, **kwargs)

    def total(self, plugin: str, hook: str) -> int:
        return sum(n for (p, h, _), n in self.counts.items() if (p, h) == (plugin, hook))

    def check(self) -> None:
        """Every create was followed by exactly one release, and calc_reward came at most once."""
        for (plugin, hook, session), n in self.counts.items():
            assert n == 1 or hook == "execute", (plugin, hook, session, n)
            if hook == "create":
                assert self.counts[plugin, "release", session] == 1, (plugin, session)
            if hook == "release":
                assert self.counts[plugin, "create", session] == 1, (plugin, session)


async def _act(action: Any, *args: Any, **kwargs: Any) -> Any:
    """A value, an exception to raise, or a function, sync or async."""
    if isinstance(action, BaseException):
        raise action
    result = action(*args, **kwargs) if callable(action) else action
    return await result if asyncio.iscoroutine(result) else result


class Env(Environment):
    """Each hook does what it is told to; by default one user message, done after the first answer, a reward of 1."""

    name = "env"

    def __init__(self, hooks: Hooks | None = None, **actions: Any) -> None:
        self.hooks = hooks or Hooks()
        self.actions = {
            "create": [{"role": "user", "content": "2+2?"}], "execute": Reply(done=True), "calc_reward": 1.0,
            "release": None, **actions,
        }  # fmt: skip

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{i}", {"question": str(i)}) for i in range(8)]

    async def create(self, session: Session, **create_kwargs: Any) -> Sequence[Message]:
        return await self.hooks.act(self, "create", session, **create_kwargs)

    async def execute(self, session: Session, message: Message) -> Reply:
        return await self.hooks.act(self, "execute", session, message)

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return await self.hooks.act(self, "calc_reward", session, **kwargs)

    async def release(self, session: Session, **kwargs: Any) -> None:
        return await self.hooks.act(self, "release", session, **kwargs)


class Echo(Tool):
    """Says `text` back; each hook does what it is told to."""

    name = "echo"
    description = "Says it back."

    def __init__(self, hooks: Hooks | None = None, name: str = "echo", **actions: Any) -> None:
        self.name = name
        self.hooks = hooks or Hooks()
        self.parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        self.actions = {
            "create": None, "execute": lambda session, text="", **_: ToolResponse(text), "calc_reward": None,
            "release": None, **actions,
        }  # fmt: skip

    def check(self, arguments: Any) -> dict[str, Any]:
        if not isinstance(arguments.get("text", ""), str):
            raise ArgumentError("text should be a string")
        return dict(arguments)

    async def create(self, session: Session, **create_kwargs: Any) -> None:
        return await self.hooks.act(self, "create", session, **create_kwargs)

    async def execute(self, session: Session, **arguments: Any) -> ToolResponse | str:
        return await self.hooks.act(self, "execute", session, **arguments)

    async def calc_reward(self, session: Session, **kwargs: Any) -> Any:
        return await self.hooks.act(self, "calc_reward", session, **kwargs)

    async def release(self, session: Session, **kwargs: Any) -> None:
        return await self.hooks.act(self, "release", session, **kwargs)


async def abort_when_waiting(engine: ScriptedEngine, requests: int) -> None:
    """Abort all, once so many requests wait for their tokens."""
    await eventually(lambda: len(engine.stopping) == requests)
    engine.abort()


TASK = Task("t", {"question": "2+2?"})


def make_driver(
    script: Script | Sequence[str] | ScriptedEngine,
    env: Environment | None = None,
    tools: Sequence[Tool] = (),
    workspaces: Workspaces | None = None,
    **limits: Any,
) -> Driver:
    """A driver over the scripted engine; `limits` are keys of the recipe's `rollout` section."""
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script)
    section = RolloutSection(**{"max_tokens": 100_000, "max_turn_tokens": 2_000, **limits})
    made = env or Env()
    return Driver(
        engine=engine, chat=CharChat(), environment=made, tools=tools, limits=section, workspaces=workspaces
    )  # fmt: skip


def rng_text(rng: random.Random, size: int) -> str:
    return "".join(rng.choice("abc é<>{}\"'\n") for _ in range(size))
