"""Hand-derived passes equal their textbook expressions, and logits of a whole batch never stand in memory."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from held_memory import Held
from torch import Tensor

from agentrl.compute import kernels
from agentrl.compute.kernels import rms_norm, swiglu, token_logprobs


def textbook(
    hidden: Tensor, head: Tensor, bias: Tensor | None, target: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    log_p = (torch.nn.functional.linear(hidden, head, bias) / temperature).log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(bias: bool, frozen: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    head = torch.randn(40, 8).requires_grad_(not frozen)
    return (
        torch.randn(23, 8, requires_grad=True), head, torch.randn(40, requires_grad=True) if bias else None,
        torch.randint(0, 40, (23,)),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _untried() -> Iterator[None]:
    kernels._fuses.cache_clear()
    kernels._compiled.cache_clear()
    yield
    kernels._fuses.cache_clear()
    kernels._compiled.cache_clear()


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions that a GPU compiles serve here, as they are written."""
    monkeypatch.setattr(kernels, "FUSED", ("cpu",))
    monkeypatch.setattr(kernels, "FUSED_ROWS", 7)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize("wanted", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize(("bias", "frozen"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("way", ["kept", "again", "fused"])
def test_token_logprobs_are_those_of_the_textbook(
    wanted: str, bias: bool, frozen: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "fused":
        uncompiled(monkeypatch)
    monkeypatch.setattr(kernels, "CHUNK", 0)
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 7)
    monkeypatch.setattr(kernels, "KEPT", 1 << 20 if way == "kept" else 0)
    weight = torch.randn(2, 23, generator=torch.Generator().manual_seed(1))
    results: list[list[Tensor | None]] = []
    for compute in (textbook, token_logprobs):
        hidden, head, maybe, target = inputs(bias, frozen)
        logprobs, entropy = compute(hidden, head, maybe, target, 0.7)
        loss = torch.zeros(())
        loss = loss + (weight[0] * logprobs).sum() if wanted != "entropy" else loss
        loss = loss + (weight[1] * entropy).sum() if wanted != "logprobs" else loss
        loss.backward()
        results.append([logprobs.detach(), entropy.detach(), hidden.grad, head.grad, maybe.grad if bias else None])
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_what_a_gpu_compiles_is_compiled_once_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiling = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **more: compiling(function, backend=counter, **more))
    monkeypatch.setattr(kernels, "FUSED", ("cpu",))
    monkeypatch.setattr(kernels, "FUSED_ROWS", 7)
    monkeypatch.setattr(kernels, "CHUNK", 0)
    counts = []
    for rows in (23, 19, 12):
        hidden, head, _, target = inputs(False, False)
        found = token_logprobs(hidden[:rows], head, None, target[:rows], 1.0)
        wanted = textbook(hidden[:rows], head, None, target[:rows], 1.0)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            *(torch.autograd.grad(of[0].sum(), head) for of in (found, wanted)), atol=1e-5, rtol=1e-5
        )
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_fused_kernels_that_do_not_run_or_differ_are_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uncompiled(monkeypatch)

    def broken(function: Any, **_: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("no C compiler")
        return lambda *given: tuple(2 * each for each in function(*given))

    monkeypatch.setattr(torch, "compile", broken)
    hidden, head, bias, target = inputs(True, False)
    with caplog.at_level(logging.WARNING):
        found = token_logprobs(hidden, head, bias, target, 0.7)
    assert "the output layer is not fused: " in caplog.text
    torch.testing.assert_close(found[0], textbook(hidden, head, bias, target, 0.7)[0], atol=1e-5, rtol=1e-5)


def test_no_predictions_give_gradients_of_nothing() -> None:
    hidden, head, _, target = inputs(False, False)
    logprobs, entropy = token_logprobs(hidden[:0], head, None, target[:0], 1.0)
    (logprobs.sum() + entropy.sum()).backward()
    for leaf in (hidden, head):
        assert not leaf.grad.any()


@pytest.mark.parametrize("gain", [True, False])
def test_norm_and_gate_are_those_of_torch(gain: bool) -> None:
    x, g = torch.randn(9, 16, requires_grad=True), torch.rand(16, requires_grad=True) if gain else None
    found = (rms_norm(x, g, 1e-5) ** 3).sum()
    wanted = (torch.nn.functional.rms_norm(x, (16,), g, 1e-5) ** 3).sum()
    leaves = [x] if g is None else [x, g]
    for got, expected in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        torch.autograd.grad((swiglu(x) ** 2).sum(), x)[0],
        torch.autograd.grad(((torch.nn.functional.silu(x[:, :8]) * x[:, 8:]) ** 2).sum(), x)[0],
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(32_768, 150_000), (4096, 32_000)])
def test_logits_of_the_whole_batch_never_stand(tokens: int, vocabulary: int, entropy: bool) -> None:
    """On tensors without data, so that no machine is too small: the chunks' sizes are those of the real pass."""
    with torch.device("meta"):
        hidden = torch.empty(tokens, 8, requires_grad=True)
        head = torch.empty(vocabulary, 8, requires_grad=True)
        target = torch.empty(tokens, dtype=torch.long)
    with Held() as held:
        logprobs, entropies = token_logprobs(hidden, head, None, target, 0.9)
        (logprobs.sum() + entropies.sum() if entropy else logprobs.sum()).backward()
    chunk = 4 * vocabulary * kernels.CHUNK_ROWS
    assert held.largest == chunk
    assert held.most < 3.2 * chunk
    assert held.most < 1 << 30


def test_no_gradient_is_made_of_a_frozen_head() -> None:
    most = []
    for trained in (True, False):
        with torch.device("meta"):
            hidden, target = torch.empty(64, 4096, requires_grad=True), torch.empty(64, dtype=torch.long)
            head = torch.empty(1000, 4096, requires_grad=trained)
        with Held() as held:
            token_logprobs(hidden, head, None, target, 1.0)[0].sum().backward()
        most.append(held.most)
    assert most[0] - most[1] >= 4 * 1000 * 4096


def test_the_measure_sees_logits_that_do_stand() -> None:
    with torch.device("meta"):
        hidden, head = torch.empty(4096, 8, requires_grad=True), torch.empty(32_000, 8)
        target = torch.empty(4096, dtype=torch.long)
    with Held() as held:
        textbook(hidden, head, None, target, 0.9)[0].sum().backward()
    assert held.most >= 4 * 4096 * 32_000


def test_without_gradients_log_probs_are_the_same_bits_and_no_probabilities_are_made() -> None:
    hidden, head, bias, target = inputs(True, False)
    wanted = token_logprobs(hidden, head, bias, target, 0.7)[0].detach()
    with torch.no_grad():
        found, entropy = token_logprobs(hidden, head, bias, target, 0.7)
    assert torch.equal(found, wanted)
    assert not entropy.any()
    with torch.device("meta"):
        large = torch.empty(4096, 8), torch.empty(32_000, 8), None, torch.empty(4096, dtype=torch.long)
    with Held() as held, torch.no_grad():
        token_logprobs(*large, 0.9)
    assert held.most < 2.1 * 4 * 32_000 * kernels.CHUNK_ROWS  # logits and their log-softmax


def test_the_gradient_of_a_large_head_adds_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the chunks after the first would be rounded away: here each adds 2**-10 of what is there."""
    monkeypatch.setattr(kernels, "CHUNK", 0)
    monkeypatch.setattr(kernels, "CHUNK_ROWS", 1)
    hidden = torch.ones(65, 8, dtype=torch.bfloat16)
    head = torch.zeros(2, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([1.0, *[2.0**-10] * 64])
    (token_logprobs(hidden, head, None, torch.zeros(65, dtype=torch.long), 1.0)[0] * weight).sum().backward()
    assert torch.equal(head.grad[0], torch.full((8,), 0.53125, dtype=torch.bfloat16))


def test_the_gradient_of_a_large_head_is_added_without_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slice by slice: the same as in one product but for rounding, in the memory of one gradient."""
    hidden, head, _, target = inputs(False, False)
    found = []
    for size in (1 << 20, 24):
        monkeypatch.setattr(kernels, "SLICE", size)
        logprobs = token_logprobs(hidden, head, None, target, 0.7)[0]
        found.append(torch.autograd.grad(logprobs.sum(), head)[0])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(kernels, "SLICE", 1 << 16)
    with torch.device("meta"):
        hidden, target = torch.empty(8, 512, requires_grad=True), torch.empty(8, dtype=torch.long)
        head = torch.empty(32_000, 512, requires_grad=True)
    with Held() as held:
        token_logprobs(hidden, head, None, target, 1.0)[0].sum().backward()
    assert 2 * head.nbytes < held.most < 2.1 * head.nbytes  # the layer itself, and its gradient


def test_a_gpu_takes_more_rows_at_once() -> None:
    head = torch.empty(150_000, 8, device="meta")
    there = type("Cuda", (), {"is_cuda": True, "__len__": lambda self: 4000})()
    assert [len(range(4000)[rows]) for rows in kernels._chunks(there, head)] == [1024, 1024, 1024, 928]
