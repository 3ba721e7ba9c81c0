"""Token streams: what a token's weights say is learned from it, alone and together, however the batch is split."""

from typing import Any

import numpy as np
import pytest
import torch
from learner_help import REWARDS, make_groups, make_model, make_recipe, weights

from agentrl.algo.distill import sampled_reverse_kl
from agentrl.compute.batch import Batch
from agentrl.learner.actor import Actor
from agentrl.learner.metrics import MicroBatchMetrics, policy_metrics

GROUPS = make_groups(REWARDS)


def batch_of(*streams: str) -> Batch:
    """All tokens of GROUPS with a random weight, which is 0 for every third, for each of the streams."""
    batch, rng = Batch.from_groups(GROUPS), np.random.default_rng(5)
    mask = batch.tokens["loss_mask"]
    drawn = {name: rng.random(len(mask)) * (rng.integers(0, 3, len(mask)) > 0) for name in ("imitate", "distill")}
    columns = {name: (drawn[name] * mask / drawn[name].sum()).astype(np.float32) for name in streams}
    teacher = -rng.random(len(mask)).astype(np.float32) * 4 * mask
    return batch.with_tokens(**columns, **({"teacher_logprobs": teacher} if "distill" in streams else {}))


def plain(batch: Batch, model: Any) -> torch.Tensor:
    """The gradient of the streams, a sequence at a time, by the formula."""
    total = torch.zeros(())
    for index in range(len(batch)):
        span = batch.span(index)
        ids = torch.from_numpy(batch.tokens["ids"][span].astype(np.int64))
        log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        column = {name: torch.from_numpy(c[span][1:]) for name, c in batch.tokens.items() if c.dtype == np.float32}
        if "imitate" in column:
            total = total - (column["imitate"] * log_p).sum()
        if "distill" in column:
            reward = column["teacher_logprobs"] - log_p.detach()
            total = total - (column["distill"] * reward * log_p).sum()
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def gradient(batch: Batch, **train: Any) -> tuple[torch.Tensor, MicroBatchMetrics]:
    actor = Actor(make_model(), make_recipe(**train))
    found: list[torch.Tensor] = []

    def step(rate: float) -> float:
        found.append(torch.cat([p.grad.flatten() for p in actor.model.parameters()]))
        return 1.0

    actor.optimizer.step = step  # type: ignore[method-assign]
    return (metrics := actor.update(batch, 1e-3), found[0])[1], metrics


@pytest.mark.parametrize("streams", [("imitate",), ("distill",), ("imitate", "distill")], ids="+".join)
@pytest.mark.parametrize("tokens", [16384, 60, 1])
def test_the_gradient_of_a_stream_is_that_of_its_formula(streams: tuple[str, ...], tokens: int) -> None:
    batch = batch_of(*streams)
    found, metrics = gradient(batch, micro_batch_tokens=tokens)
    torch.testing.assert_close(found, plain(batch, make_model().eval()), atol=1e-5, rtol=1e-4)
    named = policy_metrics(metrics)
    for stream in streams:
        assert named[f"{stream}/tokens"] == np.count_nonzero(batch.tokens[stream])


def test_imitation_needs_neither_advantages_nor_an_engine() -> None:
    batch = batch_of("imitate")
    del batch.tokens["logprobs"]  # type: ignore[attr-defined]
    found, metrics = gradient(batch)
    assert found.norm() > 0
    named = policy_metrics(metrics)
    assert not any(name.startswith("mismatch/") for name in named)
    mean = -metrics.columns["logprobs"][batch.tokens["imitate"] != 0].mean()
    assert named["imitate/loss"] == pytest.approx(mean, rel=1e-4)
    assert weights(make_model()).shape == found.shape


def test_the_sampled_form_has_the_gradient_of_the_reverse_kl_on_average() -> None:
    """By enumeration; the log-ratio itself has none."""
    torch.manual_seed(0)
    logits = torch.randn(3, 7, dtype=torch.double, requires_grad=True)
    teacher = torch.randn(3, 7, dtype=torch.double).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    p = log_p.detach().exp()
    exact = torch.autograd.grad((log_p.exp() * (log_p - teacher)).sum(), logits, retain_graph=True)[0]
    each = sampled_reverse_kl(log_p, log_p.detach(), teacher)
    sampled = torch.autograd.grad((p * each).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(sampled, exact, atol=1e-12, rtol=0)
    naive = torch.autograd.grad((p * (log_p - teacher)).sum(), logits, retain_graph=True)[0]
    assert float(naive.abs().max()) < 1e-12 < 1e-3 < float(exact.abs().max())
    old = torch.randn(3, 7, dtype=torch.double).log_softmax(-1)  # the weights moved since the tokens were sampled
    moved = torch.autograd.grad((old.exp() * sampled_reverse_kl(log_p, old, teacher)).sum(), logits)[0]
    torch.testing.assert_close(moved, exact, atol=1e-12, rtol=0)
