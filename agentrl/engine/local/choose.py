"""Choice of the runner for a model: our own forward, the module with a slot cache, or recomputation; with a probe."""

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agentrl.engine.local.block_runner import BlockRunner
from agentrl.engine.local.runner import Chunk, Ints, Runner, Work
from agentrl.errors import UserError
from agentrl.models import block
from agentrl.models.load import embeddings
from agentrl.models.prove import attempt, difference, differs_like_others
from agentrl.models.routing import Routing
from agentrl.models.vision import Vision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentrl.engine.local.module_runner import ModuleRunner
    from agentrl.engine.local.recompute_runner import RecomputeRunner

log = logging.getLogger(__name__)

PROBE_TOKENS = 12
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference of log-probs between a probe with a slot cache and the plain forward; in half precision it is
judged by `differs_like_others` instead, as the trainer's forward is."""


def runner_for(model: "PreTrainedModel", routing: Routing | None = None) -> Runner:
    """The fastest runner that is exact for `model`. Raises UserError if it is no causal language model, or if it
    shall record the experts of a mixture (`routing`) that has to be sampled without a cache."""
    if getattr(model.config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise UserError(f"model.path: {type(model).__name__} is not a causal language model, which the engine needs")
    if block.unsupported(model) is None:
        return BlockRunner(model)
    from agentrl.engine.local.module_runner import ModuleRunner
    from agentrl.engine.local.vision_runner import VisionRunner

    runner = (VisionRunner if Vision.of(model) else ModuleRunner)(model, routing)
    reason = runner.unsupported() or _disagreement(model, runner)
    if reason is None:
        return runner
    if routing is not None:
        raise UserError(f"algorithm.routing_replay needs a slot cache to record experts in: {reason}")
    log.warning("%s is sampled without a cache, which is slow: %s", type(model).__name__, reason)
    return _recomputing(model)


def _recomputing(model: "PreTrainedModel") -> "RecomputeRunner":
    from agentrl.engine.local.recompute_runner import RecomputeRunner
    from agentrl.engine.local.vision_runner import VisionRecomputeRunner

    return VisionRecomputeRunner(model) if Vision.of(model) else RecomputeRunner(model)


def _disagreement(model: "PreTrainedModel", runner: "ModuleRunner") -> str | None:
    """Why a slot cache is not exact for this module, or None if it is.

    The probe has two prompts of different lengths, each computed in two chunks, and then one decoded token.
    """
    window = runner._window if isinstance(runner._window, int) else 0
    longest = PROBE_TOKENS + (window if window <= 128 else 0)
    vocabulary = embeddings(model).shape[0]
    ids = np.random.default_rng(0).integers(0, vocabulary, (2, longest))
    found = attempt(lambda: _probe(runner, ids))
    if isinstance(found, str):
        reason: str | None = found
    else:
        slow = _recomputing(model)
        wanted = _probe(slow, ids)
        if runner.dtype in TOLERANCE:
            reason = difference(found, wanted, TOLERANCE[runner.dtype])
        else:
            other = ids.copy()
            other[:, :2] = (ids[:, :2] + vocabulary // 2) % vocabulary
            reason = differs_like_others(found, wanted, _probe(slow, other))
    runner.clear()
    if reason is None and not runner.token_bytes:
        reason = "its forward leaves no keys and values in it"
    if reason is None:
        runner.resize(0, 0)
    return reason and f"through a slot cache: {reason}"


def _probe(runner: Runner, ids: Ints) -> Tensor:
    """The log-probs after each chunk and after the decoded tokens, [6, vocab]. ids: [2, longest]."""
    longest = ids.shape[1]
    runner.resize(2, longest)
    ends = (longest - 1, longest - 4)
    first = tuple(Chunk(slot, 0, ids[slot, : 3 + slot]) for slot in (0, 1))
    second = tuple(Chunk(slot, 3 + slot, ids[slot, 3 + slot : ends[slot]]) for slot in (0, 1))
    none = np.zeros(0, np.int64)
    last = Work(ids[[0, 1], ends], np.array(ends), np.array([True, True]), ())
    steps = [Work(none, none, none.astype(bool), first), Work(none, none, none.astype(bool), second), last]
    return torch.cat([runner.forward(work).log_softmax(-1) for work in steps])
