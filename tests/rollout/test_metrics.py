"""Groups to numbers: spreads, pass@k of training groups, and the parts of a mixture."""

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from agentrl.plugins.types import Task
from agentrl.rollout.metrics import by_environment, rollout_metrics
from agentrl.trajectory import FinishReason, Group, Trajectory, Turn, spread


def group(task: str, *rewards: float) -> Group:
    """A task with samples that earned this; the n-th has n + 1 turns of two tokens."""

    def sample(index: int, reward: float) -> Trajectory:
        tokens = 1 + 2 * (index + 1)
        return Trajectory(
            request_id=f"{task}#{index}", task=Task(task, {}), sample=index, ids=np.zeros(tokens, np.int32),
            loss_mask=np.array([0, *[1] * (tokens - 1)], np.uint8), logprobs=np.zeros(tokens, np.float32),
            weight_version=np.zeros(tokens, np.int32), prompt_length=1, finish=FinishReason.STOP,
            turns=tuple(Turn(1 + 2 * n, 3 + 2 * n) for n in range(index + 1)), messages=(),
            rewards={"answer": reward, "half": 2 * reward}, weights={"half": 0.0}, seconds={"environment": 2.0},
        )  # fmt: skip

    return Group(Task(task, {}), tuple(sample(*each) for each in enumerate(rewards)))


def test_a_metric_has_its_spread() -> None:
    found = rollout_metrics([group("a", 0, 1), group("b", 1, 4)])
    assert [found[f"reward/{name}"] for name in ("mean", "std", "min", "max")] == [1.5, 1.5, 0, 4]
    assert [found[f"rollout/turns_{name}"] for name in ("mean", "std", "min", "max")] == [1.5, 0.5, 1, 2]
    assert [found[f"rollout/response_tokens_{name}"] for name in ("mean", "min", "max")] == [3, 2, 4]
    assert (found["reward/answer"], found["reward/half"], found["time/sample_environment_s"]) == (1.5, 3, 2)
    assert set(spread("x", []).values()) == {0.0}
    assert rollout_metrics([])["reward/std"] == 0


@pytest.mark.parametrize("rewards", [(0, 0, 1, 0, 0), (1, 1, 1, 1, 1), (0.5, -1, 2, 0, 0.25)])
def test_pass_at_k_is_the_mean_best_of_all_choices(rewards: tuple[float, ...]) -> None:
    found = rollout_metrics([group("a", *rewards), group("few", 1), group("none")])
    expected = {k: fmean(map(max, combinations(rewards, k))) for k in (2, 4, 5)}
    assert {key: value for key, value in found.items() if key.startswith("groups/pass_at")} == {
        f"groups/pass_at_{k}": pytest.approx(value) for k, value in expected.items()
    }


def test_a_mixture_is_told_by_its_environments() -> None:
    groups = [group("x/1", 0, 1), group("y/1", 1, 1), group("x/2", 1)]
    found = by_environment(groups, lambda task: task.id.partition("/")[0])
    assert {key: found[f"env/x/{key}"] for key in ("samples", "failed", "groups_varied")} == {
        "samples": 3, "failed": 0, "groups_varied": 1,
    }  # fmt: skip
    assert found["env/y/reward_mean"] == 1
    assert found["env/x/turns_mean"] == pytest.approx(4 / 3)
    assert found["env/x/response_tokens_mean"] == pytest.approx(8 / 3)
