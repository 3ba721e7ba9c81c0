"""Common frameworks, unchanged, as agents of a run: what they send is served, and what is sampled is trained."""

import subprocess
import venv
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from train_help import metrics, small

import agentrl
from agentrl.rollout.stored import read_samples

PROGRAMS = ROOT / "tests" / "support" / "frameworks"
INSTALLED = ["openai", "anthropic", "agents_sdk"]
"""Functions in `framework_agents`, on the packages that are installed beside the toolkit."""
APART = {
    "smolagents": ("smolagents[openai]",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "langchain": ("langchain-openai", "langgraph"),
    "litellm": ("litellm", "mcp"),  # it imports the latter without declaring it
}
"""Programs, and what they need in a virtual environment of their own: 100 to 340 MB each."""


def check_trained(output: Path, agent: dict[str, Any], **changes: Any) -> None:
    """Train two steps with this agent. In both the trainer gives the sampled tokens the log-probs that the engine had,
    the reference, which is the policy then, in the first; and constrained ones are trained."""
    agentrl.train(
        small(
            output, agent=agent, train__steps=2, rollout__n=2, rollout__tasks=1, rollout__max_turn_tokens=64,
            rollout__max_tokens=1000, rollout__timeout=300, eval__splits=[], algorithm__kl_coef=0.01,
            **changes,
        )
    )  # fmt: skip
    rows = [row for row in metrics(output) if "train/loss" in row]
    assert len(rows) == 2
    assert all(row["mismatch/logprob_max"] < 1e-4 for row in rows)
    assert rows[0]["train/kl"] < 1e-6 or "train__mini_batches" in changes
    files = sorted((output / "trajectories").glob("step_*.parquet"))
    found = [sample.trajectory for path in files for sample in read_samples(path)]
    assert [t.failure for t in found] == [None] * 4
    for t in found:
        assert t.allowed is not None
        constrained = np.array([one is not None for one in t.allowed])
        assert t.loss_mask[constrained].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_a_framework_trains_unchanged(tmp_path: Path, name: str) -> None:
    check_trained(tmp_path / "run", {"name": f"framework_agents:{name}"})


@pytest.mark.slow
@pytest.mark.ray
def test_constrained_tokens_are_trained_by_workers(tmp_path: Path) -> None:
    check_trained(tmp_path / "run", {"name": "framework_agents:openai"}, cluster__workers=2)


@pytest.mark.slow
def test_old_log_probs_are_those_of_the_constraint(tmp_path: Path) -> None:
    check_trained(tmp_path / "run", {"name": "framework_agents:openai"}, train__mini_batches=2)


def check_program(tmp_path: Path, *command: str) -> None:
    """Train with a program that leaves a file in the folder of its last argument when all went well."""
    done = tmp_path / "done"
    done.mkdir()
    check_trained(tmp_path / "run", {"command": [*command, str(done)]})
    assert len(list(done.iterdir())) == 4


@pytest.mark.slow
def test_a_program_of_node_trains_unchanged(tmp_path: Path) -> None:
    if (node := which("node")) is None:
        pytest.skip("Node is not installed (apt-get install nodejs)")
    check_program(tmp_path, node, str(PROGRAMS / "node.mjs"))


@pytest.mark.long
@pytest.mark.parametrize("name", APART)
def test_a_framework_in_its_own_environment_trains_unchanged(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    python = str(folder / "bin" / "python")
    made = subprocess.run([python, "-m", "pip", "install", "-q", *APART[name]], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot install {', '.join(APART[name])}: {made.stderr.strip()[-300:]}")
    check_program(tmp_path, python, str(PROGRAMS / f"{name}_agents.py"))
