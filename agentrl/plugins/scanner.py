"""`Scanned`: a stored sample as a scanner reads it, and what scanners are.

A scanner is a function `scan(sample: Scanned) -> str | None`: what it found, as a short text (a quotation, a path), or
None. Entry point group `agentrl.scanners`, or `module:function`. `agentrl scan` calls one of a package, or of the user,
in a process of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.plugins.types import Json, Message


@dataclass(frozen=True, slots=True)
class Scanned:
    """A stored sample."""

    task: str
    """Id of its task."""
    data: Mapping[str, Json]
    """The task's data."""
    messages: Sequence[Message]
    """The whole conversation, opening included; of a tree what each segment adds, one after another."""
    tools: Sequence[str]
    """Names of the tools that the task offered."""
    tool_uses: Sequence[Mapping[str, Json]]
    """Each call: `name`, `turn`, `seconds`, `error` (None: none), `cut`."""
    reward: float | None
    """The reward; None where the machinery failed the sample."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Its parts, before weights."""
    solved: bool | None = None
    """The environment's word; None where it was not asked, as in training."""
    finish: str = "stop"
    """Why it ended, a `FinishReason`."""
    extra: Mapping[str, Json] = field(default_factory=dict)
    """What else was kept of it, such as `workspace` and `tampering`."""

    @property
    def sampled(self) -> list[str]:
        """The text of each of the model's own messages."""
        return [text_of(message) for message in self.messages if message.get("role") == "assistant"]

    @property
    def answer(self) -> str:
        """The text of the model's last message; empty where there is none."""
        return self.sampled[-1] if self.sampled else ""

    @property
    def earned(self) -> bool:
        """Whether it was solved, or, where nobody was asked, earned something."""
        return bool(self.solved) if self.solved is not None else (self.reward or 0.0) > 0


Scanner = Callable[[Scanned], str | None]
"""What it found in a sample; None: nothing."""


def text_of(message: Mapping[str, Json]) -> str:
    """A message's text; images and the like have none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "\n".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def calls_of(message: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Name and arguments, as text, of each of a message's calls."""
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            found.append((str(function.get("name") or ""), str(function.get("arguments") or "")))
    return found
