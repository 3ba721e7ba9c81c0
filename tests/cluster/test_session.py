"""`Session` without a Ray: `cluster.address` is checked before Ray, which would try for minutes; shared memory."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator

import pytest

from agentrl.cluster import session
from agentrl.cluster.errors import ClusterError
from agentrl.cluster.session import NO_CLIENT_SERVER, object_store_bytes, reach


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def answering(listener: socket.socket, answer: bytes) -> str:
    """Its address; whoever connects is given `answer` once it has spoken."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_that_speaks_http2_is_taken_for_a_head(listener: socket.socket) -> None:
    address = answering(listener, bytes(3) + b"\4" + bytes(5))
    assert reach(address) == address


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH", b""])
def test_another_server_is_not(listener: socket.socket, answer: bytes) -> None:
    with pytest.raises(ClusterError, match="something else answers there"):
        reach(answering(listener, answer))


@pytest.mark.parametrize(
    "address", ["garbage", "ray://10.0.0.1:10001", "http://10.0.0.1:8265", "me:secret@host:6379", ":1"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ClusterError, match="is 'auto' or HOST:PORT of a Ray head"):
        reach(address)


def test_auto_is_what_the_environment_says_and_else_what_ray_finds(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import services

    address = answering(listener, bytes(3) + b"\4" + bytes(5))
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert reach("auto") == address
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(services, "get_ray_address_from_environment", lambda given, folder: "127.0.0.1:1")
    with pytest.raises(ClusterError, match=r"no Ray cluster at '127\.0\.0\.1:1'"):
        reach("auto")

    def nothing(given: str, folder: str | None) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(services, "get_ray_address_from_environment", nothing)
    with pytest.raises(ClusterError, match="auto: no Ray cluster runs on this machine"):
        reach("auto")


def test_a_wrong_token_ends_the_tries_at_once_and_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray

    tries = []

    def init(**options: object) -> None:
        tries.append(options["address"])
        os.write(2, b"gcs_client.cc:210: Unauthenticated: RPC error: InvalidAuthToken: token is missing or incorrect\n")
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterError, match="does not take our token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"):
        session._connect("10.0.0.1:6379", timeout=5.0)
    assert tries == ["10.0.0.1:6379"]
    os.write(2, b"and it is heard again")
    assert capfd.readouterr().err == "and it is heard again"


def test_too_little_shared_memory_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    with pytest.raises(ClusterError, match=r"/dev/shm has 64 MiB free; .* docker run --shm-size"):
        object_store_bytes()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, 1 << 30))
    assert object_store_bytes() == int((1 << 30) * 0.3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, 1 << 40))
    assert object_store_bytes() == 8 << 30


@pytest.mark.slow
def test_ray_starts_no_client_server_where_grpc_is_installed() -> None:
    """Two runs on a machine would want the same port for it; the test extra brings grpc."""
    import grpc  # noqa: F401

    asks = "from ray._private.utils import get_ray_client_dependency_error as why; print(why() is not None)"
    done = subprocess.run(
        [sys.executable, "-c", f"{NO_CLIENT_SERVER}; {asks}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"
