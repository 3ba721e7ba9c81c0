"""One loader for all data: every kind of source, its splits, map and filter, and what is said of bad ones."""

import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from agentrl.data.change import Change
from agentrl.data.files import read_files, write_parquet
from agentrl.data.source import open_source
from agentrl.errors import UserError
from agentrl.models import embedded_path
from agentrl.models.load import resolve
from agentrl.recipe.sections.model import ModelSection
from agentrl.remote import fetched

ROWS = [{"prompt": f"question {n}", "answer": str(n), "deep": {"n": n, "tags": ["a", "b"]}} for n in range(40)]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".parquet":
        write_parquet(path, rows, lambda count: None)
    elif path.suffix == ".gz":
        with gzip.open(path, "wt") as stream:
            stream.write(lines if ".jsonl" in path.name else json.dumps(rows))
    else:
        path.write_text(json.dumps(rows, indent=1) if path.suffix == ".json" else lines)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz", "a.parquet"])
def test_every_type_reads_alike_and_at_random(tmp_path: Path, name: str) -> None:
    rows = read_files([write(tmp_path / name)])
    assert len(rows) == 40
    assert rows[7] == ROWS[7]
    assert rows[-1] == ROWS[-1]
    assert rows[3:5] == ROWS[3:5]
    assert list(rows) == ROWS
    place = "line 8" if "jsonl" in name else "row 8"
    assert rows.where(7) == f"{tmp_path / name}, {place}"
    with pytest.raises(IndexError):
        rows[40]


def test_lines_in_a_json_file_and_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\n{"a": 1}\n\n  \r\n{"a": 2}')
    rows = read_files([path])
    assert list(rows) == [{"a": 1}, {"a": 2}]
    assert [rows.where(i).rpartition(", ")[2] for i in range(2)] == ["line 2", "line 5"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl, line 2: is not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "a.jsonl, line 2: is not an object"),
        ("a.jsonl", b'{"a": 1}\n\xff\xfe\n', "a.jsonl, line 2: is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: is not JSON"),
        ("a.jsonl", b"\n \n", "contains no row"),
        ("a.jsonl", b"", "contains no row"),
        ("a.json", b"[1, 2", "a.json: is not JSON"),
        ("a.json", b"[]", "contains no row"),
        ("a.json", b'[{"a": 1}, 5]', "a.json, row 2: is not an object"),
        ("a.json", b'["\xff"]', "a.json: is not UTF-8"),
        ("a.jsonl.gz", b"no gzip", "cannot be read as gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:30], "cannot be read as gzip"),
        ("a.parquet", b"no parquet", "cannot be read as parquet"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(read_files([tmp_path / name]))
    assert message in str(caught.value)


def test_a_large_file_is_not_parsed_before_it_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' * 50_000 + "broken\n")
    rows = read_files([path])
    assert len(rows) == 50_001
    assert rows[49_999] == {"a": 1}
    with pytest.raises(UserError, match="line 50001"):
        rows[-1]


def test_a_folder_has_a_file_a_split_in_any_number_of_shards(tmp_path: Path) -> None:
    for part in range(2):
        write(tmp_path / f"train-0000{part}-of-00002.parquet", ROWS[part * 20 : part * 20 + 20])
    write(tmp_path / "validation.jsonl", ROWS[:3])
    write(tmp_path / "hard.jsonl", ROWS[3:4])
    (tmp_path / "README.md").write_text("about")
    source = open_source(str(tmp_path))
    assert source.splits == ("validation", "hard")
    assert list(source.rows("train")) == ROWS
    assert source.rows("train").where(20) == f"{tmp_path}/train-00001-of-00002.parquet, row 1"
    assert list(source.rows("hard")) == ROWS[3:4]
    with pytest.raises(UserError, match=r"has no split 'valid'; did you mean 'validation'"):
        source.rows("valid")


def test_several_files_a_glob_and_a_sibling(tmp_path: Path) -> None:
    write(tmp_path / "a_train.jsonl", ROWS[:10])
    write(tmp_path / "b_train.jsonl", ROWS[10:20])
    write(tmp_path / "a_test.jsonl", ROWS[20:22])
    for source in (
        str(tmp_path / "*.jsonl"),
        [str(tmp_path / n) for n in ("a_train.jsonl", "b_*.jsonl", "a_test.jsonl")],
    ):
        found = open_source(source)
        assert found.splits == ("test",)
        assert list(found.rows("train")) == ROWS[:20]
        assert list(found.rows("test")) == ROWS[20:22]
    sibling = open_source(str(tmp_path / "a_train.jsonl"))
    assert len(sibling.rows("train")) == 10
    assert len(sibling.rows("test")) == 2
    test = open_source(str(tmp_path / "a_test.jsonl"))
    assert len(test.rows("train")) == 10
    (tmp_path / "a_train.jsonl").unlink()
    with pytest.raises(UserError, match="is a test file with no train file beside it"):
        open_source(str(tmp_path / "a_test.jsonl")).rows("train")


def test_a_tenth_is_held_out_by_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(write(tmp_path / "latest.jsonl", ROWS * 10))  # which is no test file
    source = open_source(path, key=lambda row, where: row["prompt"])
    test, train = source.rows("test"), source.rows("train")
    assert len(test) + len(train) == 400
    assert 15 < len(test) < 80
    assert not {row["prompt"] for row in test} & {row["prompt"] for row in train}
    assert f"{len(test)} of its 400 rows are held out (seed 0)" in caplog.text
    assert test.where(0) == f"{path}, line {test.number(0) + 1}"
    again, other = (open_source(path, seed=seed, key=lambda row, where: row["prompt"]).rows("test") for seed in (0, 1))
    assert list(again) == list(test)
    assert list(other) != list(test)
    with pytest.raises(UserError, match="1 rows are too few to hold some out"):
        open_source(str(write(tmp_path / "one.jsonl", ROWS[:1]))).rows("train")
    with pytest.raises(UserError, match="40 rows with 1 different prompt are too few to hold some out"):
        open_source(str(write(tmp_path / "same.jsonl", ROWS[:1] * 40))).rows("train")


def test_splits_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS[:5])
    write(tmp_path / "b.jsonl", ROWS[5:6])
    source = open_source(str(tmp_path), splits={"train": ["a.jsonl", "b.jsonl"], "dev": "b.jsonl"})
    assert source.splits == ("dev",)
    assert list(source.rows("train")) == ROWS[:6]
    assert list(source.rows("dev")) == ROWS[5:6]
    alone = open_source(str(tmp_path / "a.jsonl"), splits={"dev": str(tmp_path / "b.jsonl")})
    assert list(alone.rows("train")) == ROWS[:5]
    nowhere = open_source(None, splits={"train": str(tmp_path / "*.jsonl")})
    assert nowhere.splits == ()
    assert len(nowhere.rows("train")) == 6
    with pytest.raises(UserError, match="names no split 'dve'; did you mean 'dev'"):
        source.rows("dve")
    with pytest.raises(UserError, match=r"there is no file c\.jsonl"):
        open_source(str(tmp_path), splits={"train": "c.jsonl"})
    with pytest.raises(UserError, match="mixes files with names of splits"):
        open_source(str(tmp_path), splits={"train": ["a.jsonl", "train"]})


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        if split == "train":
            raise ValueError("Unknown split")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source("org/name:main", splits={"train": "train", "test": "train[90%:]"}, change=Change(filter=EVEN))
    assert source.rows("test")[1] == ROWS[2]
    assert source.rows("test").where(1) == "org/name train[90%:], row 2"
    with pytest.raises(
        UserError, match=r"org/name \(config main, split train\) cannot be loaded from the hub: Unknown"
    ):
        source.rows("train")
    assert asked == [("org/name", "main", "train[90%:]"), ("org/name", "main", "train")]


EVEN, SHOUT = "data_functions:even", "data_functions:shout"


@pytest.mark.parametrize("name", ["rows", "stream"])
def test_a_function(name: str) -> None:
    source = open_source(f"data_functions:{name}")
    assert [row["prompt"] for row in source.rows("test")] == ["test 0", "test 1"]
    assert source.rows("train").where(4) == f"data_functions:{name}('train'), row 4"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data_functions:nothing", "returned None; expected a sequence"),
        ("data_functions:no_rows", "contains no row"),
        ("data_functions:even", "raised: TypeError"),
        ("data_functions:nix", "has no 'nix'"),
        ("no_module:nix", "cannot be imported from 'no_module'"),
        ("none.jsonl", "there is no file none.jsonl"),
        ("none/*.jsonl", "there is no file"),
        ("two words", "there is no file two words"),
        ("a/b/c", "there is no file"),
        ([], "env.source: is empty"),
        ("", "env.source: is empty"),
    ],
)
def test_a_source_that_is_nothing(source: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_source(source).rows("train")


def test_a_file_of_another_type_and_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"ends in '\.csv'; expected a \.jsonl or"):
        open_source(str(tmp_path / "a.csv"))
    with pytest.raises(UserError, match="contains no data file"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "workers"), [("a.jsonl", 1), ("a.parquet", 1), pytest.param("a.parquet", 2, marks=pytest.mark.slow)]
)
def test_map_and_filter(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, workers: int) -> None:
    path = write(tmp_path / name)
    source = open_source(None, splits={"train": str(path)}, change=Change(SHOUT, EVEN, workers))
    with caplog.at_level(logging.WARNING):
        rows = source.rows("train")
    assert "data_functions:even keeps 20 of the 40 rows of train" in caplog.text
    assert rows[3] == {**ROWS[6], "prompt": "QUESTION 6", "length": 10}
    assert rows.where(3).endswith(("line 7", "row 7"))
    assert rows.number(3) == 6
    longer = open_source(None, splits={"train": str(path)}, change=Change(SHOUT, "data_functions:long", workers))
    assert [row["answer"] for row in longer.rows("train")] == [str(n) for n in range(10, 40)]  # it sees what map made


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"map": "data_functions:broken"}, "map data_functions:broken raised at row 3 of train: ZeroDivisionError"),
        ({"map": "data_functions:text"}, "returned 'text' at row"),
        ({"filter": "data_functions:never"}, "keeps none of the 40 rows of train"),
        ({"filter": "data_functions:nix"}, "has no 'nix'"),
    ],
)
def test_a_map_or_filter_that_fails_is_named(
    tmp_path: Path, change: dict[str, str], message: str, workers: int
) -> None:
    path = str(write(tmp_path / "a.jsonl"))
    source = open_source(None, splits={"train": path}, change=Change(**change, workers=workers))
    with pytest.raises(UserError, match=message):
        source.rows("train")


def test_columns_of_several_types_cannot_be_mapped(tmp_path: Path) -> None:
    path = str(
        write(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": {"x": 1}, "more": 2}])
    )
    with pytest.raises(UserError, match="want columns of one type each"):
        open_source(None, splits={"train": path}, change=Change(SHOUT)).rows("train")


def test_parquet_is_whole_or_not_there(tmp_path: Path) -> None:
    def rows() -> Any:
        yield {"a": 1}
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        write_parquet(tmp_path / "a.parquet", rows(), lambda count: None)
    with pytest.raises(UserError, match="no row to write"):
        write_parquet(tmp_path / "a.parquet", [], lambda count: None)
    with pytest.raises(UserError, match="the rows make no table"):
        write_parquet(tmp_path / "a.parquet", [{"a": 1}, {"a": "b"}], lambda count: None)
    assert list(tmp_path.iterdir()) == []
    counts: list[int] = []
    write_parquet(tmp_path / "new" / "a.parquet", [{"a": n} for n in range(2500)], counts.append)
    assert counts == [1000, 1000, 500]
    assert read_files([tmp_path / "new" / "a.parquet"])[2499] == {"a": 2499}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store in memory, `memory://`, and an empty cache."""
    store = fsspec.filesystem("memory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched.cache_clear()
    yield store
    store.rm("/", recursive=True)
    fetched.cache_clear()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_rows_behind_a_url_are_copied_once_and_again_when_they_changed(bucket: Any, tmp_path: Path) -> None:
    bucket.pipe("/data/train.jsonl", lines(ROWS))
    bucket.pipe("/data/test.jsonl", lines(ROWS[:3]))
    bucket.pipe("/data/notes.txt", b"no data")
    for source in ("memory://data", "memory://data/*.jsonl"):
        found = open_source(source)
        assert found.splits == ("test",)
        assert (len(found.rows("train")), len(found.rows("test"))) == (40, 3)
    found = open_source(None, splits={"train": "memory://data/train.jsonl", "test": "memory://data/test.jsonl"})
    assert (len(found.rows("train")), len(found.rows("test"))) == (40, 3)
    folders = len(list((tmp_path / "cache").rglob("*.jsonl")))
    fetched.cache_clear()
    open_source("memory://data")
    assert len(list((tmp_path / "cache").rglob("*.jsonl"))) == folders
    bucket.pipe("/data/train.jsonl", lines(ROWS[:7]))
    fetched.cache_clear()
    assert len(open_source("memory://data").rows("train")) == 7


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("memory://data/none.jsonl", "env.source: memory://data/none.jsonl cannot be fetched: FileNotFoundError"),
        ("memory://data/*.parquet", "cannot be fetched: FileNotFoundError: there is no such file"),
        ("memory://data/notes.txt", "env.source: memory://data/notes.txt ends in '.txt'; expected a .jsonl"),
        ("nowhere://data", "nowhere://data cannot be fetched: ValueError: Protocol not known: nowhere"),
    ],
)
def test_a_url_without_data_is_one_line(bucket: Any, source: str, told: str) -> None:
    bucket.pipe("/data/notes.txt", b"no data")
    with pytest.raises(UserError, match=re.escape(told)):
        open_source(source).rows("train")


def test_a_model_behind_a_url_is_copied(bucket: Any) -> None:
    bucket.put(str(embedded_path()), "/models/tiny", recursive=True)
    section = ModelSection(path="memory://models/tiny")
    names = {path.name for path in Path(resolve(section.path)).iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    with pytest.raises(UserError, match=r"model\.path: memory://models/none cannot be fetched"):
        resolve("memory://models/none")
