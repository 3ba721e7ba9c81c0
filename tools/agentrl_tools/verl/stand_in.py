"""What a tool imports of verl, where verl is not installed: its base class, its schemas, its trace decorator.

Written from the interface alone. Nothing else of verl is stood in for: a tool that imports more says which module it
misses. Where verl is installed, none of this is used.
"""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from agentrl.plugins.types import Json

T = TypeVar("T")


class _Model(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Model):
    """verl's schema of one argument."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Model):
    """verl's schema of a function's arguments."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Model):
    """verl's schema of a function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Model):
    """A tool as the OpenAI API describes it."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(_Model):
    """What a call returns in newer tools."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """The class that verl's tools derive from; what they leave out does nothing."""

    def __init__(self, config: dict[str, Json], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError("it has no schema of its own: give one")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The schema that the tool was made with."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: object) -> tuple[str, ToolResponse]:
        """Begin a use of the tool; return its id and what it says first."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Json], **kwargs: object
    ) -> tuple[object, float, object]:
        """Run one call; return the response, a step reward and metrics."""
        return ToolResponse(text=json.dumps(parameters)), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        """The reward of a use."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: object) -> None:
        """End a use."""


def rollout_trace_op(function: T) -> T:
    """The function as it is."""
    return function


_MODULES: dict[str, tuple[type | Callable[..., object], ...]] = {
    "verl": (),
    "verl.tools": (),
    "verl.tools.base_tool": (BaseTool, OpenAIFunctionToolSchema, ToolResponse),
    "verl.tools.schemas": (
        OpenAIFunctionToolSchema,
        OpenAIFunctionSchema,
        OpenAIFunctionParametersSchema,
        OpenAIFunctionPropertySchema,
        ToolResponse,
    ),
    "verl.utils": (),
    "verl.utils.rollout_trace": (rollout_trace_op,),
}


def installed() -> bool:
    """Whether verl itself can be imported (a stand-in does not count)."""
    return ("verl" not in sys.modules and find_spec("verl") is not None) or _is_real(sys.modules.get("verl"))


def _is_real(module: ModuleType | None) -> bool:
    return module is not None and not hasattr(module, "__agentrl_stand_in__")


def stand_in() -> None:
    """Make the modules importable, once."""
    if "verl" in sys.modules:
        return
    for name, things in _MODULES.items():
        module = ModuleType(name, "A stand-in of agentrl for what verl's tools import.")
        module.__agentrl_stand_in__ = True  # type: ignore[attr-defined]
        module.__path__ = []
        for thing in things:
            setattr(module, thing.__name__, thing)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
