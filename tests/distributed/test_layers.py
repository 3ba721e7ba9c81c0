"""Four ranks that divide layers, in copies that FSDP2 shards: what they learn, hold, save and hand over."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layers_help import LAYOUTS, run_rank
from safetensors.torch import load_file
from sharded_help import SCENARIOS, apart, curve, make_folders, train_here
from warm import on_ranks

from agentrl.checkpoint.roles import load_roles
from agentrl.learner.roles import LocalRoles
from agentrl.models.load import load_model
from agentrl.weights.source import ModelWeights

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    make_folders(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    on_ranks(run_rank, root, size=4)
    return [torch.load(root / f"rank{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.fixture(scope="module")
def alone(root: Path) -> dict[str, Any]:
    scenario = SCENARIOS["tensor"]
    return train_here(scenario.recipe(root, alone=True), scenario.steps, scenario.groups())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_are_divided_learn_the_same(
    layout: str, ranks: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    for rank in ranks:
        found = rank[layout]
        for names in ((), ("train/grad_norm",), ("train/kl",)):
            assert np.abs(curve(found, *names) - curve(alone, *names)).max() < 1e-5
        assert apart(found["weights"], alone["weights"]) < 1e-5
        assert apart(found["state"], alone["state"]) < 1e-5


def test_each_rank_holds_its_part_in_bytes(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    whole = sum(tensor.nbytes for tensor in alone["weights"].values())
    for layout, cluster in LAYOUTS.items():
        for rank in ranks:
            assert 0.96 * whole < cluster.get("shard", 4) * rank[layout]["bytes"] < 1.08 * whole, layout
    shapes = ranks[3]["tensor"]["shapes"]
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (16, 16)  # [32, 32]: heads by 2, FSDP2 by 2
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (2, 16, 16)  # [4, 32, 16]: experts by 2
    assert ranks[0]["experts"]["shapes"]["model.layers.0.mlp.experts.gate_up_proj"] == (2, 16, 32)  # [4, 32, 32]
    assert ranks[0]["both"]["shapes"]["model.layers.0.mlp.experts.gate_up_proj"] == (1, 32, 32)
    assert ranks[0]["experts, copies"]["shapes"]["model.layers.0.mlp.experts.gate_up_proj"] == (2, 32, 32)
    assert ranks[3]["tensor, copies"]["shapes"]["model.layers.0.self_attn.q_proj.weight"] == (16, 32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_goes_on_in_another_layout(layout: str, ranks: list[dict[str, Any]], root: Path) -> None:
    """Each was saved by the layout of its name, and read by another one and by one process."""
    for rank in ranks:
        assert apart(rank["again"][layout]["weights"], rank[layout]["weights"]) == 0
        assert apart(rank["again"][layout]["state"], rank[layout]["state"]) == 0
    recipe = SCENARIOS["tensor"].recipe(root, alone=True)
    place = LocalRoles(recipe, load_model(recipe.model)[0])
    load_roles({"actor": place.actor}, root / "saved" / layout)
    assert apart(dict(ModelWeights(place.model)), ranks[0][layout]["weights"]) == 0


def test_an_export_has_the_names_of_hugging_face(ranks: list[dict[str, Any]], root: Path) -> None:
    for layout in LAYOUTS:
        exported = load_file(root / "saved" / layout / "model.safetensors")
        assert exported.keys() == load_file(root / "mixtures" / "model.safetensors").keys()
        assert apart(exported, {name: ranks[0][layout]["weights"][name] for name in exported}) == 0


def test_what_cannot_be_divided_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sinks, window, heads, experts, adapter, targets = rank["refused"]
        assert sinks == (
            "cluster.tensor_parallel: transformers declares no plan for the layers of gpt_oss; leave it at 1"
        )
        assert window == "cluster.expert_parallel: qwen3 has no experts that can be divided; leave it at 1"
        assert heads == "cluster.tensor_parallel: 4 workers cannot share 2 attention heads evenly"
        assert experts == "cluster.expert_parallel: 4 workers cannot share 6 experts evenly"
        assert adapter == (
            "cluster.tensor_parallel does not go with an adapter on layers.0.self_attn.q_proj; leave it at 1"
        )
        assert targets == (
            "cluster.expert_parallel does not go with an adapter on layers.1.mlp.experts: name other layers in "
            "model.lora.targets"
        )
