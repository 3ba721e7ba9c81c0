"""A hub's model is fetched with progress, and the hub is left alone once it is here. The hub is the test's."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants

from agentrl.models.download import download

FILES = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "part-1.safetensors"}}).encode(),
    "part-1.safetensors": bytes(3_000_000),
    "consolidated.safetensors": bytes(10),
    "picture.png": b"not wanted",
}


class Hub(BaseHTTPRequestHandler):
    """asked: paths of files, in order."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        named = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/") and "/tree/" in self.path:
            listed = [{"type": "file", "path": name, "size": len(b), "oid": _hash(b)} for name, b in FILES.items()]
            content = json.dumps(listed).encode()
        elif self.path.startswith("/api/models/"):
            content = json.dumps({"id": "a/b", "sha": "a" * 40, "siblings": [{"rfilename": n} for n in FILES]}).encode()
        elif "/resolve/" in self.path and named in FILES:
            content = FILES[named]
            self.asked.append(named)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in (("X-Repo-Commit", "a" * 40), ("ETag", f'"{_hash(content)}"')):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *about: object) -> None:
        """Say nothing."""


def _hash(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    Hub.asked.clear()
    yield Hub.asked
    server.shutdown()
    server.server_close()


def test_it_is_fetched_once_and_tells_how_far_it_is(hub: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    download("a/b", said.append)
    assert set(hub) == {"config.json", "model.safetensors.index.json", "part-1.safetensors"}
    assert said[-1] == "downloading a/b: 0.0 of 0.0 GB"
    (part,) = tmp_path.glob("models--a--b/snapshots/*/part-1.safetensors")
    assert part.read_bytes() == FILES["part-1.safetensors"]
    count = len(hub)
    download("a/b", said.append)
    assert len(hub) == count
    part.unlink()  # what broke off is gone on with
    download("a/b", said.append)
    assert hub[count:]
    assert part.exists()


def test_a_folder_and_a_hub_that_does_not_answer_are_left_to_who_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    said: list[str] = []
    for path in (str(tmp_path), "nobody/nothing"):
        download(path, said.append)
    assert said == []
