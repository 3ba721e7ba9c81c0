"""What `compare` is given: seeds of recipes, measures of samples, and evaluations that are unlike."""

import json
from pathlib import Path

import numpy as np
import pytest
from cli_help import refused
from evaluation_help import run_of, stored

import agentrl
from agentrl.checkpoint.code import code_state, read_code, record_code
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.eval.compare import sentences
from agentrl.eval.scan import keep
from agentrl.rollout.trajectory_file import read_rows, stored_files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def seeds(root: Path, lr: str, chances: list[float], tasks: int = 60) -> list[str]:
    """Runs of one recipe, each of which solves another share of the same tasks."""
    rng = np.random.default_rng(11)
    hard = rng.random(tasks)
    found = []
    for seed, chance in enumerate(chances):
        solved = [[float(rng.random() < (chance if one < 0.5 else chance**2))] for one in hard]
        found.append(str(run_of(root / f"lr{lr}-{seed}", solved, f"train.lr={lr}", f"train.seed={seed}")))
    return found


@pytest.mark.slow
def test_seeds_of_two_recipes_are_compared_as_recipes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = seeds(here / "runs", "1e-4", [0.2, 0.5, 0.8]), seeds(here / "runs", "3e-4", [0.5, 0.8, 0.9])
    assert main.run(["compare", *a, "vs", *b, "--json", "found.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The data cannot tell B from A" in said
    assert "This is about the recipes: 3 and 3 seeds, which spread by" in said
    assert "seeds a side" in said
    assert "recipes: train.lr 0.0001 (A), 0.0003 (B)" in said
    (one,) = json.loads(Path("found.json").read_text())["comparisons"]
    assert (one["about"], one["pairs"], len(one["means"]["A"]), len(one["means"]["B"])) == ("recipes", 60, 3, 3)
    assert one["variances"]["spread"] > 0.1
    assert one["difference"]["test"].startswith("t, ")
    alone = agentrl.compare(a[0], b[0]).paired[0]
    assert alone.apart  # two checkpoints are
    assert not alone.replicated
    assert main.run(["compare", a[0], b[0]]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "One seed a side: this is about these two checkpoints, not these two recipes" in said
    assert "where seeds spread by 1.5 points" in said


@pytest.mark.slow
def test_runs_of_a_folder_are_put_together_by_a_key(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeds(here / "runs", "3e-4", [0.9, 0.95])
    seeds(here / "runs", "1e-5", [0.1, 0.15])
    (here / "runs" / "empty").mkdir()
    found = agentrl.compare("runs", by=["train.lr"])
    assert [(side.letter, side.name, len(side.members)) for side in found.sides] == [
        ("A", "train.lr=1e-05", 2), ("B", "train.lr=0.0003", 2),
    ]  # fmt: skip
    assert found.paired[0].apart
    assert found.paired[0].found.value > 0.5
    assert "--by train.rl: " in refused(capsys, "compare", "runs", "--by", "train.rl")
    assert "all runs have the same (train.steps=100)" in refused(capsys, "compare", "runs", "--by", "train.steps")


def test_a_run_that_did_not_get_as_far_as_its_side_is_left_out_and_named(here: Path) -> None:
    for name, step in (("a0", 40), ("a1", 20), ("b0", 40), ("b1", 40)):
        keys = f"train.lr={1 if name[0] == 'a' else 3}e-4", f"train.seed={name[1]}"
        run_of(here / "runs" / name, [[1.0], [0.0]] * 5, *keys, step=step)
    found = agentrl.compare("runs", by=["train.lr"])
    assert [side.name for side in found.sides] == ["train.lr=0.0001", "train.lr=0.0003"]
    assert [[one.name for one in side.members] for side in found.sides] == [
        ["runs/a0@40"], ["runs/b0@40", "runs/b1@40"],
    ]  # fmt: skip
    assert found.notes == ("A: left out, since its other runs were evaluated after more steps: runs/a1@20",)
    assert found.paired[0].replicated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "vs"], "vs: name a run before and after it"),
        (["a", "a", "vs", "b"], "named twice on side A; a seed counts once"),
        (["a", "late", "vs", "b"], "no seeds of one recipe, since they were trained for different steps"),
        (["a", "b", "--on", "cots"], "--on cots: not a number of the samples, which have solved, reward, turns"),
        (["a", "b", "--on", "cost"], "--on cost: evaluation 1 of 2 has no cost: the recipe has no prices"),
        (["a", "vs", "b", "--by", "train.lr"], "--by and vs: the one or the other"),
        (["b/trajectories", "--by", "train.lr"], "no run with a stored evaluation is in it"),
    ],
)
def test_what_is_no_side_is_one_line(
    arguments: list[str], words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        run_of(here / name, [[1.0], [0.0], [1.0]])
    run_of(here / "late", [[1.0], [0.0], [1.0]], step=40)
    assert words in refused(capsys, "compare", *arguments)


def test_what_makes_evaluations_unlike_is_named_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(here / "a", [[1.0], [0.0]] * 5, "rollout.temperature=0.7", step=20)
    run_of(here / "b", [[0.0], [1.0]] * 5, "eval.rollout={temperature: 0}", "algorithm.kl_coef=0.1", step=0)
    for name in "ab":
        record_code(here / name)
    code = json.loads((here / "b/code.jsonl").read_text())
    (here / "b/code.jsonl").write_text(json.dumps(code | {"torch": "1.0"}) + "\n")
    found = agentrl.compare("a", "b")
    assert found.notes == (
        "after different training: A after step 20, B before training",
        "not played alike: rollout.temperature 0.7 (A), 0.0 (B)",
    )
    assert found.beside[0] == "recipes: algorithm.kl_coef 0.0 (A), 0.1 (B)"
    assert found.beside[1] == f"code: torch {code['torch']} (A), 1.0 (B)"
    assert main.run(["compare", "a", "b", "--page", "found.html"]) == 0
    said = capsys.readouterr().out
    assert said.index("after different training") < said.index("difference")
    assert "after different training" in Path("found.html").read_text()


def test_runs_that_are_no_seeds_of_one_recipe_are_named(here: Path) -> None:
    a = run_of(here / "a", [[1.0], [0.0]] * 5, "train.seed=1", "train.lr=1e-3")
    b = run_of(here / "b", [[1.0], [0.0]] * 5, "train.seed=1")
    c = run_of(here / "c", [[1.0], [0.0]] * 5, "train.seed=2")
    found = agentrl.compare(str(a), str(b), "vs", str(c))
    assert found.notes[:2] == (
        "A: its runs are not of one recipe, they differ in train.lr",
        "A: some of its runs have the same train.seed, so they vary less than seeds do",
    )


def test_seeds_that_were_not_played_alike_are_named(here: Path) -> None:
    a = run_of(here / "a", [[1.0], [0.0]] * 5, "train.seed=1", "eval.rollout={temperature: 0}")
    b = run_of(here / "b", [[1.0], [0.0]] * 5, "train.seed=2")
    c = run_of(here / "c", [[1.0], [0.0]] * 5, "train.seed=3", "eval.rollout={temperature: 0}")
    told = "its runs were not played alike, they differ in rollout.temperature"
    assert agentrl.compare(str(a), str(b), "vs", str(c)).notes == (f"A: {told}",)
    assert agentrl.compare(str(c), "vs", str(a), str(b)).notes == (f"B: {told}",)
    assert agentrl.compare(str(a), str(c), "vs", str(b)).notes == (
        "not played alike: rollout.temperature 0.0 (A), 1.0 (B)",
    )


@pytest.mark.parametrize("on", ["reward", "tokens", None])
def test_two_trained_runs_are_two_checkpoints_by_every_measure(on: str | None, here: Path) -> None:
    for name, seed, step in (("a", 1, 20), ("b", 2, 20), ("a", 1, 0)):
        run_of(here / name, [[0.3 + step / 100], [0.25]] * 6, f"train.seed={seed}", step=step)
    said = " ".join(sentences(agentrl.compare("a", "b", on=on).paired[0]))
    assert "One seed a side: this is about these two checkpoints, not these two recipes." in said
    assert "so many seeds" not in said
    assert "One seed" not in " ".join(sentences(agentrl.compare("a", on=on).paired[0]))  # the run before and after


def test_the_mean_reward_is_compared_where_nothing_is_solved(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(here / "a", [[0.3, 0.25]] * 12)
    stored(here / "b", [[0.6, 0.5]] * 12)
    assert main.run(["compare", "a", "b", "--page", "found.html", "--json", "found.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "test: no sample is solved, so the mean reward is compared" in said
    assert "B's mean of reward is 0.275 higher than A's (95 % interval" in said
    (one,) = json.loads(Path("found.json").read_text())["comparisons"]
    assert (one["measure"], one["apart"], one["also"]["measure"]) == ("reward", True, "solved")
    assert one["also"]["difference"]["value"] == 0
    assert "Differences in reward" in Path("found.html").read_text()


def test_accuracy_and_mean_reward_are_both_shown_where_they_are_not_the_same(here: Path) -> None:
    stored(here / "a", [[1.0, 0.2], [0.4, 0.1]] * 6)
    stored(here / "b", [[1.0, 1.0], [0.8, 0.1]] * 6)
    (one,) = agentrl.compare("a", "b").paired
    assert one.measure.name == "solved"
    assert one.also is not None
    assert one.also.means == (pytest.approx(0.425), pytest.approx(0.725))
    assert one.also.found.value == pytest.approx(0.3)
    result = agentrl.compare("a", "b").paired[0].results[0]
    assert result.reward == pytest.approx(0.425)
    assert result.reward_low < 0.425 < result.reward_high


@pytest.mark.parametrize("measure", ["reward", "answer", "turns", "tokens", "seconds", "tool_errors", "solved"])
def test_anything_that_a_sample_has_can_be_compared(measure: str, here: Path) -> None:
    stored(here / "a", [[0.2], [1.0], [0.7]] * 4)
    stored(here / "b", [[0.9], [1.0], [1.0]] * 4)
    (one,) = agentrl.compare("a", "b", on=measure).paired
    assert one.measure.name == measure
    assert one.also is None
    assert one.found.low <= one.found.value <= one.found.high
    if measure in ("reward", "answer"):
        assert one.found.value == pytest.approx(1 / 3)
        assert one.apart
        assert [pair.difference for pair in one.gained[:1]] == [pytest.approx(0.7)]


def test_findings_of_scanners_can_be_compared(here: Path) -> None:
    for name, found in (("a", [None, "x", "x", None]), ("b", ["x"] * 4)):
        stored(here / name, [[1.0], [0.0], [0.0], [1.0]])
        (file,) = stored_files(here / name / "trajectories")
        keep(file.path, [str(row["request"]) for row in read_rows(file.path, ["request"])], {"loop": found})
    (one,) = agentrl.compare("a", "b", on="loop").paired
    assert one.found.value == pytest.approx(0.5)
    stored(here / "c", [[1.0], [0.0], [0.0], [1.0]])
    with pytest.raises(UserError, match=r"--on loop: evaluation 2 of 2 was not scanned: run `agentrl scan`"):
        agentrl.compare("a", "c", on="loop")


def test_holm_counts_all_that_one_command_prints(here: Path) -> None:
    solved = [[1.0]] * 10 + [[0.0]] * 20
    for name, won in (("a", 0), ("b", 7), ("c", 7)):
        stored(here / name, [[1.0]] * (10 + won) + [[0.0]] * (20 - won))
    for name in "abc":  # another split
        (here / name / "trajectories/eval_test_0.parquet").rename(here / name / "trajectories/eval_other_0.parquet")
        stored(here / name, solved)
    found = agentrl.compare("a", "b", "c")
    assert [(one.split, one.b) for one in found.paired] == [
        ("other", "B"), ("other", "C"), ("test", "B"), ("test", "C"),
    ]  # fmt: skip
    assert found.paired[0].found.p == pytest.approx(2 / 2**7)
    assert found.paired[0].p == pytest.approx(4 * 2 / 2**7)


def test_the_code_of_a_run_is_kept_once_a_state(here: Path) -> None:
    record_code(here)
    record_code(here)
    (line,) = (here / "code.jsonl").read_text().splitlines()
    assert json.loads(line) == code_state() == read_code(here)
    assert {"agentrl", "python", "torch", "transformers"} <= read_code(here).keys()
    (here / "code.jsonl").write_text("[[[")
    assert read_code(here) == {}
    assert read_code(here / "nowhere") == {}
