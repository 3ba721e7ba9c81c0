"""The split that the best checkpoint is chosen on: held out from everything else, and chosen by in a run."""

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentrl_envs.code.generate import problem as code_problem
from agentrl_envs.gsm8k.problems import problem as gsm8k_problem
from agentrl_envs.user_sim.generate import scenario
from paths import RECIPES
from rich.console import Console
from train_help import metrics, records, small, write_lines

import agentrl
from agentrl.cli import main
from agentrl.eval.evaluate import choosing_split, chosen_splits, model_of
from agentrl.eval.result import Accuracy
from agentrl.eval.statistics import wilson
from agentrl.plugins.registry import make_environment
from agentrl.plugins.types import Task
from agentrl.recipe.sections.env import EnvSection
from agentrl.training.display import Display
from agentrl.training.run import TrainResult

RECIPE = str(RECIPES / "gsm8k_tool.yaml")
Name = Callable[[Task], Any]


def _gsm8k(task: Task) -> Any:
    made = gsm8k_problem(task.data["split"], task.data["index"], task.data["seed"])
    return made.kind, made.numbers


def _code(task: Task) -> Any:
    made = code_problem(task.data["split"], task.data["index"], task.data["seed"])
    return made.kind, made.reference.partition("\n")[2]


def _user_sim(task: Task) -> Any:
    made = scenario(task.data["split"], task.data["index"], task.data["seed"])
    return made.kind.name, *made.facts.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("gsm8k", _gsm8k),
        ("code", _code),
        ("search_qa", lambda task: task.data["question"]),
        ("text_game", lambda task: task.data["map"]),
        ("user_sim", _user_sim),
    ],
)
def test_a_generated_environment_keeps_a_split_apart(name: str, asked: Name) -> None:
    env = make_environment(EnvSection(name=name))
    assert env.splits[0] == "test"
    assert env.splits[-1] == "validation"
    own = {asked(task) for task in list(env.tasks("validation"))[:300]}
    assert len(own) > 100
    for split in ("train", *env.splits[:-1]):
        tasks = env.tasks(split)
        others = {asked(tasks[index]) for index in range(min(len(tasks), 1_000))}
        assert not own & others, split


@pytest.mark.parametrize(
    ("name", "digests"),
    [
        ("gsm8k", {"train": "fff45d1f", "test": "10ac5c3c", "phrasing": "e4aad78f", "large": "9bfde130"}),
        ("code", {"train": "d2efe1b5", "test": "667630b2", "kinds": "0f07cc4a"}),
        ("search_qa", {"test": "d96720b6", "two_hop": "efa6b8f2"}),
        ("text_game", {"train": "5907c7ee", "test": "19deef84", "large": "ee501164"}),
        ("user_sim", {"train": "b3ba0c7b", "test": "2bfecec1", "wording": "13c50732"}),
    ],
)
def test_no_other_task_changed_for_it(name: str, digests: dict[str, str]) -> None:
    """What was made before there was a validation split; search_qa's questions of training are those that are left."""
    env = make_environment(EnvSection(name=name))
    for split, digest in digests.items():
        tasks = env.tasks(split)
        text = "\n".join(f"{task.id} {dict(task.data)}" for task in (tasks[index] for index in range(100)))
        assert hashlib.sha256(text.encode()).hexdigest().startswith(digest), split


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, str]:
    """A run that is evaluated at each step, and what it said."""
    recipe = small(tmp_path_factory.mktemp("chosen") / "run", eval={"every": 1, "tasks": 4})
    console = Console(file=io.StringIO(), width=200)
    result = agentrl.train(recipe, display=Display(3, "chosen", console))
    return result, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_training_is_evaluated_and_chosen_by_the_validation_split(run: tuple[TrainResult, str]) -> None:
    result, said = run
    evaluated = [sorted({k.split("/")[1] for k in row if k.startswith("eval/")}) for row in metrics(result.folder)]
    reported = ["large", "phrasing", "test"]
    assert evaluated == [reported, ["validation"], ["validation"], [*reported, "validation"]]
    assert sorted(result.before) == sorted(result.after) == reported
    accuracies = [row.get("eval/validation/accuracy", -1.0) for row in metrics(result.folder)]
    best = json.loads((result.folder / "checkpoints" / "best.json").read_text())
    assert best["split"] == "validation"
    assert best["accuracy"] == max(accuracies) == accuracies[best["step"]]
    assert "is chosen on" not in said


@pytest.mark.slow
def test_the_final_table_has_intervals(run: tuple[TrainResult, str]) -> None:
    result, said = run
    for split, value in result.after.items():
        (line,) = [line for line in said.splitlines() if line.strip("│ ").startswith(f"{split} ")]
        low, high = wilson(value * 4, 4)
        assert f"{value:.1%} ({low:.1%} to {high:.1%})" in line


@pytest.mark.slow
def test_every_session_of_a_run_has_an_id_of_its_own(run: tuple[TrainResult, str]) -> None:
    files = sorted((run[0].folder / "trajectories").iterdir())
    ids = [record["request"] for file in files for record in records(run[0].folder, file.stem)]
    assert len(files) == 3 + 3 + 3 + 3  # steps; before; chosen by; after
    assert len(set(ids)) == len(ids)


@pytest.mark.slow
def test_the_intervals_before_training_outlive_a_stop(run: tuple[TrainResult, str]) -> None:
    state = json.loads((run[0].checkpoint / "trainer" / "state.json").read_text())
    for split, saved in state["extra"]["before"].items():
        assert Accuracy.read(saved).value == run[0].before[split]
        assert Accuracy.read(saved).low is not None
    assert str(Accuracy.read(0.25)) == "25.0%"  # as runs of before are written


@pytest.mark.slow
def test_own_data_without_one_is_chosen_on_what_is_reported_and_says_so(tmp_path: Path) -> None:
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(8)]
    for name in ("train", "test"):
        write_lines(tmp_path / f"{name}.jsonl", rows)
    recipe = small(
        tmp_path / "run", env={"name": "gsm8k", "source": str(tmp_path / "train.jsonl")}, eval={"every": 1, "tasks": 2}
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    result = agentrl.train(recipe, display=Display(3, "own", console))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("the best checkpoint is chosen on test, which is also reported") == 1
    assert json.loads((result.folder / "checkpoints" / "best.json").read_text())["split"] == "test"


@pytest.mark.parametrize(
    ("held_out", "changes", "reported", "choosing"),
    [
        (("test", "large", "validation"), {}, ("test", "large"), "validation"),
        (("test", "large", "validation"), {"splits": ["large"]}, ("large",), "validation"),
        (("test", "validation"), {"splits": ["validation"]}, ("validation",), "validation"),
        (("test", "validation"), {"every": 0}, ("test",), "test"),
        (("test", "validation"), {"splits": []}, (), None),
        (("dev", "test"), {}, ("test",), "dev"),
        (("validation",), {}, ("validation",), "validation"),
        (("hard", "test"), {}, ("hard", "test"), "hard"),
        (("a.test", "a.validation", "b.test"), {}, ("a.test", "b.test"), "a.validation"),
    ],
)
def test_which_splits_are_reported_and_which_one_chooses(
    held_out: tuple[str, ...], changes: dict[str, Any], reported: tuple[str, ...], choosing: str | None
) -> None:
    env = make_environment(EnvSection())
    env.splits = held_out
    recipe = small(eval={"every": 1, **changes})
    found = chosen_splits(env, recipe)
    assert found == reported
    assert choosing_split(env, recipe, found) == choosing


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, RECIPE])
def test_a_runs_folder_stands_for_its_best_checkpoint(
    run: tuple[TrainResult, str], tmp_path: Path, recipe: str | None
) -> None:
    """`agentrl eval RUN`, and `agentrl eval RECIPE --model RUN`."""
    folder, found = run[0].folder, tmp_path / "found.json"
    best = json.loads((folder / "checkpoints" / "best.json").read_text())
    small_ones = ["eval.tasks=4", "--split", "validation", "--json", str(found)]
    given = [str(folder)] if recipe is None else [recipe, "--model", str(folder)]
    assert main.run(["eval", *given, *small_ones, "--no-keep"]) == 0
    said = json.loads(found.read_text())
    assert said["model"] == str(folder / "checkpoints" / best["path"])
    if recipe is None:  # whose limits of a conversation differ from those of the run
        assert said["splits"]["validation"]["accuracy"] == best["accuracy"]


def test_a_run_without_a_checkpoint_cannot_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("env: {name: gsm8k}\n")
    assert main.run(["eval", str(tmp_path)]) == 2
    assert "this run has saved no checkpoint to be evaluated" in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert model_of(str(tmp_path)) == str(tmp_path / "model")  # that a warm start left
