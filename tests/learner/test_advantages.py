"""A KL to the reference that is taken off the rewards: where it goes, what it costs, and what it does not touch."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from learner_help import REWARDS, actor_batch, alone, make_groups, make_model, make_recipe, trajectory_of, weights
from torch import Tensor

from agentrl.algo import advantages
from agentrl.algo.advantage import gdpo
from agentrl.algo.terms import Samples
from agentrl.compute.batch import Batch
from agentrl.errors import UserError
from agentrl.learner.columns import (
    part_columns,
    seat_columns,
    step_rewards,
    sums,
    turn_numbers,
    turn_states,
    weighted,
    with_advantages,
)
from agentrl.learner.learner import Learner
from agentrl.learner.roles import LocalRoles
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.rollout.groups import Contrast, contrast
from agentrl.trajectory import Group, Segment, Trajectory

IN_REWARD = {"kl_coef": 0.1, "kl_in": "reward"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reference."""
    from learner_help import save_tokenizer

    path = tmp_path_factory.mktemp("reference")
    make_model().save_pretrained(path)
    save_tokenizer(path)
    return str(path)


def moved() -> Any:
    """A policy that has left it."""
    model = make_model()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def learner_of(folder: str, model: Any, algorithm: dict[str, Any], **train: Any) -> Any:
    return alone(model, make_recipe(algorithm, path=folder, **train))


def ratios(learner: Any, batch: Any) -> np.ndarray:
    return np.asarray(learner.actor.logprobs(batch) - learner.reference.logprobs(batch))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_the_sum_over_a_sample_joins_its_reward(folder: str, name: str) -> None:
    learner = learner_of(folder, moved(), {**IN_REWARD, "advantage": name})
    batch = actor_batch(make_groups(REWARDS))
    found = learner.with_advantages(batch).tokens["advantages"]
    rewards = batch.samples["reward"] - 0.1 * sums(batch, ratios(learner, batch))
    plain = with_advantages(
        batch.with_samples(reward=rewards), advantages.get(name).function, AlgorithmSection(advantage=name)
    )
    np.testing.assert_allclose(found, plain.tokens["advantages"], atol=1e-5)
    without = with_advantages(batch, advantages.get(name).function, AlgorithmSection(advantage=name))
    assert np.abs(found - without.tokens["advantages"]).max() > 0.01


def test_every_token_pays_its_own(folder: str) -> None:
    """By REINFORCE++ with a discount: what is still to come, less what it costs; then whitened."""
    learner = learner_of(
        folder, moved(), {**IN_REWARD, "advantage": {"name": "reinforce_plus_plus", "args": {"gamma": 0.9}}}
    )
    batch = actor_batch(make_groups(REWARDS))
    ratio, mask = ratios(learner, batch), batch.tokens["loss_mask"].astype(bool)
    to_go = []
    for i, reward in enumerate(batch.samples["reward"]):
        each = -0.1 * ratio[batch.span(i)][mask[batch.span(i)]]
        each[-1] += reward
        to_go += [sum(0.9**s * r for s, r in enumerate(each[t:])) for t in range(len(each))]
    wanted = (np.array(to_go) - np.mean(to_go)) / np.std(to_go, ddof=1)
    found = learner.with_advantages(batch)
    np.testing.assert_allclose(found.tokens["advantages"][mask], wanted, atol=1e-4)
    assert not found.tokens["kl_penalty"][~mask].any()
    metrics = learner.update(found)
    assert metrics["reward/kl_penalty"] == pytest.approx(0.1 * ratio.sum() / len(batch), rel=1e-4)
    assert metrics["train/kl"] > 0


def test_grpo_divides_by_the_deviation_of_what_was_earned() -> None:
    """A group that differs by its KL alone has nothing to compare, were it only rounding."""
    earned = torch.tensor([1.0, 0.0, 1.0, 1.0])
    paid = torch.tensor([0.1, 0.0, 1e-4, 0.0])
    given = Samples(earned - paid, torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.long), earned=earned)
    half = 0.45 / (0.5**0.5)
    for name, wanted in {"grpo": [half, -half, 0, 0], "grpo_passk": [2 * half, 0, 0, 0]}.items():
        found = advantages.get(name).function(given, AlgorithmSection())
        torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-5, rtol=1e-4)


def indifferent(samples: Samples, config: AlgorithmSection) -> Tensor:
    """A user's estimator, that does not look at rewards."""
    return torch.linspace(-1, 1, len(samples.rewards))


def test_the_loss_has_no_term_of_its_own(folder: str) -> None:
    own = {"advantage": f"{__name__}:indifferent"}
    groups, found = make_groups(REWARDS), {}
    for name, algorithm in {"none": {}, "reward": IN_REWARD, "loss": {"kl_coef": 0.1}}.items():
        learner = learner_of(folder, moved(), {**own, **algorithm})
        learner.learn(groups)
        found[name] = weights(learner.actor.model)
    torch.testing.assert_close(found["reward"], found["none"], atol=1e-6, rtol=1e-6)
    assert float((found["loss"] - found["none"]).abs().max()) > 1e-4


class Counted:
    """A role whose log-probs are counted."""

    def __init__(self, role: Any, calls: Counter[str], name: str) -> None:
        self._role, self._calls, self._name = role, calls, name

    def logprobs(self, batch: Any) -> Any:
        self._calls[self._name] += 1
        return self._role.logprobs(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)


@pytest.mark.parametrize("train", [{}, {"mini_batches": 2, "epochs": 2}], ids=["one update", "four"])
def test_log_probs_are_computed_once_a_step(folder: str, train: dict[str, Any]) -> None:
    """And all updates of the step are clipped against those, whose weights are the ones that the rewards saw."""
    recipe = make_recipe(IN_REWARD, path=folder, lr=5e-3, **train)
    place: Any = LocalRoles(recipe, moved())
    calls: Counter[str] = Counter()
    for role in ("actor", "reference"):
        setattr(place, role, Counted(getattr(place, role), calls, role))
    metrics = Learner(recipe, place).learn(make_groups(REWARDS))
    assert calls == {"actor": 1, "reference": 1}
    assert metrics["train/updates"] == (4 if train else 1)
    assert metrics["train/samples"] == (24 if train else 12)  # by grpo a group of equal rewards trains nothing
    assert (metrics["train/approx_kl"] > 1e-7) == bool(train)


def test_equal_rewards_pull_back_to_the_reference(folder: str) -> None:
    """With an estimator that does not divide: of samples that earned the same, the one that the policy prefers most
    over the reference loses, and the one that it prefers least gains."""
    learner = learner_of(folder, moved(), {**IN_REWARD, "advantage": "dr_grpo"}, lr=2e-3)
    batch = actor_batch(make_groups([[1, 1, 1, 1]]))
    before = sums(batch, ratios(learner, batch))
    for _ in range(5):
        learner.learn(make_groups([[1, 1, 1, 1]]))
    change = sums(batch, ratios(learner, batch)) - before
    assert change[before.argmax()] < 0 < change[before.argmin()]


def test_where_nothing_was_sampled_nobody_is_asked(folder: str) -> None:
    recipe, calls = make_recipe(IN_REWARD, path=folder), Counter[str]()
    host = LocalRoles(recipe, make_model())
    roles: Any = SimpleNamespace(
        actor=Counted(host.actor, calls, "any"),
        reference=Counted(host.reference, calls, "any"),
        critic=None,
        teachers={},
        pools={},
    )
    metrics = Learner(recipe, roles).learn([])
    assert not calls
    assert metrics["train/updates"] == metrics["reward/kl_penalty"] == 0


def test_parts_of_rewards_reach_the_estimator_by_rollout() -> None:
    given = [
        trajectory_of([(2, 4, 0.5)], 5, {"right": 1.0, "step": 0.5}, weights={"step": 2.0}),
        trajectory_of([(2, 3, 0.0)], 4, {"right": 0.0}),
    ]
    batch = Batch.from_trajectories(given, [0, 0])
    seen: list[Samples] = []

    def estimator(samples: Samples, config: AlgorithmSection) -> Tensor:
        seen.append(samples)
        return samples.rewards

    with_advantages(batch, estimator, AlgorithmSection())
    with_advantages(batch.with_samples(**part_columns(given, batch)), estimator, AlgorithmSection())
    assert seen[0].parts is None
    found = {name: (part.values.tolist(), part.weights.tolist()) for name, part in (seen[1].parts or {}).items()}
    assert found == {"right": ([1, 0], [1, 1]), "step": ([0.5, 0], [2, 1])}
    with pytest.raises(UserError, match="gdpo needs the parts of the rewards"):
        with_advantages(batch, gdpo, AlgorithmSection())


def test_tokens_know_the_states_that_their_turns_began_in() -> None:
    """By the environment's key, else by what the model was told since its turn before; never across tasks."""
    plain = trajectory_of([(2, 4, 0.0), (5, 6, 0.0), (7, 8, 0.0)], 8, {})
    ids = plain.ids.copy()
    ids[[4, 6]] = 77  # told the same before its second and its third turn
    told = replace(plain, ids=ids)
    keyed = replace(plain, turns=tuple(replace(turn, state=key) for turn, key in zip(plain.turns, "aba", strict=True)))
    batch = Batch.from_trajectories([told, keyed, keyed, told], [0, 0, 0, 1])
    found = turn_states([told, keyed, keyed, told], batch)[batch.tokens["loss_mask"] == 1].tolist()
    assert found == [0, 0, 1, 1, 2, 2, 3, 2, 2, 2, 3, 2, 4, 4, 5, 5]


def test_tokens_know_their_turns() -> None:
    groups = make_groups(REWARDS)
    batch = actor_batch(groups)
    trajectories = [t for group in groups for t in group.trajectories]
    found = turn_numbers(trajectories, batch)
    for i, t in enumerate(trajectories):
        own = found[batch.span(i)]
        assert [set(own[turn.start : turn.end].tolist()) for turn in t.turns] == [{k} for k in range(len(t.turns))]
    learner = alone(make_model(), make_recipe({"preset": "turn"}))
    assert learner.learn(groups)["train/samples"] > 0
    assert learner.learned[0].advantages.any()


def seated() -> list[Trajectory]:
    """Three samples of a task, of a solver that a judge speaks beside; the last judge has no reward of its own."""
    first = [(2, 4, 0.25), (5, 6, 0.5), (7, 9, 0.0)]
    made = [
        trajectory_of(first, 10, {"answer": 0.25, "step": 0.75}, seats={"judge": 0.2}),
        trajectory_of([(2, 3, 0.0), (4, 6, 0.0)], 6, {"answer": 0.0}, seats={"judge": 0.6, "absent": 3.0}),
        trajectory_of([(2, 3, 0.0), (4, 5, 0.0)], 5, {"answer": 0.5}),
    ]
    roles = {1: "judge"}
    turns = [tuple(replace(turn, role=roles.get(i, "")) for i, turn in enumerate(t.turns)) for t in made]
    return [replace(t, turns=own) for t, own in zip(made, turns, strict=True)]


def test_a_seat_is_compared_with_the_same_seat_of_the_tasks_other_rollouts() -> None:
    """By hand: the solvers earned 1, 0 and 0.5, the judges 0.2 and 0.6."""
    given = seated()
    batch = Batch.from_trajectories(given, [0, 0, 0])
    batch = seat_columns(given, batch.with_tokens(step_rewards=step_rewards(given, batch)))
    seen: list[Samples] = []

    def estimator(samples: Samples, config: AlgorithmSection) -> Tensor:
        seen.append(samples)
        return torch.arange(len(samples.rewards)).float()

    with_advantages(batch.with_tokens(turns=turn_numbers(given, batch)), estimator, AlgorithmSection())
    (samples,) = seen
    torch.testing.assert_close(samples.rewards, torch.tensor([1.0, 0.2, 0.0, 0.6, 0.5]))
    assert samples.groups.tolist() == [0, 1, 0, 1, 0]
    assert samples.lengths.tolist() == [4, 1, 1, 2, 2]
    torch.testing.assert_close(
        samples.token_rewards, torch.tensor([0, 0.25, 0, 0.75, 0.2, 0.0, 0.0, 0.6, 0.0, 0.5])
    )  # what a tool paid in a judge's turn is the rollout's, at its end
    assert samples.turns is not None
    assert samples.turns.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 1]
    half = 0.2 / (0.08**0.5)
    for name, wanted in {"dr_grpo": (0.5, -0.2, 0.2), "grpo": (1.0, -half, half), "rloo": (0.75, -0.4, 0.4)}.items():
        solver, one, other = wanted
        found = with_advantages(batch, advantages.get(name).function, AlgorithmSection()).tokens["advantages"]
        first = [0, 0, solver, solver, 0, one, 0, solver, solver, 0]
        np.testing.assert_allclose(found[:10], first, atol=1e-5)
        np.testing.assert_allclose(found[10:16], [0, 0, -solver, 0, other, other], atol=1e-5)
        np.testing.assert_allclose(found[16:], 0, atol=1e-5)
    with pytest.raises(UserError, match="compares parts of the reward, which rewards of seats do not have"):
        with_advantages(batch.with_samples(**part_columns(given, batch)), gdpo, AlgorithmSection())


@pytest.mark.parametrize("branched", [False, True])
def test_a_step_learns_by_the_rewards_of_seats(branched: bool) -> None:
    given = seated()
    if branched:
        given[0] = replace(given[0], segments=(Segment(0, 4), Segment(4, 6), Segment(6, 10, 0)))
    group = Group(given[0].task, tuple(given))
    learner = alone(make_model(), make_recipe({"advantage": "dr_grpo"}))
    assert learner.learn([group])["train/samples"] > 0
    found = [one.advantages for one in learner.learned]
    np.testing.assert_allclose(found[0], [0, 0, 0.5, 0.5, 0, -0.2, 0, 0.5, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose(found[1], [0, 0, -0.5, 0, 0.2, 0.2], atol=1e-6)
    batch = seat_columns(given, Batch.from_trajectories(given, [0, 0, 0]))
    recipe = make_recipe({"aggregation": "token_mean"})
    weight = weighted(batch, recipe).tokens["weight"]
    np.testing.assert_allclose(weight[batch.tokens["loss_mask"] == 1], 1 / 10, rtol=1e-6)
    equal = replace(group, trajectories=tuple(replace(t, rewards={"answer": 1.0}) for t in given))
    assert contrast(equal) is Contrast.VARIED
    assert contrast(replace(equal, trajectories=equal.trajectories[1:])) is Contrast.EQUAL
