"""One SGLang server's calls about weights. Each raises WeightUpdateError with one line, or has worked."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import aiohttp


class WeightUpdateError(Exception):
    """A server did not take what was sent to it."""


class PauseMode(StrEnum):
    """What happens to requests under way while weights change."""

    RETRACT = "retract"  # they wait, and are computed again from their tokens so far with the new weights
    IN_PLACE = "in_place"  # they wait, and go on with the new weights over the keys and values of the old
    ABORT = "abort"  # they end now, and answer with what they have


class WeightServer:
    """`url` without a slash at its end. `timeout`: seconds that one call may take."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, timeout: float = 600.0, headers: Mapping[str, str] | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._session, self._headers = session, dict(headers or {})
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    async def info(self) -> dict[str, Any]:
        """Its arguments and state: `device`, `dtype`, `tp_size`, `weight_version`, `version`, ..."""
        return await self._call("GET", "/server_info", None)

    async def pause(self, mode: PauseMode) -> None:
        """Requests under way are treated as `mode` says; new ones wait until `resume`."""
        await self._post("/pause_generation", {"mode": mode.value})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def begin(self) -> None:
        """Open an update. One that an earlier failure left open is closed first: what it held is overwritten."""
        try:
            await self._post("/begin_weight_update", {})
        except WeightUpdateError as error:
            if "already open" not in str(error):
                raise
            await self.end()
            await self._post("/begin_weight_update", {})

    async def end(self) -> None:
        await self._post("/end_weight_update", {})

    async def load_tensors(self, payloads: Sequence[str]) -> None:
        """payloads: base64, a pickled flattened bucket for each rank of tensor parallelism."""
        body = {"serialized_named_tensors": list(payloads), "load_format": "flattened_bucket", "flush_cache": False}
        await self._post("/update_weights_from_tensor", body)

    async def load_folder(self, folder: str) -> None:
        """folder: a path that the server can read, with *.safetensors of the whole model."""
        await self._post("/update_weights_from_disk", {"model_path": folder, "flush_cache": False})

    async def set_version(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def flush(self) -> None:
        """Drop every cached prefix: it was computed with the old weights."""
        await self._post("/flush_cache", {})

    async def checksums(self) -> list[dict[str, str]]:
        """For each rank: parameter name -> hash of its bytes."""
        found = await self._post("/weights_checker", {"action": "checksum"})
        return [rank["checksums"] for rank in found["ranks"]]

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """The answer's JSON ({} when it has none)."""
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=self._timeout, headers=self._headers
            ) as answer:
                text = await answer.text()
                status = answer.status
                found = await answer.json(content_type=None) if text[:1] == "{" else {}
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise WeightUpdateError(f"{self.url}{path} did not answer: {reason}") from error
        if status != 200 or found.get("success") is False:
            said = " ".join(str(found.get("message") or found.get("error") or text).split())
            raise WeightUpdateError(f"{self.url}{path} answered {status}: {said[:300]}")
        return found
