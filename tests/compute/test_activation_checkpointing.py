"""Activation checkpointing and mixed precision in one process: what is computed again, and how far off it is."""

from typing import Any

import numpy as np
import pytest
import torch
from packing_help import Live, make_batch, make_model
from tiny_models import qwen3
from torch import Tensor, nn

from agentrl.compute.activation_checkpointing import blocks_of
from agentrl.compute.forward import BlockForward, Forward, ModuleForward, SequenceForward, _probe, choose
from agentrl.learner.roles import LocalRoles
from agentrl.models import lora
from agentrl.models.load import load_model
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import LoraSection, ModelSection

ROW = _probe(60)


def loss_of(forward: Forward) -> Tensor:
    logprobs, entropies = forward(ROW, 0.9)
    return logprobs.sum() + (entropies * torch.linspace(-1, 1, len(entropies))).sum()


def gradients(model: nn.Module, forward: Forward) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(forward).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * max(1.0, float(gradient.abs().max())), name


def deep() -> Any:
    """Many small layers, so that what they keep outweighs all else."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return qwen3(intermediate_size=96, num_hidden_layers=8, initializer_range=0.2, **heads)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_layers_computed_again_give_the_same_gradients(name: str) -> None:
    model = make_model(name)
    wanted = gradients(model, ModuleForward(model))
    forward, said = choose(model, checkpointing=True)
    assert isinstance(forward, ModuleForward)
    same(gradients(model, forward), wanted)
    assert ("no own forward: model.checkpointing is on" in said) == (name == "qwen3") or name == "gpt2"


def test_a_window_is_computed_again_one_sequence_at_a_time() -> None:
    model = qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    wanted = gradients(model, SequenceForward(model))
    forward, _ = choose(model, checkpointing=True)
    assert isinstance(forward, SequenceForward)
    same(gradients(model, forward), wanted)


def test_a_layer_keeps_its_input_alone() -> None:
    kept = {}
    for checkpointing in (False, True):
        model = deep()
        forward = choose(model, checkpointing=True)[0] if checkpointing else ModuleForward(model)
        with Live() as live:
            loss = loss_of(forward)
            kept[checkpointing] = live.bytes
        loss.backward()
    assert kept[True] < 0.3 * kept[False]


@pytest.mark.slow
def test_dropout_of_an_adapter_is_the_same_the_second_time() -> None:
    section = ModelSection(device="cpu", lora=LoraSection(rank=4, alpha=8, dropout=0.5))
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = load_model(section)[0]
        with torch.no_grad():
            for parameter in lora.adapter_parameters(model):
                parameter.add_(0.05)
        forward, _ = choose(model, checkpointing=checkpointing)
        torch.manual_seed(1)
        with lora.dropping_out(model):
            found.append(gradients(model, forward))
    same(found[1], found[0])


def test_without_gradients_nothing_is_computed_again() -> None:
    model = deep()
    forward, _ = choose(model, checkpointing=True)
    calls = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        forward(ROW, 1.0)
    assert len(calls) == 1
    loss_of(forward).backward()
    assert len(calls) == 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("way", [ModuleForward, SequenceForward])
def test_mixed_precision_keeps_weights_and_results_float32(way: Any) -> None:
    """bfloat16 has 8 bits: log-probs are off by less than 2 %, gradients by less than 3 % of their norm."""
    model = load_model(ModelSection(device="cpu"))[0]
    exact, mixed = way(model), way(model, torch.bfloat16)
    wanted, found = exact(ROW, 1.0)[0].detach(), mixed(ROW, 1.0)[0].detach()
    assert found.dtype == torch.float32
    assert 0 < float((found - wanted).abs().max()) < 0.02 * float(wanted.abs().max())
    right, rough = gradients(model, exact), gradients(model, mixed)
    assert {g.dtype for g in rough.values()} == {torch.float32}
    off = np.sqrt(sum(float((rough[n] - g).square().sum()) for n, g in right.items()))
    assert off < 0.03 * np.sqrt(sum(float(g.square().sum()) for g in right.values()))


def test_mixed_precision_declines_the_own_forward() -> None:
    model = load_model(ModelSection(device="cpu"))[0]
    assert isinstance(choose(model)[0], BlockForward)
    forward, said = choose(model, torch.bfloat16)
    assert isinstance(forward, ModuleForward)
    assert forward.compute == torch.bfloat16
    assert "no own forward: model.compute is not that of the weights" in said


def test_the_reference_is_computed_as_the_policy_is() -> None:
    """Else they would be apart before anything is learnt."""
    batch = make_batch([(5, [3, 6])])
    found = []
    for compute in ("same", "bfloat16"):
        recipe = Recipe.model_validate({"model": {"device": "cpu", "compute": compute}, "algorithm": {"kl_coef": 0.1}})
        place = LocalRoles(recipe, load_model(recipe.model)[0])
        found.append(place.actor.logprobs(batch))
        assert np.array_equal(place.reference.logprobs(batch), found[-1])
    assert not np.array_equal(*found)


def test_the_blocks_are_the_decoder_layers() -> None:
    for name, size in (("qwen3", 2), ("gpt2", 2)):
        model = make_model(name)
        assert len(blocks_of(model)) == size
        model._no_split_modules = None  # type: ignore[assignment]  # a model of somebody's own
        assert len(blocks_of(model)) == size
