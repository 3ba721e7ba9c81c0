"""The compilers that servers need as they run, looked for where a server looks for them."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

COMPILERS = {
    "ninja": "{venv}/bin/python -m pip install ninja",
    "nvcc": "install the CUDA toolkit{release} (on Ubuntu, from NVIDIA's repository: apt-get install "
    "cuda-toolkit{package}), or name its folder in CUDA_HOME",
}
"""Program that SGLang, vLLM and flashinfer compile kernels with -> what to do where there is none."""
USUAL = "/usr/local/cuda"
_BUILT_FOR = re.compile(r"""cuda[^=\n]*=\s*['"](\d+)\.""")


def compilers_missing(venv: Path, environment: Mapping[str, str], cuda: int | None = None) -> dict[str, str]:
    """Which of `COMPILERS` a server of this virtual environment does not find -> what is missing, in words.

    environment: the server's. cuda: the major version that nvcc has to have at least; None: any. A CUDA_HOME or
    CUDA_PATH that is set is all that counts for nvcc; then come PATH and /usr/local/cuda (`cuda_home` of SGLang's
    `toolchain.py`).
    """
    path = os.pathsep.join([str(venv / "bin"), *filter(None, [environment.get("PATH")])])
    found = {"ninja": shutil.which("ninja", path=path), "nvcc": _nvcc(path, environment)}
    missing = {name: name for name, program in found.items() if program is None}
    release = f" of CUDA {cuda} or newer" if cuda else ""
    if (compiler := found["nvcc"]) is None:
        configured = _configured(environment)
        where = f"in {configured[1]}/bin, which {configured[0]} names" if configured else f"on PATH, nor in {USUAL}/bin"
        missing["nvcc"] = f"nvcc{release} ({where})"
    elif cuda is not None and (own := _release_of(compiler)) is not None and own < cuda:
        missing["nvcc"] = f"nvcc{release} ({compiler} is of {own})"
    return missing


def remedy_for(missing: Mapping[str, str], venv: Path, cuda: int | None) -> str:
    """What to do about compilers that are missing."""
    release, package = (f" {cuda}", f"-{cuda}-0") if cuda else ("", "")
    return "; ".join(COMPILERS[name].format(venv=venv, release=release, package=package) for name in missing)


def cuda_built_for(venv: Path) -> int | None:
    """The major version of CUDA that the torch of a virtual environment is built for; None: it does not say."""
    for file in venv.glob("lib/python*/site-packages/torch/version.py"):
        if (found := _BUILT_FOR.search(file.read_text(encoding="utf-8"))) is not None:
            return int(found[1])
    return None


def _configured(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that names CUDA's folder, and the folder."""
    return next(((name, environment[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)), None)


def _nvcc(path: str, environment: Mapping[str, str]) -> str | None:
    if (configured := _configured(environment)) is not None:
        return shutil.which("nvcc", path=os.path.join(configured[1], "bin"))
    return shutil.which("nvcc", path=path) or shutil.which("nvcc", path=os.path.join(USUAL, "bin"))


def _release_of(nvcc: str) -> int | None:
    """The major version of CUDA that a compiler belongs to; None: it does not say."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+)\.", said)
    return int(found[1]) if found else None
