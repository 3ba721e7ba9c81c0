"""Metrics of one step of learning, as sums over micro-batches, so that they do not depend on how the step was split."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.algo.loss import LOG_RATIO_LIMIT


class MicroBatchMetrics:
    """Sums over the predicted tokens of micro-batches, ranks and updates of one role.

    tokens: packed tokens computed. predictions: sampled tokens among them, over which means are taken. samples: samples
    of the updates. loss: summed over updates. rate: learning rate of the last update. norms: the gradient norm of each
    update before clipping, not finite if the update was discarded. sums: column name -> sum over the predictions.
    largest: column name -> maximum. columns: name -> token column [T] of the update's batch: `logprobs`, float32, the
    policy's before the update, 0 where nothing was predicted; where they were computed before, there is none.

    Values of micro-batches stay on their device until `updated`: reading each one would synchronize host and device
    between two passes.
    """

    def __init__(self, rate: float = 0.0) -> None:
        self.tokens = self.predictions = self.samples = 0
        self.loss, self.rate = 0.0, rate
        self.norms: list[float] = []
        self.sums: dict[str, float] = {}
        self.largest: dict[str, float] = {}
        self.columns: dict[str, npt.NDArray[np.float32]] = {}
        self._predicted: list[tuple[npt.NDArray[np.int64], Tensor]] = []
        self._unread: list[tuple[list[str], list[str], Tensor]] = []

    def micro_batch(
        self, tokens: int, loss: Tensor, columns: Mapping[str, Tensor], largest: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add a micro-batch of `tokens` packed tokens.

        loss: its summand of the update's loss. columns: name -> one value for each prediction [N], summed in its own
        dtype. largest: the same for columns of which the maximum is kept; their values are not negative.
        """
        self.tokens += tokens
        self.predictions += len(next(iter(columns.values())))
        largest = largest or {}
        found = [loss, *(column.sum() for column in columns.values()), *(column.max() for column in largest.values())]
        self._unread.append((list(columns), list(largest), torch.stack([each.detach().double() for each in found])))

    def predicted(self, source: npt.NDArray[np.int64], logprobs: Tensor) -> None:
        """Add the log-probs [N] of a micro-batch, at the indices `source` of the token columns."""
        self._predicted.append((source, logprobs.detach()))

    def keep_logprobs(self, size: int) -> None:
        """Make the column `logprobs` of `size` tokens from what was `predicted`."""
        column = np.zeros(size, np.float32)
        if self._predicted:
            found = torch.cat([logprobs.float() for _, logprobs in self._predicted]).cpu().numpy()
            column[np.concatenate([source for source, _ in self._predicted])] = found
        self._predicted.clear()
        self.columns["logprobs"] = column

    def updated(self, norm: float, rate: float) -> None:
        """Add an optimizer update at learning rate `rate`; it was discarded if its gradient norm is not finite."""
        self._read()
        self.norms.append(norm)
        self.rate = rate

    def _read(self) -> None:
        """Read the values of the micro-batches from the device, and add them in their order."""
        numbers = iter(torch.cat([values for *_, values in self._unread]).tolist() if self._unread else ())
        for columns, largest, _ in self._unread:
            self.loss += next(numbers)
            for name in columns:
                self.sums[name] = self.sums.get(name, 0.0) + next(numbers)
            for name in largest:
                self.largest[name] = max(self.largest.get(name, 0.0), next(numbers))
        self._unread.clear()

    def merge(self, others: Sequence["MicroBatchMetrics"]) -> "MicroBatchMetrics":
        """Add the metrics of the other ranks' parts of the same update; the norm is equal on all ranks."""
        for other in others:
            self._sum(other)
        return self

    def add(self, other: "MicroBatchMetrics", samples: int = 0) -> None:
        """Add another update of the same step, by `samples` samples."""
        self._sum(other)
        self.norms += other.norms
        self.rate = other.rate
        self.samples += samples

    def _sum(self, other: "MicroBatchMetrics") -> None:
        self.tokens += other.tokens
        self.predictions += other.predictions
        self.loss += other.loss
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.largest.items():
            self.largest[name] = max(self.largest.get(name, 0.0), value)

    @property
    def finite(self) -> list[float]:
        """The gradient norms of the updates that were made."""
        return [norm for norm in self.norms if math.isfinite(norm)]

    def mean(self, name: str) -> float:
        """The mean of a column over the predictions; 0 if there are none."""
        return self.sums.get(name, 0.0) / max(1, self.predictions)

    def of_updates(self, prefix: str) -> dict[str, float]:
        """The mean loss and gradient norm of the updates, and the learning rate, as <prefix>/..."""
        return {
            f"{prefix}/loss": self.loss / max(1, len(self.norms)),
            f"{prefix}/grad_norm": sum(self.finite) / max(1, len(self.finite)),
            f"{prefix}/lr": self.rate,
        }


def mismatch_columns(difference: Tensor, factor: Tensor, *, corrected: bool) -> dict[str, Tensor]:
    """The columns that compare trainer and engine, float64 [N].

    difference: the trainer's log-prob less the engine's, [N]. factor: what each token's loss was multiplied by, [N].
    corrected: whether the loss is weighted by the mismatch at all.
    """
    d = difference.detach().double()
    weight = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    cut = ((factor - weight).abs() > 1e-3 * weight) & corrected
    return {
        "mismatch/logprob_mean": d.abs(),
        "mismatch/kl": weight - 1 - d,
        "mismatch/weight": weight,
        "mismatch/weight_squared": weight.square(),
        "mismatch/weight_mean": factor.double(),
        "mismatch/weight_cut": cut.double(),
    }


def policy_metrics(found: MicroBatchMetrics) -> dict[str, float]:
    """train/... and mismatch/... of a step; without a prediction there are no means and no mismatch.

    Let d be the trainer's log-prob minus the engine's, over the n sampled tokens that were computed, and w = exp(d).
    mismatch/logprob_mean and logprob_max are of |d|. mismatch/kl is the mean of w - 1 - d, which estimates
    KL(engine || trainer) (k3 of Schulman 2020). mismatch/ess is the effective sample size (sum w)^2 / (n sum w^2), as a
    share of n. mismatch/weight_mean is the mean factor that corrects the loss, and mismatch/weight_cut the share of
    tokens whose factor is not w, because it was truncated or masked. mismatch/experts is the share of the replayed
    choices of experts that the trainer's routers would not have made.
    """
    counts = {
        **found.of_updates("train"),
        "train/tokens": found.tokens,
        "train/samples": found.samples,
        "train/updates": len(found.finite),
        "train/updates_not_finite": len(found.norms) - len(found.finite),
    }
    if not found.predictions:
        return counts
    counts |= {name: found.mean(name) for name in found.sums if name.startswith("train/")}
    counts |= stream_metrics(found)
    if "mismatch/weight" not in found.sums:  # nothing was compared with an engine
        return counts
    weights, squares = found.sums["mismatch/weight"], found.sums["mismatch/weight_squared"]
    return {
        **counts,
        "mismatch/logprob_mean": found.mean("mismatch/logprob_mean"),
        "mismatch/logprob_max": found.largest["mismatch/logprob_max"],
        "mismatch/kl": found.mean("mismatch/kl"),
        "mismatch/ess": weights**2 / (found.predictions * squares),
        "mismatch/weight_mean": found.mean("mismatch/weight_mean"),
        "mismatch/weight_cut": found.mean("mismatch/weight_cut"),
        **({"mismatch/experts": found.mean("mismatch/experts")} if "mismatch/experts" in found.sums else {}),
    }


def stream_metrics(found: MicroBatchMetrics) -> dict[str, float]:
    """imitate/... and distill/... of a step: the tokens of each stream, and means over these."""
    metrics: dict[str, float] = {}
    for stream in ("imitate", "distill"):
        count = found.sums.get(f"{stream}/tokens", 0.0)
        own = {name: total for name, total in found.sums.items() if name.startswith(f"{stream}/")}
        metrics |= {name: total / max(1.0, count) for name, total in own.items()}
        metrics |= {f"{stream}/tokens": count} if own else {}
    return metrics


def value_columns(values: Tensor, old: Tensor, returns: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    """The columns of the critic's metrics, float64 [N]. The arguments [N] are those of `value_loss`."""
    r, error = returns.double(), (returns - old).double()
    columns = (values.detach().double(), r, clipped.double(), r**2, error, error**2)
    return dict(zip(_CRITIC_COLUMNS, columns, strict=True))


_CRITIC_COLUMNS = ("value_mean", "return_mean", "clip_fraction", "return_squared", "error", "error_squared")


def critic_metrics(found: MicroBatchMetrics) -> dict[str, float]:
    """critic/... of a step.

    critic/value_mean and clip_fraction are of the values in the updates. explained_variance is 1 - Var(R - V) / Var(R)
    over the tokens, with the values V of the beginning of the step: 1 if they predict every return R, 0 if they predict
    no more than the mean return, and 0 if all returns are equal.
    """
    value, mean, clipped, square, error, error_squared = (found.mean(name) for name in _CRITIC_COLUMNS)
    variance = square - mean**2
    return {
        **found.of_updates("critic"),
        "critic/value_mean": value,
        "critic/return_mean": mean,
        "critic/clip_fraction": clipped,
        "critic/explained_variance": 1 - (error_squared - error**2) / variance if variance > 1e-12 else 0.0,
    }
