"""Real OpenEnv servers for tests."""

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
def real_servers(venv: str, folder: Path, *kinds: str) -> Iterator[dict[str, str]]:
    """Servers of the package: the kind (of those in openenv_server.py) and the URL of each."""
    ports = {kind: free_port() for kind in kinds}
    named = [f"{kind}:{port}" for kind, port in ports.items()]
    command = [str(Path(venv, "bin/python")), str(SUPPORT / "openenv_server.py"), *named]
    urls, said = {kind: f"http://127.0.0.1:{port}" for kind, port in ports.items()}, folder / "openenv.txt"
    with said.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            until(lambda: all(map(healthy, urls.values())) or process.poll() is not None, 180.0)
            assert process.poll() is None, said.read_text()
            yield urls
        finally:
            process.kill()
