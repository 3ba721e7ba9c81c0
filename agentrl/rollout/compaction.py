"""Compaction: a conversation that nears its limit of tokens goes on from a summary that the model writes of it."""

from collections.abc import Sequence

from agentrl.images import hashes
from agentrl.plugins.types import Message
from agentrl.recipe.sections.rollout import CompactSection

COUNTS = ("compactions", "compactions_failed")
"""In `Trajectory.extra`: summaries that were written, and those that could not be gone on from."""


def threshold(section: CompactSection, most: int) -> float:
    """The tokens from which on a conversation that may have `most` is to be summarized."""
    return section.at if section.at > 1 else section.at * most


def asked(section: CompactSection, replies: Sequence[Message]) -> list[Message]:
    """What tools or environment said, and that a summary is wanted."""
    return said_by_user(replies, section.prompt)


def reopened(
    section: CompactSection, opening: Sequence[Message], summary: str, messages: Sequence[Message]
) -> list[Message]:
    """The messages that a conversation goes on from. messages: what it was, whose images are gone but for those
    of the opening: that is told in words."""
    text = section.resume.replace("{summary}", summary)
    if gone := len(hashes(messages)) - len(hashes(opening)):
        text += "\n[1 image is not shown any more]" if gone == 1 else f"\n[{gone} images are not shown any more]"
    return said_by_user(opening, text)


def said_by_user(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with a text of the user's at their end: in the last of them where that is the user's, since
    many templates want users and assistants to alternate."""
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    content = messages[-1]["content"]
    if isinstance(content, list):
        together: Message = {**messages[-1], "content": [*content, {"type": "text", "text": text}]}
    else:
        together = {**messages[-1], "content": f"{content}\n\n{text}" if content else text}
    return [*messages[:-1], together]
