"""Weights through a folder that trainer and servers both see."""

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from agentrl.containment.threads import in_thread
from agentrl.errors import UserError
from agentrl.jsonable import dumps
from agentrl.weights.server import WeightServer
from agentrl.weights.source import WeightSource, buckets
from agentrl.weights.transports.base import Failures, each

SHARD_BYTES = 2 << 30


class DiskTransport:
    """Write each version into a folder of its own, aside, then rename it; the last `keep` stay. shard_bytes: size of
    one file, which is what stands in memory."""

    name = "from_disk"

    def __init__(self, folder: Path, keep: int = 2, shard_bytes: int = SHARD_BYTES) -> None:
        self._made = folder if not folder.exists() else None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="channel_", dir=folder.resolve()))  # one for each channel
        except OSError as error:
            raise UserError(f"weights: the folder {folder} cannot be written: {error.strerror}") from error
        self._folder.chmod(0o755)  # servers may run as another user
        self._keep, self._shard_bytes = keep, shard_bytes

    async def send(self, version: int, servers: Sequence[WeightServer], weights: WeightSource, flush: bool) -> Failures:
        """Write the weights, let the servers load them, and remove old versions."""
        failures: Failures = {}
        folder = await in_thread(self._write, version, weights)
        await each(servers, lambda server: server.load_folder(str(folder), flush), failures)
        await in_thread(self._forget, version)
        return failures

    async def close(self) -> None:
        """Remove the folders that were written."""
        await in_thread(shutil.rmtree, self._folder, True)
        if self._made is not None:
            with contextlib.suppress(OSError):  # another channel uses it
                self._made.rmdir()

    def _write(self, version: int, weights: WeightSource) -> Path:
        """Write the folder in shards, so that only one stands in memory."""
        final = self._folder / f"version_{version}"
        aside = self._folder / f".writing_{version}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        index: dict[str, str] = {}
        size = 0
        for number, batch in enumerate(buckets(weights, self._shard_bytes)):
            shard = f"model-{number:05d}.safetensors"
            save_file({name: tensor.contiguous().cpu() for name, tensor in batch}, aside / shard)
            index |= dict.fromkeys((name for name, _ in batch), shard)
            size += sum(tensor.nbytes for _, tensor in batch)
        content = {"metadata": {"total_size": size}, "weight_map": index}
        (aside / "model.safetensors.index.json").write_text(dumps(content), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        return final

    def _forget(self, version: int) -> None:
        """Remove all but the last `keep` versions up to this one."""
        found = sorted(self._folder.glob("version_*"), key=lambda f: int(f.name.removeprefix("version_")))
        for folder in found[: -self._keep]:
            shutil.rmtree(folder, ignore_errors=True)
