"""A tool in the newer form of verl's interface, which imports verl's own modules."""

from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class NewTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.instances: dict[str, Any] = {}

    async def create(self, instance_id: str | None = None, **kwargs) -> tuple[str, ToolResponse]:
        own = str(uuid4())
        self.instances[own] = kwargs.get("create_kwargs", {}).get("ground_truth")
        return own, ToolResponse(text="ready")

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        right = parameters["answer"] == self.instances[instance_id]
        return ToolResponse(text=f"right: {right}", image=[b"GIF8..."] if right else None), float(right), {}

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.instances[instance_id]


class OwnSchema(BaseTool):
    """Brings its schema; every other hook is the base class's."""

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "noop", "description": "Does nothing."}}
        )


class Video(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(video=[b"..."]), 0.0, {}
