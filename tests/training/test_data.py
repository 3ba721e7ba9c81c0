"""Rows of real data through whole runs: GSM8K's format, bad rows, prompts that do not fit."""

import importlib
import json
import logging
from pathlib import Path

import pytest
from paths import RECIPES
from train_help import metrics, records, small

import agentrl
from agentrl.cli import main
from agentrl.errors import UserError

RECIPE = str(RECIPES / "gsm8k_tool.yaml")
SMALL = [
    "rollout.tasks=2", "rollout.n=2", "rollout.max_turns=2", "train.steps=2", "train.threads=1", "train.save_every=0",
    "eval.tasks=3", "eval.every=0",
]  # fmt: skip

ROWS = [
    ("A shop sells 3 boxes of 12 pens for $1,200 — how much is a pen?", "3*12 = <<3*12=36>>36 pens.\n#### 33.33"),
    ("Zoë has 1,000 coins and spends 250. How many are left?", "1,000-250 = <<1000-250=750>>750\n#### 750"),
    ("Ben owes $5 and borrows $7 more. What does he own?", "He owns -(5+7) = <<-5-7=-12>>-12\n#### -12"),
    ("日本 trip: 4 days, 3 meals a day. Meals?", "4*3 = <<4*3=12>>12\n#### 12"),
    ("Half of 9 apples\n\nis how many?", "9/2 = <<9/2=4.5>>4.5\n#### 4.5"),
    ("Tom buys 2 pies at $3. <tool_call> What does he pay?", "2*3 = $<<2*3=6>>6\n#### $6"),
]


def write(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows), encoding="utf-8")
    return path


@pytest.mark.slow
def test_real_rows_go_through_training_and_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", ROWS[::-1])
    run = tmp_path / "run"
    assert main.run(["train", RECIPE, f"env.source={source}", f"output={run}", *SMALL]) == 0
    assert [row["step"] for row in metrics(run)] == [0, 1, 2]
    played = [t for step in (1, 2) for t in records(run, f"step_{step}")]
    asked = {t["messages"][1]["content"] for t in played}
    assert asked <= {question for question, _ in ROWS}  # a tag in a question stays text, and nothing is cut
    assert all(t["messages"][0]["role"] == "system" and t["failure"] is None for t in played)

    found = tmp_path / "found.json"
    code = main.run(
        ["eval", RECIPE, f"env.source={tmp_path / 'test.jsonl'}", "--model", str(run / "checkpoints" / "step_2"),
         "--json", str(found), "--no-keep", *SMALL]
    )  # fmt: skip
    assert code == 0
    result = json.loads(found.read_text())["splits"]["test"]
    assert (result["tasks"], result["samples"], result["failed"]) == (3, 3, 0)
    assert result["accuracy"] == metrics(run)[2]["eval/test/accuracy"]


BAD_ROWS = [
    ('{"answer": "#### 3"}', "line 3: has no field 'question'"),
    ('{"question": " ", "answer": "#### 3"}', "line 3, field 'question': expected text"),
    ('{"question": "How many?", "answer": "three"}', "line 3, field 'answer'"),
    ('{"question": "How many?", "answer": "#### 3"', "line 3: is not JSON"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_bad_row_is_one_line_before_the_model_is_loaded(
    command: str,
    row: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(section: object) -> None:
        raise AssertionError("a model is loaded before the rows are read")

    monkeypatch.setattr(importlib.import_module("agentrl.rollout.player"), "load_model", load)
    monkeypatch.chdir(tmp_path)
    source, held_out = write(tmp_path / "train.jsonl", ROWS), write(tmp_path / "test.jsonl", ROWS)
    read = source if command == "train" else held_out  # an evaluation has no use for the rows to train on
    good = read.read_text(encoding="utf-8").splitlines()
    read.write_text("\n".join([*good[:2], row, *good[2:]]) + "\n", encoding="utf-8")
    assert main.run([command, RECIPE, f"env.source={source}", *SMALL]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{read}, {words}" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_test_file_alone_can_be_evaluated_but_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "test.jsonl", ROWS)
    assert main.run(["train", RECIPE, f"env.source={source}", *SMALL]) == 2
    assert "nothing to train on" in capsys.readouterr().err
    assert main.run(["eval", RECIPE, f"env.source={source}", "eval.tasks=1", "--no-keep"]) == 0


@pytest.mark.slow
def test_prompts_that_do_not_fit_are_counted_said_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small(tmp_path / "run", env__name="train_plugins:LongPrompts", eval__tasks=6)
    agentrl.train(recipe)
    said = capsys.readouterr().out
    assert "2 of 6 test prompts are longer than the 255 tokens that fit (longest: " in said
    assert " training prompts are longer than the 255 tokens that fit" in said
    assert said.count("): left out") == 2
    played = [t for step in (1, 2, 3) for t in records(tmp_path / "run", f"step_{step}")]
    assert len(played) == 24
    assert all(int(t["task"].removeprefix("train-")) % 3 for t in played)
    assert all(t["tokens"]["prompt"] <= 255 and t["failure"] is None for t in played)
    assert len(records(tmp_path / "run", "eval_test_0")) == 4


@pytest.mark.slow
def test_a_curriculum_leaves_out_a_prompt_that_does_not_fit_as_it_draws_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = small(
        tmp_path / "run", env__name="train_plugins:LongPrompts", data={"order": "curriculum"}, eval__splits=[]
    )
    agentrl.train(recipe)
    played = [t for step in (1, 2, 3) for t in records(tmp_path / "run", f"step_{step}")]
    assert len(played) == 24
    assert all(t["tokens"]["prompt"] <= 255 and t["failure"] is None for t in played)
    assert " is left out: its prompt has " in caplog.text


@pytest.mark.slow
def test_when_no_prompt_fits_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"4 of 4 test prompts .* none is left; raise rollout.max_tokens"):
        agentrl.train(small(tmp_path / "run", env__name="train_plugins:TooLong"))
    with pytest.raises(UserError, match=r"training prompts are longer .* none is left"):
        agentrl.train(small(tmp_path / "run", env__name="train_plugins:TooLong", eval__splits=[]))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_is_held_out_of_a_file_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(tmp_path / "problems.jsonl", [(f"What is {i} plus 1?", f"#### {i + 1}") for i in range(40)])
    with caplog.at_level(logging.WARNING):
        agentrl.train(small(tmp_path / "run", env__source=str(source), train__steps=0))
    assert "of its 40 rows are held out" in caplog.text
