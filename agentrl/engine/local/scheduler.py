"""`Scheduler`: continuous batching. Each step is `plan`, then `compute` (tensors only, any thread), then `commit`.

Invariant: state changes only in `plan`, `commit` and calls between steps, all on one thread. During `compute`, requests
may be stopped and slots freed, but nothing is placed or moved, so `commit` only has to check which requests remain.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from agentrl.engine.base import Generation, GenerationFinish
from agentrl.engine.grammar import Matcher
from agentrl.engine.local.runner import Chunk, Ints, Runner, Work
from agentrl.engine.local.sampler import Choice, constrained, sample
from agentrl.engine.local.slots import Conversation, Request, Slots, common_tokens

FEED_TOKENS = 2048
"""Maximum prompt tokens computed in one step. Longer prompts take several steps, so that they do not delay decoding."""

ALIKE_TOKENS = 32
"""Tokens of a prompt that another one begins with, too, from which it waits for that one: for less, a step is lost."""

Done = tuple[Request, Generation]


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one step."""

    work: Work
    """The input of the runner."""
    feeds: tuple[tuple[Request, int], ...]
    """(request, number of its prompt tokens computed after the step) of each chunk."""
    openers: tuple[Request, ...]
    """Requests whose prompt is complete after the step."""
    slots: Ints
    """The slots whose next token is sampled: those of the rows of `work`, then those of `openers`."""
    pick: Ints | None
    """The row of the logits for each of `slots`; None: all rows, in order."""
    choice: Choice
    """The sampling parameters of each of `slots`."""
    matchers: Mapping[int, Matcher]
    """Those of `slots` that are constrained, by their index."""


class Scheduler:
    """Scheduler of requests over a runner's slots.

    max_batch: maximum number of running requests. max_context: maximum tokens of a slot. cache_bytes: maximum memory of
    all slots.
    """

    def __init__(self, runner: Runner, max_batch: int, max_context: int, cache_bytes: int) -> None:
        self.runner = runner
        self.slots = Slots(runner, max_batch, max_context, cache_bytes)
        self.waiting: deque[Request] = deque()
        """Requests without a slot, in order."""
        self.version = 0
        """The version of the weights."""
        self.forks: dict[str, tuple[str, ...]] = {}
        """By conversations that have not begun: those that may begin like it."""
        self.streaming: dict[Request, None] = {}
        """Running requests whose tokens are told as they come."""
        self._max_batch = max_batch
        self._running: dict[Request, Conversation] = {}  # in the order of admission
        self._feeding: dict[Request, list[Request]] = {}  # leader -> requests that wait for the same prompt
        self._alike: dict[Request, tuple[Conversation, int]] = {}  # leader -> whose first tokens it copies, how many

    @property
    def busy(self) -> bool:
        """Whether there is any request."""
        return bool(self.waiting or self._running)

    def requests(self) -> list[Request]:
        """All requests, running and waiting."""
        return [*self._running, *self.waiting]

    def add(self, request: Request) -> None:
        """Add a request to the end of the queue."""
        self.waiting.append(request)

    def stop(self, request: Request) -> Generation:
        """Remove a running or waiting request; return the tokens sampled so far."""
        if request in self._running:
            return self._leave(request, GenerationFinish.ABORT)
        self.waiting.remove(request)
        versions, allowed = self._versions(request, 0), _allowed(request)
        return Generation(request.done_ids, request.done_logprobs, GenerationFinish.ABORT, versions, allowed=allowed)

    def cancel(self, request: Request) -> None:
        """Remove a request that is no longer awaited, unless a step has just finished it."""
        if request in self._running or request in self.waiting:
            self.stop(request)

    def finish(self, request_id: str) -> None:
        """End a conversation: free its slot now, or when its running turn ends."""
        self.forks.pop(request_id, None)
        c = self.slots.by_id.get(request_id)
        if c is not None and c.running is None:
            self.slots.free(c)
            return
        for request in self.waiting if c is None else [c.running]:
            if request is not None and request.request_id == request_id:
                request.last = True

    def retract(self) -> None:
        """Put all running requests back into the queue, with their sampled tokens as part of the prompt, and free all
        slots."""
        self._retract(list(self._running))
        self.slots.free_all()

    def reset(self) -> list[Request]:
        """Drop all requests and slots after an error; return the requests."""
        requests = self.requests()
        self.waiting.clear()
        self._running.clear()
        self._feeding.clear()
        self._alike.clear()
        self.streaming.clear()
        self.slots.free_all()
        self.slots.drop_memory()
        return requests

    def plan(self) -> Plan | None:
        """Admit requests and return the plan of the next step; None: there is nothing to compute."""
        self.slots.step += 1
        self._grow()
        self._admit()
        if not self.runner.any_slots:
            self.slots.compact()
        rows = self.slots.rows
        decoding = np.flatnonzero(rows.active)
        if not self.runner.any_slots:
            decoding = np.arange(int(decoding[-1]) + 1 if len(decoding) else 0)
        chunks, feeds = self._feed()
        if not len(decoding) and not chunks:
            return None
        active = rows.active[decoding]
        positions = np.where(active, rows.length[decoding], 0)
        work = Work(rows.last[decoding], positions, active, tuple(chunks), decoding)
        slots, pick, openers = decoding, None, list[Request]()
        if feeds:
            n = len(decoding)
            tail = [(n + j, r) for j, (f, end) in enumerate(feeds) if end == len(f.ids) for r in (f, *self._feeding[f])]
            openers = [r for _, r in tail]
            if [row for row, _ in tail] != list(range(n, n + len(feeds))):
                pick = np.array([*range(n), *(row for row, _ in tail)], np.int64)
            slots = np.concatenate([decoding, np.array([r.slot for r in openers], np.int64)])
            positions = np.concatenate([positions, np.array([len(r.ids) - 1 for r in openers], np.int64)])
        matchers = self._matchers(slots, work)
        return Plan(work, tuple(feeds), tuple(openers), slots, pick, rows.choice(slots, positions + 1), matchers)

    def _matchers(self, slots: Ints, work: Work) -> dict[int, Matcher]:
        """The matchers of those of `slots` that sample a token in this step, by their index."""
        if not any(request.matcher is not None for request in self._running):
            return {}
        found = {}
        for index, slot in enumerate(slots.tolist()):
            c = self.slots.at[slot]
            sampling = index >= len(work.ids) or bool(work.active[index])
            if sampling and c is not None and c.running is not None and c.running.matcher is not None:
                found[index] = c.running.matcher
        return found

    def compute(self, plan: Plan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Run the model; return token and log-prob for each of plan.slots. Uses only the runner and the plan."""
        logits = self.runner.forward(plan.work)
        if not len(plan.slots):
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        if plan.pick is not None:
            logits = logits.index_select(0, torch.from_numpy(plan.pick).to(logits.device))
        if plan.matchers:
            logits = constrained(logits, {row: matcher.bits() for row, matcher in plan.matchers.items()})
        return sample(logits, plan.choice)

    def commit(
        self, plan: Plan, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> list[tuple[Request, Generation]]:
        """Store the step's result; return the turns that ended. Raises FloatingPointError for log-probs that are not
        finite."""
        rows, n = self.slots.rows, len(plan.work.ids)
        decoding = plan.slots[:n]
        kept = np.zeros(len(plan.slots), np.bool_)  # those of plan.slots whose request is still running
        kept[:n] = plan.work.active & rows.active[decoding]
        rows.length[decoding] += kept[:n]
        self._fed(plan.feeds)
        for j, request in enumerate(plan.openers):
            if request in self._running:
                kept[n + j] = rows.active[plan.slots[n + j]] = True
        if not np.isfinite(logprobs[kept]).all():
            raise FloatingPointError("the model's logits are not finite: its weights may have diverged")
        for index, matcher in plan.matchers.items():
            if kept[index]:
                matcher.take(int(tokens[index]))
        ended = rows.append(plan.slots[kept], tokens[kept], logprobs[kept])
        return [self._end_turn(int(slot)) for slot in ended]

    def news(self) -> list[tuple[Request, list[int]]]:
        """What was sampled since it was last told, of each request that wants to know."""
        rows, found = self.slots.rows, []
        for request in self.streaming:
            assert request.slot is not None
            first, count = request.streamed - len(request.done_ids), int(rows.count[request.slot])
            if first < count:
                found.append((request, rows.ids[request.slot, first:count].tolist()))
        return found

    def _admit(self) -> None:
        """Start waiting requests in order, as long as there are slots."""
        while self.waiting and len(self._running) < self._max_batch and self._start(self.waiting[0]):
            self.waiting.popleft()
        if not self._running and self.waiting:
            raise RuntimeError(f"no room in the cache for a prompt of {len(self.waiting[0].ids)} tokens")

    def _start(self, request: Request) -> bool:
        c = self.slots.by_id.get(request.request_id)
        if c is not None and not self.slots.reserve(len(request.ids)):
            return False
        leader: Request | None = None
        if c is not None and self.slots.by_id.get(request.request_id) is c:
            self._resume(c, request)
        else:
            c = self.slots.place(request)
            if c is None:
                return False
            leader = self._open(c, request)
        c.running, request.slot, c.ids = request, c.slot, request.ids
        self._running[request] = c
        if request.on_tokens is not None:
            self.streaming[request] = None
        self.slots.rows.start(c.slot, request.sampling, request.key, request.room)
        if leader is None:
            self._feeding[request] = []
        else:
            self._feeding[leader].append(request)
        return True

    def _resume(self, c: Conversation, request: Request) -> None:
        """Start another turn of a conversation; the prefix that is already computed is not computed again."""
        request.fed = self._common(c, request.ids)
        self.slots.rows.length[c.slot] = request.fed
        if c.opening is not None and request.fed * request.ids.itemsize < len(c.opening):
            self.slots.openings.remove(c)

    def _open(self, c: Conversation, request: Request) -> Request | None:
        """Start a first turn; return the running request that computes the same prompt, if there is one to wait for."""
        others = self.forks.pop(request.request_id, ())
        rows, source = self.slots.rows, self.slots.openings.get(request.ids.tobytes())
        if source is not None and source.running in self._feeding and rows.length[source.slot] < len(request.ids):
            return source.running
        alike, common = self.slots.openings.likest(request.ids)
        if source is None and not request.done_ids:
            self.slots.openings.add(request.ids.tobytes(), c)
        rows.length[c.slot] = 0
        source, computed = self._likest(request.ids, others if source is None else (source.request_id,))
        if alike is not None and common >= computed + ALIKE_TOKENS:
            self._alike[request] = alike, common
        elif source is not None:
            self._copy(source, c, request, computed)
        return None

    def _copy(self, source: Conversation, c: Conversation, request: Request, computed: int) -> None:
        """Take the keys and values of a prompt's first tokens from another conversation, which has computed them."""
        self.runner.copy([source.slot], [c.slot], computed)
        self.slots.rows.length[c.slot] = request.fed = computed

    def _likest(self, ids: Ints, others: Iterable[str]) -> tuple[Conversation | None, int]:
        """Which conversation of `others` has computed the most of what `ids` begin with, and how much."""
        best, most = None, 0
        for other in others:
            c = self.slots.by_id.get(other)
            common = 0 if c is None else self._common(c, ids)
            if common > most:
                best, most = c, common
        return best, most

    def _common(self, c: Conversation, ids: Ints) -> int:
        """How many of `ids`, the last one apart, the slot of `c` has computed."""
        return common_tokens(c.ids[: int(self.slots.rows.length[c.slot])], ids[:-1])

    def _waits(self, request: Request) -> bool:
        """Whether a prompt waits for another one that begins alike. Where that is computed so far, it is copied."""
        if request not in self._alike:
            return False
        source, common = self._alike[request]
        there = self.slots.by_id.get(source.request_id) is source
        if there and source.running in self._feeding and self.slots.rows.length[source.slot] < common:
            return True
        del self._alike[request]
        computed = self._common(source, request.ids) if there else 0
        if computed:
            self._copy(source, self._running[request], request, computed)
        return False

    def _grow(self) -> None:
        """Make room for one more token per row; if memory is short, put the latest requests back into the queue."""
        rows = self.slots.rows
        while self._running:
            longest = max((int(rows.length[rows.active].max(initial=0)) + 1, *(len(r.ids) for r in self._feeding)))
            if self.slots.reserve(longest):
                return
            self._retract([next(reversed(self._running))])

    def _retract(self, requests: Iterable[Request]) -> None:
        """Put running requests back into the queue, with their sampled tokens as part of the prompt."""
        for request in reversed(list(requests)):
            c = self._detach(request)
            ids, logprobs = self.slots.rows.sampled(c.slot)
            request.ids = np.concatenate([request.ids, np.array(ids, np.int64)])
            request.done_ids, request.done_logprobs = request.done_ids + ids, request.done_logprobs + logprobs
            request.done_versions = request.done_versions + [self.version] * len(ids)
            request.room, request.slot, request.fed = request.room - len(ids), None, 0
            self.waiting.appendleft(request)
            self.slots.free(c)

    def _feed(self) -> tuple[list[Chunk], list[tuple[Request, int]]]:
        """The next chunks of prompts, FEED_TOKENS at most, as in `Work.chunks` and `Plan.feeds`."""
        left, chunks, feeds = FEED_TOKENS, [], []
        for request in self._feeding:
            if self._waits(request):
                continue
            end = min(len(request.ids), request.fed + left)
            if end == request.fed or request.slot is None:
                break
            chunks.append(Chunk(request.slot, request.fed, request.ids[request.fed : end]))
            feeds.append((request, end))
            left -= end - request.fed
        return chunks, feeds

    def _fed(self, feeds: Iterable[tuple[Request, int]]) -> None:
        """Record what was computed, and copy complete prompts to the requests that wait for them."""
        copies: dict[int, tuple[list[int], list[int]]] = {}
        for request, end in feeds:
            c = self._running.get(request)
            if c is None:
                continue
            self.slots.rows.length[c.slot] = request.fed = end
            if end < len(request.ids):
                continue
            followers = [self._running[f] for f in self._feeding.pop(request)]
            source, target = copies.setdefault(end, ([], []))
            source.extend([c.slot] * len(followers))
            target.extend(f.slot for f in followers)
            for f in followers:
                self.slots.rows.length[f.slot] = end
        for end, (source, target) in copies.items():
            if source:
                self.runner.copy(source, target, end)

    def _end_turn(self, slot: int) -> Done:
        """End the turn in `slot`, which sampled a stop id or used up its tokens."""
        c = self.slots.at[slot]
        assert c is not None
        assert c.running is not None
        request, rows = c.running, self.slots.rows
        stopped = bool((rows.stops[slot] == rows.last[slot]).any())
        return request, self._leave(request, GenerationFinish.STOP if stopped else GenerationFinish.LENGTH)

    def _leave(self, request: Request, finish: GenerationFinish) -> Generation:
        """End a turn; its conversation stays in the slot for the next turn, unless this was the last."""
        ids, logprobs = self.slots.rows.sampled(request.slot) if request.slot is not None else ([], [])
        c = self._detach(request)
        c.ids = np.concatenate([request.ids, np.array(ids, np.int64)])
        experts = self.runner.experts(c.slot, int(self.slots.rows.length[c.slot]))
        if request.last or not self.slots.rows.length[c.slot]:
            self.slots.free(c)
        versions = self._versions(request, len(ids))
        return Generation(
            request.done_ids + ids, request.done_logprobs + logprobs, finish, versions,
            allowed=_allowed(request), experts=experts,
        )  # fmt: skip

    def _detach(self, request: Request) -> Conversation:
        """Remove a request from its slot; the requests that wait for its prompt go back into the queue."""
        c = self._running.pop(request)
        self.streaming.pop(request, None)
        followers = self._feeding.pop(request, [])
        self._alike.pop(request, None)
        for others in self._feeding.values():
            if request in others:
                others.remove(request)
        c.running, request.slot = None, None
        self.slots.rows.active[c.slot] = False
        self.slots.rows.idle_since[c.slot] = self.slots.step
        self._retract(followers)
        return c

    def _versions(self, request: Request, new: int) -> int | list[int]:
        """The weight version of each id of a turn whose last `new` ids were sampled from the current weights, or
        one number if all ids have the current version."""
        if not request.done_versions:
            return self.version
        return request.done_versions + [self.version] * new


def _allowed(request: Request) -> list[bytes | None] | None:
    """Which ids were allowed at each token that was sampled of a turn; None where none of it was constrained."""
    matcher = request.matcher
    return matcher.allowed if matcher is not None and any(matcher.allowed) else None
