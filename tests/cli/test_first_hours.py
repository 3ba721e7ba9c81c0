"""What `check` and `doctor` say of four first hours on GPUs, on pretended devices. The outputs are kept.

AGENTRL_KEEP=1 pytest tests/cli/test_first_hours.py    writes them anew
"""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from big_shapes import BIG
from paths import ROOT
from pretend_gpu import pretending

from agentrl.cli.main import run
from agentrl.doctor import machine
from agentrl.doctor.subject import Subject
from agentrl.models.load import load_tokenizer
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.training import preflight

pytestmark = pytest.mark.slow

KEPT = ROOT / "tests" / "cli" / "first_hours"
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_000_000_000)
NODES = ["cluster.address=10.0.0.1:6379", "cluster.nodes=2", "engine.args.remote_nodes=2"]
HOURS = {
    "a_one_gpu_4b": ("gsm8k_tool_4b_1gpu", "qwen3-4b", 1, []),
    "b_eight_gpus_8b_apart": (
        "gsm8k_tool_8gpu", "qwen3-8b", 8,
        ["engine.sleep=false", "cluster.gpus=4", "engine.args.servers=4", "cluster.offload=[optimizer]"],
    ),
    "c_eight_gpus_32b_shared": ("gsm8k_tool_32b_8gpu", "qwen3-32b", 8, []),
    "d_two_nodes_72b": (
        "gsm8k_tool_32b_8gpu", "qwen2.5-72b", 8,
        [*NODES, "engine.args.servers=2", "engine.args.flags.tp-size=8", "cluster.offload=true"],
    ),
    "d_two_nodes_30b_a3b": (
        "gsm8k_tool_30b_a3b_8gpu", "qwen3-30b-a3b", 8, [*NODES, "engine.args.servers=8"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOURS)
def test_check_and_doctor_say_what_they_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, model, gpus, overrides = HOURS[name]
    folder, venv = tmp_path / model, server_environment(tmp_path / "sglang")
    BIG[model].save_pretrained(folder)
    load_tokenizer(Recipe().model).save_pretrained(folder)
    given = [f"model.path={folder}", "env.source=generated", f"engine.args.venv={venv}", *overrides]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: H100)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
        patch.setattr(preflight, "find_device", torch.device)
        patch.setattr(preflight, "reach", lambda address: address)
        patch.setattr(preflight, "_lacking_cluster", lambda recipe: [])  # of this machine's CPUs
        patch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=64e9))
        patch.setattr(machine.os, "sched_getaffinity", lambda pid: range(64))
        patch.setattr(machine.os, "sysconf", lambda about: 2**20)
        patch.setenv("CUDA_HOME", str(venv))
        assert run(["check", f"recipes/{recipe}.yaml", *given]) == 0
        said = capsys.readouterr().out
        subject = Subject(load_recipe(f"recipes/{recipe}.yaml", given), tmp_path)
        with pretending(patch):
            patch.setattr(torch.cuda, "device_count", lambda: gpus)
            doctor = f"devices: {machine.devices(subject)}"
        missing = machine.compilers_missing(venv, machine.server_environment(subject), 13)
    lines = said[said.index("memory of the trainer") :].replace(str(tmp_path), "FOLDER").splitlines(keepends=True)
    found = "".join(line for line in lines if not line.startswith("advice: "))  # of what is installed here
    found += "\ndoctor\n" + f"{doctor}\ncompilers: {', '.join(missing) or 'all found'}\n"
    file = KEPT / f"{name}.txt"
    if os.environ.get("AGENTRL_KEEP"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")
    assert "missing: " not in found
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    missed = machine.compilers_missing(venv, dict(os.environ), 13)
    assert missed == {"nvcc": "nvcc of CUDA 13 or newer (in /nowhere/bin, which CUDA_HOME names)"}


def server_environment(folder: Path) -> Path:
    """A virtual environment with SGLang, as far as it is looked at: one whose memory saver loads, with nvcc."""
    site = folder / "lib" / "python3.11" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    words = Path("/proc/self/maps").read_text().split()
    library = next(word for word in words if "/libm.so" in word or "/libm-" in word)  # one that loads
    shutil.copy(library, site / "torch_memory_saver_hook_mode_preload_cu13.abi3.so")
    (folder / "pyvenv.cfg").touch()
    (folder / "bin").mkdir()
    for program, text in (("python", "exit 0"), ("ninja", ""), ("nvcc", "echo release 13.0, V13.0.88")):
        (folder / "bin" / program).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / program).chmod(0o755)
    return folder
