"""`@tool` turns a typed function with a docstring into a tool; it can still be called as the function that it is.

    @tool
    def convert(amount: float, unit: Literal["km", "miles"] = "km") -> str:
        '''Convert a distance.

        Args:
            amount: The distance.
            unit: What it is given in.
        '''

A synchronous function runs in the event loop, because a hop to a thread and back costs more than the driver spends on
a whole turn: it must answer at once. One that computes for long or waits says `@tool(thread=True)`; one that waits for
the network is better written `async def`. A thread that runs past its deadline is left to end by itself; 32 of them at
once end the run.
"""

import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, overload

from pydantic_core import to_json

from agentrl.containment.threads import Abandoned, DaemonThreads
from agentrl.errors import UserError
from agentrl.plugins.signature import Signature, read_signature
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Session, ToolResponse

Function = Callable[..., object]
_REMEDY = "give what it waits for a time-out of its own, or write it `async def`"
_THREADS = 256  # started one by one as calls wait; most of them sleep


class FunctionTool(Tool):
    """A function as a tool. name, description, parameters: read from it; see `tool`."""

    def __init__(self, function: Function, name: str | None, description: str | None, thread: bool) -> None:
        self.function = function
        self.name = name or function.__name__
        self._signature: Signature = read_signature(function, self.name)
        self.description = description or self._signature.description
        if not self.description:
            raise UserError(
                f"tool {self.name!r}: it needs a docstring, or @tool(description=...), for the model to read"
            )
        self.parameters: Mapping[str, Json] = self._signature.parameters
        self._session = self._signature.session
        self._threads: DaemonThreads | None = None
        self._run = self._async_runner(function, thread)
        functools.update_wrapper(self, function)

    def __call__(self, *args: object, **kwargs: Json) -> Any:
        """The function itself, for tests and other code."""
        return self.function(*args, **kwargs)

    def check(self, arguments: Mapping[str, Json]) -> dict[str, object]:
        return self._signature.check(arguments)

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse | str:
        if self._session:
            arguments[self._session] = session
        result = await self._run(arguments)
        return result if isinstance(result, str | ToolResponse) else result_text(result)

    async def close(self) -> None:
        if self._threads:
            self._threads.shutdown()
            self._threads = None

    def _async_runner(self, function: Function, thread: bool) -> Callable[[dict[str, Json]], Awaitable[object]]:
        if inspect.iscoroutinefunction(function):
            if thread:
                raise UserError(f"tool {self.name!r}: an async function runs in the event loop; leave thread=True out")
            return lambda arguments: function(**arguments)
        if thread:
            return self._in_thread

        async def inline(arguments: dict[str, Json]) -> object:
            return function(**arguments)

        return inline

    async def _in_thread(self, arguments: dict[str, Json]) -> object:
        if self._threads is None:
            self._threads = DaemonThreads(f"tool-{self.name}", _THREADS, Abandoned("tool", _REMEDY))
        return await self._threads.call(self.function, **arguments)


@overload
def tool(function: Function, /) -> FunctionTool: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None, thread: bool = False
) -> Callable[[Function], FunctionTool]: ...


def tool(
    function: Function | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    thread: bool = False,
) -> FunctionTool | Callable[[Function], FunctionTool]:
    """Make a tool of a typed function, as `@tool` or `@tool(name=..., description=..., thread=True)`.

    The arguments' JSON schema and checks come from the annotations, their descriptions from the docstring (sections
    `Args:` or numpy's `Parameters`, or `:param x:` lines). A parameter annotated `Session` is given the session and is
    not the model's to fill. It returns text, a number, something that JSON can hold, a ToolResponse, or None.

    Raises UserError when a parameter has no annotation, or when there is neither docstring nor description.
    """
    if function is not None:
        return FunctionTool(function, name, description, thread)
    return lambda f: FunctionTool(f, name, description, thread)


def result_text(value: object) -> str:
    """What a function returned, as the model reads it: nothing for None, JSON for all but text."""
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return to_json(value).decode()
