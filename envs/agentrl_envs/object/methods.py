"""Which methods of a class are tools, one such method as a tool, and the thread that they run in."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import MethodType
from typing import Any, TypeVar

from agentrl.containment.threads import Abandoned, Call
from agentrl.errors import UserError, nearest
from agentrl.plugins.decorator import result_text
from agentrl.plugins.signature import read_signature
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Session, ToolResponse

T = TypeVar("T")


class Lane:
    """The one thread that runs all synchronous code of one object, in order; it starts with the first call.

    A slow method holds up its own request alone, an object is never entered twice at once, and what is bound to a
    thread (a database connection) stays in it. A call that its request no longer waits for ends by itself; the next one
    waits for it, `close` too. abandoned: counts the calls that hang, in all lanes of an environment.
    """

    def __init__(self, name: str, abandoned: Abandoned) -> None:
        self._name, self._abandoned = name, abandoned
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., T], /, *args: object, **kwargs: Json) -> T:
        """The function's result. When this is cancelled before its turn came, it is not called."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        call = Call(functools.partial(function, *args, **kwargs), self._abandoned)
        self._calls.put(call)
        return await asyncio.wrap_future(call)

    def end(self) -> None:
        """Let the thread end after the calls that wait."""
        if self._thread is not None:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()


HOOKS = ("reset", "get_reward")


@dataclass(slots=True)
class Live:
    """An object while it serves a request: the environment's `session.state`.

    opening: messages before the first turn. running: calls that may not have ended, those nobody waits for included.
    """

    made: Any
    """The object."""
    lane: Lane
    """The thread of its synchronous code."""
    opening: int = 0
    running: int = field(default=0)

    async def call(self, name: str, arguments: Mapping[str, Json]) -> Any:
        """Call a method: an async one here, any other in the object's thread."""
        method = getattr(self.made, name)
        self.running += 1
        try:
            if inspect.iscoroutinefunction(method):
                return await method(**arguments)
            return await self.lane.call(method, **arguments)
        except asyncio.CancelledError:
            self.running += 1  # it may go on in its thread, so this object is never idle again
            raise
        finally:
            self.running -= 1


class Method(Tool):
    """A public method. Its name, description and arguments are read from it; see `agentrl.tool`."""

    def __init__(self, owner: type, name: str, done: str | None) -> None:
        static = inspect.getattr_static(owner, name)
        function = getattr(owner, name)
        bound = function if isinstance(static, staticmethod) else MethodType(function, owner)
        self.name = name
        self._signature = read_signature(bound, name)
        self.description = self._signature.description
        if not self.description:
            raise UserError(
                f"{owner.__name__}.{name}: a tool needs a docstring for the model to read; if it is none, let its "
                f"name begin with _, or list the others in env.args.methods"
            )
        self.parameters: Mapping[str, Json] = self._signature.parameters
        self._session = self._signature.session
        self._done = done

    def check(self, arguments: Mapping[str, Json]) -> dict[str, object]:
        return self._signature.check(arguments)

    # a parameter of theirs may be called session
    async def execute(self, session: Session, /, **arguments: Json) -> ToolResponse:  # type: ignore[override]
        assert session.environment is not None, "an environment's own tool has its session"
        live: Live = session.environment.state
        if self._session:
            arguments[self._session] = session
        response = _response(await live.call(self.name, arguments))
        if self._done is not None and getattr(live.made, self._done, False):
            return ToolResponse(response.text, response.images, response.reward, response.metrics, True, response.error)
        return response


def tool_methods(owner: type, wanted: Sequence[str] | None, not_tools: Sequence[str]) -> list[str]:
    """The names of those that are tools: `wanted`, or all public functions of the class but its hooks, by name
    as TRL lists them. A `close` that needs no argument is a hook. Raises UserError for a name that is no method."""
    functions = [name for name, _ in inspect.getmembers(owner, inspect.isfunction)]
    if wanted is not None:
        if unknown := [name for name in wanted if name not in functions]:
            raise UserError(
                f"env.args.methods: {owner.__name__} has no method {unknown[0]!r}{nearest(unknown[0], functions)}"
            )
        return list(wanted)
    hooks = {*HOOKS, *not_tools, *(["close"] if closes(owner) else [])}
    return [name for name in functions if not name.startswith("_") and name not in hooks]


def closes(owner: type) -> bool:
    """Whether it has a `close` that can be called without arguments."""
    close = getattr(owner, "close", None)
    if not callable(close):
        return False
    needed = [
        p
        for p in inspect.signature(close).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    own = 0 if isinstance(inspect.getattr_static(owner, "close"), staticmethod | classmethod) else 1
    return len(needed) <= own


def _response(result: object) -> ToolResponse:
    """Convert a result: text, a ToolResponse, a list of content parts with text and images, or anything that JSON can
    hold."""
    if isinstance(result, ToolResponse):
        return result
    if isinstance(result, str):
        return ToolResponse(result)
    if isinstance(result, list) and result and all(isinstance(part, dict) and "type" in part for part in result):
        text = "\n".join(str(part.get("text", "")) for part in result if part["type"] == "text")
        return ToolResponse(text, images=tuple(part["image"] for part in result if part["type"] == "image"))
    return ToolResponse(result_text(result))
