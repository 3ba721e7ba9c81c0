"""Recipes as earlier versions wrote them: files are read, and say how their keys are written now."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.recipe.load import dump_recipe, load_recipe
from agentrl.recipe.mistakes import known_fields
from agentrl.recipe.previous import now_written
from agentrl.recipe.schema import Recipe

OLD: dict[str, tuple[str, str, str | None]] = {
    "warmup in steps": ("train: {warmup_steps: 5, warmup_ratio: 0.0}", "train: {warmup: 5}", "train.warmup_steps"),
    "warmup as a share": ("train: {warmup_steps: 0, warmup_ratio: 0.1}", "train: {warmup: 0.1}", "train.warmup_ratio"),
    "defaults": (
        "train: {warmup_steps: 0}\neval: {temperature: null, top_k: null}\nalgorithm: {gamma: 1.0, lam: 1.0}",
        "train: {}",
        None,
    ),
    "evaluation": (
        "eval: {temperature: 0, max_turns: 3}", "eval: {rollout: {temperature: 0, max_turns: 3}}", "eval.temperature"
    ),
    "gae": (
        "algorithm: {advantage: gae, gamma: 0.9, lam: 1.0}\ncritic: {}",
        "algorithm: {advantage: {name: gae, args: {gamma: 0.9, lam: 1.0}}}\ncritic: {}",
        "algorithm.gamma",
    ),
    "of a preset": (
        "algorithm: {preset: ppo, lam: 1.0}\ncritic: {}",
        "algorithm: {preset: ppo, advantage: {args: {lam: 1.0}}}\ncritic: {}",
        None,
    ),
    "schedules": (
        "algorithm: {streams: {policy: {start: 1, end: 0.5, steps: 10}, imitate: {start: 0.5}, distill: 0}}",
        "algorithm: {streams: {policy: {0: 1, 10: 0.5}, imitate: 0.5}}",
        "algorithm.streams.policy",
    ),
    "a mixture": (
        "algorithm: opd\nenv: {mix: [{name: gsm8k, streams: {policy: 1, imitate: null}, "
        "teacher: {path: null, url: 'http://a', form: sampled}}, {name: gsm8k, streams: null, teacher: null}]}\n"
        "teacher: {path: tiny, url: null}",
        "algorithm: opd\nenv: {mix: [{name: gsm8k, streams: {policy: 1}, teacher: mix_0}, {name: gsm8k}]}\n"
        "teacher: tiny\nteachers: {mix_0: {path: 'http://a', form: sampled}}",
        "env.mix.0.teacher",
    ),
    "a server": ("algorithm: opd\nteacher: {url: 'http://a'}", "algorithm: opd\nteacher: 'http://a'", "teacher.url"),
    "offload": (
        "cluster: {workers: 2, offload: {parameters: true, optimizer: false}}",
        "cluster: {workers: 2, offload: [parameters]}",
        "cluster.offload",
    ),
    "nothing offloaded": ("cluster: {offload: {parameters: false, optimizer: false}}", "cluster: {}", None),
    "a sandbox": (
        "agent: {command: a, sandbox: true, sandbox_folders: [/srv]}", "agent: {command: a, sandbox: [/srv]}",
        "agent.sandbox_folders",
    ),
    "a sandbox with nothing": (
        "agent: {command: a, sandbox: true, sandbox_folders: []}", "agent: {command: a, sandbox: true}", None
    ),
    "no sandbox": ("agent: {command: a, sandbox: false, sandbox_folders: [/srv]}", "agent: {command: a}", "folders"),
    "an agent's tokens": (
        "agent: {name: a, max_total_tokens: 99}", "agent: a\nrollout: {max_total_tokens: 99}", "max_total_tokens"
    ),
    "the tower": (
        "model: {lora: {vision: true}}", "model: {lora: {targets: [all-linear, vision]}}", "model.lora.vision"
    ),
    "no tower": ("model: {lora: {vision: false}}", "model: {lora: {}}", None),
    "stages": (
        "sft: {stages: [{optimizer: muon, warmup_steps: 9}, {optimizer: adamw, muon_lr: 0.02, warmup_steps: null}]}",
        "sft: {stages: [{muon_lr: 0.02, warmup: 9}, {}]}",
        "sft.stages.0.optimizer",
    ),
    "a reward model": (
        "reward_model: {source: [a], eval_every: 7, warmup_steps: 3, weight_decay: 0.1}",
        "reward_model: {source: [a]}\neval: {every: 7}\ntrain: {warmup: 3, weight_decay: 0.1}",
        "reward_model.eval_every",
    ),
    "deviations": ("algorithm: {normalize_std: true}", "algorithm: {}", None),
}  # fmt: skip


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("case", OLD)
def test_what_old_keys_said_is_read(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, key = OLD[case]
    (tmp_path / f"{case}.yaml").write_text(old)
    (tmp_path / "new.yaml").write_text(new)
    found = load_recipe(tmp_path / f"{case}.yaml")
    said = capsys.readouterr().err
    assert found == load_recipe(tmp_path / "new.yaml")
    assert (key in said and "read until" in said) if key else not said
    (tmp_path / "dumped.yaml").write_text(dump_recipe(found))
    assert load_recipe(tmp_path / "dumped.yaml") == found
    assert not capsys.readouterr().err


def test_secrets_of_old_keys_stay_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_TEST_URL", "http://user:password@host")
    text = "algorithm: opd\nenv: {mix: [{name: gsm8k, teacher: {url: '${AGENTRL_TEST_URL}'}}]}"
    (tmp_path / "r.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.teachers["mix_0"].path == "http://user:password@host"
    assert "password" not in dump_recipe(recipe)


@pytest.mark.parametrize(
    "override", ["train.warmup_ratio=0.1", "eval.top_k=3", "teacher={url: 'http://a'}", "algorithm.lam=0.9"]
)
def test_on_the_command_line_an_old_key_names_the_new_one(override: str) -> None:
    with pytest.raises(UserError, match=r"^command line: [\w.]+: is now (written )?[`a]"):
        load_recipe(None, [override])


def test_no_key_that_exists_is_said_to_be_gone() -> None:
    fields: dict[str, Any] = known_fields(Recipe, lists=True)
    old = [key for key in fields if now_written(tuple(0 if part == "N" else part for part in key.split(".")))]
    assert not old
