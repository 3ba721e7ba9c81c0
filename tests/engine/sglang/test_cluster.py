"""A whole run on two workers over a real server: the shards' weights follow each step."""

import json
from pathlib import Path

import pytest
from paths import RECIPES

from agentrl.training.run import train

RECIPE = str(RECIPES / "gsm8k_tool.yaml")


def test_two_workers_train_through_a_real_server(
    sglang_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the server samples has the log-probs that the sharded trainer gives it, step after step."""
    way = "from_distributed"
    result = train(
        RECIPE,
        overrides=[
            "engine.name=sglang", f"engine.args.urls=[{sglang_url}]", f"engine.args.weights={way}",
            "cluster.workers=2", "train.steps=2", "rollout.tasks=4", "rollout.n=4", "train.lr=1e-3", "eval.tasks=2",
            "eval.every=0", "eval.splits=[test]", "train.threads=1", f"output={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    apart = [row["mismatch/logprob_max"] for row in rows[1:] if "mismatch/logprob_max" in row]
    assert apart, "no step had anything to learn from"
    assert max(apart) < 1e-3
    assert f"weights: {way}" in capsys.readouterr().out
