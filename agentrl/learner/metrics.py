"""The metrics of one step, summed over micro-batches so that they do not depend on how it was split.

What compares trainer and engine, with d = trainer's log-prob - engine's, over the sampled tokens that were computed:
mismatch/logprob_mean and logprob_max of |d|; mismatch/kl, the mean of exp(d) - 1 - d, which estimates KL(engine ||
trainer) (k3 of Schulman 2020); mismatch/ess, (sum w)^2 / (n sum w^2) with w = exp(d), the share of n tokens that so
many tokens of the trainer's own would be worth; mismatch/weight_mean, the mean factor that corrects the loss, and
mismatch/weight_cut, the share of tokens whose factor is not exp(d), because it was truncated or masked.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from agentrl.algo.loss import LOG_RATIO_LIMIT


class Meter:
    """Means are over the tokens that were computed; the loss is the mean over the step's updates."""

    def __init__(self, *, corrected: bool = False) -> None:
        """corrected: whether the loss is weighed by the mismatch at all."""
        self.corrected = corrected
        self.tokens = 0
        self.samples = 0
        self.predictions = 0
        self.loss = 0.0
        self.norms: list[float] = []
        self.sums: dict[str, float] = {}
        self.mismatch = torch.zeros(6, dtype=torch.float64)
        self.mismatch_max = 0.0

    def micro_batch(
        self, tokens: int, loss: Tensor, measured: Mapping[str, Tensor], difference: Tensor, factor: Tensor
    ) -> None:
        """`loss`: its share of the update's; measured: name -> [N], where a gradient does no harm;
        difference: d [N]; factor: of each loss [N]."""
        self.tokens += tokens
        self.predictions += len(difference)
        self.loss += float(loss.detach())
        for name, values in measured.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(values.detach().sum())
        d = difference.detach().double().cpu()
        weight = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        cut = ((factor.cpu() - weight).abs() > 1e-3 * weight) & self.corrected
        columns = (d.abs(), weight - 1 - d, weight, weight.square(), factor.cpu().double(), cut.double())
        self.mismatch += torch.stack([column.sum() for column in columns])
        self.mismatch_max = max(self.mismatch_max, float(d.abs().max()))

    def updated(self, norm: float) -> None:
        """One optimizer update was made, or thrown away when `norm` is not finite."""
        self.norms.append(norm)

    def merge(self, others: Sequence["Meter"]) -> "Meter":
        """What all ranks measured in one update, each in its share; the norm is that of the whole on every one."""
        for other in others:
            self._sum(other)
        return self

    def add(self, other: "Meter", samples: int) -> None:
        """Another update of the same step, by so many samples."""
        self._sum(other)
        self.norms += other.norms
        self.samples += samples

    def _sum(self, other: "Meter") -> None:
        self.tokens += other.tokens
        self.predictions += other.predictions
        self.loss += other.loss
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.mismatch += other.mismatch
        self.mismatch_max = max(self.mismatch_max, other.mismatch_max)

    def result(self, rate: float) -> dict[str, float]:
        """The step's metrics, by the names of metrics.jsonl. Without an update there are no means and no mismatch."""
        finite = [n for n in self.norms if math.isfinite(n)]
        found = {
            "train/loss": self.loss / max(1, len(self.norms)),
            "train/grad_norm": sum(finite) / max(1, len(finite)),
            "train/lr": rate,
            "train/tokens": self.tokens,
            "train/samples": self.samples,
            "train/updates": len(finite),
            "train/updates_not_finite": len(self.norms) - len(finite),
        }
        if not self.predictions:
            return found
        means = {f"train/{name}": total / self.predictions for name, total in self.sums.items()}
        return {**found, **means, **self._compared()}

    def _compared(self) -> dict[str, float]:
        absolute, kl, weights, squares, factors, cut = self.mismatch.tolist()
        return {
            "mismatch/logprob_mean": absolute / self.predictions,
            "mismatch/logprob_max": self.mismatch_max,
            "mismatch/kl": kl / self.predictions,
            "mismatch/ess": weights**2 / (self.predictions * squares),
            "mismatch/weight_mean": factors / self.predictions,
            "mismatch/weight_cut": cut / self.predictions,
        }
