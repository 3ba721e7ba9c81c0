"""Which runs are found in folders, and what is said of each."""

import json
import os
from pathlib import Path

import pytest
from view_help import group, journal, run_folder, trajectory

from agentrl.errors import UserError
from agentrl.view import catalog
from agentrl.view.catalog import Catalog, names_of


def made(path: Path, *rows: dict[str, object], recipe: str = "train: {steps: 2, lr: 0.1, seed: 0}\n") -> Path:
    """A run's folder with these rows."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(recipe)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def listed(*named: Path) -> dict[str, dict[str, object]]:
    """Each run of a listing that is whole, by name."""
    found = Catalog(named).listing()
    assert found["reading"] == 0
    return {row["name"]: row for row in found["runs"]}


def test_runs_are_found_at_any_depth_with_their_evaluations(tmp_path: Path) -> None:
    made(tmp_path / "run-2")
    made(tmp_path / "run-10")
    made(tmp_path / "sweep" / "trials" / "0_seed_1")
    made(tmp_path / "run-2" / "evals" / "1_step_2")
    (tmp_path / "run-2" / "trajectories" / "recipe.yaml").parent.mkdir()
    (tmp_path / "run-2" / "trajectories" / "recipe.yaml").touch()  # no run lies within a folder of conversations
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "recipe.yaml").touch()
    found = Catalog([tmp_path])
    assert list(found.find()[0]) == ["sweep/trials/0_seed_1", "run-10", "run-2", "run-2/evals/1_step_2"]
    assert found.chosen() == []
    assert found.store("run-2/evals/1_step_2").folder == tmp_path / "run-2" / "evals" / "1_step_2"
    for name in ("", "..", "run-2/trajectories", str(tmp_path / "run-2")):
        with pytest.raises(UserError, match="no such run"):
            found.store(name)
    one = Catalog([tmp_path / "run-2"])
    assert (one.chosen(), list(one.find()[0])) == (["run-2"], ["run-2", "run-2/evals/1_step_2"])


def test_runs_come_and_go_while_the_page_is_open(tmp_path: Path) -> None:
    made(tmp_path / "a")
    found = Catalog([tmp_path])
    store = found.store("a")
    made(tmp_path / "b")
    assert found.store("b").folder == tmp_path / "b"
    assert found.store("a") is store
    for path in sorted((tmp_path / "a").iterdir()):
        path.unlink()
    assert list(found.find()[0]) == ["b"]
    assert found.stores(["a", "b"])[0] is None


def test_a_row_says_what_became_of_a_run(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "eval/test/accuracy": 0.2},
        {"step": 1, "reward/mean": 0.5, "rollout/tokens": 10, "time/step_s": 1.5, "eval/test/accuracy": 0.6},
        {"step": 2, "reward/mean": 0.25, "rollout/tokens": 10, "time/step_s": 1.5, "eval/test/accuracy": 0.4,
         "eval/test/accuracy_low": 0.3, "eval/test/accuracy_high": 0.5, "eval/test/reward/mean": 0.7,
         "eval/test/reward_low": 0.6, "eval/test/reward_high": 0.8, "health": [{"name": "reward_falls"}]},
    ]  # fmt: skip
    made(tmp_path / "finished", *rows)
    made(tmp_path / "stopped", rows[0], recipe="train: {steps: 2, lr: 0.2, seed: 0}\n")
    (made(tmp_path / "running", rows[0]) / ".lock").write_text(f"process {os.getpid()} on {os.uname().nodename}")
    (made(tmp_path / "killed", rows[0]) / ".lock").write_text(f"process 999999999 on {os.uname().nodename}")
    (made(tmp_path / "failed", rows[0]) / "error.log").write_text("Traceback")
    made(tmp_path / "not begun")
    (tmp_path / "not begun" / "metrics.jsonl").unlink()
    found = listed(tmp_path)
    for name, row in found.items():
        assert row["state"] == name
    row = found["finished"]
    assert (row["step"], row["steps"], row["tokens"], row["seconds"]) == (2, 2, 20, 3.0)
    assert row["health"] == ["reward_falls"]
    assert row["figures"]["eval/test/accuracy"] == {
        "first": 0.2, "best": 0.6, "best_step": 1, "last": 0.4, "step": 2, "low": 0.3, "high": 0.5,
    }  # fmt: skip
    reward = row["figures"]["eval/test/reward/mean"]
    assert (reward["last"], reward["low"], reward["high"]) == (0.7, 0.6, 0.8)
    assert row["recipe"] == {"train.lr": "0.1"}  # alone what differs
    assert found["stopped"]["recipe"] == {"train.lr": "0.2"}


def test_an_evaluation_has_figures_before_and_after_it_ends(tmp_path: Path) -> None:
    folder = made(tmp_path / "run" / "evals" / "1_best")
    (folder / "metrics.jsonl").unlink()
    groups = [group(trajectory(f"test-{i}", reward=float(i % 2))) for i in range(4)]
    journal(folder).evaluation("test", 0, groups, lambda t: t.reward > 0)
    row = listed(tmp_path)["run/evals/1_best"]
    assert (row["kind"], row["state"], row["figures"]["eval/test/accuracy"]["last"]) == ("evaluation", "stopped", 0.5)
    assert row["figures"]["eval/test/reward/mean"]["low"] < 0.5 < row["figures"]["eval/test/reward/mean"]["high"]
    split = {"accuracy": 0.75, "low": 0.5, "high": 0.9, "reward": 1.5, "reward_low": 1.25, "reward_high": 1.75}
    over = {"model": "m", "splits": {"test": split, "odd": 1}}
    (folder / "evaluation.json").write_text(json.dumps(over))
    row = listed(tmp_path)["run/evals/1_best"]
    assert (row["state"], row["model"], row["figures"]["eval/test/accuracy"]["low"]) == ("finished", "m", 0.5)
    reward = row["figures"]["eval/test/reward/mean"]
    assert (reward["last"], reward["low"], reward["high"]) == (1.5, 1.25, 1.75)


def test_rows_go_on_where_they_ended(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", {"step": 1, "reward/mean": 1.0, "rollout/tokens": 5})
    found = Catalog([tmp_path])
    assert found.listing()["runs"][0]["tokens"] == 5
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 0.5, "rollout/tokens": 5}\n{"step": 3, "rew')
    row = found.listing()["runs"][0]
    assert (row["step"], row["tokens"], row["figures"]["reward/mean"]["last"]) == (2, 10, 0.5)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").write_text('{"step": 1, "rollout/tokens": 1}\n')  # resumed
    row = found.listing()["runs"][0]
    assert (row["step"], row["tokens"]) == (1, 1)


BROKEN = {
    "recipe.yaml": (b"\xff\xfe", b"[1, 2", b"a: &a [*a]", b"", b"[]", b"train: {steps: [1]}", b"train: 5"),
    "metrics.jsonl": (
        b"\x00" * 100, b'{"step": "x"}\n', b'{"step": 1, "health": 5, "time/step_s": "a", "eval/t/accuracy": []}\n'
    ),
    "evaluation.json": (b"[", b"[]", b'{"splits": []}', b'{"splits": {"a": {"accuracy": "x"}}, "model": [1]}'),
    ".lock": (b"\xff", b"process x"),
    "code.jsonl": (b"\xff", b"[]", b'{"a": []}'),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_a_line_and_the_others_are_listed(name: str, tmp_path: Path) -> None:
    made(tmp_path / "good", {"step": 2})
    for number, data in enumerate(BROKEN[name]):
        (made(tmp_path / f"bad-{number}", {"step": 0}) / name).write_bytes(data)
    (made(tmp_path / "a folder") / name).unlink(missing_ok=True)
    (tmp_path / "a folder" / name).mkdir()
    found = listed(tmp_path)
    assert found["good"]["state"] == "finished"
    assert len(found) == len(BROKEN[name]) + 2
    json.dumps(found, allow_nan=False)
    if name == "metrics.jsonl":
        assert "1 damaged line is left out" in found["bad-1"]["error"]
        assert "cannot be read" in found["a folder"]["error"]


def test_an_answer_is_bounded_and_the_next_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        made(tmp_path / f"run-{number}", {"step": 1})
    monkeypatch.setattr(catalog, "PATIENCE", 0.0)
    found = Catalog([tmp_path])
    assert found.listing()["reading"] == 5
    monkeypatch.setattr(catalog, "PATIENCE", 60.0)
    assert found.listing()["reading"] == 0
    monkeypatch.setattr(catalog, "MOST", 3)
    listing = Catalog([tmp_path]).listing()
    assert (len(listing["runs"]), listing["notes"]) == (3, ["more than 3 runs: name a folder of fewer"])


def test_names_tell_folders_apart_and_can_be_sent(tmp_path: Path) -> None:
    assert names_of([Path("/a/x"), Path("/b/y")]) == ["x", "y"]
    assert names_of([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]
    assert names_of([Path("/a/x"), Path("/a/x")]) == ["x (1)", "x (2)"]
    for name in (b"a\nb", b"a\tb", b"\xff"):
        made(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)), {"step": 1})
    names = list(Catalog([tmp_path]).find()[0])
    assert sorted(names) == ["?", "a?b", "a?b (2)"]


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, said in (("gone", "no such folder"), ("", "neither a run folder"), ("file", "not a folder")):
        with pytest.raises(UserError, match=said):
            Catalog([tmp_path / folder]).check()
    Catalog([tmp_path]).check(wait=True)
    soon = Catalog([tmp_path / "soon"])
    soon.check(wait=True)
    assert soon.chosen() == ["soon"]
    assert soon.store("soon").state()["files"] == []
    assert listed(tmp_path / "soon")["soon"]["state"] == "not begun"
    run_folder(tmp_path / "soon")
    assert len(soon.store("soon").state()["files"]) == 6
