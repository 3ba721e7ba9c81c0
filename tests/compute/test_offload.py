"""What lies in CPU memory is copied beside the computation: the order of copies, and the same numbers as without."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from late_copies import LateTransfers, late_copies
from packing_help import make_model
from tiny_models import qwen3
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from agentrl.compute import offload
from agentrl.compute.forward import _probe, choose
from agentrl.learner import optimizer
from agentrl.learner.optimizer import Optimizer

__all__ = ["late_copies"]
ROW = _probe(60)
LAYERS = 4


def deep() -> Any:
    return qwen3(num_hidden_layers=LAYERS, initializer_range=0.2)


def gradients(model: Any, passes: int = 1, offload: bool = True) -> dict[str, Tensor]:
    """Of so many passes, all of which are made before the first is gone back through."""
    forward, _ = choose(model, checkpointing=True, offload=offload)
    losses = [forward(ROW, 0.9 + number / 10)[0].sum() for number in range(passes)]
    for loss in losses:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [deep, lambda: make_model("gpt2")])
@pytest.mark.parametrize("passes", [1, 2])
def test_layers_whose_inputs_were_away_have_the_same_gradients(
    make: Any, passes: int, late_copies: LateTransfers
) -> None:
    wanted, found = gradients(make(), passes, offload=False), gradients(make(), passes)
    assert late_copies.order[0] == "out 0"
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name
    assert any(name.startswith("wait in") for name in late_copies.order)


def test_an_input_leaves_while_its_layer_runs_and_comes_while_the_next_one_is_computed(
    late_copies: LateTransfers,
) -> None:
    gradients(deep())
    assert late_copies.order == [
        "out 0", "out 1", "wait out 0", "out 2", "wait out 1", "wait out 2",  # the last layer's stays
        "in 2", "wait in 2", "in 1", "wait in 1", "in 0", "wait in 0",
    ]  # fmt: skip
    config = deep().config
    assert late_copies.most == 2 * len(ROW.ids) * config.hidden_size * 4


def test_without_a_device_of_its_own_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    moved: list[str] = []
    for name in ("to", "copy_"):
        plain = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda *a, _plain=plain, _name=name, **o: moved.append(_name) or _plain(*a, **o)
        )
    forward, _ = choose(model, checkpointing=True, offload=True)
    moved.clear()
    forward(ROW, 1.0)[0].sum().backward()
    assert "copy_" not in moved


SHAPES = ((6, 4), (4,), (8, 8), (3,), (5, 5))


def stepped(weights: list[nn.Parameter], offload: bool, resumed: bool = False) -> tuple[list[Tensor], Optimizer]:
    made = Optimizer(weights, (0.9, 0.95), 0.1, 1.0, offload)
    for number in range(4):
        for index, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, 0.3 * (index + 1) - 0.2 * number) if number != index else None
        made.step(0.1)
        if resumed and number == 1:
            state = {name: tensor.clone() for name, tensor in made.named_state().items()}
            made = Optimizer(weights, (0.9, 0.95), 0.1, 1.0, offload)
            made.load_named_state(state)
    return [weight.detach() for weight in weights], made


def weights_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("bucket", [1, 300, 1 << 20])
def test_steps_with_moments_on_the_host_are_the_same(
    dtype: torch.dtype, resumed: bool, bucket: int, late_copies: LateTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "BUCKET_BYTES", bucket)
    wanted, reference = stepped(weights_of(dtype), False)
    assert not late_copies.order
    found, made = stepped(weights_of(dtype), True, resumed)
    for weight, other in zip(found, wanted, strict=True):
        assert torch.equal(weight, other)
    state, expected = made.named_state(), reference.named_state()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def test_a_bucket_is_stepped_while_the_next_comes_and_the_last_one_leaves(
    late_copies: LateTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "BUCKET_BYTES", 1)
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(5)]
    made = Optimizer(weights, (0.9, 0.95), 0.1, 1.0, offload=True)
    step = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *a, **b: late_copies.order.append("step") or step(*a, **b))
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    made.step(0.1)
    order = [
        name for name in late_copies.order if name == "step" or int(name.split()[-1]) % 2 == 0
    ]  # one moment of two
    assert order[:10] == [
        "in 0", "wait in 0", "in 2", "step", "out 0", "wait in 2", "in 4", "step", "wait out 0", "out 2",
    ]  # fmt: skip
    assert order[-3:] == ["wait out 6", "out 8", "wait out 8"]
    assert late_copies.most == 3 * 2 * 16 * 4
    made.named_state()
    assert late_copies.order[-1] == "finish"


@pytest.mark.usefixtures("late_copies")
def test_pinned_memory_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "PIECE", 1024)
    memory = offload.PinnedMemory()
    shapes = ((3, 5), (), (64,), (65,), (200,), (2, 3))
    made = [memory.zeros_like(torch.ones(shape)) for shape in shapes]
    for number, tensor in enumerate(made):
        assert tensor.shape == shapes[number]
        tensor.fill_(number)
    assert [set(tensor.flatten().tolist()) for tensor in made] == [{number} for number in range(len(shapes))]
    pieces = [tensor.untyped_storage().data_ptr() for tensor in made]
    assert len(set(pieces)) == 3  # the fourth begins another one, the fifth has its own
    assert pieces[0] == pieces[1] == pieces[2]
    assert pieces[3] == pieces[5]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in made)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_shards_of_moments_go_by_themselves(late_copies: LateTransfers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "BUCKET_BYTES", 300)
    mesh = init_device_mesh("cpu", (1,))

    def sharded() -> list[nn.Parameter]:
        return [nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])) for weight in weights_of()]

    wanted, _ = stepped(sharded(), False)
    found, made = stepped(sharded(), True)
    for weight, other in zip(found, wanted, strict=True):
        assert torch.equal(weight.to_local(), other.to_local())
    assert all(isinstance(made.named_state()[f"exp_avg.{n}"], DTensor) for n in range(len(SHAPES)))
    assert late_copies.order
