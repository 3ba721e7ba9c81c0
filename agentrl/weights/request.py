"""What is asked of the processes that hold the trainer's weights, and what they answer. Both travel between
processes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, Protocol


class WeightUpdateError(Exception):
    """A server did not take what was sent to it."""


class WeightContent(StrEnum):
    """Which of a model's weights are sent."""

    WHOLE = "whole"
    """All weights, with the adapter merged where there is one."""
    BASE = "base"
    """All weights, without the adapter."""
    ADAPTER = "adapter"
    """The adapter alone."""


class ServerRank(NamedTuple):
    """Where a rank of a server that the run launched computes."""

    node: str
    """Ray's name of its machine; empty: the controller's."""
    gpu: str
    """Name of its GPU there, as CUDA_VISIBLE_DEVICES has it; of a CPU see `cpu_place`."""


def cpu_place(number: int) -> str:
    """What stands for a GPU's name where a machine has none: the place of one of its workers, or server ranks, among
    them, so that each rank of a server has a worker of its own."""
    return f"cpu {number}"


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """Send the weights of the trainer's step `version` to the servers at `urls`."""

    urls: tuple[str, ...]
    """Addresses of the servers, http://HOST:PORT."""
    version: int
    """The trainer's step."""
    mode: str = "retract"
    """What happens to requests in flight, see `PauseMode`; an adapter needs no pause."""
    content: WeightContent = WeightContent.WHOLE
    """Which weights."""
    again: bool = False
    """For servers that missed an update: what is sent must still be that of `version`."""
    keep: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """URL -> names of adapters that requests in flight sample from."""
    senders: Mapping[str, int] = field(default_factory=dict)
    """URL -> rank of the trainer that sends to it, one on its machine; rank 0 sends to the others."""
    places: Mapping[str, tuple[ServerRank, ...]] = field(default_factory=dict)
    """URL -> where each of its ranks is, as far as it is known: who has the same GPU sends to it."""
    feeders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """URL -> for each rank of the server the trainer's rank at its place, where there is one for all: the first one
    sends, and each fills buckets on its own GPU, or in its machine's memory."""

    def of(self, rank: int) -> "WeightRequest":
        """The part of it that a rank sends."""
        return replace(self, urls=tuple(url for url in self.urls if self.senders.get(url, 0) == rank))


@dataclass(frozen=True, slots=True)
class WeightResult:
    """What became of a `WeightRequest`."""

    failed: dict[str, str]
    """URL -> one line, for the servers that did not take all of it."""
    adapters: dict[str, str] = field(default_factory=dict)
    """URL -> the adapter that requests are to name from now on."""
    messages: tuple[str, ...] = ()
    """Lines for people."""

    @classmethod
    def joined(cls, parts: Iterable["WeightResult | None"]) -> "WeightResult":
        """The results of several ranks as one; None: of a rank that sent nothing."""
        whole = cls({})
        for part in parts:
            if part is not None:
                whole = cls(whole.failed | part.failed, whole.adapters | part.adapters, whole.messages + part.messages)
        return whole


class WeightPublisher(Protocol):
    """Sends weights to servers from the processes that hold them; see `publisher.Publisher`. Its calls block."""

    def open(
        self,
        folder: str | None = None,
        transport: str = "auto",
        key: str | None = None,
        kind: str = "sglang",
        nccl: str | None = None,
    ) -> None:
        """Prepare for sending; the arguments are those of `Publisher.open`."""

    def publish(self, request: WeightRequest) -> WeightResult:
        """Send the weights as `request` says; return what became of it."""

    def sleep(self, urls: Sequence[str]) -> dict[str, str]:
        """Let the servers release their memory; return the failures by URL."""

    def wake(self) -> dict[str, str]:
        """Wake the servers after `sleep`; return the failures by URL."""

    def make_room(self) -> None:
        """Free GPU memory that the trainer caches for its next step: servers on the same GPU wake up."""

    def close(self) -> None:
        """Leave process groups and remove temporary files."""
