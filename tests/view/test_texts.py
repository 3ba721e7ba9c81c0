"""Searches in what was said, by texts that are kept."""

import os
from pathlib import Path

import pytest
from view_help import group, journal, trajectory, tree

from agentrl.view import texts
from agentrl.view.store import RunStore

SAID = ["Ärger", "plain words", "ARGER \U0001f600", 'quo"te\nline', "", "İstanbul"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run").mkdir()
    groups = [group(trajectory(f"t-{i}", said=said)) for i, said in enumerate(SAID)] + [group(tree("t-tree"))]
    journal(tmp_path / "run").step(1, groups, [])
    return RunStore(tmp_path / "run", "run")


def rows(store: RunStore, text: str) -> list[int]:
    return store.search(text, ["step_1.parquet"])["step_1.parquet"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("ärGER", [0]), ("words", [1]), ("\U0001f600", [2]), ('quo"te\nline', [3]), ("right", [6]), ("nowhere", []),
     ("what is t-", [0, 1, 2, 3, 4, 5]), ("w", [0, 1, 2, 3, 4, 5]), ("", [0, 1, 2, 3, 4, 5, 6]), ("\ud800", [])],
)  # fmt: skip
def test_a_text_is_found_with_and_without_what_is_kept(
    store: RunStore, text: str, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows(store, text) == found
    assert len(list(texts.cache_folder().iterdir())) == 1
    monkeypatch.setattr(texts, "_write", lambda place, path: pytest.fail("it is read again"))
    assert rows(store, text) == found
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert rows(store, text) == found


def test_what_changed_or_was_cut_is_read_again(store: RunStore) -> None:
    assert rows(store, "words") == [1]
    (kept,) = texts.cache_folder().iterdir()
    for damage in (b"", b"agentrl texts 1\n", b"other" * 100, kept.read_bytes()[:60]):
        kept.write_bytes(damage)
        assert rows(store, "words") == [1], damage
        assert rows(store, "words") == [1], damage
    journal(store.folder).step(1, [group(trajectory("new", said="other"))], [])
    assert rows(store, "words") == []
    assert rows(store, "other") == [0]


def test_texts_of_others_cannot_be_read_and_old_ones_go(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(store, "words")
    (kept,) = texts.cache_folder().iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    assert texts.cache_folder().stat().st_mode & 0o077 == 0
    os.utime(kept, (1, 1))
    monkeypatch.setattr(texts, "MOST", 0)
    journal(store.folder).step(2, [group(trajectory("new", said="other"))], [])
    assert store.search("other", ["step_2.parquet"]) == {"step_2.parquet": [0]}
    assert kept not in list(texts.cache_folder().iterdir())


def test_what_is_asked_for_next_is_read_ahead(store: RunStore) -> None:
    store.prepare(lambda: True)
    assert len(list(texts.cache_folder().iterdir())) == 1
    (store.folder / "trajectories" / "step_2.parquet").write_bytes(b"PAR1 no more")
    store.prepare(lambda: True)
    store.prepare(lambda: False)
