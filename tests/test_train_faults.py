"""Plugins that misbehave inside whole runs, and steps that have nothing to teach: the run goes on, and counts it."""

from pathlib import Path
from typing import Any

import pytest
from train_help import lines, metrics, small
from train_plugins import HangsLater, Stuck

import agentrl
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.recipe.load import dump_recipe
from agentrl.rollout import player
from agentrl.rollout.scorer import Scorer
from agentrl.training.run import TrainResult


def moved(result: TrainResult) -> bool:
    """Whether the last checkpoint's weights differ from those that the run began with."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentrl.models import embedded_path

    start, end = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (embedded_path(), result.checkpoint)
    )
    return any(not torch.equal(start[name], end[name]) for name in start)


def played(result: TrainResult, step: int) -> list[dict[str, Any]]:
    return lines(result.folder / "trajectories" / f"step_{step}.jsonl")


def test_a_reward_that_raises_costs_its_own_samples_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small(tmp_path / "run", env__name="train_plugins:Broken", rollout__tasks=6, train__seed=5)
    result = agentrl.train(recipe)
    said = capsys.readouterr().out
    rows = metrics(result.folder)[1:]
    assert len(rows) == 3
    for row in rows:
        lost = [t for t in played(result, row["step"]) if t["failure"]]
        kept = [t for t in played(result, row["step"]) if not t["failure"]]
        assert len(lost) + len(kept) == 24
        assert row["rollout/failed"] == row["stop/error"] == row["rollout/retried"] == len(lost)
        assert row["rollout/trajectories"] == len(kept)
        assert row["groups/few"] == len(lost) / 4
        assert row["groups/varied"] == len(kept) / 4
        assert row["reward/mean"] == pytest.approx(sum(t["reward"] for t in kept) / max(1, len(kept)))
        for boundary in ("reward", "environment"):
            count = sum(t["failure"]["boundary"] == boundary for t in lost)
            assert row.get(f"rollout/failed/{boundary}", 0) == count
        if lost:
            assert f"step {row['step']}: {len(lost)} of 24 samples failed (" in said
    assert sum(row.get("rollout/failed/reward", 0) for row in rows) > 0
    assert sum(row.get("rollout/failed/environment", 0) for row in rows) > 0
    assert sum(row["groups/varied"] for row in rows) > 0
    assert "by reward: gsm8k.calc_reward: ZeroDivisionError: no judge for even numbers" in said
    assert moved(result)


MISBEHAVING = [
    ("Raising", "Error: RuntimeError: out of paper"),
    ("Hanging", "Error: it did not answer within 0.1 seconds"),
    ("Flooding", "characters left out"),
]


@pytest.mark.parametrize(("tool", "words"), MISBEHAVING)
def test_a_tool_that_misbehaves_is_told_and_counted_and_the_run_learns_on(
    tool: str, words: str, tmp_path: Path
) -> None:
    recipe = small(
        tmp_path / "run", tools=[f"train_plugins:{tool}"], rollout__tool_timeout=0.1, rollout__max_turns=2,
        rollout__max_tool_tokens=40, train__steps=1, eval__splits=[],
    )  # fmt: skip
    result = agentrl.train(recipe)
    row = metrics(result.folder)[1]
    calls = row["tool/calculator/calls"]
    assert calls > 0
    assert row["tool/calculator/errors"] == (0 if tool == "Flooding" else calls)
    assert row["rollout/failed"] == 0
    assert row["groups/varied"] == 2
    said = [m["content"] for t in played(result, 1) for m in t["messages"] if m["role"] == "tool"]
    assert any(words in text for text in said)
    assert max(map(len, said)) < 1_000
    assert all(t["tokens"]["all"] <= 256 for t in played(result, 1))
    assert moved(result)


@pytest.mark.parametrize(
    ("env", "why", "valid", "changes"),
    [("Flat", "equal", 8, {}), ("Lonely", "few", 2, {}), ("Flat", "equal", 8, {"train__mini_batches": 2})],
    ids=["equal rewards", "one valid sample", "equal rewards, mini-batches"],
)
def test_a_step_without_a_group_to_learn_from_leaves_the_weights_alone(
    env: str, why: str, valid: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    recipe = small(
        tmp_path / "run", env__name=f"train_plugins:{env}", train__steps=2, train__weight_decay=0.1, eval__splits=[],
        **changes,
    )  # fmt: skip
    result = agentrl.train(recipe)
    assert result.steps == 2
    for row in metrics(result.folder)[1:]:
        assert row["groups/varied"] == 0
        assert row[f"groups/{why}"] == 2
        assert row["rollout/trajectories"] == valid
        assert row["train/updates"] == row["train/loss"] == row["train/grad_norm"] == 0
    assert not moved(result)


def test_a_run_that_loses_every_sample_stops_and_says_why(tmp_path: Path) -> None:
    recipe = small(tmp_path / "run", env__name="train_plugins:Hopeless", eval__splits=[])
    with pytest.raises(UserError) as error:
        agentrl.train(recipe)
    assert str(error.value) == (
        "step 1: 8 of 8 samples failed (8 by reward: gsm8k.calc_reward: NotImplementedError: no reward yet "
        f"(train_plugins.py:{line_of('no reward yet')})); step 0 is saved, go on with --resume {tmp_path / 'run'}"
    )
    assert (tmp_path / "run" / "checkpoints" / "step_0" / "config.json").is_file()
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0]


def line_of(text: str) -> int:
    source = (Path(__file__).parent / "train_plugins.py").read_text().splitlines()
    return next(number for number, line in enumerate(source, 1) if text in line)


def test_an_evaluation_that_loses_every_sample_is_no_accuracy_of_zero(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^evaluation of test after step 0: 4 of 4 samples failed \(4 by reward"):
        agentrl.train(small(tmp_path / "run", env__name="train_plugins:Hopeless"))
    with pytest.raises(UserError, match=r"^evaluation of test: 4 of 4 samples failed \(4 by reward"):
        agentrl.evaluate(small(env__name="train_plugins:Hopeless"))


def by_answer_length(sample: Any) -> float:
    return len(sample.answer) / 100


def test_reward_functions_and_weights_of_a_recipe_reach_the_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = ({"name": "test_train_faults:by_answer_length", "part": "size"},)
    weights = {"answer": 0.0, "size": 2.0, "anser": 1.0}
    recipe = small(tmp_path / "run", rewards__functions=functions, rewards__weights=weights)
    result = agentrl.train(recipe)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("rewards.weights: no anser in this step; did you mean 'answer' or 'noise'?") == 1
    for row in metrics(result.folder)[1:]:
        assert row["reward/mean"] == pytest.approx(2 * row["reward/size"] + row["reward/noise"])
        assert row["groups/varied"] > 0
    for t in played(result, 1):
        assert t["reward"] == pytest.approx(2 * t["rewards"]["size"] + t["rewards"]["noise"])
    assert moved(result)


def test_two_environments_train_together(tmp_path: Path) -> None:
    mix = ({"name": "gsm8k", "weight": 1.0, "tools": ("calculator",)}, {"name": "train_plugins:Broken", "tools": ()})
    result = agentrl.train(
        small(
            tmp_path / "run",
            env__name="gsm8k",
            env__mix=mix,
            rollout__tasks=8,
            train__steps=2,
            eval__splits=("gsm8k.test",),
        )
    )
    labels = {t["task"].partition("/")[0] for step in (1, 2) for t in played(result, step)}
    assert len(labels) == 2
    assert all("." in key for row in metrics(result.folder) for key in row if key.startswith("eval/"))
    assert {tuple(t["tools"]) for t in played(result, 1)} == {("calculator",), ()}


def test_a_reward_whose_calls_keep_hanging_ends_the_run_with_the_last_step_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agentrl.threads.MOST_ABANDONED", 3)
    monkeypatch.setattr(player, "Scorer", lambda rewards, seconds: Scorer(rewards, 0.2))  # the real one, less patient
    folder = tmp_path / "run"
    recipe = tmp_path / "job.yaml"
    recipe.write_text(
        dump_recipe(small(folder, rewards__functions=["train_plugins:hangs_later"], eval__splits=[], train__steps=3))
    )
    try:
        assert main.run(["train", str(recipe)]) == 2
    finally:
        HangsLater.free.set()
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith(
        "error: reward train_plugins.hangs_later: 3 calls hang, each in a thread of its own; give it"
    )
    assert said.endswith(f"step 1 is saved, go on with --resume {folder}")
    assert "processes: 2" in said
    assert [row["step"] for row in metrics(folder)] == [0, 1]
    assert (folder / "checkpoints" / "step_1" / "config.json").is_file()


def test_a_tracker_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agentrl.training.trackers.SECONDS", 1.0)
    try:
        result = agentrl.train(small(tmp_path / "run", eval__splits=[], track__trackers=["train_plugins:Stuck"]))
    finally:
        Stuck.free.set()
    assert result.steps == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "failed at step 2 and is told nothing more: TimeoutError: it does not answer within 1 s" in said
    assert "could not finish" not in said
    assert [row["step"] for row in lines(tmp_path / "run" / "book.jsonl") if row["what"] == "log"] == [0, 1, 2]
