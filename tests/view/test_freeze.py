"""`report.html`: what it holds, and how it holds what others wrote."""

import base64
import json
import re
from pathlib import Path

import pytest
from view_help import HOSTILE, embedded, group, journal, run_folder, trajectory
from vision_help import file_of, picture

from agentrl.view import freeze
from agentrl.view.assets import MODULES, page_file
from agentrl.view.freeze import EACH, bundle, write_report


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run_folder(tmp_path_factory.mktemp("view") / "run", tasks=40), "run <b>", {"a": (0.5, None)})


def test_it_holds_samples_of_all_splits_unsolved_ones_first(page: Path) -> None:
    data = embedded(page)
    (run,) = data["runs"]
    assert data["about"]["meanings"]["ranges"] == {"a": [0.5, None]}
    assert {file["name"] for file in run["state"]["files"]} == {
        "eval_test_0.parquet", "eval_test_2.parquet", "eval_large_0.parquet", "eval_large_2.parquet", "step_2.parquet",
    }  # fmt: skip
    large = run["index"]["eval_large_2.parquet"]
    assert (len(large["at"]), large["solved"].count(False)) == (EACH, EACH * 2 // 3)
    assert large["task"] == run["index"]["eval_large_0.parquet"]["task"]  # the same tasks before
    assert run["index"]["step_2.parquet"]["at"] == list(range(8))
    lost = run["index"]["eval_test_2.parquet"]
    assert "tool" in lost["boundary"]
    assert len(run["samples"]) == sum(len(facts["at"]) for facts in run["index"].values())
    sample = run["samples"]["step_2.parquet:1"]
    assert len(sample["pieces"]) == len(sample["ids"]) == len(sample["advantages"])
    assert [row["step"] for row in run["rows"]] == [0, 1, 2]
    assert len(run["evaluations"]) == 4


def test_what_others_wrote_cannot_leave_its_place(page: Path) -> None:
    text = page.read_text()
    assert "<img src=x" not in text
    assert text.count("<script") == text.count("</script") == 2
    assert "<title>run &lt;b&gt;</title>" in text
    said = [one["line"] for row in embedded(page)["runs"][0]["rows"] for one in row.get("health", ())]
    assert said == [HOSTILE]
    assert not re.search(r'(?:src|href)="(?!data:,)', text)  # nothing is loaded


def test_reasons_choose_the_samples_that_they_name(tmp_path: Path) -> None:
    def why(path: Path, first: Path | None, piece: object) -> dict[str, object]:
        task = f"{path.name.split('_')[1]}-39"
        return {"causes": [{"examples": [{"file": path.name, "task": task, "sample": 0}]}]}

    run = embedded(write_report(run_folder(tmp_path / "run", tasks=40), "run", why=why))["runs"][0]
    assert "large-39" in run["index"]["eval_large_2.parquet"]["task"]
    assert run["why"].keys() == {"eval_large_2.parquet", "eval_test_2.parquet", "step_2.parquet"}


@pytest.mark.slow
def test_it_does_not_grow_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run")
    rows = [{"step": step, "reward/mean": 0.5} for step in range(10_000)] + [{"step": 10_000, "eval/test/accuracy": 1}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = embedded(write_report(folder, "run"))["runs"][0]["rows"]
    assert len(kept) <= 2002
    assert kept[-1]["eval/test/accuracy"] == 1
    monkeypatch.setattr(freeze, "_TOKENS", 5000)
    monkeypatch.setattr(freeze, "_SAMPLES", 20_000)
    run = embedded(write_report(folder, "run"))["runs"][0]
    assert sum(len(json.dumps(sample)) for sample in run["samples"].values()) < 26_000
    assert len(run["samples"]) == sum(len(facts["at"]) for facts in run["index"].values())


def test_it_holds_a_picture_once_however_many_messages_show_it(tmp_path: Path) -> None:
    files = {f"{n:064x}": file_of(picture(n, 40, 30)) for n in (1, 2)}
    (tmp_path / "images").mkdir()
    for key, data in files.items():
        (tmp_path / "images" / f"{key}.png").write_bytes(data)
    parts = [{"type": "image", "image": key} for key in (*files, *files)]
    messages = tuple({"role": role, "content": parts} for role in ("user", "assistant", "tool", "assistant"))
    seen = [group(trajectory(f"t-{n}", messages=messages)) for n in range(3)]
    journal(tmp_path).evaluation("test", 0, seen, lambda t: True)
    page = write_report(tmp_path, "run")
    (run,) = embedded(page)["runs"]
    urls = {"data:image/png;base64," + base64.b64encode(data).decode() for data in files.values()}
    assert set(run["images"].values()) == urls
    assert all(page.read_text().count(url) == 1 for url in urls)
    assert len(run["samples"]) == 3
    for sample in run["samples"].values():
        for message in sample["told"][0]["messages"]:
            shown = [run["images"][part["image_url"]["kept"]] for part in message["content"]]
            assert shown == [*sorted(urls, key=list(run["images"].values()).index)] * 2


def test_damaged_files_and_a_run_that_had_just_begun_have_a_page_too(tmp_path: Path) -> None:
    assert embedded(write_report(tmp_path, "run"))["runs"][0]["rows"] == []
    journal(tmp_path).evaluation("test", 0, [group(trajectory("a"))], lambda t: True)
    (tmp_path / "trajectories" / "eval_other_0.parquet").write_bytes(b"damaged")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnothing\n{"st')
    (run,) = embedded(write_report(tmp_path, "run"))["runs"]
    assert "cannot be read" in run["index"]["eval_other_0.parquet"]["error"]
    assert run["index"]["eval_test_0.parquet"]["task"] == "a"
    assert (run["rows"], run["damaged"]) == ([{"step": 0}], 1)


def test_the_modules_are_all_there_in_order_and_build_no_markup_of_texts() -> None:
    known: set[str] = set()
    for name in MODULES:
        source = page_file(name).decode()
        assert set(re.findall(r'from "\./(\w+\.js)"', source)) <= known
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|srcdoc", source)
        known.add(name)
    assert not re.search(r"^\s*(import|export) ", bundle(), re.M)
