"""How servers are launched: the environment, the flags, the port, and what is refused before a launch."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_help import tiny

from agentrl.engine.servers import server
from agentrl.engine.servers.client import Sessions
from agentrl.engine.servers.launch import venv_of
from agentrl.engine.servers.server import free_port
from agentrl.engine.servers.settings import Settings, settings_of
from agentrl.engine.sglang.command import SglangPlan, cuda_libraries, memory_saver_fault
from agentrl.engine.sglang.kind import SglangEngine, SglangKind
from agentrl.engine.vllm.kind import VllmEngine
from agentrl.errors import UserError
from agentrl.recipe.schema import Recipe

LOADER = "error while loading shared libraries: libcudart.so.13: cannot open shared object file"


def venv_at(folder: Path, program: str = "#!/bin/sh\nexit 0\n") -> Path:
    """A virtual environment as pip leaves it, whose Python is `program`."""
    site = folder / "lib" / "python3.11" / "site-packages"
    for library in ("cu13", "nccl"):
        (site / "nvidia" / library / "lib").mkdir(parents=True)
    (site / "nvidia" / "cu13" / "lib" / "libcudart.so.13").touch()
    (site / "torch").mkdir()
    (site / "torch" / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    for major in (12, 13):
        (site / f"torch_memory_saver_hook_mode_preload_cu{major}.abi3.so").touch()
    (folder / "pyvenv.cfg").touch()
    (folder / "bin").mkdir()
    for name, text in (("python", program), ("ninja", "#!/bin/sh\n")):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CUDA toolkit of release 13, which CUDA_HOME names."""
    return toolkit_at(tmp_path / "toolkit", 13, monkeypatch)


def toolkit_at(folder: Path, release: int, patch: pytest.MonkeyPatch, variable: str = "CUDA_HOME") -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}.0, V{release}.0.88'\n")
    nvcc.chmod(0o755)
    patch.setenv(variable, str(folder))
    return folder


def plan_of(venv: Path, flags: Mapping[str, Any] | None = None, **rest: Any) -> SglangPlan:
    command = (str(venv / "bin" / "python"), "-m", "sglang.launch_server")
    return SglangPlan(command, "m", "bfloat16", flags or {}, 4, 1, 64, **{"cpu": False, **rest})


def test_a_server_runs_in_its_own_virtual_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = venv_at(tmp_path)
    monkeypatch.setenv("PATH", "/ours/bin")
    monkeypatch.setenv("PYTHONPATH", "/ours/code")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/system")
    found = plan_of(venv, env={"MORE": "1"}).environment()
    assert (found["PATH"], found["VIRTUAL_ENV"], found["MORE"]) == (f"{venv}/bin:/ours/bin", str(venv), "1")
    assert "PYTHONPATH" not in found
    assert found["LD_LIBRARY_PATH"] == "/system"
    assert plan_of(venv, env={"PYTHONPATH": "/theirs"}).environment()["PYTHONPATH"] == "/theirs"
    command = replace(plan_of(venv), command=("apptainer", "exec", "x"))
    assert command.environment()["PYTHONPATH"] == "/ours/code"
    assert venv_of(command.command) is None


def test_the_memory_savers_hook_finds_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = venv_at(tmp_path)
    library = f"{venv}/lib/python3.11/site-packages/nvidia/cu13/lib"
    assert cuda_libraries(venv) == [library]
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    found = plan_of(venv, {"enable-memory-saver": True}).environment()
    assert found["LD_LIBRARY_PATH"] == library
    assert found["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    assert found["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    monkeypatch.setenv("LD_LIBRARY_PATH", "/system")
    assert plan_of(venv, {"enable_memory_saver": True}).environment()["LD_LIBRARY_PATH"] == f"{library}:/system"
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in plan_of(venv).environment()


def test_a_hook_that_does_not_load_is_quoted(tmp_path: Path) -> None:
    """The loader's own words, for the hook of that torch's CUDA alone."""
    program = f'#!/bin/sh\ncase "$LD_PRELOAD" in *_cu13.abi3.so) echo "python: {LOADER}" >&2; exit 127;; esac\n'
    venv = venv_at(tmp_path, program)
    assert memory_saver_fault(venv, os.environ) == f"python: {LOADER}"
    settings = Settings(venv=str(venv), flags={"enable-memory-saver": True})
    (line,) = SglangKind().faults(settings, (str(venv / "bin" / "python"), "-m", "sglang.launch_server"))
    assert line == f"engine.args.flags.enable-memory-saver: servers of {venv} would not start: python: {LOADER}"
    maps = Path("/proc/self/maps").read_text().split()
    (hook,) = venv.glob("lib/*/*/torch_memory_saver*_cu13.abi3.so")
    shutil.copy(next(word for word in maps if "/libm.so" in word or "/libm-" in word), hook)  # one that loads
    (venv / "bin" / "python").write_text('#!/bin/sh\ncase "$LD_PRELOAD" in *_cu12*) exit 1;; esac\n')
    assert memory_saver_fault(venv, os.environ) is None
    for hook in venv.glob("lib/*/*/torch_memory_saver*"):
        hook.unlink()
    assert memory_saver_fault(venv, os.environ) == "torch_memory_saver is not installed"


def test_servers_that_could_not_compile_are_refused(
    tmp_path: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc is looked for as SGLang does: CUDA_HOME, CUDA_PATH, of which the first that is set decides; PATH; the usual
    folder. Its release has to be that of the server's torch."""
    venv = venv_at(tmp_path / "venv")
    command = (str(venv / "bin" / "python"), "-m", "sglang.launch_server")

    def faults(**env: str) -> list[str]:
        return SglangKind().faults(Settings(venv=str(venv), env=env), command)

    assert faults() == []
    (line,) = faults(CUDA_HOME="/nowhere")
    assert line.startswith("engine sglang: a server compiles kernels as it starts, without which it ends, and finds no")
    assert "no nvcc of CUDA 13 or newer (in /nowhere/bin, which CUDA_HOME names): install the CUDA toolkit 13" in line
    assert "apt-get install cuda-toolkit-13-0), or name its folder in CUDA_HOME" in line
    monkeypatch.delenv("CUDA_HOME")
    old = toolkit_at(tmp_path / "old", 12, monkeypatch, "CUDA_PATH")
    assert f"no nvcc of CUDA 13 or newer ({old}/bin/nvcc is of 12)" in faults()[0]
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setattr("agentrl.engine.servers.compilers.USUAL", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", "/none")
    (venv / "bin" / "ninja").unlink()
    (line,) = faults()
    assert f"no ninja and no nvcc of CUDA 13 or newer (on PATH, nor in {tmp_path}/none/bin)" in line
    assert f"{venv}/bin/python -m pip install ninja" in line
    monkeypatch.setenv("PATH", str(toolkit / "bin"))
    assert "no ninja:" in faults()[0]


def test_graphs_of_a_server_reach_as_far_as_its_requests(tmp_path: Path) -> None:
    """By itself SGLang captures those of 256 requests at most on GPUs of 60 to 90 GB."""
    wanted = {"cuda-graph-max-bs-decode": "512", "max-running-requests": "512"}
    for flags in ({"max-running-requests": 512}, {"max_running_requests": 512, "cuda-graph-max-bs-decode": 512}):
        words = plan_of(venv_at(tmp_path / str(len(flags))), flags).arguments(1, 0)
        assert {word[2:]: words[i + 1] for i, word in enumerate(words) if word[2:] in wanted} == wanted
    words = plan_of(tmp_path / "1").arguments(1, 0)
    assert words[words.index("--cuda-graph-max-bs-decode") + 1] == "4"  # max_batch
    assert "--cuda-graph-max-bs-decode" not in plan_of(tmp_path / "1", cpu=True).arguments(1, 0)


def test_a_library_that_is_not_there_is_found_out_by_a_real_loader(tmp_path: Path) -> None:
    venv = venv_at(tmp_path, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert "torch_memory_saver_hook_mode_preload_cu13" in str(memory_saver_fault(venv, os.environ))  # an empty file


def test_nccl_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    venv = venv_at(tmp_path, "#!/bin/sh\necho 2 30 7\n")
    command = (str(venv / "bin" / "python"), "-m", "sglang.launch_server")
    (line,) = SglangKind().faults(Settings(venv=str(venv), weights="from_distributed"), command)
    assert f"NCCL is 2.30.7 in {venv} and 2.29.7 here" in line
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    assert SglangKind().faults(Settings(venv=str(venv), weights="from_distributed"), command) == []
    (venv / "bin" / "python").write_text("#!/bin/sh\necho 'no such module' >&2; exit 1\n")
    assert "NCCL is not there" in SglangKind().faults(Settings(venv=str(venv), weights="from_distributed"), command)[0]


SAVER = {"enable-memory-saver": True}


@pytest.mark.parametrize(
    ("args", "how", "said"),
    [
        ({"flags": {"dp-size": 2}, "servers": 2}, {}, "set engine.args.servers=4 instead"),
        ({"flags": {"dp_size": 4}}, {"lora": True}, "set engine.args.servers=4 instead"),
        ({"flags": {"pp": 2, "tp_size": 4}}, {}, "set engine.args.flags.tp-size=8 instead"),
        ({"flags": {"quantization": "awq"}}, {}, "weights of awq cannot be replaced"),
        ({"flags": {"quantization": "fp8"}}, {}, "set engine.args.flags.load-format=flash_rl"),
        ({"flags": {}}, {"sleep": True}, "engine.sleep releases nothing of a server without"),
        ({"flags": SAVER, "weights": "from_distributed"}, {"sleep": True}, "NCCL connects no two processes that share"),
        ({"flags": {"quantization": "fp8", "load_format": "flash_rl"}}, {}, None),
        ({"flags": {"quantization": "fp8"}}, {"lora": True}, None),
        ({"flags": {"dp-size": 1}}, {}, None),
        ({"flags": SAVER}, {"sleep": True}, None),
        ({"flags": {}}, {"sleep": True, "gpus": False}, None),
    ],
)
def test_what_would_fail_later_is_refused(args: dict[str, Any], how: dict[str, bool], said: str | None) -> None:
    found = SglangKind().refused(settings_of(args), **{"sleep": False, "lora": False, "gpus": True, **how})
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_check_tells_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = venv_at(tmp_path, f"#!/bin/sh\necho '{LOADER}' >&2; exit 127\n")
    given = [f"engine.args={{venv: {venv}, flags: {{dp-size: 2, enable-memory-saver: true}}}}", "engine.name=sglang"]
    recipe = Recipe.load("gsm8k_tool", given)
    assert [line.partition(":")[0] for line in SglangEngine.missing(recipe)] == ["engine.args.flags.dp-size"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert len(SglangEngine.missing(recipe)) == 2


def test_quantized_weights_are_sampled_from_with_a_correction_alone(tmp_path: Path) -> None:
    flags = "{quantization: fp8, load-format: flash_rl}"
    given = [f"engine.args={{venv: {venv_at(tmp_path)}, flags: {flags}}}", "engine.name=sglang"]
    assert SglangEngine.missing(Recipe.load("gsm8k_tool", given)) == []
    (line,) = SglangEngine.missing(Recipe.load("gsm8k_tool", [*given, "algorithm.off_policy=none"]))
    assert line.startswith("algorithm.off_policy=none: servers of quantized weights")


def test_why_a_server_ended_is_its_cause_and_not_that_there_is_one(tmp_path: Path) -> None:
    (log := tmp_path / "server.log").write_text(
        "first\n(Worker pid=1) ERROR RuntimeError: no such kernel\nException: WorkerProc initialization failed\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
        "WARNING: OSError: [Errno 24] may come\n"
    )
    ended = server.Server(plan_of(venv_at(tmp_path), {}), 0, log, Sessions())
    assert ended.reason() == "(Worker pid=1) ERROR RuntimeError: no such kernel"
    with log.open("a") as file:
        file.write("ValidationError: 1 validation error for VllmConfig\n  Value error, it requires Triton. [type=x]\n")
        file.write("    For further information visit https://errors.pydantic.dev\n")
    told = "ValidationError: 1 validation error for VllmConfig: Value error, it requires Triton. [type=x]"
    assert ended.reason() == told


@pytest.mark.parametrize("kind", [SglangEngine, VllmEngine])
def test_experts_of_servers_are_told_on_gpus_alone(kind: type[SglangEngine | VllmEngine]) -> None:
    given = ["engine.args={command: sh}", f"engine.name={kind.kind.plan.program.name}"]
    recipe = Recipe.load("gsm8k_tool", [*given, "algorithm.routing_replay=true"])
    (line,) = [line for line in kind.missing(recipe) if "routing_replay" in line]
    assert "on a GPU alone" in line


def test_servers_begin_at_the_devices_of_the_table(tmp_path: Path) -> None:
    venv = venv_at(tmp_path)

    def first(plan: SglangPlan, index: int) -> str:
        words = plan.arguments(1, index)
        return words[words.index("--base-gpu-id") + 1]

    assert [first(plan_of(venv, {"tp": 2}), i) for i in range(3)] == ["0", "2", "4"]
    assert [first(plan_of(venv, {"base-gpu-id": 4, "pp_size": 2}), i) for i in range(2)] == ["4", "6"]
    assert [first(plan_of(venv, {"base-gpu-id": 4}, devices=((6,), (7,))), i) for i in range(2)] == ["6", "7"]
    assert "--base-gpu-id" not in plan_of(venv, cpu=True).arguments(1, 1)


@pytest.mark.parametrize(("given", "dtype"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_servers_hold_the_weights_in_the_type_that_the_trainer_computes_in(given: str | None, dtype: str) -> None:
    plan = Settings(command="true").plan(SglangPlan, tiny()[0], "m", 4, None, dtype=given)
    words = plan.arguments(1, 0)
    assert words[words.index("--dtype") + 1] == dtype


def test_a_servers_port_is_none_that_the_system_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port() for _ in range(8)}
    assert all(server.LOWEST_PORT <= port < lowest for port in found)
    assert len(found) > 1
    with pytest.raises(UserError, match=r"a server cannot listen on 203\.0\.113\.9: "):
        free_port("203.0.113.9")


def test_what_an_update_does_to_requests_is_named() -> None:
    assert settings_of({"pause": "in_place", "urls": "http://a:1"}).pause == "in_place"
    with pytest.raises(UserError, match=r"engine\.args\.pause is 'abort'; it is retract or in_place"):
        Settings(pause="abort")


def test_servers_on_other_machines_need_a_cluster_and_no_place_of_their_own(tmp_path: Path) -> None:
    args: dict[str, object] = {"command": "true", "servers": 2, "remote_nodes": 2}
    plan = settings_of(args).plan(SglangPlan, tiny()[0], "m", 4, None, "127.0.0.1:6379")
    assert plan.key, "another machine's server listens on a network"
    with pytest.raises(UserError, match=r"remote_nodes: other machines are those of a running Ray cluster"):
        settings_of(args).plan(SglangPlan, tiny()[0], "m", 4, None)
    for nodes, servers in ((0, 2), (3, 2), (4, 3)):
        with pytest.raises(UserError, match=rf"remote_nodes is {nodes}; with .*\.flags\.nnodes=2 it is a mult"):
            Settings(servers=servers, remote_nodes=nodes, flags={"nnodes": 2})
    with pytest.raises(UserError, match=r"remote_nodes is 5; it is from 0 .* \(2\) x .*\.nnodes \(2\)"):
        Settings(servers=2, remote_nodes=5, flags={"nnodes": 2})
    with pytest.raises(UserError, match=r"nnodes is 'two'; it is a whole number of machines"):
        Settings(servers=2, remote_nodes=2, flags={"nnodes": "two"})
    with pytest.raises(UserError, match=r"flags\.node-rank: leave it out"):
        Settings(servers=2, remote_nodes=2, flags={"node_rank": 1})
    odd = Settings(remote_nodes=2, flags={"nnodes": 2, "tp-size": 3})
    (line,) = SglangKind().refused(odd, sleep=False, lora=False, gpus=True)
    assert line == "engine.args.flags.nnodes: 2 machines cannot share the 3 GPUs of a server evenly"
    with pytest.raises(UserError, match=r"remote_nodes is 3; it is from 0 to engine\.args\.servers \(2\)"):
        settings_of(args | {"remote_nodes": 3})
    with pytest.raises(UserError, match=r"flags\.base-gpu-id: leave it out; with remote_nodes, Ray says where"):
        settings_of(args | {"flags": {"base_gpu_id": 1}})
    engine = {"name": "sglang", "sleep": True, "args": args}
    lines = SglangEngine.missing(Recipe.model_validate({"env": {"name": "gsm8k"}, "engine": engine}))
    assert lines[0].endswith("lie on their machines: engine.args.remote_nodes is 2, and cluster.nodes 1")
    assert lines[1].startswith("engine.args.remote_nodes: ")
    engine["args"] = args | {"flags": {"nnodes": 2, "tp-size": 2}}
    for workers, refused in ((3, 1), (4, 0)):
        cluster = {"address": "127.0.0.1:6379", "nodes": 2, "workers": workers}
        recipe = Recipe.model_validate({"env": {"name": "gsm8k"}, "engine": engine, "cluster": cluster})
        lines = [line for line in SglangEngine.missing(recipe) if "nnodes" in line]
        assert [line.endswith("from a worker at its place: 3 workers are too few") for line in lines] == [
            True
        ] * refused
