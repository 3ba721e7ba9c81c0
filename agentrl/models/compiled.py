"""`compiled`: a C file, which this machine's compiler makes once for its own processor.

Without a compiler, torch computes the same.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.models.dense import cpu_name

log = logging.getLogger(__name__)

HEADER = Path(__file__).with_name("vectors.h")
FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_SECONDS = 60.0


def compiled(source: Path, without: str) -> ctypes.CDLL | None:
    """The functions of a C file, made now (some seconds) unless the cache folder has them; None: they cannot be
    made, of which a line of the log tells. without: what that costs."""
    command = os.environ.get("CC") or next((name for name in COMPILERS if shutil.which(name)), None)
    if command is None:
        log.warning("no C compiler (%s) is installed: %s", ", ".join(COMPILERS), without)
        return None
    home = os.path.expanduser("~")  # Path.home raises for a user without one
    folder = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache", "agentrl")
    try:
        with tempfile.TemporaryDirectory(prefix="agentrl-") as own:
            return _load(source, command, folder, Path(own))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [type(error).__name__]
        why = next((line for line in said if "error" in line), said[-1])
        log.warning("%s cannot compile %s: %s: %s", command, source.name, without, why)
        return None


def in_panels(matrix: Tensor, columns: int) -> Tensor:
    """A copy of a matrix [outputs, inputs] as vectors.h has it: [panels, inputs, columns], padded by zeros."""
    whole = padded_to(matrix, columns) if len(matrix) % columns else matrix.detach()
    return whole.view(-1, columns, whole.shape[1]).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def padded_to(outputs: Tensor, columns: int) -> Tensor:
    """A copy of a matrix [outputs, inputs] or a bias [outputs], with zeros up to whole panels."""
    return F.pad(outputs.detach(), (0, 0) * (outputs.dim() - 1) + (0, -len(outputs) % columns)).contiguous()


def _load(source: Path, command: str, folder: Path, own: Path) -> ctypes.CDLL:
    """Load the compiled file from `folder`, or make it in `own` and put it there, if `folder` can be written."""
    tuned = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    processor = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*", cpu_name(), re.MULTILINE)[:3]
    texts = [path.read_text(encoding="utf-8") for path in (source, HEADER)]
    made_of = "\n".join((*texts, command, tuned, *FLAGS, *processor))
    name = f"{source.stem}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    with suppress(OSError, AttributeError):  # not there, or cut off
        return _whole(folder / name)
    include = f"-I{HEADER.parent}"
    line = [*shlex.split(command), *FLAGS, tuned, include, "-o", str(own / name), str(source), "-lm", "-lpthread"]
    subprocess.run(line, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    part = folder / f".{name}.{os.getpid()}"
    try:
        if not folder.is_absolute():
            raise OSError("the user has no home")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(own / name, part)
        part.replace(folder / name)
    except OSError as error:
        log.info("the compiled %s cannot be kept in %s: %s", source.name, folder, error)
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return _whole(own / name)


def _whole(path: Path) -> ctypes.CDLL:
    """Load a library. Raises OSError or AttributeError: it is no whole one."""
    library = ctypes.CDLL(str(path))
    library.panel_columns.restype = ctypes.c_int64
    return library
