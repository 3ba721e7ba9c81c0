"""The body of a request to `/inference/v1/generate`, and how its answer is read.

That route, not `/v1/completions`: there each log-prob names its token, the last piece says which weights sampled which
tokens, and every parameter is the engine's own, none filled in from OpenAI's defaults or the model's generation config.
"""

import json
import math
from base64 import b64decode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.engine.base import Sampling
from agentrl.engine.servers.answer import INTERVAL, Answer, Features, PieceEnd
from agentrl.engine.servers.client import RefusedError, ServerError

PATH = "/inference/v1/generate"
MISSING = -9999.0
"""What the server says instead of a log-prob that is NaN, minus infinity, or not there."""
PREFIX = "generate-tokens-"
"""What the server puts before the id of a request."""


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

    At temperature 0 the server reports log-probs at temperature 1, as the contract says.
    """
    parameters: dict[str, Any] = {
        "max_tokens": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # of the model's own ids: those to stop at are given
        "detokenize": False,
        "logprobs": 0,
        "stream_interval": interval,
    }
    if features.seeds and sampling.seed is not None:
        parameters["seed"] = sampling.seed
    body = {"token_ids": list(ids), "sampling_params": parameters, "stream": True, "request_id": rid}
    return body if adapter is None else {**body, "model": adapter}


class VllmReader:
    """Reads one server's pieces of an answer into `answer`. url: names the server in errors. version: of the weights
    when the request starts; the last piece tells of each token. fixed: it is that of an adapter, which stays to the
    end, whatever version the server reports."""

    def __init__(self, answer: Answer, url: str, version: int, fixed: bool = False) -> None:
        self._answer, self._url, self._version, self._fixed = answer, url, version, fixed
        self._start, self._runs = len(answer.ids), len(answer.versions)
        self._told = fixed

    def add(self, payload: bytes) -> PieceEnd | None:
        """See `AnswerReader.add`."""
        try:
            piece = json.loads(payload)
        except ValueError as error:
            raise self._malformed("not JSON") from error
        if not isinstance(piece, dict):
            raise self._malformed("not a JSON object")
        if "error" in piece:
            raise self._error(piece["error"])
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
        self._answer.logprobs.extend(logprobs)
        self._answer.versions[self._runs :] = runs
        return end

    def _experts(self, told: Any) -> npt.NDArray[Any]:
        """Decode an `.npy` file [tokens, layers, experts a token]."""
        try:
            found: npt.NDArray[Any] = np.load(BytesIO(b64decode(told, validate=True)), allow_pickle=False)
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

    def _logprobs(self, ids: Sequence[int], given: Any) -> list[float]:
        content = given.get("content") if isinstance(given, dict) else None
        if not isinstance(content, list) or len(content) != len(ids):
            count = len(content) if isinstance(content, list) else "no"
            raise self._malformed(f"{len(ids)} ids came with {count} log-probs")
        found = []
        for token, entry in zip(ids, content, strict=True):
            value = entry.get("logprob") if isinstance(entry, dict) and entry.get("token_id") == token else None
            if type(token) is not int or not isinstance(value, float | int) or not math.isfinite(value):
                raise self._malformed(f"id {token} came with the log-prob {entry!r:.100}")
            if value <= MISSING:
                raise self._malformed(f"id {token} came without a log-prob: {value:g} is what vLLM says for none")
            found.append(float(value))
        return found

    def _runs_with(self, new: int, spans: Any) -> list[tuple[int, int]]:
        """Return the versions of all of this server's ids, with `new` more: by the last piece's spans, until then those
        of the start."""
        total = len(self._answer.ids) - self._start + new
        if self._fixed or not spans:
            return [(self._version, total)] if total else []
        covered, runs = 0, []
        for span in spans:
            if not isinstance(span, dict) or type(span.get("end")) is not int:
                raise self._malformed(f"its weight versions are {spans!r:.100}")
            if (end := min(span["end"], total)) > covered:
                runs.append((self._named(span.get("version")), end - covered))
                covered = end
        if covered != total:
            raise self._malformed(f"its weight versions cover {covered} of {total} ids")
        self._told = True
        return runs

    def _named(self, name: Any) -> int:
        if not str(name).isdecimal():
            raise ServerError(f"{self._url}: it samples from weights {name!r}, which are of no step of this run")
        return int(name)

    def _end(self, reason: Any) -> PieceEnd | None:
        if reason is None:
            return None
        if reason not in list(PieceEnd):
            raise self._malformed(f"finish_reason {reason!r} is unknown")
        return PieceEnd(reason)

    def _error(self, error: Any) -> ServerError:
        text: Mapping[str, Any] = error if isinstance(error, dict) else {"message": error}
        code = text.get("code")
        kind = RefusedError if isinstance(code, int) and 400 <= code < 500 and code not in (408, 429) else ServerError
        return kind(f"{self._url}{PATH}: {' '.join(str(text.get('message')).split())}")

    def _malformed(self, what: str) -> ServerError:
        return ServerError(f"{self._url}{PATH}: the answer is malformed: {what}")
