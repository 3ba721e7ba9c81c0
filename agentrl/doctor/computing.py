"""Checks of what the trainer computes: packed rows, attention, bfloat16, an adapter."""

import copy
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agentrl.compute import tree_attention
from agentrl.compute.forward import SequenceForward, choose, computed_in, probe_of
from agentrl.compute.packing import Packed, Segment, indices
from agentrl.doctor.check import CheckError, NotHereError
from agentrl.doctor.machine import fastest
from agentrl.doctor.subject import Subject, first_layers
from agentrl.doctor.trainer import logprobs_of
from agentrl.engine.base import Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.models.load import embeddings, load_model
from agentrl.models.lora import adapter_parameters, add_adapter, switched_off
from agentrl.models.prove import MISFITS, difference
from agentrl.recipe.sections.model import LoraSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEAN, MOST = 0.1, 1.5
"""Nats between log-probs of one model in bfloat16 and in float32: in the mean, and at most. Wrong weights, or a wrong
mask, are off by more at most tokens."""
EXACT = 1e-3
"""Nats between log-probs of one model in float32, computed in two ways."""
SEED = 0
LORA = LoraSection(rank=4, alpha=8)
ROW_TOKENS = {"cuda": 8192, "cpu": 1024}
"""Of the row whose attention is timed."""


def gap(found: Tensor, wanted: Tensor, half: bool) -> str | None:
    """Why log-probs of the same tokens [N] are not those of one model; None where they are. half: either was
    computed in half precision. NaN is beyond any bound."""
    off = (found - wanted).abs()
    mean, most = float(off.mean()), float(off.max())
    bounds = (MEAN, MOST) if half else (EXACT, 10 * EXACT)
    if mean <= bounds[0] and most <= bounds[1]:
        return None
    return f"{mean:.2g} nats in the mean and {most:.2g} at most, where {bounds[0]:g} and {bounds[1]:g} are allowed"


def is_half(model: "PreTrainedModel") -> bool:
    """Whether the weights of a model are in half precision."""
    kind: torch.dtype = embeddings(model).dtype
    return kind != torch.float32


def packing(subject: Subject) -> str:
    """Packed rows with shared prompts give the log-probs of separate sequences."""
    section, model = subject.recipe.model, subject.model
    probe = probe_of(model)
    forward, how = choose(model, computed_in(section), checkpointing=False)
    if "it differs by" in how:
        raise CheckError(f"packed rows do not give the log-probs of separate sequences: {how}")
    separate = SequenceForward(model)
    found, wanted = (_logprobs(way, probe) for way in (forward, separate))
    if (wrong := gap(found, wanted, is_half(model) or section.compute == "bfloat16")) is not None:
        raise CheckError(f"packed rows do not give the log-probs of separate sequences: {wrong}")
    tokens = sum(len(indices(path.spans)) for path in probe.paths)
    packed, alone = (fastest(lambda way=way: _logprobs(way, probe), subject.device) for way in (forward, separate))  # type: ignore[misc]
    return f"{how}; packed {tokens / packed:,.0f} tokens/s, separate {tokens / alone:,.0f} tokens/s"


@torch.no_grad()
def _logprobs(way: Callable[..., Sequence[Tensor]], probe: Packed) -> Tensor:
    found: Tensor = way(probe, 1.0)[0]
    return found


def attention(subject: Subject) -> str:
    """Every way to attend over packed rows that this device has, and its speed."""
    device, config = subject.device, subject.model.config.get_text_config()
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    segments = _forest(ROW_TOKENS[device.type])
    row = tree_attention.make_layout(segments, device)
    query, key, value = (torch.randn(row.tokens, h, size, dtype=dtype, device=device) for h in (heads, groups, groups))
    buckets = tree_attention.bucket_layout(segments, device)
    ways: dict[str, Callable[[], Tensor]] = {
        "short buckets": lambda: tree_attention.attend(query, key, value, buckets, size**-0.5),
        "long buckets": lambda: tree_attention._long(query, key, value, buckets, size**-0.5),
    }
    failed: list[str] = []
    if device.type == "cuda":
        ways = {"buckets": ways["long buckets"]}
        for kernel in (tree_attention.by_flex, tree_attention.by_flash):
            fault = tree_attention.kernel_fault(kernel, str(device), dtype, heads, groups, size)
            name = kernel.__name__.removeprefix("by_")
            failed += [f"{name}: {fault}"] if fault is not None else []
        if not failed:
            ways["flex"] = lambda: tree_attention.attend(query, key, value, row, size**-0.5)
    wanted = separately(query, key, value, segments)
    for name, way in ways.items():
        wrong = difference(way().double().cpu(), wanted.cpu(), tree_attention.TOLERANCE[dtype], scaled=True)
        failed += [f"{name}: {wrong}"] if wrong is not None else []
    if failed:
        raise CheckError("; ".join(failed))
    speeds = {name: row.tokens / fastest(way, device) for name, way in ways.items()}
    return ", ".join(f"{name} {speed:,.0f} tokens/s a layer" for name, speed in speeds.items())


def _forest(tokens: int) -> list[Segment]:
    """A prompt of a quarter of the tokens, and three answers behind it, two of which begin alike."""
    part = tokens // 4
    prompt, half, end = (0, part), (2 * part, 5 * part // 2), 3 * part
    alone = [Segment(*prompt), Segment(part, 2 * part, (prompt,)), Segment(*half, (prompt,))]
    return [*alone, Segment(half[1], end, (prompt, half)), Segment(end, 4 * part, (prompt, half))]


def separately(query: Tensor, key: Tensor, value: Tensor, segments: list[Segment]) -> Tensor:
    """Attention of each segment over its prefix and itself, by its definition: float64 [P, H * D]."""
    repeat = query.shape[1] // key.shape[1]
    q, k, v = query.double(), *(x.double().repeat_interleave(repeat, 1) for x in (key, value))
    out = torch.zeros_like(q)
    for s in segments:
        seen = indices((*s.prefix, (s.start, s.end)))
        scores = torch.einsum("qhd,khd->hqk", q[s.start : s.end], k[seen]) * query.shape[2] ** -0.5
        hidden = torch.ones(s.end - s.start, len(seen), dtype=torch.bool, device=q.device).triu(s.reach + 1)
        out[s.start : s.end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[seen])
    return out.flatten(1)


def bfloat16(subject: Subject) -> str:
    """How far the model's log-probs in bfloat16 are from those in float32."""
    model = subject.model
    size = sum(p.numel() for p in model.parameters())
    free = free_memory(subject.device)
    if 6 * size > free:
        raise NotHereError(f"two copies of the model take {6 * size / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free")
    probe = probe_of(model)
    exact, half = (copy.deepcopy(model).to(dtype) for dtype in (torch.float32, torch.bfloat16))
    wanted = _logprobs(SequenceForward(exact), probe)
    found = _logprobs(SequenceForward(half), probe)
    if (wrong := gap(found, wanted, half=True)) is not None:
        raise CheckError(f"log-probs in bfloat16 are off by {wrong}")
    off = (found - wanted).abs()
    return f"log-probs differ by {float(off.mean()):.2g} nats in the mean, {float(off.max()):.2g} at most"


def free_memory(device: torch.device) -> float:
    """The bytes that are free on a device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        words = dict(line.split()[:2] for line in file)
    return 1024.0 * float(words["MemAvailable:"])


def lora(subject: Subject) -> str:
    """An adapter: what it changes, the trainer and the embedded engine agree on; switched off, nothing has changed."""
    subject.free()
    section = subject.recipe.model
    section = first_layers(section) if subject.apart else section
    model, _ = load_model(section.model_copy(update={"lora": None}))
    ids = [int(i) for i in np.random.default_rng(SEED).integers(0, embeddings(model).shape[0], 24)]
    before = logprobs_of(model, ids[:8], ids[8:])
    add_adapter(model, LORA, section.path, SEED)
    given = torch.Generator().manual_seed(SEED)
    for parameter in adapter_parameters(model):
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=given))
    try:
        engine = LocalEngine(model, max_batch=1)
    except MISFITS as error:
        raise CheckError(f"the engine refuses a model with an adapter: {error}", "model.lora: null") from error
    began = monotonic()
    turn = subject.wait(lambda: engine.generate(ids[:8], Sampling(16, temperature=0), "lora"))
    seconds = monotonic() - began
    subject.wait(engine.close)
    if gap(logprobs_of(model, ids[:8], ids[8:]), before, is_half(model)) is None:
        raise CheckError("the adapter changes nothing", "model.lora.targets")
    wrong = gap(torch.tensor(turn.logprobs), logprobs_of(model, ids[:8], turn.ids), is_half(model))
    if wrong is not None:
        raise CheckError(f"with an adapter, engine and trainer differ by {wrong}")
    with switched_off(model):
        wrong = gap(logprobs_of(model, ids[:8], ids[8:]), before, is_half(model))
    if wrong is not None:
        raise CheckError(f"with its adapter switched off, the model is not the base: they differ by {wrong}")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{trained:,} trained parameters; engine and trainer agree; {len(turn.ids) / seconds:,.0f} tokens/s"
