"""The metrics of one step, summed over micro-batches so that they do not depend on how it was split."""

import math
from collections.abc import Mapping

from torch import Tensor


class Meter:
    """Means are over the tokens that were computed; the loss is the mean over the step's updates."""

    def __init__(self) -> None:
        self.tokens = 0
        self.samples = 0
        self.predictions = 0
        self.loss = 0.0
        self.norms: list[float] = []
        self.sums: dict[str, float] = {}
        self.mismatch = 0.0
        self.mismatch_max = 0.0

    def micro_batch(self, tokens: int, loss: Tensor, measured: Mapping[str, Tensor], mismatch: Tensor) -> None:
        """`loss`: its share of the update's; measured: name -> [N]; mismatch: |trainer - engine| [N]."""
        self.tokens += tokens
        self.predictions += len(mismatch)
        self.loss += float(loss.detach())
        for name, values in measured.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(values.sum())
        self.mismatch += float(mismatch.sum())
        self.mismatch_max = max(self.mismatch_max, float(mismatch.max()))

    def updated(self, norm: float) -> None:
        """One optimizer update was made, or thrown away when `norm` is not finite."""
        self.norms.append(norm)

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
        compared = {
            "mismatch/logprob_mean": self.mismatch / self.predictions,
            "mismatch/logprob_max": self.mismatch_max,
        }
        return {**found, **means, **compared}
