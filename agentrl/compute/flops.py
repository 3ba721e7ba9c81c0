"""How much arithmetic a model's passes are, and how much its device could do: model FLOPs utilisation.

What is counted in train/tflops and train/mfu is what is computed while the trainer works, by the devices that it has:
updates of policy and critic, log-probs of policy and reference, values. Sampling is in neither the operations nor the
time; nor is the reward model, which scores while samples are drawn: its own figures are over its own calls.

Counted as in appendix B of PaLM (Chowdhery et al., arXiv:2204.02311): two operations a parameter and token forwards,
four backwards, and those of attention; nothing for norms, softmax, or what is computed a second time (activations,
what a split of the batch repeats). Stricter than there: what samples have in common counts once, the output
layer only where a token is predicted, and attention only for pairs of tokens that attend.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from agentrl.compute.batch import Batch, prefix_trees
from agentrl.models.dense import linear
from agentrl.recipe.schema import Recipe

TERA = 1e12
ROLES = ("actor", "reference", "critic", "reward_model")
PEAKS = {  # teraFLOP/s without sparsity: (bfloat16 with tensor cores, float32), by a part of the device's name
    "GB200": (2500.0, 80.0), "B200": (2250.0, 75.0), "GH200": (989.4, 67.0), "H200": (989.4, 67.0),
    "H100 PCIe": (756.0, 51.0), "H100 NVL": (835.0, 60.0), "H100": (989.4, 67.0), "H800": (989.4, 67.0),
    "H20": (148.0, 44.0), "A100": (312.0, 19.5), "A800": (312.0, 19.5), "L40S": (362.0, 91.6), "L40": (181.0, 90.5),
    "L4": (121.0, 30.3), "RTX 6000 Ada": (364.0, 91.1), "RTX A6000": (154.8, 38.7), "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6), "RTX 3090": (71.0, 35.6), "A10": (125.0, 31.2), "MI325X": (1307.4, 163.4),
    "MI300X": (1307.4, 163.4), "MI250X": (383.0, 47.9),
}  # fmt: skip
"""From the makers' data sheets. Where a name contains several, the first counts."""
PROBE_SECONDS = 0.1  # that the measuring of a CPU may take, about
PROBE_WIDTH = 1024  # of the largest matrix that it multiplies


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a model's passes. body, head: parameters in matrices that every token passes, and of the output layer, which
    only predictions pass. trained_body, trained_head: those with gradients. pair: forward operations of a token that
    attends to another, over all layers (4 x layers x heads x head size)."""

    body: int
    head: int
    trained_body: int
    trained_head: int
    pair: int

    @classmethod
    def of(cls, model: Any, adapter: bool = True) -> "Cost":
        """From its parameters' whole shapes, sharded or not: of a language model, a value model or a classifier. Of
        experts, as many count as a token passes. adapter: False leaves one out that is switched off."""
        text = model.config.get_text_config()
        output = getattr(model, "lm_head", None) or getattr(model, "score", None)
        backbone = model if hasattr(model, "get_input_embeddings") else model.model
        embedding = backbone.get_input_embeddings().weight
        head: Any = None if output is None else output.weight
        body = trained = 0
        for name, parameter in model.named_parameters():
            if ".lora_" in name and not adapter:
                continue
            if parameter.dim() > 1 and parameter is not head and parameter is not embedding:
                count = int(parameter.numel() * (_active(text) if ".experts." in name else 1))
                body += count
                trained += count if parameter.requires_grad else 0
        size = 0 if head is None else head.numel()
        heads = getattr(text, "num_attention_heads", 0)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
        pair = 4 * text.num_hidden_layers * heads * head_dim
        return cls(body, size, trained, size if size and head.requires_grad else 0, pair)

    def forward(self, need: "Need") -> float:
        """FLOPs of a forward pass."""
        return 2.0 * (self.body * need.tokens + self.head * need.predictions) + float(self.pair * need.pairs)

    def update(self, need: "Need") -> float:
        """FLOPs of a forward and backward pass; a frozen matrix needs no gradient of its own."""
        own = 2.0 * (self.trained_body * need.tokens + self.trained_head * need.predictions)
        return 2 * self.forward(need) + own + float(self.pair * need.pairs)


@dataclass(frozen=True, slots=True)
class Work:
    """What a role's passes cost, and what its devices could do together (FLOP/s; None: not known). devices: which they
    are; roles that share them say the same."""

    cost: Cost
    peak: float | None
    devices: str


def costs(holder: Any) -> dict[str, Cost]:
    """Of the roles that `holder` has, by their names. A reference computes without the policy's adapter."""
    roles = {name: getattr(holder, name, None) for name in ROLES}
    return {name: Cost.of(role.model, name != "reference") for name, role in roles.items() if role is not None}


def peak_together(works: Iterable[Work]) -> float | None:
    """FLOP/s of all their devices; None where one is not known."""
    peaks = {work.devices: work.peak for work in works}.values()
    return sum(peak for peak in peaks if peak is not None) if all(peaks) else None


def _active(text: Any) -> float:
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    return text.num_experts_per_tok / experts if experts else 1.0


@dataclass(frozen=True, slots=True)
class Need:
    """What a batch asks of a model when whatever its samples share is computed once: packed tokens, predictions, and
    pairs of tokens of which one attends to the other or to itself."""

    tokens: int
    predictions: int
    pairs: int

    @classmethod
    def of(cls, batch: Batch) -> "Need":
        """Samples without a sampled token are left out, as they are by the passes."""
        sampled = batch.sampled
        trees = prefix_trees(batch, np.flatnonzero(sampled > 0))
        return cls(sum(t.tokens for t in trees), int(sampled.sum()), sum(t.pairs for t in trees))


def utilisation(flops: float, seconds: float, peak: float | None, of: str = "train") -> dict[str, float]:
    """The metrics <of>/tflops (a second, of all devices) and <of>/mfu, their share of what those could do."""
    found = {f"{of}/tflops": flops / seconds / TERA}
    return {**found, f"{of}/mfu": flops / seconds / peak} if peak else found


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of matrix products: from the data sheet of a known GPU (None: not known), measured on a CPU."""
    if device.type == "cuda":
        return known_peak(torch.cuda.get_device_name(device), dtype)
    return _measured_peak(dtype) if device.type == "cpu" else None


def peak_of(model: Any, recipe: Recipe, device: torch.device) -> float | None:
    """Of a device that trains `model` by `recipe`."""
    mixed = recipe.model.compute == "bfloat16"
    return peak_flops(device, torch.bfloat16 if mixed else next(model.parameters()).dtype)


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """By the name that the driver gives the device."""
    found = next((peaks for part, peaks in PEAKS.items() if part in name), None)
    return None if found is None else TERA * found[dtype == torch.float32]


def _measured_peak(dtype: torch.dtype) -> float:
    """The best of a few products, larger ones while there is time."""
    best, spent, width = 0.0, 0.0, 128
    while spent < PROBE_SECONDS:
        a, b = torch.ones(width, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
        began = perf_counter()
        with torch.no_grad():
            linear(a, b)
        took = perf_counter() - began
        best, spent = max(best, 2 * width**3 / took), spent + took
        if took < PROBE_SECONDS / 16:
            width = min(2 * width, PROBE_WIDTH)
    return best
