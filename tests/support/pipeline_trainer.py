"""A trainer of two ranks that are no copies of each other: the two stages of a pipeline, in processes of their own over
gloo. Neither has the whole model; the controller puts together what they give out. Servers are sent it by the first
stage, which the other one hands its weights."""

import asyncio
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import aiohttp
import numpy as np
import torch
import torch.distributed as dist
from meeting import meet
from torch import Tensor
from toy_trainer import FlatOptimizer, ToyActor
from warm import started

from agentrl.addresses import authorization
from agentrl.checkpoint.pending import Pending
from agentrl.checkpoint.roles import load_roles, save_roles
from agentrl.compute.batch import Batch
from agentrl.compute.flops import Cost, RoleCost
from agentrl.learner.metrics import MicroBatchMetrics
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe
from agentrl.weights.channel import open_channel
from agentrl.weights.request import WeightRequest, WeightResult
from agentrl.weights.source import NamedTensor, WeightSource

STAGES = 2


class StageOptimizer(FlatOptimizer):
    """AdamW of one stage, clipped by the norm over both."""

    def norm(self) -> float:
        squared = torch.tensor(super().norm() ** 2)
        dist.all_reduce(squared)
        return float(squared.sqrt())


class StageWeights(WeightSource):
    """Whole tensors of both stages; sent by `publisher`, if there is one, and else by whoever reads them."""

    repeatable = True

    def __init__(self, tensors: dict[str, Tensor], publisher: "StagePublisher | None" = None) -> None:
        self._tensors, self.publisher = tensors, publisher

    def __iter__(self) -> Iterator[NamedTensor]:
        yield from self._tensors.items()


class Stage(ToyActor):
    """A half of the layers; the first stage embeds, the last one computes logits, losses and metrics."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        model, nothing = load_model(recipe.model, recipe.train.seed)[0], torch.nn.Identity()
        self.first, layers = rank == 0, model.model.layers
        self.own = [i for i in range(len(layers)) if i * STAGES // len(layers) == rank]
        for i in set(range(len(layers))) - set(self.own):
            layers[i] = nothing
        if self.first:
            model.model.norm = model.lm_head = nothing
        else:
            model.model.embed_tokens = nothing
        self.recipe, self.model, self.updates = recipe, model, 0
        self.transport, self.key, self.kind = "auto", None, "sglang"
        self.optimizer = StageOptimizer(dict(model.named_parameters()), recipe)

    def logprobs(self, batch: Batch) -> np.ndarray | None:
        if not self.first:
            return super().logprobs(batch)
        with torch.no_grad():
            for _ in self._sent(batch):
                pass
        return None

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics | None:
        if not self.first:
            return super().update(batch, rate)
        for hidden in self._sent(batch):
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        self.optimizer.step(rate)
        return None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This stage's weights and its optimizer's state."""
        return self.optimizer.views(self.optimizer.shards), self.optimizer.named_state()

    def open(self, transport: str, key: str | None, kind: str) -> None:
        self.transport, self.key, self.kind = transport, key, kind

    def publish(self, request: WeightRequest) -> WeightResult | None:
        """Both stages give the first one their weights, which sends them."""
        parts: list[dict[str, Tensor]] | None = [{}] * STAGES if self.first else None
        dist.gather_object(self.state()[0], parts)
        return None if parts is None else asyncio.run(self._send(parts[0] | parts[1], request))

    async def _send(self, weights: dict[str, Tensor], request: WeightRequest) -> WeightResult:
        if self.model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        with tempfile.TemporaryDirectory() as folder:
            async with aiohttp.ClientSession(headers=authorization(self.key)) as session:
                channel = await open_channel(
                    request.urls, session, folder=Path(folder), transport=self.transport, kind=self.kind
                )
                done = await channel.publish(request.version, StageWeights(weights), request.mode)
                await channel.close()
        return WeightResult(done.failed)

    @torch.no_grad()
    def load_state(self, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        for name, parameter in self.optimizer.named.items():
            parameter.copy_(weights[name])
        self.optimizer.load_named_state(state)

    def _sent(self, batch: Batch) -> Iterator[Tensor]:
        """The first stage's hidden states of each sample [1, L, H], sent to the last one."""
        self.optimizer.gather()
        for sample in range(len(batch)):
            ids = torch.from_numpy(batch.tokens["ids"][batch.span(sample)].astype(np.int64))
            hidden = self._layers(self.model.model.embed_tokens(ids[None]))
            dist.send(hidden.detach().contiguous(), 1)
            yield hidden

    def _samples(self, batch: Batch) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
        self.optimizer.gather()
        for sample in range(len(batch)):
            span = batch.span(sample)
            ids = torch.from_numpy(batch.tokens["ids"][span].astype(np.int64))
            sampled = np.flatnonzero(batch.tokens["loss_mask"][span])
            received = torch.empty(1, len(ids), self.model.config.hidden_size)
            dist.recv(received, 0)
            received.requires_grad_(torch.is_grad_enabled())
            logits = self.model.lm_head(self.model.model.norm(self._layers(received)))[0].float()
            log_p = (logits[sampled - 1] / (self.recipe.rollout.temperature or 1.0)).log_softmax(-1)
            chosen = log_p.gather(1, ids[sampled][:, None])[:, 0]
            yield span.start + sampled, chosen, -(log_p.exp() * log_p).sum(-1).detach()
            if received.grad is not None:
                dist.send(received.grad, 0)

    def _layers(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        rotation = self.model.model.rotary_emb(hidden, positions)
        for i in self.own:
            hidden = self.model.model.layers[i](
                hidden, attention_mask=None, position_ids=positions, position_embeddings=rotation
            )
        return hidden


def run_stage(rank: int, file: Path, recipe: Recipe, orders: Connection) -> None:
    meet(rank, file)
    stage = Stage(recipe, rank)
    while (order := pickle.loads(orders.recv_bytes())) is not None:
        method, arguments = order
        orders.send_bytes(pickle.dumps(getattr(stage, method)(*arguments)))
    dist.destroy_process_group()


class StagePublisher:
    """A `WeightPublisher` of this trainer's own make. Its servers are on CPUs, so they have no memory to release."""

    def __init__(self, roles: "PipelineRoles") -> None:
        self._roles = roles

    def open(
        self,
        folder: str | None = None,
        transport: str = "auto",
        key: str | None = None,
        kind: str = "sglang",
        nccl: str | None = None,
    ) -> None:
        self._roles.call("open", transport, key, kind)

    def publish(self, request: WeightRequest) -> WeightResult:
        return WeightResult.joined(self._roles.call("publish", request))

    def sleep(self, urls: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(urls, "this trainer shares no GPU with servers")

    def wake(self) -> dict[str, str]:
        return {}

    def make_room(self) -> None: ...

    def close(self) -> None: ...


class PipelineRoles:
    """A `RoleHost`, which is its own `ActorRole`."""

    in_process, device, description = False, "cpu", "two stages of a pipeline"
    reference = critic = reward_model = None
    teachers: ClassVar[dict[int, Any]] = {}
    pools: ClassVar[dict[str, str]] = {}

    def __init__(self, recipe: Recipe, begins: Recipe, logs: Path, *say: Any) -> None:
        self.updates, self.actor, self._publisher = 0, self, StagePublisher(self)
        self._whole = load_model(begins.model, recipe.train.seed)[0]  # for the files of a checkpoint alone
        meeting = Path(tempfile.mkdtemp(dir=logs), "meeting")
        self._stages = [started(run_stage, rank, meeting, recipe) for rank in range(STAGES)]
        self.trained = sum(p.numel() for p in self._whole.parameters())

    def logprobs(self, batch: Batch) -> Any:
        return self.call("logprobs", batch)[-1]

    def update(self, batch: Batch, rate: float) -> Any:
        self.updates += 1
        return self.call("update", batch, rate)[-1]

    @property
    def role_costs(self) -> dict[str, RoleCost]:
        return {"actor": RoleCost(Cost.of(self._whole), None, "pipeline")}

    def measure(self) -> dict[str, float]:
        return {}

    def trace(self, step: int, folder: Path) -> None: ...

    def describe(self) -> list[str]:
        return [self.description]

    def weights(self) -> Any:
        return StageWeights(self._state()[0], self._publisher)

    def save(self, folder: Path) -> Pending:
        weights, state = self._state()
        with torch.no_grad():
            for name, parameter in self._whole.named_parameters():
                parameter.copy_(weights[name])
        optimizer = SimpleNamespace(named_state=lambda: state)
        return save_roles({"actor": SimpleNamespace(model=self._whole, optimizer=optimizer)}, folder)

    def load(self, folder: Path) -> None:
        state, loaded = self._state()[1], {}
        optimizer = SimpleNamespace(named_state=lambda: state, load_named_state=loaded.update)
        load_roles({"actor": SimpleNamespace(model=self._whole, optimizer=optimizer)}, folder)
        self.call("load_state", {n: p.detach() for n, p in self._whole.named_parameters()}, loaded)

    def close(self) -> None:
        stages, self._stages = self._stages, []
        for _, orders in stages:
            orders.send_bytes(pickle.dumps(None))
        for process, _ in stages:
            process.join(60)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        (weights, state), (more, further) = self.call("state")
        return weights | more, state | further

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What each stage answers."""
        for _, orders in self._stages:
            orders.send_bytes(pickle.dumps((method, arguments)))
        return [pickle.loads(orders.recv_bytes()) for _, orders in self._stages]
