"""Whole runs on two workers beside those of one process: real rollouts, checkpoints, resumed either way round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_plugins import FATES
from sharded_help import ROUTED, SMALL, save_folder
from train_help import metrics, numbers, records, small
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import agentrl
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.schema import Recipe
from agentrl.training.run import TrainResult, resume_run

pytestmark = pytest.mark.ray
STOPS = {"track__trackers": ["cluster_plugins:StopsAfterTwo"]}
GOES_ON = ["track.trackers=[]"]


def job(output: Path, **changes: Any) -> Recipe:
    return small(output, **{"eval__splits": [], "train__schedule": "cosine", "train__mini_batches": 2, **changes})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return agentrl.train(job(tmp_path_factory.mktemp("alone") / "run"))


def same(a: TrainResult, b: TrainResult) -> None:
    """The same conversations, and metrics and weights as near as float32 gets by another order of sums. That holds
    as long as no token is drawn so near a bound that the last bits decide it."""
    from transformers import AutoModelForCausalLM

    assert a.steps == b.steps
    for step in range(1, a.steps + 1):
        ours, theirs = (records(r.folder, f"step_{step}") for r in (a, b))
        assert [t["messages"] for t in ours] == [t["messages"] for t in theirs]
    for mine, other in zip(metrics(a.folder), metrics(b.folder), strict=True):
        assert comparable(mine) == pytest.approx(comparable(other), rel=1e-3, abs=1e-4)
    first, second = (AutoModelForCausalLM.from_pretrained(r.checkpoint).state_dict() for r in (a, b))
    for name, value in first.items():
        assert float((value - second[name]).abs().max()) <= 1e-4, name


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Without how the work was split: what a prompt shared by two workers costs is computed twice."""
    return {name: value for name, value in numbers(row).items() if name != "train/tokens"}


def test_two_of_three_steps_on_two_workers_and_the_last_in_one_process(
    alone: TrainResult, ray_address: str, tmp_path: Path
) -> None:
    stopped = agentrl.train(job(tmp_path / "run", cluster__workers=2, cluster__address=ray_address, **STOPS))
    assert stopped.interrupted
    assert stopped.steps == 2
    assert sorted(log.name for log in (stopped.folder / "logs").iterdir()) == ["trainer_0.log", "trainer_1.log"]
    gone_on = resume_run(str(stopped.folder), overrides=[*GOES_ON, "cluster.workers=1", "cluster.address=null"])
    same(alone, gone_on)


def test_two_of_three_steps_in_one_process_and_the_last_on_two_workers(
    alone: TrainResult, ray_address: str, tmp_path: Path
) -> None:
    stopped = agentrl.train(job(tmp_path / "run", **STOPS))
    gone_on = resume_run(
        str(stopped.folder), overrides=[*GOES_ON, "cluster.workers=2", f"cluster.address={ray_address}"]
    )
    assert gone_on.steps == 3
    same(alone, gone_on)


def test_a_worker_without_memory_ends_the_run_with_what_to_do(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker waits for it in a collective: nobody can save, and the line is still that of the cause."""
    monkeypatch.setenv(FATES, str(tmp_path))
    (tmp_path / "memory_1").touch()
    two = {"cluster__workers": 2, "cluster__address": ray_address}
    with pytest.raises(UserError) as error:
        agentrl.train(job(tmp_path / "run", algorithm__loss="cluster_plugins:fateful", **two))
    line = str(error.value)
    assert line.startswith("worker 1 of 'trainer' (pid ")
    assert "(MemoryError: Unable to allocate 7.00 GiB); lower train.micro_batch_tokens" in line
    assert line.endswith("; nothing was saved yet")


BAD: list[tuple[list[str], str]] = [
    (["cluster.workers=99"], "needed: one node with 99 CPUs; there: node"),
    (["cluster.gpus=8"], "needed: one node with 8 CPUs and 8 GPUs; there: node"),
    (["cluster.workers=2", "model.path=/nowhere/model"], "/nowhere/model"),
    (["cluster.workers=2", "cluster.shard=3"], "cluster: shard"),
    (["cluster.workers=2", "cluster.sequence_parallel=3"], "cluster: sequence_parallel"),
    (["cluster.workers=2", "algorithm.loss=cluster_plugins:nothing"], "nothing"),
]


@pytest.mark.parametrize(("overrides", "words"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_what_cannot_be_is_one_line_and_exit_code_2(
    overrides: list[str], words: str, ray_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text(dump_recipe(job(tmp_path / "run", cluster__address=ray_address)))
    assert main.run(["train", str(recipe), *overrides]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert words in errors[0]
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir())


@pytest.mark.long
def test_a_mixture_whose_experts_workers_divide_is_trained_with_those_that_the_engine_chose(
    ray_address: str, tmp_path: Path
) -> None:
    """In copies, too: each step samples with the weights of the one before, and nothing is learnt otherwise."""
    mixture = {"model__path": str(save_mixture(tmp_path)), "algorithm__routing_replay": True}
    alone = agentrl.train(job(tmp_path / "alone", **mixture))
    learnt = [row for row in metrics(alone.folder) if row.get("train/grad_norm", 0)]
    assert len(learnt) >= 2
    assert all(row["mismatch/experts"] < 0.05 for row in learnt)
    for name, cluster in {
        "experts": {"cluster__workers": 2, "cluster__expert_parallel": 2},
        "copies": {"cluster__workers": 4, "cluster__expert_parallel": 2, "cluster__shard": 2},
    }.items():
        same(alone, agentrl.train(job(tmp_path / name, cluster__address=ray_address, **mixture, **cluster)))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_real_servers_sample_with_the_weights_of_divided_experts(
    kind: str, ray_address: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(f"{kind}_venv")
    cluster = {"cluster__address": ray_address, "cluster__workers": 2, "cluster__expert_parallel": 2}
    mixture = {"model__path": str(save_mixture(tmp_path, head_dim=32)), "train__lr": 1e-2}
    result = agentrl.train(job(tmp_path / "run", engine__name=kind, **cluster, **mixture))
    rows = metrics(result.folder)[1:]
    assert all(row["train/grad_norm"] > 0.01 for row in rows)
    assert all(row["mismatch/logprob_max"] < 1e-3 for row in rows)


def save_mixture(folder: Path, **changes: int) -> Path:
    """A model of four experts a layer, of which each token has two."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {**SMALL, **ROUTED, "vocab_size": 1024, "num_experts": 4, **changes}
    save_folder(Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)), folder / "mixture")
    return folder / "mixture"
