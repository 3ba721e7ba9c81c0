"""`LocalEngine`: the embedded engine. It shares the trainer's weights and decodes between iterations of the event loop.

A step of a tiny model takes a few milliseconds and runs in the event loop's thread: in another thread, the two would
compete for the interpreter lock at each of a step's hundred tensor calls. If steps take longer than `INLINE_SECONDS`,
they run in one worker thread, so that the event loop stays responsive.
"""

import asyncio
import copy
import secrets
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from agentrl.containment.threads import in_thread
from agentrl.engine.base import (
    ConstraintError,
    Engine,
    EngineError,
    Generation,
    GenerationFinish,
    IntArray,
    OnTokens,
    Sampling,
    checked_prompt,
    tell,
)
from agentrl.engine.grammar import Grammars, compiled_matcher, matcher_for
from agentrl.engine.local.cache import machine_bytes
from agentrl.engine.local.choose import runner_for
from agentrl.engine.local.native import native
from agentrl.engine.local.processes import RETURN_TICKS, SamplingProcesses, SharedWeights, deliver, quickest
from agentrl.engine.local.sampler import key_of
from agentrl.engine.local.scheduler import Scheduler
from agentrl.engine.local.slots import Request
from agentrl.errors import UserError
from agentrl.models.lora import layers
from agentrl.models.routing import Routing
from agentrl.models.shape import context_of
from agentrl.models.vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentrl.weights.source import WeightSource

INLINE_SECONDS = 0.025  # maximum duration of a step in the event loop's thread


class LocalEngine(Engine):
    """The embedded engine.

    model: a transformers causal language model, whose weights are read in place. max_batch: maximum number of requests
    decoded at once. max_context: maximum tokens of prompt and answer together; None: as many as the model's
    configuration allows and the cache can hold. cache_bytes: maximum memory of keys and values; None: a quarter of the
    machine's, or half of the free memory of a GPU. overlap: whether to sample while the trainer changes `model`
    (`rollout.overlap`): then the engine keeps a copy of the weights, which `update_weights` refreshes. routing_replay:
    whether to tell which experts the routers of a mixture choose. tokenizer: what constraints are read by; without one
    none is kept to. processes: how many processes sample, each with a core and its share of max_batch and cache_bytes;
    1: this one; `auto`: as many as take least, by the duration of a step, which is measured.

    Raises UserError if max_batch is less than 1, the cache cannot hold one context, or the model is not a causal
    language model.
    """

    in_process: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    tells_experts: ClassVar[bool] = True
    constrains: ClassVar[bool] = True

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int,
        max_context: int | None = None,
        cache_bytes: int | None = None,
        overlap: bool = False,
        routing_replay: bool = False,
        tokenizer: Any = None,
        processes: int | Literal["auto"] = 1,
    ) -> None:
        if max_batch < 1:
            raise UserError(f"engine.max_batch is {max_batch}; it must be at least 1")
        self._followed = model if overlap else None
        model = copy.deepcopy(model).requires_grad_(False) if overlap else model
        self._model = model
        self.runner = runner_for(model, Routing.of(model) if routing_replay else None)
        if model.get_input_embeddings().weight.device.type == "cpu":
            native()  # compiled here, not in the first step: the event loop would stand still meanwhile
        self.images = Vision.of(model)
        room = cache_bytes or _default_cache_bytes(model.get_input_embeddings().weight.device)
        alone = _one_process(model)
        count = 1 if processes == "auto" else processes
        if processes == "auto":
            if alone is None:
                contexts = room // (
                    self.runner.token_bytes * (1 + min(context_of(model.config), max_context or 1 << 62))
                )
                count = min(quickest(self.runner, max_batch), max(1, contexts))
            self.settled = {"processes": count}
        if count < 1 or (count > 1 and alone is not None):
            raise UserError(f"engine.args.processes is {count}; {alone or 'it must be at least 1'}")
        max_batch, room = -(-max_batch // count), room // count
        fits = room // self.runner.token_bytes - 1
        self._context = min(context_of(model.config), max_context or max(1, fits))
        if fits < self._context:
            raise UserError(
                f"engine: {room >> 20} MiB of cache hold {max(0, fits)} tokens, fewer than one context of "
                f"{self._context}: raise engine.args.cache_bytes or lower engine.args.max_context"
            )
        self._vocab = model.get_input_embeddings().weight.shape[0]
        self._grammars = None if tokenizer is None else Grammars(tokenizer, self._vocab)
        self.scheduler = Scheduler(self.runner, max_batch, self._context, room)
        self._requests: dict[str, Request] = {}
        self._loop: asyncio.Task[None] | None = None
        self._stepping: asyncio.Future[Any] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._step_seconds = 0.0
        self._asleep = self._closed = self._updating = False
        self._partial: str | None = None  # why the weights are not those of any one step
        self._shared: SharedWeights | None = None
        self._apart: SamplingProcesses | None = None
        if count > 1:
            self._shared = SharedWeights(model)
            self.runner.share(count)
            self.runner.refresh()
            try:
                self._apart = SamplingProcesses(count, self.scheduler, self._grammars)
            except OSError as error:
                raise UserError(f"engine.args.processes: {count} cannot be started ({error}): set 1") from error

    @property
    def max_context(self) -> int:
        return self._context

    @property
    def _paused(self) -> bool:
        return self._asleep or self._updating

    @property
    def weight_version(self) -> int:
        """The trainer's step whose weights are sampled from."""
        return self.scheduler.version

    @property
    def processes(self) -> list[int]:
        """The ids of the processes that sample, beside this one; none where this one does."""
        return self._apart.pids if self._apart is not None else []

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Sample one turn. A prompt that leaves no room for an answer gives no ids and finish `length`.

        The random numbers of a seed do not depend on the batch, nor does a compiled step (`CompiledStep`). By torch the
        last bits of the logits do (matrix products of other sizes round differently), which can change a draw within
        1e-6 of the boundary between two tokens.

        Raises EngineError for an empty prompt, ids outside the vocabulary, a second call for a running request, a
        closed engine, weights that were received only in part, or an error of the model; ConstraintError for a
        constraint that cannot be kept to.
        """
        matcher = None if self._apart is not None else await matcher_for(self._grammars, sampling)
        prompt = self._checked(ids, request_id)
        room = min(sampling.max_tokens, self._context - len(prompt))
        if room <= 0:
            return Generation([], [], GenerationFinish.LENGTH, self.weight_version)
        key = secrets.randbits(64) if sampling.seed is None else key_of(sampling.seed)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        request = Request(request_id, prompt, sampling, key, room, future, on_tokens=on_tokens, matcher=matcher)
        self._requests[request_id] = request
        if self._apart is not None:
            self._apart.add(request)
        else:
            self.scheduler.add(request)
            self._start_loop()
        try:
            return await future
        finally:
            del self._requests[request_id]
            if future.cancelled():
                (self._apart or self.scheduler).cancel(request)

    def finish(self, request_id: str) -> None:
        (self._apart or self.scheduler).finish(request_id)

    def check_constraint(self, sampling: Sampling) -> None:
        compiled_matcher(self._grammars, sampling)

    def fork(self, request_id: str, others: Sequence[str]) -> None:
        """See `Engine.fork`. Keys and values are copied as far as the tokens agree, where a slot still holds them."""
        if self._apart is not None:
            self._apart.fork(request_id, others)
        else:
            self.scheduler.forks[request_id] = tuple(others)

    def abort(self, request_id: str | None = None) -> None:
        if self._apart is not None:
            self._apart.abort(request_id)
            return
        for request in self.scheduler.requests():
            if request_id in (None, request.request_id):
                _deliver(request, self.scheduler.stop(request))

    async def update_weights(self, version: int, weights: "WeightSource | None" = None) -> None:
        """Sample from new weights: the shared ones, which have changed in place, or a copy made now.

        Running requests continue from where they are; keys and values of all conversations are computed again.

        weights: from a trainer in other processes: (name, whole tensor) by the names of the model's state dict, tied
        tensors once. They are read in a thread, where they may block; requests wait meanwhile. Raises EngineError if
        they do not fit the model, and whatever reading them raises: then nothing is sampled until a whole update has
        been received.
        """
        self._updating = True
        try:
            await self._between_steps()
            if weights is not None:
                await self._receive(version, weights)
            elif self._followed is not None:
                self._model.load_state_dict(self._followed.state_dict())
            self._partial = None
            if self._apart is not None and self._shared is not None:
                self._shared.gather()
                await self._apart.update(version)
            else:
                self.scheduler.retract()
                self.runner.refresh()
            self.scheduler.version = version
        finally:
            self._updating = False
            if self._apart is not None and not self._paused:
                await self._apart.resume()
            elif self.scheduler.busy:
                self._start_loop()

    async def _receive(self, version: int, weights: "WeightSource") -> None:
        """Copy `weights` into the model. An error also fails the requests in flight: the weights belong to no step."""
        self._partial = f"the weights of step {version} were received only in part"
        try:
            await in_thread(copy_into, self._model, weights)
        except BaseException as error:
            self._fail(error)
            raise

    async def sleep(self) -> None:
        """Pause decoding, and free the cache and the fused weights; requests wait until `wake`."""
        self._asleep = True
        if self._apart is not None:
            await self._apart.pause(asleep=True)
            return
        await self._between_steps()
        self.scheduler.retract()
        self.runner.clear()

    async def wake(self) -> None:
        self._asleep = False
        if self._apart is not None:
            await self._apart.resume()
        else:
            self._start_loop()

    async def health(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    async def close(self) -> None:
        """End running requests with finish `abort`, and free the memory and the worker thread."""
        self._closed = self._asleep = True
        if self._apart is not None:
            await self._apart.close()
            return
        await self._between_steps()
        self.abort()
        self.scheduler.reset()
        if self._thread is not None:
            self._thread.shutdown()

    def _checked(self, ids: Sequence[int], request_id: str) -> IntArray:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._partial is not None and not self._updating:
            raise EngineError(f"the local engine cannot sample: {self._partial}")
        if request_id in self._requests:
            raise EngineError(f"request {request_id!r} is already generating: one turn at a time")
        return checked_prompt(ids, request_id, self._vocab, self.images)

    def _start_loop(self) -> None:
        if not self._paused and (self._loop is None or self._loop.done()):
            self._loop = asyncio.get_running_loop().create_task(self._run(), name="agentrl-local-engine")

    async def _between_steps(self) -> None:
        if self._apart is not None:
            await self._apart.pause()
        elif self._stepping is not None:
            await asyncio.wait([self._stepping])

    async def _run(self) -> None:
        """Run steps until no request is left. An error in a step fails all requests with an EngineError; later requests
        start with an empty cache."""
        over = 0  # requests that finished in the last step
        while self.scheduler.busy and not self._paused:
            expected = len(self.scheduler.waiting) + over
            for _ in range(RETURN_TICKS if over else 1):
                await asyncio.sleep(0)
                if over and len(self.scheduler.waiting) >= expected:
                    break
            try:
                over = await self._step()
            except Exception as error:  # noqa: BLE001 - the boundary `engine`, see above
                self._fail(error)

    async def _step(self) -> int:
        """Run one step; return the number of requests that finished in it."""
        scheduler = self.scheduler
        if self._paused or not scheduler.busy:
            return 0
        plan = scheduler.plan()
        if plan is None:
            return 0
        began = perf_counter()
        if self._step_seconds < INLINE_SECONDS:
            result = scheduler.compute(plan)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, "agentrl-local-engine")
            self._stepping = asyncio.get_running_loop().run_in_executor(self._thread, scheduler.compute, plan)
            try:
                result = await self._stepping
            finally:
                self._stepping = None
        self._step_seconds += 0.2 * (perf_counter() - began - self._step_seconds)
        over = scheduler.commit(plan, *result)
        for request, new in scheduler.news() if scheduler.streaming else ():
            _tell(request, new)
        for request, generation in over:
            _deliver(request, generation)
        return len(over)

    def _fail(self, error: BaseException) -> None:
        for request in self._requests.values() if self._apart is not None else self.scheduler.reset():
            if not request.future.done():
                failure = EngineError(f"the local engine failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                request.future.set_exception(failure)


def _deliver(request: Request, generation: Generation) -> None:
    if request.matcher is not None and request.matcher.error is not None and not request.future.done():
        request.future.set_exception(ConstraintError(f"the answer: {request.matcher.error}"))
    else:
        deliver(request, generation)


def _tell(request: Request, ids: Sequence[int]) -> None:
    """Give a request's `on_tokens` what is new, before whoever awaits the request goes on."""
    if request.on_tokens is not None and ids and not request.future.done():
        request.streamed += len(ids)
        tell(request.on_tokens, ids)


@torch.no_grad()
def copy_into(model: "PreTrainedModel", weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `weights` into `model`.

    weights: (name, whole tensor) by the names of `model.state_dict()`, tied tensors under any one of their names; read
    once to the end. Raises EngineError if they do not fit or are incomplete; `model` may then hold a part of them.
    """
    if layers(model):
        raise EngineError("the engine's model has an adapter of its own, which whole weights would be merged with")
    state = model.state_dict(keep_vars=True)
    missing = {id(tensor): name for name, tensor in state.items()}
    for name, tensor in weights:
        target = state.get(name)
        if target is None:
            raise EngineError(f"the weights do not fit the engine's model: it has no {name}")
        if tensor.shape != target.shape:
            given, own = list(tensor.shape), list(target.shape)
            raise EngineError(f"the weights do not fit the engine's model: {name} is {given}, its own is {own}")
        if missing.pop(id(target), None) is None:
            raise EngineError(f"the weights do not fit the engine's model: {name} was given twice")
        target.copy_(tensor)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise EngineError(f"the weights do not fit the engine's model: {min(missing.values())} was not given{more}")


def _default_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return machine_bytes() // 4


def _one_process(model: Any) -> str | None:
    """Why only this process can sample from a model; None: others can, too."""
    if not sys.platform.startswith("linux"):
        return "more than 1 needs Linux"
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return "it must be 1 where the model is on a GPU"
    return "it must be 1 for a model that sees images, which only this process has" if Vision.of(model) else None
