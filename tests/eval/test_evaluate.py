"""Whole evaluations with real parts: what they say, that they say it twice, and what they refuse."""

import asyncio
import importlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_help import refused
from learner_help import make_groups
from paths import RECIPES
from rich.console import Console
from train_help import small

import agentrl
from agentrl.cli import main
from agentrl.engine.base import Generation, Sampling
from agentrl.errors import UserError
from agentrl.eval import folder as folder_module
from agentrl.eval.evaluate import Evaluation, done
from agentrl.eval.folder import EvaluationFolder, Keeper
from agentrl.eval.held_out import HeldOut
from agentrl.eval.outcome import Outcome, outcomes_of
from agentrl.eval.progress import Progress
from agentrl.eval.result import cost, summarize
from agentrl.eval.show import show, too_low
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.rollout.player import Player
from agentrl.rollout.trajectory_file import read_records
from agentrl.trajectory import Boundary, Failure, FinishReason, Trajectory

RECIPE = str(RECIPES / "gsm8k_tool.yaml")
SMALL = ["eval.tasks=3", "rollout.max_turns=4"]


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return agentrl.evaluate(small(), samples=3, splits=["test", "phrasing"])


def test_a_result_holds_what_happened(evaluation: Evaluation) -> None:
    assert [r.split for r in evaluation.splits] == ["test", "phrasing"]
    result = evaluation["test"]
    assert (result.tasks, result.samples, result.failed) == (4, 12, 0)
    assert 0 <= result.low <= result.accuracy <= result.high <= 1
    assert 0 < result.high - result.low < 1
    assert list(result.pass_at) == [1, 2, 3]
    assert result.pass_at[1] == pytest.approx(result.accuracy)
    assert result.pass_at[1] <= result.pass_at[2] <= result.pass_at[3]
    assert sum(result.finish.values()) == 12
    assert 1 <= result.turns <= 5
    assert result.tool_calls > 0
    assert 0 <= result.tool_errors <= 1
    assert result.tokens > 5


def test_the_same_seed_gives_the_same_numbers(evaluation: Evaluation) -> None:
    assert agentrl.evaluate(small(), samples=3, splits=["test", "phrasing"]) == evaluation


def test_greedy_samples_of_a_task_are_one_and_the_same(evaluation: Evaluation) -> None:
    async def conversations(temperature: float) -> list[set[str]]:
        recipe = small(eval__rollout={"temperature": temperature}, eval__samples=2)
        player = await Player.build(recipe)
        try:
            held_out, _ = await HeldOut.prepare(player, recipe, ("large",))
            _, groups = await held_out.play("large")
        finally:
            await player.close()
        return [{json.dumps(t.messages) for t in group.trajectories} for group in groups]

    assert {len(different) for different in asyncio.run(conversations(0.0))} == {1}
    assert max(len(different) for different in asyncio.run(conversations(2.0))) == 2


@pytest.mark.parametrize(("concurrency", "flown"), [(7, 6), (1, 1)])
async def test_splits_are_played_at_once_and_share_the_requests_in_flight(
    concurrency: int, flown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first requests of each split wait for one of the other, where there may be more than one."""
    recipe = small(eval__tasks=8, rollout__concurrency=concurrency)
    player = await Player.build(recipe)
    generate, flying, most, both = player.engine.generate, set[str](), 0, asyncio.Event()

    async def counted(ids: Sequence[int], sampling: Sampling, request_id: str, *rest: Any) -> Generation:
        nonlocal most
        flying.add(request_id)
        most = max(most, len(flying))
        if len({one.split("/")[0] for one in flying}) == min(2, concurrency):
            both.set()
        async with asyncio.timeout(60):
            await both.wait()
        try:
            return await generate(ids, sampling, request_id, *rest)
        finally:
            flying.remove(request_id)

    monkeypatch.setattr(player.engine, "generate", counted)
    try:
        held_out, _ = await HeldOut.prepare(player, recipe, ("test", "large"))
        played = await held_out.play_all(["test", "large"])
        assert {split: result.tasks for split, (result, _) in played.items()} == {"test": 8, "large": 8}
        assert most == flown
        for split, (result, _) in played.items():  # what one alone comes to
            assert (await held_out.play(split))[0] == result
    finally:
        await player.close()


async def test_what_ends_one_split_ends_the_others() -> None:
    recipe = small()
    player = await Player.build(recipe)
    ended = list[str]()

    async def play(split: str, limits: object) -> None:
        if split == "large":
            raise UserError("the environment is broken")
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(split)

    try:
        held_out, _ = await HeldOut.prepare(player, recipe, ("test", "phrasing", "large"))
        with pytest.raises(UserError, match=r"^the environment is broken$"):
            await held_out.at_once(held_out.splits, play)
        assert sorted(ended) == ["phrasing", "test"]
    finally:
        await player.close()


def test_the_table_shows_every_split_and_figure(evaluation: Evaluation) -> None:
    console = Console(file=io.StringIO(), width=120)
    show(evaluation, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("test", "phrasing", "accuracy", "95 % interval", "pass@2", "pass@3", "tool errors", "ended by stop"):
        assert words in said
    assert "pass@1" not in said  # that is the accuracy


@pytest.mark.slow
def test_the_command_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    arguments = ["eval", RECIPE, *SMALL, "--split", "large", "--samples", "2", "--json", str(file)]
    arguments += ["--by", "kind", "--keep", str(tmp_path / "kept"), "--fail-below", "large=0"]
    assert main.run(arguments) == 0
    said = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (found["model"], found["env"], list(found["splits"])) == ("tiny", "gsm8k (generated)", ["large"])
    result = found["splits"]["large"]
    assert (result["tasks"], result["samples"]) == (3, 6)
    assert list(result["pass_at"]) == ["1", "2"]
    assert f"{result['accuracy']:.1%}" in said
    assert f"{result['pass_at']['2']:.1%}" in said
    assert sum(part["tasks"] for part in result["by"].values()) == 3
    assert all(kind in said for kind in result["by"])
    kept = read_records(tmp_path / "kept" / "trajectories" / "eval_large_0.parquet")
    assert len(kept) == 6
    assert sum(one["solved"] for one in kept) == 6 * result["accuracy"]
    assert main.run(["show", str(tmp_path / "kept"), "--split", "large"]) == 0
    assert kept[0]["task"] in capsys.readouterr().out
    at = arguments.index("--keep")
    for same in (arguments, [*arguments[:at], f"output={tmp_path / 'kept'}", *arguments[at + 2 :]]):
        assert main.run(same) == 2
        assert "holds conversations already" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "kept" / "tasks.jsonl").read_text().splitlines()]
    assert [(one["split"], one["samples"]) for one in lines] == [("large", 2)] * 3
    assert sum(one["solved"] for one in lines) == 6 * result["accuracy"]
    assert json.loads((tmp_path / "kept" / "evaluation.json").read_text()) == found


def test_an_accuracy_that_is_too_low_is_told(evaluation: Evaluation) -> None:
    low = evaluation["test"].accuracy
    assert too_low(evaluation, {"test": low, "phrasing": 0.0}) == []
    assert too_low(evaluation, {"test": min(1.0, low + 0.01)}) == [
        f"test: accuracy {low:.1%} is below {min(1.0, low + 0.01):.1%} (--fail-below)"
    ]


def test_parts_of_a_split_are_those_of_a_field() -> None:
    groups = make_groups([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    kinds = ("a", "b", "a")
    outcomes = outcomes_of(groups, lambda t: t.reward == 1.0)
    outcomes = [replace(one, data={"kind": kinds[one.group]}) for one in outcomes]
    found = summarize("test", outcomes, by="kind").by
    assert [(value, part.tasks, part.samples, part.accuracy.value) for value, part in found.items()] == [
        ("a", 2, 4, 0.5),
        ("b", 1, 2, 0.5),
    ]
    assert found["a"].accuracy.high - found["a"].accuracy.low > 0.5
    assert summarize("test", outcomes, by="other").by == {}


@pytest.mark.slow
def test_a_recipe_and_its_file_evaluate_alike() -> None:
    by_path = agentrl.evaluate(RECIPE, overrides=SMALL, splits=["test"])
    assert by_path == agentrl.evaluate(Recipe.load(RECIPE, SMALL), splits=["test"])


def test_samples_that_the_machinery_lost_are_counted_and_in_no_figure() -> None:
    found = agentrl.evaluate(small(env__name="train_plugins:Broken", eval__tasks=6))
    result = found["test"]
    assert (result.tasks, result.samples, result.failed) == (6, 2, 4)  # 0, 2, 4 have no judge, 1 has no room
    assert found.notes == (f"evaluation of test: 4 of 6 samples failed (3 by reward: {message(found)})",)
    assert result.tokens > 5


def message(found: Evaluation) -> str:
    return found.notes[0].partition("by reward: ")[2].removesuffix(")")


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("a model is loaded before the cheap checks are done")

    monkeypatch.setattr(importlib.import_module("agentrl.rollout.player"), "load_model", load)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--split", "tset"], "eval.splits: environment 'gsm8k' has no split 'tset'; did you mean 'test'?"),
        (["--json", "nowhere/found.json"], "--json nowhere/found.json: cannot be written: there is no folder nowhere"),
        (["--json", "."], "--json .: cannot be written: it is a folder"),
        (["eval.tasks=0"], "eval.tasks"),
        (["--by", "knid"], "--by knid: the tasks of test have no such field; did you mean 'kind'?"),
        (["--keep", "/dev/null/x"], "--output /dev/null/x: cannot be made: Not a directory"),
        (
            ["--fail-below", "test=90"],
            "--fail-below test=90: expected a split and a share from 0 to 1",
        ),
        (["--fail-below", "tset=0.9"], "--fail-below: tset is not evaluated, but test, phrasing, large; did you mean"),
        (["env.source=nowhere.jsonl"], "env.source: there is no file nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line_before_the_model_is_loaded(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, "eval", RECIPE, *arguments)


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing is no folder"):
        agentrl.evaluate(small(), model=str(tmp_path / "nothing"))


def test_a_terminal_sees_how_far_it_is_and_a_pipe_sees_nothing() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    agentrl.evaluate(small(), progress=Progress(terminal))
    said = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "test" in said
    assert "4/4" in said

    pipe = Console(file=io.StringIO())
    agentrl.evaluate(small(), progress=Progress(pipe))
    assert pipe.file.getvalue() == ""  # type: ignore[attr-defined]


def test_an_evaluation_obeys_the_threads_of_its_recipe() -> None:
    import torch

    before = torch.get_num_threads()
    wanted = 2 if before == 1 else 1
    try:
        agentrl.evaluate(small(train__threads=wanted, eval__tasks=1), splits=["test"])
        assert torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)


def test_progress_shows_what_an_engine_does_as_it_starts():
    import io

    from rich.console import Console

    from agentrl.eval.progress import Progress

    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=80)) as shown:
        shown.phase("the server loads [weights]")
        shown.say("server at http://127.0.0.1:1 is ready")
        advance = shown.follow("test", 2)
        advance(None)
    said = out.getvalue()
    assert "the server loads [weights]" in said
    assert "server at http://127.0.0.1:1 is ready" in said
    assert "1/2" in said


@pytest.mark.slow
def test_an_evaluation_that_was_cut_short_plays_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its samples are those of one that was never cut short: the seeds are of the task and sample."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder_module, "PART_SECONDS", 0.0)
    monkeypatch.setattr(folder_module, "PART_SHARE", 0.0)
    whole = agentrl.evaluate(RECIPE, overrides=SMALL, samples=2, splits=["test"], keep="whole")
    asked = HeldOut.solved
    count = 0

    def stopped(self: HeldOut, trajectory: Trajectory) -> bool:
        nonlocal count
        count += 1
        if count > 3:
            raise UserError("stopped")
        return asked(self, trajectory)

    monkeypatch.setattr(HeldOut, "solved", stopped)
    assert main.run(["eval", RECIPE, *SMALL, "--samples", "2", "--split", "test", "--output", "cut"]) == 2
    assert "agentrl eval --resume cut" in capsys.readouterr().err
    store = EvaluationFolder.existing(Path("cut"))
    assert len(store.parts("test")) >= 3
    assert len(store.stored("test")) == 3
    monkeypatch.setattr(HeldOut, "solved", asked)
    more = ["eval.tasks=4", "--split", "large", "--json", "resumed.json"]
    assert main.run(["eval", "--resume", "cut", *more]) == 0
    assert store.parts("test") == [store.file("test")]
    found = {(one["task"], one["sample"]): one for one in read_records(store.file("test"), tokens=True)}
    for one in read_records(Path("whole/trajectories/eval_test_0.parquet"), tokens=True):
        other = found[one["task"], one["sample"]]
        assert (one["ids"], one["reward"], one["group"]) == (other["ids"], other["reward"], other["group"])
    assert len(found) == 8
    results = json.loads(Path("resumed.json").read_text())["splits"]
    assert {split: (one["tasks"], one["samples"]) for split, one in results.items()} == {
        "test": (4, 8),
        "large": (4, 8),
    }
    assert whole["test"].samples == 6


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollout.temperature=0"], "rollout.temperature cannot change: what was played stays part of the result"),
        (["eval.tasks=2"], "eval.tasks=2 is less than the 3 that were asked for"),
        (["eval.samples=2", "--samples", "0"], "Invalid value for '--samples'"),
        (["recipe.yaml"], "only KEY=VALUE may follow"),
        (["--model", "other"], "leave out the other options"),
    ],
)
def test_what_was_played_stays_what_it_was(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    EvaluationFolder.new(tmp_path).begin(Recipe.load(RECIPE, SMALL))
    assert words in refused(capsys, "eval", "--resume", str(tmp_path), *arguments)


def test_samples_that_failed_are_played_again(tmp_path: Path) -> None:
    """Samples are kept whatever becomes of the evaluation; those that failed are replaced."""
    store = EvaluationFolder.new(tmp_path / "kept")
    store.begin(small())
    made = [t for group in make_groups([[1.0, 0.0], [1.0, 1.0]]) for t in group.trajectories]
    lost = replace(made[1], failure=Failure(Boundary.ENGINE, "gone"), finish=FinishReason.ERROR, rewards={})
    keeper = Keeper(store, "test", lambda t: "env")
    for place, t in ((0, made[0]), (0, lost), (1, made[2]), (1, made[3])):
        keeper.add(t, Outcome.of(t, place, None if t is lost else t.reward > 0))
    keeper.flush()
    store.join("test")
    tasks = [Task("t", {}), Task("t", {})]
    assert sorted(done(store, "test", tasks, together=False)) == [(0, 0), (1, 0), (1, 1)]
    assert sorted(done(store, "test", tasks, together=True)) == [(1, 0), (1, 1)]
    with pytest.raises(UserError, match="task t of test is not at its place"):
        done(store, "test", tasks[:1], together=False)
    again = Keeper(store, "test", lambda t: "env")
    again.add(made[1], Outcome.of(made[1], 0, False))
    again.flush()
    store.join("test")
    assert [(one.group, one.sample, one.solved) for one in store.stored("test")] == [
        (0, 0, True), (0, 1, False), (1, 0, True), (1, 1, True),
    ]  # fmt: skip


def test_what_tokens_cost() -> None:
    usage = {"input": 3_000_000, "cached_input": 1_000_000, "output": 500_000}
    assert cost(usage, {"input": 1.0, "cached_input": 0.1, "output": 8.0}) == pytest.approx(2.0 + 0.1 + 4.0)
    assert cost(usage, {"input": 1.0}) == pytest.approx(3.0)
