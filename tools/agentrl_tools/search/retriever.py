"""A retriever over HTTP, in the shape of Search-R1's: queries in, passages with their scores out.

POST {"queries": [...], "topk": 3, "return_scores": true}
-> {"result": [[{"document": {"contents": "\\"Title\\"\\ntext"}, "score": 1.5}, ...], ...]}

Its service is asked by a limited number of calls at once and a second, again after a failure, all within a deadline;
queries that come at the same time are answered together.
"""

import asyncio
import email.utils
import json
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast
from urllib.parse import urlsplit

from agentrl import InfrastructureError
from agentrl_tools.loops import PerLoop
from agentrl_tools.search.corpus import Document, from_contents
from agentrl_tools.search.index import Hit

Q = TypeVar("Q")
A = TypeVar("A")


class Batcher(Generic[Q, A]):
    """`answer` is given up to `size` questions, and is under way at most `concurrency` times. Belongs to one loop.

    A batch is what has come while all workers were busy: nobody waits for it to fill. Who is cancelled is left out.
    """

    def __init__(self, answer: Callable[[Sequence[Q]], Awaitable[Sequence[A]]], size: int, concurrency: int) -> None:
        self._answer, self._size, self._concurrency = answer, size, concurrency
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._workers: set[asyncio.Task[None]] = set()

    async def ask(self, question: Q) -> A:
        """Its answer. Raises what `answer` raised for its batch."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if len(self._workers) < self._concurrency:
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
        return await future

    async def close(self) -> None:
        """Stop what is under way."""
        for worker in set(self._workers):
            worker.cancel()
        if workers := set(self._workers):
            await asyncio.wait(workers)

    async def _work(self) -> None:
        try:
            await self._work_off()
        finally:  # at once, so that whoever asks next does not count on a worker that goes home
            self._workers.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _work_off(self) -> None:
        while batch := self._take():
            futures = [future for _, future in batch]
            try:
                answers = await self._answer([question for question, _ in batch])
                for future, answer in zip(futures, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
            except asyncio.CancelledError:
                for future in futures:
                    future.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - it belongs to those who asked
                for future in futures:
                    if not future.done():
                        future.set_exception(error)

    def _take(self) -> list[tuple[Q, "asyncio.Future[A]"]]:
        batch: list[tuple[Q, asyncio.Future[A]]] = []
        while self._waiting and len(batch) < self._size:
            question, future = self._waiting.popleft()
            if not future.done():
                batch.append((question, future))
        return batch


T = TypeVar("T")

_FIRST, _LONGEST = 0.25, 8.0  # seconds of back-off after the first failure, and at most


class TryAgainError(Exception):
    """The service failed in a way that may pass. after: seconds that it asks us to wait, if it says."""

    def __init__(self, what: str, after: float | None = None) -> None:
        super().__init__(what)
        self.after = after


class GaveUpError(Exception):
    """It failed for good; the text says how often and of what."""


class Pace:
    """At most `rate` beginnings a second, evenly apart; None: no limit. Belongs to one event loop."""

    def __init__(self, rate: float | None) -> None:
        self._apart = 1.0 / rate if rate else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Wait for a turn, so that calls stand apart."""
        if not self._apart:
            return
        now = time.monotonic()
        mine = max(now, self._next)
        self._next = mine + self._apart
        if mine > now:
            await asyncio.sleep(mine - now)


async def persist(work: Callable[[float], Awaitable[T]], retries: int, deadline: float) -> T:
    """The result of `work(seconds left)`, tried again after a TryAgainError with exponential back-off and
    jitter.

    deadline: on the clock of time.monotonic(). Raises GaveUpError after `retries` further attempts or when the next
    one would come too late; what else the work raises, it raises.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await asyncio.wait_for(work(deadline - time.monotonic()), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise GaveUpError(f"no answer before the deadline, in attempt {attempt}") from None
        except TryAgainError as error:
            pause = error.after if error.after is not None else _backoff(attempt)
            if attempt > retries:
                raise GaveUpError(f"{error} (attempt {attempt} of {retries + 1})") from error
            if time.monotonic() + pause >= deadline:
                raise GaveUpError(f"{error} (attempt {attempt}; no time is left for another)") from error
            await asyncio.sleep(pause)


def _backoff(attempt: int) -> float:
    """Seconds to wait: half of it fixed, half of it random, so that those who failed together do not come back
    together."""
    most = min(_LONGEST, _FIRST * 2.0 ** (attempt - 1))
    return most * (0.5 + 0.5 * random.random())


_LARGEST = 32 << 20  # bytes of an answer
_SLACK = 0.25  # seconds by which whoever waits is more patient than the attempts, which know what went wrong
_PASSING = frozenset({408, 425, 429})  # refusals that may pass, besides 5xx


class Retriever:
    """Asked by thousands of requests at once, over one pool of connections an event loop.

    timeout: seconds an attempt. deadline: seconds a question, with its retries and its waiting for a turn.
    """

    def __init__(
        self,
        url: str,
        topk: int,
        *,
        timeout: float,
        deadline: float,
        retries: int,
        concurrency: int,
        rate: float | None,
        batch: int,
        headers: Mapping[str, str],
    ) -> None:
        self._url, self._topk, self._headers = url, topk, dict(headers)
        self._name = f"retriever {_without_password(url)}"
        self._timeout, self._deadline, self._retries = timeout, deadline, retries
        self._concurrency, self._rate, self._batch = concurrency, rate, batch
        self._lines: PerLoop[_Line] = PerLoop(self._open)

    async def search(self, query: str, before: float) -> list[Hit]:
        """The passages of a query. before: on the clock of time.monotonic().

        Raises InfrastructureError when the retriever does not answer, refuses, or answers what cannot be read.
        """
        for line in self._lines.orphans():
            await line.session.close()
        line = self._lines.here()
        when = min(before, time.monotonic() + self._deadline)
        try:
            async with asyncio.timeout(max(0.0, when - time.monotonic()) + _SLACK):
                return await line.batcher.ask(query)
        except TimeoutError:
            raise InfrastructureError(f"{self._name}: no answer within {self._deadline:g} s") from None

    async def close(self) -> None:
        """Close the connection of the running loop."""
        if line := self._lines.take():
            await line.batcher.close()
            await line.session.close()

    def _open(self) -> "_Line":
        return _Line(self)

    async def ask(self, line: "_Line", queries: Sequence[str]) -> list[list[Hit]]:
        """Ask a question, with its retries."""
        try:
            return await persist(
                lambda left: self._post(line, queries, min(left, self._timeout)),
                self._retries,
                time.monotonic() + self._deadline,
            )
        except GaveUpError as error:
            raise InfrastructureError(f"{self._name}: {error}") from error

    async def _post(self, line: "_Line", queries: Sequence[str], seconds: float) -> list[list[Hit]]:
        import aiohttp

        await line.pace.turn()
        body = {"queries": list(queries), "topk": self._topk, "return_scores": True}
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with line.session.post(self._url, json=body, timeout=limit, headers=self._headers) as response:
                self._check_status(response.status, response.reason, response.headers)
                raw = await _bounded(response.content)
        except TimeoutError:
            raise TryAgainError(f"no answer within {seconds:.3g} s") from None
        except (aiohttp.InvalidURL, aiohttp.TooManyRedirects) as error:
            raise InfrastructureError(f"{self._name}: {type(error).__name__}: {error}; {_ARGUMENT}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TryAgainError(f"{type(error).__name__}: {error}") from error
        try:
            return read_answer(raw, len(queries))
        except ValueError as error:
            raise InfrastructureError(f"{self._name}: its answer cannot be read: {error}") from error

    def _check_status(self, status: int, reason: str | None, headers: Mapping[str, str]) -> None:
        if status == 200:
            return
        what = f"{status} {reason or ''}".strip()
        if status >= 500 or status in _PASSING:
            raise TryAgainError(f"it answers {what}", retry_after(headers.get("Retry-After")))
        raise InfrastructureError(f"{self._name}: it answers {what}; {_ARGUMENT}")


_ARGUMENT = "check the tool's arguments `url` and `headers`"


class _Line:
    """The pool of connections of one event loop."""

    def __init__(self, retriever: Retriever) -> None:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=retriever._concurrency)
        self.session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        self.pace = Pace(retriever._rate)

        async def answer(queries: Sequence[str]) -> list[list[Hit]]:
            return await retriever.ask(self, queries)

        self.batcher: Batcher[str, list[Hit]] = Batcher(answer, retriever._batch, retriever._concurrency)


async def _bounded(content: Any) -> bytes:
    """The body. Raises TryAgainError where it is cut off, InfrastructureError where it is too long."""
    raw = bytearray()
    async for chunk in content.iter_any():
        raw += chunk
        if len(raw) > _LARGEST:
            raise InfrastructureError(f"the retriever's answer is longer than {_LARGEST} bytes")
    return bytes(raw)


def read_answer(raw: bytes, queries: int) -> list[list[Hit]]:
    """Read the reply of a retriever. Raises ValueError: one line that says what is wrong with it."""
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error}): {raw[:60]!r}") from error
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or len(result) != queries:
        raise ValueError(f"expected {{'result': [one list for each of {queries} queries]}}, got {raw[:80]!r}")
    return [_hits(passages) for passages in result]


def _hits(passages: Any) -> list[Hit]:
    if not isinstance(passages, list):
        raise ValueError(f"expected a list of passages, got {passages!r:.60}")
    return [_hit(passage) for passage in passages]


def _hit(passage: object) -> Hit:
    """Read a passage: with a score, `{"document": {...}, "score": x}`; without, the document itself, as Search-R1
    answers then."""
    document = passage.get("document", passage) if isinstance(passage, dict) else None
    score = passage.get("score", 0.0) if isinstance(passage, dict) else None
    if not isinstance(document, dict) or not isinstance(score, int | float):
        raise ValueError(f"expected {{'document': {{...}}, 'score': number}}, got {passage!r:.80}")
    contents, title, text = (document.get(key) for key in ("contents", "title", "text"))
    if isinstance(text, str) and isinstance(title, str):
        return Hit(Document(title, text), float(score))
    if not isinstance(contents, str):
        raise ValueError(f"a document has no text in 'contents': {document!r:.80}")
    return Hit(from_contents(contents), float(score))


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def retry_after(value: str | None) -> float | None:
    """Seconds of a `Retry-After`, which is a number or a date; None where there is none that can be read."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
