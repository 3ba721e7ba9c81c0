"""The body of a request to `/inference/v1/generate`, and how its answer is read.

That route, not `/v1/completions`: there each log-prob names its token, the last piece says which weights sampled which
tokens, and every parameter is the engine's own, none filled in from OpenAI's defaults or the model's generation config.
"""

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Sequence
from io import BytesIO
from operator import itemgetter

import msgpack
import numpy as np
import numpy.typing as npt

from agentrl.engine.servers.answer import INTEGERS, NUMBERS, Answer, Features, PieceEnd, Wanted
from agentrl.engine.servers.kind import AnswerReader
from agentrl.engine.servers.pictures import Pictures
from agentrl.engine.servers.structured import json_only, structural_tag
from agentrl.models.image_input import ImageInput
from agentrl.plugins.types import Json

PATH = "/inference/v1/generate"
MISSING = -9999.0
"""What the server says instead of a log-prob that is NaN, minus infinity, or not there."""
RAW_VIEW = 3
"""The type of msgpack's extension that holds the bytes of a tensor."""
PREFIX = "generate-tokens-"
"""What the server puts before the id of a request."""
_TOKEN, _LOGPROB = itemgetter("token_id"), itemgetter("logprob")


def request_body(wanted: Wanted, features: Features) -> dict[str, Json]:
    """The body that asks for more tokens.

    At temperature 0 the server reports log-probs at temperature 1, as the contract says.
    """
    sampling = wanted.sampling
    parameters: dict[str, Json] = {
        "max_tokens": wanted.room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # of the model's own ids: those to stop at are given
        "detokenize": False,
        "logprobs": 0,
        "stream_interval": wanted.interval,
    }
    if features.seeds and sampling.seed is not None:
        parameters["seed"] = sampling.seed
    if sampling.constraint is not None:
        schema, tag = json_only(sampling.constraint), structural_tag(sampling.constraint)
        form = {"structural_tag": tag} if schema is None else {"json": json.loads(schema)}
        parameters["structured_outputs"] = form
    body = {"token_ids": wanted.ids, "sampling_params": parameters, "stream": True, "request_id": wanted.rid}
    return body if wanted.adapter is None else {**body, "model": wanted.adapter}


def pictured(keyed: Sequence[int], pictures: Pictures, raw_pixels: bool) -> dict[str, Json]:
    """The ids, and with them where the images stand, their hashes and their pixels."""
    ids, spans = pictures.read(keyed)
    form = "bytes" if raw_pixels else "normalized"
    item = lambda key: _item(pictures.input, key, raw_pixels)  # noqa: E731
    features = {
        "mm_hashes": [span.hash for span in spans],
        "mm_placeholders": [{"offset": span.start, "length": span.tokens} for span in spans],
        "kwargs_data": [pictures.encoded(form, span.hash, item) for span in spans],
    }
    return {"token_ids": ids, "features": {name: {"image": value} for name, value in features.items()}}


def _item(image_input: ImageInput, key: str, raw_pixels: bool) -> str:
    """An image as vLLM's `MultiModalKwargsItem` is serialized: fields with tensors and how they are batched."""
    patches, grid = image_input.raw(key) if raw_pixels else image_input.pixels(key)
    flat = ["flat", {"keep_on_cpu": False, "slices": [[0, len(patches), None]], "dim": 0}]
    fields = {
        "pixel_values": {"data": _tensor(patches), "field": flat},
        "image_grid_thw": {"data": _tensor(np.array(grid, np.int64)), "field": ["batched", {"keep_on_cpu": True}]},
    }
    return b64encode(msgpack.packb(fields)).decode()


def _tensor(array: npt.NDArray[np.generic]) -> list[Json]:
    return [array.dtype.name, list(array.shape), msgpack.ExtType(RAW_VIEW, array.tobytes())]


class VllmReader(AnswerReader):
    """Reads the pieces of PATH; the last one tells of each token which weights sampled it."""

    path = PATH

    def __init__(self, answer: Answer, url: str, version: int, fixed: bool = False) -> None:
        super().__init__(answer, url, version, fixed)
        self._told = fixed

    def add(self, payload: bytes) -> PieceEnd | None:
        """See `AnswerReader.add`."""
        piece = self._parsed(payload)
        choices = piece.get("choices")
        if choices == []:
            return None  # counts of tokens, or nothing
        choice = choices[0] if isinstance(choices, list) else None
        if not isinstance(choice, dict):
            raise self._malformed("it has no choices")
        end = self._end(choice.get("finish_reason"))
        ids = choice.get("token_ids") or []
        if not isinstance(ids, list):
            raise self._malformed("its token_ids are no list")
        logprobs = self._logprobs(ids, choice.get("logprobs")) if ids else []
        runs = self._runs_with(len(ids), choice.get("weight_versions"))
        if (experts := choice.get("routed_experts")) is not None:
            self._answer.experts = self._experts(experts)
        self._answer.ids.extend(ids)
        self._answer.logprobs.fromlist(logprobs)
        self._answer.versions[self._runs :] = runs
        return end

    def _experts(self, told: Json) -> npt.NDArray[np.generic]:
        """Decode an `.npy` file [tokens, layers, experts a token]."""
        try:
            found: npt.NDArray[np.generic] = np.load(BytesIO(b64decode(told, validate=True)), allow_pickle=False)
        except (TypeError, ValueError, EOFError, OSError) as error:
            raise self._malformed(f"its routed_experts are no .npy file in base64 ({error})") from error
        if found.dtype.kind not in "iu":
            raise self._malformed(f"its routed_experts are of {found.dtype}")
        return found

    def give_up(self, sure: int) -> None:
        """Drop the tokens whose weights the server has not told: it changed weights meanwhile, and ended early."""
        if not self._told:
            del self._answer.ids[sure:]
            del self._answer.logprobs[sure:]
            self._answer.versions[self._runs :] = [(self._version, sure - self._start)] if sure > self._start else []

    def _logprobs(self, ids: list[int], given: Json) -> list[float]:
        content = self._for_each(ids, given.get("content") if isinstance(given, dict) else None)
        try:
            named, logprobs = list(map(_TOKEN, content)), list(map(_LOGPROB, content))
            right = named == ids and INTEGERS.issuperset(map(type, ids)) and NUMBERS.issuperset(map(type, logprobs))
            right = right and math.isfinite(sum(logprobs)) and min(logprobs) > MISSING
        except (TypeError, LookupError):
            right = False
        if not right:
            raise self._malformed(_first_wrong(ids, content))
        return logprobs

    def _runs_with(self, new: int, spans: Json) -> list[tuple[int, int]]:
        """The versions of all of this server's ids, with `new` more: by the last piece's spans, until then those
        of the start."""
        total = len(self._answer.ids) - self._start + new
        if self._fixed or not spans:
            return [(self._version, total)] if total else []
        runs = self._told_runs(spans, total)
        self._told = True
        return runs

    def _end(self, reason: object) -> PieceEnd | None:
        return None if reason is None else self._known_end(reason, reason)


def _first_wrong(ids: list[Json], content: list[Json]) -> str:
    """A line about the first id whose log-prob is not one of it."""
    for token, entry in zip(ids, content, strict=True):
        value = entry.get("logprob") if isinstance(entry, dict) and entry.get("token_id") == token else None
        if type(token) is not int or not isinstance(value, float | int) or not math.isfinite(value):
            return f"id {token} came with the log-prob {entry!r:.100}"
        if value <= MISSING:
            return f"id {token} came without a log-prob: {value:g} is what vLLM says for none"
    return "its log-probs are out of range"
