"""The body of a request to `/generate`, and how its answer is read: every id with its log-prob and version, each once.

An answer may come in several pieces, from several servers; `Answer` holds the tokens so far. A piece is added only
after it was checked whole: one log-prob for each id, of that very id, and as many as the server says it sampled."""

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from agentrl.engine.base import EngineError
from agentrl.engine.servers.answer import INTEGERS, INTERVAL, NUMBERS, Features, PieceEnd, Wanted
from agentrl.engine.servers.kind import AnswerReader
from agentrl.engine.servers.pictures import Pictures
from agentrl.engine.servers.structured import json_only, structural_tag
from agentrl.models.image_input import ImageInput
from agentrl.plugins.types import Json

PIECES, SHOWN_PIECES = 8, 64
"""Pieces of an answer at most, where each holds all that came before it (a server without incremental streaming), and
where somebody reads along."""


def request_body(wanted: Wanted, features: Features) -> dict[str, Json]:
    """The body that asks for more tokens.

    Every parameter is given, so that no default of the server or of the model's generation config applies. At
    temperature 0 it reports log-probs at temperature 1, as the contract says.
    """
    sampling, interval = wanted.sampling, wanted.interval
    pieces = PIECES if interval >= INTERVAL else SHOWN_PIECES
    parameters: dict[str, Json] = {
        "max_new_tokens": wanted.room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": not sampling.stop_ids,  # it switches `stop_token_ids` off too, so only where there are none
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "stream_interval": interval if features.incremental else max(interval, -(-wanted.room // pieces)),
    }
    if features.seeds and sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    if sampling.constraint is not None:
        schema = json_only(sampling.constraint)
        form = {"structural_tag": structural_tag(sampling.constraint)} if schema is None else {"json_schema": schema}
        parameters |= form
    body = {
        "input_ids": wanted.ids, "sampling_params": parameters, "return_logprob": True, "stream": True,
        "rid": wanted.rid,
    }  # fmt: skip
    return body if wanted.adapter is None else {**body, "lora_path": wanted.adapter}


def pictured(keyed: Sequence[int], pictures: Pictures) -> dict[str, Json]:
    """The ids, in which one placeholder stands for an image, and the images: the server expands placeholders
    itself. Raises EngineError where there are more placeholders than images."""
    ids, spans = pictures.read(keyed)
    placeholder = pictures.input.placeholder
    if ids.count(placeholder) != sum(span.tokens for span in spans):
        raise EngineError("the model sampled the placeholder of images, which SGLang would take for one")
    short, end = [], 0
    for span in spans:
        short += [*ids[end : span.start], placeholder]
        end = span.start + span.tokens
    return {
        "input_ids": short + ids[end:],
        "image_data": [pictures.encoded("url", span.hash, lambda key: _sized(pictures.input, key)) for span in spans],
    }


def _sized(image_input: ImageInput, key: str) -> str:
    """An image as a `data:` URL, of the size that the model is given: versions of Pillow do not all give the
    same pixels where they resize."""
    patches, (_, height, width) = image_input.raw(key)
    side, merged = int(image_input.processor.patch_size), int(image_input.processor.merge_size)
    cells = patches.reshape(height // merged, width // merged, merged, merged, 3, -1, side, side)[:, :, :, :, :, 0]
    pixels = cells.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * side, width * side, 3)
    Image.fromarray(np.ascontiguousarray(pixels)).save(file := BytesIO(), format="PNG")
    return "data:image/png;base64," + b64encode(file.getvalue()).decode()


class Reader(AnswerReader):
    """Reads the pieces of `/generate`."""

    path = "/generate"

    def add(self, payload: bytes) -> PieceEnd | None:
        """See `AnswerReader.add`."""
        piece = self._parsed(payload)
        meta, ids = piece.get("meta_info"), piece.get("output_ids")
        if not isinstance(meta, dict) or not isinstance(ids, list):
            raise self._malformed("it has no meta_info or output_ids")
        end = self._end(meta.get("finish_reason"))
        new, logprobs = self._new(ids, meta)
        runs = self._runs_with(len(new), meta)
        if (experts := meta.get("routed_experts")) is not None:
            self._answer.experts = self._experts(experts)
        self._answer.ids.extend(new)
        self._answer.logprobs.fromlist(logprobs)
        self._answer.versions[self._runs :] = runs
        return end

    def _experts(self, told: Json) -> npt.NDArray[np.int32]:
        """Decode the bytes of int32 [tokens, layers, experts a token]."""
        try:
            return np.frombuffer(b64decode(told, validate=True), np.int32)
        except (TypeError, ValueError) as error:
            raise self._malformed(f"its routed_experts are not int32 in base64 ({error})") from error

    def give_up(self, sure: int) -> None:
        """Do nothing: each piece names the weights that sampled it."""

    def _new(self, ids: list[int], meta: Mapping[str, Json]) -> tuple[list[int], list[float]]:
        """The ids of a piece that are new, and their log-probs."""
        have = len(self._answer.ids) - self._start
        new = meta.get("completion_tokens", have + len(ids)) - have
        if new == 0:
            return [], []  # only the end, or after an abort the last id once more
        if new < 0 or len(ids) not in (new, have + new):  # what is new, or all so far
            raise self._malformed(f"of {have + new} sampled tokens {have} and {len(ids)} came")
        pairs = self._for_each(ids, meta.get("output_token_logprobs"))
        ids, pairs = ids[-new:], pairs[-new:]
        try:
            logprobs, named = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            right = named == ids and INTEGERS.issuperset(map(type, ids)) and NUMBERS.issuperset(map(type, logprobs))
            right = right and math.isfinite(sum(logprobs))
        except (TypeError, LookupError):
            right = False
        if not right:
            raise self._malformed(_first_wrong(ids, pairs))
        return ids, logprobs

    def _runs_with(self, new: int, meta: Mapping[str, Json]) -> list[tuple[int, int]]:
        """The versions of all of this server's ids, with `new` more: by the last piece's spans, until then by
        the version that each piece names."""
        if self._fixed or not (spans := meta.get("weight_versions")):
            name = str(meta.get("weight_version"))
            if name.isdecimal() and not self._fixed:  # else an update has begun, and these were sampled before it
                self._version = int(name)
            return [*self._answer.versions[self._runs :], *([(self._version, new)] if new else [])]
        return self._told_runs(spans, len(self._answer.ids) - self._start + new)

    def _end(self, reason: Json) -> PieceEnd | None:
        if reason is None:
            return None
        kind = reason.get("type") if isinstance(reason, dict) else None
        end = self._known_end(kind, reason)
        if end is PieceEnd.ABORT and reason.get("status_code"):
            raise self._error({"message": reason.get("message"), "code": reason["status_code"]})
        return end


def _first_wrong(ids: list[Json], pairs: list[Json]) -> str:
    """A line about the first id whose log-prob is not one of it."""
    for token, pair in zip(ids, pairs, strict=True):
        value = pair[0] if isinstance(pair, list) and len(pair) > 1 and pair[1] == token else None
        if type(token) is not int or not isinstance(value, float | int) or not math.isfinite(value):
            return f"id {token} came with the log-prob {pair}"
    return "its log-probs are out of range"
