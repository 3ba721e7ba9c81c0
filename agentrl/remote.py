"""Files behind a URL that `fsspec` knows (s3://, gs://, https:// ...), copied to this machine once."""

import hashlib
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl.errors import UserError, describe


def is_remote(text: str) -> bool:
    """Return whether a text is a URL."""
    return "://" in text


@cache
def fetched(url: str, key: str) -> Path:
    """Return a local folder with the file, the files of the folder, or those of the glob at `url`.

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
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "remote"
        folder = base / hashlib.sha256(f"{url}\n{known}".encode()).hexdigest()[:24]
        if not folder.is_dir():
            _copy(system, files, folder)
    except Exception as error:  # the boundary to stores of all kinds
        raise UserError(f"{key}: {url} cannot be fetched: {describe(error, place=False)}") from error
    return folder


def _files(system: Any, url: str, path: str) -> list[str]:
    if any(sign in path for sign in "*?["):
        return sorted(system.glob(path))
    web = url.startswith("http")  # where each page is a folder of what it links
    if url.endswith("/") or (not web and system.isdir(path)):
        return sorted(system.find(path))
    return [path]


def _copy(system: Any, files: list[str], folder: Path) -> None:
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
