"""The state of roles: written by every rank, read by any number of ranks.

`trainer/<role>/` holds these tensors, by parameter names without sharding: `weight.<p>` (the master if there is one),
`buffer.<b>`, the optimizer's state of each parameter (`exp_avg.<p>`, `exp_avg_sq.<p>`, `step.<p>`), and the state of
torch's random numbers on each rank (`rng.<rank>`, `rng_cuda.<rank>`). One process writes a safetensors file, several
write a torch distributed checkpoint; either is read by any number. Parameters that neither are trained nor follow
others are not in it.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.checkpoint import disk, state_file
from agentrl.checkpoint.huggingface import HuggingFace
from agentrl.checkpoint.pending import Pending
from agentrl.checkpoint.state_file import Described
from agentrl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACTOR = "actor"
TRAINER = "trainer"
WEIGHT, BUFFER, MASTER = "weight.", "buffer.", "master."
RNG = RNG_CPU, RNG_CUDA = "rng.", "rng_cuda."
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Prefixes that wrappers of modules add to the names of parameters."""


class Format(Protocol):
    """How the tensors of a role are stored in a folder: the modules `state_file` and `sharded`."""

    @property
    def UNREADABLE(self) -> tuple[type[BaseException], ...]:  # noqa: N802 - a constant of theirs
        """Raised for files that are missing, damaged or of another kind."""

    def describe(self, folder: Path, /) -> Described:
        """Names, shapes and dtypes. Raises one of UNREADABLE."""

    def missing(self, folder: Path, /) -> str | None:
        """The first file that is missing or too short; None: all are complete."""

    def read(self, tensors: Mapping[str, Tensor], folder: Path, /) -> None:
        """Fill `tensors` in place, each rank its own part. Raises one of UNREADABLE."""


def _format(folder: Path) -> Format:
    if (folder / state_file.FILE).is_file():
        return state_file
    from agentrl.checkpoint import sharded  # with torch's distributed tensors: a second that one process can do without

    return sharded


class OptimizerState(Protocol):
    """An optimizer whose state can be saved."""

    def named_state(self) -> dict[str, Tensor]:
        """Its tensors by `<kind>.<parameter's name>`. A `master.` replaces a parameter of lower precision, or
        one that moves without being trained."""

    def load_named_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `named_state` returned, and copy the masters into the model."""


class RoleState(Protocol):
    """A role whose weights change: an actor, a critic, a reference that follows the policy."""

    @property
    def model(self) -> Any:
        """A transformers model, sharded by FSDP2 or whole."""

    @property
    def optimizer(self) -> OptimizerState:
        """Its optimizer."""


def save_roles(roles: Mapping[str, RoleState], folder: Path, *, group: dist.ProcessGroup | None = None) -> Pending:
    """Write `trainer/<role>/` for each of `roles` below `folder`, which exists, and the Hugging Face model of `actor`
    into `folder` itself. Returns as soon as the trained tensors are copied to the CPU: the roles may go on learning
    while a thread writes.

    group: a gloo group of all ranks that hold these roles, used for nothing else; every rank calls this (None: there
    is one process). The Pending raises UserError, one line, if the disk refused.
    """
    rank = dist.get_rank(group) if group is not None else 0
    copied = {name: _state(role, rank) for name, role in roles.items()}
    exported, refused = None, None
    if ACTOR in roles:
        exported = HuggingFace(roles[ACTOR].model, _stand_in(roles[ACTOR], copied[ACTOR]))
        if rank == 0:
            refused = _begin(exported, folder)

    def write() -> None:
        try:
            _agree(refused, group)
            for name, tensors in copied.items():
                if group is None:
                    state_file.write(tensors, folder / TRAINER / name)
                    continue
                from agentrl.checkpoint import sharded

                sharded.write(tensors, folder / TRAINER / name, group)
            if exported is not None:
                exported.write(folder, group)
        except (OSError, RuntimeError) as error:
            if line := disk.refused(folder, error):
                raise UserError(line) from error
            raise

    return Pending(write)


def check_whole(folder: Path) -> None:
    """Raises UserError unless everything that the ranks wrote to `folder` is visible to this process."""
    roles = [path for path in (folder / TRAINER).glob("*") if path.is_dir()]
    absent = next((path / name for path in roles if (name := _format(path).missing(path))), None if roles else folder)
    if absent is not None:
        raise UserError(
            f"{absent} was written by a worker, but is not visible to the controller: give a run on several machines "
            "an output folder that all of them share"
        )


def _begin(exported: HuggingFace, folder: Path) -> OSError | None:
    try:
        exported.begin(folder)
    except OSError as error:
        return error
    return None


def _agree(refused: OSError | None, group: dist.ProcessGroup | None) -> None:
    """Raise the error of rank 0 on every rank, so that none waits for it."""
    box = [refused]
    if group is not None:
        dist.broadcast_object_list(box, group_src=0, group=group)
    if box[0] is not None:
        raise box[0]


def load_roles(roles: Mapping[str, RoleState], folder: Path, *, rank: int = 0) -> None:
    """Read what `save_roles` wrote, with any number of ranks; each rank reads its own parts only.

    Raises UserError: a role was not saved, is of another model, or its files are damaged.
    """
    for name, role in roles.items():
        path = folder / TRAINER / name
        form = _format(path)
        try:
            _load(role, form, path, rank)
        except form.UNREADABLE as error:
            raise UserError(f"{folder}: the trainer's state cannot be restored: {_why(error, name, path)}") from error


def _why(error: BaseException, name: str, path: Path) -> str:
    if path.with_suffix(".pt").exists():
        return "an older version of agentrl wrote it; its model can be trained on (model.path), the run cannot go on"
    if not path.is_dir():
        return f"no {name} was saved there"
    return f"{name}: {disk.line(error)}"


def parameters(model: "PreTrainedModel") -> dict[str, Tensor]:
    """The trained parameters by name; sharded ones as shards."""
    model.state_dict(keep_vars=True)  # makes FSDP2 reshard what a forward pass has gathered
    return {_plain(name): p for name, p in model.named_parameters() if p.requires_grad}


def _buffers(model: "PreTrainedModel") -> dict[str, Tensor]:
    """The buffers that are saved with a model."""
    saved = model.state_dict(keep_vars=True)
    return {_plain(name): b for name, b in model.named_buffers() if name in saved}


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _tensors(role: RoleState) -> dict[str, Tensor]:
    """The tensors of a role that are saved, by the names in the checkpoint."""
    trained = parameters(role.model)
    optimized = {_plain(name): tensor for name, tensor in role.optimizer.named_state().items()}
    if unknown := [k for k in optimized if not k.startswith(MASTER) and k.partition(".")[2] not in trained]:
        raise ValueError(f"the optimizer keeps {unknown[0]}, and the model trains no such parameter")
    masters = {WEIGHT + k.removeprefix(MASTER): v for k, v in optimized.items() if k.startswith(MASTER)}
    return {
        **{WEIGHT + name: p for name, p in trained.items()},
        **masters,
        **{BUFFER + name: buffer for name, buffer in _buffers(role.model).items()},
        **{name: value for name, value in optimized.items() if not name.startswith(MASTER)},
    }


def _state(role: RoleState, rank: int) -> dict[str, Tensor]:
    kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(role).items()}
    return {**kept, **rng_state(rank)}


def _stand_in(role: RoleState, state: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """A function from a tensor of the model to its copy; a tensor that is not trained has no copy."""
    copies = {id(p): state[WEIGHT + name] for name, p in parameters(role.model).items()}
    copies |= {id(b): state[BUFFER + name] for name, b in _buffers(role.model).items()}
    return lambda tensor: copies.get(id(tensor), tensor.detach())


def _load(role: RoleState, form: Format, path: Path, rank: int) -> None:
    saved = form.describe(path)
    live = _tensors(role)
    _compare(live, saved)
    states = _empty_rng(saved, rank)
    form.read({**{name: tensor.detach() for name, tensor in live.items()}, **states}, path)
    role.optimizer.load_named_state(role.optimizer.named_state())  # copies the masters into the model
    restore_rng(states, rank)


def _compare(live: Mapping[str, Tensor], saved: Described) -> None:
    """Raises ValueError for the first difference."""
    differ = {name for name in saved if not name.startswith(RNG)} ^ live.keys()
    if odd := sorted(differ, key=lambda name: (not name.startswith(WEIGHT), name)):
        lacks = "it lacks" if odd[0] in live else "the model lacks"
        raise ValueError(f"it is of another model: {lacks} {odd[0]} (and {len(odd) - 1} more)")
    for name, tensor in live.items():
        if saved[name][0] != tuple(tensor.shape):
            shapes = f"{list(saved[name][0])}, the model's {list(tensor.shape)}"
            raise ValueError(f"it is of another model: {name} is {shapes}")


def rng_state(rank: int) -> dict[str, Tensor]:
    """The state of torch's random numbers in this process, by name."""
    found = {f"{RNG_CPU}{rank}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found[f"{RNG_CUDA}{rank}"] = torch.cuda.get_rng_state()
    return found


def _empty_rng(saved: Described, rank: int) -> dict[str, Tensor]:
    """Tensors for the saved states of this rank, or of rank 0 if there was no such rank."""
    source = rank if f"{RNG_CPU}{rank}" in saved else 0
    names = [name for kind in RNG if (name := f"{kind}{source}") in saved]
    return {name: torch.zeros(saved[name][0], dtype=torch.uint8) for name in names}


def restore_rng(states: Mapping[str, Tensor], rank: int) -> None:
    """Continue the saved random numbers. A new rank derives its seed from rank 0's state and its own number: the same
    every time, and different from every other rank's."""
    if f"{RNG_CPU}{rank}" not in states:
        digest = hashlib.sha256(states[f"{RNG_CPU}0"].numpy().tobytes() + rank.to_bytes(4, "little")).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "little"))  # of the GPU's as well
        return
    torch.set_rng_state(states[f"{RNG_CPU}{rank}"])
    if torch.cuda.is_available() and f"{RNG_CUDA}{rank}" in states:
        torch.cuda.set_rng_state(states[f"{RNG_CUDA}{rank}"])
