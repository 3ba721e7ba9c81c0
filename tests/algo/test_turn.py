"""Credit by turn: by hand, and by exact enumeration of a decision process in which the policy decides when to stop."""

from itertools import product

import pytest
import torch
from torch import Tensor

from agentrl.algo import advantages
from agentrl.algo.returns import DiscountArgs, turn
from agentrl.algo.terms import Samples, TokenAdvantages
from agentrl.recipe.sections.algorithm import AdvantageSection, AlgorithmSection

ACTIONS, LONGEST, STOP = 3, 3, 0
Path = tuple[int, ...]
PATHS: list[Path] = [
    path
    for length in range(1, LONGEST + 1)
    for path in product(range(ACTIONS), repeat=length)
    if STOP not in path[:-1] and (path[-1] == STOP or length == LONGEST)
]
"""All episodes: one action a turn, until the policy stops or has no turn left."""


def reward(path: Path, k: int) -> float:
    """What turn k of an episode earns; it depends on what came before."""
    return 1.5 * (path[k] == 1) - 0.4 * k + 0.7 * sum(path[:k]) * (path[k] == 2) + 0.9 * (path[k] == STOP)


def log_prob(theta: Tensor, path: Path) -> Tensor:
    """theta: float64 [turns, action before, action]."""
    before = [0, *path[:-1]]
    return torch.stack([theta[k, before[k]].log_softmax(0)[action] for k, action in enumerate(path)])


def samples_of(paths: list[Path]) -> Samples:
    each = [torch.tensor([reward(path, k) for k in range(len(path))], dtype=torch.float64) for path in paths]
    return Samples(
        rewards=torch.stack([r.sum() for r in each]),
        groups=torch.zeros(len(paths), dtype=torch.int64),
        lengths=torch.tensor([len(path) for path in paths]),
        token_rewards=torch.cat(each),
        turns=torch.cat([torch.arange(len(path)) for path in paths]),
    )


def with_oneself(samples: Samples) -> Tensor:
    """A baseline by turn that counts the sample itself, and divides by its own turns too: what is biased."""
    assert samples.turns is not None
    assert samples.token_rewards is not None
    bounds = torch.cumsum(samples.lengths, 0).tolist()
    to_go = torch.cat(
        [
            samples.token_rewards[end - length : end].flip(0).cumsum(0).flip(0)
            for end, length in zip(bounds, samples.lengths.tolist(), strict=True)
        ]
    )
    mean = torch.stack([to_go[samples.turns == k].mean() for k in samples.turns.tolist()])
    return to_go - mean


def expected_gradient(theta: Tensor, gamma: float, estimator: str) -> Tensor:
    """Of two samples of a task, by all pairs of episodes: the sum of A log pi over turns, by the number of samples."""
    total = torch.zeros((), dtype=torch.float64)
    config, args = AlgorithmSection(), DiscountArgs(gamma=gamma)
    for pair in product(PATHS, repeat=2):
        samples = samples_of(list(pair))
        if estimator == "turn":
            found = turn(samples, config, args)
            assert isinstance(found, TokenAdvantages)
            advantages = found.advantages
        else:
            advantages = with_oneself(samples)
        logs = torch.cat([log_prob(theta, path) for path in pair])
        total = total + logs.sum().exp().detach() * (advantages * logs).sum() / len(pair)
    (gradient,) = torch.autograd.grad(total, theta)
    return gradient


def test_its_expected_gradient_is_that_of_the_objective() -> None:
    theta = torch.randn(LONGEST, ACTIONS, ACTIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    theta.requires_grad_()
    objective = torch.stack([log_prob(theta, p).sum().exp() * sum(reward(p, k) for k in range(len(p))) for p in PATHS])
    (wanted,) = torch.autograd.grad(objective.sum(), theta)
    assert float(wanted.abs().max()) > 0.1
    torch.testing.assert_close(expected_gradient(theta, 1.0, "turn"), wanted, atol=1e-10, rtol=0)
    biased = expected_gradient(theta, 1.0, "with oneself")
    cosine = torch.nn.functional.cosine_similarity(biased.flatten(), wanted.flatten(), dim=0)
    assert float(cosine) < 0.999, "a baseline that counts the sample itself should be seen to be biased"


def test_by_hand() -> None:
    """Two tasks; turns of several tokens; the third sample stops after its first turn."""
    samples = Samples(
        rewards=torch.tensor([3.0, 5.0, 1.0, 9.0]),
        groups=torch.tensor([0, 0, 0, 1]),
        lengths=torch.tensor([3, 2, 1, 2]),
        token_rewards=torch.tensor([0.0, 1.0, 2.0, 1.0, 4.0, 1.0, 4.0, 5.0]),
        turns=torch.tensor([0, 0, 1, 0, 1, 0, 0, 1]),
    )
    found = turn(samples, AlgorithmSection(), DiscountArgs(gamma=0.5))
    assert isinstance(found, TokenAdvantages)
    # to go: 1 + 2/2 and 2; 1 + 4/2 and 4; 1; alone in its task: 4 + 5/2 and 5
    wanted = [2 - 2.0, 2 - 2.0, 2 - 4.0, 3 - 1.5, 4 - 2.0, 1 - 2.5, 6.5, 5.0]
    assert found.advantages.tolist() == wanted


@pytest.mark.parametrize("normalise", [False, True])
def test_gigpo_by_hand(normalise: bool) -> None:
    """Two samples of a task come through state 5, one of them twice; state 6 and another task's are each alone."""
    samples = Samples(
        rewards=torch.tensor([3.0, 1.0, 4.0]),
        groups=torch.tensor([0, 0, 1]),
        lengths=torch.tensor([4, 1, 1]),
        token_rewards=torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 4.0]),
        turns=torch.tensor([0, 0, 1, 2, 0, 0]),
        states=torch.tensor([5, 5, 6, 5, 5, 7]),
    )
    args = {"gamma": 0.5, "weight": 2.0, "normalise": normalise}
    found = advantages.bound(AdvantageSection(name="gigpo", args=args))(samples, AlgorithmSection())
    # to go: 1 + 0/2 + 2/4 = 1.5, 1, 2 and 1; in state 5: 1.5, 2, 1, mean 1.5, deviation 0.5; episodes: 3, 1
    step, episode = (0.5, 2**0.5) if normalise else (1.0, 1.0)
    wanted = [1 / episode, 1 / episode, 1 / episode, 1 / episode + 1 / step, -1 / episode - 1 / step, 0.0]
    assert found.advantages.tolist() == pytest.approx(wanted, abs=1e-5)


def test_it_needs_the_turns() -> None:
    ones = torch.ones(1)
    with pytest.raises(ValueError, match="numbers of the turns"):
        turn(
            Samples(ones, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)),
            AlgorithmSection(),
            DiscountArgs(),
        )
