"""A BM25 index over documents: built in memory, or once for a corpus on disk and then memory-mapped.

A cached index is published by one rename, so that a reader sees a whole one or none. What cannot be trusted (a file of
another size or sum than its manifest says) is built again.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

from agentrl.errors import UserError
from agentrl_tools.search.corpus import Document, corpus_files, read_corpus

_LINES, _STARTS = "documents.jsonl", "documents.npy"


class StoredDocuments(Sequence[Document]):
    """lines: the bytes of all documents, one after another; starts: where each begins, and the end of the last."""

    def __init__(self, lines: Any, starts: Any) -> None:
        self._lines, self._starts = lines, starts

    @classmethod
    def write(cls, folder: Path, documents: Sequence[Document]) -> None:
        """Write the documents and their offsets into `folder`."""
        import numpy

        starts = [0]
        with (folder / _LINES).open("wb") as file:
            for document in documents:
                starts.append(starts[-1] + file.write(json.dumps(document).encode() + b"\n"))
        numpy.save(folder / _STARTS, numpy.array(starts, dtype=numpy.int64))

    @classmethod
    def open(cls, folder: Path) -> "StoredDocuments":
        """Open documents. Raises ValueError or OSError for files that do not fit each other."""
        import numpy

        lines = numpy.memmap(folder / _LINES, dtype=numpy.uint8, mode="r")
        starts = numpy.load(folder / _STARTS, mmap_mode="r")
        if len(starts) < 2 or starts[-1] != len(lines):
            raise ValueError(f"{_LINES} and {_STARTS} do not fit each other")
        return cls(lines, starts)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at = index % len(self)
        return Document(*json.loads(self._lines[self._starts[at] : self._starts[at + 1]].tobytes()))


_FORMAT = 1  # of the cache; another number is another index
_SUMMED = 64 << 20  # bytes of a file up to which its checksum is compared
_STALE_SECONDS = 24 * 3600  # after which an unfinished build is nobody's any more
_MANIFEST = "manifest.json"
_log = logging.getLogger("agentrl.tools.search")


class Hit(NamedTuple):
    """A document that was found, and its score: higher is better."""

    document: Document
    score: float


class Settings(NamedTuple):
    """Of BM25 (Lucene's variant): k1 and b as in the literature; stopwords: English ones are left out."""

    k1: float = 0.9
    b: float = 0.4
    stopwords: bool = True


class Bm25Index:
    """Searched by any number of threads at once; nothing in it changes."""

    def __init__(self, documents: Sequence[Document], engine: Any, settings: Settings) -> None:
        self.documents = documents
        self._engine = engine
        self._settings = settings

    @classmethod
    def build(cls, documents: Sequence[Document], settings: Settings) -> "Bm25Index":
        """Build an index of documents in memory."""
        bm25s = _bm25s()
        engine = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene")
        texts = [f"{d.title} {d.text}" for d in documents]
        tokens = bm25s.tokenize(texts, token_pattern=_WORD, stopwords=_stopwords(settings), show_progress=False)
        engine.index(tokens, show_progress=False)
        return cls(documents, engine, settings)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """For each query its best documents, best first, without those that share no word with it."""
        words = _bm25s().tokenize(
            list(queries),
            token_pattern=_WORD,
            stopwords=_stopwords(self._settings),
            return_ids=False,
            show_progress=False,
        )
        return [self._best([w for w in said if w], k) for said in words]

    def _best(self, words: list[str], k: int) -> list[Hit]:
        """The best among those that share a word with the query: most documents do not."""
        import numpy

        if not words:
            return []
        scores = self._engine.get_scores(words)
        found = numpy.flatnonzero(scores > 0)
        if len(found) > k:
            found = numpy.sort(found[numpy.argpartition(-scores[found], k - 1)[:k]])
        ranked = found[numpy.argsort(-scores[found], kind="stable")]
        return [Hit(self.documents[int(i)], float(scores[i])) for i in ranked]

    def save(self, folder: Path) -> None:
        """Write it into an empty folder, its manifest last."""
        self._engine.save(folder, show_progress=False)
        StoredDocuments.write(folder, self.documents)
        files = {p.name: [p.stat().st_size, _sum(p)] for p in sorted(folder.iterdir())}
        (folder / _MANIFEST).write_text(json.dumps({"files": files, "documents": len(self.documents)}))

    @classmethod
    def load(cls, folder: Path, settings: Settings) -> "Bm25Index":
        """Load an index by mapping it into memory. Raises ValueError or OSError for one that is not whole."""
        manifest = json.loads((folder / _MANIFEST).read_text())
        for name, (size, total) in manifest["files"].items():
            if (folder / name).stat().st_size != size or _sum(folder / name) != total:
                raise ValueError(f"{name} is not as it was written")
        documents = StoredDocuments.open(folder)
        if len(documents) != manifest["documents"]:
            raise ValueError("documents are missing")
        return cls(documents, _bm25s().BM25.load(folder, mmap=True), settings)


def open_index(corpus: Path, settings: Settings, cache: Path | None) -> Bm25Index:
    """The index of a corpus on disk, from the cache where it is there and whole.

    cache: a folder; None: `agentrl/search` in the user's cache folder. Raises UserError for the corpus, and when the
    cache cannot be written.
    """
    files = corpus_files(corpus)
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "search"
    folder = root / _key(corpus, files, settings)
    if (folder / _MANIFEST).exists():
        try:
            return Bm25Index.load(folder, settings)
        except (ValueError, TypeError, KeyError, OSError) as error:
            _log.warning("search index %s is damaged (%s) and is built again", folder, error)
            _remove(folder)
    documents = read_corpus(files)
    started = time.monotonic()
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        index = _build_in(root, folder, documents, settings)
    except OSError as error:
        raise UserError(
            f"search index of {corpus}: cannot be written to {root}: {error.strerror or error}; "
            "name another folder as the argument `cache`"
        ) from error
    _log.info("indexed %d documents of %s in %.1f s", len(documents), corpus, time.monotonic() - started)
    return index


def _build_in(root: Path, folder: Path, documents: Sequence[Document], settings: Settings) -> Bm25Index:
    """Build aside, map what was written, then publish it. Where another process was faster, its index stays."""
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=root))
    try:
        Bm25Index.build(documents, settings).save(aside)
        index = Bm25Index.load(aside, settings)
        try:
            aside.rename(folder)
        except OSError:
            if not (folder / _MANIFEST).exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # what is mapped stays readable
    return index


def _remove(folder: Path) -> None:
    """Remove it in one step, so that nobody opens half of it."""
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
    try:
        folder.rename(aside / "damaged")
    except FileNotFoundError:
        pass  # another process was faster
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _remove_stale(root: Path) -> None:
    for path in root.glob("*.building-*"):
        try:
            old = time.time() - path.stat().st_mtime > _STALE_SECONDS
        except OSError:
            continue
        if old:
            shutil.rmtree(path, ignore_errors=True)


def _key(corpus: Path, files: Sequence[Path], settings: Settings) -> str:
    """A key made of what the corpus is (names, sizes, times of change) and how it is indexed."""
    stamps = [(str(p.relative_to(corpus.parent)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    what = [_FORMAT, _bm25s().__version__, str(corpus.resolve()), settings, stamps]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def _sum(path: Path) -> int:
    """A checksum, or 0 for a file that would take long."""
    return zlib.crc32(path.read_bytes()) if path.stat().st_size <= _SUMMED else 0


def _stopwords(settings: Settings) -> str | list[str]:
    return "en" if settings.stopwords else []


_WORD = r"(?u)\b\w+\b"


def _bm25s() -> Any:
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
    return bm25s
