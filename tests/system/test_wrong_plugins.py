"""Slips of a first day: each wrong environment, tool and reward ends a command by one line and exit code 2."""

from pathlib import Path

import pytest
import wrong_plugins

from agentrl.cli import main

RECIPE = """
env: {name: "ENV"}
tools: [TOOL]
rewards: {functions: [REWARD]}
rollout: {tasks: 1, n: 2, max_turns: 4, max_turn_tokens: 64, max_tokens: 256, retries: 0}
train: {steps: 1, lr: 1e-4, threads: 1}
eval: {every: 0, before: false, splits: []}
"""
RIGHT = {"ENV": "wrong_plugins:Seats", "TOOL": "calculator", "REWARD": ""}
CASES = [
    *(("ENV", f"wrong_plugins:env_{name}", words) for name, (_, words) in wrong_plugins.ENVIRONMENTS.items()),
    *(("TOOL", f"'wrong_plugins:tool_{name}'", words) for name, (_, words) in wrong_plugins.TOOLS.items()),
    *(("REWARD", f"'wrong_plugins:reward_{name}'", words) for name, (_, words) in wrong_plugins.REWARDS.items()),
]


def written(folder: Path, changes: dict[str, str]) -> str:
    text = RECIPE
    for key, value in (RIGHT | changes).items():
        text = text.replace(key, value)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return str(folder / "recipe.yaml")


def refused(capsys: pytest.CaptureFixture[str], command: list[str]) -> str:
    """The line by which a command ends; empty where it goes through."""
    code = main.run(command)
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    if code == 0:
        return ""
    assert code == 2
    (line,) = said.err.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "words"), CASES, ids=[name.strip("'") for _, name, _ in CASES])
def test_a_wrong_plugin_is_one_line(
    kind: str, name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = written(tmp_path, {kind: name})
    if kind == "ENV":
        first = refused(capsys, ["check", recipe])
        assert first == "" or words in first
    assert words in refused(capsys, ["train", recipe, f"output={tmp_path / 'run'}"])


@pytest.mark.slow
def test_what_is_right_goes_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(tmp_path, {"TOOL": "'wrong_plugins:Sums'"})
    assert refused(capsys, ["check", recipe]) == ""
    assert refused(capsys, ["train", recipe, f"output={tmp_path / 'run'}"]) == ""
