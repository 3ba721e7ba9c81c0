"""A rollout that branched weighs as much as one that did not, and each of its tokens is trained once."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from learner_help import VOCABULARY, alone, learned, make_groups, make_model, make_recipe, weights

from agentrl.compute.batch import Batch
from agentrl.compute.packing import bins
from agentrl.compute.value_head import confidence_features
from agentrl.learner.columns import sampled_in_order
from agentrl.plugins.types import Task
from agentrl.trajectory import (
    FinishReason,
    Group,
    InvariantError,
    Segment,
    Trajectory,
    Turn,
    check_invariants,
)

REWARDS: list[list[float]] = [[1, 0, 0, 1], [0.5, 0.25, 0, 0]]


def tree(
    parts: list[tuple[int, int, int]], reward: float = 1.0, seed: int = 0, untrained: tuple[int, ...] = ()
) -> Trajectory:
    """parts: of each segment (parent, ids that are given, ids that are sampled)."""
    rng = np.random.default_rng(seed)
    segments, turns, at = [], [], 0
    for index, (parent, given, sampled) in enumerate(parts):
        end = at + given + sampled
        segments.append(Segment(at, end, parent))
        turns.append(Turn(at + given, end, trained=index not in untrained))
        at = end
    sampled_at, mask = np.zeros(at, bool), np.zeros(at, np.uint8)
    for turn in turns:
        sampled_at[turn.start : turn.end] = True
        mask[turn.start : turn.end] = turn.trained
    made = Trajectory(
        request_id="r", task=Task("t", {}), sample=0, ids=rng.integers(0, VOCABULARY, at).astype(np.int32),
        loss_mask=mask, logprobs=np.where(sampled_at, -rng.random(at) * 3, 0).astype(np.float32),
        weight_version=np.where(sampled_at, 0, -1).astype(np.int32), prompt_length=parts[0][1], turns=tuple(turns),
        messages=(), rewards={"answer": reward}, finish=FinishReason.STOP, segments=tuple(segments),
    )  # fmt: skip
    check_invariants(made)
    return made


FORKED = [(-1, 5, 3), (0, 2, 4), (0, 3, 2), (1, 1, 3), (-1, 4, 5), (2, 2, 2)]
"""Two conversations, one of which forks after its first turn."""


def test_paths_run_from_roots_to_leaves() -> None:
    made = tree(FORKED)
    spans = [[(s.start, s.end) for s in made.segments][i] for i in range(6)]
    runs = [
        [*range(*spans[0]), *range(*spans[1]), *range(*spans[3])],
        [*range(*spans[4])],
        [*range(*spans[0]), *range(*spans[2]), *range(*spans[5])],
    ]
    assert [path.tolist() for path in made.paths()] == runs
    assert made.last_path().tolist() == runs[2]


def test_each_token_is_trained_on_one_path_and_they_stand_in_the_order_of_sampling() -> None:
    made = tree(FORKED, untrained=(4,))
    batch = Batch.from_trajectories([made, tree([(-1, 4, 2)], seed=1)], [0, 0])
    assert batch.samples["rollout"].tolist() == [0, 0, 1]  # the untrained conversation is no path to compute
    assert batch.tokens["loss_mask"].sum() == made.loss_mask.sum() + 2
    order = sampled_in_order(batch)
    assert batch.tokens["began"][order].tolist() == [*np.flatnonzero(made.loss_mask), 4, 5]
    assert batch.tokens["logprobs"][order].tolist() == [
        *made.logprobs[made.loss_mask == 1],
        *batch.tokens["logprobs"][-2:],
    ]


@pytest.mark.parametrize("untrained", [(), (0,), (4,)], ids=str)
def test_a_critic_is_told_of_all_sampled_tokens_on_the_path(untrained: tuple[int, ...]) -> None:
    """Of those that another path trains, and of those that none does."""
    made = tree(FORKED, untrained=untrained)
    sampled = np.concatenate([np.arange(turn.start, turn.end) for turn in made.turns])
    wanted = np.zeros((len(made.ids), 2))
    for path in made.paths():
        for place, token in enumerate(path):
            p = np.exp(made.logprobs[[earlier for earlier in path[:place] if earlier in sampled]])
            least = p.min(initial=1.0)
            wanted[token] = (1 - least, least - p.prod())
    batch = Batch.from_trajectories([tree([(-1, 4, 2)], seed=1), made])
    found, mask = confidence_features(batch), batch.tokens["loss_mask"] == 1
    own = mask & (np.repeat(batch.rollouts, batch.lengths) == 1)
    assert own.sum() == made.loss_mask.sum()
    np.testing.assert_allclose(found[own], wanted[batch.tokens["began"][own]], atol=1e-6)
    assert not found[~mask].any()


def test_a_rollout_that_trains_nothing_still_counts_in_its_group() -> None:
    groups = [Group(Task("t", {}), (tree(FORKED, 1.0), tree([(-1, 3, 2)], 0.0, untrained=(0,))))]
    learner = alone(make_model(), make_recipe({"advantage": "dr_grpo"}))
    batch = learner.with_advantages(Batch.from_groups(groups))
    assert set(batch.tokens["advantages"].tolist()) == {0.0, 0.5}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "grpo"}, {"advantage": "grpo", "aggregation": "sequence_mean"}, {"advantage": "opo"},
        {"advantage": "reinforce_plus_plus", "aggregation": "sequence_mean"},
        {"advantage": "rloo", "loss": "gspo", "off_policy": "sequence_tis"},
    ],
    ids=str,
)  # fmt: skip
def test_a_conversation_cut_into_segments_is_trained_to_the_bit_as_it_was(algorithm: dict[str, Any]) -> None:
    groups = make_groups(REWARDS)
    cut = [replace(g, trajectories=tuple(map(in_segments, g.trajectories))) for g in groups]
    recipe = make_recipe(algorithm, mini_batches=2, epochs=2)
    (plain, metrics), (branched, same) = learned(recipe, groups), learned(recipe, cut)
    assert torch.equal(plain, branched)
    assert metrics == same
    one, other = (alone(make_model(), make_recipe(algorithm)) for _ in range(2))
    one.learn(groups)
    other.learn(cut)
    for ours, theirs in zip(one.learned, other.learned, strict=True):
        assert (ours.trained, theirs.trained) == (True, True)
        np.testing.assert_array_equal(ours.advantages, theirs.advantages)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-6)


def in_segments(t: Trajectory) -> Trajectory:
    """The same conversation, a segment for each turn."""
    cuts = [0, *(turn.end for turn in t.turns)]
    made = replace(t, segments=tuple(Segment(a, b, i - 1) for i, (a, b) in enumerate(pairwise(cuts))))
    check_invariants(made)
    return made


def copied(t: Trajectory) -> Trajectory:
    """The same rollout whose branches are conversations of their own, their common context repeated."""
    paths, left = t.paths(), t.loss_mask.copy()
    ids, logprobs, version, mask, segments, turns = [], [], [], [], [], []
    at = 0
    for path in paths:
        new = left[path]
        left[path] = 0
        ids.append(t.ids[path])
        mask.append(new)
        logprobs.append(t.logprobs[path] * new)
        version.append(np.where(new, t.weight_version[path], -1))
        segments.append(Segment(at, at + len(path)))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], new, [0]])))
        turns += [Turn(at + a, at + b) for a, b in edges.reshape(-1, 2).tolist()]
        at += len(path)
    made = replace(
        t, ids=np.concatenate(ids), loss_mask=np.concatenate(mask), logprobs=np.concatenate(logprobs),
        weight_version=np.concatenate(version).astype(np.int32), segments=tuple(segments), turns=tuple(turns),
        prompt_length=int(turns[0].start),
    )  # fmt: skip
    check_invariants(made)
    return made


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_branches_are_trained_as_if_their_context_had_been_repeated(aggregation: str, loss: str) -> None:
    trees = [tree(FORKED, 1.0, seed) for seed in range(2)] + [tree([(-1, 6, 4)], 0.0, seed=5)]
    recipe = make_recipe({"aggregation": aggregation, "loss": loss}, epochs=2)
    (one, metrics), (other, same) = (
        learned(recipe, [Group(Task("t", {}), tuple(ts))]) for ts in (trees, map(copied, trees))
    )
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert metrics["train/loss"] == pytest.approx(same["train/loss"], abs=1e-6)
    learner = alone(make_model(), recipe)
    learner.learn([Group(Task("t", {}), tuple(trees))])
    for t, made in zip(trees, learner.learned, strict=True):  # of every token, on whatever path it is trained
        np.testing.assert_array_equal(made.advantages != 0, t.loss_mask == 1)
        assert made.logprobs is not None
        np.testing.assert_array_equal(made.logprobs < 0, t.loss_mask == 1)
    assert metrics["train/samples"] == same["train/samples"] == 2 * 3  # two epochs


def test_the_gradient_of_a_tree_is_the_weighted_sum_over_its_tokens() -> None:
    groups = [Group(Task("t", {}), (tree(FORKED, 1.0), tree([(-1, 3, 4)], 0.0, seed=1)))]
    model = make_model()
    learner = alone(model, make_recipe({"advantage": "dr_grpo", "loss": "reinforce", "aggregation": "sequence_mean"}))
    gradients: list[torch.Tensor] = []
    step = learner.actor.optimizer.step
    learner.actor.optimizer.step = lambda rate: gradients.append(gradient(model)) or step(rate)
    learner.learn(groups)
    wanted_model = make_model()
    total = torch.zeros(())
    for t, advantage in zip(groups[0].trajectories, (0.5, -0.5), strict=True):
        for index in range(len(t.segments)):
            path = t._path(index)
            logits = wanted_model(torch.from_numpy(t.ids[path]).long()[None]).logits[0]
            turn = t.turns[index]
            size = turn.end - turn.start
            logprobs = logits[-size - 1 : -1].log_softmax(-1)
            picked = logprobs.gather(1, torch.from_numpy(t.ids[turn.start : turn.end]).long()[:, None]).sum()
            total = total - advantage * picked / (2 * t.sampled_tokens)
    total.backward()
    torch.testing.assert_close(gradients[0], gradient(wanted_model), atol=1e-6, rtol=1e-4)
    assert not torch.equal(weights(model), weights(make_model()))


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"segments": (Segment(0, 5), Segment(6, 8, 0))}, "segment 1"),
        ({"segments": (Segment(0, 5, 0), Segment(5, 8, 0))}, "segment 0"),
        ({"segments": (Segment(0, 5),)}, "end at 5 of 8"),
        ({"segments": (Segment(0, 7), Segment(7, 8, 0))}, "more than one segment"),
    ],
)
def test_a_tree_that_does_not_hold_together_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvariantError, match=said):
        check_invariants(replace(tree([(-1, 5, 3)]), **change))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("tokens", [4096, 20])
@pytest.mark.parametrize("loss", [{"loss": "gspo"}, {"off_policy": "sequence_tis", "off_policy_cap": 1e9}], ids=str)
def test_the_size_of_a_micro_batch_changes_nothing_where_a_loss_compares_whole_rollouts(
    loss: dict[str, Any], tokens: int
) -> None:
    groups = [
        Group(Task("t", {}), tuple(tree(FORKED, reward, seed) for seed, reward in enumerate((1.0, 0.5, 0.0, 0.0))))
    ]
    (one, metrics), (other, same) = (
        learned(make_recipe(loss, epochs=2, micro_batch_tokens=size), groups) for size in (100_000, tokens)
    )
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert metrics["train/loss"] == pytest.approx(same["train/loss"], abs=1e-6)


def test_the_paths_of_a_rollout_go_to_one_worker_and_one_micro_batch() -> None:
    batch = Batch.from_trajectories([tree(FORKED, 1.0, seed) for seed in range(6)], [0] * 6)
    for part in batch.distribute(4).parts:
        assert len(part) % 3 == 0
    for packed in bins(batch, 20):
        owners = sorted(batch.rollouts[np.concatenate([one.samples for one in packed])].tolist())
        assert all(owners.count(owner) == 3 for owner in owners)
