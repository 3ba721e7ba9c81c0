"""Checks of the machine: devices, versions, arithmetic, the sandbox."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from random import Random
from time import monotonic, perf_counter
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor

from agentrl.compute.flops import TERA, known_peak
from agentrl.containment.program import ProgramSandbox
from agentrl.doctor.check import CheckError, NotHereError
from agentrl.doctor.subject import Subject
from agentrl.engine.servers.compilers import compilers_missing, remedy_for
from agentrl.models.dense import linear
from agentrl.models.prove import disproof
from agentrl.plugins.registry import make_tool
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Session, Task
from agentrl.recipe.sections.env import ToolSection
from agentrl.training.preflight import lacking_gpus

GIGA = 1e9
DRIVERS = {12: 525, 13: 580}
"""Major version of CUDA that torch was built for -> oldest driver that it runs on (NVIDIA's release notes)."""
SHOWN = ("torch", "transformers", "ray", "sglang", "vllm", "nvidia-nccl")
"""Packages whose versions matter between two environments, by the beginning of their names."""
ASK = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
SLOW = 0.2
"""Least share of the data sheet's figure that a matrix product on a free GPU reaches."""
TIMED_SECONDS = 0.3
TOOL = "python"


def devices(subject: Subject) -> str:
    """Devices, their memory, and which of them reach each other's."""
    count, recipe = torch.cuda.device_count(), subject.recipe
    cores, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    host = f"{cores} cores, {memory / GIGA:.0f} GB, {shared / GIGA:.1f} GB free in /dev/shm"
    if not count:
        if driver() is not None:
            raise CheckError(
                f"the machine has an NVIDIA driver ({driver()}), and torch {torch.__version__} sees no GPU",
                "package torch: install a build for CUDA, or set CUDA_VISIBLE_DEVICES",
            )
        if recipe.cluster.gpus or recipe.model.device.startswith("cuda"):
            raise NotHereError(f"no GPU, which the recipe asks for; {host}")
        return f"no GPU; trains on {subject.device}; {host}"
    if lines := lacking_gpus(recipe):
        raise CheckError(f"the recipe {lines[0]}", "cluster.gpus, or flags tp-size and servers in engine.args")
    torch.zeros(1, device=subject.device).item()
    names = [torch.cuda.get_device_properties(i) for i in range(count)]
    shown = ", ".join(f"{n.name} {n.total_memory / GIGA:.0f} GB" for n in names)
    apart = [
        f"{i}-{j}" for i in range(count) for j in range(i + 1, count) if not torch.cuda.can_device_access_peer(i, j)
    ]
    peers = f"no peer access between {', '.join(apart)}" if apart else "peer access between all" if count > 1 else ""
    return "; ".join(filter(None, (shown, peers, host)))


def versions(subject: Subject) -> str:
    """Versions that do not go together: of what we need, of the driver, of the server's environment."""
    unmet = list(unmet_requirements(metadata.requires("agentrl") or ()))
    if unmet:
        raise CheckError("; ".join(unmet), f"package {unmet[0].split()[0]}: pip install -c constraints.txt agentrl")
    ours = {dist.name: dist.version for dist in metadata.distributions()}
    found, major = driver(), (torch.version.cuda or "").partition(".")[0]
    oldest = DRIVERS.get(int(major)) if major else None
    if found is not None and oldest is not None and int(found.partition(".")[0]) < oldest:
        raise CheckError(
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, which needs driver {oldest}; "
            f"the driver is {found}",
            f"the NVIDIA driver (to {oldest} or newer), or package torch (to a build for an older CUDA)",
        )
    here = ", ".join(selected(ours)) + (f", driver {found}" if found else "")
    venv = server_venv(subject)
    if venv is None:
        return here
    theirs = versions_in(venv)
    server = ", ".join(selected(theirs)) or "nothing of an engine's"
    nccl, other = nccl_of(ours), nccl_of(theirs)
    args = subject.recipe.engine.args
    if args.get("weights") == "from_distributed" and nccl != other:
        raise CheckError(
            f"NCCL is {nccl} here and {other} in the server's environment: a process group of both cannot be formed",
            "engine.args.weights: leave it at auto, or install the same nvidia-nccl in both environments",
        )
    cuda = cuda_of(theirs)
    if torch.cuda.is_available() and (absent := compilers_missing(venv, server_environment(subject), cuda)):
        raise CheckError(
            f"a server compiles kernels as it runs, and finds no {' and no '.join(absent.values())}",
            remedy_for(absent, venv, cuda),
        )
    return f"{here}; the server's: {server}"


def unmet_requirements(requirements: Iterable[str]) -> Iterable[str]:
    """Yield a line for each requirement (of no extra) that the installed packages do not meet."""
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield f"{wanted.name} is not installed; {text} is needed"
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            yield f"{wanted.name} is {found}; {wanted.specifier} is needed"


def cuda_of(installed: dict[str, str]) -> int | None:
    """The major version of CUDA that the torch of an environment brings along; None: none."""
    names = [name for name in installed if name.replace("_", "-").startswith("nvidia-cuda-runtime")]
    return int(installed[names[0]].partition(".")[0]) if names else None


def driver() -> str | None:
    """The version of the NVIDIA driver, by nvidia-smi; None where there is none."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"^\d+\.\d+[\d.]*", said.strip())
    return found[0] if found else None


def server_venv(subject: Subject) -> Path | None:
    """The virtual environment that launches the recipe's servers; None for an engine that has none."""
    engine = subject.recipe.engine
    named = engine.args.get("venv") or os.environ.get(f"AGENTRL_{engine.name.upper()}_VENV")
    return Path(str(named)).expanduser() if named and not engine.args.get("urls") else None


def server_environment(subject: Subject) -> dict[str, str]:
    """This process's environment with the variables that the recipe gives servers."""
    given = subject.recipe.engine.args.get("env") or {}
    return {**os.environ, **{str(name): str(value) for name, value in given.items()}}


def versions_in(venv: Path) -> dict[str, str]:
    """Name -> version of what is installed in a virtual environment. Raises CheckError where it does not run."""
    words = [str(venv / "bin" / "python"), "-c", ASK]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        found: dict[str, str] = json.loads(said)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise CheckError(f"{venv}: its Python does not run: {error}", "engine.args.venv: make it anew") from error
    return found


def selected(installed: dict[str, str]) -> list[str]:
    """`name version` of the packages of SHOWN."""
    return [f"{name} {installed[name]}" for name in sorted(installed) if _shown(name)]


def _shown(name: str) -> bool:
    return name in SHOWN or name.startswith(("nvidia-nccl", "nvidia_nccl"))


def nccl_of(installed: dict[str, str]) -> str | None:
    """The version of NCCL that torch brings along there."""
    found = [version for name, version in installed.items() if name.replace("_", "-").startswith("nvidia-nccl")]
    return found[0] if found else None


def arithmetic(subject: Subject) -> str:
    """Matrix products in float32 and bfloat16, and memory bandwidth."""
    device = subject.device
    parts = []
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        name = str(dtype).removeprefix("torch.")
        _check_product(device, dtype, tolerance, name)
        speed = product_speed(device, dtype)
        parts.append(f"{name} {speed / TERA:.3g} TFLOP/s")
        peak = known_peak(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
        if peak is not None and speed < SLOW * peak:
            raise CheckError(
                f"{name} products reach {speed / TERA:.3g} TFLOP/s of the data sheet's {peak / TERA:.3g}",
                "model.device: another process uses this GPU, or its clock is held down (see nvidia-smi)",
            )
    return f"{', '.join(parts)}; memory {bandwidth(device) / GIGA:.3g} GB/s"


def _check_product(device: torch.device, dtype: torch.dtype, tolerance: float, name: str) -> None:
    given = torch.Generator().manual_seed(0)
    a, b = (torch.randn(192, 192, generator=given).to(dtype) for _ in range(2))
    wrong = disproof(
        lambda: linear(a.to(device), b.to(device)).double().cpu(), lambda: a.double() @ b.double().t(), tolerance, True
    )
    if wrong is not None:
        raise CheckError(f"a {name} matrix product is wrong: {wrong}", f"model.dtype, model.compute: not {name} here")


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best product of square matrices."""
    width = 8192 if device.type == "cuda" else 1024
    a, b = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    return 2 * width**3 / fastest(lambda: linear(a, b), device)


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy in the device's memory reads and writes."""
    size = (1 << 30) if device.type == "cuda" else (1 << 27)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / fastest(lambda: target.copy_(source), device)


@torch.no_grad()
def fastest(work: Callable[[], Tensor], device: torch.device) -> float:
    """The seconds of the fastest call, after one that is not timed."""
    work()
    best, until = float("inf"), monotonic() + TIMED_SECONDS
    while monotonic() < until:
        _finish(device)
        began = perf_counter()
        work()
        _finish(device)
        best = min(best, perf_counter() - began)
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sandbox(subject: Subject) -> str:
    """Code runs in the sandbox of the tool `python`, and reaches neither the network, nor the home folder, nor the
    machine's settings; a program that is an agent runs in that of `agent.sandbox`."""
    section = next((tool for tool in subject.recipe.tools if tool.name == TOOL), None)
    agent = subject.recipe.agent
    if agent is not None and agent.sandbox is not None and agent.command:
        ProgramSandbox.tried(agent.command[0], agent.sandbox)
    if section is None and shutil.which("bwrap") is None:
        raise NotHereError("bubblewrap is not installed, and no tool of the recipe asks for it")
    tool = make_tool(section or ToolSection(name=TOOL))
    assert isinstance(tool, Tool)
    began = perf_counter()
    said = subject.wait(lambda: _try_tool(tool))
    if "42" not in said:
        raise CheckError(f"code in the sandbox gave {said[:200]!r} instead of 42")
    if "REACHED" in said:
        raise CheckError(f"code in the sandbox is not confined: {said[:200]!r}")
    return f"ran and was confined, {perf_counter() - began:.1f} s to the first result"


async def _try_tool(tool: Any) -> str:
    session = Session("doctor", Task("doctor", {}), Random(0), monotonic() + 60)
    code = (
        "import socket, os\n"
        "try:\n    socket.create_connection(('1.1.1.1', 53), 1); print('REACHED the network')\n"
        "except OSError:\n    pass\n"
        f"if os.path.exists({str(Path(__file__))!r}): print('REACHED a file')\n"
        "try:\n    open('/proc/sys/kernel/core_pattern', 'r+'); print('REACHED the settings of the machine')\n"
        "except OSError:\n    pass\n"
        "print(6 * 7)"
    )
    try:
        await tool.create(session)
        try:
            found = await tool.execute(session, code=code)
        finally:
            await tool.release(session)
    finally:
        await tool.close()
    return str(found.text)
