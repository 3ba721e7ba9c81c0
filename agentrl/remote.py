"""Files behind a URL that `fsspec` knows (s3://, gs://, https:// ...), copied to this machine once."""

import hashlib
import http.client
import ipaddress
import json
import os
import shutil
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from agentrl.errors import UserError, describe

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def is_remote(text: str) -> bool:
    """Whether a text is a URL."""
    return "://" in text


@cache
def fetched(url: str, key: str) -> Path:
    """A local folder with the file, the files of the folder, or those of the glob at `url`.

    A copy is made once for what the store says of the files (size, time, checksums), so that changed ones are copied
    again; `$XDG_CACHE_HOME/agentrl/remote` holds them. key: of the recipe, for errors. Raises UserError: nothing is
    there, or the package of the protocol is missing.
    """
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        files = _files(system, url, path)
        known = json.dumps([[name, system.info(name)] for name in files], default=str, sort_keys=True)
        if not files:
            raise FileNotFoundError("there is no such file")
        folder = _cache() / hashlib.sha256(f"{url}\n{known}".encode()).hexdigest()[:24]
        if not folder.is_dir():
            _copy(system, files, folder)
    except Exception as error:  # the boundary to stores of all kinds
        raise UserError(f"{key}: {url} cannot be fetched: {describe(error, place=False)}") from error
    return folder


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "remote"


DOWNLOAD_SECONDS = 30.0
"""Seconds that a file which a row names may take."""
_ATTEMPTS = 2


def downloaded(url: str, *, most: int, anywhere: bool) -> Path:
    """A local copy of the file at an http address that data names, made once.

    most: bytes that it may have. anywhere: also from machines of one's own network, and through a proxy; otherwise from
    addresses that all the world can reach. Raises OSError, whose text says why there is none.
    """
    file = _cache() / "files" / hashlib.sha256(url.encode()).hexdigest()
    if not file.exists():
        data = _read(url, most, anywhere)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as aside:
            aside.write(data)
        Path(aside.name).replace(file)
    return file


def _read(url: str, most: int, anywhere: bool) -> bytes:
    opener = urllib.request.build_opener() if anywhere else _PUBLIC
    for attempt in range(_ATTEMPTS):
        end = time.monotonic() + DOWNLOAD_SECONDS
        try:
            with opener.open(url, timeout=DOWNLOAD_SECONDS / 3) as answer:
                data = bytearray()
                while piece := answer.read1(1 << 16):
                    data += piece
                    if len(data) > most:
                        raise PermissionError(f"it has more than {most:,} bytes")
                    if time.monotonic() > end:
                        raise TimeoutError(f"it takes longer than {DOWNLOAD_SECONDS:g} s")
                return bytes(data)
        except (PermissionError, urllib.request.HTTPError):
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if attempt == _ATTEMPTS - 1:
                raise OSError(str(getattr(error, "reason", None) or error) or type(error).__name__) from error
    raise AssertionError("the last attempt returns or raises")


def _check_public(connection: http.client.HTTPConnection) -> None:
    """Raise PermissionError where the machine that was reached is one of a network of its own, whatever its name."""
    host = connection.sock.getpeername()[0]
    address = ipaddress.ip_address(host.partition("%")[0])
    if not (getattr(address, "ipv4_mapped", None) or address).is_global:
        connection.close()
        raise PermissionError(f"{connection.host} is not a public address")


class _Http(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _check_public(self)


class _Https(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _check_public(self)


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, request)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, request)


_PUBLIC = urllib.request.OpenerDirector()
for _handler in (
    _HttpHandler, _HttpsHandler, urllib.request.HTTPRedirectHandler, urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
):  # fmt: skip
    _PUBLIC.add_handler(_handler())


def _files(system: "AbstractFileSystem", url: str, path: str) -> list[str]:
    if any(sign in path for sign in "*?["):
        return sorted(system.glob(path))
    web = url.startswith("http")  # where each page is a folder of what it links
    if url.endswith("/") or (not web and system.isdir(path)):
        return sorted(system.find(path))
    return [path]


def _copy(system: "AbstractFileSystem", files: list[str], folder: Path) -> None:
    """Copy files into a new folder, which is there whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    parents = [PurePosixPath(name).parent for name in files]
    top = PurePosixPath(os.path.commonpath(parents)) if len(files) > 1 else parents[0]
    aside = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
    try:
        for name in files:
            local = aside / PurePosixPath(name).relative_to(top)
            local.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(name, str(local))
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
