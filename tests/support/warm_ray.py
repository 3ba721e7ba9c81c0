"""Ray whose workers need not import for seconds: each is forked from one process, which has imported what they need
but Ray: it reads its environment as it is loaded.

`python -m warm_ray ray ...` is the command `ray` with `ray_worker.py` in place of its own script that starts a worker.
That script asks the process at the socket that `SOCKET` names to fork one, and ends when the worker does; killed, it
takes the worker with it. Without that process, workers are started as Ray starts them. `python -m warm_ray MODULE ...`
is `python -m MODULE ...` that starts its Rays so.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

SOCKET = "AGENTRL_TEST_RAY_WORKERS"
COMMAND = (sys.executable, "-m", "warm_ray", "ray")
_LENGTH = struct.Struct("!I")
_STREAMS = (0, 1, 2)


def serve(path: str, parent: Any) -> None:
    """Fork workers for whoever asks at the Unix socket `path`, until the other end of `parent` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    waiting.register(parent, selectors.EVENT_READ)
    workers: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that tells of their end
    clients: dict[int, int] = {}
    parent.send(None)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is parent:
                for worker, _ in workers.values():
                    os.kill(worker, signal.SIGKILL)
                return
            if key.fileobj is listening:
                client, _ = listening.accept()
                asked = _receive(client)
                if asked is None:
                    client.close()
                    continue
                if (worker := os.fork()) == 0:
                    _become(*asked, inherited=[listening, client, parent, waiting, *workers])
                for stream in asked[1]:
                    os.close(stream)
                end = os.pidfd_open(worker)
                workers[end] = worker, client
                clients[client.fileno()] = end
                waiting.register(end, selectors.EVENT_READ)
                waiting.register(client, selectors.EVENT_READ)
            elif key.fd in workers:
                worker, client = workers.pop(key.fd)
                status = os.waitpid(worker, 0)[1]
                waiting.unregister(key.fd)
                os.close(key.fd)
                if clients.pop(client.fileno(), None) is not None:
                    waiting.unregister(client)
                with contextlib.suppress(OSError):
                    client.sendall(_LENGTH.pack(status))
                client.close()
            elif (end := clients.pop(key.fd, None)) is not None:  # the script was killed
                waiting.unregister(key.fileobj)
                signal.pidfd_send_signal(end, signal.SIGKILL)


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What a script sends: the worker's words, environment and folder; its streams."""
    try:
        head, streams, _, _ = socket.recv_fds(client, _LENGTH.size, len(_STREAMS))
        body = b""
        size = _LENGTH.unpack(head)[0]
        while len(body) < size:
            if not (more := client.recv(size - len(body))):
                raise EOFError
            body += more
    except (OSError, EOFError, struct.error):
        return None
    return json.loads(body), list(streams)


def _become(asked: dict[str, Any], streams: list[int], inherited: list[Any]) -> None:
    """Be the worker; never returns."""
    code = 1
    gc.freeze()  # as `warm._become`
    try:
        os.setsid()
        for thing in inherited:
            os.close(thing) if isinstance(thing, int) else thing.close()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for number, stream in zip(_STREAMS, streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        tempfile.tempdir = None
        _threads(asked["env"])
        sys.argv = asked["words"]
        folders = [str(Path(sys.argv[0]).parent), *asked["env"].get("PYTHONPATH", "").split(os.pathsep)]
        sys.path[:0] = [folder for folder in folders if folder]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the child must not go on as a second server
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _threads(env: dict[str, str]) -> None:
    """As many as a new process would take from its environment, in which torch looks once."""
    import torch

    if env.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))


def _main(module: str) -> None:
    sys.argv = [module, *sys.argv[2:]]
    if module == "ray":
        from ray._private import ray_constants

        ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("ray_worker.py"))
        module = "ray.scripts.scripts"
        sys.modules["grpc"] = None  # type: ignore[assignment] # as `session.NO_CLIENT_SERVER`
    else:
        from agentrl.cluster import session

        session.RAY = COMMAND
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(sys.argv[1])
