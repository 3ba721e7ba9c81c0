"""`Toolbox`: the tools of a recipe, opened; which of them a task offers; closed once, when the run ends."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol, Self

from agentrl.errors import UserError, call_plugin, contained, describe, nearest
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import find, make_tool
from agentrl.plugins.tool import Tool, ToolSource
from agentrl.plugins.types import Task
from agentrl.recipe.sections.env import ToolSection

JSON_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
"""What a parameter may be."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """tools: those of the recipe, in its order, a source's in the source's. origins: where each comes from."""

    tools: tuple[Tool, ...]
    origins: tuple[str, ...]
    closing: AsyncExitStack
    """Closes what was opened."""

    @classmethod
    async def open(cls, sections: Sequence[ToolSection], env: Environment) -> Self:
        """Open all tools of a recipe. Raises UserError when one cannot be had, no model could call it, or two would
        have one name for the model; nothing stays open."""
        async with AsyncExitStack() as stack:
            tools: list[Tool] = []
            origins: list[str] = []
            for section, made in [(section, make_tool(section)) for section in sections]:
                stack.push_async_callback(made.close)
                opened = await made.open() if isinstance(made, ToolSource) else (made,)
                tools += opened
                origins += [find("tools", section.name).origin] * len(opened)
            _check(tools, origins, env)
            return cls(tuple(tools), tuple(origins), stack.pop_all())
        raise AssertionError("the stack swallows nothing")

    async def close(self) -> None:
        """Close every tool and source, last first; an error of one is raised after all were closed."""
        await self.closing.aclose()


class Closes(Protocol):
    """What is closed at the end of a run."""

    async def close(self) -> None:
        """Let go of what it holds."""


async def close_all(parts: Mapping[str, Closes]) -> list[str]:
    """Close each, whatever another one raises: name -> what has `close`. Returns a line for each that raised: the work
    is done by then, and no reason to lose it."""
    lines = []
    for name, part in parts.items():
        try:
            await part.close()
        except BaseException as error:  # noqa: BLE001 - boundary: it is a stranger's code
            lines.append(f"{name} could not be closed: {describe(contained(error))}")
    return lines


def _check(tools: Sequence[Tool], origins: Sequence[str], env: Environment) -> None:
    by_name: dict[str, str] = {}
    own = [(tool, f"environment {env.name}") for tool in env.tools()]
    for tool, origin in [*zip(tools, origins, strict=True), *own]:
        if other := by_name.get(tool.name):
            raise UserError(f"tools: {other} and {origin} both offer {tool.name!r} to the model")
        by_name[tool.name] = origin
        if wrong := _wrong(tool):
            raise UserError(f"tool {tool.name!r} ({origin}): {wrong}")
        _ = tool.schema  # raises where no prompt can hold it


def _wrong(tool: Tool) -> str:
    """What no prompt could say of a tool, or no model call; empty where all is well."""
    given = tool.parameters
    if any(letter.isspace() for letter in tool.name):
        return "its name holds white space; expected a word such as find_book"
    if not isinstance(tool.description, str):
        return f"its `description` is of type {type(tool.description).__name__}; expected a text"
    if not isinstance(given, Mapping):
        return f"its `parameters` are of type {type(given).__name__}; expected a JSON schema of type object"
    properties, required = given.get("properties", {}), given.get("required", [])
    if given.get("type") != "object" or not isinstance(properties, Mapping):
        return "its `parameters` want type object and a map of properties"
    if isinstance(required, str) or not isinstance(required, Sequence) or {*required} - {*properties}:
        return f"its `parameters` require {required!r:.60}; expected a list of names among its properties"
    for name, schema in properties.items():
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if isinstance(kind, str) and kind not in JSON_TYPES:
            return f"its parameter {name!r} has the type {kind!r:.40}{nearest(kind, JSON_TYPES)}"
    return ""


def offered(task: Task, tools: Sequence[Tool], env: Environment) -> dict[str, Tool]:
    """The tools of a task by name: those of the recipe that it names (all, where it names none), then the
    environment's own. Raises UserError for a name that nobody has or two tools have, and for what `tools_for` raises or
    gives that are no tools."""
    owner = f"environment {env.name!r}: `tools_for` of task {task.id}"
    given = call_plugin(owner, env.tools_for, task)
    if not isinstance(given, Sequence) or not all(isinstance(tool, Tool) for tool in given):
        raise UserError(f"{owner} returned {given!r:.60}; expected a sequence of Tool objects")
    own = {tool.name: tool for tool in given}
    every = {tool.name: tool for tool in tools}
    if len(own) < len(given) or own.keys() & every.keys():
        names = Counter([tool.name for tool in (*tools, *given)])
        raise UserError(f"{owner} gives {names.most_common(1)[0][0]!r}, and another tool has that name")
    if task.tools is None:
        return every | own
    if unknown := next((name for name in task.tools if name not in every and name not in own), None):
        raise UserError(f"task {task.id} names the tool {unknown!r}, not in `tools`{nearest(unknown, [*every, *own])}")
    return {name: every[name] for name in task.tools if name in every} | own
