"""Documents from disk, checked: a folder of text files, or jsonl or parquet rows. A bad row is named, never skipped."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from agentrl.data.files import WANTED, file_type, read_files
from agentrl.errors import UserError
from agentrl.plugins.types import Json

TEXT_TYPES = (".txt", ".md")
_WANTS = f"expected a folder of .txt or .md files, or {WANTED}"


class Document(NamedTuple):
    """A document of a corpus."""

    title: str
    """The title; may be empty."""
    text: str
    """The text."""


def corpus_files(corpus: Path) -> list[Path]:
    """The files that a corpus is made of, in order. Raises UserError when it is none."""
    if corpus.is_file():
        if file_type(corpus) is None:
            raise UserError(f"search corpus {corpus}: ends in {corpus.suffix!r}; {_WANTS}")
        return [corpus]
    if not corpus.exists():
        raise UserError(f"search corpus {corpus}: does not exist; {_WANTS}")
    found = (p for p in corpus.rglob("*") if p.suffix in TEXT_TYPES or file_type(p) is not None)
    files = sorted(p for p in found if p.is_file() and not _hidden(p, corpus))
    if not files:
        raise UserError(f"search corpus {corpus}: the folder contains no such file; {_WANTS}")
    return files


def read_corpus(files: Iterable[Path]) -> list[Document]:
    """All documents of the files. Raises UserError with file, line (or row) and field."""
    documents = [d for path in files for d in (_text_file(path) if path.suffix in TEXT_TYPES else _rows(path))]
    if not documents:
        raise UserError(f"search corpus {', '.join(map(str, files))}: contains no document")
    return documents


def from_contents(contents: str) -> Document:
    """A document in Search-R1's shape: the title, often in quotes, on the first line of its `contents`."""
    title, newline, text = contents.partition("\n")
    return Document(title.strip().strip('"'), text.strip()) if newline else Document("", contents.strip())


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _text_file(path: Path) -> Iterator[Document]:
    """Yield one document a file; a heading on the first line of Markdown is its title, else the file's name."""
    text = _read(path).strip()
    if not text:
        raise UserError(f"{path}: is empty")
    first, _, rest = text.partition("\n")
    if path.suffix == ".md" and first.startswith("# ") and rest.strip():
        yield Document(first[2:].strip(), rest.strip())
    else:
        yield Document(path.stem, text)


def _rows(path: Path) -> Iterator[Document]:
    rows = read_files([path])
    for index in range(len(rows)):
        yield _document(rows.row(index), rows.where(index))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _document(row: Mapping[str, Json], where: str) -> Document:
    """Read a document: fields `title` (may be missing) and `text`, or `contents`; others are left alone."""
    field = "text" if "text" in row else "contents"
    if field not in row:
        has = ", ".join(map(repr, row)) or "none"
        raise UserError(f"{where}: has neither the field 'text' nor 'contents'; it has {has:.200}")
    value, title = row[field], row.get("title")
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}, field {field!r}: expected text, got {value!r:.60}")
    if title is not None and not isinstance(title, str):
        raise UserError(f"{where}, field 'title': expected text, got {title!r:.60}")
    return from_contents(value) if field == "contents" and not title else Document((title or "").strip(), value.strip())
