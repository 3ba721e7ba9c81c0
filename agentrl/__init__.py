"""agentrl trains language-model agents that use tools over many turns, with reinforcement learning.

Names are imported when they are first used, so that `import agentrl` costs milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.algo.terms import LossTerms, Samples, TokenAdvantages, Tokens
    from agentrl.engine.base import Engine, Generation, Sampling
    from agentrl.errors import UserError
    from agentrl.eval.compare import compare
    from agentrl.eval.evaluate import evaluate
    from agentrl.fine_tuning.run import sft
    from agentrl.fine_tuning.start import train
    from agentrl.plugins.agent import Agent, AgentClient, Outcome
    from agentrl.plugins.decorator import tool
    from agentrl.plugins.environment import Environment, LazyTasks
    from agentrl.plugins.reward import GroupReward, Reward, Sample
    from agentrl.plugins.span import span
    from agentrl.plugins.tool import Tool, ToolSource
    from agentrl.plugins.tracker import Tracker
    from agentrl.plugins.types import (
        ArgumentError,
        InfrastructureError,
        Message,
        Reply,
        Session,
        Task,
        ToolKwargs,
        ToolResponse,
    )
    from agentrl.recipe.schema import Recipe

_HOMES = {
    "Agent": "agentrl.plugins.agent",
    "AgentClient": "agentrl.plugins.agent",
    "ArgumentError": "agentrl.plugins.types",
    "Engine": "agentrl.engine.base",
    "Environment": "agentrl.plugins.environment",
    "Generation": "agentrl.engine.base",
    "GroupReward": "agentrl.plugins.reward",
    "InfrastructureError": "agentrl.plugins.types",
    "LazyTasks": "agentrl.plugins.environment",
    "LossTerms": "agentrl.algo.terms",
    "Message": "agentrl.plugins.types",
    "Outcome": "agentrl.plugins.agent",
    "Recipe": "agentrl.recipe.schema",
    "Reply": "agentrl.plugins.types",
    "Reward": "agentrl.plugins.reward",
    "Sample": "agentrl.plugins.reward",
    "Samples": "agentrl.algo.terms",
    "Sampling": "agentrl.engine.base",
    "Session": "agentrl.plugins.types",
    "Task": "agentrl.plugins.types",
    "TokenAdvantages": "agentrl.algo.terms",
    "Tokens": "agentrl.algo.terms",
    "Tool": "agentrl.plugins.tool",
    "ToolKwargs": "agentrl.plugins.types",
    "ToolResponse": "agentrl.plugins.types",
    "ToolSource": "agentrl.plugins.tool",
    "Tracker": "agentrl.plugins.tracker",
    "UserError": "agentrl.errors",
    "compare": "agentrl.eval.compare",
    "evaluate": "agentrl.eval.evaluate",
    "sft": "agentrl.fine_tuning.run",
    "span": "agentrl.plugins.span",
    "tool": "agentrl.plugins.decorator",
    "train": "agentrl.fine_tuning.start",
}

__version__ = "0.2.0"
__all__ = [
    "Agent",
    "AgentClient",
    "ArgumentError",
    "Engine",
    "Environment",
    "Generation",
    "GroupReward",
    "InfrastructureError",
    "LazyTasks",
    "LossTerms",
    "Message",
    "Outcome",
    "Recipe",
    "Reply",
    "Reward",
    "Sample",
    "Samples",
    "Sampling",
    "Session",
    "Task",
    "TokenAdvantages",
    "Tokens",
    "Tool",
    "ToolKwargs",
    "ToolResponse",
    "ToolSource",
    "Tracker",
    "UserError",
    "compare",
    "evaluate",
    "sft",
    "span",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
