"""Where rows come from: files, a folder of them, a dataset of the hub, or a Python function. One reader for all.

Nothing is read before a split is asked for. What is held out never stands in `train`.
"""

import glob
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentrl.data.change import Change
from agentrl.data.files import WANTED, file_type, read_files, stem
from agentrl.data.rows import Chosen, Listed, Row, Rows
from agentrl.errors import UserError, contained, describe, nearest
from agentrl.plugins.registry import load_path
from agentrl.remote import fetched, is_remote

_log = logging.getLogger("agentrl.data")

HELD_OUT_SHARE = 0.1
"""Of rows that come without a held-out split of their own."""

_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
_WORD = r"(?<![a-zA-Z]){}(?![a-zA-Z])"  # `test` in `gsm8k_test-2`, not in `latest`
_SHARD = re.compile(r"-\d+(-of-\d+)?$")

Names = str | Sequence[str]


class _Origin(Protocol):
    """splits: the held-out ones that it has by itself. `read` raises UserError for a part that it does not have."""

    @property
    def splits(self) -> tuple[str, ...]: ...

    def read(self, part: str) -> Rows: ...


def open_source(
    source: Names | None,
    *,
    splits: Mapping[str, Names] | None = None,
    config: str | None = None,
    seed: int = 0,
    key: Callable[[Row, str], str] | None = None,
    change: Change | None = None,
) -> "Source":
    """Find out what a source is, without reading it. Raises UserError where it is nothing.

    source: a file (or several, or a glob), a folder with a file a split, a URL of such (s3://, gs://, https://), a hub
    name (`org/name`, `org/name:config`), or a function `module:function` that is called with the split and returns its
    rows.
    splits: for each split the files, or the name that the source has for it (`train[:90%]` on the hub).
    config: of a hub dataset. seed, key: of the tenth that is held out where nothing else is; rows with the same key, a
    text made from a row and its place, stand on the same side.
    """
    origin = _open(source, config)
    return Source(
        origin, _named(splits, source) if splits is not None else None, seed, key or _whole, change or Change()
    )


@dataclass
class Source:
    """splits: the held-out ones, in their order; `rows` knows `train` besides."""

    origin: _Origin
    """What is read."""
    named: Mapping[str, "str | _Files"] | None
    """By split what the recipe names for it: files, or the origin's own name; None where it names nothing."""
    seed: int
    """Seed of what is held out."""
    key: Callable[[Row, str], str]
    """From a row and its place to a text; rows with the same text stand on the same side."""
    change: Change
    """Maps and filters of the rows."""
    _read: dict[str, Rows] = field(default_factory=dict)

    @property
    def splits(self) -> tuple[str, ...]:
        """The held-out splits, in their order."""
        if self.named is not None:
            return tuple(name for name in self.named if name != "train")
        return self.origin.splits or ("test",)

    def rows(self, split: str) -> Rows:
        """The rows of a split. Raises UserError: a split that is not there, or data that cannot be read."""
        if split not in self._read:
            self._read |= self._load(split)
        return self._read[split]

    def _load(self, split: str) -> dict[str, Rows]:
        if self.named is not None:
            if split not in self.named:
                if split == "train" and isinstance(self.origin, _Files):
                    return {split: self.change.apply(self.origin.read(split), split)}
                raise UserError(f"env.args.splits names no split {split!r}{nearest(split, self.named)}")
            part = self.named[split]
            rows = self.origin.read(part) if isinstance(part, str) else part.read(split)
            return {split: self.change.apply(rows, split)}
        if split not in ("train", *self.splits):
            raise UserError(f"env.source has no split {split!r}{nearest(split, ('train', *self.splits))}")
        if self.origin.splits:
            return {split: self.change.apply(self.origin.read(split), split)}
        return self._hold_out(self.change.apply(self.origin.read("train"), "the data"))

    def _hold_out(self, rows: Rows) -> dict[str, Rows]:
        """A seeded tenth, by the key, so that the same question never stands on both sides."""
        out = [self._is_held_out(rows.row(i), rows.where(i)) for i in range(len(rows))]
        train, test = ([i for i, held in enumerate(out) if held is wanted] for wanted in (False, True))
        if not train or not test:
            different = len({self.key(rows.row(i), rows.where(i)) for i in range(len(rows))})
            alike = f" with {different} different prompt{'s' * (different > 1)}" if different < len(rows) else ""
            raise UserError(
                f"{self.origin}: {len(rows)} rows{alike} are too few to hold some out; put a test file beside it"
            )
        _log.warning(
            "%s has no test file beside it: %d of its %d rows are held out (seed %d) and not trained on",
            *(self.origin, len(test), len(rows), self.seed),
        )
        return {"train": Chosen(rows, train), "test": Chosen(rows, test)}

    def _is_held_out(self, row: Row, where: str) -> bool:
        digest = hashlib.sha256(f"{self.seed}/{self.key(row, where)}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def _whole(row: Row, where: str) -> str:
    return json.dumps(row, sort_keys=True, default=str)


@dataclass(frozen=True)
class _Files:
    """Files by split; `train` alone where nobody said what is held out."""

    what: str
    files: Mapping[str, Sequence[Path]]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(name for name in self.files if name != "train")

    def read(self, part: str) -> Rows:
        if part in self.files:
            return read_files(self.files[part])
        if part == "train":
            only = "is a test file with no train file beside it" if len(self.files) == 1 else "holds no train file"
            raise UserError(f"env.source: {self.what} {only}: nothing to train on")
        raise UserError(f"env.source: {self.what} has no file for {part!r}{nearest(part, self.files)}")

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class _Hub:
    name: str
    config: str | None
    splits: tuple[str, ...] = ("test",)

    def read(self, part: str) -> Rows:
        from datasets import load_dataset

        try:
            data = load_dataset(self.name, self.config, split=part)
        except (OSError, ValueError) as error:
            what = " ".join(str(error).split())
            named = f"{self.name} (config {self.config}, split {part})"
            raise UserError(f"env.source: {named} cannot be loaded from the hub: {what}") from error
        return _some(Listed(data, f"{self.name} {part}"))


@dataclass(frozen=True)
class _Function:
    path: str
    splits: tuple[str, ...] = ("test",)

    def read(self, part: str) -> Rows:
        what = f"{self.path}({part!r})"
        function = load_path(self.path, "env.source")
        try:
            made = function(part)
            if isinstance(made, str | bytes | Mapping) or not (isinstance(made, Iterable) or _is_sequence(made)):
                raise UserError(f"env.source: {what} returned {made!r:.60}; expected a sequence or an iterable of rows")
            rows = Listed(made if _is_sequence(made) else list(made), what)
        except UserError:
            raise
        except BaseException as error:  # the boundary: a user's function may raise anything
            raise UserError(f"env.source: {what} raised: {describe(contained(error), place=False)}") from error
        return _some(rows)


def _is_sequence(value: object) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _some(rows: Listed) -> Rows:
    if not len(rows):
        raise UserError(f"env.source: {rows.what} contains no row")
    return rows


def _open(source: Names | None, config: str | None) -> _Origin:
    if source is None:
        return _Files("", {})
    if not source:
        raise UserError(f"env.source: is empty; expected {WANTED}, a folder, a hub name, module:function")
    if not isinstance(source, str):
        return _grouped(", ".join(source), [path for one in source for path in _paths(one)])
    if is_remote(source):
        return _remote(source)
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    if path.is_file() or _is_glob(source) or file_type(path):
        paths = _paths(source)
        return _with_sibling(source, paths[0]) if len(paths) == 1 else _grouped(source, paths)
    if _FUNCTION.fullmatch(source):
        return _Function(source)
    name, _, named = source.partition(":")
    if not _HUB.fullmatch(name) or path.exists():
        raise UserError(
            f"env.source: there is no file {source}; expected {WANTED}, a folder, a hub name, or module:function"
        )
    return _Hub(name, named or config)


def _remote(url: str) -> "_Files":
    folder = fetched(url, "env.source")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if len(files) == 1 and file_type(files[0]) is None:
        raise UserError(f"env.source: {url} ends in {files[0].suffix!r}; expected {WANTED}")
    return _grouped(url, [path for path in files if file_type(path)]) if len(files) == 1 else _folder(folder)


def _is_glob(text: str) -> bool:
    """Whether a text is a glob; `train[:90%]` is none: it is a slice of a hub split."""
    return "*" in text or "?" in text or ("[" in text and file_type(Path(text)) is not None)


def _paths(text: str, folder: Path | None = None) -> list[Path]:
    """The files that a name, a glob or a URL stands for, sorted. Raises UserError where there is none."""
    if is_remote(text):
        return [path for paths in _remote(text).files.values() for path in paths]
    places = [text] if folder is None else [str(folder / text), text]
    for place in places:
        found = [place] if Path(place).is_file() else sorted(glob.glob(place, recursive=True))
        paths = [path for path in map(Path, found) if path.is_file()]
        for path in paths:
            if file_type(path) is None:
                raise UserError(f"env.source: {path} ends in {path.suffix!r}; expected {WANTED}")
        if paths:
            return paths
    raise UserError(f"env.source: there is no file {text}; expected {WANTED}")


def _folder(folder: Path) -> _Files:
    """A file a split, named by it, in any number of shards: `train.parquet`, `test-00000-of-00002.parquet`."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and file_type(path))
    if not paths:
        raise UserError(f"env.source: the folder {folder} contains no data file; expected {WANTED}")
    files: dict[str, list[Path]] = {}
    for path in paths:
        files.setdefault(_SHARD.sub("", stem(path)), []).append(path)
    if not {"train", *_HELD_OUT} & set(files):
        return _grouped(str(folder), paths)
    ordered = sorted(files, key=lambda name: (name != "train", name not in _HELD_OUT, name))
    return _Files(str(folder), {name: files[name] for name in ordered})


def _grouped(what: str, paths: Sequence[Path]) -> _Files:
    """Group several files: those that are called test (or the like) are held out."""
    files: dict[str, list[Path]] = {}
    for path in paths:
        files.setdefault(_split_of(path), []).append(path)
    return _Files(what, files)


def _split_of(path: Path) -> str:
    return next((word for word in _HELD_OUT if re.search(_WORD.format(word), stem(path))), "train")


def _with_sibling(what: str, path: Path) -> _Files:
    """A file, and `test.jsonl` for `train.jsonl` or the other way round, where that exists."""
    mine = _split_of(path)
    files = {mine: [path]}
    for ours, theirs in ((mine, "train"),) if mine != "train" else (("train", word) for word in _HELD_OUT):
        name, found = re.subn(_WORD.format(ours), theirs, stem(path))
        other = path.with_name(name + path.name[len(stem(path)) :])
        if found and other.is_file():
            files.setdefault(theirs, [other])
    return _Files(what, files)


def _named(splits: Mapping[str, Names], source: Names | None) -> dict[str, "str | _Files"]:
    """What `splits` says: files, or the source's own name for a split."""
    folder = Path(source) if isinstance(source, str) and Path(source).is_dir() else None
    found: dict[str, str | _Files] = {}
    for name, value in splits.items():
        values = [value] if isinstance(value, str) else list(value)
        if not values:
            raise UserError(f"env.args.splits.{name}: is empty")
        files = [v for v in values if file_type(Path(v)) or _is_glob(v)]
        if files and len(files) < len(values):
            raise UserError(f"env.args.splits.{name}: mixes files with names of splits: {', '.join(values)}")
        if files:
            found[name] = _Files(", ".join(files), {name: [path for v in files for path in _paths(v, folder)]})
        elif len(values) == 1:
            found[name] = values[0]
        else:
            raise UserError(f"env.args.splits.{name}: several names of splits; join them as the hub does: 'a+b'")
    return found
