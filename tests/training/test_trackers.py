"""Trackers: the run never waits for one, and what ships writes what it should by its own package."""

import json
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import secrets
from agentrl.errors import UserError
from agentrl.plugins.registry import tracker_makers
from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.track import TrackerSection
from agentrl.training import trackers as trackers_module
from agentrl.training.trackers import SAMPLES, Trackers, samples_of
from agentrl.trajectory import FinishReason, Group, Trajectory

HERE = __name__


class Told(Tracker):
    """Remembers what it is told; hangs at step `at`, where `reached` is set, until `free` is set."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.steps = at, []
        self.reached, self.free = threading.Event(), threading.Event()

    def start(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.folder = folder

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self.at:
            self.reached.set()
            self.free.wait()
        self.steps.append(step)


def followed(told: Told, steps: int, said: list[str]) -> None:
    """Start, log so many steps, finish. A log that waited for a tracker that hangs would never return."""
    with ExitStack() as stack:
        trackers = Trackers(said.append)
        trackers.start({"told": lambda: told}, Path(), {}, stack)
        for step in range(steps):
            trackers.log(step, {"step": step})
        assert told.reached.wait(60)


def test_a_tracker_that_hangs_delays_nothing_and_is_said_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers_module, "FLUSH_SECONDS", 0.1)
    said: list[str] = []
    told = Told(at=1)
    followed(told, 4, said)
    told.free.set()
    assert said == [
        "track.trackers: told failed at step 1 and is switched off: TimeoutError: no answer within 0.1 s; 2 more were "
        "not sent (metrics.jsonl has everything)"
    ]


def test_one_that_hangs_while_the_run_goes_on_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers_module, "SECONDS", 0.02)
    said: list[str] = []
    told, step = Told(at=0), 0
    with ExitStack() as stack:
        trackers = Trackers(said.append)
        trackers.start({"told": lambda: told}, Path(), {}, stack)
        while trackers:
            trackers.log(step, {"step": step})
            threading.Event().wait(0.005)
            step += 1
    told.free.set()
    (line,) = said
    assert "told failed at step 0 and is switched off: TimeoutError: no answer within 0.02 s" in line


def test_what_a_slow_one_cannot_take_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers_module, "WAITING", 3)
    said: list[str] = []
    told = Told(at=0)
    with ExitStack() as stack:
        trackers = Trackers(said.append)
        trackers.start({"told": lambda: told}, Path(), {}, stack)
        for step in range(8):
            trackers.log(step, {"step": step})
        told.free.set()
    assert told.steps == [0, 1, 2]
    assert [line.partition(" (")[0] for line in said] == [
        "track.trackers: told is too slow: rows are dropped",
        "track.trackers: told was too slow: 5 rows were dropped",
    ]


def made(*given: Any) -> dict[str, Any]:
    return tracker_makers([TrackerSection.model_validate(one) for one in given])


def test_trackers_have_arguments_and_there_may_be_several_of_one_name() -> None:
    name = f"{HERE}:Told"
    makers = made({"name": name, "args": {"at": 3}}, {"name": name})
    assert [*makers] == [name, f"{name} #2"]
    assert [make().at for make in makers.values()] == [3, None]
    recipe = Recipe.model_validate({"track": {"trackers": ["wandb", {"name": "mlflow", "args": {"project": "x"}}]}})
    assert [tracker.name for tracker in recipe.track.trackers] == ["wandb", "mlflow"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"name": f"{HERE}:Told", "args": {"a": 1}}, r"track\.trackers\..*args.*'?a\b"),
        ({"name": "wanbd"}, r"no tracker 'wanbd' is installed; did you mean 'wandb'"),
        ({"name": f"{HERE}:HERE"}, r"expected a Tracker class"),
        ({"name": "tensorboard", "args": {"tag": ["x"]}}, r"did you mean.*tags"),
    ],
)
def test_a_wrong_tracker_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        made(given)


def test_a_package_that_is_not_there_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(UserError, match=r"^track.trackers: wandb cannot start: .*pip install 'agentrl\[wandb\]'"):
        Trackers(print).start(made({"name": "wandb"}), Path(), {}, ExitStack())


def group(number: int, reward: float) -> Group:
    ids = np.zeros(3, np.int32)
    messages = (
        {"role": "user", "content": "1+1 <b>*?*</b> s3cret-token"},
        {"role": "assistant", "content": "It is 2."},
    )
    one = Trajectory(
        request_id=f"t{number}#0", task=Task(f"t{number}", {}), sample=0, ids=ids, loss_mask=ids.astype(np.uint8),
        logprobs=ids.astype(np.float32), weight_version=ids, prompt_length=1, turns=(), messages=messages,
        rewards={"answer": reward}, finish=FinishReason.STOP,
    )  # fmt: skip
    return Group(one.task, (one,))


def shown(groups: list[Group]) -> list[dict[str, Any]]:
    secrets.remember(["s3cret-token"])
    return samples_of(groups, lambda t: t.reward > 0, lambda task: "home")


@pytest.mark.parametrize(("wrong", "right", "failed"), [(20, 20, 4), (1, 20, 1), (20, 1, 7), (2, 2, 2), (0, 0, 0)])
def test_conversations_are_of_both_kinds(wrong: int, right: int, failed: int) -> None:
    found = shown([group(n, float(n >= wrong)) for n in range(wrong + right)])
    assert [one["solved"] for one in found].count(False) == failed
    assert len(found) == min(SAMPLES, wrong + right)
    assert not found or "s3cret" not in json.dumps(found)


MLFLOW = {"name": "mlflow", "args": {"project": "p", "tags": {"a": "b"}}}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder after all trackers that ship were told three steps and an evaluation."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    folder.mkdir()
    given = [
        {"name": "tensorboard", "args": {"tags": ["a"]}},
        {"name": "wandb", "args": {"mode": "offline", "project": "p", "tags": ["a"]}},
        MLFLOW,
        {"name": "trackio", "args": {"project": "p", "folder": str(folder / "trackio")}},
    ]
    said: list[str] = []
    recipe = Recipe.model_validate({"track": {"trackers": given}})
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(trackers_module, "FLUSH_SECONDS", 200.0)
        for name in ("TRACKIO_DIR", "MLFLOW_ALLOW_FILE_STORE"):
            patch.setenv(name, "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        trackers = Trackers(said.append)
        trackers.start(tracker_makers(recipe.track.trackers), folder, recipe.shown(), stack)
        trackers.conversations(0, "test", shown([group(0, 0.0), group(1, 1.0)]))
        for step in range(3):
            row = {"step": step, "eval/test/accuracy": step / 4, "bad": float("nan"), "text": "x", "not/odd:name!": 1}
            trackers.log(step, row)
        stack.close()
    assert said == []
    return folder


@pytest.mark.slow
def test_tensorboard_has_scalars_and_conversations(tracked: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tracked / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"eval/test/accuracy", "not/odd:name!"}
    assert [(one.step, one.value) for one in found.Scalars("eval/test/accuracy")] == [(0, 0), (1, 0.25), (2, 0.5)]
    text = found.Tensors("test/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    1+1 <b>*?*</b> ***" in text  # as code


@pytest.mark.slow
def test_mlflow_has_metrics_parameters_and_conversations_and_goes_on_where_a_run_is_resumed(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    client = MlflowClient(tracking_uri=str(tracked / "mlruns"))
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    history = client.get_metric_history(run.info.run_id, "eval/test/accuracy")
    assert [(one.step, one.value) for one in history] == [(0, 0), (1, 0.25), (2, 0.5)]
    assert (run.info.status, run.data.tags["a"], run.data.params["env.name"]) == ("FINISHED", "b", "gsm8k")
    (text,) = tracked.glob("mlruns/**/conversations/test_0.md")
    assert "It is 2." in text.read_text()

    again = tracker_makers(Recipe.model_validate({"track": {"trackers": [MLFLOW]}}).track.trackers)["mlflow"]()
    again.start(tracked, {"env": {"name": "another"}, "new": 1})
    assert client.get_run(run.info.run_id).info.status == "RUNNING"
    again.log(3, {"eval/test/accuracy": 1.0})
    again.finish()
    (resumed,) = client.search_runs([run.info.experiment_id])
    assert len(client.get_metric_history(run.info.run_id, "eval/test/accuracy")) == 4
    assert (resumed.info.status, resumed.data.params["env.name"], resumed.data.params["new"]) == (
        "FINISHED",
        "gsm8k",
        "1",
    )
    client.delete_run(run.info.run_id)
    again.start(tracked, {})
    again.finish()
    assert len(client.search_runs([run.info.experiment_id])) == 1


@pytest.mark.slow
def test_wandb_has_metrics_and_a_table_of_conversations(tracked: Path) -> None:
    (log,) = tracked.glob("wandb/offline-run-*/run-*.wandb")
    assert (tracked / "wandb" / "run_id").read_text() in log.name
    assert b"eval/test/accuracy" in log.read_bytes()
    (table,) = tracked.glob("wandb/offline-run-*/files/media/table/conversations/*.json")
    assert [row[:2] for row in json.loads(table.read_text())["data"]] == [["t0", 0], ["t1", 0]]


@pytest.mark.slow
def test_trackio_has_metrics_and_a_table_of_conversations(tracked: Path) -> None:
    with sqlite3.connect(tracked / "trackio" / "p.db") as database:
        rows = [(step, json.loads(row)) for step, row in database.execute("select step, metrics from metrics")]
    assert [row["eval/test/accuracy"] for _, row in rows if "eval/test/accuracy" in row] == [0, 0.25, 0.5]
    assert [step for step, row in rows if "conversations/test" in row] == [0]
