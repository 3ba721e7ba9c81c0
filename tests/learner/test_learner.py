"""The learner: exact under every splitting, single pass and many, and whole after a resume."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_help import (
    REWARDS,
    actor_batch,
    alone,
    learned,
    make_groups,
    make_model,
    make_recipe,
    save_tokenizer,
    weights,
)
from transformers import Qwen3ForCausalLM

from agentrl.algo.terms import LossTerms, Tokens
from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.compute.batch import Batch
from agentrl.errors import UserError
from agentrl.learner.columns import overlong
from agentrl.learner.learner import Learner
from agentrl.learner.metrics import MicroBatchMetrics, mismatch_columns, policy_metrics
from agentrl.learner.optimizer import Optimizer, learning_rate
from agentrl.learner.roles import LocalRoles
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.rollout.selection import varied
from agentrl.trajectory import FinishReason, Group


def plain_loss(model: Any, groups: list[Group], aggregation: str, top_entropy: float = 1.0) -> torch.Tensor:
    """GRPO's loss at ratio 1, a sequence at a time, by the formula; of the tokens of the highest entropy alone."""
    total = sum(t.sampled_tokens for g in groups for t in g.trajectories)
    count = sum(len(g.trajectories) for g in groups)
    loss, entropies = torch.zeros(()), []
    for t in (t for group in groups for t in group.trajectories):
        log_p = model(input_ids=torch.from_numpy(t.ids.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1).detach()
        entropies.append(-(log_p.exp() * log_p).sum(-1)[torch.from_numpy(t.loss_mask[1:]).bool()])
    lowest = torch.cat(entropies).sort(descending=True).values[int(top_entropy * total) - 1]
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories], dtype=torch.double)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for t, advantage in zip(group.trajectories, advantages.float(), strict=True):
            ids = torch.from_numpy(t.ids.astype(np.int64))
            log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            chosen = log_p[torch.from_numpy(t.loss_mask[1:]).bool()]
            scale = total if aggregation == "token_mean" else count * t.sampled_tokens
            counts = entropies.pop(0) >= lowest
            loss = loss - advantage * ((chosen - chosen.detach()).exp() * counts).sum() / scale
    return loss


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_gradient_is_that_of_the_formula(aggregation: str) -> None:
    groups, model = make_groups(REWARDS), make_model().eval()
    wanted = plain_loss(model, groups, aggregation)
    wanted.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    _, metrics = learned(make_recipe({"aggregation": aggregation}), groups)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["train/loss"] == pytest.approx(float(wanted.detach()), abs=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"aggregation": "sequence_mean"},
        {"entropy_coef": 0.01},
        {"advantage": "dr_grpo"},
        {"loss": {"name": "clip_cov", "args": {"share": 0.2, "low": 0.01}}, "top_entropy": 0.4},
        {"loss": {"name": "kl_cov", "args": {"share": 0.2}}},
        {"loss": "vespo", "off_policy_mask": 0.01, "kl_coef": 0.1, "kl_estimator": "k3*"},
    ],
)
def test_micro_batches_change_nothing(algorithm: dict[str, Any]) -> None:
    groups, more = make_groups(REWARDS), {"mini_batches": 2} if "loss" in algorithm else {}
    whole, metrics = learned(make_recipe(algorithm, **more), groups)
    for tokens in (60, 1):
        split, same = learned(make_recipe(algorithm, micro_batch_tokens=tokens, **more), groups)
        torch.testing.assert_close(split, whole, atol=1e-5, rtol=1e-5)
        for name in set(metrics) - {"train/tokens"}:
            assert same[name] == pytest.approx(metrics[name], abs=1e-4, rel=1e-4), name


def test_tokens_of_low_entropy_carry_no_policy_gradient() -> None:
    """With a quarter of the tokens: the gradient of the formula, of these tokens alone."""
    groups, model = make_groups(REWARDS), make_model().eval()
    wanted = plain_loss(model, groups, "token_mean", top_entropy=0.25)
    wanted.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    _, metrics = learned(make_recipe({"top_entropy": 0.25}), groups)
    _, full = learned(make_recipe(), groups)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["train/grad_norm"] != pytest.approx(full["train/grad_norm"], rel=0.05)


def test_a_choice_is_over_the_whole_update_just_before_it() -> None:
    """A loss of a user's: what it is given, and that a wrong answer is one line."""
    seen: list[Tokens] = []

    def choose(update: Tokens, rng: np.random.Generator, config: AlgorithmSection) -> torch.Tensor:
        seen.append(update)
        return torch.ones(len(update.logprobs))

    recipe, groups = make_recipe(lr=5e-3, mini_batches=2, micro_batch_tokens=1), make_groups(REWARDS)
    learner = alone(make_model(), recipe)
    learner._choose = choose
    learner.learn(groups)
    assert sum(len(update.logprobs) for update in seen) == sum(t.sampled_tokens for g in groups for t in g.trajectories)
    torch.testing.assert_close(seen[0].logprobs, seen[0].old)
    assert (seen[1].logprobs - seen[1].old).abs().max() > 1e-3, "the second update is after the first"
    learner._choose = lambda update, rng, config: torch.ones(3)
    with pytest.raises(
        UserError, match=r"^algorithm.loss 'ppo_clip' chose no finite tensor \[\d+\], a value for every"
    ):
        learner.learn(groups)


def test_recomputed_old_logprobs_equal_those_of_the_single_pass() -> None:
    groups = make_groups(REWARDS)
    single, metrics = learned(make_recipe(), groups)
    learner = alone(make_model(), make_recipe())
    batch = learner.with_advantages(actor_batch(groups))
    again = learner.update(batch.with_tokens(old_logprobs=learner.actor.logprobs(batch)))
    torch.testing.assert_close(weights(learner.actor.model), single, atol=1e-6, rtol=1e-6)
    assert again["mismatch/logprob_mean"] == pytest.approx(metrics["mismatch/logprob_mean"], rel=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "train"),
    [({}, {}), ({}, {"micro_batch_tokens": 60}), ({}, {"mini_batches": 2}), ({"kl_coef": 0.1, "kl_in": "reward"}, {})],
)
def test_what_an_update_made_of_each_trajectory_is_kept(algorithm: dict[str, Any], train: dict[str, Any]) -> None:
    groups, recipe = make_groups(REWARDS), make_recipe(algorithm, **train)
    learner = alone(make_model(), recipe)
    if learner.reference is None and algorithm:
        learner.reference = learner.actor
    batch = Batch.from_groups(groups)
    before, expected = learner.actor.logprobs(batch), learner.with_advantages(batch).tokens["advantages"]
    learner.learn(groups)
    assert len(learner.learned) == len(batch) == 16
    for index, made in enumerate(learner.learned):
        span = batch.span(index)
        assert made.trained is (index // 4 != 1)  # the second group has no difference
        np.testing.assert_array_equal(made.advantages, expected[span])
        if made.trained or algorithm:
            assert made.logprobs is not None
            np.testing.assert_allclose(made.logprobs, before[span], atol=1e-5)
        else:
            assert made.logprobs is None


def test_mismatch_is_measured_against_the_engine() -> None:
    groups = make_groups([[1, 0]])
    learner = alone(make_model(), make_recipe())
    batch = actor_batch(groups)
    off = np.abs(learner.actor.logprobs(batch) - batch.tokens["logprobs"])[batch.tokens["loss_mask"] == 1]
    metrics = learner.learn(groups)
    assert metrics["mismatch/logprob_mean"] == pytest.approx(float(off.mean()), rel=1e-4)
    assert metrics["mismatch/logprob_max"] == pytest.approx(float(off.max()), rel=1e-4)


def test_groups_without_a_difference_train_nothing_and_still_count_in_the_mean() -> None:
    _, lone = learned(make_recipe(), make_groups(REWARDS[:1]))
    _, metrics = learned(make_recipe(), make_groups([REWARDS[0], [1, 1, 1, 1]]))
    assert metrics["train/samples"] == lone["train/samples"] == 4
    groups = make_groups([REWARDS[0], [1, 1, 1, 1]])
    share = sum(t.sampled_tokens for t in groups[0].trajectories) / sum(
        t.sampled_tokens for g in groups for t in g.trajectories
    )
    assert metrics["train/grad_norm"] == pytest.approx(lone["train/grad_norm"] * share, rel=1e-4)
    untouched, nothing = learned(make_recipe(), make_groups([[1, 1], [0, 0]]))
    assert torch.equal(untouched, weights(make_model()))
    assert nothing["train/updates"] == 0
    assert "mismatch/logprob_mean" not in nothing


def test_several_mini_batches_and_epochs_clip_against_the_policy_that_sampled() -> None:
    recipe = make_recipe(mini_batches=2, epochs=3, lr=5e-3)
    _, metrics = learned(recipe, make_groups(REWARDS))
    assert metrics["train/updates"] == 6
    assert metrics["train/clip_fraction"] > 0
    assert metrics["train/approx_kl"] > 0
    assert learned(recipe, make_groups(REWARDS))[1] == metrics


def test_the_reference_pulls_back(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    groups = make_groups(REWARDS)
    recipe = make_recipe({"kl_coef": 0.5}, path=str(tmp_path), lr=5e-3)
    learner = alone(make_model(), recipe)
    first, second = learner.learn(groups), learner.learn(groups)
    assert first["train/kl"] == pytest.approx(0, abs=1e-6)
    assert second["train/kl"] > 1e-4
    assert first["train/samples"] == 16  # the reference pulls on samples without an advantage, too
    assert alone(make_model(), make_recipe()).reference is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_becomes_the_policy_every_so_many_steps(dtype: torch.dtype, tmp_path: Path) -> None:
    recipe = with_reference(tmp_path, dtype, every=2)
    learner = alone(make_model(dtype), recipe)
    begun, policy = weights(make_model(dtype)), learner.actor.model
    for step in range(1, 5):
        metrics = learner.learn(make_groups(REWARDS, step))
        if step % 2:
            assert metrics["train/kl"] == pytest.approx(0, abs=1e-6), "before this update the two were the same"
            assert torch.equal(weights(learner.reference.model), begun)
        else:
            assert metrics["train/kl"] > 1e-5
            assert torch.equal(weights(learner.reference.model), begun := weights(policy))
    assert learner.updates == 4 + 2, "a move of the reference is a change that a step must not be saved without"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compute", ["same", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_a_moving_average_of_the_policy(dtype: torch.dtype, compute: str, tmp_path: Path) -> None:
    """By hand, in float64; moves of a thousandth of an update are not rounded away in bfloat16."""
    recipe = with_reference(tmp_path, dtype, compute, ema=0.999)
    learner = alone(make_model(dtype), recipe)
    wanted = weights(make_model(dtype)).double()
    for step in range(3):
        learner.learn(make_groups(REWARDS, step))
        wanted = 0.999 * wanted + 0.001 * weights(learner.actor.model).double()
    kept = torch.cat([master.detach().flatten() for master in learner.reference.state.named_state().values()])
    assert kept.dtype == torch.float32
    moved = (wanted - weights(make_model(dtype)).double()).abs().mean()
    assert moved > 1e-6
    assert (kept.double() - wanted).abs().mean() < 0.01 * moved
    assert torch.equal(kept.to(dtype), weights(learner.reference.model)), "it computes with what was averaged"


def with_reference(folder: Path, dtype: torch.dtype, compute: str = "same", **reference: Any) -> Recipe:
    """Of a model in `folder`, with a KL to a reference that moves."""
    make_model(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    recipe = make_recipe({"kl_coef": 0.5, "reference": reference}, path=str(folder), lr=5e-3)
    name = str(dtype).removeprefix("torch.")
    return recipe.model_copy(
        update={"model": ModelSection(path=str(folder), device="cpu", dtype=name, compute=compute)}
    )


def reinforce(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    """A user's loss, which says nothing about what it does without an advantage."""
    return LossTerms(-tokens.advantages * tokens.logprobs, {"surprise": -tokens.logprobs.detach()})


def test_a_users_loss_sees_every_sample_and_its_metrics_are_kept() -> None:
    groups = make_groups([REWARDS[0], [1, 1, 1, 1]])
    _, metrics = learned(make_recipe({"loss": f"{__name__}:reinforce"}), groups)
    assert metrics["train/samples"] == 8
    assert metrics["train/surprise"] > 0
    _, clipped = learned(make_recipe(), groups)
    assert metrics["train/grad_norm"] == pytest.approx(clipped["train/grad_norm"], rel=1e-4)


def test_learning_moves_probability_to_what_was_rewarded() -> None:
    groups = make_groups([[1, 0, 0, 0]])
    learner = alone(make_model(), make_recipe(lr=1e-2))
    batch = actor_batch(groups)
    before = learner.actor.logprobs(batch)
    for _ in range(5):
        learner.learn(groups)
    gain = [float((learner.actor.logprobs(batch) - before)[batch.span(i)].sum()) for i in range(4)]
    assert gain[0] > 0 > max(gain[1:])


def test_a_gradient_that_is_not_finite_is_thrown_away() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer([parameter], (0.9, 0.95), 0.0, 1.0)
    parameter.grad = torch.full((2, 2), math.nan)
    assert not math.isfinite(optimizer.step(0.1))
    assert torch.equal(parameter, torch.ones(2, 2))
    parameter.grad = torch.full((2, 2), 2.0)
    assert optimizer.step(0.1) == pytest.approx(4.0)
    torch.testing.assert_close(parameter, torch.full((2, 2), 0.9))


def test_small_updates_survive_in_bfloat16() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Optimizer([parameter], (0.9, 0.95), 0.0, 1.0)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(1e-4)
    torch.testing.assert_close(parameter.float(), torch.full((4, 4), 0.99), atol=4e-3, rtol=0)


def test_gradients_of_less_precision_add_up_in_float32() -> None:
    """1 + 2**-10 is 1 in bfloat16: micro-batches after the first would count for nothing."""
    parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    former, optimizer = (Optimizer([parameter], (0.9, 0.95), 0.0, 1e9) for _ in range(2))
    for share in (1.0, *[2.0**-10] * 64):
        (parameter * share).sum().backward()
        assert parameter.grad is None
    assert former.step(1e-4) == 0
    assert optimizer.step(1e-4) == pytest.approx(4 * (1 + 64 / 1024), rel=1e-6)


def test_learning_rates() -> None:
    assert [learning_rate(i, 10, 1.0, "constant", 4) for i in (0, 3, 9)] == [0.25, 1.0, 1.0]
    assert learning_rate(5, 10, 1.0, "linear") == pytest.approx(0.5)
    assert learning_rate(6, 10, 2.0, "cosine", 2) == pytest.approx(1.0)
    assert learning_rate(10, 10, 1.0, "cosine", 0, floor=0.03) == pytest.approx(0.03)
    assert learning_rate(5, 10, 1.0, "linear", floor=0.1) == pytest.approx(0.55)
    twice = [learning_rate(i, 10, 1.0, "linear", 2, 0.5, cycles=2) for i in range(11)]
    assert twice == pytest.approx([0.5, 1, 1, 0.875, 0.75, 0.625, 1, 0.875, 0.75, 0.625, 0.5])


def test_the_recipe_says_the_course_of_the_rate() -> None:
    recipe = make_recipe(schedule="cosine", warmup=0.15, min_lr_ratio=0.1, cycles=1, steps=10)
    learner = alone(make_model(), recipe)
    rates = [learner.learn(make_groups([[1.0, 0.0]]))["train/lr"] for _ in range(10)]
    assert rates == pytest.approx([learning_rate(i, 10, 1e-3, "cosine", 2, 0.1) for i in range(10)])
    assert rates[0] == pytest.approx(5e-4)
    assert min(rates[1:]) > 1e-4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path, dtype: torch.dtype) -> None:
    groups = [make_groups(REWARDS, seed) for seed in range(4)]
    recipe = make_recipe(mini_batches=2, schedule="cosine", warmup=2)
    straight = alone(make_model(dtype), recipe)
    first = LocalRoles(recipe, make_model(dtype))
    stopped = Learner(recipe, first)
    for group in groups:
        straight.learn(group)
    for group in groups[:2]:
        stopped.learn(group)
    saved = Checkpoints(tmp_path, 2).save(2, first.save, {"sampler": [1, 2]})
    second = LocalRoles(recipe, Qwen3ForCausalLM.from_pretrained(saved.path, dtype=dtype))
    second.load(saved.path)
    resumed = Learner(recipe, second)
    resumed.steps = saved.step
    for group in groups[2:]:
        resumed.learn(group)
    assert torch.equal(weights(second.model), weights(straight.actor.model))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reference", [{"every": 2}, {"ema": 0.9}])
def test_a_reference_that_moves_is_resumed(reference: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    groups = [make_groups(REWARDS, seed) for seed in range(5)]
    recipe = with_reference(tmp_path / "base", dtype, **reference)
    straight, first = alone(make_model(dtype), recipe), LocalRoles(recipe, make_model(dtype))
    stopped = Learner(recipe, first)
    rows = [straight.learn(group) for group in groups]
    for group in groups[:3]:
        stopped.learn(group)
    saved = Checkpoints(tmp_path, 2).save(3, first.save, {})
    second = LocalRoles(recipe, Qwen3ForCausalLM.from_pretrained(saved.path, dtype=dtype))
    second.load(saved.path)
    resumed = Learner(recipe, second)
    resumed.steps = saved.step
    assert [resumed.learn(group) for group in groups[3:]] == rows[3:]
    assert torch.equal(weights(second.reference.model), weights(straight.reference.model))
    assert {path.name for path in (saved.path / "trainer").iterdir() if path.is_dir()} == {"actor", "reference"}
    frozen = recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"reference": None})})
    assert LocalRoles(frozen, make_model(dtype)).roles.keys() == {"actor"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_coefficient_of_the_kl_follows_its_target(where: str, tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    keys = {"kl_coef": 0.5, "kl_in": where, "kl_horizon": 32, "kl_target": 1e-9}
    groups = make_groups(REWARDS)
    learner = alone(make_model(), make_recipe(keys, path=str(tmp_path), lr=5e-3))
    first, second = learner.learn(groups), learner.learn(groups)
    assert first["train/kl_coef"] == 0.5
    assert second["train/kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 16 / 32)), (
        "there was no KL before the first update"
    )
    assert abs(learner.kl_coef / second["train/kl_coef"] - 1) == pytest.approx(0.2 * 16 / 32, rel=1e-6)
    pulled = second["train/grad_norm"]
    other = alone(make_model(), make_recipe(keys | {"kl_target": None}, path=str(tmp_path), lr=5e-3))
    other.learn(groups)
    assert other.learn(groups)["train/grad_norm"] != pytest.approx(pulled, rel=1e-4), "it is what the update uses"
    other = alone(make_model(), make_recipe({**keys, "kl_target": None}, path=str(tmp_path), lr=5e-3))
    other.learn(groups)
    other.kl_coef, other._adaptive = second["train/kl_coef"], True
    other.recipe = learner.recipe
    assert other.learn(groups)["train/grad_norm"] == pytest.approx(pulled, rel=1e-5)


def test_passes_are_made_in_the_same_order_whatever_asks_for_them(tmp_path: Path) -> None:
    """Where the order was that of a set, it was another one in each process, and ranks that learn in step parted."""
    make_model().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    learner = alone(make_model(), make_recipe({"kl_coef": 0.1}, path=str(tmp_path)))
    batch, made = actor_batch(make_groups(REWARDS)), list[list[str]]()
    for names in (["old_logprobs", "reference_logprobs"], ["reference_logprobs", "old_logprobs"]):
        bare = replace(batch, tokens={name: batch.tokens[name] for name in batch.tokens if name not in names})
        found = learner._with_passes(bare, dict.fromkeys(names, batch.sampled > 0))
        made.append([name for name in found.tokens if name in names])
    assert made[0] == made[1] == ["old_logprobs", "reference_logprobs"]


def test_a_loss_may_measure_with_a_gradient(recwarn: pytest.WarningsRecorder) -> None:
    """A user's loss returns what it measured as it is; nothing of torch's is printed into the progress for it."""
    measured = torch.tensor([1.0, 2.0], requires_grad=True)
    metrics, mismatch = MicroBatchMetrics(), mismatch_columns(torch.zeros(2), torch.ones(2), corrected=False)
    metrics.micro_batch(2, measured.sum(), {"train/mine": measured, **mismatch}, {"mismatch/logprob_max": measured})
    metrics.updated(1.0, 0.1)
    assert policy_metrics(metrics)["train/mine"] == 1.5
    assert not [str(warning.message) for warning in recwarn if "requires_grad" in str(warning.message)]


def finished(groups: list[Group], finish: FinishReason, *which: tuple[int, int]) -> list[Group]:
    """The groups, where sample k of group i ended for that reason, for each (i, k) of `which`."""
    return [
        replace(
            group,
            trajectories=tuple(
                replace(t, finish=finish) if (i, k) in which else t for k, t in enumerate(group.trajectories)
            ),
        )
        for i, group in enumerate(groups)
    ]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("kl", [{}, {"entropy_coef": 0.1}])
def test_what_was_cut_off_is_left_out_of_the_loss_and_counts_in_the_comparison(
    aggregation: str, kl: dict[str, float]
) -> None:
    algorithm = {"aggregation": aggregation, **kl, "leave_out": ["length"]}
    cut = finished(make_groups(REWARDS), FinishReason.LENGTH, (0, 1), (2, 1), (2, 2))
    batch = Batch.from_groups(cut)
    advantages = alone(make_model(), make_recipe(algorithm)).with_advantages(batch).samples["advantage"]
    learner = alone(make_model(), make_recipe(algorithm))
    metrics = learner.learn(cut)
    assert metrics["train/left_out"] == 3
    assert [made.trained for made in learner.learned][:4] == [True, False, True, True]
    assert [made.advantages.any() for made in learner.learned][1]
    kept = np.array([t.finish is FinishReason.STOP for group in cut for t in group.trajectories])
    others = batch.with_tokens(advantages=batch.spread(advantages)).select(np.flatnonzero(kept))
    alike = alone(make_model(), make_recipe({**algorithm, "leave_out": []}))
    alike.update(others)
    torch.testing.assert_close(weights(learner.actor.model), weights(alike.actor.model), rtol=1e-5, atol=1e-7)


def test_the_overlong_penalty_rises_over_the_buffer() -> None:
    (group,) = make_groups([[1.0] * 6])
    lengths = [len(t.ids) for t in group.trajectories]
    limit = max(lengths) + 1
    found = [overlong(t, limit, 8.0) for t in group.trajectories]
    assert found == pytest.approx([min(1, max(0, (n - limit + 8) / 8)) for n in lengths])
    assert len(set(found)) > 2
    assert overlong(replace(group.trajectories[0], finish=FinishReason.LENGTH), 999, 8.0) == 1
    recipe = make_recipe({"overlong": {"buffer": 8, "factor": 0.5}, "advantage": "dr_grpo"})
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_tokens": limit})})
    learner = alone(make_model(), recipe)
    metrics = learner.learn([group])
    penalty = 0.5 * np.array(found)
    assert metrics["reward/overlong"] == pytest.approx(-penalty.mean())
    got = [made.advantages[made.advantages != 0].mean() for made in learner.learned]
    assert got == pytest.approx(penalty.mean() - penalty, abs=1e-6)
    assert not varied(group)  # dynamic sampling leaves it out, as DAPO does: its samples are all right or all wrong


def test_a_step_without_groups_changes_nothing_but_the_rate() -> None:
    learner = alone(make_model(), make_recipe(schedule="linear"))
    before = weights(learner.actor.model)
    assert learner.learn([])["train/updates"] == 0
    assert (learner.steps, learner.learned) == (1, [])
    assert weights(learner.actor.model).equal(before)
