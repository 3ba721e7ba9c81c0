"""What is asked of whoever holds the trainer's weights, and what it answers. Both travel between processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class What(StrEnum):
    """What of a model is sent."""

    WHOLE = "whole"  # all weights, with the adapter merged where there is one
    BASE = "base"  # all weights, without it
    ADAPTER = "adapter"  # it alone


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """Send the weights of the trainer's step `version` to the servers at `urls`.

    mode: see PauseMode; an adapter needs no pause. again: to servers that missed an update: what is sent must still be
    that of `version`. keep: URL -> names of adapters that requests under way sample from.
    """

    urls: tuple[str, ...]
    version: int
    mode: str = "retract"
    what: What = What.WHOLE
    again: bool = False
    keep: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightResult:
    """failed: URL -> one line, for the servers that did not take all of it. adapters: URL -> the adapter that requests
    are to name from now on. said: lines for people."""

    failed: dict[str, str]
    adapters: dict[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()
