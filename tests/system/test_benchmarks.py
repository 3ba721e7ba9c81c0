"""The benchmarks beside other software print their tables, at the smallest size; the numbers are nobody's business."""

import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

FOLDER = ROOT / "benchmarks"


def table(script: str, *arguments: str) -> str:
    """Run a benchmark and return what it printed."""
    command = [sys.executable, str(FOLDER / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_model_of_real_size_beside_transformers() -> None:
    rows = re.findall(
        r"^(\w+)[^\n]*?(bfloat16|float32) +[\d.]+ +[\d.]+ +[\d.]+  ", table("real_model.py", "--quick"), re.M
    )
    counted = {row: rows.count(row) for row in rows}
    assert counted == {
        ("decode", "bfloat16"): 3, ("decode", "float32"): 1, ("prefill", "bfloat16"): 1, ("prefill", "float32"): 1,
        ("train", "bfloat16"): 1, ("train", "float32"): 1, ("lora", "bfloat16"): 1, ("lora", "float32"): 1,
    }  # fmt: skip


@pytest.mark.long
def test_one_environment_class_in_both_trainers() -> None:
    """TRL ends with the first reset that raises; here the rollout is tried again."""
    instant, slow, faults = table("vs_trl.py", "--quick").splitlines()[-3:]
    for line in (instant, slow):
        assert re.search(r"(?:  +[\d.]+){8}(?:  unequal work: of a token)?$", line), line
    assert re.search(r"(?:  +[\d.]+){3} +TRL ends in step \d: ConnectionError", faults), faults


@pytest.mark.long
def test_intervals_cover_and_tests_find_what_they_say() -> None:
    """With 400 simulations a share is off by up to 3 points, twice its standard error."""
    said = table("intervals.py", "--runs", "400")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    accuracy = [row for row in cells if len(row) == 5 and row[0] in ("128", "500")]
    power = [row for row in cells if len(row) == 5 and row not in accuracy]
    compared = {tuple(row[:4]): row[4:] for row in cells if len(row) == 7}
    assert (len(accuracy), len(power), len(compared)) == (8, 12, 70)
    assert min(share(row[2]) for row in accuracy) >= 0.90
    assert min(share(row[0]) for row in compared.values()) >= 0.90
    assert max(share(row[1]) for key, row in compared.items() if key[3] == "0") <= 0.08
    assert share(compared["500", "1", "30 % differ", "10"][1]) >= 0.9
    assert min(share(row[4]) for row in power) >= 0.7


def share(text: str) -> float:
    return float(text.rstrip("%")) / 100


async def test_the_environment_of_both_raises_and_pays_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import vs_trl

    monkeypatch.setattr(vs_trl.Scales, "resets", 0)
    scales, raised = vs_trl.Scales(faults=True), 0
    for row in vs_trl.rows(2 * vs_trl.ONE_IN, seed=0):
        try:
            scales.reset(**row)
        except ConnectionError:
            raised += 1
    assert raised == 2
    scales.reset(shelf=3)
    heaviest = max(int(scales.weigh(box=box)) for box in (7, 40))
    assert scales.get_reward() == heaviest / 1000
    told = [message["content"] for message in vs_trl.demonstration({"prompt": [], "shelf": 3}, vs_trl.random.Random(0))]
    assert told[-1] == "Two boxes are weighed."
    assert len(told) == 5


def test_drafts_are_counted_as_rejection_sampling_would_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import speculation

    prompt, answer = [7, 1, 2, 3, 4, 9, 1, 2], [3, 4, 8, 1, 2, 3]
    own = [False] * len(prompt) + [True] * len(answer)
    # 3 4 are drafted and kept, with 8 behind them; 1 and 2 have no draft; then 3 is drafted, and the answer ends
    assert speculation.kept(prompt + answer, own, 2) == (6, 4)
    assert speculation.kept(prompt + answer, own, 1) == (6, 5)  # 3 and 4; then 9 is drafted, not 8; 1; 2; 3
    assert speculation.kept([1, 2, 3, 4], [False, False, True, True], 4) == (2, 2)
