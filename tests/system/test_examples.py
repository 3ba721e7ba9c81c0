"""The examples of the repository run as they are."""

import re
from pathlib import Path

import pytest
from paths import ROOT
from warm import Python

LOOP = ROOT / "examples" / "minimal_loop.py"
ONE = ROOT / "examples" / "one_rollout.py"


@pytest.mark.slow
def test_the_minimal_loop_is_a_page_that_trains_and_evaluates() -> None:
    assert len(LOOP.read_text(encoding="utf-8").splitlines()) <= 150
    small = ["train.steps=2", "train.threads=1", "rollout.tasks=2", "rollout.n=4", "eval.tasks=4"]
    process = Python([str(LOOP), *small])
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert re.findall(r"^step (\d)  reward \d\.\d{3}  loss ", said, re.M) == ["1", "2"]
    assert re.findall(r"^step (\d)  held-out accuracy: test \d", said, re.M) == ["0", "2"]


@pytest.mark.slow
def test_one_rollout_is_printed_token_by_token() -> None:
    assert len(ONE.read_text(encoding="utf-8").splitlines()) <= 100
    said, _ = (process := Python([str(ONE), "train.threads=1"])).communicate()
    assert process.returncode == 0, said
    parts = re.findall(r"^(render|generate|call|bridge) ", said, re.M)
    assert parts == ["render", "generate", *["call", "bridge", "generate"] * parts.count("call")]
    sampled, tokens = re.search(r"^reward    \{'answer': [01].0\}: (\d+) of (\d+) tokens", said, re.M).groups()  # type: ignore[union-attr]
    counts = re.findall(r"^\w+ +mask ([01]) +(\d+) tokens", said, re.M)
    assert sum(int(count) for mask, count in counts if mask == "1") == int(sampled)
    assert sum(int(count) for _, count in counts) == int(tokens)


@pytest.mark.slow
def test_an_agent_in_one_file_is_trained(tmp_path: Path) -> None:
    process = Python([str(ROOT / "examples" / "own_agent.py"), "1"], cwd=tmp_path)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert re.search(r"^held-out accuracy: \d+% -> \d+%$", said, re.M)


def test_the_task_in_one_file_is_that_of_its_page() -> None:
    """The page runs it (`test_docs.py`)."""
    page = (ROOT / "docs" / "tutorials" / "own_task.md").read_text(encoding="utf-8")
    code = (ROOT / "examples" / "own_task.py").read_text(encoding="utf-8")
    assert f'```python title="own_task.py"\n{code}```' in page


NOTEBOOK = """
import ast, asyncio, json, sys

flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        code = compile("".join(cell["source"]), cell["id"], "exec", flags)
        found = eval(code, globals())
        if asyncio.iscoroutine(found):
            asyncio.run(found)
"""
"""Runs the cells of a notebook in order, in one namespace, as Jupyter does, `await` at the top included."""


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    process = Python(["-c", NOTEBOOK, str(ROOT / "examples" / "first_run.ipynb")])
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert re.search(r"^2 \d\.\d+ \d groups teach \d+ calls$", said, re.M), said
