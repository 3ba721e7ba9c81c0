"""A real OpenEnv server for tests."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from paths import SUPPORT
from processes import until


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1.0).is_success
    except httpx.HTTPError:
        return False


@contextmanager
def real_server(venv: str, kind: str, folder: Path) -> Iterator[str]:
    """A server of the package. kind: of those in openenv_server.py."""
    port = free_port()
    command = [str(Path(venv, "bin/python")), str(SUPPORT / "openenv_server.py"), kind, str(port)]
    url, said = f"http://127.0.0.1:{port}", folder / f"{kind}.txt"
    with said.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            until(lambda: healthy(url) or process.poll() is not None, 60.0)
            assert process.poll() is None, said.read_text()
            yield url
        finally:
            process.kill()
