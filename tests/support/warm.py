"""Processes that need not import for seconds: each is forked from one that has only imported, once for all tests.

They are Python processes like others but for that. Whoever tests what a new interpreter does, or reads a stream while
it is written, starts one by `subprocess`.
"""

import atexit
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.util
import os
import runpy
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.multiprocessing
import warm_ray
from paths import SUPPORT

from agentrl.cluster import session

METHOD = "forkserver"
IMPORTED = (
    "garbage", "torch.distributed.checkpoint", "torch.distributed.fsdp", "transformers.modeling_utils",
    "transformers.models.qwen3.modeling_qwen3", "agentrl.training.run", "agentrl.distributed.fsdp.build",
    "agentrl.training.setup", "agentrl.engine.local.engine", "agentrl_envs.gsm8k.environment", "typer",
    "renderers.base", "pandas", "garbage_again",
)  # fmt: skip
"""Renderers by chat templates, and pandas by pyarrow. Not Ray: its threads would not be there after the fork."""
_CONTEXT = multiprocessing.get_context(METHOD)
_CONTEXT.set_forkserver_preload(list(IMPORTED))
_FOLDER = multiprocessing.util.get_temp_dir()  # before a test makes another folder the one for temporary files
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}


def _start() -> None:
    """Have the process that others are forked from, whatever a test has done to this one's environment."""
    with patch.dict(os.environ, _ENVIRONMENT, clear=True):
        forkserver.ensure_running()


def on_ranks(work: Callable[..., None], *arguments: Any, size: int = 2) -> None:
    """work(rank, *arguments) in `size` processes; raises what one of them raises."""
    _start()
    torch.multiprocessing.start_processes(_on_rank, (work, *arguments), nprocs=size, start_method=METHOD)


def _on_rank(rank: int, work: Callable[..., None], *arguments: Any) -> None:
    gc.freeze()
    faulthandler.enable()  # a crash in C++ says where
    work(rank, *arguments)


@functools.cache
def have_ray_workers() -> object:
    """Let workers of the Rays that this process and those of `Python` start be forked, from now on until it ends."""
    folder = tempfile.mkdtemp(dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = str(Path(folder, "s"))
    process, connection = started(warm_ray.serve, path)
    atexit.register(connection.close)
    connection.recv()
    os.environ[warm_ray.SOCKET] = path
    session.RAY = warm_ray.COMMAND
    return process, connection


def started(work: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """A process that does work(*arguments, connection), and our end of that connection."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=work, args=(*arguments, theirs))
    _start()
    process.start()
    theirs.close()
    return process, ours


class Python:
    """`python WORDS`, that is `-m MODULE`, `-c CODE` or a file, and its arguments; used as `subprocess.Popen` is.

    env: its variables (None: ours). apart: whether its standard error is kept apart from its output. packages: a folder
    of packages that it has besides, as that of a virtual environment.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        apart: bool = False,
        packages: Path | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=_FOLDER))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        files = str(self._folder / "out"), str(self._folder / ("errors" if apart else "out"))
        told = list(words), str(cwd or Path.cwd()), dict(os.environ if env is None else env), packages
        self._process = _CONTEXT.Process(target=_become, args=(files, *told))
        _start()
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return code

    def said(self) -> str:
        """What it has written so far."""
        return self._read("out")

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until it has ended, and return all that it wrote: output and standard error."""
        self.wait(timeout)
        return self.said(), self._read("errors")

    def _read(self, name: str) -> str:
        file = self._folder / name
        return file.read_text() if file.exists() else ""


def _become(files: tuple[str, str], words: list[str], cwd: str, env: dict[str, str], packages: Path | None) -> None:
    gc.freeze()  # else each collection goes through all that is imported, and writes to, so copies, its pages
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which whoever started the tests under nohup ignores
    for number, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None
    if warm_ray.SOCKET in env:
        session.RAY = warm_ray.COMMAND
    first, *arguments = words
    own = {"-m": cwd, "-c": ""}.get(first, str(Path(first).parent))
    sys.path[:0] = [own, *_folders(env)]
    if packages is not None:
        site.addsitedir(str(packages))
    try:
        _run(first, arguments)
    finally:  # as an interpreter ends, which multiprocessing does not
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _folders(env: Mapping[str, str]) -> list[str]:
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder and folder not in sys.path]


def _run(first: str, arguments: list[str]) -> None:
    if first == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = [first, *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")
