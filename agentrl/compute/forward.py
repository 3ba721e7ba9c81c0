"""Log-probs and entropies of a packed row, by the fastest implementation that is exact for the model.

There are three: our own forward of Qwen2, Qwen3, Llama and Mistral models (`BlockForward`), the Hugging Face module
with its attention replaced, and the unchanged module on one sequence after another. `choose` compares them on a small
packed row at start-up, and takes the first that agrees with the last.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.algo.loss import entropy
from agentrl.compute import compiled_layers, liger
from agentrl.compute.activation_checkpointing import recompute
from agentrl.compute.batch import Batch, prefix_trees
from agentrl.compute.compiled_layers import cannot, compile_layers
from agentrl.compute.compiled_pass import CompiledPass
from agentrl.compute.hf_attention import Unsupported, replaced_attention
from agentrl.compute.kernels import Further, rms_norm, swiglu, token_logprobs
from agentrl.compute.packing import Packed, indices, pack
from agentrl.compute.prefix_tree import Ints
from agentrl.compute.tree_attention import attend, faults, make_layout
from agentrl.models import block
from agentrl.models.block import Rope, Weights, weights_of
from agentrl.models.load import embeddings
from agentrl.models.lora import has_dropout, layers
from agentrl.models.prove import attempt, difference, differs_like_others
from agentrl.models.vision import Vision
from agentrl.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference, in nats or as a share of the largest value. Log-probs in half precision are compared by
`differs_like_others` instead."""
EXACT = (torch.float32, torch.float64)
"""Dtypes whose results are compared by TOLERANCE."""

KERNELS = block.Kernels(rms_norm, swiglu)
SMALL = 50_000_000
"""Number of parameters up to which joined and folded copies of the weights, made anew in each pass, are faster."""

M = TypeVar("M", bound=nn.Module)


class Forward(Protocol):
    """Computes what the loss needs, with gradients to the parameters of `model`."""

    model: Any
    """The causal language model."""

    def __call__(self, packed: Packed, temperature: float, further: Further | None = None) -> tuple[Any, ...]:
        """The log-probs of the predicted tokens, and the entropies, of softmax(logits / temperature): float32
        [N], in nats; and what `further` makes of the predictions, where it is given. Without gradients, entropies may
        be 0.
        """


class BlockForward:
    """A `Forward` on the parameters of a model that it supports (see `unsupported`); built once a run."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rope = Rope(model)
        self.copies = sum(p.numel() for p in model.parameters()) <= SMALL
        self.compiled = CompiledPass.of(model, self.rope) if self.copies else None

    @staticmethod
    def unsupported(model: nn.Module) -> str | None:
        """Why it cannot run this model, in a few words; None: it can."""
        if next(model.parameters()).dtype != torch.float32:
            return "its weights are not float32"
        if adapted := layers(model):
            if has_dropout(model):
                return "its adapter has dropout"
            if sum(p.numel() for p in model.parameters()) > SMALL:
                return f"it would merge the adapters of {len(adapted)} layers in each pass"
        return block.unsupported(model)

    def __call__(self, packed: Packed, temperature: float, further: Further | None = None) -> tuple[Any, ...]:
        """Log-probs and entropies (nats) of the packed row's predictions, float32 [N] each, and `further`."""
        states, head = self.states(packed)
        found = token_logprobs(
            states, head, None, torch.from_numpy(packed.target).to(head.device), temperature, packed.masks
        )
        return found if further is None else (*found, further(states, head, None))

    def states(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """The hidden states [N, D] of the predicting tokens, and the matrix [V, D] of the output layer; either
        may include the gain of the final norm."""
        weights = weights_of(self.model, copy=self.copies, interleave=self.copies and self.compiled is None)
        if self.compiled is not None:
            return self.compiled.states(weights, packed), _head(weights)
        device = weights.embed.device
        rotation = self.rope(torch.from_numpy(packed.positions).to(device))
        ids, predict = (torch.from_numpy(indices).to(device) for indices in (packed.ids, packed.predict))
        layout, scale = make_layout(packed.segments, device), weights.shape.head_dim**-0.5

        def attention(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, layout, scale)

        return block.hidden(weights, ids, rotation, attention, KERNELS, predict), _head(weights)


def _head(weights: Weights) -> Tensor:
    """The matrix [V, D] that maps hidden states to logits."""
    return weights.head.weights[0].t() if weights.head.transposed else weights.head.weights[0]


class ModuleForward:
    """The Hugging Face module with attention over shared-prefix trees. Of a model that sees, features stand in the
    place of placeholders, with positions of their own along each path; those of an image are computed once, however
    many paths hold it.

    compute: dtype of matrix products (None: that of the weights); weights, gradients and results stay float32.
    max_over_ranks: see `Vision`. Raises Unsupported for an output layer that is not linear.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        compute: torch.dtype | None = None,
        max_over_ranks: Callable[[int], int] | None = None,
    ) -> None:
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise Unsupported("its output layer is not a plain nn.Linear")
        if getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None:
            raise Unsupported("its logits are capped")
        self.model, self.head, self.compute = model, head, compute
        self.base: nn.Module = getattr(model, model.base_model_prefix)
        self.vision = vision_of(model, max_over_ranks)

    def __call__(self, packed: Packed, temperature: float, further: Further | None = None) -> tuple[Any, ...]:
        device, kind = self.head.weight.device, self.compute or self.head.weight.dtype
        states = hidden_states(self.model, self.base, packed, device, self.compute, self.vision)
        chosen = states.index_select(0, torch.from_numpy(packed.predict).to(device)).to(kind)
        target = torch.from_numpy(packed.target).to(device)
        bias = None if self.head.bias is None else self.head.bias.to(kind)
        head = self.head.weight.to(kind)
        found = token_logprobs(chosen, head, bias, target, temperature, packed.masks)
        return found if further is None else (*found, further(chosen, head, bias))


def vision_of(model: nn.Module, max_over_ranks: Callable[[int], int] | None = None) -> Vision | None:
    """The `Vision` of a model that sees; None: it reads text."""
    return Vision(model, max_over_ranks=max_over_ranks) if Vision.of(model) else None


def axes_of(vision: Vision, packed: Packed) -> Ints:
    """The positions of the packed tokens along their paths, int64 [axes, P]."""
    axes = np.tile(packed.positions, (vision.input.family.axes, 1))
    for path in packed.paths:
        own = indices(path.spans)
        axes[:, own] = vision.positions(packed.ids[own])
    return axes


def hidden_states(
    model: "PreTrainedModel",
    base: nn.Module,
    packed: Packed,
    device: torch.device,
    compute: torch.dtype | None = None,
    vision: Vision | None = None,
) -> Tensor:
    """The hidden states [P, D] of the packed tokens. base: the part of `model` before its output layer. vision:
    of a model that sees."""
    with autocast(device, compute):
        if vision is None:
            ids, positions = (torch.from_numpy(of).to(device)[None] for of in (packed.ids, packed.positions))
            said = {"input_ids": ids, "position_ids": positions}
        else:
            axes = vision.position_ids(axes_of(vision, packed)[:, None])
            said = {"position_ids": axes, **vision.embedded(packed.ids[None])}
            model, base = vision.base, vision.base.language_model
        with replaced_attention(model, partial(attend, layout=make_layout(packed.segments, device))):
            states: Tensor = base(use_cache=False, **said).last_hidden_state[0]
    return states


class SequenceRunner(Generic[M]):
    """Runs an unchanged module on one unpadded sequence after another: exact for every causal model, and slow. One
    that sees runs as `Vision` does.

    compute: see `ModuleForward`. max_over_ranks: returns the maximum of a count over the ranks that share the model's
    shards (None: one process). All of them run the module as often as the rank with the most sequences, so that their
    collectives match; the output of surplus passes is multiplied by 0.
    """

    def __init__(
        self, model: M, compute: torch.dtype | None = None, max_over_ranks: Callable[[int], int] | None = None
    ) -> None:
        self.model, self.compute, self.max_over_ranks = model, compute, max_over_ranks

    def idle_passes(self, packed: Packed) -> Tensor:
        """Run the passes that this rank lacks; return 0, with a gradient of 0 to all parameters.

        Call it before `logits`: afterwards the ranks would be in different collectives.
        """
        nothing = torch.zeros((), device=self._device)
        if self.max_over_ranks is not None:
            passes = sum(bool(path.predictions) for path in packed.paths)
            for _ in range(max(1, self.max_over_ranks(passes)) - passes):
                nothing = nothing + 0.0 * self._run(packed.ids[:1]).float().sum()
        return nothing

    def logits(self, packed: Packed) -> Iterator[tuple[slice, Tensor]]:
        """Yield, for each sequence, the slice of the row's predictions that are its own, and their logits, float32 [n,
        V]."""
        first = 0
        for path in packed.paths:
            if not path.predictions:
                continue
            own = slice(first, first + path.predictions)
            rows = torch.from_numpy(packed.positions[packed.predict[own]]).to(self._device)
            yield own, self._run(packed.ids[indices(path.spans)]).index_select(0, rows).float()
            first += path.predictions

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _run(self, ids: np.ndarray) -> Tensor:
        device = self._device
        with autocast(device, self.compute):
            if (vision := vision_of(self.model, self.max_over_ranks)) is not None:
                return self._seen(vision, ids)
            logits: Tensor = self.model(input_ids=torch.from_numpy(ids).to(device)[None], use_cache=False).logits[0]
        return logits

    def _seen(self, vision: Vision, ids: np.ndarray) -> Tensor:
        return vision.logits(ids)


class SequenceForward(SequenceRunner[nn.Module]):
    """Log-probs and entropies by the unchanged module, one sequence after another."""

    def __call__(self, packed: Packed, temperature: float, further: Further | None = None) -> tuple[Any, ...]:
        idle = self.idle_passes(packed)
        logprobs, entropies, kept = [idle.new_zeros(0)], [idle.new_zeros(0)], []
        for own, logits in self.logits(packed):
            kept += [logits] if further is not None else []
            scaled = logits / temperature
            log_p = (scaled if packed.masks is None else packed.masks.apply(scaled, own)).log_softmax(-1)
            target = torch.from_numpy(packed.target[own]).to(log_p.device)
            logprobs.append(log_p.gather(1, target[:, None])[:, 0])
            entropies.append(entropy(log_p))
        found = torch.cat(logprobs) + idle, torch.cat(entropies) + idle
        if further is None:
            return found
        width = self.model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        return *found, further(torch.cat([idle.new_zeros(0, width), *kept]) + idle, None, None)


def computed_in(section: ModelSection) -> torch.dtype | None:
    """The type that the recipe's `model.compute` names; None: that of the weights."""
    return torch.bfloat16 if section.compute == "bfloat16" else None


def choose(
    model: "PreTrainedModel",
    compute: torch.dtype | None = None,
    checkpointing: bool = False,
    offload: bool = False,
    compiled: bool = False,
) -> tuple[Forward, str]:
    """The fastest exact implementation for `model`, and a line that says which, and why not a faster one.

    compute: see ModuleForward. checkpointing: the activations of a layer are computed again in the backward pass, from
    then on, whoever calls the module; offload: what is kept of a layer lies in CPU memory meanwhile. compiled: the
    layers are compiled. Raises UserError: they, or kernels of liger-kernel, do not compute as the model does.
    """
    reasons: list[str] = []
    sequences = SequenceForward(model)
    if compiled:
        compile_layers(model)
    chosen: tuple[Callable[..., Forward], str] = SequenceForward, SEQUENTIAL
    for kind, name in VISION_FORWARDS if Vision.of(model) else FAST_FORWARDS:
        reason = _excluded(kind, compute, checkpointing, compiled) or _rejection(kind, model, sequences)
        if reason is None:
            chosen = kind, name
            break
        if compiled and kind is ModuleForward:
            raise cannot(reason)
        reasons.append(f"no {name}: {reason}")
    kind, name = chosen
    if kind is ModuleForward and not Vision.of(model):
        if compiled:
            name = f"{name}, {compiled_layers.DESCRIPTION}"
        elif liger.fits(model, next(model.parameters()).device):
            with torch.no_grad():
                liger.apply_and_compare(model, lambda: ModuleForward(model)(probe_of(model), 1.0)[0], _judge(model))
            name = f"{name}, {liger.DESCRIPTION}"
    if checkpointing:
        recompute(model, offload)
    forward = kind(model) if kind is BlockForward else kind(model, compute)
    name += ", in bfloat16" if compute == torch.bfloat16 else ""
    name += f", attention in buckets, which is slow ({why})" if (why := faults(next(model.parameters()).device)) else ""
    return forward, name + (f" ({'; '.join(reasons)})" if reasons else "")


SEQUENTIAL = "one sequence at a time"
"""The description of a forward for models that no faster one is exact for."""
FAST_FORWARDS: tuple[tuple[Callable[..., Forward], str], ...] = (
    (BlockForward, "own forward"),
    (ModuleForward, "module with shared-prefix attention"),
)
"""Implementations that `choose` tries, the fastest first, and the description of each."""
VISION_FORWARDS: tuple[tuple[Callable[..., Forward], str], ...] = (
    (ModuleForward, "module with shared-prefix attention and images"),
)
"""Those for models that see."""


def _excluded(
    kind: Callable[..., Forward], compute: torch.dtype | None, checkpointing: bool, compiled: bool
) -> str | None:
    """Why the settings exclude our own forward, whatever the model; None: they do not."""
    if kind is not BlockForward:
        return None
    if compute is not None:
        return "model.compute is not that of the weights"
    switches = {"checkpointing": checkpointing, "compile": compiled}
    return next((f"model.{name} is on" for name, on in switches.items() if on), None)


def autocast(device: torch.device, compute: torch.dtype | None) -> AbstractContextManager[object]:
    """The context in which matrix products are computed in `compute` (None: in the type of the weights)."""
    return nullcontext() if compute is None else torch.autocast(device.type, compute)


def _rejection(kind: Callable[..., Forward], model: "PreTrainedModel", sequences: SequenceForward) -> str | None:
    """Why `kind` cannot be used for `model`; None: it can."""
    if kind is BlockForward and (reason := BlockForward.unsupported(model)):
        return reason
    if kind is not BlockForward and (reason := unsupported_attention(model)):
        return reason
    with torch.no_grad():
        found = attempt(lambda: kind(model)(probe_of(model), 1.0)[0])
        return found if isinstance(found, str) else _judge(model)(found, sequences(probe_of(model), 1.0)[0])


def _judge(model: "PreTrainedModel") -> Callable[[Tensor, Tensor], str | None]:
    """A function that tells why log-probs of the probe (first argument) differ from those of the unchanged model
    (second) by more than rounding; None if they do not."""
    kind = next(model.parameters()).dtype
    if kind in EXACT:
        return lambda found, wanted: difference(found, wanted, TOLERANCE[torch.float32])
    with torch.no_grad():
        other = SequenceForward(model)(probe_of(model, other=True), 1.0)[0]
    return lambda found, wanted: differs_like_others(found, wanted, other)


def probe_of(model: "PreTrainedModel", other: bool = False) -> Packed:
    """A small packed row on which implementations are compared. other: the same answers after other prompts."""
    return _probe(int(embeddings(model).shape[0]), other)


def unsupported_attention(model: "PreTrainedModel") -> str | None:
    """Why attention over packed rows cannot replace the model's, by its configuration; None: it can."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"its layers are {', '.join(sorted(kinds))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "it attends in a sliding window"
    return None


def _probe(vocabulary: int, other: bool = False) -> Packed:
    """Two groups with a shared prompt, two answers of the first with a common beginning, and a lone sequence."""
    rng = np.random.default_rng(0)
    rows, prompts, groups = [], [], []
    for group, (prompt, answers) in enumerate([(5, (3, 6, 4)), (7, (5, 2)), (4, (9,))]):
        opening = (rng.integers(0, vocabulary, prompt) + other * (vocabulary // 2)) % vocabulary
        for answer in answers:
            rows.append(np.concatenate([opening, rng.integers(0, vocabulary, answer)]))
            prompts.append(prompt)
            groups.append(group)
    rows[2][5:7] = rows[1][5:7]
    mask = [np.arange(len(row)) >= prompt for row, prompt in zip(rows, prompts, strict=True)]
    batch = Batch(
        np.cumsum([0, *(len(row) for row in rows)]),
        {"ids": np.concatenate(rows).astype(np.int32), "loss_mask": np.concatenate(mask).astype(np.uint8)},
        {"prompt_length": np.array(prompts, np.int32), "group": np.array(groups, np.int64)},
    )
    return pack(batch, prefix_trees(batch, least=1))
