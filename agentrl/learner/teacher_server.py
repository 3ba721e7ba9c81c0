"""`TeacherServer`: a teacher behind HTTP that gives log-probs of the tokens of a prompt.

SGLang's `/generate`, vLLM's `/v1/completions` with `prompt_logprobs`, and completions with `echo` and `logprobs`, as
the legacy OpenAI API has them, all take token ids. Before the first question a probe shows whether the server means
the same texts by the ids.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentrl.compute.batch import Array, Batch
from agentrl.engine.servers.client import Client, RefusedError, ServerError, Sessions
from agentrl.errors import UserError
from agentrl.plugins.types import Json
from agentrl.recipe.sections.algorithm import TeacherSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Floats = npt.NDArray[np.float32]
PROBE = "The café's 12 owners: don't {x} == [3.5, -7]\n\tElephants jump."
"""A text that tokenizers cut and number differently."""
PAUSE = 0.5
"""Seconds before the first further attempt; twice as long before each next one."""
LEAST = -1e4
"""Log-prob of a token that a server gives no probability."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server says of the last tokens of a prompt."""

    ids: Sequence[int]
    """The tokens that it read, from `first` on; empty where it does not repeat them."""
    texts: Sequence[str | None]
    """Their texts; empty where it was not asked, or does not give them."""
    logprobs: Sequence[float | None]
    """Their log-probs; None for the first token of a prompt."""
    top: Sequence[Mapping[int, float]]
    """The likeliest tokens at each, where they were asked for."""


class TeacherServer:
    """Asks the server of `section`. tokenizer: the policy's."""

    def __init__(self, section: TeacherSection, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not section.served:
            raise ValueError("the teacher is not a server")
        key = None
        if section.key_from is not None and not (key := os.environ.get(section.key_from)):
            raise UserError(f"teacher.key_from: the environment variable {section.key_from} is not set")
        self.section, self._tokenizer, self._sessions = section, tokenizer, Sessions(key)
        self._client = Client(section.path.rstrip("/").removesuffix("/v1"), self._sessions)
        self._kind: str = "" if section.kind == "auto" else section.kind
        self._model = section.model
        self._checked = False

    def columns(self, batch: Batch) -> Batch:
        """See `TeacherRole.columns`. Raises UserError: the server fails at all attempts; it has another tokenizer."""
        return asyncio.run(self._columns(batch))

    def check(self) -> None:
        """Ask the server a probe. Raises UserError as `columns` does."""
        asyncio.run(self._columns(None))

    async def _columns(self, batch: Batch | None) -> Batch:
        k = self.section.top_k if self.section.compared == "top_k" else 0
        try:
            if not self._checked:
                await self._check()
            if batch is None:
                return Batch(np.zeros(1, np.int64), {}, {})
            gate = asyncio.Semaphore(self.section.concurrency)
            samples = np.flatnonzero(batch.sampled > 0).tolist()
            answers = await asyncio.gather(*(self._sample(batch, sample, k, gate) for sample in samples))
        except ServerError as error:
            raise UserError(f"teacher: {error}") from error
        finally:
            await self._sessions.close()
        size = int(batch.offsets[-1])
        columns: dict[str, Array] = {"teacher_logprobs": np.zeros(size, np.float32)}
        if k:
            columns |= {
                "teacher_ids": np.zeros((size, k), np.int64), "teacher_top": np.full((size, k), -np.inf, np.float32)
            }  # fmt: skip
        for sample, answer in zip(samples, answers, strict=True):
            for name, column in answer.items():
                at = batch.offsets[sample] + np.flatnonzero(batch.tokens["loss_mask"][batch.span(sample)])
                columns[name][at] = column
        return Batch(batch.offsets, columns, {})

    async def _sample(self, batch: Batch, sample: int, k: int, gate: asyncio.Semaphore) -> dict[str, Array]:
        """The columns of the sampled tokens of one sample."""
        span = batch.span(sample)
        ids, places = batch.tokens["ids"][span].tolist(), np.flatnonzero(batch.tokens["loss_mask"][span])
        first = max(0, int(places[0]) - 1)
        async with gate:
            reading = await self._ask(ids, first, k)
        chosen = [reading.logprobs[place - first] for place in places.tolist()]
        if None in chosen:
            raise RefusedError(f"{self.section.path}: it gives no log-prob of some tokens of a prompt of {len(ids)}")
        found: dict[str, Array] = {"teacher_logprobs": np.maximum(np.array(chosen, np.float32), LEAST)}
        if k:
            likeliest = [_first(reading.top[place - first], k) for place in places.tolist()]
            found["teacher_ids"] = np.array([ids for ids, _ in likeliest], np.int64)
            found["teacher_top"] = np.array([logprobs for _, logprobs in likeliest], np.float32)
        return found

    async def _check(self) -> None:
        """Find out what the server speaks, and compare its tokens with the policy's. Raises ServerError, UserError."""
        if not self._kind:
            self._kind = await self._found_kind()
        if self._model is None and self._kind != "sglang":
            listed = await self._client.get("/v1/models", timeout=self.section.timeout)
            self._model = str(listed["data"][0]["id"])
        ids = self._tokenizer.encode(PROBE, add_special_tokens=False)
        try:
            reading = await self._ask(ids, 0, 1 if self._kind == "vllm" else 0, texts=True)
        except RefusedError as error:
            raise UserError(f"teacher: it does not take the policy's tokens: {error}") from error
        pieces = zip(ids, reading.texts, strict=False)
        theirs = [(index, text) for index, text in pieces if text is not None]
        wrong = [(index, text) for index, text in theirs if not _means(text, str(self._tokenizer.decode([index])))]
        if wrong:
            index, text = wrong[0]
            raise UserError(
                f"teacher: {self.section.path} has another tokenizer: token {index} is {text!r} there and "
                f"{self._tokenizer.decode([index])!r} here; choose a teacher of the same family"
            )
        if not theirs:
            raise UserError(
                f"teacher: {self.section.path} does not say what its tokens mean, so its tokenizer cannot be compared"
            )
        self._checked = True

    async def _found_kind(self) -> str:
        for path, kind in (("/get_model_info", "sglang"), ("/version", "vllm")):
            try:
                await self._client.get(path, timeout=self.section.timeout)
                return kind
            except RefusedError:
                continue
        return "openai"

    async def _ask(self, ids: Sequence[int], first: int, k: int, texts: bool = False) -> Reading:
        """Ask about ids[first:]. Raises ServerError after the last attempt."""
        path, body = self._question(ids, first, k, texts)
        for attempt in range(self.section.retries + 1):
            try:
                answer = await self._client.post(path, body, timeout=self.section.timeout)
                return self._read(answer, ids, first)
            except RefusedError:
                raise
            except ServerError as error:
                if attempt == self.section.retries:
                    raise ServerError(f"{error} ({attempt + 1} attempts)") from error
            await asyncio.sleep(PAUSE * 2**attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _question(self, ids: Sequence[int], first: int, k: int, texts: bool) -> tuple[str, dict[str, Json]]:
        if self._kind == "sglang":
            body: dict[str, Json] = {
                "input_ids": list(ids), "return_logprob": True, "logprob_start_len": first, "top_logprobs_num": k,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_text_in_logprobs": texts,
            }  # fmt: skip
            return "/generate", body
        body = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        own = {"prompt_logprobs": k} if self._kind == "vllm" else {"echo": True, "logprobs": k or 1}
        return "/v1/completions", {**body, **own}

    def _read(self, answer: Any, ids: Sequence[int], first: int) -> Reading:
        """What an answer says of ids[first:]. Raises RefusedError: it is not what was asked for."""
        try:
            read = {"sglang": _of_sglang, "vllm": _of_vllm, "openai": _of_openai}[self._kind]
            reading = read(answer, ids, first)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise RefusedError(
                f"{self.section.path}: its answer holds no log-probs of the prompt ({type(error).__name__}: {error}); "
                "teacher.kind says what it speaks"
            ) from error
        wanted = list(ids[first:])
        if len(reading.logprobs) != len(wanted) or (reading.ids and list(reading.ids) != wanted):
            raise RefusedError(
                f"{self.section.path}: it gives log-probs of {len(reading.logprobs)} tokens, and was asked about "
                f"{len(wanted)} of the prompt"
            )
        return reading


def _of_sglang(answer: Any, ids: Sequence[int], first: int) -> Reading:
    meta = answer["meta_info"]
    entries = meta["input_token_logprobs"]
    likeliest = meta.get("input_top_logprobs") or []
    return Reading(
        ids=[entry[1] for entry in entries],
        texts=[entry[2] for entry in entries],
        logprobs=[entry[0] for entry in entries],
        top=[{entry[1]: entry[0] for entry in each or ()} for each in likeliest],
    )


def _of_vllm(answer: Any, ids: Sequence[int], first: int) -> Reading:
    entries = answer["choices"][0]["prompt_logprobs"]
    if len(entries) != len(ids):
        raise ValueError(f"{len(entries)} entries for {len(ids)} tokens")
    logprobs: list[float | None] = []
    texts: list[str | None] = []
    for index, entry in zip(ids[first:], entries[first:], strict=True):
        own = None if entry is None else entry[str(index)]
        logprobs.append(None if own is None else own["logprob"])
        texts.append(None if own is None else own.get("decoded_token"))
    top = [{int(index): found["logprob"] for index, found in (entry or {}).items()} for entry in entries[first:]]
    return Reading((), texts, logprobs, top)


def _of_openai(answer: Any, ids: Sequence[int], first: int) -> Reading:
    found = answer["choices"][0]["logprobs"]
    echoed = slice(first, len(ids))
    if answer.get("usage") and answer["usage"]["prompt_tokens"] != len(ids):
        raise ValueError(f"{answer['usage']['prompt_tokens']} tokens where {len(ids)} were sent")
    return Reading((), found["tokens"][echoed], found["token_logprobs"][echoed], ())


def _first(top: Mapping[int, float], k: int) -> tuple[list[int], list[float]]:
    """The k likeliest tokens; where there are fewer, others with -inf, which are none."""
    best = sorted(top.items(), key=lambda pair: -pair[1])[:k]
    lacking = k - len(best)
    return [index for index, _ in best] + [0] * lacking, [value for _, value in best] + [-np.inf] * lacking


def _means(theirs: str, ours: str) -> bool:
    """Whether two tokenizers may mean the same token: pieces of a character are written in several ways, and so
    is a space at the beginning."""
    marks = ("\ufffd", "bytes:", "<0x")
    if any(mark in text for mark in marks for text in (theirs, ours)):
        return True
    return theirs.replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n").strip(" ") == ours.strip(" ")
