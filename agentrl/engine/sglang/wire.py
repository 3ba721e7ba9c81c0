"""The body of a request to `/generate`, and how its answer is read: every id with its log-prob and version, each once.

An answer may come in several pieces, from several servers; `Answer` holds the tokens so far. A piece is added only
after it was checked whole: one log-prob for each id, of that very id, and as many as the server says it sampled."""

import math
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from agentrl.engine.base import Sampling
from agentrl.engine.servers.answer import INTERVAL, Answer, Features, PieceEnd
from agentrl.engine.servers.client import RefusedError, ServerError

PIECES = 8
"""Pieces of an answer at most, where each holds all that came before it (a server without incremental streaming)."""


_INTEGERS, _NUMBERS = frozenset((int,)), frozenset((int, float))


def request_body(
    ids: Sequence[int],
    sampling: Sampling,
    room: int,
    rid: str,
    features: Features,
    adapter: str | None = None,
    interval: int = INTERVAL,
) -> dict[str, Any]:
    """Return the body that asks for `room` more tokens after `ids`. rid: the request's id. adapter: name of one that
    the server holds. interval: tokens between two pieces of the answer.

    Every parameter is given, so that no default of the server or of the model's generation config applies. At
    temperature 0 it reports log-probs at temperature 1, as the contract says.
    """
    pieces = PIECES * INTERVAL // interval
    parameters: dict[str, Any] = {
        "max_new_tokens": room,
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
        "stream_interval": interval if features.incremental else max(interval, -(-room // pieces)),
    }
    if features.seeds and sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    body = {
        "input_ids": list(ids), "sampling_params": parameters, "return_logprob": True, "stream": True, "rid": rid,
    }  # fmt: skip
    return body if adapter is None else {**body, "lora_path": adapter}


class Reader:
    """Reads one server's pieces of an answer into `answer`. url: names the server in errors. version: of the weights
    when the request starts. fixed: it is that of an adapter, which stays to the end, whatever version the server
    reports."""

    def __init__(self, answer: Answer, url: str, version: int, fixed: bool = False) -> None:
        self._answer, self._url, self._latest, self._fixed = answer, url, version, fixed
        self._start = len(answer.ids)
        self._runs = len(answer.versions)

    def add(self, payload: bytes) -> PieceEnd | None:
        """Add what is new in a piece, and return why the server is done, or None. Raises ServerError where the piece is
        malformed or holds an error; then nothing of it was added."""
        try:
            piece = from_json(payload)
        except ValueError as error:
            raise self._malformed("not JSON") from error
        if not isinstance(piece, dict):
            raise self._malformed("not a JSON object")
        if "error" in piece:
            raise self._error(piece["error"])
        meta, ids = piece.get("meta_info"), piece.get("output_ids")
        if not isinstance(meta, dict) or not isinstance(ids, list):
            raise self._malformed("it has no meta_info or output_ids")
        end = self._end(meta.get("finish_reason"))
        new, logprobs = self._new(ids, meta)
        runs = self._runs_with(len(new), meta)
        if (experts := meta.get("routed_experts")) is not None:
            self._answer.experts = self._experts(experts)
        self._answer.ids.extend(new)
        self._answer.logprobs.extend(logprobs)
        self._answer.versions[self._runs :] = runs
        return end

    def _experts(self, told: Any) -> npt.NDArray[np.int32]:
        """Decode the bytes of int32 [tokens, layers, experts a token]."""
        try:
            return np.frombuffer(b64decode(told, validate=True), np.int32)
        except (TypeError, ValueError) as error:
            raise self._malformed(f"its routed_experts are not int32 in base64 ({error})") from error

    def give_up(self, sure: int) -> None:
        """Do nothing: each piece names the weights that sampled it."""

    def _new(self, ids: list[int], meta: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """Return the ids of a piece that are new, and their log-probs."""
        have = len(self._answer.ids) - self._start
        new = meta.get("completion_tokens", have + len(ids)) - have
        if new == 0:
            return [], []  # only the end, or after an abort the last id once more
        if new < 0 or len(ids) not in (new, have + new):  # what is new, or all so far
            raise self._malformed(f"of {have + new} sampled tokens {have} and {len(ids)} came")
        pairs = meta.get("output_token_logprobs")
        if not isinstance(pairs, list) or len(pairs) != len(ids):
            count = len(pairs) if isinstance(pairs, list) else "no"
            raise self._malformed(f"{len(ids)} ids came with {count} log-probs")
        ids, pairs = ids[-new:], pairs[-new:]
        try:
            logprobs, named = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            right = named == ids and _INTEGERS.issuperset(map(type, ids)) and _NUMBERS.issuperset(map(type, logprobs))
            right = right and math.isfinite(sum(logprobs))
        except (TypeError, LookupError):
            right = False
        if not right:
            raise self._malformed(_first_wrong(ids, pairs))
        return ids, logprobs

    def _runs_with(self, new: int, meta: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return the versions of all of this server's ids, with `new` more: by the last piece's spans, until then by
        the version that each piece names."""
        if self._fixed or not (spans := meta.get("weight_versions")):
            name = str(meta.get("weight_version"))
            if name.isdecimal() and not self._fixed:  # else an update has begun, and these were sampled before it
                self._latest = int(name)
            return [*self._answer.versions[self._runs :], *([(self._latest, new)] if new else [])]
        total, covered, runs = len(self._answer.ids) - self._start + new, 0, []
        for span in spans:
            end = min(span["end"], total)
            if end > covered:
                runs.append((self._version(span["version"]), end - covered))
                covered = end
        if covered != total:
            raise self._malformed(f"its weight versions cover {covered} of {total} ids")
        return runs

    def _version(self, name: Any) -> int:
        if not str(name).isdecimal():
            raise ServerError(f"{self._url}: it samples from weights {name!r}, which are of no step of this run")
        return int(name)

    def _end(self, reason: Any) -> PieceEnd | None:
        if reason is None:
            return None
        kind = reason.get("type") if isinstance(reason, dict) else None
        if kind not in list(PieceEnd):
            raise self._malformed(f"finish_reason {reason!r} is unknown")
        if kind == PieceEnd.ABORT and reason.get("status_code"):
            raise self._error({"message": reason.get("message"), "code": reason["status_code"]})
        return PieceEnd(kind)

    def _error(self, error: Any) -> ServerError:
        code = error.get("code") if isinstance(error, dict) else None
        text = error.get("message") if isinstance(error, dict) else error
        kind = RefusedError if isinstance(code, int) and 400 <= code < 500 and code not in (408, 429) else ServerError
        return kind(f"{self._url}/generate: {' '.join(str(text).split())}")

    def _malformed(self, what: str) -> ServerError:
        return ServerError(f"{self._url}/generate: the answer is malformed: {what}")


def _first_wrong(ids: list[Any], pairs: list[Any]) -> str:
    """Return a line about the first id whose log-prob is not one of it."""
    for token, pair in zip(ids, pairs, strict=True):
        value = pair[0] if isinstance(pair, list) and len(pair) > 1 and pair[1] == token else None
        if type(token) is not int or not isinstance(value, float | int) or not math.isfinite(value):
            return f"id {token} came with the log-prob {pair}"
    return "its log-probs are out of range"
