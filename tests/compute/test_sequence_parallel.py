"""Two processes that share a packed row compute what one does: log-probs, entropies, gradients."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packing_help import SHAPES, Live, make_batch, make_deep, make_model
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from warm import on_ranks

from agentrl.compute.batch import prefix_trees
from agentrl.compute.forward import Forward, ModuleForward
from agentrl.compute.packing import Packed, pack
from agentrl.compute.sequence_parallel import SequenceParallelForward
from agentrl.errors import UserError
from agentrl.recipe.schema import Recipe
from agentrl.training.preflight import lacking

ONE_KV_HEAD: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 1, "initializer_range": 0.2,
}  # fmt: skip
ROWS = {
    "even": make_batch(SHAPES), "uneven": make_batch([(9, [12, 5, 1, 7]), (4, [3])]), "short": make_batch([(1, [1])]),
    "first half": make_batch([(20, [1])]), "deep": make_deep(6),
}  # fmt: skip
MODELS = ("qwen3", "gpt2", "one kv head")


def model_named(name: str) -> PreTrainedModel:
    if name != "one kv head":
        return make_model(name)
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**ONE_KV_HEAD))
    return model.eval()


def row_named(name: str) -> Packed:
    batch = ROWS[name]
    batch.tokens["loss_mask"][batch.offsets[1:] - 1] = 1
    return pack(batch, prefix_trees(batch, least=1 if name == "deep" else None))


def measured(forward: Forward, model: torch.nn.Module, row: Packed) -> dict[str, Any]:
    """A loss that no sum over tokens is, as that of a sequence's ratio."""
    logprobs, entropies = forward(row, 0.8)
    weight = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1)) / 10
    loss = (weight * logprobs).sum().exp() + (weight * entropies).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"logprobs": logprobs.detach(), "entropies": entropies.detach(), "gradients": gradients}


def kept(forward: Forward, row: Packed) -> int:
    """Bytes that stand between a forward and its backward pass."""
    with Live() as live:
        found = forward(row, 1.0)
        size = live.bytes
    del found
    return size


LONG = [(64, [64] * 8)] * 4


def long_row() -> Packed:
    batch = make_batch(LONG)
    return pack(batch, prefix_trees(batch))


class Root(torch.nn.Module):
    """What is sharded: its forward runs the role's computation, so that the hooks see it."""

    def __init__(self, model: PreTrainedModel, forward: Forward) -> None:
        super().__init__()
        self.model, self.run = model, forward

    def forward(self, row: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        return self.run(row, temperature)


def _whole(gradient: Any) -> Tensor:
    whole: Tensor = gradient.full_tensor()
    return whole


def sharded(group: dist.ProcessGroup, row: Packed) -> list[dict[str, Any]]:
    """Two passes under FSDP2, the loss times the ranks, as it averages."""
    model = make_model("qwen3")
    root = Root(model, SequenceParallelForward(model, group))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(root)
    found = []
    for _ in range(2):
        logprobs, _ = root(row, 0.8)
        (2 * logprobs.sum()).backward()
        gradients: Any = {n: _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        found.append({"logprobs": logprobs.detach(), "gradients": gradients})
        model.zero_grad()
    return found


def checkpointed(group: dist.ProcessGroup) -> dict[str, Any]:
    from functools import partial

    from agentrl.compute.hf_attention import checkpoint_contexts

    model = make_model("qwen3")
    again = {"use_reentrant": False, "context_fn": partial(checkpoint_contexts, model)}
    model.activation_checkpointing_enable(again)
    model.train()
    return measured(SequenceParallelForward(model, group), model, row_named("even"))


def two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    found: dict[str, Any] = {}
    for name in MODELS:
        model = model_named(name)
        forward = SequenceParallelForward(model, group)
        for row in ROWS:
            found[f"{name}, {row}"] = measured(forward, model, row_named(row))
    for row in ("even", "deep"):
        found[f"sharded, {row}"] = sharded(group, row_named(row))
    found["checkpointed"] = checkpointed(group)
    found["bytes"] = kept(SequenceParallelForward(make_model("qwen3"), group), long_row())
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(two, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def added(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    assert first.keys() == second.keys()
    return {name: first[name] + second[name] for name in first}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """An entry may differ by 1e-5, of a tensor with large entries by 3e-6 of the largest: it is a sum of such."""
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        bound = max(1e-5, 3e-6 * float(gradient.abs().max()))
        torch.testing.assert_close(found[name], gradient, atol=bound, rtol=1e-5, msg=f"{name} differs")


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_compute_what_one_process_does(name: str, row: str, ranks: list[dict[str, Any]]) -> None:
    model = model_named(name)
    wanted = measured(ModuleForward(model), model, row_named(row))
    found = [rank[f"{name}, {row}"] for rank in ranks]
    for each in found:
        torch.testing.assert_close(each["logprobs"], wanted["logprobs"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(each["entropies"], wanted["entropies"], atol=1e-5, rtol=1e-5)
    same(added(found[0]["gradients"], found[1]["gradients"]), wanted["gradients"])


@pytest.mark.slow
@pytest.mark.parametrize("row", ["even", "deep"])
def test_under_fsdp_the_averaged_gradient_is_exact(row: str, ranks: list[dict[str, Any]]) -> None:
    model = make_model("qwen3")
    logprobs, _ = ModuleForward(model)(row_named(row), 0.8)
    logprobs.sum().backward()
    for found in (*ranks[0][f"sharded, {row}"], *ranks[1][f"sharded, {row}"]):
        torch.testing.assert_close(found["logprobs"], logprobs.detach(), atol=1e-5, rtol=1e-5)
        same(found["gradients"], {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.slow
def test_layers_computed_again_exchange_alike(ranks: list[dict[str, Any]]) -> None:
    wanted = [rank["qwen3, even"] for rank in ranks]
    found = [rank["checkpointed"] for rank in ranks]
    for got, expected in zip(found, wanted, strict=True):
        same(got["gradients"], expected["gradients"])


@pytest.mark.slow
def test_a_rank_keeps_half_the_activations(ranks: list[dict[str, Any]]) -> None:
    alone = kept(ModuleForward(make_model("qwen3")), long_row())
    assert alone > 4 << 20
    for rank in ranks:
        assert rank["bytes"] < 0.6 * alone, rank["bytes"] / alone


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def test_heads_that_cannot_be_dealt_out_are_named(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    with pytest.raises(UserError, match=r"sequence_parallel: 3 workers cannot share 4 .* one of 1, 2, 4"):
        SequenceParallelForward(make_model("qwen3"), alone)


@pytest.mark.parametrize(("shared", "said"), [(3, True), (2, False), (1, False)])
def test_they_are_named_before_anything_is_loaded(shared: int, said: bool) -> None:
    recipe = Recipe.load("gsm8k_tool", [f"cluster.workers={shared}", f"cluster.sequence_parallel={shared}"])
    assert any(line.startswith("cluster.sequence_parallel: 3 workers cannot share") for line in lacking(recipe)) is said
