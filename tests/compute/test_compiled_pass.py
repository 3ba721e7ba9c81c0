"""Both passes of packed_row.c give what torch computes, on any number of threads, and the same bits each time."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from packing_help import SHAPES, SIZES, TorchForward, make_batch, make_deep, make_model, shapes
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.compute import compiled_pass
from agentrl.compute.batch import Batch, prefix_trees
from agentrl.compute.compiled_pass import fits, library
from agentrl.compute.forward import BlockForward, Forward
from agentrl.compute.micro_batches import EMPTY
from agentrl.compute.packing import Packed, pack


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("no C compiler is installed")
    monkeypatch.setattr(compiled_pass, "LEAST", 1)


def of_qwen3(**sizes: int) -> Any:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 16, **sizes})).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


MODELS = {
    "qwen3": lambda: make_model("qwen3"),
    "qwen2": lambda: make_model("qwen2"),
    "llama": lambda: make_model("llama"),
    "a key head for each": lambda: of_qwen3(num_key_value_heads=4, head_dim=8),
    "one key head": lambda: of_qwen3(num_key_value_heads=1, head_dim=24, hidden_size=40, intermediate_size=72),
    "one layer, wide heads": lambda: of_qwen3(num_hidden_layers=1, head_dim=64, num_attention_heads=2),
}


def row_of(batch: Batch) -> Packed:
    return pack(batch, prefix_trees(batch, least=1))


def both_passes(forward: Forward, row: Packed) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies and the gradients of a weighted sum of both."""
    forward.model.zero_grad()
    logprobs, entropies = forward(row, 0.8)
    weight = torch.randn(2, len(logprobs), generator=torch.Generator().manual_seed(1))
    (weight * torch.stack([logprobs, entropies])).sum().backward()
    gradients = (p.grad.clone() for p in forward.model.parameters() if p.grad is not None)
    return logprobs.detach(), entropies.detach(), *gradients


def check(model: Any, row: Packed, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not len(row.predict):
        return
    wanted = both_passes(TorchForward(model), row)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        forward = BlockForward(model)
        assert forward.compiled is not None
        found = both_passes(forward, row)
        with torch.no_grad():
            without_gradients = forward(row, 0.8)[0]
    assert torch.equal(without_gradients, found[0])
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):  # rounded as the largest is
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * max(1.0, float(theirs.abs().max())))


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_both_passes_are_those_of_torch(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in (make_batch([*SHAPES, (150, [40, 130, 7])]), make_deep(5), make_batch([(1, [2])])):
        check(MODELS[name](), row_of(batch), threads, monkeypatch)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(shapes)
def test_rows_of_any_shape(shape: list[tuple[int, list[int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check(make_model("qwen3"), row_of(make_batch(shape)), 3, patch)


def test_long_rows_and_predictions_that_samples_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(700, [600, 20]), (1, [900])])
    batch.tokens["loss_mask"][5:690] = 1
    batch.tokens["loss_mask"][1305:1990] = 1
    row = row_of(batch)
    assert len(set(row.predict.tolist())) < len(row.predict)
    check(make_model("qwen3"), row, 2, monkeypatch)


def test_frozen_parameters_and_the_same_bits_each_time() -> None:
    model, row = make_model("qwen3"), row_of(make_batch(SHAPES))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    forward = BlockForward(model)
    found, again, wanted = both_passes(forward, row), both_passes(forward, row), both_passes(TorchForward(model), row)
    assert len(found) == len(wanted) == 2 + 6
    assert all(torch.equal(ours, same) for ours, same in zip(found, again, strict=True))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_two_rows_between_their_passes_keep_apart_and_memory_is_used_again() -> None:
    model, rows = make_model("qwen3"), [row_of(make_batch(SHAPES, seed)) for seed in (0, 1)]
    forward = BlockForward(model)
    wanted = [both_passes(forward, row) for row in rows]
    assert forward.compiled is not None
    assert len(forward.compiled._memory) == 1
    kept = forward.compiled._memory[0].data_ptr()
    with torch.no_grad():
        forward(rows[0], 0.8)
    assert [memory.data_ptr() for memory in forward.compiled._memory] == [kept]
    losses = [forward(row, 0.8)[0] for row in rows]
    for logprobs, (same, *_) in zip(losses, wanted, strict=True):
        assert torch.equal(logprobs, same)
    for logprobs, row, kept in zip(losses, rows, wanted, strict=True):
        model.zero_grad()
        alone = forward(row, 0.8)[0]
        alone.sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        logprobs.sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        assert torch.equal(alone, kept[0])
    once = forward(rows[0], 0.8)[0].sum()
    once.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        once.backward()


def test_a_row_that_predicts_nothing_has_a_gradient_of_zero() -> None:
    forward = BlockForward(make_model("qwen2"))
    forward(EMPTY, 1.0)[0].sum().backward()
    assert not any(p.grad.any() for p in forward.model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "model",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True)),
        lambda: of_qwen3(head_dim=12),
        lambda: of_qwen3(intermediate_size=20),
        lambda: of_qwen3().double(),
        lambda: of_qwen3().to("meta"),
    ],
)
def test_what_it_does_not_compute_is_left_to_torch(model: Any) -> None:
    assert not fits(model())
    assert BlockForward(model()).compiled is None


def test_without_a_compiler_torch_computes_it_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled_pass, "library", library.__wrapped__)
    assert BlockForward(make_model("qwen3")).compiled is None
    (said,) = caplog.messages
    assert said.startswith("false cannot compile packed_row.c: small models are trained at two thirds of the speed")


OUT_OF_THREADS = """
import resource
import torch
from agentrl.compute import compiled_pass
from agentrl.compute.forward import BlockForward
from agentrl.errors import UserError
from packing_help import make_batch, make_model
from test_compiled_pass import row_of
forward, row = BlockForward(make_model("qwen3")), row_of(make_batch([(40, [30] * 40)]))
torch.set_num_threads(1)
forward(row, 1.0)[0].sum().backward()
torch.get_num_threads = lambda: 100
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (100 << 20), size + (100 << 20)))
compiled_pass.LEAST = 1
try:
    forward(row, 1.0)
except UserError as error:
    print(error)
torch.get_num_threads = lambda: 1
print(len(forward(row, 1.0)[0]) > 0)
"""


@pytest.mark.slow
def test_threads_that_cannot_be_started_are_told_of(pytestconfig: pytest.Config) -> None:
    places = [pytestconfig.rootpath / "tests" / place for place in ("support", "compute")]
    begin = f"import sys; sys.path[:0] = {[str(place) for place in places]}"
    done = subprocess.run([sys.executable, "-c", begin + OUT_OF_THREADS], capture_output=True, text=True, check=False)
    first, second = done.stdout.splitlines() or [done.stderr, ""]
    assert first.startswith("100 threads cannot be started for an update: lower train.threads")
    assert second == "True"
