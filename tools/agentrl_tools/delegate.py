"""`delegate`: sub-agents. A call is a conversation with the same model, trained as a branch of the rollout."""

from collections.abc import Sequence

from agentrl import Session, Tool, ToolResponse
from agentrl.plugins.types import Converse, Json, Message


class Delegate(Tool):
    """Gives a part of the task to a sub-agent, whose last answer is the tool's.

    system_prompt: of the sub-agent; None: none. prompt: its user's message, in which {task} is what the call says.
    tools: names of those that it is offered; None: those of its caller. max_turns, max_tokens: bounds of one
    sub-agent, within those of the recipe's `rollout`. max_depth: how deep sub-agents may lie in each other; 1: they
    start none themselves. The time for it all is that of a call, `rollout.tool_timeout`.
    """

    converses = True

    def __init__(
        self,
        system_prompt: str | None = None,
        prompt: str = "{task}",
        tools: Sequence[str] | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        max_depth: int = 1,
        name: str = "delegate",
        description: str = "Gives a part of the task to an assistant, who sees nothing but what you write here.",
    ) -> None:
        if "{task}" not in prompt:
            raise ValueError("prompt must hold {task}, where the text of the call goes")
        if min(max_turns or 1, max_tokens or 1, max_depth) < 1:
            raise ValueError("max_turns, max_tokens and max_depth must be 1 or more")
        self.name, self.description = name, description
        self.system_prompt, self.prompt = system_prompt, prompt
        self.tools = tuple(tools) if tools is not None else None
        self.max_turns, self.max_tokens, self.max_depth = max_turns, max_tokens, max_depth
        task = {"type": "string", "description": "all that is needed to do it"}
        self.parameters = {"type": "object", "properties": {"task": task}, "required": ["task"]}

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        converse: Converse = arguments["converse"]
        names = self.tools if self.tools is not None else converse.tools
        if converse.depth + 1 >= self.max_depth:
            names = tuple(name for name in names if name != self.name)
        found = await converse(
            self.opening(arguments["task"]), tools=names, max_turns=self.max_turns, max_tokens=self.max_tokens
        )
        metrics = {"turns": float(found.turns)}
        if not found.answer and not found.done:
            return ToolResponse(f"Error: it ended without an answer ({found.finish})", metrics=metrics, error=True)
        return ToolResponse(found.answer, metrics=metrics, done=found.done)

    def opening(self, task: str) -> list[Message]:
        """The messages that a sub-agent begins with."""
        system: list[Message] = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": self.prompt.replace("{task}", task)}]
