"""Checkpoints of several FSDP2 processes (gloo): written by so many, read by others, the same to the bit."""

import errno
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_help import Role, everything, learn, learned, names, on_ranks, same, spread, tiny
from lora_help import merged_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from transformers import AutoModelForCausalLM

from agentrl.checkpoint import safetensors_writer as tensor_files
from agentrl.checkpoint.gather import is_sharded, span_of
from agentrl.checkpoint.roles import load_roles, save_roles
from agentrl.errors import UserError
from agentrl.models import lora
from agentrl.recipe.sections.model import LoraSection

WAIT = timedelta(seconds=60)  # for a rank that does not answer


def plain(seed: int) -> Any:
    return tiny(seed)


def half(seed: int) -> Any:
    return tiny(seed, dtype=torch.bfloat16)


def adapted(seed: int) -> Any:
    """The base does not depend on the seed: only the adapter is in the trainer's state."""
    model = tiny()
    torch.manual_seed(seed)
    lora.add_adapter(model, LoraSection(rank=2, targets=("q_proj", "down_proj")), "base")
    return model


def role_of(make: Callable[[int], Any], seed: int, shape: tuple[int, ...]) -> Role:
    """Sharded over the last dimension of a mesh of `shape`, copied along the first where there are two."""
    names = ("replicate", "shard")[-len(shape) :]
    return Role.of(spread(make(seed), init_device_mesh("cpu", shape, mesh_dim_names=names)))


def go_on(
    rank: int, size: int, shape: tuple[int, ...], make: Callable[[int], Any], start: Path | None, to: Path, held: Path
) -> None:
    """Load from `start` (None: learn two steps from nothing), note what is held in `held`, save to `to`; and learn on
    while that is written."""
    role = role_of(make, 3 if start else 0, shape)
    if start is not None:
        load_roles({"actor": role}, start, rank=rank)
    else:
        learn(role, 1)
        learn(role, 2)
    state = everything(role)
    numbers = torch.get_rng_state()
    group = dist.new_group(backend="gloo", timeout=WAIT)
    pending = save_roles({"actor": role}, to, group=group)
    learn(role, 3)
    torch.save({"state": state, "next": everything(role), "numbers": numbers}, held.with_suffix(f".{rank}"))
    pending.result()


def run(folder: Path, shape: tuple[int, ...], make: Callable[[int], Any], start: Path | None) -> tuple[Path, list[Any]]:
    """Where it is saved, and what each rank held."""
    to = folder / "x".join(map(str, shape))
    to.mkdir(parents=True)
    size = torch.Size(shape).numel()
    held = folder / f"{to.name}_held"
    on_ranks(size, go_on, shape, make, start, to, held)
    return to, [torch.load(held.with_suffix(f".{rank}")) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain, pytest.param(half, marks=pytest.mark.long), adapted])
def test_two_ranks_save_and_others_go_on(tmp_path: Path, make: Callable[[int], Any]) -> None:
    two, (first, second) = run(tmp_path, (2,), make, None)
    assert same(first["state"], second["state"])

    one = Role.of(make(4))
    load_roles({"actor": one}, two)
    assert same(everything(one), first["state"])
    assert torch.equal(torch.get_rng_state(), first["numbers"])
    learn(one, 3)
    for name, tensor in everything(one).items():
        torch.testing.assert_close(tensor, first["next"][name], atol=1e-5, rtol=1e-4)

    three, held = run(tmp_path, (3,), make, two)
    assert all(same(rank["state"], first["state"]) for rank in held)
    again = Role.of(make(5))
    load_roles({"actor": again}, three)
    assert same(everything(again), first["state"])

    whole = AutoModelForCausalLM.from_pretrained(two)
    for name, tensor in merged_state(again.model).items():
        torch.testing.assert_close(whole.state_dict()[name], tensor, atol=1e-6, rtol=1e-6)
    if make is adapted:
        assert names(two / "adapter") == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.slow
def test_ranks_go_on_with_their_own_random_numbers_and_new_ones_with_others(tmp_path: Path) -> None:
    two, before = run(tmp_path, (2,), plain, None)
    _, after = run(tmp_path, (3,), plain, two)
    for rank in (0, 1):
        assert torch.equal(before[rank]["numbers"], after[rank]["numbers"])
    assert not any(torch.equal(after[2]["numbers"], after[rank]["numbers"]) for rank in (0, 1))


@pytest.mark.slow
def test_one_process_saves_and_ranks_go_on_hybrid_ones_too(tmp_path: Path) -> None:
    alone = learned(1, 2)
    start = tmp_path / "alone"
    start.mkdir()
    save_roles({"actor": alone}, start).result()
    for shape in ((2,), (2, 2)):
        saved, held = run(tmp_path, shape, plain, start)
        assert all(same(rank["state"], everything(alone)) for rank in held)
        again = Role.of(tiny(seed=8))
        load_roles({"actor": again}, saved)
        assert same(everything(again), everything(alone))
        assert same(
            dict(AutoModelForCausalLM.from_pretrained(saved).named_parameters()), dict(alone.model.named_parameters())
        )


def test_no_tensor_is_sharded_while_another_thread_imports_what_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint's thread does during the next update."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("torch.distributed.tensor"))
    assert not is_sharded(torch.zeros(1))


@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 12])
@pytest.mark.parametrize("ranks", [(1,), (4,), (2, 3), (3, 2)])
def test_the_parts_of_a_tensor_are_those_of_chunk(rows: int, ranks: tuple[int, ...]) -> None:
    """Short and empty ones too; two dimensions of a mesh cut one dimension one after the other."""
    whole = torch.arange(rows * 3).reshape(rows, 3)
    for place in product(*map(range, ranks)):
        (size, offset), part = span_of((rows, 3), [Shard(0)] * len(ranks), ranks, place), whole
        for parts, index in zip(ranks, place, strict=True):
            cut = part.chunk(parts)
            part = cut[index] if index < len(cut) else part[:0]
        assert size == tuple(part.shape)
        assert torch.equal(whole[offset[0] : offset[0] + size[0]], part)
        assert span_of((rows, 3), [Replicate()] * len(ranks), ranks, place) == ((rows, 3), (0, 0))


def test_what_is_placed_otherwise_is_not_put_together_wrongly() -> None:
    with pytest.raises(NotImplementedError, match=r"^tensors placed as P"):
        span_of((4, 3), [Partial()], (2,), (0,))


def refuse(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def one_disk_is_full(rank: int, size: int, where: str, to: Path) -> None:
    """On one rank only: each is told or goes on, and none waits for ever."""
    import torch.distributed.checkpoint as dcp

    from agentrl.checkpoint.huggingface import HuggingFace

    role = role_of(plain, 0, (size,))
    group = dist.new_group(backend="gloo", timeout=WAIT)
    places = {"trainer": (dcp.FileSystemWriter, "write_data", 1), "begin": (HuggingFace, "begin", 0),
              "weights": (tensor_files, "_write_values", 0)}  # fmt: skip
    owner, name, full = places[where]
    kept = getattr(owner, name)
    if rank == full:
        setattr(owner, name, refuse)
    told = None
    try:
        save_roles({"actor": role}, to, group=group).result()
    except UserError as error:
        told = str(error)
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, told)
    assert everybody[full] is not None
    assert "a checkpoint could not be written: No space left on device (" in everybody[full]
    assert all(everybody) or where == "weights"
    setattr(owner, name, kept)
    save_roles({"actor": role}, to, group=group).result()  # and the group is fit for the next


@pytest.mark.slow
@pytest.mark.parametrize("where", ["trainer", "begin", "weights"])
def test_the_disk_of_one_rank_is_full(tmp_path: Path, where: str) -> None:
    on_ranks(2, one_disk_is_full, where, tmp_path)
    again = Role.of(tiny(seed=2))
    load_roles({"actor": again}, tmp_path)
    assert same(everything(again), everything(Role.of(tiny())))
