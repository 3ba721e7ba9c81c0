"""A trainer of another make, as docs/another_trainer.md describes one: the weights lie flat in two shards, each with an
optimizer of its own, and are put together for a pass; samples are computed one by one, without packing."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from agentrl.algo import losses
from agentrl.algo.terms import Tokens
from agentrl.checkpoint.pending import Pending
from agentrl.checkpoint.roles import load_roles, save_roles
from agentrl.compute.batch import Batch
from agentrl.compute.flops import Cost, RoleCost
from agentrl.learner.actor import loss_terms
from agentrl.learner.metrics import MicroBatchMetrics, mismatch_columns
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe
from agentrl.weights.source import NamedTensor, WeightSource

SHARDS = 2
MOMENTS = "exp_avg", "exp_avg_sq"


class FlatOptimizer:
    """AdamW over flat shards of whole parameters; its state goes by their names (`OptimizerState`)."""

    def __init__(self, named: Mapping[str, Tensor], recipe: Recipe) -> None:
        self.named, self.train, names = dict(named), recipe.train, list(named)
        self.owned = [names[i::SHARDS] for i in range(SHARDS)]
        self.shards = [torch.cat([named[name].detach().flatten() for name in own]) for own in self.owned]
        self.adam = [torch.optim.AdamW([shard], betas=recipe.train.betas, weight_decay=0.0) for shard in self.shards]
        for adam, shard in zip(self.adam, self.shards, strict=True):
            adam.state[shard] = {"step": torch.zeros(()), **{name: torch.zeros_like(shard) for name in MOMENTS}}

    def norm(self) -> float:
        return float(torch.cat([p.grad.flatten() for p in self.named.values()]).norm())

    def step(self, rate: float) -> float:
        norm = self.norm()
        for own, adam, shard in zip(self.owned, self.adam, self.shards, strict=True):
            shard.grad = torch.cat([self.named[name].grad.flatten() for name in own])
            shard.grad *= min(1.0, self.train.max_grad_norm / (norm + 1e-6))
            adam.param_groups[0]["lr"] = rate
            adam.step()
        for p in self.named.values():
            p.grad = None
        return norm

    def views(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """Parts of shards by the names of parameters, in their shapes."""
        found = {}
        for own, shard in zip(self.owned, shards, strict=True):
            parts = shard.split([self.named[name].numel() for name in own])
            found |= {name: part.view_as(self.named[name]) for name, part in zip(own, parts, strict=True)}
        return found

    @torch.no_grad()
    def gather(self) -> None:
        """Put the weights together in the module."""
        for name, value in self.views(self.shards).items():
            self.named[name].copy_(value)

    def named_state(self) -> dict[str, Tensor]:
        states = [adam.state[shard] for adam, shard in zip(self.adam, self.shards, strict=True)]
        found = {f"step.{name}": state["step"] for own, state in zip(self.owned, states, strict=True) for name in own}
        for kind in MOMENTS:
            found |= {f"{kind}.{name}": t for name, t in self.views([state[kind] for state in states]).items()}
        return found

    @torch.no_grad()
    def load_named_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.named_state().items():
            tensor.copy_(state[name])
        for name, value in self.views(self.shards).items():  # the module's weights were read before
            value.copy_(self.named[name])


class ToyActor:
    """An `ActorRole`."""

    description, adapter = "toy: flat shards, one sample at a time", ""

    def __init__(self, recipe: Recipe, model: Any) -> None:
        self.recipe, self.model = recipe, model
        self.optimizer = FlatOptimizer({n: p for n, p in model.named_parameters() if p.requires_grad}, recipe)
        self.updates = 0

    @property
    def trained(self) -> int:
        return sum(len(shard) for shard in self.optimizer.shards)

    def logprobs(self, batch: Batch) -> np.ndarray:
        found = np.zeros(int(batch.offsets[-1]), np.float32)
        with torch.no_grad():
            for place, logprobs, _ in self._samples(batch):
                found[place] = logprobs.numpy()
        return found

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        metrics, algorithm = MicroBatchMetrics(), self.recipe.algorithm
        self.updates += 1
        for place, logprobs, entropy in self._samples(batch):
            advantages, weight = (torch.from_numpy(batch.tokens[name][place]) for name in ("advantages", "weight"))
            old = logprobs.detach()
            if "old_logprobs" in batch.tokens:  # several updates a step
                old = torch.from_numpy(batch.tokens["old_logprobs"][place])
            tokens = Tokens(logprobs, old, advantages, torch.zeros(len(place), dtype=torch.long))
            terms = loss_terms(losses.bound(algorithm.loss), tokens, algorithm)
            loss = (weight * terms.loss).sum()  # the weights make it the share of the whole update
            loss.backward()
            off = old - torch.from_numpy(batch.tokens["logprobs"][place])
            mismatch = mismatch_columns(off, torch.ones_like(off), corrected=False)
            columns = {"train/entropy": entropy} | {f"train/{name}": column for name, column in terms.metrics.items()}
            metrics.micro_batch(len(place), loss, columns | mismatch, {"mismatch/logprob_max": off.abs()})
        metrics.updated(self.optimizer.step(rate), rate)
        return metrics

    def _samples(self, batch: Batch) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
        """For each sample: the places of its sampled tokens in the batch's columns, their log-probs, entropies [N]."""
        self.optimizer.gather()
        for sample in range(len(batch)):
            span = batch.span(sample)
            ids = torch.from_numpy(batch.tokens["ids"][span].astype(np.int64))
            sampled = np.flatnonzero(batch.tokens["loss_mask"][span])
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0].float()
            log_p = (logits[sampled - 1] / (self.recipe.rollout.temperature or 1.0)).log_softmax(-1)
            chosen = log_p.gather(1, ids[sampled][:, None])[:, 0]
            yield span.start + sampled, chosen, -(log_p.exp() * log_p).sum(-1).detach()


class ToyWeights(WeightSource):
    """Whole tensors by the names of the plain module, put together as they are read."""

    repeatable = True

    def __init__(self, actor: ToyActor) -> None:
        self._actor = actor

    def __iter__(self) -> Iterator[NamedTensor]:
        yield from self._actor.optimizer.views(self._actor.optimizer.shards).items()


class ToyRoles:
    """A `RoleHost`, made as `RayRoles` is."""

    in_process, device = False, "cpu"
    reference = critic = reward_model = None
    teachers: ClassVar[dict[int, Any]] = {}
    pools: ClassVar[dict[str, str]] = {}

    def __init__(self, recipe: Recipe, begins: Recipe, logs: Path, *say: Any) -> None:
        self.actor = ToyActor(recipe, load_model(begins.model, recipe.train.seed)[0])

    @property
    def role_costs(self) -> dict[str, RoleCost]:
        return {"actor": RoleCost(Cost.of(self.actor.model), None, "toy")}

    def measure(self) -> dict[str, float]:
        return {}

    def trace(self, step: int, folder: Path) -> None: ...

    def describe(self) -> list[str]:
        return [self.actor.description]

    def weights(self) -> ToyWeights:
        return ToyWeights(self.actor)

    def save(self, folder: Path) -> Pending:
        self.actor.optimizer.gather()
        return save_roles({"actor": self.actor}, folder)

    def load(self, folder: Path) -> None:
        load_roles({"actor": self.actor}, folder)

    def close(self) -> None: ...
