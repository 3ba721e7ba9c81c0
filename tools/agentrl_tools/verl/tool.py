"""`verl`: one tool of verl's interface, by import path, or all those of one of its tool config files.

verl is not needed. An object of verl's serves many requests by an `instance_id`; here that is made from the session.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import yaml
from pydantic import ValidationError

from agentrl.errors import UserError
from agentrl.plugins.registry import load_path
from agentrl.plugins.tool import Tool, ToolSource
from agentrl.plugins.types import Json, Session, ToolResponse
from agentrl_tools.verl.stand_in import OpenAIFunctionToolSchema, installed, stand_in

_HOOKS = ("create", "execute", "calc_reward", "release")


def verl_tools(
    tool: str | None = None,
    config: dict[str, Json] | None = None,
    schema: dict[str, Json] | str | None = None,
    file: str | None = None,
) -> Tool | ToolSource:
    """Tools written against verl's BaseTool, as they are.

    tool: `package.module:Class` (or with dots, as verl writes it). config: what its constructor gets. schema: its
    description in the shape of the OpenAI API, or a YAML or JSON file that holds it; None where the class has its own.
    file: one of verl's tool config files, for all the tools in it, instead of these three.
    """
    if (tool is None) == (file is None):
        raise UserError("tool verl: give args.tool (package.module:Class) or args.file (a tool config of verl's)")
    if file is not None:
        if config is not None or schema is not None:
            raise UserError("tool verl: args.file holds config and schema itself; leave these two out")
        return VerlFile(file)
    assert tool is not None
    given = _read_schema(schema) if isinstance(schema, str) else schema
    return VerlTool(tool, config or {}, given, "tool verl")


@dataclass(slots=True)
class _Instance:
    """id: as `create` returned it. Older tools are handed one, newer ones may make their own."""

    id: str


class VerlTool(Tool):
    """One object of verl's as a tool."""

    cannot = MappingProxyType(
        {"calc_reward within a rollout": "it is asked once, after the last token", "videos": "such a call is an error"}
    )

    def __init__(self, path: str, config: dict[str, Json], schema: Mapping[str, Json] | None, where: str) -> None:
        self._made = _construct(path, config, schema, where)
        description = _described(self._made, schema, f"{where}: {path}")
        self.name: str = description["name"]
        self.description = description.get("description") or ""
        self.parameters: Mapping[str, Json] = description.get("parameters") or {"type": "object", "properties": {}}
        self._properties = self.parameters.get("properties", {})
        self._wants_text = _wants_text(self._made.execute)

    async def create(self, session: Session, **create_kwargs: object) -> None:
        given = _accepted(self._made.create, {**create_kwargs, "create_kwargs": create_kwargs})
        session.state = _Instance(session.id)
        returned = await _settled(self._made.create(instance_id=session.id, **given))
        made = returned[0] if isinstance(returned, tuple) else returned
        if made is not None:
            session.state.id = made

    # a parameter of theirs may be called session
    async def execute(self, session: Session, /, **arguments: object) -> ToolResponse:  # type: ignore[override]
        hidden = {key: arguments.pop(key) for key in [*arguments] if self._properties and key not in self._properties}
        given = json.dumps(arguments) if self._wants_text else arguments
        returned = await _settled(self._made.execute(session.state.id, given, **_accepted(self._made.execute, hidden)))
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(f"{self.name}.execute returned no (response, reward, metrics)")
        response, reward, metrics = returned
        text, images = _said(response)
        numbers = {key: float(value) for key, value in (metrics or {}).items() if isinstance(value, int | float)}
        return ToolResponse(text, images=images, reward=reward, metrics=numbers)

    @property
    def reward_parts(self) -> tuple[str, ...]:  # type: ignore[override]
        """The tool's name: its reward is one part."""
        return (self.name,)

    async def calc_reward(self, session: Session, **kwargs: object) -> float | None:
        given = _accepted(self._made.calc_reward, kwargs)
        reward: float | None = await _settled(self._made.calc_reward(session.state.id, **given))
        return reward

    async def release(self, session: Session, **kwargs: object) -> None:
        if session.state is not None:
            await _settled(self._made.release(session.state.id, **_accepted(self._made.release, kwargs)))


class VerlFile(ToolSource):
    """The tools of a config file: `tools`, a list of `class_name`, `config` and `tool_schema`."""

    def __init__(self, file: str) -> None:
        self._file = file
        content = _read(file)
        entries = content.get("tools") if isinstance(content, Mapping) else None
        if not isinstance(entries, list) or not entries:
            raise UserError(f"tool verl: {file} has no list `tools`")
        self._entries = entries

    async def open(self) -> Sequence[Tool]:
        return [self._tool(entry, number) for number, entry in enumerate(self._entries)]

    def _tool(self, entry: object, number: int) -> Tool:
        where = f"tool verl: {self._file}, tools.{number}"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
            raise UserError(f"{where}: expected class_name, config and tool_schema")
        config = entry.get("config") or {}
        if str(config.get("type", "native")) != "native":
            raise UserError(f"{where}: its config.type is {config['type']!r}; only native tools are classes, use `mcp`")
        return VerlTool(entry["class_name"], dict(config), entry.get("tool_schema"), where)


def _construct(path: str, config: dict[str, Json], schema: Mapping[str, Json] | None, where: str) -> Any:
    if ":" not in path and "." not in path:
        raise UserError(f"{where}: {path!r} is not an import path; expected package.module:Class")
    if ":" not in path:
        path = ":".join(path.rpartition(".")[::2])
    cls = _load(path, where)
    if not isinstance(cls, type) or (missing := [hook for hook in _HOOKS if not hasattr(cls, hook)]):
        lacks = f"; it has no {missing[0]}" if isinstance(cls, type) else ""
        raise UserError(f"{where}: {path} is not a class with verl's hooks ({', '.join(_HOOKS)}){lacks}")
    try:
        return cls(config=config, tool_schema=None if schema is None else _as_model(schema))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{where}: {path}: its schema is wrong at {place}: {first['msg']}") from error
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{where}: {path}(config, tool_schema) raised {line}") from error


def _load(path: str, where: str) -> object:
    """Import it; where it wants verl, and there is none, with the stand-in for verl's base class."""
    try:
        return load_path(path, where)
    except UserError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or (cause.name or "").partition(".")[0] != "verl" or installed():
            raise
    stand_in()
    try:
        return load_path(path, where)
    except UserError as error:
        raise UserError(f"{error}; without verl there is only its BaseTool, schemas and trace: install verl") from error


def _as_model(schema: Mapping[str, Json]) -> object:
    if installed():
        from verl.tools.schemas import OpenAIFunctionToolSchema as Theirs

        return Theirs.model_validate(dict(schema))
    return OpenAIFunctionToolSchema.model_validate(dict(schema))


def _described(made: object, given: Mapping[str, Json] | None, where: str) -> dict[str, Json]:
    """The tool's own `function` part: of its `get_openai_tool_schema`, else what was given."""
    own: Any = made.get_openai_tool_schema() if hasattr(made, "get_openai_tool_schema") else None
    if own is None:
        own = getattr(made, "tool_schema", None) or given
    plain = own.model_dump(exclude_none=True) if hasattr(own, "model_dump") else own
    function = plain.get("function", plain) if isinstance(plain, Mapping) else None
    if not isinstance(function, Mapping) or not function.get("name"):
        raise UserError(f"{where}: it has no schema with a name; give args.schema")
    return dict(function)


def _read_schema(file: str) -> Mapping[str, Json]:
    content = _read(file)
    if isinstance(content, Mapping) and isinstance(content.get("tool_schema"), Mapping):
        content = content["tool_schema"]
    if not isinstance(content, Mapping):
        raise UserError(f"tool verl: args.schema: {file} contains no schema")
    return content


def _read(file: str) -> object:
    try:
        return yaml.safe_load(Path(file).read_text(encoding="utf-8"))  # JSON is YAML too
    except OSError as error:
        raise UserError(f"tool verl: {file} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"tool verl: {file} is no YAML: {' '.join(str(error).split())}") from error


def _wants_text(execute: Callable[..., object]) -> bool:
    """Whether `parameters` are annotated as text: the oldest tools read JSON themselves."""
    try:
        wanted = get_type_hints(execute).get("parameters")
    except (NameError, TypeError):
        wanted = inspect.signature(execute).parameters["parameters"].annotation
    return wanted is str or bool(isinstance(wanted, str) and re.fullmatch(r"str", wanted))


def _accepted(function: Callable[..., object], kwargs: Mapping[str, Json]) -> dict[str, Json]:
    """`kwargs`; where it does not take every keyword, `create_kwargs` goes along only if it is asked for."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(kwargs)
    return {key: value for key, value in kwargs.items() if key != "create_kwargs" or key in parameters}


async def _settled(value: object) -> Any:
    return await value if inspect.isawaitable(value) else value


def _said(response: object) -> tuple[str, tuple[object, ...]]:
    """Text and images of what a tool returned: text, an object with `text` and `image`, or a dict with these."""
    if response is None or isinstance(response, str):
        return response or "", ()
    fields = response if isinstance(response, Mapping) else vars(response)
    if fields.get("video"):
        raise ValueError("it returned a video, which cannot be shown to a model here")
    images = fields.get("image") or ()
    return fields.get("text") or "", tuple(images) if isinstance(images, list | tuple) else (images,)
