"""The kinds of functions that are asked for: those of training, and those kept for the split `kinds`."""

from agentrl_envs.code.kinds import lists, numbers, text, unseen
from agentrl_envs.code.kinds.kind import Kind

KINDS: tuple[Kind, ...] = (*lists.KINDS, *numbers.KINDS, *text.KINDS)
UNSEEN: tuple[Kind, ...] = unseen.KINDS

__all__ = ["KINDS", "UNSEEN", "Kind"]
