"""Differentiable functions of the training forward, with hand-derived gradients that move little memory.

Each equals its textbook expression up to rounding; the tests compare values and gradients with it.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.constraint import Masks
from agentrl.models.autograd import Context
from agentrl.models.dense import linear

log = logging.getLogger(__name__)

FUSED = ("cuda",)
"""Types of device on which compiled functions read the logits of the output layer."""
CHUNK = 1 << 22
"""Logits in memory at once, in elements: 16 MiB of float32, unless that is less than CHUNK_ROWS rows."""
CHUNK_ROWS = 512
"""Minimum rows of a chunk on a CPU: the whole output layer is read for each chunk."""
GPU_ROWS = 1024
"""Minimum rows of a chunk on a GPU, where products need more rows and each chunk writes a gradient of the output
layer."""
FUSED_ROWS = 2048
"""Minimum rows of a chunk whose logits are read by fused kernels: they hold no float32 copy of the logits, of which
`GPU_ROWS` rows take as much memory."""
FUSED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Largest difference of the fused kernels from the plain ones, as a share of the largest value."""
KINDS = 64
"""Maximum kinds of logits, temperatures among them, that a function is compiled for in one process."""
SLICE = 1 << 24
"""Elements of the gradient of the output layer that are added at once: each addition holds as many besides."""
GPU_SLICE = 1 << 27
"""The same on a GPU, whose products are faster in one piece."""
KEPT = 1 << 25
"""Probabilities kept for the backward pass, in elements; more are computed again."""

Further = Callable[[Tensor, Tensor | None, Tensor | None], object]
"""Reads more of the predictions of a forward pass, by their states [N, D] and the matrix [V, D] and bias [V] of the
output layer; without a matrix the states are the logits [N, V]."""


_ENTROPIES = ContextVar("entropies", default=False)


@contextmanager
def with_entropies() -> Iterator[None]:
    """Let passes without gradients compute entropies too."""
    before = _ENTROPIES.set(True)
    try:
        yield
    finally:
        _ENTROPIES.reset(before)


class RmsNorm(torch.autograd.Function):
    """x [..., D], gain [..., D] or None: x / sqrt(mean(x^2) + eps) * gain, over the last dimension, float32."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        """The normalized x [..., D]."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        unit: Tensor = x * scale
        ctx.save_for_backward(unit, scale, *([] if gain is None else [gain]))
        return unit if gain is None else unit * gain

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x and gain."""
        unit, scale, *gains = ctx.saved_tensors
        d_unit, d_gain = gradients[0], None
        if gains:
            d_gain = (d_unit * unit).sum_to_size(gains[0].shape) if ctx.needs_input_grad[1] else None
            d_unit = d_unit * gains[0]
        along = torch.linalg.vecdot(d_unit, unit).unsqueeze_(-1).mul_(-1 / unit.shape[-1])
        return torch.addcmul(d_unit, unit, along).mul_(scale), d_gain, None


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """The RMS norm of x [..., D] times gain; see `RmsNorm`. Other dtypes than float32 use torch's."""
    if x.dtype != torch.float32:
        return F.rms_norm(x, (x.shape[-1],), gain, eps)
    out: Tensor = RmsNorm.apply(x, gain, eps)
    return out


class SwiGlu(torch.autograd.Function):
    """gate_up [N, 2 F] -> silu(gate) * up [N, F] (arXiv:2002.05202); its gradient is written into one tensor."""

    @staticmethod
    def forward(ctx: Context, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [N, F]."""
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        """The gradient of gate_up [N, 2 F]."""
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, -1)
        torch.mul(gradients[0], F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=d_gate)
        return d_gate_up


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [N, F] of gate_up [N, 2 F]; see `SwiGlu`."""
    out: Tensor = SwiGlu.apply(gate_up)
    return out


class _OfTokens(Context, Protocol):
    kept: list[Tensor]
    temperature: float
    masks: Masks | None


class TokenLogprobs(torch.autograd.Function):
    """hidden [N, D], head [V, D], bias [V] or None, target [N] -> log p(target) [N] and entropy [N], in nats.

    p = softmax((hidden head^T + bias) / temperature). In both passes logits exist in chunks of CHUNK elements (or
    CHUNK_ROWS rows), never [N, V] at once. Gradients of head and bias are summed over chunks in float32. On a CUDA
    device `row_statistics` and `slopes` read the logits, compiled, where they can (see `_fuses`).
    """

    @staticmethod
    def forward(
        ctx: _OfTokens, hidden: Tensor, head: Tensor, bias: Tensor | None, target: Tensor, temperature: float,
        wanted: bool, masks: Masks | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Log-probs and entropies [N]. wanted: False computes no entropies (0), for passes without gradients.
        masks: which tokens p is of, where not of all."""
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        if masks is None and _fuses(hidden.device, hidden.dtype, len(head)):
            log_sum = torch.empty_like(logprobs)
            for rows in _chunks(hidden, head, fused=True):
                logits = linear(hidden[rows], head, bias)
                found = _compiled(row_statistics)(logits, target[rows], 1 / temperature)
                del logits  # before the next chunk is there
                logprobs[rows], entropy[rows], log_sum[rows] = found
            ctx.kept, ctx.temperature, ctx.masks = [], temperature, None
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(hidden, head, *([] if bias is None else [bias]), target, entropy, log_sum)
            return logprobs, entropy
        if not wanted:
            for rows in _chunks(hidden, head):
                log_p = _log_softmax(hidden[rows], head, bias, temperature, masks, rows)
                logprobs[rows] = log_p.gather(1, target[rows, None])[:, 0]
                del log_p  # before the next chunk is there
            return logprobs, entropy
        keep = len(hidden) * len(head) <= KEPT and any(ctx.needs_input_grad)
        kept = []
        for rows in _chunks(hidden, head):
            log_p = _log_softmax(hidden[rows], head, bias, temperature, masks, rows)
            logprobs[rows], entropy[rows], p = _of_chunk(log_p, target[rows])
            del log_p
            if keep:
                kept.append(p)
            del p  # before the next chunk is there
        ctx.kept, ctx.temperature, ctx.masks = kept, temperature, masks
        ctx.set_materialize_grads(False)  # an entropy that the loss does not use costs nothing
        none = logprobs.new_empty(0)
        ctx.save_for_backward(hidden, head, *([] if bias is None else [bias]), target, entropy, none)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: _OfTokens, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of hidden, head and bias."""
        hidden, head, *biases, target, entropy, log_sum = ctx.saved_tensors
        fused = len(log_sum) == len(hidden) > 0
        d_logprobs = torch.zeros_like(entropy) if gradients[0] is None else gradients[0]
        d_entropy = gradients[1]
        bias = biases[0] if biases else None
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        d_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            d_bias = torch.zeros_like(bias, dtype=torch.float32)
        for i, rows in enumerate(_chunks(hidden, head, fused)):
            slope = None if d_entropy is None else d_entropy[rows]
            if fused:
                logits = linear(hidden[rows], head, bias)
                of_rows = target[rows], log_sum[rows], entropy[rows], d_logprobs[rows], slope
                d_logits = _compiled(slopes)(logits, *of_rows, 1 / ctx.temperature)
                del logits
            else:
                p = ctx.kept[i] if ctx.kept else None
                if p is None:
                    p = _log_softmax(hidden[rows], head, bias, ctx.temperature, ctx.masks, rows).exp_()
                d_logits = _d_logits(p, target[rows], entropy[rows], d_logprobs[rows], slope, kept=bool(ctx.kept))
                del p
                if ctx.temperature != 1.0:
                    d_logits.mul_(1 / ctx.temperature)
                d_logits = d_logits.to(hidden.dtype)
            d_hidden[rows] = linear(d_logits, head.t())
            if d_head is not None:
                _add_product(d_head, d_logits, hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            del d_logits
        return d_hidden, _as(head, d_head), _as(bias, d_bias), None, None, None, None


def row_statistics(logits: Tensor, target: Tensor, inverse: float) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V], target [n] -> the log-prob of each target, the entropy, and log of the sum of exp(logits *
    inverse), each float32 [n], in nats. To be compiled: two readings of the logits and no copy of them."""
    scaled = logits.float() * inverse
    largest = scaled.amax(-1, keepdim=True)
    shifted = scaled - largest
    weight = shifted.exp()
    total = weight.sum(-1)
    log_sum = total.log()
    entropy = log_sum - (weight * shifted).sum(-1) / total
    log_sum = log_sum + largest[:, 0]
    return logits.gather(1, target[:, None])[:, 0].float() * inverse - log_sum, entropy, log_sum


def slopes(
    logits: Tensor, target: Tensor, log_sum: Tensor, entropy: Tensor, d_logprobs: Tensor, d_entropy: Tensor | None,
    inverse: float,
) -> Tensor:  # fmt: skip
    """The gradient [n, V] of the logits, in their type, from those of what `row_statistics` gives. To be compiled."""
    log_p = logits.float() * inverse - log_sum[:, None]
    hit = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    slope = torch.where(hit, d_logprobs[:, None], 0.0)
    if d_entropy is None:
        slope = slope - log_p.exp() * d_logprobs[:, None]
    else:
        slope = slope - log_p.exp() * (d_logprobs[:, None] + d_entropy[:, None] * (log_p + entropy[:, None]))
    return (slope * inverse).to(logits.dtype)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled for any number of rows and this size of the vocabulary."""
    compiled = torch.compile(function, fullgraph=True)

    def call(logits: Tensor, *others: Any) -> Any:
        settings: Any = torch._dynamo.config  # of this thread
        settings.recompile_limit = max(settings.recompile_limit, KINDS)
        torch._dynamo.maybe_mark_dynamic(logits, 0)
        for other in others:
            if isinstance(other, Tensor):
                torch._dynamo.maybe_mark_dynamic(other, 0)
        return compiled(logits, *others)

    return call


@functools.cache
def _fuses(device: torch.device, dtype: torch.dtype, vocabulary: int) -> bool:
    """Whether the compiled functions run there and give what the plain ones do; tried once a process, on few rows."""
    if device.type not in FUSED:
        return False
    given = torch.Generator(device).manual_seed(0)
    logits = torch.randn(5, vocabulary, generator=given, device=device).mul_(3).to(dtype)
    target, (d_logprobs, d_entropy) = logits.argmax(-1), torch.randn(2, 5, generator=given, device=device)
    try:
        for d_maybe in (None, d_entropy):
            found: list[Tensor] = []
            wanted: list[Tensor] = []
            for results, kind in ((found, _compiled), (wanted, lambda plain: plain)):
                results += kind(row_statistics)(logits, target, 1.0)
                results += [kind(slopes)(logits, target, results[2], results[1], d_logprobs, d_maybe, 1.0).float()]
            off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
            if not off <= FUSED_TOLERANCE[dtype]:
                raise ValueError(f"they are off by {off:.2g}")
    except Exception as error:  # noqa: BLE001 - compilers raise what they like; the plain functions serve then
        log.warning("the output layer is not fused: %s", f"{type(error).__name__}: {error}".splitlines()[0])
        return False
    return True


def token_logprobs(
    hidden: Tensor, head: Tensor, bias: Tensor | None, target: Tensor, temperature: float, masks: Masks | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies; see `TokenLogprobs`. Entropies are 0 without gradients, for old and reference
    log-probs, unless `with_entropies`."""
    wanted = torch.is_grad_enabled() or _ENTROPIES.get()
    logprobs, entropy = TokenLogprobs.apply(hidden, head, bias, target, temperature, wanted, masks)
    return logprobs, entropy


class _OfLogits(Context, Protocol):
    temperature: float
    given: tuple[bool, bool]


class ChosenLogprobs(torch.autograd.Function):
    """hidden [N, D], head [V, D], bias [V] or None, ids [N, K] -> log p(ids) [N, K], in nats, of distinct ids a row.

    p is that of `TokenLogprobs`; logits exist in chunks, and are computed again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: _OfLogits, hidden: Tensor, head: Tensor | None, bias: Tensor | None, ids: Tensor, temperature: float
    ) -> Tensor:
        """Log-probs [N, K]. head: None if `hidden` are the logits [N, V]."""
        found = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
        for rows in _chunks(hidden, head):
            found[rows] = _log_softmax(hidden[rows], head, bias, temperature).gather(1, ids[rows])
        ctx.temperature, ctx.given = temperature, (head is not None, bias is not None)
        ctx.save_for_backward(hidden, *(each for each in (head, bias) if each is not None), ids)
        return found

    @staticmethod
    def backward(ctx: _OfLogits, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of hidden, head and bias."""
        hidden, *given, ids = ctx.saved_tensors
        head, bias = _given(given, ctx.given)

        def d_logits(rows: slice) -> Tensor:
            slope = gradients[0][rows]
            p = _log_softmax(hidden[rows], head, bias, ctx.temperature).exp_()
            return p.mul_(-slope.sum(-1, keepdim=True)).scatter_add_(1, ids[rows], slope)

        return *_backward(ctx, hidden, head, bias, d_logits), None, None


class _OfTeacher(_OfLogits, Protocol):
    teacher: tuple[Tensor, Tensor | None, Tensor | None, float]


class ReverseKl(torch.autograd.Function):
    """hidden [N, D], head [V, D], bias [V] or None, and a teacher's [N, E], [V, E], [V] -> KL(p || teacher) [N], nats.

    p is that of `TokenLogprobs`. In both passes the logits of both exist in chunks, never [N, V] at once.
    """

    @staticmethod
    def forward(
        ctx: _OfTeacher, hidden: Tensor, head: Tensor | None, bias: Tensor | None, temperature: float,
        teacher: Tensor, teacher_head: Tensor | None, teacher_bias: Tensor | None, teacher_temperature: float,
    ) -> Tensor:  # fmt: skip
        """The divergences [N]. A head is None if its states are the logits [N, V]."""
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(hidden, head):
            log_p = _log_softmax(hidden[rows], head, bias, temperature)
            log_t = _log_softmax(teacher[rows], teacher_head, teacher_bias, teacher_temperature)
            found[rows] = torch.linalg.vecdot(log_p.exp(), log_p - log_t)
            del log_p, log_t  # before the next chunk is there
        ctx.temperature, ctx.given = temperature, (head is not None, bias is not None)
        ctx.teacher = (teacher, teacher_head, teacher_bias, teacher_temperature)  # constants
        ctx.save_for_backward(hidden, *(each for each in (head, bias) if each is not None), found)
        return found

    @staticmethod
    def backward(ctx: _OfTeacher, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of hidden, head and bias: d KL / d logits = p (log p - log t - KL)."""
        hidden, *given, kl = ctx.saved_tensors
        head, bias = _given(given, ctx.given)
        teacher, teacher_head, teacher_bias, teacher_temperature = ctx.teacher

        def d_logits(rows: slice) -> Tensor:
            log_p = _log_softmax(hidden[rows], head, bias, ctx.temperature)
            log_t = _log_softmax(teacher[rows], teacher_head, teacher_bias, teacher_temperature)
            p = log_p.exp()
            return p.mul_(log_p.sub_(log_t).sub_(kl[rows, None])).mul_(gradients[0][rows, None])

        return *_backward(ctx, hidden, head, bias, d_logits), None, None, None, None, None


def chosen_logprobs(
    hidden: Tensor, head: Tensor | None, bias: Tensor | None, ids: Tensor, temperature: float
) -> Tensor:
    """The log-probs of K tokens of each row, [N, K]; see `ChosenLogprobs`."""
    found: Tensor = ChosenLogprobs.apply(hidden, head, bias, ids, temperature)
    return found


Output = tuple[Tensor, Tensor | None, Tensor | None]
"""States, matrix and bias, as `Further` reads them."""


def reverse_kl(policy: Output, temperature: float, teacher: Output, teacher_temperature: float) -> Tensor:
    """KL(policy || teacher) of each row over the whole vocabulary, [N]; see `ReverseKl`. Where one matrix has
    more rows than the other, as models of one family have that are padded differently, those are left out."""
    (ours, (states, head, bias)), (theirs, (of_teacher, teacher_head, teacher_bias)) = (
        (len(output[1]) if output[1] is not None else output[0].shape[-1], output) for output in (policy, teacher)
    )
    size = min(ours, theirs)
    if size < ours:
        states, head, bias = _cut(states, head, bias, size)
    if size < theirs:
        of_teacher, teacher_head, teacher_bias = _cut(of_teacher, teacher_head, teacher_bias, size)
    found: Tensor = ReverseKl.apply(
        states, head, bias, temperature, of_teacher, teacher_head, teacher_bias, teacher_temperature
    )
    return found


def _cut(states: Tensor, head: Tensor | None, bias: Tensor | None, size: int) -> Output:
    if head is None:
        return states[:, :size], None, None
    return states, head[:size], None if bias is None else bias[:size]


def top_logprobs(
    hidden: Tensor, head: Tensor | None, bias: Tensor | None, k: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """The K likeliest tokens of each row and their log-probs, [N, K] each (K: k, or the vocabulary), without
    gradient."""
    ids, logprobs = [], []
    with torch.no_grad():
        for rows in _chunks(hidden, head):
            log_p = _log_softmax(hidden[rows], head, bias, temperature)
            found = log_p.topk(min(k, log_p.shape[-1]))
            ids.append(found.indices)
            logprobs.append(found.values)
    width = min(k, len(head) if head is not None else hidden.shape[-1])
    none = torch.zeros(0, width, device=hidden.device)
    return torch.cat([none.long(), *ids]), torch.cat([none, *logprobs])


def _given(tensors: list[Tensor], given: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    rest = iter(tensors)
    head, bias = (next(rest) if there else None for there in given)
    return head, bias


def _backward(
    ctx: _OfLogits, hidden: Tensor, head: Tensor | None, bias: Tensor | None, of_rows: Callable[[slice], Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden, head and bias from those of the logits, chunk by chunk: `of_rows`, before the
    temperature."""
    d_hidden = torch.empty_like(hidden)
    d_head = torch.zeros_like(head, dtype=torch.float32) if head is not None and ctx.needs_input_grad[1] else None
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
    for rows in _chunks(hidden, head):
        d_logits = of_rows(rows).div_(ctx.temperature).to(hidden.dtype)
        d_hidden[rows] = d_logits if head is None else linear(d_logits, head.t())
        if d_head is not None:
            _add_product(d_head, d_logits, hidden[rows])
        if d_bias is not None:
            d_bias += d_logits.sum(0)
        del d_logits
    return d_hidden, _as(head, d_head), _as(bias, d_bias)


def _add_product(d_head: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """Add d_logits [n, V] transposed times hidden [n, D] to d_head [V, D], SLICE or GPU_SLICE elements at a time."""
    size = max(1, (GPU_SLICE if hidden.is_cuda else SLICE) // hidden.shape[1])
    for i in range(0, len(d_head), size):
        d_head[i : i + size] += linear(d_logits[:, i : i + size].t(), hidden.t())


def _chunks(hidden: Tensor, head: Tensor | None, fused: bool = False) -> list[slice]:
    rows = len(hidden)
    least = FUSED_ROWS if fused else GPU_ROWS if hidden.is_cuda else CHUNK_ROWS
    step = max(least, CHUNK // (hidden.shape[-1] if head is None else len(head)))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def _as(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return None if parameter is None or gradient is None else gradient.to(parameter.dtype)


def _of_chunk(log_p: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probs and entropies [n] of rows whose log-probs of all tokens are [n, V], and these as
    probabilities."""
    p = log_p.exp()
    return log_p.gather(1, target[:, None])[:, 0], -torch.linalg.vecdot(p, log_p), p


def _log_softmax(
    hidden: Tensor, head: Tensor | None, bias: Tensor | None, temperature: float,
    masks: Masks | None = None, rows: slice | None = None,
) -> Tensor:  # fmt: skip
    """Log-probs [n, V]. masks: of all predictions, of which these are `rows`."""
    logits = hidden.float() if head is None else linear(hidden, head, bias).float()
    if temperature != 1.0:
        logits = logits / temperature if head is None else logits.div_(temperature)
    if masks is not None and rows is not None:
        logits = masks.apply(logits, rows)
    return logits.log_softmax(-1)


def _d_logits(
    p: Tensor, target: Tensor, entropy: Tensor, d_logprobs: Tensor, d_entropy: Tensor | None, kept: bool
) -> Tensor:
    """The gradient of the logits: d log p(t) / d logits = [t] - p; d H / d logits = -p (log p + H).

    kept: leave p unchanged.
    """
    if d_entropy is None:
        d_logits = torch.mul(p, -d_logprobs[:, None], out=None if kept else p)
    else:
        log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log_()
        d_logits = log_p.add_(entropy[:, None]).mul_(d_entropy[:, None]).add_(d_logprobs[:, None]).mul_(p).neg_()
    return d_logits.scatter_add_(1, target[:, None], d_logprobs[:, None])
