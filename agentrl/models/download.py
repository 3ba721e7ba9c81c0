"""`download`: the files of a hub's model, before anybody is waited for who loads them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.jsonable import loads

DOWNLOADING = "downloading"
"""How lines about progress begin."""
FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py")
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def download(path: str, progress: Callable[[str], None]) -> None:
    """Fetch what this machine lacks of the model that `path`, as `resolve` returns it, names on the hub. Nothing is
    asked for where `path` is a folder, or the weights are here.

    progress: told how far it is, from any thread. Where it fails, whoever loads the model says why.
    """
    if Path(path).is_dir():
        return
    from huggingface_hub import snapshot_download
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """Counts bytes, and shows nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            options |= {"file": open(os.devnull, "w", encoding="utf-8"), "disable": False}  # noqa: SIM115
            super().__init__(*args, **options)

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                progress(f"{DOWNLOADING} {path}: {self.n / 1e9:.1f} of {self.total / 1e9:.1f} GB")
            return shown

    try:
        if _whole(Path(snapshot_download(path, local_files_only=True, allow_patterns=list(FILES)))):
            return
    except Exception:  # noqa: BLE001 - there is nothing of it here
        pass
    try:
        snapshot_download(path, allow_patterns=list(FILES), ignore_patterns="consolidated*", tqdm_class=Bar)
    except Exception:  # noqa: BLE001 - boundary to the hub: loading tells what is wrong, in a line
        return


def _whole(folder: Path) -> bool:
    """Whether a folder of the hub's cache has a model's configuration and all of its weights."""
    if not (folder / CONFIG).exists():
        return False
    if (folder / WEIGHTS).exists():
        return True
    if not (folder / INDEX).exists():
        return False
    parts = loads((folder / INDEX).read_bytes())["weight_map"].values()
    return all((folder / part).exists() for part in set(parts))
