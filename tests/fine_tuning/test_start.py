"""What a recipe's `start` teaches: kept, gone on with, begun with, told; and what it is kept under."""

import importlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_help import quiet, refused
from paths import ROOT
from safetensors.torch import load_file

from agentrl import Recipe, UserError
from agentrl.cli import main
from agentrl.fine_tuning.stage import file_digest, stage_key, stage_recipe
from agentrl.fine_tuning.start import train
from agentrl.learner.monitors import not_taken
from agentrl.models.load import resolve
from agentrl.training.display import Display
from agentrl.training.run import TrainResult, resume_run

SMALL = {
    "start": "demonstrations",
    "tools": ["calculator"],
    "sft": {"stages": [{"steps": 3, "batch": 2, "lr": 1e-3, "warmup": 1}]},
    "rollout": {"tasks": 2, "n": 4, "max_turn_tokens": 32, "max_tokens": 512},
    "train": {"steps": 1, "lr": 1e-12, "threads": 1},
    "eval": {"every": 0, "tasks": 2, "splits": ["test"]},
}


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs and what they keep be in folders of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({**SMALL, **changes})


def run(**changes: Any) -> tuple[TrainResult, str]:
    """The result of a run, and what it printed."""
    console = quiet()
    with console.capture() as said:
        result = train(recipe(**changes), name="taught", display=Display(1, "taught", console))
    return result, said.get()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path | str) -> Mapping[str, Any]:
    return load_file(Path(folder) / "model.safetensors")


def far(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.slow
def test_a_run_begins_with_what_was_taught_and_the_next_one_too(tmp_path: Path) -> None:
    result, said = run()
    assert "start: demonstrations (clean): teaches first" in said
    taught = weights(result.folder / "start")
    assert far(taught, weights(resolve("tiny"))) > 1e-4
    assert far(taught, weights(result.checkpoint)) < 1e-6, "reinforcement learning went on from what was taught"
    first = rows(result.folder)[0]
    documented = (ROOT / "docs/reference/metrics.md").read_text()
    told = {key.replace("test", "<split>").removesuffix("_low").removesuffix("_high") for key in first}
    assert all(f"| `{key}` |" in documented for key in told if key.startswith("start/"))
    assert first["start/steps"] == 3
    assert 0 < first["start/loss_last"] < 0.1, "the embedded model knows these demonstrations"
    assert result.untaught == {"test": first["start/test/accuracy"]}
    assert first["start/test/reward_low"] <= first["start/test/reward"] <= first["start/test/reward_high"]
    assert first["eval/test/accuracy"] == result.before["test"]
    assert "after the start" in said
    again, said = run(train={**SMALL["train"], "lr": 2e-12})  # type: ignore[dict-item]
    assert "start: demonstrations (clean): taught already" in said
    assert not re.search(r"step +\d+/\d+  loss ", said), "it is not taught again"
    assert far(taught, weights(again.folder / "start")) == 0
    assert again.untaught == result.untaught
    shutil.rmtree(tmp_path / "cache")
    later = resume_run(str(again.folder), overrides=["train.steps=2"], display=Display(2, "taught", quiet()))
    assert later.steps == 2
    assert later.untaught == result.untaught
    with pytest.raises(UserError, match="--resume: this is not what the run began with: start"):
        resume_run(str(again.folder), overrides=["train.steps=3", "start=null"])


INTERRUPTING = """
import os, signal
from agentrl_envs.gsm8k.environment import Gsm8k

class Interrupting(Gsm8k):
    shown = 0

    def demonstrate(self, task, rng, style):
        type(self).shown += 1
        if self.shown == 44:  # once
            os.kill(os.getpid(), signal.SIGINT)
        return super().demonstrate(task, rng, style)
"""


@pytest.mark.slow
def test_a_stage_that_was_interrupted_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    monkeypatch.syspath_prepend(tmp_path)
    long = {
        "env": {"name": "interrupting:Interrupting"},
        "sft": {"stages": [{"steps": 10, "batch": 2, "lr": 1e-4}]},
    }
    with pytest.raises(KeyboardInterrupt, match=r"interrupted after \d+ steps of the start"):
        run(**long)
    assert not Path("runs").exists()
    result, said = run(**long)
    assert "goes on with what was interrupted" in said
    assert "resumed after step" in said
    assert rows(result.folder)[0]["start/steps"] == 10


@pytest.mark.slow
def test_an_adapter_is_taught_and_gone_on_with() -> None:
    result, _ = run(model={"lora": {}})
    taught = load_file(result.folder / "start" / "adapter" / "adapter_model.safetensors")
    assert any(bool(value.any()) for name, value in taught.items() if "lora_B" in name)
    trained = load_file(result.checkpoint / "adapter" / "adapter_model.safetensors")
    assert far(taught, trained) < 1e-6


@pytest.mark.ray
def test_workers_are_taught_and_go_on(ray_address: str) -> None:
    result, _ = run(cluster={"workers": 2, "address": ray_address})
    assert far(weights(result.folder / "start"), weights(result.checkpoint)) < 1e-6


@pytest.mark.slow
def test_solved_samples_of_a_run_are_taught_and_conversations() -> None:
    plain, _ = run(start=None, sft=None, rollout={**SMALL["rollout"], "tasks": 8})  # type: ignore[dict-item]
    result, said = run(start={"run": str(plain.folder)})
    solved = rows(plain.folder)[1]["reward/answer"] * 32
    assert f"read 32 conversations: {solved:.0f} used" in said
    assert "it is not solved (sft.select.solved)" in said
    assert rows(result.folder)[0]["start/steps"] == 3
    talk = {"messages": [{"role": "user", "content": "What is 2*3?"}, {"role": "assistant", "content": "#### 6"}]}
    Path("own.jsonl").write_text(json.dumps(talk) + "\n")
    assert "read 1 conversations: 1 used" in run(start={"conversations": "own.jsonl"})[1]


@pytest.mark.slow
def test_a_stage_is_kept_under_all_that_it_depends_on(tmp_path: Path) -> None:
    keys = [stage_key(recipe())]
    assert stage_key(recipe(train={**SMALL["train"], "lr": 1.0}, eval={"tasks": 9})) == keys[0]  # type: ignore[dict-item]
    keys.append(stage_key(recipe(train={**SMALL["train"], "seed": 1})))  # type: ignore[dict-item]
    keys.append(stage_key(recipe(sft={"stages": [{"steps": 4}]})))
    keys.append(stage_key(recipe(start={"demonstrations": "careless"}, sft=None)))
    keys.append(stage_key(recipe(env={"name": "gsm8k", "args": {"seed": 1}})))
    keys.append(stage_key(recipe(tools=[])))
    folder = tmp_path / "model"
    shutil.copytree(resolve("tiny"), folder)
    assert stage_key(recipe(model={"path": str(folder)})) == keys[0], "by content, not by name"
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    keys.append(stage_key(recipe(model={"path": str(folder)})))
    for text in ("2*3", "2*4"):
        talk = [{"role": "user", "content": text}, {"role": "assistant", "content": "6"}]
        (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
        keys.append(stage_key(recipe(start={"conversations": "rows.jsonl"})))
    assert len(set(keys)) == len(keys)


def test_a_large_file_is_told_by_blocks_of_it(tmp_path: Path) -> None:
    file = tmp_path / "large"
    size = 65 << 16
    found = []
    for at in (0, size // 2, size - 1):
        whole = bytearray(size)
        whole[at] = 1
        file.write_bytes(whole)
        found.append(file_digest(file))
    file.write_bytes(bytes(size + 1))
    assert len({*found, file_digest(file)}) == 4


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, [(300, 16, 0.02)]),
        ({"cluster": {"workers": 2}}, [(300, 16, None)]),
        ({"model": {"lora": {}}}, [(300, 16, None)]),
        ({"model": {"path": "large"}}, [(100, 16, None)]),
        ({"model": {"path": "large"}, "start": {"run": "evals/a"}}, [(None, 16, None)]),
        ({"sft": SMALL["sft"]}, [(3, 2, None)]),
    ],
)
def test_the_stages_suit_what_is_trained(changes: dict[str, Any], stages: Sequence[tuple[Any, ...]]) -> None:
    Path("evals/a/trajectories").mkdir(parents=True)
    config = json.loads((Path(resolve("tiny")) / "config.json").read_text())
    Path("large").mkdir()
    Path("large/config.json").write_text(json.dumps({**config, "hidden_size": 4096, "intermediate_size": 16384}))
    found = stage_recipe(recipe(**{"sft": None, **changes})).sft
    assert found is not None
    assert [(stage.steps, stage.batch, stage.muon_lr) for stage in found.stages] == stages


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("start={}", "start takes one of demonstrations, conversations and run, such as"),
        ("start={demonstrations: true, run: x}", "not demonstrations and run"),
        ("start=yes", "expected a mapping of keys"),
        ("start={run: nope}", "start.run: nope is no folder of a run"),
        ("start={conversations: nope.jsonl}", "start.conversations: there is no file nope.jsonl"),
        ("start={demonstrations: tidy}", "no demonstrations of style 'tidy'"),
        ("sft={source: x.jsonl}", "sft.source has no effect beside start"),
        ("env.name=dataset", "dataset"),
    ],
)
def test_a_mistake_is_one_line(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text(json.dumps({**SMALL, "sft": None}))
    for command in ("check", "train"):
        assert words in refused(capsys, command, "recipe.yaml", given)
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_model_that_is_made_takes_the_place_of_any_that_is_named(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "recipes" / "text_game.yaml")
    assert "model.path: tiny_vision is not used" in refused(capsys, command, path, "model.path=tiny_vision")
    wrong = "sft.new_model learns its tokenizer from demonstrations"
    assert wrong in refused(capsys, command, path, "start={conversations: mine.jsonl}")
    assert main.run(["check", path]) == 0
    told = capsys.readouterr().out
    assert "start: demonstrations (clean), of a new model (sft.new_model)" in told
    assert "memory of the trainer (a new model, float32)" in told


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("wrong", ["raise SystemExit(3)", "await asyncio.sleep(60)"])
def test_an_environment_that_exits_or_hangs_in_its_opening_is_one_line_and_released(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("agentrl.fine_tuning.stage.OPENING_SECONDS", 0.2)
    name = f"opening_{len(wrong)}"
    (tmp_path / f"{name}.py").write_text(
        "import asyncio\nfrom agentrl_envs.gsm8k.environment import Gsm8k\nreleased = []\n\n\n"
        f"class Wrong(Gsm8k):\n    async def create(self, session, **kwargs):\n        {wrong}\n\n"
        "    async def release(self, session, **kwargs):\n        released.append(session.task.id)\n"
    )
    with pytest.raises(UserError, match="create of task train-0"):
        stage_key(recipe(env={"name": f"{name}:Wrong"}))
    assert importlib.import_module(name).released == ["train-0"]


def test_check_says_what_would_be_taught(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text(json.dumps(SMALL))
    assert main.run(["check", "recipe.yaml", "sft=null"]) == 0
    said = capsys.readouterr().out
    assert (
        "start: demonstrations (clean)\n300 steps of 16 conversations, Muon at 0.02 and AdamW, lr 0.001\n"
        "taught before the first" in said
    )


@pytest.mark.parametrize(
    ("loss", "before", "after", "words"),
    [
        ((8.0, 0.02), {"test": 0.0}, {"test": 0.6}, None),
        ((8.0, 0.02), {}, {}, None),
        ((0.03, 0.03), {"test": 0.95}, {"test": 0.95}, None),
        ((8.0, 7.9), {}, {}, "the loss hardly fell (8 -> 7.9 nats a token). Likely remedy: more steps"),
        ((8.0, 0.8), {"test": 0.0}, {"test": 0.0}, "held-out accuracy did not rise (test 0.0% -> 0.0%), and the loss"),
        ((8.0, 0.02), {"test": 0.5}, {"test": 0.4}, "other conversations"),
        ((8.0, 0.02), {"a": 0.5, "b": 0.1}, {"a": 0.4, "b": 0.3}, None),
    ],
)
def test_teaching_that_did_not_take_is_said(
    loss: tuple[float, float], before: Mapping[str, float], after: Mapping[str, float], words: str | None
) -> None:
    line = not_taken(60, loss, before, after)
    assert (line is None) if words is None else words in (line or "")
