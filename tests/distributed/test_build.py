"""A sharded model on a single rank, in this process: it computes what the plain model does."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded_help import FOLDERS, ROW, SCENARIOS, apart, make_folders, whole
from torch import Tensor
from vision_help import groups

from agentrl.checkpoint.checkpoints import save_model
from agentrl.compute.batch import Batch
from agentrl.compute.classifier import RewardModel, scoring_batch
from agentrl.compute.forward import SequenceForward
from agentrl.compute.packing import Packed, micro_batches
from agentrl.compute.value_head import CONFIDENCE_FEATURES, ModuleValues
from agentrl.distributed.fsdp import build
from agentrl.distributed.fsdp.build import build_critic, build_policy, build_reference, build_reward_model
from agentrl.distributed.fsdp.mesh import ParallelContext, make_context
from agentrl.errors import UserError
from agentrl.images import keyed
from agentrl.models.load import load_model, load_scorer
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.recipe.sections.model import ModelSection

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def context() -> Iterator[ParallelContext]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make_context(ClusterSection(), torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_folders(folder := tmp_path_factory.mktemp("models"))
    return folder


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["tied", "untied", "window"])
def test_policy_and_reference_compute_what_the_plain_model_does(
    name: str, context: ParallelContext, root: Path
) -> None:
    recipe = SCENARIOS[name].recipe(root)
    plain = load_model(recipe.model)[0]
    wanted = SequenceForward(plain)(ROW, 1.0)[0]
    policy, reference = build_policy(recipe, context), build_reference(recipe, context)
    for built in (policy, reference):
        assert built.description.endswith(", whole")
        torch.testing.assert_close(built.forward(ROW, 1.0)[0], wanted, atol=1e-5, rtol=1e-5)
    assert not any(p.requires_grad for p in reference.model.parameters())
    policy.forward(ROW, 1.0)[0].sum().backward()
    wanted.sum().backward()
    found = {n: whole(p.grad) for n, p in policy.model.named_parameters() if p.grad is not None}
    assert apart(found, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}) < 1e-4


def test_a_critic_begins_with_values_of_0(context: ParallelContext, root: Path) -> None:
    critic = build_critic(SCENARIOS["critic"].recipe(root), context)
    confidence = torch.zeros(len(ROW.predict), CONFIDENCE_FEATURES)
    assert critic.forward(ROW, confidence).abs().max() == 0


def test_values_of_the_wrong_tokens_are_found_although_a_new_critic_gives_all_of_them_0(
    context: ParallelContext, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reversed(ModuleValues):
        def __call__(self, packed: Packed, features: Tensor) -> Tensor:
            return super().__call__(replace(packed, predict=packed.predict[::-1].copy()), features)

    recipe = SCENARIOS["critic"].recipe(root)
    assert build_critic(recipe, context).description.startswith("module with shared-prefix attention")
    monkeypatch.setattr(build, "ModuleValues", Reversed)
    assert re.match(r"one sequence at a time \(no .*: it differs by", build_critic(recipe, context).description)


@pytest.mark.slow
def test_a_reward_model_sees_what_the_plain_one_does(context: ParallelContext, root: Path, tmp_path: Path) -> None:
    save_model(*load_scorer(ModelSection(path=str(root / "seeing"), device="cpu")), tmp_path)
    recipe = SCENARIOS["seeing, critic"].recipe(root)
    recipe = recipe.model_copy(update={"rewards": recipe.rewards.model_copy(update={"model": str(tmp_path)})})
    built, plain = build_reward_model(recipe, context), RewardModel(recipe)
    shown = [t for group in groups(plain.model) for t in group.trajectories]
    batch = scoring_batch([keyed(t.ids, t.images) for t in shown], [0] * len(shown))
    sharded = RewardModel(recipe, built.forward)
    assert built.description.startswith("packed, prompts shared")
    assert abs(sharded.scores(batch) - plain.scores(batch)).max() < 1e-5


@pytest.mark.slow
def test_mixed_precision_stays_near_float32_where_a_model_sees(context: ParallelContext, root: Path) -> None:
    recipe = SCENARIOS["seeing, critic"].recipe(root)
    mixed = recipe.model_copy(update={"model": recipe.model.model_copy(update={"compute": "bfloat16"})})
    exact, near = build_policy(recipe, context), build_policy(mixed, context)
    (packed,) = micro_batches(Batch.from_groups(groups(exact.model)), 100_000)
    wanted, found = (built.forward(packed, 1.0)[0] for built in (exact, near))
    assert float((wanted - found).detach().abs().mean()) < 0.1
    found.sum().backward()
    assert all(p.grad is not None for p in near.model.model.visual.blocks.parameters())


@pytest.mark.parametrize("key", ["shard", "sequence_parallel"])
def test_what_does_not_divide_the_ranks_is_refused(key: str, context: ParallelContext) -> None:
    with pytest.raises(UserError, match=f"^cluster.{key} is 3, which does not divide the 1 workers$"):
        make_context(ClusterSection.model_validate({"workers": 3, key: 3}), torch.device("cpu"))


def test_a_folder_that_is_none_is_refused(context: ParallelContext, root: Path) -> None:
    assert "nowhere" not in FOLDERS
    recipe = SCENARIOS["tied"].recipe(root)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(root / "nowhere")})})
    with pytest.raises(UserError, match="nowhere is no folder"):
        build_policy(recipe, context)
