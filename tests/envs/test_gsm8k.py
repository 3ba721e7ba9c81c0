"""The environment `gsm8k`: its sources, what is held out, what is asked and what is paid."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from agentrl_envs.gsm8k.environment import SYSTEM_PROMPT, Gsm8k

from agentrl.errors import UserError
from agentrl.plugins.types import Session


def _write(path: Path, count: int, start: int = 0) -> Path:
    data = [
        {"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n:,}"}
        for n in range(start, start + count)
    ]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(data), path)
    return path


def _session(task: object, *said: str) -> Session:
    messages = [{"role": "user", "content": "?"}, *({"role": "assistant", "content": s} for s in said)]
    return Session("s", task, Random(0), 1e9, messages)


async def test_what_is_asked_and_paid() -> None:
    env = Gsm8k()
    task = env.tasks("train")[0]
    assert await env.create(_session(task)) == [{"role": "user", "content": task.data["question"]}]
    assert task.tools_kwargs["calc_gsm8k_reward"].create_kwargs == {"ground_truth": task.data["answer"]}
    right = await env.calc_reward(_session(task, "#### 1000001", f"#### {task.data['answer']}"))
    wrong = await env.calc_reward(_session(task, f"#### {task.data['answer']}", "#### 1000001"))
    assert (right, wrong) == ({"answer": 1.0}, {"answer": 0.0})
    assert await env.calc_reward(_session(task)) == {"answer": 0.0}
    assert env.solved({"answer": 1.0, "tool": -0.5}, env.tasks("train")[0])
    assert not env.solved({"answer": 0.0, "tool": 1.0}, env.tasks("train")[0])
    assert (await env.execute(_session(task), {"role": "assistant", "content": "#### 1"})).done


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_a_file_with_its_test_file_beside_it(tmp_path: Path, suffix: str) -> None:
    path = _write(tmp_path / f"train{suffix}", 5, 600)
    _write(tmp_path / f"test{suffix}", 3)
    env = Gsm8k(str(path))
    assert env.splits == ("test",)
    assert [t.data["answer"] for t in env.tasks("train")] == ["1200", "1202", "1204", "1206", "1208"]
    assert [t.id for t in env.tasks("test")] == ["test-0", "test-1", "test-2"]
    opening = await env.create(_session(env.tasks("train")[0]))
    assert opening == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "What is 600 plus 600?"},
    ]


def test_a_lone_file_holds_a_seeded_tenth_out(tmp_path: Path) -> None:
    path = str(_write(tmp_path / "mine.jsonl", 400))
    env = Gsm8k(path)
    held_out = {t.data["question"] for t in env.tasks("test")}
    train = {t.data["question"] for t in env.tasks("train")}
    assert not train & held_out
    assert len(train | held_out) == 400
    assert {t.data["question"] for t in Gsm8k(path).tasks("test")} == held_out
    assert {t.data["question"] for t in Gsm8k(path, seed=1).tasks("test")} != held_out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"answer": "#### 5"}', "line 2: has no field 'question'; it has 'answer'"),
        ('{"question": "", "answer": "#### 5"}', "line 2, field 'question': expected text, got ''"),
        ('{"question": "How many?", "answer": 5}', "line 2, field 'answer': expected text, got 5"),
        ('{"question": "How many?", "answer": "#### many"}', "line 2, field 'answer': no answer in"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "Two?", "answer": "#### 2"}\n' + line + "\n")
    with pytest.raises(UserError, match=f"train.jsonl, {message.replace('[', '.')}"):
        Gsm8k(str(path)).tasks("train")


def test_a_bad_parquet_row(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows_ = [{"question": "Two?", "answer": "#### 2"}, {"question": None, "answer": "#### 2"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows_), tmp_path / "train.parquet")
    with pytest.raises(UserError, match="row 2, field 'question': expected text, got None"):
        Gsm8k(str(tmp_path / "train.parquet")).tasks("train")


def test_a_hub_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"question": "Two?", "answer": "#### 2"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    env = Gsm8k("openai/gsm8k")
    assert [t.data["answer"] for t in env.tasks("test")] == ["2"]
    assert asked == [("openai/gsm8k", "main", "test")]
    assert Gsm8k("somebody/else").splits == ("test",)


def test_generated_problems_alone_are_demonstrated(tmp_path: Path) -> None:
    env = Gsm8k()
    task = env.tasks("train")[0]
    assert env.demonstrate(task, Random(0), "clean")[-1]["content"] == f"#### {task.data['answer']}"
    real = Gsm8k(str(_write(tmp_path / "test.jsonl", 1)))
    with pytest.raises(UserError, match="generated problems only"):
        real.demonstrate(real.tasks("test")[0], Random(0), "clean")


@pytest.mark.slow
def test_it_imports_no_torch() -> None:
    program = "import sys, agentrl_envs.gsm8k.environment\nassert not {'torch', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
