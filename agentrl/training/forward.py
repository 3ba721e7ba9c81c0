"""Log-probs and entropies of a packed row, by the fastest way that is proven exact for the model at hand.

Three ways: our own forward (fast.py), the Hugging Face module with its attention replaced, and the module on one
sequence after another. `choose` tries them on a small forest at start-up and takes the first that agrees with the last.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from agentrl.algo.loss import entropy
from agentrl.training.attention import attend, plan
from agentrl.training.batch import Batch
from agentrl.training.fast import FastForward
from agentrl.training.kernels import token_logprobs
from agentrl.training.packing import Packed, Segment, forest, pack

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}  # nats; wrong attention is off by more


class Forward(Protocol):
    """A way to compute what the loss needs, with gradients to the model's parameters."""

    def __call__(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (natural, of softmax(logits / temperature)) of the predictions: float32 [N] each."""
        ...


class Unsupported(Exception):  # noqa: N818 - a reason, not a failure: the next way is tried
    """Why a way does not fit a model."""


class ModuleForward:
    """The Hugging Face module with its attention replaced by that over the forest."""

    def __init__(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise Unsupported("its output layer is not a plain nn.Linear")
        self.model, self.head = model, head
        self.base: Any = getattr(model, model.base_model_prefix)

    def __call__(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        device = self.head.weight.device
        layout = plan(packed.segments, device)
        with attending(self.model, partial(attend, plan=layout)):
            states = self.base(
                input_ids=torch.from_numpy(packed.ids).to(device)[None],
                position_ids=torch.from_numpy(packed.positions).to(device)[None],
                use_cache=False,
            ).last_hidden_state[0]
        chosen = states.index_select(0, torch.from_numpy(packed.predict).to(device))
        target = torch.from_numpy(packed.target).to(device)
        return token_logprobs(chosen, self.head.weight, self.head.bias, target, temperature)


class SequenceForward:
    """The module as it is, on one unpadded sequence after another: right for every causal model, and slow."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        first = 0
        for segment in packed.segments:
            if not segment.predictions:
                continue
            own = slice(first, first + segment.predictions)
            log_p = (self._logits(packed, segment, packed.predict[own]) / temperature).log_softmax(-1)
            target = torch.from_numpy(packed.target[own]).to(log_p.device)
            logprobs.append(log_p.gather(1, target[:, None])[:, 0])
            entropies.append(entropy(log_p))
            first += segment.predictions
        return torch.cat(logprobs), torch.cat(entropies)

    def _logits(self, packed: Packed, segment: Segment, predict: np.ndarray) -> Tensor:
        prefix = segment.prefix_end - segment.prefix_start
        path = np.concatenate(
            [packed.ids[segment.prefix_start : segment.prefix_end], packed.ids[segment.start : segment.end]]
        )
        device = next(self.model.parameters()).device
        logits: Tensor = self.model(input_ids=torch.from_numpy(path).to(device)[None], use_cache=False).logits[0]
        at = np.where(predict >= segment.start, predict - segment.start + prefix, prefix - 1)
        return logits.index_select(0, torch.from_numpy(at).to(device)).float()


def choose(model: PreTrainedModel) -> tuple[Forward, str]:
    """The fastest exact way for `model`, and a line for people that says which and why not a faster one."""
    reasons: list[str] = []
    sequences = SequenceForward(model)
    for kind, name in ((FastForward, "own forward"), (ModuleForward, "module with shared-prefix attention")):
        reason = _try(kind, model, sequences)
        if reason is None:
            return kind(model), name + (f" ({'; '.join(reasons)})" if reasons else "")
        reasons.append(f"no {name}: {reason}")
    return sequences, f"one sequence at a time ({'; '.join(reasons)})"


def _try(kind: Any, model: Any, sequences: SequenceForward) -> str | None:
    """Why `kind` cannot serve `model`, or None."""
    if kind is FastForward and (reason := FastForward.fits(model)):
        return reason
    if kind is ModuleForward and (reason := _local_attention(model)):
        return reason
    probe = _probe(int(model.get_input_embeddings().weight.shape[0]))
    try:
        with torch.no_grad():
            found, wanted = kind(model)(probe, 1.0)[0], sequences(probe, 1.0)[0]
    except (Unsupported, RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    off = float((found - wanted).abs().max())
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, 0.25)
    return None if off <= tolerance else f"log-probs differ by {off:.2g} from those of single sequences"


def _local_attention(model: PreTrainedModel) -> str | None:
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"its layers are {', '.join(sorted(kinds))}"
    if getattr(model.config, "sliding_window", None) and getattr(model.config, "use_sliding_window", True):
        return "it attends in a sliding window"
    return None


def _probe(vocabulary: int) -> Packed:
    """Two groups with a shared prompt and a lone sequence."""
    rng = np.random.default_rng(0)
    rows, prompts, groups = [], [], []
    for group, (prompt, answers) in enumerate([(5, (3, 6, 4)), (7, (5, 2)), (4, (9,))]):
        opening = rng.integers(0, vocabulary, prompt)
        for answer in answers:
            rows.append(np.concatenate([opening, rng.integers(0, vocabulary, answer)]))
            prompts.append(prompt)
            groups.append(group)
    mask = [np.arange(len(row)) >= prompt for row, prompt in zip(rows, prompts, strict=True)]
    batch = Batch(
        np.cumsum([0, *(len(row) for row in rows)]),
        {"ids": np.concatenate(rows).astype(np.int32), "loss_mask": np.concatenate(mask).astype(np.uint8)},
        {"prompt_length": np.array(prompts, np.int32), "group": np.array(groups, np.int64)},
    )
    return pack(batch, forest(batch))


Mix = Callable[..., Tensor]
"""(query [P, H, D], key [P, G, D], value [P, G, D], scale=) -> [P, H * D]: attention over one row of P tokens."""

_MIX: ContextVar[Mix] = ContextVar("mix")
_NAME = "agentrl_forest"


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """In the shape that AttentionInterface wants: query [1, H, P, D] to [1, P, H, D]."""
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if options.get(name) is not None:
            raise Unsupported(f"its attention uses {name}")
    if attention_mask is not None or query.shape[0] != 1:
        raise Unsupported("its attention brings a mask of its own")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    mixed = _MIX.get()(q, k, v, scale=scale)
    return mixed.view(1, *q.shape[:2], v.shape[-1]), None


AttentionInterface.register(_NAME, _attention)


@contextmanager
def attending(model: Any, mix: Mix) -> Iterator[None]:
    """The module attends by `mix` inside the block, and as before after it: the engine shares it."""
    before = model.config._attn_implementation
    token = _MIX.set(mix)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _MIX.reset(token)


def recomputing(model: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of activation checkpointing: a layer that the backward pass computes again attends as it did the
    first time, although that `attending` block is left by then."""
    mix = _MIX.get(None)
    return nullcontext(), nullcontext() if mix is None else attending(model, mix)
