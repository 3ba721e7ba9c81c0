"""`StoredTurns`: an engine that says what a stored rollout said, turn by turn, and goes on from there by another."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from agentrl.engine.base import Engine, EngineError, Generation, GenerationFinish, OnTokens, Sampling
from agentrl.images import keyed
from agentrl.plugins.types import Json
from agentrl.rollout.conversation import derive
from agentrl.testing.agent import NO_LIMIT, call, plain_text
from agentrl.trajectory import Trajectory

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Spoken:
    """One stored turn."""

    before: Sequence[int] | None
    """All tokens of its conversation before it; None where they are not known."""
    ids: list[int]
    """What was sampled."""
    logprobs: list[float]
    """Of `ids`."""
    versions: list[int]
    """Of `ids`."""


def spoken_by(t: Trajectory) -> list[Spoken]:
    """The turns of a rollout, in the order in which they began."""
    found = []
    ids = keyed(t.ids, t.images)
    for turn in t.turns:
        path = _before(t, turn.start)
        span = slice(turn.start, turn.end)
        sampled = (t.ids[span].tolist(), t.logprobs[span].tolist(), t.weight_version[span].tolist())
        found.append(Spoken(ids[path].tolist(), *sampled))
    return found


def _before(t: Trajectory, start: int) -> npt.NDArray[np.int64]:
    """The indices of the tokens before a turn, in its conversation."""
    index = next((i for i, segment in enumerate(t.segments) if segment.start <= start < segment.end), -1)
    if index < 0:
        return np.arange(start)
    spans = [np.arange(t.segments[index].start, start)]
    while (index := t.segments[index].parent) >= 0:
        spans.append(np.arange(t.segments[index].start, t.segments[index].end))
    return np.concatenate(spans[::-1])


def as_typed(t: Trajectory, end: int) -> list[Spoken]:
    """The turns of a rollout whose engine gave no token ids, as a person types them. end: the id that ends
    one."""
    found = []
    for message in t.messages:
        if message["role"] == "assistant":
            ids = [*map(ord, _typed(dict(message))), end]
            found.append(Spoken(None, ids, [0.0] * len(ids), [0] * len(ids)))
    return found


def _typed(message: dict[str, Json]) -> str:
    lines = [plain_text(message["content"])] if isinstance(message.get("content"), str) and message["content"] else []
    for one in message.get("tool_calls") or ():
        name, arguments = one["function"]["name"], one["function"]["arguments"]
        lines.append(call(name, **arguments) if isinstance(arguments, dict) else f"/{name} {arguments}")
    return "\n".join(lines)


@dataclass(slots=True)
class Script:
    """What is said in a request: the first `limit` of the stored turns."""

    turns: Sequence[Spoken]
    """Stored, in the order in which they began."""
    limit: int
    """Turns of them that are said again."""
    strict: bool = False
    """Whether to stop where the conversation is not, id for id, the stored one, up to the turn after those."""
    branches: bool = False
    """Whether the rollout is a tree, whose turns are known by what stands before them."""
    number: int = 0
    """Divides the seeds of those that go on from the same turn."""
    said: set[int] = field(default_factory=set)
    """Turns that were said again."""
    gone_on: bool = False
    """Whether a turn was sampled anew."""
    stopped: str = ""
    """Why no more is said; empty where the request ended by itself."""

    def next(self, ids: Sequence[int]) -> int | None:
        """The turn that comes after `ids`; None: none does."""
        left = [index for index in range(self.limit) if index not in self.said]
        if not self.branches:
            return left[0] if left else None
        return next((index for index in left if self.turns[index].before == list(ids)), None)


class StoredTurns(Engine):
    """`seat` comes before a request is driven. inner: says what no stored turn does; None: it is aborted."""

    images = True

    def __init__(self, inner: Engine | None = None) -> None:
        self._inner = inner
        self._scripts: dict[str, Script] = {}

    def seat(self, request_id: str, script: Script) -> None:
        """Let `script` speak in a request, and in its branches."""
        self._scripts[request_id] = script

    @property
    def max_context(self) -> int:
        return NO_LIMIT if self._inner is None else self._inner.max_context

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        script = self._scripts.get(request_id) or self._scripts.get(request_id.rpartition("/")[0])
        if script is None:
            raise EngineError(f"nothing is stored for {request_id}")
        if script.stopped:
            return Generation([], [], GenerationFinish.ABORT)
        index = script.next(ids)
        if index is not None:
            return self._say(script, index, ids, sampling)
        if script.branches and len(script.said) < script.limit:
            return self._stop(script, _unlike(len(script.said)))
        if self._inner is None:
            return self._stop(script, "it goes on here, and no further turn is stored")
        if script.strict and not script.gone_on and script.turns[script.limit].before != list(ids):
            return self._stop(script, _unlike(script.limit))
        script.gone_on = True
        seed = None if sampling.seed is None else derive(sampling.seed, "continue", script.number)
        return await self._inner.generate(ids, replace(sampling, seed=seed), request_id)

    def _say(self, script: Script, index: int, ids: Sequence[int], sampling: Sampling) -> Generation:
        turn = script.turns[index]
        if script.strict and turn.before != list(ids):
            return self._stop(script, _unlike(index))
        if len(turn.ids) > sampling.max_tokens:
            return self._stop(script, f"turn {index + 1} has no room any more")
        script.said.add(index)
        ended = not sampling.stop_ids or (turn.ids[-1:] and turn.ids[-1] in sampling.stop_ids)
        finish = GenerationFinish.STOP if ended else GenerationFinish.LENGTH
        return Generation(list(turn.ids), list(turn.logprobs), finish, list(turn.versions))

    def _stop(self, script: Script, why: str) -> Generation:
        script.stopped = why
        return Generation([], [], GenerationFinish.ABORT)

    def fork(self, request_id: str, others: Sequence[str]) -> None:
        if self._inner is not None:
            self._inner.fork(request_id, others)

    def finish(self, request_id: str) -> None:
        if self._inner is not None:
            self._inner.finish(request_id)

    def abort(self, request_id: str | None = None) -> None:
        if self._inner is not None:
            self._inner.abort(request_id)

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()


def _unlike(turn: int) -> str:
    return f"what stands before turn {turn + 1} is not as stored"
