"""`Request`: one turn that somebody awaits, from `generate` until its `Generation`."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from agentrl.engine.base import Generation, Sampling


@dataclass(slots=True, eq=False)
class Request:
    """`ids` is the prompt; after a retraction also what was sampled by then, which `done_ids` and `done_logprobs`
    repeat.

    slot: where it runs (None: it waits). fed: how many of `ids` the slot has computed while its prompt is being fed.
    done_versions: of the weights that sampled each of `done_ids`. last: its conversation ends with this turn.
    """

    request_id: str
    ids: npt.NDArray[np.int64]
    sampling: Sampling
    key: int
    room: int
    future: asyncio.Future[Generation]
    slot: int | None = None
    fed: int = 0
    last: bool = False
    done_ids: list[int] = field(default_factory=list)
    done_logprobs: list[float] = field(default_factory=list)
    done_versions: list[int] = field(default_factory=list)
