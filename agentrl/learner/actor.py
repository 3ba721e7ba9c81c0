"""`Actor`: the tensor work of the policy, in one process or as one rank of several.

It receives its rank's part of a batch whose weights in the loss are fixed already, so that the gradients of
micro-batches and ranks add up to exactly that of the whole batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo import losses
from agentrl.algo.loss import bucketed_reverse_kl, kl_estimate, kl_estimator, sampled_reverse_kl
from agentrl.algo.off_policy import OffPolicy, importance_weights, sequence_mask
from agentrl.algo.terms import LossTerms, Tokens
from agentrl.compute.batch import Batch
from agentrl.compute.flops import Cost
from agentrl.compute.forward import SEQUENTIAL, Forward, choose, computed_in
from agentrl.compute.kernels import chosen_logprobs, reverse_kl, with_entropies
from agentrl.compute.micro_batches import (
    EMPTY,
    SINGLE_PROCESS,
    ProcessGroup,
    aligned_micro_batches,
    column_at,
    token_column,
)
from agentrl.compute.packing import Packed
from agentrl.errors import UserError, call_plugin
from agentrl.learner.metrics import MicroBatchMetrics, mismatch_columns
from agentrl.learner.optimizer import MuonAdamW, Optimizer
from agentrl.learner.teacher import Teacher
from agentrl.models import lora
from agentrl.models.routing import UNKNOWN, Routing
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TrainedRole(ABC):
    """What an actor and a critic share: a model that `ranks` train in place, by an optimizer of the recipe."""

    def __init__(self, recipe: Recipe, model: Any, ranks: ProcessGroup) -> None:
        self.recipe, self.model, self.ranks = recipe, model.eval(), ranks
        self.optimizer: Optimizer | MuonAdamW = self._adamw(recipe.train.weight_decay)

    def _adamw(self, weight_decay: float) -> Optimizer:
        train, offload = self.recipe.train, "optimizer" in self.recipe.cluster.offload
        return Optimizer(self.model.named_parameters(), train.betas, weight_decay, train.max_grad_norm, offload)

    @property
    def trained(self) -> int:
        """Number of trained parameters, over all ranks."""
        return sum(p.numel() for p in self.optimizer.parameters)

    @property
    def updates(self) -> int:
        """Number of optimizer updates that changed the weights, or began to."""
        return self.optimizer.begun

    def _updated(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make one optimizer update by `_loss` of this rank's micro-batches; return its metrics."""
        metrics = MicroBatchMetrics()
        for packed in aligned_micro_batches(batch, self.recipe.train.micro_batch_tokens, self.ranks):
            with self._computing(packed, batch):
                with lora.dropping_out(self.model):
                    loss = self._loss(packed, batch, metrics)
                (loss * self.ranks.size).backward()
        metrics.updated(self.optimizer.step(rate), rate)
        return metrics

    def _computing(self, packed: Packed, batch: Batch) -> AbstractContextManager[None]:
        """The context in which a row of `batch` is computed."""
        return nullcontext()

    @abstractmethod
    def _loss(self, packed: Packed, batch: Batch, metrics: MicroBatchMetrics) -> Tensor:
        """Compute the loss of a micro-batch, a summand of the update's, and add its metrics to `metrics`."""


class Actor(TrainedRole):
    """Trains `model` in place by `recipe`.

    forward: computes log-probs; None chooses the fastest exact implementation for a model that is whole in this
    process. ranks: the ranks that share the model. description: how `forward` computes, in one line.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        recipe: Recipe,
        forward: Forward | None = None,
        ranks: ProcessGroup = SINGLE_PROCESS,
        description: str = "",
    ) -> None:
        if forward is None:
            forward, description = choose(
                model.eval(),
                computed_in(recipe.model),
                recipe.model.checkpointing,
                "activations" in recipe.cluster.offload,
                recipe.model.compile,
            )
        super().__init__(recipe, model, ranks)
        self.forward, self.description = forward, description
        self.feature = Cost.of(model).feature
        """What a feature of an image costs (see `Cost.feature`)."""
        self.loss = losses.bound(recipe.algorithm.loss)
        self.temperature = recipe.rollout.temperature or 1.0
        self.off_policy = off_policy_of(recipe)
        self.teachers: dict[int, Teacher] = {}
        self.routing = Routing.of(model) if recipe.algorithm.routing_replay else None
        if self.routing is not None and self.description.startswith(SEQUENTIAL):
            raise UserError(f"algorithm.routing_replay needs packed rows, but the model is computed {self.description}")

    def begin_stage(self, weight_decay: float, muon: float | None = None) -> None:
        """Go on with a new optimizer. muon: learning rate of Muon over AdamW's, where Muon trains the matrices of the
        blocks; the model is then whole in this process."""
        begun, train = self.optimizer.begun, self.recipe.train
        if muon is None:
            self.optimizer = self._adamw(weight_decay)
        else:
            self.optimizer = MuonAdamW(self.model, muon, train.betas, weight_decay, train.max_grad_norm)
        self.optimizer.begun = begun

    def logprobs(self, batch: Batch) -> npt.NDArray[np.float32]:
        """The log-probs of the sampled tokens under the current weights, float32 [T], 0 elsewhere."""
        return self._columns(batch, 0)

    def entropies(self, batch: Batch) -> npt.NDArray[np.float32]:
        """The entropy, in nats, of what each sampled token was drawn from, float32 [T], 0 elsewhere."""
        with with_entropies():
            return self._columns(batch, 1)

    def _columns(self, batch: Batch, which: int) -> npt.NDArray[np.float32]:
        """What the forward computes as its result number `which`, float32 [T]."""
        batch = batch.with_image_cost(self.feature)

        def computed(packed: Packed) -> Tensor:
            with self._computing(packed, batch):
                found: Tensor = self.forward(packed, self.temperature)[which]
                return found

        return token_column(batch, self.recipe.train.micro_batch_tokens, self.ranks, computed)

    def update(self, batch: Batch, rate: float) -> MicroBatchMetrics:
        """Make one optimizer update at learning rate `rate` from this rank's part of the batch; return its metrics.

        The loss is the sum of token streams, each with a column of weights that are divided by their total already;
        one whose column is absent costs nothing. `weight`: the policy loss, which reads `advantages`, `logprobs` (the
        engine's) and, if there are any, `reference_logprobs`, `policy_factor` (of the policy loss alone), `chosen`, and
        the sample column `kl_coef` in place of the recipe's. `imitate`: -log p of the token. `distill`: see
        `sampled_reverse_kl`; it reads `logprobs` and `teacher_logprobs`. Without the column `old_logprobs`, log-probs
        of the differentiated pass are the old ones, and the column `logprobs` of the metrics.
        """
        metrics = self._updated(batch.with_image_cost(self.feature), rate)
        if "old_logprobs" not in batch.tokens:
            metrics.keep_logprobs(int(batch.offsets[-1]))
        return metrics

    def _computing(self, packed: Packed, batch: Batch) -> AbstractContextManager[None]:
        """Let a row be computed by the experts that the engine chose where it told."""
        experts = batch.tokens.get("experts")
        if self.routing is None or experts is None:
            return nullcontext()
        row = np.full((1, *experts.shape[1:]), UNKNOWN) if packed is EMPTY else experts[packed.where]
        return self.routing.replaying(torch.from_numpy(row.astype(np.int64)))

    def _loss(self, packed: Packed, batch: Batch, metrics: MicroBatchMetrics) -> Tensor:
        distributions = {id(t): (t.section.temperature, *t.distribution(packed)) for t in self._asked(packed, batch)}
        more_asked = "distill" in batch.tokens and (distributions or "teacher_ids" in batch.tokens)
        further = partial(self._compared, packed, batch, distributions) if more_asked else None
        logprobs, entropy, *more = self.forward(packed, self.temperature, *([further] if further else []))
        if packed is EMPTY:
            nothing: Tensor = logprobs.sum()
            return nothing
        if "old_logprobs" in batch.tokens:
            old = column_at(batch, "old_logprobs", packed, logprobs.device)
        else:
            old = logprobs.detach()
            metrics.predicted(packed.source, old)
        row = Row(packed, batch, logprobs, old, entropy, more[0] if more else {})
        streams = {"weight": self._policy, "imitate": self._imitated, "distill": self._distilled}
        found = [stream(row, row.at(name)) for name, stream in streams.items() if name in batch.tokens]
        loss = torch.stack([each for each, _ in found]).sum()
        columns = {"train/entropy": entropy.detach(), **{k: v for _, measured in found for k, v in measured.items()}}
        if self.routing is not None and "experts" in batch.tokens:
            columns["mismatch/experts"] = self.routing.differing()[torch.from_numpy(packed.predict)].to(logprobs.device)
        mismatch_mean = columns.get("mismatch/logprob_mean")
        largest = {} if mismatch_mean is None else {"mismatch/logprob_max": mismatch_mean}
        metrics.micro_batch(len(packed.ids), loss, columns, largest)
        return loss

    def _policy(self, row: "Row", weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the policy loss with its KL and entropy terms, and what is measured by token."""
        algorithm = self.recipe.algorithm
        chosen = row.at("chosen") if "chosen" in row.batch.tokens else None
        tokens = Tokens(row.logprobs, row.old, row.at("advantages"), row.sample, chosen)
        terms = loss_terms(self.loss, tokens, algorithm)
        factor, mismatch = self._factor(row)
        each = terms.loss * factor
        if "policy_factor" in row.batch.tokens:
            each = each * row.at("policy_factor")
        measured = {f"train/{name}": column for name, column in terms.metrics.items()}
        if (most := algorithm.off_policy_mask) is not None:
            mask = sequence_mask(row.logprobs, row.at("logprobs"), tokens.advantages, row.sample, most)
            each, measured["train/masked"] = each * mask, 1 - mask
        if "reference_logprobs" in row.batch.tokens:
            pulls = algorithm.kl_in == "loss"
            estimator = kl_estimator(algorithm) if pulls else "k3"
            kl = kl_estimate(row.logprobs, row.at("reference_logprobs"), estimator, row.old)
            coefficient: Tensor | float = algorithm.kl_coef
            if "kl_coef" in row.batch.samples:
                coefficient = torch.from_numpy(row.batch.samples["kl_coef"][row.path]).to(kl.device)
            each = each + coefficient * kl if pulls else each
            measured["train/kl"] = kl.detach()
        if algorithm.entropy_coef:
            each = each - algorithm.entropy_coef * row.entropy
        return (weight * each).sum(), {**measured, **mismatch}

    def _imitated(self, row: "Row", weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighed sum of -log p, and what is measured by token."""
        wanted = weight != 0
        measured = {"imitate/loss": -row.logprobs.detach() * wanted, "imitate/tokens": wanted.float()}
        return -(weight * row.logprobs).sum(), measured

    def _distilled(self, row: "Row", weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighed sum of the distillation loss, and what is measured by token."""
        theirs, wanted = row.at("teacher_logprobs"), weight != 0
        factor, mismatch = self._factor(row)
        each = sampled_reverse_kl(row.logprobs, row.old, theirs) * factor
        kl = row.logprobs.detach() - theirs
        if "top" in row.compared:
            bucketed = bucketed_reverse_kl(row.compared["top"], row.at("teacher_top"))
            chosen = row.at("teacher_top")[:, 0] > -torch.inf
            each, kl = torch.where(chosen, bucketed, each), torch.where(chosen, bucketed.detach(), kl)
        for key, (divergence, logprobs) in row.compared.get("whole", {}).items():
            chosen = self._taught_by(row.packed, row.batch, key)
            each, kl = torch.where(chosen, divergence, each), torch.where(chosen, divergence.detach(), kl)
            theirs = torch.where(chosen, logprobs, theirs)
        measured = {
            "distill/kl": kl * wanted,
            "distill/teacher_logprob": theirs * wanted,
            "distill/tokens": wanted.float(),
        }
        return (weight * each).sum(), {**measured, **mismatch}

    def _asked(self, packed: Packed, batch: Batch) -> list[Teacher]:
        """The teachers whose whole distributions are compared at a packed row. Ranks that share shards all ask
        the same."""
        if "distill" not in batch.tokens:
            return []
        distinct = list({id(teacher): teacher for teacher in self.teachers.values()}.values())
        if self.ranks.size > 1:
            return distinct
        return [each for each in distinct if bool(self._taught_by(packed, batch, id(each)).any())]

    def _taught_by(self, packed: Packed, batch: Batch, key: int) -> Tensor:
        """Which predictions of a packed row the teacher of this id is compared with, bool [N]."""
        parts = [part for part, teacher in self.teachers.items() if id(teacher) == key]
        path = np.searchsorted(batch.offsets, packed.source, side="right") - 1
        chosen = np.isin(batch.samples["part"][path], parts) & (batch.tokens["distill"][packed.source] != 0)
        return torch.from_numpy(chosen).to(next(self.model.parameters()).device)

    def _compared(
        self, packed: Packed, batch: Batch, distributions: Mapping[int, Any],
        states: Tensor, head: Tensor | None, bias: Tensor | None,
    ) -> dict[str, Any]:  # fmt: skip
        """`top`, the log-probs [N, K] of the teachers' likeliest tokens, and `whole`: by the id of a teacher,
        the divergence from it and its log-probs of the sampled tokens, [N] each."""
        found: dict[str, Any] = {"whole": {}}
        if "teacher_ids" in batch.tokens:
            ids = column_at(batch, "teacher_ids", packed, states.device)
            found["top"] = chosen_logprobs(states, head, bias, ids, self.temperature)
        for key, (temperature, logprobs, *theirs) in distributions.items():
            kl = reverse_kl((states, head, bias), self.temperature, tuple(theirs), temperature)
            found["whole"][key] = kl, logprobs
        return found

    def _factor(self, row: "Row") -> tuple[Tensor, dict[str, Tensor]]:
        """What corrects each token's loss for the engine's probabilities, [N], and what is measured of them."""
        engine = row.at("logprobs")
        factor = importance_weights(row.old, engine, row.sample, self.off_policy, self.recipe.algorithm.off_policy_cap)
        return factor, mismatch_columns(row.old - engine, factor, corrected=self.off_policy != OffPolicy.NONE)


@dataclass(frozen=True, slots=True)
class Row:
    """The predictions of a packed row, as the streams of the loss read them."""

    packed: Packed
    """The row."""
    batch: Batch
    """The batch that it is a part of."""
    logprobs: Tensor
    """float32 [N]: under the model being trained, with gradient."""
    old: Tensor
    """float32 [N]: before the step's updates."""
    entropy: Tensor
    """float32 [N], with gradient."""
    compared: Mapping[str, Any] = field(default_factory=dict)
    """See `Actor._compared`."""

    def at(self, name: str) -> Tensor:
        """The token column `name` at the predictions, [N]."""
        return column_at(self.batch, name, self.packed, self.logprobs.device)

    @property
    def path(self) -> npt.NDArray[np.int64]:
        """The sample of the batch that each prediction is one of, int64 [N]."""
        return np.searchsorted(self.batch.offsets, self.packed.source, side="right") - 1

    @property
    def sample(self) -> Tensor:
        """The rollout of each prediction, int64 [N]."""
        return torch.from_numpy(self.batch.rollouts[self.path]).to(self.logprobs.device)


def loss_terms(loss: Any, tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """Call a loss of the registry `algo.losses`, and check its result. config: the recipe's `algorithm`.

    Raises UserError: the loss raised, or returned another type or shape. Whether the result is finite is not checked
    here, since that would synchronize with the device: see `Optimizer.step`.
    """
    owner = f"algorithm.loss {config.loss.name!r}"
    found = call_plugin(owner, loss, tokens, config)
    if not isinstance(found, LossTerms):
        raise UserError(f"{owner} gave {type(found).__name__}, not LossTerms")
    if not isinstance(found.metrics, Mapping):
        raise UserError(f"{owner} gave metrics of type {type(found.metrics).__name__}, not a map")
    for name, each in {"a loss": found.loss, **{f"the metric {key!r}": m for key, m in found.metrics.items()}}.items():
        if not isinstance(each, Tensor) or each.shape != tokens.logprobs.shape:
            got = f"of shape {list(each.shape)}" if isinstance(each, Tensor) else f"of type {type(each).__name__}"
            raise UserError(f"{owner} gave {name} {got}, not a tensor [{len(tokens.logprobs)}], one for every token")
    if not found.loss.is_floating_point():
        raise UserError(f"{owner} gave a loss of {found.loss.dtype}, not of floating point")
    return found


def off_policy_of(recipe: Recipe) -> str:
    """The recipe's `algorithm.off_policy`, with `auto` resolved."""
    chosen = recipe.algorithm.off_policy
    if chosen != "auto":
        return chosen
    differ = recipe.engine.name != "local" or recipe.rollout.overlap != "none" or recipe.model.mixed
    return OffPolicy.TOKEN_TIS if differ else OffPolicy.NONE
