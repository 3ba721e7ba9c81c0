"""`Trainer`: what the checks of an engine ask of whoever trains: the model of this process, or the recipe's workers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from agentrl.compute.batch import Batch
from agentrl.errors import PlainError
from agentrl.learner.roles import RoleHost
from agentrl.models.load import embeddings
from agentrl.models.lora import adapter_parameters
from agentrl.models.vision import Vision
from agentrl.weights.source import ModelWeights, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST_RATE, RATE_FACTOR, RATES = 1e-5, 4.0, 7
"""Learning rates that are tried, one after the other, until an update changes log-probs."""
CHANGE = 0.3
"""Nats, in the mean, by which the log-probs of a turn have to change."""


class Trainer(Protocol):
    """Computes with the weights that the engine is to have."""

    def logprobs(self, prompt: list[int], ids: list[int]) -> Tensor:
        """The log-probs of `ids` after `prompt`: float32 [len(ids)] on the CPU."""

    def likeliest(self, prompt: list[int], ids: list[int]) -> Tensor | None:
        """The log-probs of the likeliest tokens at each of `ids`; None: they are not told."""

    def weights(self) -> WeightSource | None:
        """The weights for the engine; None: it has a model of this process."""

    @contextmanager
    def changed(self, prompt: list[int], ids: list[int]) -> Iterator[None]:
        """Have weights inside that give `ids` after `prompt` clearly other log-probs; afterwards the former ones, where
        those are kept."""


class HereTrainer:
    """`model` in this process. received: whether the engine is given its weights as those of other processes."""

    def __init__(self, model: "PreTrainedModel", received: bool = False) -> None:
        self._model, self._received = model, received

    def logprobs(self, prompt: list[int], ids: list[int]) -> Tensor:
        """See `Trainer`."""
        return logprobs_of(self._model, prompt, ids)

    def likeliest(self, prompt: list[int], ids: list[int]) -> Tensor | None:
        """See `Trainer`."""
        return distributions(self._model, prompt, ids).amax(-1)

    def weights(self) -> WeightSource | None:
        """See `Trainer`."""
        return ModelWeights(self._model) if self._received else None

    @contextmanager
    def changed(self, prompt: list[int], ids: list[int]) -> Iterator[None]:
        """Change the adapter where there is one, else the last norm."""
        adapter = adapter_parameters(self._model)
        norms = [p for name, p in self._model.named_parameters() if "norm" in name and p.dim() == 1]
        chosen = adapter or norms[-1:] or list(self._model.parameters())[-1:]
        kept = [p.detach().clone() for p in chosen]
        given = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in chosen:
                p.copy_(0.2 * torch.randn(p.shape, generator=given) if adapter else p * 0.25)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, previous in zip(chosen, kept, strict=True):
                    p.copy_(previous)


class WorkersTrainer:
    """The roles of the recipe, sharded as it says: no process has the whole model. They forget what an update changed
    when the examination ends."""

    def __init__(self, roles: RoleHost) -> None:
        self._roles = roles

    def logprobs(self, prompt: list[int], ids: list[int]) -> Tensor:
        """See `Trainer`."""
        found = self._roles.actor.logprobs(turn_batch(prompt, ids))
        return torch.from_numpy(np.array(found[-len(ids) :]))

    def likeliest(self, prompt: list[int], ids: list[int]) -> Tensor | None:
        """See `Trainer`."""
        return None

    def weights(self) -> WeightSource | None:
        """See `Trainer`."""
        return self._roles.weights()

    @contextmanager
    def changed(self, prompt: list[int], ids: list[int]) -> Iterator[None]:
        """Make updates that teach against the turn, at growing rates. Raises PlainError: none changes it."""
        before, rate, off = self.logprobs(prompt, ids), FIRST_RATE, 0.0
        for _ in range(RATES):
            self._roles.actor.update(turn_batch(prompt, ids), rate)
            off = float((self.logprobs(prompt, ids) - before).abs().mean())
            if off > CHANGE:
                yield
                return
            rate *= RATE_FACTOR
        raise PlainError(f"updates at rates up to {rate / RATE_FACTOR:.2g} change log-probs by {off:.2g} nats only")


def turn_batch(prompt: Sequence[int], ids: Sequence[int]) -> Batch:
    """A turn as one sample, with all that an update reads: each of its tokens is to become less likely."""
    row = np.array([*prompt, *ids])
    sampled = np.arange(len(row)) >= len(prompt)
    columns = {
        "ids": row.astype(np.int32),
        "loss_mask": sampled.astype(np.uint8),
        "logprobs": np.where(sampled, -1.0, 0.0).astype(np.float32),
        "advantages": np.where(sampled, -1.0, 0.0).astype(np.float32),
        "weight": (sampled / sampled.sum()).astype(np.float32),
    }
    return Batch(
        np.array([0, len(row)]),
        columns,
        {"prompt_length": np.array([len(prompt)], np.int32), "group": np.zeros(1, int)},
    )


def logprobs_of(model: "PreTrainedModel", prompt: list[int], ids: list[int]) -> Tensor:
    """What the model gives `ids` after `prompt`, by its own forward: float32 [len(ids)] on the CPU."""
    return distributions(model, prompt, ids).gather(1, torch.tensor(ids)[:, None])[:, 0]


@torch.no_grad()
def distributions(model: "PreTrainedModel", prompt: list[int], ids: list[int]) -> Tensor:
    """The log-probs of all tokens at each of `ids` after `prompt`: float32 [len(ids), V] on the CPU. prompt:
    keyed (`agentrl.images.keyed`) where it holds images."""
    if Vision.of(model):
        logits = Vision(model).logits(np.array([*prompt, *ids]))
    else:
        row = torch.tensor([[*prompt, *ids]], device=embeddings(model).device)
        logits = model(input_ids=row, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
