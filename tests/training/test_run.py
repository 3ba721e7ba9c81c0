"""Whole runs with real parts: what `train` leaves behind, and what it refuses before it loads a model."""

import importlib
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT
from train_help import lines, metrics, records, small, steady
from train_plugins import Absent, Refusing
from view_help import embedded

import agentrl
from agentrl.checkpoint.checkpoints import Saved
from agentrl.checkpoint.run_folder import FolderLock
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.eval.result import Accuracy
from agentrl.models.load import resolve_types
from agentrl.recipe.schema import Recipe
from agentrl.rollout.trajectory_file import read_records
from agentrl.training.loop import Loop
from agentrl.training.run import TrainResult, _best_checkpoint, resume_run
from agentrl.training.trackers import Trackers

RECIPE = str(ROOT / "recipes" / "gsm8k_tool.yaml")

EVERY_STEP = {
    "step", "reward/mean", "reward/answer", "reward/noise", "rollout/tokens", "rollout/turns_mean",
    "tool/calculator/calls", "tool/calculator/errors", "tool/calculator/seconds",
    "stop/stop", "stop/length", "stop/max_turns", "stop/max_tool_calls", "stop/timeout", "stop/env_done",
    "stop/aborted", "stop/error",
    "train/loss", "train/grad_norm", "train/kl", "train/entropy", "mismatch/logprob_mean", "mismatch/logprob_max",
    "time/step_s", "time/rollout_s", "time/train_s", "time/sync_s", "rollout/tokens_per_s", "train/tokens_per_s",
}  # fmt: skip
"""The keys that DESIGN and README name, for this environment and this tool."""


HELD_OUT = (
    "accuracy", "accuracy_low", "accuracy_high", "reward/answer", "reward/noise", "reward/mean",
    "reward/std", "reward/min", "reward/max", "reward_low", "reward_high", "turns", "response_tokens",
    "tool_calls", "tool_errors", "failed",
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("whole") / "run"
    return small(folder, algorithm={"kl_coef": 0.01}, track__trackers=["train_plugins:Book"])


@pytest.fixture(scope="module")
def result(recipe: Recipe) -> TrainResult:
    return agentrl.train(recipe)


@pytest.mark.slow
def test_the_recipe_in_the_folder_loads_to_an_equal_one(recipe: Recipe, result: TrainResult) -> None:
    assert Recipe.load(str(result.folder / "recipe.yaml")) == resolve_types(recipe)


@pytest.mark.slow
def test_metrics_hold_the_named_keys_and_one_row_a_step(result: TrainResult) -> None:
    rows = metrics(result.folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert set(rows[0]) == {"step", "time/spans", *(f"eval/test/{name}" for name in HELD_OUT)}
    assert rows[0]["eval/test/accuracy_low"] <= rows[0]["eval/test/accuracy"] <= rows[0]["eval/test/accuracy_high"]
    for row in rows[1:]:
        assert set(row) >= EVERY_STEP
        spans = {name: (start, end) for name, start, end in row["time/spans"]}
        assert spans["rollout"][1] <= spans["update"][0] <= spans["update"][1] <= spans["sync"][0]
    assert rows[0]["eval/test/accuracy"] == result.before["test"]
    assert rows[3]["eval/test/accuracy"] == result.after["test"]
    assert "eval/test/accuracy" not in rows[1]


@pytest.mark.slow
def test_metrics_agree_with_each_other_and_with_the_trajectories(result: TrainResult) -> None:
    for row in metrics(result.folder)[1:]:
        played = records(result.folder, f"step_{row['step']}")
        assert len(played) == 8
        assert sum(row[f"stop/{t}"] for t in ("stop", "length", "max_turns", "max_tool_calls")) == 8
        assert row["reward/mean"] == pytest.approx(sum(t["reward"] for t in played) / 8)
        assert row["rollout/tokens"] == sum(t["tokens"]["sampled"] for t in played)
        assert {(t["step"], t["split"], t["environment"], t["left_out"]) for t in played} == {
            (row["step"], "train", "gsm8k", None)
        }
        assert [(t["group"], t["sample"]) for t in played] == [(group, n) for group in (0, 1) for n in range(4)]
        assert len({t["seed"] for t in played}) == 8
        assert row["groups/varied"] == 2
        calls = [u for t in played for u in t["tool_uses"] if u["name"] == "calculator"]
        assert row["tool/calculator/calls"] == len(calls) > 0
        assert row["mismatch/logprob_max"] < 1e-3  # the trainer and the engine are one model
        assert row["train/kl"] >= 0
        assert 0 < row["train/grad_norm"] < 100


@pytest.mark.slow
def test_the_reference_stays_while_the_policy_moves(result: TrainResult) -> None:
    rows = metrics(result.folder)
    assert rows[1]["train/kl"] == pytest.approx(0, abs=1e-5)
    assert rows[3]["train/kl"] > 10 * abs(rows[1]["train/kl"])


@pytest.mark.slow
def test_evaluations_are_kept_too(result: TrainResult) -> None:
    names = {path.name for path in (result.folder / "trajectories").iterdir()}
    assert names == {f"{name}.parquet" for name in ("step_1", "step_2", "step_3", "eval_test_0", "eval_test_3")}


@pytest.mark.slow
def test_tokens_are_kept_with_what_the_update_made_of_them(result: TrainResult) -> None:
    (row,) = [row for row in metrics(result.folder) if row["step"] == 2]
    played = read_records(result.folder / "trajectories" / "step_2.parquet", tokens=True)
    apart = []
    for t in played:
        mask = np.array(t["loss_mask"], bool)
        assert len(t["ids"]) == t["tokens"]["all"]
        assert set(np.array(t["weight_version"])[mask].tolist()) == {1}  # one update lies behind the weights
        assert not np.array(t["advantages"])[~mask].any()
        assert not np.array(t["trainer_logprobs"])[~mask].any()
        apart += np.abs(np.array(t["trainer_logprobs"]) - np.array(t["logprobs"]))[mask].tolist()
    assert max(apart) == pytest.approx(row["mismatch/logprob_max"], rel=1e-3, abs=1e-7)
    assert {np.sign(t["advantages"][-1]) for t in played} == {1, -1}
    evaluated = read_records(result.folder / "trajectories" / "eval_test_0.parquet", tokens=True)
    assert {(t["advantages"], t["evaluation"], t["split"]) for t in evaluated} == {(None, True, "test")}


@pytest.mark.slow
def test_the_page_shows_the_run(result: TrainResult) -> None:
    (run,) = embedded(result.folder / "report.html")["runs"]
    assert run["rows"] == metrics(result.folder)
    assert {(one["split"], one["step"]) for one in run["evaluations"]} == {("test", 0), ("test", 3)}
    assert {name.split(":")[0] for name in run["samples"]} == {
        "eval_test_0.parquet", "eval_test_3.parquet", "step_3.parquet",
    }  # fmt: skip


@pytest.mark.slow
def test_transformers_loads_the_checkpoint(result: TrainResult) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agentrl.models import embedded_path

    assert result.checkpoint == result.folder / "checkpoints" / "step_3"
    trained = AutoModelForCausalLM.from_pretrained(result.checkpoint, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(embedded_path(), dtype=torch.float32).state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in trained.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
    assert tokenizer.chat_template
    ids = tokenizer("What is 2 plus 3?", return_tensors="pt")["input_ids"]
    assert torch.isfinite(trained(ids).logits).all()


@pytest.mark.slow
def test_evaluating_the_checkpoint_gives_the_accuracy_that_the_run_ended_with(
    recipe: Recipe, result: TrainResult
) -> None:
    again = agentrl.evaluate(recipe, model=str(result.checkpoint))
    assert again["test"].accuracy == result.after["test"]


@pytest.mark.slow
def test_a_tracker_is_told_everything_in_order(result: TrainResult) -> None:
    book = lines(result.folder / "book.jsonl")
    assert [entry["what"] for entry in book] == ["start", "log", "log", "log", "log", "finish"]
    assert book[0]["steps"] == 3
    assert [entry["step"] for entry in book[1:5]] == [0, 1, 2, 3]
    assert [entry["keys"] for entry in book[1:5]] == [
        sorted(row.keys() - {"time/spans"}) for row in metrics(result.folder)
    ]


@pytest.mark.slow
def test_a_tracker_that_fails_is_said_once_and_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on without it, and so do the others; what it cannot finish either ends nothing."""
    trackers = {"track__trackers": ["train_plugins:Refusing", "train_plugins:Diary"]}
    agentrl.train(small(tmp_path / "run", eval__splits=[], sft={}, **trackers))
    said = capsys.readouterr().out
    assert said.count("nobody listens") == 2
    failed = r"^track\.trackers: train_plugins:Refusing failed at step 2 and is switched off: ConnectionError: nobody "
    assert len(re.findall(failed, said, re.M)) == 1
    assert "train_plugins:Refusing could not finish: ConnectionError: nobody listens" in said
    assert [entry.get("step") for entry in lines(tmp_path / "run" / "diary.jsonl")] == [None, 0, 1, 2, 3, None]
    assert "sft: not part of this run: run `agentrl sft RECIPE --out DIR` first, then set model.path=DIR" in said
    assert [entry["what"] for entry in lines(tmp_path / "run" / "book.jsonl")] == [
        "start",
        "log",
        "log",
        "log",
        "finish",
    ]
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_tracker_is_finished_after_an_error_too_and_hides_none(tmp_path: Path) -> None:
    said: list[str] = []
    stack = ExitStack()
    Trackers(said.append).start({"refusing": Refusing}, tmp_path, {"train": {"steps": 3}, "output": None}, stack)
    with pytest.raises(ZeroDivisionError), stack:
        raise ZeroDivisionError
    assert [entry["what"] for entry in lines(tmp_path / "book.jsonl")] == ["start", "finish"]
    assert len(said) == 1


def test_a_tracker_that_cannot_start_is_said_before_the_run_begins(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^track\.trackers: absent cannot start: OSError: no key"):
        Trackers(print).start({"absent": Absent}, tmp_path, {}, ExitStack())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_with_no_step_evaluates_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = small(train__steps=0)
    folders = [agentrl.train(recipe, name="job").folder for _ in range(2)]
    assert folders == [tmp_path / "runs/job-001", tmp_path / "runs/job-002"]
    assert [row["step"] for row in metrics(folders[0])] == [0]
    assert [*map(steady, metrics(folders[0]))] == [*map(steady, metrics(folders[1]))]
    assert (folders[0] / "checkpoints" / "step_0" / "model.safetensors").is_file()


MISTAKES = [
    (["track.trackers=[train_plugins:Bok]"], r"tracker 'train_plugins:Bok': .*did you mean 'Book'"),
    (["eval.splits=[tset]"], r"eval.splits: environment 'gsm8k' has no split 'tset'; did you mean 'test'\?"),
    (["algorithm.advantage=grop"], r"no advantage 'grop'; did you mean 'grpo'"),
    (["algorithm.loss=ppo"], r"no loss 'ppo'"),
    (
        ["algorithm.advantage=math:sqrt"],
        r"^algorithm.advantage 'math:sqrt' raised TypeError: .* \(2 given",
    ),
    (["algorithm.loss=operator:eq"], r"^algorithm.loss 'operator:eq' gave bool, not LossTerms$"),
    (["engine.name=locl"], r"no engine 'locl' is installed; did you mean 'local'\?"),
    (["env.name=train_plugins:Empty"], r"environment 'gsm8k' \(source generated\) has no task in train"),
    (["model.device=cuda:99"], r"model.device: cuda:99 cannot be used here"),
    (["model.path=./nowhere"], r"model.path: ./nowhere is no folder"),
    (["critic.path=./nowhere", "algorithm.advantage=gae"], r"critic.path: ./nowhere is no folder"),
    (["cluster.workers=999"], r"needed: one node with 999 CPUs; there: this machine with \d+ CPUs"),
    (["cluster.nodes=2", "cluster.workers=2"], r"cluster.nodes is 2, .* name a running cluster"),
    (["cluster.address=me:secret@host:6379"], r"cluster.address is 'auto' or HOST:PORT of a Ray head"),
    (["cluster.address=127.0.0.1:1"], r"no Ray cluster at '127.0.0.1:1': .*start one with `ray start --head`"),
    (["engine.name=sglang", "engine.args.venv=nowhere"], r"engine.args.venv: nowhere is not a virtual environment"),
    (["rewards.weights.anser=1"], r"gives the part 'anser'; did you mean 'answer'\?$"),
    (["engine.name=sglang", "engine.args.servers=two"], r"engine.args.servers: should be a valid integer, got 'two'"),
    (["engine.name=sglang", "engine.args.flags={tp-size: two}"], r"engine.args.flags: .*'two'"),
    (["tools=[calculater]"], r"no tool 'calculater' is installed; did you mean 'calculator'\?"),
]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("a model is loaded before the cheap checks are done")

    player = importlib.import_module("agentrl.rollout.player")
    monkeypatch.setattr(player, "load_model", load)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("changes", "words"), MISTAKES, ids=[m[0][0] for m in MISTAKES])
@pytest.mark.usefixtures("no_model")
def test_a_mistake_is_refused_before_the_model_is_loaded(
    changes: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        agentrl.train(RECIPE, overrides=changes)
    assert not os.listdir(tmp_path)  # no empty run folder is left


@pytest.mark.slow
@pytest.mark.usefixtures("no_model")
def test_a_folder_that_holds_a_run_is_refused_with_one_line(
    result: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (result.folder / "metrics.jsonl").read_bytes()
    assert main.run(["train", RECIPE, f"output={result.folder}"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"{result.folder} already holds a run" in line
    assert (result.folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.usefixtures("no_model")
def test_a_finished_run_is_not_resumed(result: TrainResult, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["train", "--resume", str(result.folder)]) == 2
    assert "step 3 of 3 is done; set train.steps higher" in capsys.readouterr().err


WRONG_COMMANDS = [
    ["train"],
    ["train", "nowhere.yaml"],
    ["train", "--resume", "nowhere"],
    ["train", RECIPE, "train.stps=3"],
    ["eval", RECIPE, "train.stps=3"],
    ["check", RECIPE, "train.stps=3"],
]


@pytest.mark.slow
def test_a_wrong_command_is_refused_without_torch() -> None:
    code = (
        "import ast, sys; from agentrl.cli import main\n"
        "for words in ast.literal_eval(sys.argv[1]):\n"
        "    print(main.run(words), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code, repr(WRONG_COMMANDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["2 False False"] * len(WRONG_COMMANDS), done.stderr
    assert done.stderr.count("error: ") == len(WRONG_COMMANDS)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("output", [None, "runs", "runs/mine"])
def test_a_file_where_the_runs_should_lie_is_said_at_once(
    output: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("")
    with pytest.raises(UserError, match="output: runs is not a folder"):
        agentrl.train(small(output))


@pytest.mark.slow
def test_a_run_may_keep_no_trajectories_and_has_its_folder_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, step = [], Loop._one_step

    def one_step(loop: Loop) -> None:
        for second in (lambda: resume_run(str(tmp_path / "run")), lambda: FolderLock(tmp_path / "run")):
            with pytest.raises(UserError, match=r"process \d+ on .* trains in this folder"):
                second()
            refused.append(second)
        step(loop)

    monkeypatch.setattr(Loop, "_one_step", one_step)
    result = agentrl.train(small(tmp_path / "run", train__steps=1, eval__splits=[], track__trajectories=False))
    assert {path.name for path in result.folder.iterdir()} == {
        "recipe.yaml", "metrics.jsonl", "report.html", "checkpoints", "code.jsonl", "run.log",
    }  # fmt: skip
    assert len(refused) == 2


@pytest.mark.slow
async def test_inside_a_running_loop_as_in_a_notebook(tmp_path: Path) -> None:
    recipe = small(tmp_path / "run", train__steps=1)
    result = agentrl.train(recipe)
    assert result.steps == 1
    assert agentrl.evaluate(recipe, model=str(result.checkpoint))["test"].accuracy == result.after["test"]


@pytest.mark.parametrize(
    ("start", "last", "words"),
    [
        (0.26, 20, "No checkpoint is better than the start (26.0%); the best is that of step 10 (21.0% on test)"),
        (0.26, 10, "No checkpoint is better than the start (26.0%); the best is that of step 10 (21.0% on test)"),
        (0.2, 20, "The best checkpoint is that of step 10 (21.0% on test): "),
        (0.2, 10, None),
    ],
)
def test_the_best_checkpoint_is_compared_with_the_start(
    tmp_path: Path, start: float, last: int, words: str | None
) -> None:
    best = Saved(10, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saved, "accuracy", 0.21)
        patch.setattr(Saved, "split", "test")
        said = _best_checkpoint(best, Saved(last, tmp_path), Accuracy.read(start))
    assert said == words or (words and said and said.removesuffix(str(tmp_path)) == words)
