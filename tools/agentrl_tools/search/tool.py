"""The tool `search`: passages for a query, from a corpus indexed here or from a retriever over HTTP."""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from agentrl import ArgumentError, Session, Tool, ToolResponse
from agentrl.errors import UserError
from agentrl.plugins.types import Json
from agentrl_tools.loops import PerLoop
from agentrl_tools.search.corpus import Document
from agentrl_tools.search.index import Bm25Index, Hit, Settings, open_index
from agentrl_tools.search.retriever import Batcher, Retriever

_BATCH = 64  # queries that one thread answers before it is asked for its results
NOTHING = "nothing found"


class Backend(Protocol):
    """Finds passages. before: on the clock of time.monotonic()."""

    async def search(self, query: str, before: float) -> list[Hit]:
        """The passages for a query, the best first. Raises InfrastructureError."""

    async def close(self) -> None:
        """Release connections and threads."""


class Search(Tool):
    """corpus: a folder of .txt or .md files, or a .jsonl or .parquet file with the fields `title` and `text`, or
    `contents` as in Search-R1; indexed with BM25 once and kept in `cache`. url: of a Search-R1 style retriever instead.

    topk: passages a query. max_query: characters of a query. max_passage: characters of a passage that are shown.
    k1, b, stopwords: of BM25. cache: a folder; None: in the user's cache folder.
    timeout: seconds an attempt over HTTP; deadline: seconds a query with its retries, to be kept below
    `rollout.tool_timeout`; retries: further attempts; concurrency: questions under way at once (over HTTP, or threads
    of the index); rate: questions a second; batch: queries in one question; headers: of the HTTP request.
    """

    name = "search"
    description = "Searches for passages."
    parameters = {  # noqa: RUF012 - shared and never changed
        "type": "object",
        "properties": {"query": {"type": "string", "description": "what to look for"}},
        "required": ["query"],
    }

    def __init__(
        self,
        corpus: str | None = None,
        url: str | None = None,
        topk: int = 3,
        max_query: int = 500,
        max_passage: int = 2000,
        k1: float = 0.9,
        b: float = 0.4,
        stopwords: bool = True,
        cache: str | None = None,
        timeout: float = 10.0,
        deadline: float = 25.0,
        retries: int = 4,
        concurrency: int | None = None,
        rate: float | None = None,
        batch: int = 1,
        headers: dict[str, str] | None = None,
    ) -> None:
        least = {"topk": topk, "max_query": max_query, "max_passage": max_passage, "batch": batch}
        _positive(**least, timeout=timeout, deadline=deadline, concurrency=concurrency, rate=rate)
        if retries < 0:
            raise ValueError("retries must be 0 or more")
        if (corpus is None) == (url is None):
            raise UserError("tool 'search': give one of the arguments `corpus` (a file or folder) and `url`")
        self._limit, self._max_passage = max_query, max_passage
        if url is not None:
            if not url.startswith(("http://", "https://")):
                raise UserError(f"tool 'search': url {url!r} does not begin with http:// or https://")
            self._backend: Backend = Retriever(
                url, topk, timeout=timeout, deadline=deadline, retries=retries, concurrency=concurrency or 64,
                rate=rate, batch=batch, headers=headers or {},
            )  # fmt: skip
        else:
            index = open_index(Path(corpus or ""), Settings(k1, b, stopwords), Path(cache) if cache else None)
            self._backend = _Local(index, topk, concurrency or 2)

    @classmethod
    def over(cls, documents: Sequence[Document], topk: int = 3, max_query: int = 500) -> "Search":
        """A tool over documents that are at hand, indexed in memory."""
        made = cls.__new__(cls)
        made._limit, made._max_passage = max_query, 2000
        made._backend = _Local(Bm25Index.build(documents, Settings()), topk, 1)
        return made

    def look_up(self, query: str) -> str:
        """What the model would read, at once. Raises TypeError where there is no index here."""
        if not isinstance(self._backend, _Local):
            raise TypeError("a retriever over HTTP is asked with `execute`")
        return self.shown(self._backend.index.search([query], self._backend.topk)[0])

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        query = arguments["query"].strip()
        if not query:
            raise ArgumentError("the query is empty")
        if len(query) > self._limit:
            raise ArgumentError(f"the query has {len(query)} characters, at most {self._limit} are allowed")
        hits = await self._backend.search(query, session.deadline)
        return ToolResponse(self.shown(hits), metrics={"found": float(len(hits))})

    def shown(self, hits: Sequence[Hit]) -> str:
        """The passages as the model reads them, numbered as in Search-R1."""
        if not hits:
            return NOTHING
        return "\n".join(f"Doc {i}{self._passage(hit.document)}" for i, hit in enumerate(hits, 1))

    async def close(self) -> None:
        await self._backend.close()

    def _passage(self, document: Document) -> str:
        text = document.text
        text = text if len(text) <= self._max_passage else text[: self._max_passage] + " ..."
        return f"(Title: {document.title}) {text}" if document.title else f": {text}"


class _Local:
    """An index, searched in threads, so that the event loop goes on."""

    def __init__(self, index: Bm25Index, topk: int, threads: int) -> None:
        self.index, self.topk, self._threads = index, topk, threads
        self._pool: ThreadPoolExecutor | None = None
        self._batchers: PerLoop[Batcher[str, list[Hit]]] = PerLoop(lambda: Batcher(self._answer, _BATCH, threads))

    async def search(self, query: str, before: float) -> list[Hit]:
        self._batchers.orphans()
        return await self._batchers.here().ask(query)

    async def close(self) -> None:
        if batcher := self._batchers.take():
            await batcher.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    async def _answer(self, queries: Sequence[str]) -> list[list[Hit]]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="search")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self.index.search, queries, self.topk)


def _positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be more than 0")
