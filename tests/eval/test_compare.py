"""Comparisons: the test, the interval and the power by simulation, and what the command says of stored evaluations."""

import json
import math
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from cli_help import refused
from evaluation_help import stored
from train_help import small

import agentrl
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.eval import paired
from agentrl.eval.paired import bootstrap_interval, difference, difference_shown, holm, permutation_p, tasks_needed


@pytest.mark.parametrize(("up", "down"), [(0, 0), (1, 0), (6, 0), (5, 5), (12, 4), (30, 55)])
def test_one_sample_a_side_is_mcnemars_exact_test(up: int, down: int) -> None:
    values = [1.0] * up + [-1.0] * down + [0.0] * 40
    n = up + down
    tail = sum(math.comb(n, k) for k in range(max(up, down), n + 1)) / 2**n
    p, exact = permutation_p(np.array(values), 1)
    assert exact
    assert p == pytest.approx(min(1.0, 2 * tail) if up != down else 1.0)
    assert difference(values, 1, mcnemar=True).test == "exact McNemar"


def test_the_permutation_test_counts_every_exchange() -> None:
    d = np.array([0.5, -0.25, 0.75, 0.25, 0.0, 1.0, -0.5])
    sums = [sum(sign * abs(one) for sign, one in zip(signs, d, strict=True)) for signs in product((1, -1), repeat=7)]
    wanted = sum(abs(one) >= abs(d.sum()) - 1e-9 for one in sums) / 2**7
    assert permutation_p(d, 4) == (pytest.approx(wanted), True)
    drawn, exact = permutation_p(d)
    assert not exact
    assert drawn == pytest.approx(wanted, abs=0.01)


def test_the_interval_holds_nothing_where_the_test_says_so_and_else_it_does() -> None:
    rng = np.random.default_rng(1)
    for shift in (-0.1, 0.0, 0.08, 0.1, 0.3):
        d = rng.choice([1.0, 0.0, -1.0], 120, p=[0.15 + shift / 2, 0.7, 0.15 - shift / 2])
        found = difference(d, 1)
        assert found == difference(d, 1)  # seeded
        assert found.low <= found.value <= found.high
        assert (found.low < 0 < found.high) == (found.p >= 0.05)


def test_no_task_that_differs_says_little_of_few_tasks() -> None:
    few, many = (difference([0.0] * count, 1) for count in (10, 1000))
    assert few.p == many.p == 1.0
    assert few.high - few.low > 0.3 > 0.01 > many.high - many.low > 0


def test_holm_raises_what_many_comparisons_find_by_chance() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.2]) == [0.2]


def drawn(rng: np.random.Generator, runs: int, tasks: int, samples: int, shift: float, discord: float) -> np.ndarray:
    """Differences [runs, tasks]: with one sample a side `discord` of the tasks differ; with more, both sides solve a
    task by a chance of its own (beta, with two modes), and `shift` more of them is solved by B."""
    if samples == 1:
        up = (discord + shift) / 2
        return rng.choice([1.0, -1.0, 0.0], (runs, tasks), p=[up, discord - up, 1 - discord])
    a = rng.beta(0.5, 0.5, (runs, tasks))
    b = np.where(rng.random(a.shape) < 2 * shift, 1.0, a)
    return (rng.binomial(samples, b) - rng.binomial(samples, a)) / samples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "samples", "shift", "discord"),
    [(128, 1, 0.0, 0.3), (128, 1, 0.02, 0.02), (500, 1, 0.1, 0.3), (128, 4, 0.0, 0.0), (500, 16, 0.05, 0.0)],
)
def test_by_simulation(tasks: int, samples: int, shift: float, discord: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few runs: `benchmarks/intervals.py` has many, of more kinds of tasks."""
    monkeypatch.setattr(paired, "RESAMPLES", 1000)
    runs = 150
    found = [difference(row, samples) for row in drawn(np.random.default_rng(2), runs, tasks, samples, shift, discord)]
    alarms = sum(one.p < 0.05 for one in found) / runs
    assert sum(one.low <= shift <= one.high for one in found) / runs >= 0.91
    if shift == 0.0:
        assert alarms <= 0.09
    elif shift == 0.1:
        assert alarms >= 0.9


@pytest.mark.parametrize(("samples", "shift", "discord"), [(1, 0.06, 0.2), (4, 0.04, 0.0)])
def test_as_many_tasks_as_are_said_show_the_difference(samples: int, shift: float, discord: float) -> None:
    rng = np.random.default_rng(4)
    first = drawn(rng, 1, 400, samples, shift, discord)[0]
    needed = tasks_needed(first, shift, 1 / samples)
    tasks = drawn(rng, 300, needed, samples, shift, discord)
    assert 0.73 <= sum(permutation_p(row, samples)[0] < 0.05 for row in tasks) / 300 <= 0.93
    shown = difference_shown(first, 1 / samples)
    assert tasks_needed(first, shown, 1 / samples) <= 400 < tasks_needed(first, 0.98 * shown, 1 / samples)


def test_the_bootstrap_covers_what_hardly_ever_happens() -> None:
    low, high = bootstrap_interval(np.array([1.0] + [0.0] * 127))
    assert low < 0 < 0.03 < high


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_compared_with_itself_before(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(here / "run", [[0.0]] * 20 + [[1.0]] * 4, step=0)
    stored(here / "run", [[1.0]] * 18 + [[0.0]] * 3 + [[1.0]] * 3, step=8)
    assert main.run(["compare", "run", "--json", "found.json", "--limit", "2"]) == 0
    said = capsys.readouterr().out
    assert "test, B against A: B solves 70.8 points more than A (95 % interval" in said
    assert "24 tasks show differences from" in said
    assert "gained: t0, t1 and 16 more" in said
    assert "agentrl show run --split test --step 8 --task t0" in said
    assert "lost: t20\n" in said
    found = json.loads(Path("found.json").read_text())
    assert [found["sides"][one]["name"] for one in "AB"] == ["run@0", "run@8"]
    (one,) = found["comparisons"]
    assert (one["pairs"], len(one["gained"]), len(one["lost"]), one["apart"]) == (24, 18, 1, True)
    assert one["difference"]["test"] == "exact McNemar"
    assert one["gained"][0] == {"task": "t0", "a": [0, 1], "b": [1, 1]}
    same = agentrl.compare("run@8", "run")
    assert same.paired[0].found.value == 0.0
    assert not same.paired[0].apart


def test_three_are_compared_with_the_first_by_the_tasks_that_pair(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(here / "a", [[1.0, 0.0]] * 30)
    stored(here / "b", [[1.0, 1.0]] * 29 + [[None, None]])
    stored(here / "c", [[1.0, None]] * 20)
    found = agentrl.compare("a", "b", "c")
    first, second = found.paired
    assert (first.a, first.b, len(first.pairs), dict(first.alone)) == ("A", "B", 29, {"every sample failed": 1})
    assert (second.b, len(second.pairs), dict(second.alone)) == ("C", 20, {"A alone has them": 10})
    assert first.found.value == second.found.value == 0.5
    assert first.p > first.found.p
    assert first.found.test == "exact permutation"
    assert found.notes == (
        "test, B against A: tasks without a pair: every sample failed: 1",
        "test, C against A: tasks without a pair: A alone has them: 10",
    )
    assert main.run(["compare", "a", "b", "c", "--page", "found.html"]) == 0
    said, page = capsys.readouterr().out, Path("found.html").read_text()
    assert all(text.index(found.notes[0]) < text.index("50.0%") for text in (said, page))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a"], "a: has one evaluation only; name what it is to be compared with"),
        (["a", "nowhere"], "nowhere: there is no such folder, nor is it a model's name on the hub"),
        (["a", "a@7"], "a@7: no evaluation after step 7 is stored there; stored are those after 0"),
        (["a", "other_env"], "test: a is of environment e, other_env of f"),
        (["a", "other_tasks"], "a and other_tasks have no task in common: A alone has them (3), B alone has them (3)"),
        (["a", "other_data"], "have no task in common: the task's data are not the same (3)"),
        (["a", "a", "--split", "tset"], "--split tset: not every one has it; did you mean 'test'?"),
        (["a", "broken"], "eval_test_0.parquet: cannot be read"),
        (["a", "org/model"], "org/model: not evaluated yet, and nothing else that is compared has a recipe"),
        (["a", "empty"], "empty: neither a run or evaluation with stored conversations"),
        (["a", "unfinished"], "an evaluation that is not whole: agentrl eval --resume unfinished"),
        (["a", "a", "--difference", "0"], "--difference 0: expected a share above 0"),
        (["a", "a", "--page", "nowhere/x.html"], "--page nowhere/x.html: cannot be written"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    arguments: list[str], words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(here / "a", [[1.0], [0.0], [1.0]])
    stored(here / "other_env", [[1.0]] * 3, env="f")
    stored(here / "other_tasks", [[1.0]] * 3, ids="u")
    stored(here / "other_data", [[1.0]] * 3, data="another")
    shutil.copytree("a", "broken")
    Path("broken/trajectories/eval_test_0.parquet").write_bytes(b"PAR1 nothing")
    Path("empty").mkdir()
    Path("unfinished/trajectories").mkdir(parents=True)
    Path("unfinished/trajectories/.eval_test_0.part_1.parquet").touch()
    assert words in refused(capsys, "compare", *arguments)


def test_what_differs_little_is_not_told_apart(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(here / "a", [[1.0]] * 40 + [[0.0]] * 40)
    stored(here / "b", [[0.0]] * 3 + [[1.0]] * 42 + [[0.0]] * 35)
    with pytest.raises(UserError, match="at most 1"):
        agentrl.compare("a", "b", wanted=2.0)
    assert main.run(["compare", "a", "b", "--difference", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "The data cannot tell B from A: +2.5 points (95 % interval" in said
    assert "2.5 points as seen here need" in said
    assert "10.0 points need" in said


def test_the_page_holds_what_was_found_and_no_text_acts_in_it(here: Path) -> None:
    evil = "<script>alert(1)</script>"
    stored(here / "a", [[0.0]] * 20 + [[1.0]], data=evil, ids=evil)
    stored(here / "b", [[1.0]] * 20 + [[0.0]], data=evil, ids=evil)
    assert main.run(["compare", "a", "b", "--page", "found.html"]) == 0
    page = Path("found.html").read_text()
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert page.count("<details>") == 12 + 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;0" in page
    assert "Gained: 20" in page
    assert "Lost: 1" in page
    assert "B solves" in page
    assert len(page) < 60_000


@pytest.mark.slow
def test_a_model_is_evaluated_as_what_it_is_compared_with(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agentrl.evaluate(small(), splits=["test"], samples=2, keep="first")
    assert main.run(["compare", "first", "tiny"]) == 0
    said = capsys.readouterr().out
    assert "tiny is evaluated now, and kept in evals/tiny-1" in said
    assert "The data cannot tell B from A: +0.0 points" in said
    found = agentrl.compare("first", "evals/tiny-1")
    assert [result.samples for result in found.paired[0].results] == [8, 8]
