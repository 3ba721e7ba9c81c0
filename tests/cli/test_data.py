"""`agentrl data`: the parquet of multi-turn GSM8K, written and trained from; what is refused."""

import json
from pathlib import Path

import pytest
from agentrl_envs.gsm8k.environment import SYSTEM_PROMPT
from pyarrow import parquet
from train_help import write_lines

from agentrl.cli.main import BAD_USAGE, run
from agentrl.recipe.load import load_recipe
from agentrl.training.run import train


def gsm8k(folder: Path) -> str:
    for name, size in (("train", 6), ("test", 3)):
        rows = [
            {"question": f"What is {n} plus {n}?", "answer": f"Twice.\n#### {2 * n:,}"} for n in range(600, 600 + size)
        ]
        write_lines(folder / f"{name}.jsonl", rows)
    return str(folder / "train.jsonl")


def test_gsm8k_becomes_the_parquet_of_multi_turn_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["data", "gsm8k", "--out", str(out), "--source", gsm8k(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"{out}/train.parquet: 6 rows" in said
    assert f"{out}/test.parquet: 3 rows" in said
    assert f"env.name=dataset env.source={out}" in said
    assert sorted(path.name for path in out.iterdir()) == ["test.parquet", "train.parquet"]
    rows = parquet.read_table(out / "test.parquet").to_pylist()
    assert rows[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"content": SYSTEM_PROMPT, "role": "system"},
            {"content": "What is 601 plus 601?", "role": "user"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1202"},
        "extra_info": {
            "split": "test",
            "index": 1,
            "answer": "Twice.\n#### 1,202",
            "question": "What is 601 plus 601?",
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1202"}}},
        },
    }
    assert "at least once" in SYSTEM_PROMPT
    assert "####" in SYSTEM_PROMPT


@pytest.mark.slow
def test_generated_problems_are_written_and_trained_from(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["data", "gsm8k", "--out", str(out), "--source", "generated", "--limit", "20", "system_prompt="]
    assert run(command) == 0
    assert {path.stem for path in out.iterdir()} == {"train", "test", "phrasing", "large", "validation"}
    first = parquet.read_table(out / "train.parquet").to_pylist()[0]
    assert [message["role"] for message in first["prompt"]] == ["user"]
    overrides = [
        f"env.source={out}",
        f"output={tmp_path / 'run'}",
        "env.name=dataset",
        "tools=[calculator, calc_gsm8k_reward]",
    ]
    small = ["train.steps=1", "rollout.tasks=2", "rollout.n=4", "eval.tasks=4", "eval.splits=[test]", "train.threads=1"]
    train(load_recipe("recipes/gsm8k_tool.yaml", overrides + small))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "reward/answer" in lines[1]
    assert "reward/calc_gsm8k_reward" in lines[1]


def test_what_there_is_to_prepare(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data"]) == 0
    assert "gsm8k" in capsys.readouterr().out
    assert run(["rewards"]) == 0
    assert "math_verify" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8"], "no data 'gsm8' is installed; did you mean 'gsm8k'?"),
        (["gsm8k"], "--out DIR"),
        (["gsm8k", "--out", "{tmp}/file"], "file is a file, expected a folder"),
        (["gsm8k", "--out", "{tmp}/file/new", "--source", "generated", "--limit", "1"], "cannot be written"),
        (["gsm8k", "--out", "{tmp}/out", "--source", "none.jsonl"], "there is no file none.jsonl"),
        (
            ["gsm8k", "--out", "{tmp}/out", "sead=1"],
            "gsm8k.sead: multi_turn takes no such argument; did you mean 'seed'",
        ),
        (["gsm8k", "--out", "{tmp}/out", "seed=x"], "data gsm8k.seed"),
        (["gsm8k", "--out", "{tmp}/out", "seed"], "seed: expected KEY=VALUE"),
        (["gsm8k", "--out", "{tmp}/out", "--limit", "0"], "--limit"),
        (["data_functions:rows", "--out", "{tmp}/out", "--source", "x"], "takes no such argument"),
        (["data_functions:nothing", "--out", "{tmp}/out", "split=x"], "returned None; expected the rows of each split"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "file").write_text("")
    assert run(["data", *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)]) == BAD_USAGE
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_nothing_pays_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "poems.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Poem {n}"}) + "\n" for n in range(60)))
    overrides = ["env.name=dataset", f"env.source={path}", "env.args.reward=none", f"output={tmp_path / 'run'}"]
    assert run(["train", "recipes/gsm8k_tool.yaml", "tools=[]", *overrides]) == BAD_USAGE
    assert "gives no reward, and neither does a tool: name one in rewards.functions" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
