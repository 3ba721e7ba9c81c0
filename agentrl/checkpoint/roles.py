"""What a role needs to go on, written by each rank and read by as many or others.

`trainer/<role>/` is a torch distributed checkpoint of these tensors, by the names of parameters that know nothing of
sharding: `weight.<p>` (the float32 master where there is one), `buffer.<b>`, what the optimizer keeps of each
(`exp_avg.<p>`, `exp_avg_sq.<p>`, `step.<p>`), `rng.<rank>`. Parameters that are not trained are not in it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from agentrl.checkpoint import disk, rng, sharded
from agentrl.checkpoint.huggingface import HuggingFace
from agentrl.checkpoint.pending import Pending
from agentrl.errors import UserError

ACTOR = "actor"
TRAINER = "trainer"
WEIGHT, BUFFER, MASTER = "weight.", "buffer.", "master."
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What wrappers around a module put into the names of its parameters."""


class Kept(Protocol):
    """An optimizer: what it keeps of each parameter, by `<kind>.<parameter's name>`; a `master.` is what is trained in
    the place of a parameter of less precision."""

    def named_state(self) -> dict[str, Tensor]: ...

    def load_named_state(self, state: Mapping[str, Tensor]) -> None: ...


class RoleState(Protocol):
    """A role that is trained: an actor, a critic. Its model may be sharded by FSDP2."""

    @property
    def model(self) -> Any: ...

    @property
    def optimizer(self) -> Kept: ...


def save_roles(
    roles: Mapping[str, RoleState],
    folder: Path,
    *,
    tokenizer: Any = None,
    group: Any = None,
    asynchronous: bool = True,
) -> Pending:
    """Write `roles` below `folder`, which exists: `trainer/<role>/` of each, and the Hugging Face folder of `actor`
    into `folder` itself (with `tokenizer`, where one is given).

    group: of all ranks that hold these roles, all of which call this; gloo, and used for nothing else (None: there is
    one process). Asynchronous: this returns once a copy is taken, on the CPU, of what is trained; the roles may go on
    learning, and the Pending tells how the writing ended.

    The Pending raises UserError, one line, when the disk refused.
    """
    rank = dist.get_rank(group) if group is not None else 0
    copied = {name: _state(role, rank, copy=asynchronous) for name, role in roles.items()}
    exported, refused = None, None
    if ACTOR in roles:
        exported = HuggingFace(roles[ACTOR].model, _stand_in(roles[ACTOR], copied[ACTOR]))
        if rank == 0:
            refused = _begin(exported, folder, tokenizer)

    def write() -> None:
        try:
            _agree(refused, group)
            for name, tensors in copied.items():
                sharded.write(tensors, folder / TRAINER / name, group)
            if exported is not None:
                exported.write(folder, group)
        except (OSError, RuntimeError, sharded.CheckpointException) as error:
            if line := disk.refused(folder, error):
                raise UserError(line) from error
            raise

    return Pending(write, asynchronous)


def check_whole(folder: Path) -> None:
    """Raises UserError unless all that the ranks have written to `folder` can be seen from here."""
    roles = [place for place in (folder / TRAINER).glob("*") if place.is_dir()]
    lacks = next((place / name for place in roles if (name := sharded.missing(place))), None if roles else folder)
    if lacks is not None:
        raise UserError(
            f"{lacks} was written by a worker, and cannot be seen by the process of the loop: give a run on several "
            "machines an output folder that all of them share"
        )


def _begin(exported: HuggingFace, folder: Path, tokenizer: Any) -> OSError | None:
    try:
        exported.begin(folder, tokenizer)
    except OSError as error:
        return error
    return None


def _agree(refused: OSError | None, group: Any) -> None:
    """Raises what rank 0 was refused, on every rank: none goes on to wait for it."""
    box = [refused]
    if group is not None:
        dist.broadcast_object_list(box, group_src=0, group=group)
    if box[0] is not None:
        raise box[0]


def load_roles(roles: Mapping[str, RoleState], folder: Path, *, rank: int = 0) -> None:
    """The inverse of `save_roles`, whatever number of ranks saved; each rank reads its own parts, and no other's.

    Raises UserError: a role that was not saved, of another model, damaged files.
    """
    for name, role in roles.items():
        place = folder / TRAINER / name
        try:
            _load(role, place, rank)
        except sharded.UNREADABLE as error:
            raise UserError(f"{folder}: the trainer's state cannot be restored: {_why(error, name, place)}") from error


def _why(error: BaseException, name: str, place: Path) -> str:
    if place.with_suffix(".pt").exists():
        return "an older version of agentrl wrote it; its model can be trained on (model.path), the run cannot go on"
    if not place.is_dir():
        return f"no {name} was saved there"
    return f"{name}: {sharded.line(error)}"


def parameters(model: Any) -> dict[str, Tensor]:
    """Those that are trained, by name; sharded ones as the shards that are kept, not as what a pass gathers."""
    model.state_dict(keep_vars=True)  # where FSDP2 has gathered weights, this brings the shards back
    return {_plain(name): p for name, p in model.named_parameters() if p.requires_grad}


def _buffers(model: Any) -> dict[str, Tensor]:
    """Those that are saved with a model."""
    saved = model.state_dict(keep_vars=True)
    return {_plain(name): b for name, b in model.named_buffers() if name in saved}


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _tensors(role: RoleState) -> dict[str, Tensor]:
    """What is saved of a role: the tensors themselves, by the names they are saved by."""
    trained = parameters(role.model)
    optimized = {_plain(name): tensor for name, tensor in role.optimizer.named_state().items()}
    if unknown := [name for name in optimized if name.partition(".")[2] not in trained]:
        raise ValueError(f"the optimizer keeps {unknown[0]}, and the model trains no such parameter")
    masters = {k.removeprefix(MASTER): v for k, v in optimized.items() if k.startswith(MASTER)}
    return {
        **{WEIGHT + name: masters.get(name, p) for name, p in trained.items()},
        **{BUFFER + name: buffer for name, buffer in _buffers(role.model).items()},
        **{name: value for name, value in optimized.items() if not name.startswith(MASTER)},
    }


def _state(role: RoleState, rank: int, copy: bool) -> dict[str, Tensor]:
    kept = {name: tensor.detach() for name, tensor in _tensors(role).items()}
    if copy:
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in kept.items()}
    return {**kept, **rng.state(rank)}


def _stand_in(role: RoleState, state: Mapping[str, Tensor]) -> Any:
    """Which tensor of the copy stands for a parameter of the model; what is not trained stands for itself."""
    places = {id(p): state[WEIGHT + name] for name, p in parameters(role.model).items()}
    places |= {id(b): state[BUFFER + name] for name, b in _buffers(role.model).items()}
    return lambda tensor: places.get(id(tensor), tensor.detach())


def _load(role: RoleState, place: Path, rank: int) -> None:
    saved = sharded.describe(place)
    live = _tensors(role)
    _compare(live, saved)
    states = rng.wanted(saved, rank)
    sharded.read({**{name: tensor.detach() for name, tensor in live.items()}, **states}, place)
    role.optimizer.load_named_state(role.optimizer.named_state())  # the masters' values go into the model
    rng.restore(states, rank)


def _compare(live: Mapping[str, Tensor], saved: sharded.Described) -> None:
    """Raises ValueError: what differs first, in words."""
    differ = {name for name in saved if not name.startswith(rng.KINDS)} ^ live.keys()
    if odd := sorted(differ, key=lambda name: (not name.startswith(WEIGHT), name)):
        lacks = "it lacks" if odd[0] in live else "the model lacks"
        raise ValueError(f"it is of another model: {lacks} {odd[0]} (and {len(odd) - 1} more)")
    for name, tensor in live.items():
        if saved[name][0] != tuple(tensor.shape):
            shapes = f"{list(saved[name][0])}, the model's {list(tensor.shape)}"
            raise ValueError(f"it is of another model: {name} is {shapes}")
