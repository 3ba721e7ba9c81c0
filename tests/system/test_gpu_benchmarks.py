"""The benchmarks for GPUs say in one line what a machine lacks."""

import argparse
import runpy
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT

FOLDER = ROOT / "benchmarks" / "gpu"


@pytest.mark.parametrize("name", ["rollout", "step", "weight_sync"])
def test_without_a_gpu_one_line_says_what_is_missing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = FOLDER / f"{name}.py"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("AGENTRL_SGLANG_VENV", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert "1 GPU(s), torch sees 0; SGLang in a virtual environment that AGENTRL_SGLANG_VENV names" in said
    assert "\n" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: run the benchmark itself")
async def test_their_parts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a machine without a GPU can go: to the first tensor that is wanted on one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = runpy.run_path(str(FOLDER / "weight_sync.py"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delitem(sys.modules, "weight_sync", raising=False)
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|cuda|NVIDIA"):
        await found["run"](argparse.Namespace(tp=1, mb=50, repeat=1))
