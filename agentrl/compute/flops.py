"""FLOPs of a model's passes, peak FLOP/s of devices, and model FLOPs utilisation (MFU).

train/tflops and train/mfu count what the trainer's devices compute during training: updates of policy and critic,
log-probs of policy and reference, values. Sampling counts neither in the operations nor in the time. Nor does the
reward model, which scores during sampling; its own metrics are over its own calls.

FLOPs are counted as in appendix B of PaLM (Chowdhery et al., arXiv:2204.02311): two operations for each parameter and
token in the forward pass, four in the backward pass, and those of attention; none for norms, softmax, or anything
computed a second time (activations, prompts that a partition of the batch repeats). In addition, a prompt that samples
share counts once, the output layer counts only for predicted tokens, and attention only for pairs of tokens that
attend. A vision tower counts once for each image of a pass, and a frozen one in updates alone, since its features are
kept; of a tower that attends in windows, attention counts in the layers without.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agentrl.compute.batch import KEYED, Batch, joined, prefix_trees
from agentrl.images import runs
from agentrl.models.dense import linear
from agentrl.models.load import embeddings, model_of
from agentrl.models.lora import add_adapter
from agentrl.models.shape import read_config
from agentrl.models.vision import towers
from agentrl.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TERA = 1e12
ROLES = ("actor", "reference", "critic", "reward_model")
"""Names of the roles."""
PEAKS = {  # teraFLOP/s without sparsity: (bfloat16 with tensor cores, float32), by a part of the device's name
    "GB200": (2500.0, 80.0), "B200": (2250.0, 75.0), "GH200": (989.4, 67.0), "H200": (989.4, 67.0),
    "H100 PCIe": (756.0, 51.0), "H100 NVL": (835.0, 60.0), "H100": (989.4, 67.0), "H800": (989.4, 67.0),
    "H20": (148.0, 44.0), "A100": (312.0, 19.5), "A800": (312.0, 19.5), "L40S": (362.0, 91.6), "L40": (181.0, 90.5),
    "L4": (121.0, 30.3), "RTX 6000 Ada": (364.0, 91.1), "RTX A6000": (154.8, 38.7), "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6), "RTX 3090": (71.0, 35.6), "A10": (125.0, 31.2), "MI325X": (1307.4, 163.4),
    "MI300X": (1307.4, 163.4), "MI250X": (383.0, 47.9),
}  # fmt: skip
"""From the makers' data sheets. If a device's name contains several, the first counts."""
USUAL_MFU = 0.2
"""Share of a GPU's peak that an update is taken to reach before one is tried: 0.20 to 0.24 were measured for half a
billion parameters in one process on an H200, see docs/internals/design_choices.md."""
AGAIN = 4 / 3
"""Time of an update with activation checkpointing, in that of one without: each pass forward is computed twice."""
PROBE_SECONDS = 0.1
"""Approximate time of the measurement of a CPU."""
PROBE_WIDTH = 1024
"""Width of the largest matrix in that measurement."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the FLOPs of a model's passes depend on."""

    body: int
    """Parameters in matrices that every token passes."""
    head: int
    """Parameters of the output layer, which only predictions pass."""
    trained_body: int
    """Those of `body` with gradients."""
    trained_head: int
    """Those of `head` with gradients."""
    pair: int
    """FLOPs of the forward pass for one token that attends to another, over all layers: 4 x layers x heads x head
    size."""
    tower: int = 0
    """Parameters in matrices of the vision tower, each as often as a feature of an image passes it: once for each of
    its patches before they are merged."""
    trained_tower: int = 0
    """Those of `tower` with gradients."""
    tower_pair: int = 0
    """FLOPs of the tower's forward pass for one feature that attends to another."""

    @classmethod
    def of(cls, model: "PreTrainedModel", adapter: bool = True) -> "Cost":
        """Count the parameters of a language model, a value model or a classifier, sharded or not. Of the experts,
        those count that a token passes. adapter: False leaves an adapter out that is switched off."""
        text = model.config.get_text_config()
        output = getattr(model, "lm_head", None) or getattr(model, "score", None)
        backbone = model if hasattr(model, "get_input_embeddings") else model.model
        embedding = embeddings(backbone)
        head: Any = None if output is None else output.weight
        seeing, patches = {id(p) for tower in towers(model) for p in tower.parameters()}, _patches(model.config)
        body = trained = tower = trained_tower = 0
        for name, parameter in model.named_parameters():
            if ".lora_" in name and not adapter:
                continue
            if parameter.dim() > 1 and parameter is not head and parameter is not embedding:
                count = int(parameter.numel() * (_active(text) if ".experts." in name else 1))
                own = count if parameter.requires_grad else 0
                if id(parameter) not in seeing:
                    body, trained = body + count, trained + own
                elif ".pos_embed." not in name:  # a table
                    times = 1 if "merger" in name else patches
                    tower, trained_tower = tower + times * count, trained_tower + times * own
        size = 0 if head is None else head.numel()
        heads = getattr(text, "num_attention_heads", 0)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
        pair = 4 * text.num_hidden_layers * heads * head_dim
        trained_head = size if size and head.requires_grad else 0
        tower_pair = _tower_pair(model.config) * patches**2 if seeing else 0
        return cls(body, size, trained, trained_head, pair, tower, trained_tower, tower_pair)

    @property
    def feature(self) -> float:
        """What a feature of an image costs in each pass, beside its token, in tokens; 0 where the tower is frozen: then
        features are kept."""
        return self.tower / self.body if self.trained_tower else 0.0

    def forward(self, work: "Workload") -> float:
        """The FLOPs of a forward pass."""
        kept = self.trained_body and not self.trained_tower
        return self._text(work) + (0.0 if kept else self._images(work))

    def update(self, work: "Workload") -> float:
        """The FLOPs of a forward and backward pass. Frozen matrices have no gradient of their own."""
        own = 2.0 * (self.trained_body * work.tokens + self.trained_head * work.predictions)
        found = 2 * self._text(work) + own + float(self.pair * work.pairs) + self._images(work)
        if not self.trained_tower:
            return found
        return found + self._images(work) + 2.0 * self.trained_tower * work.images + self.tower_pair * work.image_pairs

    def _text(self, work: "Workload") -> float:
        return 2.0 * (self.body * work.tokens + self.head * work.predictions) + float(self.pair * work.pairs)

    def _images(self, work: "Workload") -> float:
        return 2.0 * self.tower * work.images + float(self.tower_pair * work.image_pairs)


@dataclass(frozen=True, slots=True)
class RoleCost:
    """The FLOPs of a role, and the peak of its devices."""

    cost: Cost
    """The FLOPs of its model's passes."""
    peak: float | None
    """Peak FLOP/s of its devices together; None: not known."""
    devices: str
    """Name of its set of devices, equal for roles that share them."""


def costs(holder: Any) -> dict[str, Cost]:
    """The cost of each role that is an attribute of `holder`, by name. A reference has no adapter."""
    roles = {name: getattr(holder, name, None) for name in ROLES}
    return {name: Cost.of(role.model, name != "reference") for name, role in roles.items() if role is not None}


def peak_together(roles: Iterable[RoleCost]) -> float | None:
    """The peak FLOP/s of all devices together, each set once; None if one is not known."""
    peaks = {role.devices: role.peak for role in roles}.values()
    return sum(peak for peak in peaks if peak is not None) if all(peaks) else None


def _active(text: Any) -> float:
    """The share of its experts that a token passes; 1 without experts."""
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    return text.num_experts_per_tok / experts if experts else 1.0


def _patches(config: "PretrainedConfig") -> int:
    """The patches of an image that a feature is made of."""
    vision = getattr(config, "vision_config", None)
    side = getattr(vision, "spatial_merge_size", None) or getattr(vision, "pooling_kernel_size", None) or 1
    return int(side) ** 2


def _tower_pair(config: "PretrainedConfig") -> int:
    """The FLOPs of a vision tower's forward pass for one patch that attends to another."""
    vision = config.vision_config
    layers: Any = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", 0)
    everywhere = getattr(vision, "fullatt_block_indexes", None)
    return 4 * int(layers if everywhere is None else len(everywhere)) * int(vision.hidden_size)


@dataclass(frozen=True, slots=True)
class Workload:
    """The size of a batch for a model that computes whatever its samples have in common once."""

    tokens: int
    """Packed tokens."""
    predictions: int
    """Predicted tokens."""
    pairs: int
    """Pairs of tokens of which one attends to the other, or to itself."""
    images: int = 0
    """Features of images, each image once."""
    image_pairs: int = 0
    """Pairs of features of one image, in either order."""

    @classmethod
    def of(cls, batch: Batch) -> "Workload":
        """Count the tokens of a batch, without samples that have no sampled token: no pass computes them."""
        sampled = batch.sampled
        computed = np.flatnonzero(sampled > 0)
        trees = joined(batch, prefix_trees(batch, computed))
        features: dict[str, int] = {}
        if KEYED in batch.tokens:
            for run in runs(batch.tokens[KEYED][batch.positions(computed)]):
                features[run.key] = max(features.get(run.key, 0), run.first + run.end - run.start)
        return cls(
            sum(t.tokens for t in trees),
            int(sampled.sum()),
            sum(t.pairs for t in trees),
            sum(features.values()),
            sum(count**2 for count in features.values()),
        )


def longest_update(recipe: Recipe) -> float | None:
    """The FLOPs of the updates of a step whose samples all have `rollout.max_tokens`, every token sampled and none
    shared: no step takes more. None: the model's configuration is not on this machine."""
    config = read_config(recipe.model)
    if config is None:
        return None
    with torch.device("meta"):
        model = model_of(config, recipe.model.trust_remote_code)
        if recipe.model.lora is not None:
            add_adapter(model, recipe.model.lora.model_copy(update={"start": None}), "")
    samples, length = recipe.rollout.tasks * recipe.rollout.n, recipe.rollout.max_tokens
    work = Workload(samples * length, samples * length, samples * length * (length + 1) // 2)
    return Cost.of(model).update(work)


def utilisation(flops: float, seconds: float, peak: float | None, of: str = "train") -> dict[str, float]:
    """The metrics <of>/tflops, teraFLOP/s of all devices, and <of>/mfu, their share of `peak` (FLOP/s; None: not
    known)."""
    found = {f"{of}/tflops": flops / seconds / TERA}
    return {**found, f"{of}/mfu": flops / seconds / peak} if peak else found


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s of matrix products: by the data sheet of a known GPU (None: not known), or measured on a
    CPU."""
    if device.type == "cuda":
        return known_peak(torch.cuda.get_device_name(device), dtype)
    return _measured_peak(dtype, torch.get_num_threads()) if device.type == "cpu" else None


def peak_of(model: "PreTrainedModel", recipe: Recipe, device: torch.device) -> float | None:
    """The peak FLOP/s of a device that trains `model` by `recipe`; None: not known."""
    mixed = recipe.model.compute == "bfloat16"
    return peak_flops(device, torch.bfloat16 if mixed else next(model.parameters()).dtype)


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s of a GPU by the driver's name of it; None: not known."""
    found = next((peaks for part, peaks in PEAKS.items() if part in name), None)
    return None if found is None else TERA * found[dtype == torch.float32]


@cache
def _measured_peak(dtype: torch.dtype, threads: int) -> float:
    """Measure a few matrix products, of growing size while there is time; return the best FLOP/s. It is measured once
    for each number of threads, which this process has when it asks."""
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
