"""The kinds of servers that take weights."""

from typing import TYPE_CHECKING

from agentrl.weights.scratch import WEIGHTS, Scratch
from agentrl.weights.server import WeightServer
from agentrl.weights.sglang import SglangServer
from agentrl.weights.vllm import VllmServer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SERVERS: dict[str, type[WeightServer]] = {"sglang": SglangServer, "vllm": VllmServer}
"""Name of the engine -> its servers' calls."""


def folder_for(kind: str, model: "PreTrainedModel") -> Scratch:
    """The folder through which the weights of `model`, a transformers module, go to servers of this kind."""
    size = sum(p.numel() * p.element_size() for p in model.parameters()) if SERVERS[kind].in_memory else 0
    return Scratch(WEIGHTS, size)
