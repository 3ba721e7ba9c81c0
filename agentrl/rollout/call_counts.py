"""What calls of samples came to: how many name tools that do not exist, cannot be read or were cut, and who made none.

`CallCounts` counts them, and puts what most of them did wrong into words: a run's health, `agentrl why` and the end of
a run say the same.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.chat.calls import UNREADABLE
from agentrl.plugins.types import Json
from agentrl.secrets import without_known
from agentrl.trajectory import Group

FEW = 8
"""Calls, or samples, below which nothing is said of them."""
_NAMED = 3  # names of tools that do not exist that are listed


class CallFault(NamedTuple):
    """Something that most calls have wrong."""

    name: str
    """`tools_unknown`, `calls_cut`, `calls_unreadable` or `no_calls`."""
    line: str
    """What was counted, such as `128 of 128 calls name tools that do not exist: calculator (128)`."""
    remedy: str
    """Its likely cause, and what to do."""


@dataclass(slots=True)
class CallCounts:
    """Counts of samples whose tasks offer tools, and of their calls."""

    samples: int = 0
    """Number of samples whose tasks offer tools."""
    silent: int = 0
    """Number of these that made no call."""
    calls: int = 0
    """Number of calls."""
    unreadable: int = 0
    """Calls of which neither name nor arguments could be read, without those that were cut."""
    cut: int = 0
    """Calls that a turn's token limit (`rollout.max_turn_tokens`) cut off."""
    unknown: int = 0
    """Calls that could be read and name a tool that is not offered."""
    names: Counter[str] = field(default_factory=Counter)
    """Names of such tools."""
    offered: dict[str, None] = field(default_factory=dict)
    """The tools that were offered, in order."""

    def add(
        self,
        tools: Sequence[str],
        uses: Iterable[tuple[str, str | None, int]],
        turn_tokens: Sequence[int],
        limit: int | None,
    ) -> None:
        """Add a sample. uses: name, error and turn of each of its calls. turn_tokens: of each of its turns. limit:
        `rollout.max_turn_tokens`; None: not known, and no call counts as cut."""
        self.offered |= dict.fromkeys(tools)
        found = list(uses)
        self.samples += bool(tools)
        self.silent += bool(tools) and not found
        for name, error, turn in found:
            self.calls += 1
            if UNREADABLE in (error or ""):
                whole = limit is None or turn >= len(turn_tokens) or turn_tokens[turn] < limit
                self.unreadable += whole
                self.cut += not whole
            elif name not in tools:
                self.unknown += 1
                self.names[without_known(name)] += 1

    def metrics(self) -> dict[str, Json]:
        """The keys `calls/...` of a step, without the names."""
        return {
            "calls/unknown": self.unknown,
            "calls/unreadable": self.unreadable,
            "calls/cut": self.cut,
            "calls/none": self.silent,
        }

    def named(self) -> str:
        """The names that were called most although no such tool is offered, each with its count."""
        return ", ".join(f"{name} ({count})" for name, count in self.names.most_common(_NAMED))

    def faults(self, limit: int | None, named: str = "") -> list[CallFault]:
        """What at least half of the calls, or of the samples, have wrong. limit: as in `add`. named: `named()`, where
        the names themselves are not known any more."""
        found = []
        offered = f"the tasks offer {', '.join(self.offered)}" if self.offered else "the tasks offer no tools"
        if self._most(self.unknown, self.calls):
            names = self.named() or named
            told = f": {names}" if names else ""
            line = f"{self.unknown} of {self.calls} calls name tools that do not exist{told}; {offered}"
            found.append(CallFault("tools_unknown", line, UNTAUGHT))
        if self._most(self.cut, self.calls):
            line = f"{self.cut} of {self.calls} calls were cut off by rollout.max_turn_tokens, which is {limit}"
            found.append(CallFault("calls_cut", line, f"set rollout.max_turn_tokens={2 * (limit or 0)}"))
        if self._most(self.unreadable, self.calls):
            line = f"{self.unreadable} of {self.calls} calls cannot be read"
            found.append(CallFault("calls_unreadable", line, UNREAD))
        if self._most(self.silent, self.samples):
            line = f"{self.silent} of {self.samples} samples call no tool; {offered}"
            found.append(CallFault("no_calls", line, UNCALLED))
        return found

    @staticmethod
    def _most(part: int, whole: int) -> bool:
        return whole >= FEW and 2 * part >= whole


TEACH = "teach it first (start: demonstrations in the recipe, docs/fine_tuning.md)"
UNTAUGHT = (
    f"this model has not learned to call the tools that stand in its prompt: {TEACH}, or hold it to their schemas "
    "(rollout.strict_calls)"
)
UNREAD = (
    "this model does not write calls as its chat template asks for: look at one (agentrl show RUN --unsolved "
    f"--limit 1), then {TEACH}"
)
UNCALLED = (
    "the reward may be earned without a tool, or this model does not know how to call one: play a task (agentrl try "
    f"RECIPE), say in the prompt when to call, or {TEACH}"
)


def count_calls(groups: Iterable[Group], limit: int | None) -> CallCounts:
    """The counts of the valid samples of a step. limit: as in `CallCounts.add`."""
    counts = CallCounts()
    for t in (t for group in groups for t in group.trajectories):
        uses = ((use.name, use.error, use.turn) for use in t.tool_uses)
        counts.add(t.tools, uses, [turn.end - turn.start for turn in t.turns], limit)
    return counts


def add_row(counts: CallCounts, row: Mapping[str, Json], limit: int | None) -> None:
    """Add a stored sample: a row with the columns `tools`, `tool_uses` and `turns`."""
    uses = ((str(use["name"]), use["error"], int(use.get("turn") or 0)) for use in row["tool_uses"] or ())
    counts.add(row["tools"] or (), uses, [turn["end"] - turn["start"] for turn in row["turns"] or ()], limit)
