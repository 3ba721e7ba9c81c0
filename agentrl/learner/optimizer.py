"""AdamW and Muon with gradient clipping, and the learning rate as a function of the step, so that a resumed run
continues exactly."""

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from agentrl.checkpoint.gather import is_sharded
from agentrl.compute.offload import Copy, PinnedMemory, Transfers, transfers_of
from agentrl.models.memory import BUCKET_BYTES

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration: steep at 0, between 0.7 and 1.2 near 1."""
ITERATIONS = 5
"""Newton-Schulz iterations of an update."""
MOMENTUM = 0.95
"""Of Muon: what a step keeps of the gradients before."""
OFFLOADED = ("exp_avg", "exp_avg_sq")
"""AdamW's moments by torch's names, each as large as its parameter."""
EPSILON = 1e-8
"""AdamW's, which is added to the root of its second moment."""
MOMENTS = (*OFFLOADED, "step")
"""AdamW's state of each parameter, by torch's names."""


def learning_rate(
    step: int, total: int, peak: float, schedule: str = "constant", warmup: int = 0, floor: float = 0.0, cycles: int = 1
) -> float:
    """The learning rate of `step` (0 .. total - 1): linear warm-up over `warmup` steps to `peak`, then the
    schedule, which falls to `floor` x peak, `cycles` times.

    schedule: constant, linear or cosine (SGDR, arXiv:1608.03983, equation 5). Raises ValueError for another one.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    passed = cycles * (step - warmup) / max(1, total - warmup)
    progress = passed % 1 if passed < cycles else 1.0
    match schedule:
        case "linear":
            left = 1 - progress
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"unknown schedule {schedule!r}")
    return peak * (floor + (1 - floor) * left)


class Optimizer:
    """AdamW (arXiv:1711.05101) on the parameters that require gradients; only matrices have weight decay.

    Parameters of lower precision than float32 have a float32 master, since small updates would be rounded away. Their
    gradients are moved to it as soon as autograd (or FSDP2) computes them, so that those of micro-batches add up in
    float32 too. Sharded parameters (DTensors) have sharded masters and moments; all ranks call every method, in the
    same order.

    parameters: with names, as from `named_parameters`, or without; then their numbers are their names. max_norm: the
    gradient norm to clip to. offload: keep the moments in pinned CPU memory; `step` has those of a few parameters at a
    time on the device, and copies the next and the last ones meanwhile.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        betas: tuple[float, float],
        weight_decay: float,
        max_norm: float,
        offload: bool = False,
    ) -> None:
        named = [p if isinstance(p, tuple) else (str(number), p) for number, p in enumerate(parameters)]
        self.names = [name for name, p in named if p.requires_grad]
        self.parameters = [p for _, p in named if p.requires_grad]
        self.max_norm = max_norm
        self.begun = 0
        """Number of steps that changed the weights, or began to."""
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().clone() for p in self.parameters]
        self._copied = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]
        for parameter, master in self._copied:
            _take_gradients(parameter, master)
        self._transfers = transfers_of(self.masters[0].device) if offload and self.masters else None
        self._host = PinnedMemory()
        self._betas, self._weight_decay = betas, weight_decay
        self._buckets = _buckets(self.masters) if self._transfers is not None else [self.masters]
        self._states: dict[Tensor, dict[str, Tensor]] = {master: {} for master in self.masters}
        self._last: Copy | None = None
        """The last copy of moments to the host, which may still wait for it."""

    def step(self, rate: float) -> float:
        """Apply the gradients at learning rate `rate`, and clear them; return their norm before clipping.

        Gradients that are not finite are discarded; then the returned norm is not finite.
        """
        norm = self._clip()
        if math.isfinite(norm):
            self.begun += 1
            if self._transfers is None:
                self._adamw(self.masters, rate)
            else:
                self._step_by_buckets(self._transfers, rate)
            self._publish()
        self.clear()
        return norm

    def clear(self) -> None:
        """Discard the gradients."""
        for tensor in (*self.parameters, *(master for _, master in self._copied)):
            tensor.grad = None

    def _clip(self) -> float:
        for parameter, master in self._copied:  # a gradient that was set, not computed
            _move_gradient(weakref.ref(master), parameter)
        return clip(self.masters, self.max_norm)

    @torch.no_grad()
    def _adamw(self, masters: Sequence[Tensor], rate: float) -> None:
        """Apply the gradients of some parameters. The kernel is that of `torch.optim.AdamW(fused=True)`, which this
        does not use: it imports torch's compiler, which takes a second."""
        ready = [master for master in masters if master.grad is not None]
        matrices, vectors = [m for m in ready if m.dim() > 1], [m for m in ready if m.dim() <= 1]
        for group, decay in ((matrices, self._weight_decay), (vectors, 0.0)):
            if not group:
                continue
            states = [self._state(master) for master in group]
            averages, squares, steps = ([state[kind] for state in states] for kind in MOMENTS)
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                group, [m.grad for m in group if m.grad is not None], averages, squares, [], steps,
                amsgrad=False, maximize=False,
                lr=rate, beta1=self._betas[0], beta2=self._betas[1], weight_decay=decay, eps=EPSILON,
            )  # fmt: skip

    def _step_by_buckets(self, transfers: Transfers, rate: float) -> None:
        """Step one bucket after another, whose moments are on the device meanwhile. Their memory there is free again
        when they are copied back, for which the device waits after the next bucket's step."""
        moments = [
            [(self._state(master), kind) for master in bucket if master.grad is not None for kind in OFFLOADED]
            for bucket in self._buckets
        ]
        host = [[local(state[kind]) for state, kind in bucket] for bucket in moments]
        coming = [transfers.to_device(tensor) for tensor in host[0]]
        held: list[Tensor] = []  # until the copies of them are made
        leaving: list[Copy] = []
        for number, bucket in enumerate(self._buckets):
            here = [transfers.wait(copy) for copy in coming]
            coming = [transfers.to_device(tensor) for tensor in (*host, [])[number + 1]]
            _place(moments[number], here)
            self._adamw(bucket, rate)
            _place(moments[number], host[number])
            for copy in leaving:
                transfers.wait(copy)
            held, leaving = here, [transfers.to_host(*pair) for pair in zip(here, host[number], strict=True)]
        for copy in leaving:
            transfers.wait(copy)
            self._last = copy
        held.clear()

    def _state(self, master: Tensor) -> dict[str, Tensor]:
        """The state of a parameter, which begins as 0."""
        state = self._states[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            for kind in OFFLOADED:
                state[kind] = torch.zeros_like(master)
                if self._transfers is not None:
                    _place([(state, kind)], [self._host.zeros_like(local(state[kind]))])
        return state

    @torch.no_grad()
    def _publish(self) -> None:
        for parameter, master in self._copied:
            parameter.copy_(master)

    def named_state(self) -> dict[str, Tensor]:
        """The tensors of the state by name, not copies: `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`,
        `step.<parameter>`, and `master.<parameter>` if there is a master.
        """
        if self._transfers is not None and self._last is not None:
            self._transfers.finish(self._last)
        found: dict[str, Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            state = self._state(master)
            found.update({f"{kind}.{name}": state[kind] for kind in MOMENTS})
            if master is not parameter:
                found[f"master.{name}"] = master
        return found

    @torch.no_grad()
    def load_named_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `named_state` returned; weights without a master are loaded with the model. Raises KeyError for a
        missing tensor."""
        for name, tensor in self.named_state().items():
            if state[name] is not tensor:
                tensor.copy_(state[name])
        self._publish()


def clip(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale the gradients down to a total norm of at most `max_norm`; return the norm before. They may be sharded over
    several meshes, which no single operation of torch accepts: each mesh adds up what its ranks hold."""
    meshes: dict[object, list[Tensor]] = {}
    for gradient in [p.grad for p in parameters if p.grad is not None]:
        where = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None
        meshes.setdefault(where, []).append(gradient)
    norms = [_norm(gradients) for gradients in meshes.values()]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradients in meshes.values():
        torch._foreach_mul_([local(gradient) for gradient in gradients], scale)
    return float(total)


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of gradients that lie alike, over all ranks."""
    squared = nn.utils.get_total_norm([local(gradient) for gradient in gradients]).square()
    if is_sharded(first := gradients[0]):
        for dimension, placement in enumerate(first.placements):
            if not placement.is_replicate():
                dist.all_reduce(squared, group=first.device_mesh.get_group(dimension))
    return squared.sqrt()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def _place(moments: Sequence[tuple[dict[str, Tensor], str]], where: Sequence[Tensor]) -> None:
    """Let `where` be the moments, each by its parameter's state and its kind; of sharded ones, this rank's shards."""
    for (state, kind), tensor in zip(moments, where, strict=True):
        if is_sharded(moment := state[kind]):
            moment._local_tensor = tensor
        else:
            state[kind] = tensor


def _buckets(masters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters in order, cut where their moments come to more than BUCKET_BYTES."""
    found: list[list[Tensor]] = []
    size = BUCKET_BYTES
    for master in masters:
        moments = len(OFFLOADED) * local(master).nbytes
        if not found or size + moments > BUCKET_BYTES:
            found.append([])
            size = 0
        found[-1].append(master)
        size += moments
    return found


_GRADIENT_HOOKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter -> the handle of the hook that moves its gradients."""


def _take_gradients(parameter: Tensor, master: Tensor) -> None:
    """Send the gradients of `parameter` to this master, and no longer to that of an earlier optimizer."""
    if (previous := _GRADIENT_HOOKS.get(parameter)) is not None:
        previous.remove()
    _GRADIENT_HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(
        partial(_move_gradient, weakref.ref(master))
    )


def _move_gradient(master: "weakref.ref[Tensor]", parameter: Tensor) -> None:
    """Add the gradient of `parameter` to that of its master, unless the master was freed, and free it."""
    owner, gradient = master(), parameter.grad
    if owner is None or gradient is None:
        return
    if owner.grad is None:
        owner.grad = gradient.float()
    else:
        owner.grad += gradient
    parameter.grad = None


def orthogonal(matrix: Tensor) -> Tensor:
    """`matrix` [rows, columns] with singular values near 1 and the same singular vectors, by Newton-Schulz
    iterations."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    orthogonalized: Tensor = x.T if tall else x
    return orthogonalized


class Muon:
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/): orthogonalized momentum for matrices.

    A tiny model learns to copy and to combine from far fewer examples than with AdamW. All arithmetic is in float32,
    since bfloat16 is slow on many CPUs. parameters: float32, 2-D; each has one momentum buffer.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.weight_decay = weight_decay
        self.buffers = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients. The root mean square of an update is about `rate` / sqrt(smaller side of the matrix)."""
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            if parameter.grad is None:
                continue
            buffer.lerp_(parameter.grad, 1 - MOMENTUM)
            update = orthogonal(parameter.grad.lerp(buffer, MOMENTUM))
            scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            parameter.mul_(1 - rate * self.weight_decay).add_(update, alpha=-rate * scale)


class MuonAdamW:
    """Muon on the matrices of the blocks, at `share` x the rate; AdamW on embeddings and vectors, without weight decay.

    It is for models whose weights are whole in this process.
    """

    def __init__(
        self, model: nn.Module, share: float, betas: tuple[float, float], weight_decay: float, max_norm: float
    ) -> None:
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        tables += [head] if (head := model.get_output_embeddings()) else []  # type: ignore[operator]
        outside = {id(p) for table in tables for p in table.parameters()}
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        inside = {name: p for name, p in trained if p.dim() == 2 and id(p) not in outside}
        self.share = share
        self.muon = Muon(list(inside.values()), weight_decay=weight_decay)
        self.adamw = Optimizer(((name, p) for name, p in trained if name not in inside), betas, 0.0, max_norm)
        self.parameters = [p for _, p in trained]
        self._names = list(inside)

    @property
    def begun(self) -> int:
        """Number of steps that changed the weights, or began to."""
        return self.adamw.begun

    @begun.setter
    def begun(self, count: int) -> None:
        """Go on counting from `count`."""
        self.adamw.begun = count

    def step(self, rate: float) -> float:
        """Apply the gradients at learning rate `rate`, and clear them; return the norm of AdamW's part before clipping
        (Muon's updates do not depend on the norm). Gradients that are not finite are discarded, all of them; then the
        norm is not finite."""
        finite = all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in self.muon.parameters)
        norm = self.adamw.step(rate) if finite else math.nan
        if math.isfinite(norm):
            self.muon.step(rate * self.share)
        self.adamw.clear()
        for parameter in self.muon.parameters:
            parameter.grad = None
        return norm

    def named_state(self) -> dict[str, Tensor]:
        """The tensors of the state by name, not copies: those of AdamW, and `momentum.<parameter>` of Muon."""
        momenta = {f"momentum.{name}": buffer for name, buffer in zip(self._names, self.muon.buffers, strict=True)}
        return {**self.adamw.named_state(), **momenta}

    @torch.no_grad()
    def load_named_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `named_state` returned. Raises KeyError for a missing tensor."""
        self.adamw.load_named_state(state)
        for name, buffer in zip(self._names, self.muon.buffers, strict=True):
            buffer.copy_(state[f"momentum.{name}"])
