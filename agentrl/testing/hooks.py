"""What both contract tests ask of a plugin's hooks, of its schema, and of how they end."""

import asyncio
import inspect
import json
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from agentrl.containment.event_loop import blocking, run
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_tool
from agentrl.plugins.tool import Tool, ToolSource
from agentrl.plugins.types import ArgumentError, Json, Session, Task
from agentrl.recipe.sections.env import ToolSection

T = TypeVar("T")
HOOK_SECONDS = 30.0
"""What one hook may take here, `release` too."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_KEYS = re.compile(r"[A-Za-z_]\w*")


def require(holds: object, line: str) -> None:
    """Raise AssertionError with `line` unless it holds."""
    if not holds:
        raise AssertionError(line)


def run_checks(work: Callable[[], Coroutine[object, None, None]]) -> None:
    """Run them to their end, inside a running event loop as well. What is broken is raised anew, so that a test shows
    its line and what caused it, and nothing of how it was found."""
    __tracebackhide__ = True
    try:
        blocking(lambda: run(work()))
    except AssertionError as error:
        broken = error
    else:
        return
    raise AssertionError(str(broken)) from broken.__cause__


def made_tool(tool: Tool | type[Tool] | str) -> Tool:
    """An object, a class that needs no argument, or an installed name, as a tool."""
    made: object = (
        make_tool(ToolSection(name=tool)) if isinstance(tool, str) else tool() if isinstance(tool, type) else tool
    )
    require(not isinstance(made, ToolSource), f"{tool!r} is a source of tools: open it, and check those one by one")
    require(
        isinstance(made, Tool),
        f"{tool!r} is not a tool: derive it from agentrl.Tool, or decorate a function with @tool",
    )
    assert isinstance(made, Tool)
    return made


def require_hooks(plugin: Tool | Environment, what: str) -> None:
    """Check that the four hooks are async, and take the session first."""
    for hook in ("create", "execute", "calc_reward", "release"):
        method = getattr(plugin, hook, None)
        require(
            inspect.iscoroutinefunction(method),
            f"{what}: `{hook}` is not an async method; write `async def {hook}(...)`",
        )
        try:
            parameters = list(inspect.signature(method).parameters.values()) if method else []
        except (TypeError, ValueError):  # built in, and so async by a promise of its own
            continue
        first = parameters[0] if parameters else None
        positional = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
        require(
            positional or (first is not None and first.kind is first.VAR_POSITIONAL),
            f"{what}: `{hook}` must take the session as its first argument",
        )


def require_schema(tool: Tool) -> None:
    """Check that there are a name, a description and parameters that a model can be given, and that `execute` can
    take."""
    what = f"tool {getattr(tool, 'name', type(tool).__name__)!r}"
    name = getattr(tool, "name", None)
    require(
        isinstance(name, str) and _NAME.fullmatch(name),
        f"{what}: set `name` to letters, digits, _ . or - (at most 64), got {name!r}",
    )
    require(
        isinstance(tool.description, str) and tool.description.strip(),
        f"{what}: set a `description`: it is all that a model knows of it",
    )
    parameters = tool.parameters
    require(
        isinstance(parameters, Mapping) and parameters.get("type") == "object",
        f"{what}: `parameters` must be a JSON schema of type 'object'",
    )
    try:
        json.dumps(tool.schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{what}: its schema cannot be written as JSON: {error}") from None
    properties = parameters.get("properties", {})
    for key in properties:
        require(_KEYS.fullmatch(key), f"{what}: the argument {key!r} is no Python name, so execute cannot take it")
    if missing := [key for key in parameters.get("required", ()) if key not in properties]:
        raise AssertionError(f"{what}: `required` names {missing[0]!r}, which is not in `properties`")
    _require_takes(tool, properties, what)
    _require_check(tool, what)


def _require_takes(tool: Tool, properties: Mapping[str, Json], what: str) -> None:
    signature = inspect.signature(tool.execute)
    named = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    known = {p.name for p in named}
    if not open_ended and (unknown := [key for key in properties if key not in known]):
        raise AssertionError(f"{what}: `execute` does not take {unknown[0]!r}, which its schema offers")
    required = tool.parameters.get("required", ())
    for p in named:
        if (
            p.default is p.empty
            and p.name in properties
            and p.name not in required
            and not _defaulted(properties[p.name])
        ):
            raise AssertionError(
                f"{what}: `execute` needs {p.name!r}, which its schema lets a model leave out: "
                f"put it in `required` or give it a default"
            )


def _defaulted(schema: object) -> bool:
    return isinstance(schema, Mapping) and "default" in schema


def _require_check(tool: Tool, what: str) -> None:
    try:
        tool.check({})
    except ArgumentError:
        pass
    except Exception as error:
        raise AssertionError(
            f"{what}: `check` raised {_named(error)}; what a model does wrong is an ArgumentError"
        ) from error


def session(task: Task, number: int, environment: Session | None = None) -> Session:
    """The `number`-th session of a task here; their `rng`s are alike, so that what they do can be compared."""
    deadline = time.monotonic() + HOOK_SECONDS
    return Session(f"{task.id}#{number}", task, random.Random(0), deadline, [], environment=environment)


async def hook(work: Awaitable[T], what: str) -> T:
    """The result of a hook that must not raise, and must end in time."""
    try:
        async with asyncio.timeout(HOOK_SECONDS):
            return await work
    except TimeoutError:
        raise AssertionError(f"{what} took longer than {HOOK_SECONDS:g} seconds") from None
    except Exception as error:
        raise AssertionError(f"{what} raised {_named(error)}") from error


def number(value: Any, what: str) -> float:
    """A finite number. Raises AssertionError."""
    good = (isinstance(value, int | float) and not isinstance(value, bool)) or hasattr(value, "__float__")
    require(good and math.isfinite(value), f"{what} must be a finite number, got {value!r}")
    return float(value)


def sizes(plugin: object) -> dict[str, int]:
    """How much a plugin's own containers hold, by attribute."""
    held = vars(plugin) if hasattr(plugin, "__dict__") else {}
    return {name: len(value) for name, value in held.items() if isinstance(value, dict | list | set)}


async def require_no_growth(plugin: object, what: str, many: Callable[[], Awaitable[object]]) -> None:
    """Check that what it holds does not grow with the sessions that it has served. (A first round may fill pools and
    caches.)"""
    await many()
    before = sizes(plugin)
    await many()
    for name, size in sizes(plugin).items():
        require(
            size <= before.get(name, 0),
            f"{what}: self.{name} grew from {before.get(name, 0)} to {size} entries over sessions that were all "
            f"released: free them in `release`, or keep them in session.state",
        )


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """The index where they begin to differ."""
    return next((i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1]), None)


def _named(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
