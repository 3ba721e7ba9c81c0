"""liger-kernel where it is installed and fits, by a stand-in for the package: it needs a GPU to run."""

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from packing_help import SHAPES, make_batch, make_model
from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3

from agentrl.compute import forward, liger
from agentrl.compute.batch import prefix_trees
from agentrl.compute.forward import ModuleForward, choose
from agentrl.compute.packing import pack
from agentrl.errors import UserError
from agentrl.models.prove import difference

CUDA = torch.device("cuda")
Install = Callable[[float], list[dict[str, Any]]]


class Norm(torch.nn.Module):
    """The stand-in's."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package in its place whose norms are off by a factor. Returns what it is called with."""

    def put(factor: float) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def apply(model: Any, **options: Any) -> None:
            calls.append(options)
            modeling_qwen3.Qwen3RMSNorm = Norm  # type: ignore[misc]  # as the real one does
            norm = model.model.norm
            plain = norm.forward
            norm.forward = lambda x: plain(x) * factor

        inner, patch = ModuleType("liger_kernel.transformers"), ModuleType("liger_kernel.transformers.monkey_patch")
        inner._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
        patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": apply}  # type: ignore[attr-defined]
        for module in (ModuleType("liger_kernel"), inner, patch):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(liger, "find_spec", lambda name: object())
        return calls

    return put


def test_it_fits_what_it_knows_on_cuda_alone(install: Install) -> None:
    install(1.0)
    assert liger.fits(make_model("qwen3"), CUDA)
    assert not liger.fits(make_model("qwen3"), torch.device("cpu"))
    assert not liger.fits(make_model("gpt2"), CUDA)


def test_without_the_package_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    assert not liger.fits(make_model("qwen3"), CUDA)


def test_what_it_cannot_do_for_us_stays_out_and_other_models_stay_as_they_are(install: Install) -> None:
    calls, before = install(1.0), modeling_qwen3.Qwen3RMSNorm
    liger.apply_kernels(make_model("qwen3"))
    assert calls == [
        {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False, "rms_norm": True, "swiglu": True}
    ]
    assert modeling_qwen3.Qwen3RMSNorm is before


differs = partial(difference, tolerance=1e-3)


def logprobs(model: Any) -> Callable[[], Tensor]:
    batch = make_batch(SHAPES)
    return lambda: ModuleForward(model)(pack(batch, prefix_trees(batch)), 1.0)[0].detach()


def test_kernels_that_change_the_model_are_refused(install: Install) -> None:
    install(1.3)
    model = make_model("qwen3")
    with pytest.raises(UserError, match=r"liger-kernel is installed, but .* without: it differs by 0\.\d+ from"):
        liger.apply_and_compare(model, logprobs(model), differs)


def test_kernels_that_do_not_run_are_named(install: Install) -> None:
    install(float("nan"))
    model = make_model("qwen3")
    with pytest.raises(UserError, match="differs by nan"):
        liger.apply_and_compare(model, logprobs(model), differs)

    calls = 0

    def second_call_fails() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("no kernel image is available\nand more")
        return torch.zeros(3)

    with pytest.raises(
        UserError, match=r"do not run here \(RuntimeError: no kernel image is available\); uninstall it"
    ):
        liger.apply_and_compare(model, second_call_fails, differs)


def test_the_description_says_it(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(1.0)
    assert liger.DESCRIPTION not in choose(make_model("qwen3"), checkpointing=True)[1]  # on a CPU
    assert not calls
    monkeypatch.setattr(forward.liger, "fits", lambda model, device: True)
    found, said = choose(make_model("qwen3"), checkpointing=True)
    assert isinstance(found, ModuleForward)
    assert said.startswith(f"module with shared-prefix attention, {liger.DESCRIPTION}")
    assert len(calls) == 1
    assert liger.DESCRIPTION not in choose(make_model("qwen3"))[1]  # our own forward has no use for it
    assert len(calls) == 1
