"""Notes and labels on stored samples, and what is learned from them."""

import json
import threading
from pathlib import Path

import pytest
from view_help import group, journal, run_folder, trajectory

from agentrl.cli.main import run
from agentrl.errors import UserError
from agentrl.eval import notes
from agentrl.eval.notes import Change, change_of, read_notes, write_change
from agentrl.fine_tuning.conversations import read_row
from agentrl.fine_tuning.pairs import PairReader
from agentrl.models import embedded_path
from agentrl.models.load import load_tokenizer
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.sft import RewardModelSection


def put(folder: Path, request: str, *labels: str, turn: int | None = None, file: str = "step_3.parquet") -> None:
    for label in labels:
        write_change(folder, Change("label", request, label, turn, file))


def test_two_writers_lose_nothing_and_a_line_that_was_cut_harms_none(tmp_path: Path) -> None:
    (tmp_path / notes.NOTES).write_text('{"kind": "label", "request": "cut')

    def write(name: str) -> None:
        for number in range(50):
            put(tmp_path, f"{name}{number}", "good")

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_notes(tmp_path)) == 100


def test_a_change_is_undone_by_a_later_one(tmp_path: Path) -> None:
    put(tmp_path, "a", "good", "odd")
    put(tmp_path, "a", "bad", turn=1)
    key = write_change(tmp_path, Change("note", "a", "why?\nhere", 1, by="me", at=7.0))
    write_change(tmp_path, Change("unlabel", "a", "odd"))
    one = read_notes(tmp_path)["a"]
    assert list(one.labels) == [("good", None), ("bad", 1)]
    assert (one.labelled("good"), one.labelled("bad"), one.turns("bad")) == (True, False, {1})
    assert one.notes[key].text == "why?\nhere"
    for change in (("unlabel", "good", None), ("unlabel", "bad", 1), ("forget", key, None)):
        write_change(tmp_path, Change(change[0], "a", change[1], change[2]))
    assert read_notes(tmp_path) == {}


@pytest.mark.parametrize(
    "change",
    [
        [], None, {}, {"kind": "label"}, {"kind": "drop", "request": "a", "value": "x"},
        {"kind": "label", "request": "", "value": "x"}, {"kind": "label", "request": "a", "value": "two words"},
        {"kind": "label", "request": "a", "value": "x" * 41}, {"kind": "label", "request": "a", "value": 3},
        {"kind": "note", "request": "a", "value": " "}, {"kind": "note", "request": "a", "value": "x" * 4001},
        {"kind": "note", "request": "a", "value": "x", "turn": True},
        {"kind": "note", "request": "a", "value": "x", "turn": -1},
        {"kind": "note", "request": "a" * 1001, "value": "x"},
    ],
)  # fmt: skip
def test_what_is_no_change_is_refused_and_passed_over_where_it_stands(tmp_path: Path, change: object) -> None:
    with pytest.raises(UserError):
        change_of(change)
    (tmp_path / notes.NOTES).write_text(json.dumps(change) + "\nNaN\n" + "[" * 5000 + "\n")
    assert read_notes(tmp_path) == {}


def test_it_is_bounded_and_writes_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_MOST_BYTES", 200)
    put(tmp_path, "a", "good")
    with pytest.raises(UserError, match="full"):
        put(tmp_path, "b", "good", "better")
    (tmp_path / notes.NOTES).unlink()
    (tmp_path / notes.NOTES).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be written"):
        put(tmp_path, "a", "good")
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_labelled_is_read_by_sft_and_by_the_reward_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path / "run")
    journal(folder).step(3, [group(*(trajectory("t", s, s % 2, said=f"#### {s}") for s in range(4)))])
    put(folder, "t#1", "good")
    put(folder, "t#1", "bad", turn=0)
    put(folder, "t#2", "bad")
    put(folder, "t#3", "bad", file="in_flight.jsonl")  # as it was when somebody read it
    put(folder, "test-tree#0", "good", file="eval_test_2.parquet")
    put(folder, "gone#7", "good")
    out = tmp_path / "out"
    assert run(["data", str(folder), "--out", str(out)]) == 0
    assert "agentrl sft RECIPE sft.source=" in capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "conversations.jsonl").read_text().splitlines()]
    talks = [read_row(row, "openai") for row in rows]
    answers = {talk.messages[-1]["content"]: talk for talk in talks}
    assert set(answers) == {"#### 1", "left", "right"}
    assert [tool["function"]["name"] for tool in answers["#### 1"].tools or ()] == ["calculator"]
    assert answers["#### 1"].flags == (None, False, None, None)  # its call is not learned
    reader = PairReader(load_tokenizer(ModelSection(path=str(embedded_path()))), 4096)
    pairs = reader.read(RewardModelSection(source=[str(out / "pairs.jsonl")]))
    assert len(pairs) == 2
    for wrong, said in (("good=great", "no sample has the label 'great'; known: bad, good"), ("god=x", "god: a run")):
        assert run(["data", str(folder), "--out", str(out), wrong]) == 2
        assert said in capsys.readouterr().err
