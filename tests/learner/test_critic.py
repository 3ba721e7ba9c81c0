"""The critic: exact against separate sequences and under every splitting, and it learns to foresee returns."""

from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from learner_help import REWARDS, make_groups, save_tokenizer
from learner_help import make_model as make_policy
from packing_help import SHAPES, make_batch, make_deep, make_model

from agentrl.algo.returns import GaeArgs, gae
from agentrl.compute.batch import Batch
from agentrl.compute.forward import BlockForward, ModuleForward, SequenceForward
from agentrl.compute.micro_batches import EMPTY
from agentrl.compute.packing import micro_batches
from agentrl.compute.value_head import (
    CONFIDENCE_FEATURES,
    BlockValues,
    ModuleValues,
    SequenceValues,
    ValueForward,
    ValueModel,
    as_values,
    confidence_features,
    value_forward,
)
from agentrl.errors import UserError
from agentrl.learner.columns import with_advantages
from agentrl.learner.critic import Critic, critic_model
from agentrl.learner.learner import Learner
from agentrl.learner.metrics import MicroBatchMetrics, critic_metrics, value_columns
from agentrl.learner.roles import LocalRoles
from agentrl.models import lora
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection, CriticSection
from agentrl.recipe.sections.model import LoraSection, ModelSection
from agentrl.recipe.sections.train import TrainSection

DISCOUNTS = {"lam": 0.9}
DISCOUNTED = partial(gae, args=GaeArgs(**DISCOUNTS))


def make_values(family: str) -> ValueModel:
    """With an output layer that tells states apart."""
    model = ValueModel(make_model(family))
    torch.manual_seed(1)
    torch.nn.init.normal_(model.lm_head.weight, 0, 0.3)
    torch.nn.init.constant_(model.lm_head.bias, 0.7)
    torch.nn.init.normal_(model.confidence.weight, 0, 0.1)
    return model


def make_told(shapes: list[tuple[int, list[int]]] = SHAPES, seed: int = 0) -> Batch:
    return told(make_batch(shapes, seed), seed)


def told(batch: Batch, seed: int = 0) -> Batch:
    """With log-probs, and what they say of the tokens so far."""
    logprobs = -np.random.default_rng(seed).exponential(0.5, len(batch.tokens["ids"])) * batch.tokens["loss_mask"]
    batch = batch.with_tokens(logprobs=logprobs.astype(np.float32))
    return batch.with_tokens(confidence=confidence_features(batch))


def separate(model: ValueModel, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
    """Values [T] by plain rows, 0 where nothing was sampled; adds the gradient of sum(weight * value)."""
    out = torch.zeros(int(batch.offsets[-1]))
    for sample in range(len(batch)):
        span = batch.span(sample)
        ids = torch.from_numpy(batch.tokens["ids"][span].astype(np.int64))
        mask = torch.from_numpy(batch.tokens["loss_mask"][span].astype(bool))[1:]
        states = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        told = torch.from_numpy(batch.tokens["confidence"][span])[1:] @ model.confidence.weight[0] * model.gain
        values = (states @ model.lm_head.weight[0] + model.lm_head.bias + told) * mask
        (values * weight[span][1:]).sum().backward()
        out[span][1:] = values.detach()
    return out


def packed(forward: ValueForward, batch: Batch, weight: torch.Tensor, budget: int) -> torch.Tensor:
    out = torch.zeros(int(batch.offsets[-1]))
    for row in micro_batches(batch, budget):
        values = forward(row, torch.from_numpy(batch.tokens["confidence"][row.source]))
        (values * weight[row.source]).sum().backward()
        out[row.source] = values.detach()
    return out


def gradients(model: ValueModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("budget", [10_000, 40])
@pytest.mark.parametrize("kind", [BlockValues, ModuleValues, SequenceValues])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_packed_values_equal_those_of_separate_sequences(family: str, kind: Any, budget: int) -> None:
    model, batch = make_values(family), make_told()
    weight = torch.randn(int(batch.offsets[-1]), generator=torch.Generator().manual_seed(1)) / 50
    wanted = separate(model, batch, weight)
    wanted_gradients = gradients(model)
    assert float(wanted.abs().max()) > 0.5
    torch.testing.assert_close(packed(kind(model), batch, weight, budget), wanted, atol=1e-5, rtol=1e-5)
    found = gradients(model)
    assert found.keys() == wanted_gradients.keys() == dict(model.named_parameters()).keys()
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [BlockValues, ModuleValues, SequenceValues])
def test_values_of_deep_trees_equal_those_of_separate_sequences(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that several samples have in common has a value on each path, by what that says of the tokens before."""
    monkeypatch.setattr("agentrl.compute.batch.LEAST", 1)
    model, batch = make_values("qwen3"), told(make_deep(5))
    weight = torch.randn(int(batch.offsets[-1]), generator=torch.Generator().manual_seed(1)) / 50
    wanted = separate(model, batch, weight)
    wanted_gradients = gradients(model)
    torch.testing.assert_close(packed(kind(model), batch, weight, 200), wanted, atol=1e-5, rtol=1e-5)
    found = gradients(model)
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "way"), [("qwen3", BlockValues), ("gpt2", ModuleValues), ("windowed", SequenceValues)]
)
def test_the_way_is_that_of_the_language_model(family: str, way: type) -> None:
    model = make_model(family)
    forward, said = value_forward(model)
    assert isinstance(forward, way)
    assert said
    assert model.get_output_embeddings().weight.shape[0] > 1  # the policy's own head is left alone
    batch = make_told()
    torch.nn.init.normal_(forward.model.lm_head.weight)
    weight = torch.ones(int(batch.offsets[-1]))
    wanted = separate(forward.model, batch, weight)
    torch.testing.assert_close(packed(forward, batch, weight, 100), wanted, atol=1e-4, rtol=1e-4)


def test_in_mixed_precision_values_stay_close_and_float32() -> None:
    model, batch = make_values("qwen3"), make_told()
    weight = torch.ones(int(batch.offsets[-1]))
    wanted = separate(model, batch, weight)
    found = packed(as_values(ModuleForward(make_model("qwen3"), torch.bfloat16), model), batch, weight, 10_000)
    assert found.dtype == torch.float32
    assert 0 < float((found - wanted).abs().max()) < 0.2


def test_a_pass_without_predictions_reaches_every_parameter() -> None:
    for kind in (ModuleValues, SequenceValues):
        model = make_values("qwen3")
        forward = kind(model) if kind is ModuleValues else SequenceValues(model, None, lambda aligned_micro_batches: 1)
        values = forward(EMPTY, torch.zeros(0, CONFIDENCE_FEATURES))
        assert values.shape == (0,)
        values.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    make_policy().save_pretrained(path)
    save_tokenizer(path)
    return path


def make_recipe(folder: Path, critic: dict[str, Any] | None = None, adapter: bool = False, **train: Any) -> Recipe:
    return Recipe(
        model=ModelSection(path=str(folder), lora=LoraSection(rank=4, alpha=8) if adapter else None),
        algorithm=AlgorithmSection(advantage={"name": "gae", "args": DISCOUNTS}),
        critic=CriticSection(**{"lr": 1e-2, **(critic or {})}),
        train=TrainSection(**{"steps": 10, **train}),
    )


def make_step(critic: Critic, shapes: list[tuple[int, list[int]]] = SHAPES) -> Batch:
    """A batch with what an update wants: random rewards, values, returns, and weights of its whole."""
    batch = make_told(shapes)
    batch.tokens["ids"][:] %= 64
    batch = batch.with_samples(reward=np.random.default_rng(1).random(len(batch)).astype(np.float32))
    batch = batch.with_tokens(values=critic.values(batch))
    batch = with_advantages(batch, DISCOUNTED, critic.recipe.algorithm)
    return batch.with_tokens(weight=batch.spread(np.full(len(batch), 1 / batch.sampled.sum(), np.float32)))


def weights(critic: Critic) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in critic.model.parameters()])


def test_values_are_zero_at_first_and_stand_at_sampled_tokens(folder: Path) -> None:
    critic = Critic(make_recipe(folder))
    batch = make_step(critic)
    assert not batch.tokens["values"].any()
    torch.nn.init.ones_(critic.model.lm_head.bias)
    assert np.array_equal(critic.values(batch), batch.tokens["loss_mask"].astype(np.float32))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("tokens", [60, 1])
def test_micro_batches_change_nothing(folder: Path, tokens: int) -> None:
    whole, split = Critic(make_recipe(folder)), Critic(make_recipe(folder, micro_batch_tokens=tokens))
    for _ in range(3):
        batch = make_step(whole)
        wanted, found = critic_metrics(whole.update(batch, 1e-2)), critic_metrics(split.update(batch, 1e-2))
        assert found == pytest.approx(wanted, abs=1e-5, rel=1e-4)
    torch.testing.assert_close(weights(split), weights(whole), atol=1e-5, rtol=1e-4)


def test_the_first_gradient_is_that_of_the_formula(folder: Path) -> None:
    critic = Critic(make_recipe(folder))
    torch.nn.init.normal_(critic.model.lm_head.weight)
    torch.nn.init.normal_(critic.model.confidence.weight, 0, 0.1)
    batch = make_step(critic)
    mask = batch.tokens["loss_mask"].astype(bool)
    model = critic.model
    total = torch.zeros(())
    for sample in range(len(batch)):
        span = batch.span(sample)
        ids = torch.from_numpy(batch.tokens["ids"][span].astype(np.int64))
        states = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        values = states @ model.lm_head.weight[0] + model.lm_head.bias
        values = (
            values + torch.from_numpy(batch.tokens["confidence"][span])[1:] @ model.confidence.weight[0] * model.gain
        )
        errors = (values - torch.from_numpy(batch.tokens["returns"][span][1:])) * torch.from_numpy(mask[span][1:])
        total = total + 0.5 * (errors**2).sum() / float(mask.sum())
    total.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    model.zero_grad()
    measured = critic_metrics(critic.update(batch, 1e-3))
    assert measured["critic/loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert measured["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


class TwoRanks:
    """Stands in for two ranks: as one of them has it, gradients of both are averaged."""

    size = 2

    def max_over_ranks(self, count: int) -> int:
        return max(count, 3)

    def heartbeat(self) -> None:
        """Nobody waits."""


def test_ranks_add_up_to_the_whole(folder: Path) -> None:
    recipe = make_recipe(folder)
    whole = Critic(recipe)
    torch.nn.init.normal_(whole.model.lm_head.weight)
    batch = make_step(whole)
    shares = [batch.select([0, 1, 2, 3]), batch.select(np.arange(4, len(batch)))]
    sums: dict[str, torch.Tensor] = {}
    meters = []
    for share in shares:
        rank = Critic(recipe, ModuleValues(whole.model), TwoRanks())
        taken: dict[str, torch.Tensor] = {}
        rank.optimizer.step = lambda rate, taken=taken: taken.update(gradients(whole.model)) or 1.0  # type: ignore
        meters.append(rank.update(share, 1e-3))
        for name, gradient in taken.items():
            sums[name] = sums.get(name, 0) + gradient / 2
    kept: dict[str, torch.Tensor] = {}
    whole.optimizer.step = lambda rate: kept.update(gradients(whole.model)) or 1.0  # type: ignore
    measured = whole.update(batch, 1e-3)
    assert sums.keys() == kept.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(sums[name], gradient, atol=1e-5, rtol=1e-4)
    assert critic_metrics(meters[0].merge(meters[1:])) == pytest.approx(critic_metrics(measured), abs=1e-5, rel=1e-4)


def test_explained_variance_and_means() -> None:
    old, returns = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([0.5, 1.0, 3.0, 4.0])
    meter = MicroBatchMetrics()
    for half in (slice(0, 2), slice(2, 4)):
        part = MicroBatchMetrics()
        columns = value_columns(old[half] + 1, old[half], returns[half], torch.tensor([0.0, 1.0]))
        part.micro_batch(2, torch.tensor(0.25), columns)
        part.updated(2.0 if half.start else 4.0, 0.5)
        meter.add(part)
    found = critic_metrics(meter)
    errors = returns - old
    explained = 1 - errors.var(unbiased=False) / returns.var(unbiased=False)
    assert found == pytest.approx(
        {
            "critic/loss": 0.25, "critic/grad_norm": 3.0, "critic/lr": 0.5, "critic/value_mean": 3.0,
            "critic/return_mean": 2.125, "critic/clip_fraction": 0.5, "critic/explained_variance": float(explained),
        }
    )  # fmt: skip
    assert set(critic_metrics(MicroBatchMetrics()).values()) == {0.0}


@pytest.mark.slow
def test_values_regress_to_returns(folder: Path) -> None:
    """Samples that begin with one token earn 1, the others 0: the critic learns to tell from there on."""
    rng = np.random.default_rng(0)
    critic = Critic(make_recipe(folder, {"lr": 5e-3, "clip": 10.0}))

    def step() -> Batch:
        batch = make_told([(4, [6] * 8)], seed=int(rng.integers(1 << 30)))
        batch.tokens["ids"][:] %= 64
        good = np.arange(len(batch)) % 2
        for i in range(len(batch)):
            first = int(batch.offsets[i]) + 4
            batch.tokens["ids"][first - 4 : first + 1] = [1, 2, 3, 4, 7 if good[i] else 8]
            batch.tokens["loss_mask"][batch.span(i)] = np.arange(10) >= 4
        batch = batch.with_samples(reward=good.astype(np.float32))
        batch = batch.with_tokens(values=critic.values(batch))
        batch = with_advantages(batch, DISCOUNTED, critic.recipe.algorithm)
        return batch.with_tokens(weight=batch.spread(np.full(len(batch), 1 / batch.sampled.sum(), np.float32)))

    first = critic_metrics(critic.update(step(), 5e-3))
    for _ in range(100):
        last = critic_metrics(critic.update(step(), 5e-3))
    assert last["critic/loss"] < 0.2 * first["critic/loss"]
    assert last["critic/explained_variance"] > 0.6
    values = step().tokens["values"].reshape(8, 10)
    assert abs(float(values[:, 4].mean()) - 0.5) < 0.15  # before the token that decides it
    assert values[1::2, 6:].mean() > 0.8 > 0.2 > values[::2, 6:].mean()


def test_confidence_features_are_of_the_sampled_tokens_before_each() -> None:
    """Prompt and tool output between turns are no step; the token itself and those after it are not looked at."""
    p = [0.5, 0.8, 0.25, 0.9]
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 0, 0, 1], np.uint8)
    logprobs = np.zeros(10, np.float32)
    logprobs[[1, 2, 5, 6]] = np.log(p)
    batch = Batch(np.array([0, 8, 8, 10]), {"loss_mask": mask, "logprobs": logprobs}, {})
    found = confidence_features(batch)
    wanted = np.zeros((10, 2))
    wanted[2], wanted[5], wanted[6] = (0.5, 0.0), (0.5, 0.5 - 0.4), (0.75, 0.25 - 0.1)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    later = batch.with_tokens(logprobs=np.where(np.arange(10) >= 5, -9.0, logprobs).astype(np.float32))
    np.testing.assert_array_equal(confidence_features(later)[:6], found[:6])
    assert not found[8:].any()  # of a sample's first token, whatever the sample before it


@pytest.mark.slow
def test_what_an_unlikely_token_costs_is_foreseen_within_some_updates(folder: Path) -> None:
    """Samples with one token of probability 0.05 earn 0, the others 1: ids tell nothing, what the policy thought does.
    Foreseen, as the metric has it, on samples that were not learned from."""
    rng, critic = np.random.default_rng(0), Critic(make_recipe(folder, {"lr": 3e-3, "clip": 10.0}))
    found = []
    for _ in range(30):
        batch = make_batch([(4, [8] * 16)], seed=int(rng.integers(1 << 30)))
        batch.tokens["ids"][:] %= 64
        batch.tokens["loss_mask"][:] = np.tile(np.arange(12) >= 4, 16)
        good = rng.random(16) < 0.5
        logprobs = np.log(rng.uniform(0.8, 1.0, (16, 12)))
        logprobs[~good, 5] = np.log(0.05)
        batch = batch.with_samples(reward=good.astype(np.float32))
        batch = batch.with_tokens(logprobs=(logprobs.ravel() * batch.tokens["loss_mask"]).astype(np.float32))
        batch = with_advantages(batch.with_tokens(values=critic.values(batch)), DISCOUNTED, critic.recipe.algorithm)
        batch = batch.with_tokens(weight=batch.spread(np.full(len(batch), 1 / batch.sampled.sum(), np.float32)))
        found.append(critic_metrics(critic.update(batch, 3e-3))["critic/explained_variance"])
    assert found[0] == 0
    assert float(np.mean(found[-5:])) > 0.6  # 6 of a sample's 8 tokens come after the unlikely one


def test_an_adapter_and_the_head_alone_are_trained(folder: Path) -> None:
    recipe = make_recipe(folder, adapter=True)
    critic = Critic(recipe)
    before = {name: p.detach().clone() for name, p in critic.model.named_parameters()}
    for _ in range(3):
        critic.update(make_step(critic), 1e-2)
    moved = {name for name, p in critic.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name or name.startswith(("lm_head", "doubt"))}
    assert critic.trained == sum(p.numel() for p in lora.adapter_parameters(critic.model)) + 33 + CONFIDENCE_FEATURES


def test_the_critics_model_is_the_policys_unless_it_names_another() -> None:
    start = LoraSection(start="somewhere")
    model = ModelSection(path="a", dtype="bfloat16", lora=start)
    alone = Recipe(model=model, critic=CriticSection())
    assert critic_model(alone) == ModelSection(path="a", dtype="bfloat16", lora=LoraSection())
    assert critic_model(Recipe(model=model, critic=CriticSection(path="b"))).path == "b"


def test_its_parameters_keep_the_names_that_checkpoints_hold() -> None:
    model = make_values("qwen3")
    heads = {name: p for name, p in model.named_parameters() if not name.startswith("model.")}
    assert list(heads) == ["lm_head.weight", "lm_head.bias", "doubt.weight"]
    assert heads["doubt.weight"] is model.confidence.weight


def test_a_way_that_is_not_known_is_refused() -> None:
    with pytest.raises(TypeError, match="as function computes log-probs"):
        as_values(lambda packed, temperature: None, make_values("qwen3"))  # type: ignore
    model = make_model("qwen3")
    found = as_values(SequenceForward(model, torch.bfloat16, lambda n: n), ValueModel(model))
    assert isinstance(found, SequenceValues)
    assert (found.compute, found.max_over_ranks is not None) == (torch.bfloat16, True)
    assert isinstance(as_values(BlockForward(model), ValueModel(model)), BlockValues)


class Met:
    """A role, with calls that wait for a call of another pool; `inside` are the calls under way."""

    def __init__(self, name: str, role: Any, meets: set[str], barrier: Barrier, inside: list[str]) -> None:
        self.name, self.role, self.meets, self.barrier, self.inside = name, role, meets, barrier, inside
        self.beside: list[str] = []

    def __getattr__(self, method: str) -> Any:
        found = getattr(self.role, method)
        if method not in ("logprobs", "values", "update"):
            return found

        def call(*arguments: Any) -> Any:
            self.inside.append(self.name)
            if method in self.meets:
                self.barrier.wait(30)  # raises where none comes
            self.beside += self.inside
            result = found(*arguments)
            self.inside.remove(self.name)
            return result

        return call


def test_pools_compute_at_the_same_time_and_the_roles_of_one_in_turn(folder: Path) -> None:
    recipe = make_recipe(folder, mini_batches=2)
    recipe = recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"kl_coef": 0.1})})
    groups = make_groups(REWARDS)
    alone, apart = (LocalRoles(recipe, make_policy()) for _ in range(2))
    barrier, inside = Barrier(2), []
    actor = Met("actor", apart.actor, {"logprobs", "update"}, barrier, inside)
    critic = Met("critic", apart.critic, {"values", "update"}, barrier, inside)
    reference = Met("reference", apart.reference, set(), barrier, inside)
    pools = {"actor": "trainer", "critic": "critic_reference", "reference": "critic_reference"}
    theirs = SimpleNamespace(actor=actor, critic=critic, reference=reference, teachers={}, pools=pools)
    torch.manual_seed(0)
    wanted = Learner(recipe, alone).learn(groups)
    torch.manual_seed(0)
    assert Learner(recipe, theirs).learn(groups) == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    assert "reference" not in critic.beside
    assert "critic" not in reference.beside


def test_an_error_of_one_pool_ends_the_step(folder: Path) -> None:
    recipe = make_recipe(folder, mini_batches=2)
    roles = LocalRoles(recipe, make_policy())

    def values(batch: Batch) -> Any:
        raise UserError("the critic's worker is gone")

    critic = SimpleNamespace(values=values, updates=0)
    pools = {"actor": "trainer", "critic": "critic"}
    theirs = SimpleNamespace(actor=roles.actor, critic=critic, reference=None, teachers={}, pools=pools)
    with pytest.raises(UserError, match="the critic's worker is gone"):
        Learner(recipe, theirs).learn(make_groups(REWARDS))
