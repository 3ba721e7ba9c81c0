"""Compiled layers compute what the others do, in one compilation for rows of any length."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packing_help import make_batch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.compute.batch import prefix_trees
from agentrl.compute.forward import choose
from agentrl.compute.packing import pack
from agentrl.errors import UserError

ROWS = [[(9, [5, 6]), (4, [3])], [(30, [12, 40, 7])], [(3, [2, 2])]]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts the parts that are compiled, without a C compiler."""
    torch._dynamo.reset()
    found, compiling = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **more: compiling(function, backend=found, **more))
    return found


def make_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def learned(forward: Callable[..., Any], model: Any, shape: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
    batch = make_batch(shape)
    logprobs, entropies = forward(pack(batch, prefix_trees(batch)), 0.9)
    model.zero_grad()
    (logprobs.sum() + 0.1 * entropies.sum()).backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.long), True])
def test_they_equal_the_others_and_are_compiled_once(checkpointing: bool, counter: CompileCounterWithBackend) -> None:
    model, plain = make_model(), make_model()
    forward, said = choose(model, checkpointing=checkpointing, compiled=True)
    assert said.startswith("module with shared-prefix attention, layers compiled")
    other = choose(plain, checkpointing=True)[0]
    counts = []
    for shape in ROWS:
        for found, wanted in zip(learned(forward, model, shape), learned(other, plain, shape), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0, "rows of other lengths, and other layers, are served by what was compiled"


@pytest.mark.slow
def test_an_engine_that_shares_the_module_runs_it_as_it_was(counter: CompileCounterWithBackend) -> None:
    model = make_model()
    whole = copy.deepcopy(model)
    choose(model, compiled=True)
    ids = torch.arange(7)[None]
    before = counter.frame_count
    torch.testing.assert_close(model(input_ids=ids).logits, whole(input_ids=ids).logits)
    assert counter.frame_count == before


def test_layers_that_cannot_be_compiled_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, **_: Any) -> Any:
        def call(*_: object, **__: object) -> Any:
            raise RuntimeError("no C compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(UserError, match=r"model.compile: .*no C compiler.*; set it to false"):
        choose(make_model(), compiled=True)
