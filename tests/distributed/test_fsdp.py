"""Two ranks with FSDP2 train like one process: some steps of each scenario, and what only ranks are asked.

One pair of processes does all of it once; `pair` is what its ranks found.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_help import save_adapter, stirred
from safetensors.torch import load_file
from sharded_help import LORA, ROW, SCENARIOS, apart, curve, make_folders, run_rank, train_here
from torch.multiprocessing import ProcessExitedException
from warm import on_ranks

from agentrl.compute import liger
from agentrl.compute.forward import SequenceForward
from agentrl.models import lora
from agentrl.models.load import load_model
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.recipe.sections.model import LoraSection, ModelSection
from agentrl.weights.source import ModelWeights

EXACT = (
    "tied", "untied", "adapter", "critic", "copies", "offload", "checkpointing", "window", "sequences", "forks",
    "tensor", "tensor, critic", "experts", "experts, adapter",
    "experts, routes", "experts, sinks",
)  # fmt: skip
SEEING = tuple(name for name in SCENARIOS if SCENARIOS[name].sees)
NARROW_LOSS, NARROW_WEIGHTS = 0.01, 0.01
MIXED_LOSS, MIXED_WEIGHTS = 0.01, 0.01
"""nats, and units of weights that are about 0.2"""
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    make_folders(folder)
    torch.manual_seed(0)
    section = ModelSection(path=str(folder / "untied"), device="cpu", lora=LoraSection.model_validate(LORA))
    save_adapter(stirred(load_model(section)[0]), folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def pair(root: Path) -> list[dict[str, Any]]:
    """Tried again, with a warning, where a rank crashed in C++: a double free of torch or gloo in one of fifty runs."""
    try:
        on_ranks(run_rank, root)
    except ProcessExitedException as error:
        stacks = "\n".join(path.read_text() for path in root.glob("crash*"))
        if not stacks:
            raise
        warnings.warn(f"{error}\n{stacks}", RuntimeWarning, stacklevel=1)
        (root / "meeting").unlink()
        on_ranks(run_rank, root)
    return [torch.load(root / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def trained_alone(name: str, root: Path) -> dict[str, Any]:
    scenario = SCENARIOS[name]
    return train_here(scenario.recipe(root, alone=True), scenario.steps, scenario.groups())


@pytest.mark.parametrize("name", [*EXACT, *SEEING])
def test_two_ranks_train_like_one_process(name: str, pair: list[dict[str, Any]], root: Path) -> None:
    found, wanted = pair[0][name], trained_alone(name, root)
    assert np.abs(curve(found) - curve(wanted)).max() < 1e-4
    assert np.abs(curve(found, "train/grad_norm") - curve(wanted, "train/grad_norm")).max() < 1e-3
    assert apart(found["weights"], wanted["weights"]) < 1e-4
    assert apart(found["state"], wanted["state"]) < 1e-4
    if SCENARIOS[name].sections.get("critic"):
        assert np.abs(curve(found, "critic/loss") - curve(wanted, "critic/loss")).max() < 1e-4
    started = dict(ModelWeights(load_model(ModelSection(path=str(root / SCENARIOS[name].folder), device="cpu"))[0]))
    assert apart(started, wanted["weights"]) > 2e-3


def test_divided_experts_are_those_that_the_engine_chose(pair: list[dict[str, Any]], root: Path) -> None:
    wanted = curve(trained_alone("experts, routes", root), "mismatch/experts")
    assert (wanted > 0.2).all()
    assert np.abs(curve(pair[0]["experts, routes"], "mismatch/experts") - wanted).max() < 1e-4


def test_bfloat16_weights_stay_within_their_rounding(pair: list[dict[str, Any]], root: Path) -> None:
    """The weights of both are rounded to 8 bits after each step; masters are what learns, in float32."""
    for name in ("narrow", "narrow adapter"):
        found, wanted = pair[0][name], trained_alone(name, root)
        assert np.abs(curve(found) - curve(wanted)).max() < NARROW_LOSS
        assert apart(found["weights"], wanted["weights"]) < NARROW_WEIGHTS
        masters = [n for n in found["state"] if n.startswith("master.")]
        assert bool(masters) == (name == "narrow")
        assert {found["weights"][n].dtype for n in found["weights"]} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["mixed", "mixed adapter"])
def test_mixed_precision_stays_near_float32(name: str, pair: list[dict[str, Any]], root: Path) -> None:
    """Weights, gradients and what the optimizer keeps stay float32, on two ranks and in one process."""
    exact = trained_alone(name, root)
    recipe = SCENARIOS[name].recipe(root).model_copy(update={"cluster": ClusterSection()})
    alone = train_here(recipe, SCENARIOS[name].steps, SCENARIOS[name].groups())
    for found in (pair[0][name], alone):
        assert {w.dtype for w in [*found["weights"].values(), *found["state"].values()]} == {torch.float32}
        assert 0 < np.abs(curve(found) - curve(exact)).max() < MIXED_LOSS
        assert 0 < apart(found["weights"], exact["weights"]) < MIXED_WEIGHTS


def test_ranks_agree(pair: list[dict[str, Any]]) -> None:
    for name in SCENARIOS:
        first, second = pair[0][name], pair[1][name]
        assert first["metrics"] == second["metrics"], name
        assert apart(first["weights"], second["weights"]) == 0, name


def test_it_says_how_it_is_spread(pair: list[dict[str, Any]]) -> None:
    said = {name: pair[0][name]["description"] for name in SCENARIOS}
    assert said["tied"].startswith("module with shared-prefix attention")
    assert said["tied"].endswith("sharded over 2 workers")
    assert said["copies"].endswith("whole, in 2 copies")
    assert said["offload"].endswith("offloaded to the CPU")
    assert said["window"].startswith("one sequence at a time")


def test_a_rank_holds_its_rows_alone(pair: list[dict[str, Any]]) -> None:
    first, second = (rank["names_of_shards"] for rank in pair)
    assert first["model.embed_tokens.weight"] == (34, 32)
    assert second["model.embed_tokens.weight"] == (33, 32)
    assert first["model.layers.0.self_attn.q_proj.bias"] == second["model.layers.0.self_attn.q_proj.bias"] == (16,)


def test_no_rank_ever_holds_the_model(pair: list[dict[str, Any]]) -> None:
    """Its own half, and little more: what the first has read and not yet dealt out."""
    for found in (rank["memory"] for rank in pair):
        assert found["model"] > 150
        assert 0.4 * found["model"] < found["held"] < 0.75 * found["model"]


def test_files_that_hold_other_tensors_are_read_whole(pair: list[dict[str, Any]], root: Path) -> None:
    wanted = dict(load_model(ModelSection(path=str(root / "experts"), device="cpu"))[0].named_parameters())
    for rank in pair:
        assert apart(rank["read_whole"]["weights"], wanted) == 0
        assert "read whole by the first (transformers makes its weights" in rank["read_whole"]["said"]


def test_a_model_that_refuses_in_the_midst_runs_one_sequence_at_a_time(pair: list[dict[str, Any]], root: Path) -> None:
    """And exactly so, although some layers were left gathered."""
    model = load_model(ModelSection(path=str(root / "tied"), device="cpu"))[0]
    wanted = SequenceForward(model)(ROW, 1.0)[0]
    wanted.sum().backward()
    for found in (rank["misfit"] for rank in pair):
        for said in found["said"]:
            assert said.startswith(
                "one sequence at a time (no module with shared-prefix attention: ValueError: not this"
            )
        torch.testing.assert_close(found["logprobs"], wanted.detach(), atol=1e-5, rtol=1e-5)
        assert apart(found["gradients"], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}) < 1e-4


def test_kernels_are_put_in_where_every_rank_has_them_and_agrees(pair: list[dict[str, Any]]) -> None:
    """A stand-in for those of a GPU: they are chosen by what the ranks find with them in place, on the shards."""
    for rank in pair:
        said, put = rank["kernels"]["fits"]
        assert all(line.startswith(f"module with shared-prefix attention, {liger.DESCRIPTION}") for line in said)
        assert put == len(said) == 2
        said, put = rank["kernels"]["here alone"]
        assert put == 0
        assert not any(liger.DESCRIPTION in line for line in said)
        (said,), put = rank["kernels"]["differs"]
        assert put == 1
        assert said.startswith(
            "liger-kernel is installed, but the model does not compute with it as without: it differs by"
        )


def test_a_rank_holds_half_of_divided_layers(pair: list[dict[str, Any]], root: Path) -> None:
    whole = load_model(ModelSection(path=str(root / "mixtures"), device="cpu"))[0].named_parameters()
    sizes = {name: p.nbytes for name, p in whole}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - experts
    for rank in pair:
        for held in rank["bytes_of_parts"].values():
            assert held[0] == experts // 2
            assert others * 0.48 < held[1] < others * 0.52


def test_every_rank_is_told_what_is_wrong(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["refused"] == pair[1]["refused"]
    missing, window, shard = pair[0]["refused"]
    assert "nowhere is no folder" in missing
    assert window.startswith("cluster.sequence_parallel: the model runs one sequence at a time")
    assert shard == "cluster.shard is 3, which does not divide the 2 workers"


def test_a_gradient_that_is_not_finite_is_thrown_away_everywhere(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        found = rank["not_finite"]
        assert not np.isfinite(found["norm"])
        assert apart(found["before"], found["after"]) == 0


def test_the_optimizer_goes_on_from_its_named_state(pair: list[dict[str, Any]]) -> None:
    found, wanted = pair[0]["resumed"]["found"], pair[0]["resumed"]["wanted"]
    assert apart(found["weights"], wanted["weights"]) == 0
    assert apart(found["state"], wanted["state"]) == 0
    assert float(wanted["state"]["step.lm_head.weight"]) == 3


def test_an_adapter_goes_on_from_its_folder(pair: list[dict[str, Any]], root: Path) -> None:
    found = pair[1]["started_adapter"]
    assert apart(found["adapter"], load_file(root / "adapter" / lora.WEIGHTS)) == 0
    assert len(found["trained"]) == len(found["adapter"]) == 28
    assert found["line"].startswith("LoRA of rank 4 on 14 layers")
