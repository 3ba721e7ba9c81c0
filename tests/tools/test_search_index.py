"""`search` over a corpus on disk: what is read, what is refused, and the cache under damage, change and haste."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from agentrl_tools.search import Document, Search
from agentrl_tools.search import index as index_module
from agentrl_tools.search.index import Settings, StoredDocuments, open_index
from search_help import session

from agentrl import ArgumentError
from agentrl.errors import UserError
from agentrl.plugins.registry import make_tool
from agentrl.recipe.sections.env import ToolSection

DOCUMENTS = [
    {"id": "0", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "1", "contents": '"Rome"\nRome is the capital of Italy.'},
    {"id": "2", "text": "The moon is far away."},
]


def write(path: Path, rows=DOCUMENTS) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ask(tool: Search, query: str) -> str:
    async def once() -> str:
        return (await tool.execute(session(), query=query)).text

    return asyncio.run(once())


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def test_jsonl(tmp_path, cache):
    tool = Search(corpus=write(tmp_path / "c.jsonl"), cache=cache)
    assert ask(tool, "capital of France") == (
        "Doc 1(Title: Paris) Paris is the capital of France.\nDoc 2(Title: Rome) Rome is the capital of Italy."
    )
    assert ask(tool, "moon") == "Doc 1: The moon is far away."
    assert ask(tool, "xyzzy") == ask(tool, "the of") == ask(tool, "?!") == "nothing found"


def test_parquet_and_a_folder(tmp_path, cache):
    rows = [{"title": "Paris", "text": "Paris is in France."}, {"title": "", "text": "Rome is in Italy."}]
    assert ask(Search(corpus=write(tmp_path / "c.parquet", rows), cache=cache), "rome") == "Doc 1: Rome is in Italy."
    folder = tmp_path / "folder"
    write(folder / "deep" / "more.jsonl", [{"text": "Oslo is in Norway."}])
    (folder / "plain.txt").write_text("Bern is in Switzerland.")
    (folder / "page.md").write_text("# Wine\nRed or white.\n")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.txt").write_text("secret words")
    (folder / "picture.png").write_bytes(b"\xff")
    tool = Search(corpus=str(folder), cache=cache)
    assert ask(tool, "Bern") == "Doc 1(Title: plain) Bern is in Switzerland."
    assert ask(tool, "red wine") == "Doc 1(Title: Wine) Red or white."
    assert ask(tool, "oslo") == "Doc 1: Oslo is in Norway."
    assert ask(tool, "secret") == "nothing found"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("c.jsonl", b'{"text": "a"}\n\n{"text": ""}\n', r"c.jsonl, line 3, field 'text': expected text, got ''"),
        ("c.jsonl", b'{"text": "a"}\nnot json\n', r"c.jsonl, line 2: is not JSON"),
        ("c.jsonl", b'{"text": "a"}\n{"id": 3}\n', r"line 2: has neither the field 'text' nor 'contents'; it has 'id'"),
        ("c.jsonl", b"[1]\n", r"c.jsonl, line 1"),
        ("c.jsonl", b'{"text": 5}', r"expected text, got 5"),
        ("c.jsonl", b'{"text": "a", "title": 5}', r"field 'title': expected text, got 5"),
        ("c.jsonl", b"", r"c.jsonl: contains no row"),
        ("c.jsonl", b'{"text": "\xff"}', r"c.jsonl, line 1: is not UTF-8"),
        ("c.parquet", b"no parquet", r"c.parquet: cannot be read as parquet"),
        ("c.csv", b"a,b", r"c.csv: ends in '.csv'; expected a folder"),
        ("d/e.txt", b" ", r"e.txt: is empty"),
        ("d/e.txt", b"\xff", r"e.txt: is not UTF-8"),
        ("d/e.bin", b"x", r"d: the folder contains no such file"),
    ],
)
def test_a_bad_corpus_is_named(tmp_path, cache, name, content, what):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(UserError, match=what) as error:
        Search(corpus=str(path if path.parent == tmp_path else path.parent), cache=cache)
    assert "\n" not in str(error.value)


def test_a_corpus_that_is_not_there(tmp_path):
    section = ToolSection(name="search", args={"corpus": str(tmp_path / "none.jsonl")})
    with pytest.raises(UserError, match=r"none.jsonl: does not exist; expected a folder"):
        make_tool(section)


def test_the_index_is_built_once_and_again_when_something_changes(tmp_path, cache, monkeypatch):
    built = []
    build = index_module.Bm25Index.build.__func__
    monkeypatch.setattr(index_module.Bm25Index, "build", classmethod(lambda cls, *a: built.append(1) or build(cls, *a)))
    corpus = write(tmp_path / "c.jsonl")
    for _ in range(3):
        assert "Paris" in ask(Search(corpus=corpus, cache=cache), "France")
    assert len(built) == 1
    Search(corpus=corpus, cache=cache, b=0.75)
    assert len(built) == 2
    write(tmp_path / "c.jsonl", [*DOCUMENTS, {"text": "Lyon is in France."}])
    assert "Lyon" in ask(Search(corpus=corpus, cache=cache), "Lyon")
    assert len(built) == 3
    assert not list(Path(cache).glob("*.building-*"))


def _cached(cache: str) -> Path:
    (folder,) = (p for p in Path(cache).iterdir() if ".building-" not in p.name)
    return folder


@pytest.mark.parametrize("name", ["documents.jsonl", "documents.npy", "data.csc.index.npy", "vocab.index.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_cache_is_built_again(tmp_path, cache, name, damage, caplog):
    corpus = write(tmp_path / "c.jsonl")
    Search(corpus=corpus, cache=cache)
    path = _cached(cache) / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-3] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    assert "Paris" in ask(Search(corpus=corpus, cache=cache), "France")
    assert "is built again" in caplog.text
    caplog.clear()
    assert "Paris" in ask(Search(corpus=corpus, cache=cache), "France")
    assert not caplog.text


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"files": {"x": 3}}'])
def test_a_damaged_manifest(tmp_path, cache, content):
    corpus = write(tmp_path / "c.jsonl")
    Search(corpus=corpus, cache=cache)
    (_cached(cache) / "manifest.json").write_text(content)
    assert "Paris" in ask(Search(corpus=corpus, cache=cache), "France")
    assert len(list(Path(cache).iterdir())) == 1


def test_a_half_written_cache_is_not_used(tmp_path, cache):
    """A process that was killed before its rename leaves a folder that nobody reads."""
    corpus = write(tmp_path / "c.jsonl")
    Search(corpus=corpus, cache=cache)
    folder = _cached(cache)
    folder.rename(folder.with_name(folder.name + ".building-1"))
    assert "Paris" in ask(Search(corpus=corpus, cache=cache), "France")


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written to .*the argument `cache`"):
        Search(corpus=write(tmp_path / "c.jsonl"), cache=str(tmp_path / "file" / "cache"))


_BUILD = """
import sys
from pathlib import Path
from agentrl_tools.search.index import Settings, open_index
sys.stdin.readline()
index = open_index(Path(sys.argv[1]), Settings(), Path(sys.argv[2]))
print(index.search(["word7"], 1)[0][0].document.title)
"""


@pytest.mark.slow
def test_processes_that_build_at_the_same_time(tmp_path, cache):
    rows = [{"title": f"T{i}", "text": f"word{i} " * 5} for i in range(300)]
    corpus = write(tmp_path / "c.jsonl", rows)
    command = [sys.executable, "-c", _BUILD, corpus, cache]
    builders = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for builder in builders:
        builder.stdin.write("\n")
        builder.stdin.flush()
    assert [builder.communicate(timeout=60)[0].strip() for builder in builders] == ["T7"] * 3
    assert len(list(Path(cache).iterdir())) == 1


def test_an_index_in_use_outlives_its_cache(tmp_path, cache):
    corpus = write(tmp_path / "c.jsonl")
    index = open_index(Path(corpus), Settings(), Path(cache))
    index_module._remove(_cached(cache))
    assert index.search(["moon"], 1)[0][0].document.text == "The moon is far away."
    assert (len(index.documents), index.documents[-1].text) == (3, "The moon is far away.")
    with pytest.raises(IndexError):
        index.documents[3]
    assert [d.title for d in index.documents[:2]] == ["Paris", "Rome"]


def test_documents_and_their_places_must_fit(tmp_path):
    StoredDocuments.write(tmp_path, [Document("a", "b")])
    with (tmp_path / "documents.jsonl").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="do not fit"):
        StoredDocuments.open(tmp_path)


def test_searching_runs_in_a_thread_and_together(monkeypatch):
    tool = Search.over([Document(f"T{i}", f"word{i} all") for i in range(50)], topk=1)
    search, seen = tool._backend.index.search, []

    def watched(queries, k):
        seen.append((threading.current_thread() is threading.main_thread(), len(queries)))
        return search(queries, k)

    monkeypatch.setattr(tool._backend.index, "search", watched)

    async def many():
        texts = await asyncio.gather(*(_text(tool, f"word{i}") for i in range(50)))
        assert texts == [f"Doc 1(Title: T{i}) word{i} all" for i in range(50)]
        await tool.close()

    asyncio.run(many())
    asyncio.run(many())  # another loop, after a close
    assert not any(main for main, _ in seen)
    assert len(seen) < 100
    assert sum(size for _, size in seen) == 100


async def _text(tool: Search, query: str) -> str:
    return (await tool.execute(session(), query=query)).text


def test_what_is_shown_is_bounded(tmp_path, cache):
    corpus = write(tmp_path / "c.jsonl", [{"text": "long " * 10_000}])
    tool = Search(corpus=corpus, cache=cache, max_passage=20)
    assert ask(tool, "long") == "Doc 1: long long long long  ..."
    with pytest.raises(ArgumentError, match="at most 500"):
        ask(tool, "x" * 501)
    assert tool.look_up("long") == ask(tool, "long")
    with pytest.raises(TypeError):
        Search(url="http://127.0.0.1:9").look_up("x")
