"""`ServerEngine`: an engine over servers of one kind. A request keeps its tokens whatever becomes of its server.

Pieces of an answer come as a stream; when a server fails, the request goes on elsewhere after the tokens that came, so
none is lost and none is counted twice.
"""

import asyncio
import atexit
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from agentrl.cluster.placement import Launched
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
from agentrl.engine.servers.adapters import needs_of
from agentrl.engine.servers.answer import INTERVAL, STREAM_INTERVAL, Answer, PieceEnd, Wanted, finish_of
from agentrl.engine.servers.client import LostAdapterError, RefusedError, ServerError
from agentrl.engine.servers.fleet import Fleet
from agentrl.engine.servers.kind import ServerKind
from agentrl.engine.servers.launch import Flag, launch_command, plain_flags, sizes_of
from agentrl.engine.servers.pictures import Pictures
from agentrl.engine.servers.pool import Call, Member
from agentrl.engine.servers.settings import NO_CLUSTER, Settings, settings_of
from agentrl.errors import UserError
from agentrl.images import in_image_thread
from agentrl.models.routing import ServedExperts
from agentrl.models.vision import Vision
from agentrl.plugins.types import Json
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import LoraSection
from agentrl.weights.source import WeightSource

ATTEMPTS = 8
"""Failures of one request, on any servers, before it is given up."""
EXPERTS_FLAG = "enable-return-routed-experts"
"""The flag of servers, of either kind, that tell which experts their routers choose."""
BACK_OFF_SECONDS = 0.1, 2.0
"""Time before a second try on a server that answers: shortest, longest."""


class ServerEngine(Engine):
    """model: the trainer's, whose weights the servers are given; or its shape, on the meta device, where it is trained
    in other processes. max_batch: requests in flight on one server, at most, and what a launched server decodes at
    once. model_path: what launched servers load. tokenizer: compared with that of the servers. say, phase: called with
    lines that stay, and with what goes on right now. lora: of the adapter that is trained, where `model` is a shape.
    cluster: address of a Ray cluster whose machines are to reach launched servers. devices: the GPUs of each launched
    server, neighbours, as this process counts them; empty: from the first on. dtype: of the weights on launched
    servers, which they compute in (None: that of `model`). routing_replay: whether to tell which experts the routers
    of a mixture choose. shared: whether servers share the GPUs of the trainer's `workers`, and sleep while these
    compute. The rest is described in `Settings`.
    """

    streams: ClassVar[bool] = True
    tells_experts: ClassVar[bool] = True
    constrains: ClassVar[bool] = True
    kind: ClassVar[ServerKind]
    """What the servers speak."""

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int,
        model_path: str | None = None,
        tokenizer: Any = None,
        say: Callable[[str], None] | None = None,
        phase: Callable[[str], None] | None = None,
        lora: LoraSection | None = None,
        cluster: str | None = None,
        devices: Sequence[Sequence[int]] = (),
        dtype: str | None = None,
        routing_replay: bool = False,
        shared: bool = False,
        workers: int = 1,
        urls: tuple[str, ...] | str = (),
        servers: int = 1,
        remote_nodes: int = 0,
        venv: str | None = None,
        command: str | None = None,
        flags: Mapping[str, Flag] | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 900.0,
        stall: float = 120.0,
        patience: float = 120.0,
        restarts: int = 3,
        weights: str = "auto",
        pause: str = "retract",
        log_dir: str | None = None,
    ) -> None:
        given = (urls,) if isinstance(urls, str) else urls
        self._experts = ServedExperts.of(model) if routing_replay else None
        if routing_replay and not given:
            flags, env = {EXPERTS_FLAG: True, **(flags or {})}, {**self.kind.experts_env, **(env or {})}
        settings = Settings(
            urls=tuple(url.rstrip("/") for url in given), servers=servers,
            remote_nodes=remote_nodes, venv=venv, command=command,
            flags=flags or {}, env=env or {}, start_timeout=start_timeout, stall=stall, patience=patience,
            restarts=restarts, weights=weights, pause=pause, log_dir=log_dir,
        )  # fmt: skip
        self._pause = settings.pause
        _, self._own_context = sizes_of(model)
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self.images = Vision.of(model)
        self._pictures = Pictures(model.image_input) if self.images else None
        if self.images and given and self.kind.keeps_features and not Vision(model).frozen:
            raise UserError(
                f"engine.args.urls: {self.kind.plan.program.title} keeps features of images over new weights unless "
                "it is launched otherwise: leave urls out, or leave the vision tower as it is (model.freeze=[vision])"
            )
        needs = needs_of(model, lora)
        fed = self.kind.fed(settings, sleep=shared, workers=workers)
        plan = settings.plan(self.kind.plan, model, model_path, max_batch, needs, cluster, devices, dtype, fed)
        quiet: Callable[[str], None] = lambda line: None  # noqa: E731
        self.fleet = Fleet(
            self.kind, model, tokenizer, settings, plan, needs, cluster, max_batch, say or quiet, phase or quiet, shared
        )
        self._calls: dict[str, Call] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None
        self._started = self._closed = self._asleep = False

    @classmethod
    def missing(cls, recipe: Recipe) -> list[str]:
        """See `Engine.missing`."""
        given, gpu, unable = settings_of(recipe.engine.args), torch.cuda.is_available(), cls._unable(recipe)
        if given.urls:
            return unable
        try:
            command = launch_command(given.command, given.venv, cls.kind.plan.program)
        except UserError as error:
            return [str(error), *unable]
        adapted = recipe.model.lora is not None
        if given.remote_nodes and recipe.cluster.address is None:
            unable = [NO_CLUSTER, *unable]
        if given.remote_nodes and recipe.engine.sleep and given.remote_nodes != recipe.cluster.nodes:
            unable = [
                "engine.sleep: servers that share the workers' GPUs lie on their machines: engine.args.remote_nodes is "
                f"{given.remote_nodes}, and cluster.nodes {recipe.cluster.nodes}",
                *unable,
            ]
        workers, sleep = recipe.cluster.size, recipe.engine.sleep
        if given.parts > 1 and sleep and not cls.kind.fed(given, sleep=sleep, workers=workers):
            unable = [
                "engine.sleep: each rank of a server over several machines (engine.args.flags.nnodes) gets its weights "
                f"from a worker at its place: {workers} workers are too few",
                *unable,
            ]
        refused = cls.kind.refused(given, sleep=sleep, lora=adapted, gpus=gpu, workers=workers)
        if recipe.algorithm.routing_replay and not gpu and not given.remote_nodes:
            refused.append(
                f"algorithm.routing_replay: {cls.kind.plan.program.title} tells the experts that its routers chose "
                "on a GPU alone; set engine.name=local, or leave it out"
            )
        if plain_flags(given.flags).get("quantization") and recipe.algorithm.off_policy == "none":
            refused.append(
                "algorithm.off_policy=none: servers of quantized weights (engine.args.flags.quantization) sample from "
                "another distribution than is trained; set token_tis, or leave it at auto"
            )
        return [*refused, *(cls.kind.faults(given, command) if gpu else []), *unable]

    @classmethod
    def launched(cls, args: Mapping[str, Json]) -> Launched:
        """See `Engine.launched`."""
        if args.get("urls"):
            return Launched()
        found = cls.kind.launched(int(args.get("servers", 1)), plain_flags(args.get("flags") or {}))
        return replace(found, servers=0, elsewhere=found.servers) if int(args.get("remote_nodes", 0)) else found

    @classmethod
    def _unable(cls, recipe: Recipe) -> list[str]:
        """Say where the servers cannot sample as `rollout` and `eval` want it."""
        limits = recipe.rollout
        for temperature in (limits.temperature, recipe.eval.rollout.get("temperature", 0.0)):
            why = cls._refusal(Sampling(1, temperature=temperature, top_p=limits.top_p, top_k=limits.top_k))
            if why is not None:
                return [why]
        return []

    @classmethod
    def _refusal(cls, sampling: Sampling) -> str | None:
        """Why the servers cannot sample so with the log-probs that `Generation` promises; None: they can."""
        why = cls.kind.refusal(sampling)
        return None if why is None else f"engine {cls.kind.plan.program.name}: {why}"

    @property
    def max_context(self) -> int:
        """Known once `health` was awaited."""
        return min(self._own_context, self.fleet.max_context or self._own_context)

    @property
    def weight_version(self) -> int:
        """The trainer's step whose weights the servers have."""
        return self.fleet.version

    def keep_logs(self, folder: Path) -> None:
        """Move the output of launched servers to the run's `folder`."""
        self.fleet.keep_logs(folder)

    async def health(self) -> None:
        """Start the servers, the first time. Raises UserError when that fails, EngineError when no server is left."""
        await self._ready()
        if not self.fleet.pool.up:
            raise EngineError(f"no {self.kind.plan.program.title} server is left: {self.fleet.reasons()}")

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """See `Engine.generate`. A prompt that leaves no room for an answer gives no ids and finish `length`. Raises
        EngineError on a prompt that no server may be given, and when servers failed too often.

        What is sampled under `sampling.constraint` is not `trainable`: servers do not tell which ids they allowed.
        `sampling.seed` counts only where the servers run deterministic inference (no CPU does).
        """
        if (why := self._refusal(sampling)) is not None:
            raise UserError(why)
        await self._ready()
        prompt = self._checked(ids, request_id)
        room = min(sampling.max_tokens, self.max_context - len(prompt))
        if room <= 0:
            return Generation([], [], GenerationFinish.LENGTH, self.weight_version)
        call = self._calls[request_id] = Call()
        free = sampling.constraint is None
        answer = Answer(on_tokens=on_tokens if free else None)  # what is constrained may have to begin again
        try:
            finish = await self._answer(call, prompt, answer, sampling, room, request_id)
        except RefusedError as error:
            if free:
                raise
            raise ConstraintError(f"the servers refuse the schema: {error}") from error
        finally:
            del self._calls[request_id]
        generation = answer.generation(finish, self.weight_version)
        if not free:
            if on_tokens is not None:
                tell(on_tokens, generation.ids)
            generation = replace(generation, trainable=False)
        if self._experts is None or finish is GenerationFinish.ABORT:
            return generation
        return replace(generation, experts=self._recorded(answer, len(prompt) + len(answer.ids)))

    def _recorded(self, answer: Answer, tokens: int) -> npt.NDArray[np.int16]:
        """What the routers chose for the first of `tokens` tokens (see `Generation.experts`)."""
        assert self._experts is not None
        if answer.experts is None:
            raise EngineError(f"a server does not tell which experts it chose: start it with --{EXPERTS_FLAG}")
        try:
            return self._experts.recorded(answer.experts, tokens)
        except ValueError as error:
            raise EngineError(f"a server tells of other experts than the model has: {error}") from error

    def finish(self, request_id: str) -> None:
        self.fleet.pool.forget(request_id)

    def abort(self, request_id: str | None = None) -> None:
        for name, call in self._calls.items():
            if request_id in (None, name):
                call.abort(self._in_background, self.kind.abort)

    async def update_weights(self, version: int, weights: WeightSource | None = None) -> None:
        """Send the model's weights to every server. Requests in flight wait meanwhile, and go on with the new weights,
        over keys and values computed anew or, as `engine.args.pause` says, those of the old ones;
        where only an adapter is sent they keep the old one to their end. weights: their publisher sends them, where
        `model` is only a shape. Raises UserError when no server took them."""
        await self.fleet.sync.use(weights.publisher if weights is not None else None)
        await self._ready()
        if self._asleep:
            await self.fleet.sync.make_room()
        await self.fleet.update(version, self._pause)
        self._asleep = False  # servers that took the weights are awake again

    async def sleep(self) -> None:
        """Pause, and release the memory of weights, keys and values; requests wait until new weights come. Does nothing
        where the servers sleep: one crashes when it is to release what it has released."""
        if self._asleep:
            return
        await self._ready()
        self._asleep = True
        await self.fleet.sleep()

    async def wake(self) -> None:
        """Resume after `sleep`, where no weights were sent since: servers that lost theirs stay out until an update."""
        if self._asleep:
            self._asleep = False
            await self.fleet.sync.make_room()
            await self.fleet.wake()

    async def close(self) -> None:
        """End running requests with finish `abort`, and launched servers."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        for call in self._calls.values():
            call.abort(None)
        await self.fleet.close()
        atexit.unregister(self.fleet.kill)

    async def _ready(self) -> None:
        if self._started:
            return
        if self._closed:
            raise EngineError("the engine is closed")
        if self._starting is None:
            atexit.register(self.fleet.kill)
            self._starting = asyncio.create_task(self.fleet.start())
        try:
            await self._starting
        except asyncio.CancelledError:
            await self.fleet.close()
            raise
        self._started = True

    async def _answer(
        self, call: Call, prompt: IntArray, answer: Answer, sampling: Sampling, room: int, request_id: str
    ) -> GenerationFinish:
        """Sample into `answer`, on one server after another where they fail."""
        pool, failed, failures = self.fleet.pool, None, 0
        while True:
            self.fleet.monitor()
            try:
                async with call:
                    member = await pool.take(request_id, failed)
            except TimeoutError:
                return GenerationFinish.ABORT
            try:
                end = await self._ask(call, member, prompt, answer, sampling, room)
            except RefusedError:
                raise
            except ServerError as error:
                failed, failures = member, failures + 1
                if sampling.constraint is not None:  # no server goes on in the middle of a grammar
                    answer.begin_anew()
                await self.fleet.report_failure(member, error)
                if failures >= ATTEMPTS:
                    raise
                if member.out is None:
                    await asyncio.sleep(min(BACK_OFF_SECONDS[0] * 2**failures, BACK_OFF_SECONDS[1]))
                continue
            finally:
                pool.give(member)
                answer.tell(len(answer.ids))
            member.faults = 0
            if sampling.constraint is not None and end is PieceEnd.STOP:  # the constraint lets nothing follow
                return GenerationFinish.STOP
            if (finish := finish_of(end, answer, sampling, room)) is not None:
                return finish

    async def _ask(
        self, call: Call, member: Member, prompt: IntArray, answer: Answer, sampling: Sampling, room: int
    ) -> PieceEnd:
        """Have one server continue the answer, and return why it stopped. What it sampled is in `answer` also when it
        fails."""
        ids, seen = np.concatenate([prompt, np.array(answer.ids, prompt.dtype)]), {}
        if self._pictures is not None and ids.min() < 0:
            seen = await in_image_thread(self.kind.pictured, ids.tolist(), self._pictures, member.features)
        rid = uuid.uuid4().hex  # of one length: a server aborts every id that has the given one as a prefix
        have = sure = len(answer.ids)
        answer.experts = None
        interval = INTERVAL if answer.on_tokens is None else STREAM_INTERVAL
        adapter, version = self.fleet.sync.adapter_of(member.url) or (None, self.fleet.version)
        body = self.kind.body(Wanted(ids, sampling, room - have, rid, adapter, interval), member.features) | seen
        if self._experts is not None:
            body |= self.kind.experts_body
        mark, certain = self.fleet.mark, not self.fleet.paused
        reader = self.kind.reader(answer, member.url, version, adapter is not None)
        end: PieceEnd | None = None
        with call.on(member, rid, adapter):
            try:
                async with call, aclosing(member.client.stream(self.kind.generate, body)) as payloads:
                    async for payload in payloads:
                        member.last_seen = time.monotonic()
                        end = reader.add(payload)
                        if certain and self.fleet.mark == mark:  # these ids are of the weights that it began with
                            sure = len(answer.ids)
                            answer.tell(sure)
            except TimeoutError:
                if self.fleet.mark != mark:
                    reader.give_up(sure)
                if call.aborted:
                    return PieceEnd.ABORT
                raise call.take_error() from None
            except RefusedError as error:
                if adapter is not None and self.kind.lost_adapter(error, adapter):
                    raise LostAdapterError(str(error)) from error
                raise
            except ServerError:
                if self.fleet.mark != mark:
                    reader.give_up(sure)
                raise
        if end is None:
            raise ServerError(f"{member.url}{self.kind.generate}: the answer has no end")
        return end

    def _checked(self, ids: Sequence[int], request_id: str) -> IntArray:
        """Raises EngineError for a prompt that no server may be given: an id outside the vocabulary would crash it."""
        if self._closed:
            raise EngineError("the engine is closed")
        if not self.fleet.sync.ready:
            raise EngineError("the trainer, in other processes, has sent no weights yet")
        if request_id in self._calls:
            raise EngineError(f"request {request_id!r} is already generating: one turn at a time")
        return checked_prompt(ids, request_id, self._vocabulary, self.images)

    def _in_background(self, work: Coroutine[object, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
