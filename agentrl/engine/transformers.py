"""`TransformersEngine`: `generate` of transformers: the plain and slow reference, for models that none else serves."""

import asyncio
import copy
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from agentrl.containment.threads import in_thread
from agentrl.engine.base import (
    ConstraintError,
    Engine,
    EngineError,
    Generation,
    GenerationFinish,
    OnTokens,
    Sampling,
    checked_prompt,
)
from agentrl.engine.grammar import Grammars, Matcher, compiled_matcher, matcher_for
from agentrl.engine.local.choose import PROBE_TOKENS, TOLERANCE
from agentrl.engine.local.engine import copy_into
from agentrl.engine.local.module_runner import evaluating
from agentrl.engine.local.sampler import Choice, constrained, key_of, sample
from agentrl.errors import UserError
from agentrl.images import STORE, runs
from agentrl.models.prove import disproof
from agentrl.models.shape import context_of
from agentrl.models.vision import Vision

if TYPE_CHECKING:
    from agentrl.weights.source import WeightSource


@dataclass(eq=False, slots=True)
class _Row:
    """A request, and what was sampled of it."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    room: int
    key: int
    future: "asyncio.Future[Generation]"
    on_tokens: OnTokens | None = None
    matcher: Matcher | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    aborted: bool = False

    @property
    def finish(self) -> GenerationFinish | None:
        """Why it is done; None: it is not."""
        if self.ids and self.ids[-1] in self.sampling.stop_ids:
            return GenerationFinish.STOP
        if len(self.ids) >= self.room:
            return GenerationFinish.LENGTH
        return GenerationFinish.ABORT if self.aborted else None


class _Chooser:
    """Chooses the next token of every row, as each asks for it, and says which rows are done: `generate` is left with
    one token of finite log-prob, and takes that."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        self._rows = rows

    def choose(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [B, L], scores (the logits) [B, vocab] -> [B, vocab]: 0 at the chosen token, -inf elsewhere."""
        asked = [row.sampling for row in self._rows]
        choice = Choice(
            key=np.array([row.key for row in self._rows], np.uint64),
            position=np.array([len(row.prompt) + len(row.ids) for row in self._rows], np.int64),
            temperature=np.array([s.temperature for s in asked], np.float32),
            top_p=np.array([s.top_p for s in asked], np.float32),
            top_k=np.array([s.top_k for s in asked], np.int64),
        )
        bits = {i: r.matcher.bits() for i, r in enumerate(self._rows) if r.matcher is not None and r.finish is None}
        tokens, logprobs = sample(constrained(scores.float(), bits), choice)
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row.finish is None:
                row.ids.append(token)
                row.logprobs.append(logprob)
                if row.matcher is not None:
                    row.matcher.take(token)
                if row.on_tokens is not None:  # this is a thread of its own
                    row.future.get_loop().call_soon_threadsafe(row.on_tokens, (token,))
        chosen = torch.from_numpy(tokens).to(scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)

    def done(self, input_ids: Tensor, scores: object) -> Tensor:
        """Which rows are done, bool [B]."""
        return torch.tensor([row.finish is not None for row in self._rows], device=input_ids.device)


class TransformersEngine(Engine):
    """`model`: a transformers causal language model, its weights read in place. max_batch: requests that one call of
    `generate` extends; those that come meanwhile wait until all of it are done. Nothing is kept between turns.

    max_context: tokens of prompt and answer together (None: what the configuration says). overlap: whether it samples
    while the trainer changes `model` (`rollout.overlap`): it then keeps a copy of the weights. tokenizer: what
    constraints are read by; without one none is kept to.

    The probability of a token is that of the model's own logits, by temperature, top_p and top_k of the request alone:
    what the model's `generation_config` would change is left out, as the trainer does not know of it. A seed gives the
    tokens that it gives the engine `local`.
    """

    in_process: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    constrains: ClassVar[bool] = True

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int,
        max_context: int | None = None,
        overlap: bool = False,
        tokenizer: Any = None,
    ) -> None:
        if max_batch < 1:
            raise UserError(f"engine.max_batch is {max_batch}; it must be at least 1")
        if getattr(model.config, "is_encoder_decoder", False) or not hasattr(model, "generate"):
            raise UserError(f"model.path: {type(model).__name__} is not a causal language model that can `generate`")
        self._followed = model if overlap else None
        self._model = copy.deepcopy(model).requires_grad_(False) if overlap else model
        self._max_batch = max_batch
        own = context_of(model.config)
        self._context = min(own, max_context or own)
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._grammars = None if tokenizer is None else Grammars(tokenizer, self._vocabulary)
        self.images = Vision.of(model)
        self._ragged: bool | None = None  # whether prompts of several lengths may share a batch; None: not tried
        self._waiting: list[_Row] = []
        self._running: list[_Row] = []
        self._loop: asyncio.Task[None] | None = None
        self._version = 0
        self._still = self._closed = False
        self._partial: str | None = None  # why the weights are those of no step

    @property
    def max_context(self) -> int:
        return self._context

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """See `Engine.generate`. A prompt that leaves no room for an answer gives no ids and finish `length`. Raises
        EngineError on an empty prompt, ids outside the vocabulary, or a second call for a request that is running."""
        matcher = await matcher_for(self._grammars, sampling)
        prompt = self._checked(ids, request_id)
        room = min(sampling.max_tokens, self._context - len(prompt))
        if room <= 0:
            return Generation([], [], GenerationFinish.LENGTH, self._version)
        key = secrets.randbits(64) if sampling.seed is None else key_of(sampling.seed)
        future = asyncio.get_running_loop().create_future()
        row = _Row(request_id, prompt, sampling, room, key, future, on_tokens, matcher)
        self._waiting.append(row)
        self._start()
        try:
            return await row.future
        finally:
            row.aborted = True  # where it was cancelled
            if row in self._waiting:
                self._waiting.remove(row)

    def check_constraint(self, sampling: Sampling) -> None:
        compiled_matcher(self._grammars, sampling)

    def abort(self, request_id: str | None = None) -> None:
        for row in [*self._waiting, *self._running]:
            if request_id in (None, row.request_id):
                row.aborted = True
        for row in [row for row in self._waiting if row.aborted]:
            self._waiting.remove(row)
            _deliver(row, self._version)

    async def update_weights(self, version: int, weights: "WeightSource | None" = None) -> None:
        """Sample from the trainer's weights of step `version` once the batch that runs is done; requests wait. weights:
        as the engine `local` takes them. Raises EngineError where they do not fit, or cannot be read: nothing is
        sampled until a whole update came."""
        previous, self._still = self._still, True
        try:
            await self._at_rest()
            if weights is not None:
                self._partial = f"the weights of step {version} came only in part"
                await in_thread(copy_into, self._model, weights)
            elif self._followed is not None:
                self._model.load_state_dict(self._followed.state_dict())
            self._partial, self._version = None, version
        finally:
            self._still = previous
            self._start()

    async def sleep(self) -> None:
        """Finish the batch that runs; requests wait until `wake`. There is nothing to free: a batch's keys and values
        end with it."""
        self._still = True
        await self._at_rest()

    async def wake(self) -> None:
        self._still = False
        self._start()

    async def health(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    async def close(self) -> None:
        """Running requests end with finish `abort`."""
        self._closed = self._still = True
        self.abort()
        await self._at_rest()

    def _checked(self, ids: Sequence[int], request_id: str) -> list[int]:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._partial is not None:
            raise EngineError(f"the engine cannot sample: {self._partial}")
        if any(row.request_id == request_id for row in (*self._waiting, *self._running)):
            raise EngineError(f"request {request_id!r} is already generating: one turn at a time")
        prompt: list[int] = checked_prompt(ids, request_id, self._vocabulary, self.images).tolist()
        if min(prompt) < 0 and self._model.image_input.placeholder in prompt:
            raise EngineError(
                f"request {request_id!r}: the model sampled the placeholder of images, which transformers would take "
                "for one"
            )
        return prompt

    def _start(self) -> None:
        if self._waiting and not self._still and (self._loop is None or self._loop.done()):
            self._loop = asyncio.get_running_loop().create_task(self._run(), name="agentrl-transformers-engine")

    async def _at_rest(self) -> None:
        if self._loop is not None and not self._loop.done():
            await asyncio.wait([self._loop])

    async def _run(self) -> None:
        """Extend one batch after another until nothing waits. The boundary of `engine` errors: whatever goes wrong in
        a batch ends its requests."""
        await asyncio.sleep(0)  # requests that begin together share a batch
        while self._waiting and not self._still:
            try:
                if self._ragged is None:
                    self._ragged = await in_thread(self._may_be_ragged)
                self._running = self._next_batch()
                await in_thread(self._complete, self._running)
                for row in self._running:
                    _deliver(row, self._version)
            except Exception as error:  # noqa: BLE001 - the boundary of `engine`, see above
                self._fail(error)
            self._running = []

    def _next_batch(self) -> list[_Row]:
        """Take the rows that one call extends: the oldest, and others of its length where lengths may not differ."""
        length = len(self._waiting[0].prompt)
        fitting = [row for row in self._waiting if self._ragged or len(row.prompt) == length][: self._max_batch]
        self._waiting = [row for row in self._waiting if row not in fitting]
        return fitting

    def _fail(self, error: Exception) -> None:
        for row in self._running or self._waiting[:]:
            if row in self._waiting:
                self._waiting.remove(row)
            if not row.future.done():
                failure = EngineError(f"the engine transformers failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                row.future.set_exception(failure)

    def _complete(self, rows: Sequence[_Row]) -> None:
        """Extend the rows until all are done."""
        chooser = _Chooser(rows)
        self._generate([row.prompt for row in rows], max(row.room for row in rows), chooser.choose, chooser.done)

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int, choose: Any, done: Any) -> None:
        """Call `generate` on prompts, padded on the left, which the mask hides."""
        width = max(map(len, prompts))
        images = self._images(prompts, width)
        if images:
            prompts = [[i if i >= 0 else self._model.image_input.placeholder for i in p] for p in prompts]
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        device = self._model.get_input_embeddings().weight.device
        view = copy.copy(self._model)  # the same weights, without what `generation_config` would do to the logits
        view.generation_config = GenerationConfig()
        with evaluating(self._model):
            view.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                **{name: given.to(device) for name, given in images.items()},
                generation_config=GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0),
                logits_processor=LogitsProcessorList([choose]),
                stopping_criteria=StoppingCriteriaList([done]),
            )

    def _images(self, prompts: Sequence[Sequence[int]], width: int) -> dict[str, Tensor]:
        """What `generate` is given for the images of keyed prompts, padded to `width`; empty: there are none."""
        keys = [run.key for prompt in prompts for run in runs(np.array(prompt, np.int64))] if self.images else []
        if not keys:
            return {}
        pictures = [STORE.load(STORE.of_key(key)) for key in keys]
        made = self._model.image_input.processor(images=pictures, return_tensors="pt")
        kinds = [[0] * (width - len(p)) + [int(i < 0) for i in p] for p in prompts]
        return {**made, "mm_token_type_ids": torch.tensor(kinds)}

    def _may_be_ragged(self) -> bool:
        """Whether padding on the left changes nothing, tried on two prompts: a model whose state is not keys and
        values by position reads the padding."""
        rng = np.random.default_rng(0)
        long, short = (rng.integers(0, self._vocabulary, n).tolist() for n in (PROBE_TOKENS, PROBE_TOKENS - 5))
        tolerance = TOLERANCE.get(self._model.get_input_embeddings().weight.dtype, 0.1)
        apart = lambda: torch.cat([self._first([long]), self._first([short])])  # noqa: E731
        return disproof(lambda: self._first([long, short]), apart, tolerance) is None

    def _first(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """The log-probs of the second token after each prompt, whose first is id 0: [B, vocab]."""
        seen: list[Tensor] = []

        def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(scores.float().log_softmax(-1))
            first = torch.zeros(len(scores), 1, dtype=torch.long, device=scores.device)
            return torch.full_like(scores, -torch.inf).scatter_(1, first, 0.0)

        never = lambda input_ids, scores: torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # noqa: E731
        self._generate(prompts, 2, choose, never)
        return seen[1]


def _deliver(row: _Row, version: int) -> None:
    if not row.future.done():
        matcher, finish = row.matcher, row.finish or GenerationFinish.ABORT
        if matcher is not None and matcher.error is not None:
            row.future.set_exception(ConstraintError(f"the answer: {matcher.error}"))
            return
        allowed = matcher.allowed if matcher is not None and any(matcher.allowed) else None
        row.future.set_result(Generation(row.ids, row.logprobs, finish, version, allowed=allowed))
