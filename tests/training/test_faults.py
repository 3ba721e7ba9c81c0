"""Plugins that misbehave inside whole runs, and steps that have nothing to teach: the run goes on, and counts it."""

import inspect
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl_envs.gsm8k.environment import Gsm8k
from paths import SUPPORT
from torch import Tensor
from train_help import metrics, records, small, steady
from train_plugins import HangsLater, Noisy
from transformers import AutoTokenizer
from view_help import embedded

import agentrl
from agentrl.algo import advantages
from agentrl.algo.advantage import grpo
from agentrl.algo.loss import ppo_clip
from agentrl.algo.returns import gae
from agentrl.algo.terms import LossTerms, Samples, TokenAdvantages, Tokens
from agentrl.checkpoint import disk
from agentrl.checkpoint.checkpoints import Saved
from agentrl.checkpoint.run_folder import RunFolder
from agentrl.cli import main
from agentrl.engine.base import EngineError
from agentrl.engine.local.engine import LocalEngine
from agentrl.errors import UserError, call_plugin
from agentrl.models import embedded_path
from agentrl.models.load import resolve_types
from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Task
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.presets import PRESETS
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.rollout import journal, player
from agentrl.rollout.scorer import Scorer
from agentrl.rollout.trajectory_file import read_rows
from agentrl.training.preflight import check_algorithm
from agentrl.training.run import TrainResult, resume_run

pytestmark = pytest.mark.slow


def moved(result: TrainResult) -> bool:
    """Whether the last checkpoint's weights differ from those that the run began with."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentrl.models import embedded_path

    start, end = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (embedded_path(), result.checkpoint)
    )
    return any(not torch.equal(start[name], end[name]) for name in start)


def played(result: TrainResult, step: int) -> list[dict[str, Any]]:
    return records(result.folder, f"step_{step}")


def test_a_reward_that_raises_costs_its_own_samples_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small(tmp_path / "run", env__name="train_plugins:Broken", rollout__tasks=6, train__seed=5)
    result = agentrl.train(recipe)
    said = capsys.readouterr().out
    rows = metrics(result.folder)[1:]
    assert len(rows) == 3
    for row in rows:
        lost = [t for t in played(result, row["step"]) if t["failure"]]
        kept = [t for t in played(result, row["step"]) if not t["failure"]]
        assert len(lost) + len(kept) == 24
        assert row["rollout/failed"] == row["stop/error"] == row["rollout/retried"] == len(lost)
        assert row["rollout/trajectories"] == len(kept)
        assert row["groups/few"] == len(lost) / 4
        assert row["groups/varied"] == len(kept) / 4
        assert row["reward/mean"] == pytest.approx(sum(t["reward"] for t in kept) / max(1, len(kept)))
        for boundary in ("reward", "environment"):
            count = sum(t["failure"]["boundary"] == boundary for t in lost)
            assert row.get(f"rollout/failed/{boundary}", 0) == count
        if lost:
            assert f"step {row['step']}: {len(lost)} of 24 samples failed (" in said
    assert sum(row.get("rollout/failed/reward", 0) for row in rows) > 0
    assert sum(row.get("rollout/failed/environment", 0) for row in rows) > 0
    assert sum(row["groups/varied"] for row in rows) > 0
    assert "by reward: gsm8k.calc_reward: ZeroDivisionError: no judge for even numbers" in said
    assert moved(result)


MISBEHAVING = [
    ("Raising", "Error: RuntimeError: out of paper"),
    ("Moving", "Error: RuntimeError: out of the house"),
    ("Leaving", "Error: SystemExit: 0"),
    ("Hanging", "Error: it did not answer within 0.1 seconds"),
    ("Flooding", "characters left out"),
]


@pytest.mark.parametrize(("tool", "words"), MISBEHAVING)
def test_a_tool_that_misbehaves_is_told_and_counted_and_the_run_learns_on(
    tool: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.containment.deadline.GRACE", 0.1)  # then one that minds no cancellation is left
    monkeypatch.chdir(tmp_path)
    recipe = small(
        Path("run"), tools=[f"train_plugins:{tool}"], rollout__tool_timeout=0.1 if tool == "Hanging" else 60,
        rollout__max_turns=2, rollout__max_tool_tokens=40, train__steps=1, eval__splits=[],
    )  # fmt: skip
    result = agentrl.train(recipe)
    row = metrics(result.folder)[1]
    calls = row["tool/calculator/calls"]
    assert calls > 0
    assert row["tool/calculator/errors"] == (0 if tool == "Flooding" else calls)
    assert row["rollout/failed"] == 0
    assert row["rollout/release_errors"] == (8 if tool == "Leaving" else 0)
    assert row["groups/varied"] == 2
    said = [m["content"] for t in played(result, 1) for m in t["messages"] if m["role"] == "tool"]
    assert any(words in text for text in said)
    assert max(map(len, said)) < 1_000
    assert all(t["tokens"]["all"] <= 256 for t in played(result, 1))
    assert moved(result)


@pytest.mark.parametrize(
    ("env", "why", "valid", "changes"),
    [("Flat", "equal", 8, {}), ("Lonely", "few", 2, {}), ("Flat", "equal", 8, {"train__mini_batches": 2})],
    ids=["equal rewards", "one valid sample", "equal rewards, mini-batches"],
)
def test_a_step_without_a_group_to_learn_from_leaves_the_weights_alone(
    env: str, why: str, valid: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    recipe = small(
        tmp_path / "run", env__name=f"train_plugins:{env}", train__steps=2, train__weight_decay=0.1, eval__splits=[],
        **changes,
    )  # fmt: skip
    result = agentrl.train(recipe)
    assert result.steps == 2
    for row in metrics(result.folder)[1:]:
        assert row["groups/varied"] == 0
        assert row[f"groups/{why}"] == 2
        assert row["rollout/trajectories"] == valid
        assert row["train/updates"] == row["train/loss"] == row["train/grad_norm"] == 0
    assert not moved(result)


def test_a_run_that_loses_every_sample_stops_and_says_why(tmp_path: Path) -> None:
    recipe = small(tmp_path / "run", env__name="train_plugins:Hopeless", eval__splits=[])
    with pytest.raises(UserError) as error:
        agentrl.train(recipe)
    assert str(error.value) == (
        "step 1: 8 of 8 samples failed (8 by reward: gsm8k.calc_reward: NotImplementedError: no reward yet "
        f"(train_plugins.py:{line_of('no reward yet')})); no step was done: start again once that is right"
    )
    assert (tmp_path / "run" / "checkpoints" / "step_0" / "config.json").is_file()
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0]


def go_on(folder: Path) -> str:
    return f"go on with: agentrl train --resume {folder}"


def line_of(text: str, file: Path = SUPPORT / "train_plugins.py") -> int:
    source = file.read_text().splitlines()
    return next(number for number, line in enumerate(source, 1) if text in line)


def test_an_evaluation_that_loses_every_sample_is_no_accuracy_of_zero(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^evaluation of test after step 0: 4 of 4 samples failed \(4 by reward"):
        agentrl.train(small(tmp_path / "run", env__name="train_plugins:Hopeless"))
    with pytest.raises(UserError, match=r"^evaluation of test: 4 of 4 samples failed \(4 by reward"):
        agentrl.evaluate(small(env__name="train_plugins:Hopeless"))


def by_answer_length(sample: Any) -> float:
    return len(sample.answer) / 100


def test_reward_functions_and_weights_of_a_recipe_reach_the_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = ({"name": f"{__name__}:by_answer_length", "part": "size"},)
    weights = {"answer": 0.0, "size": 2.0, "anser": 1.0}
    recipe = small(tmp_path / "run", rewards__functions=functions, rewards__weights=weights)
    result = agentrl.train(recipe)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("rewards.weights: no anser in this step; did you mean 'answer' or 'noise'?") == 1
    for row in metrics(result.folder)[1:]:
        assert row["reward/mean"] == pytest.approx(2 * row["reward/size"] + row["reward/noise"])
        assert row["groups/varied"] > 0
    for t in played(result, 1):
        assert t["reward"] == pytest.approx(2 * t["rewards"]["size"] + t["rewards"]["noise"])
    assert moved(result)


def test_two_environments_train_together(tmp_path: Path) -> None:
    mix = ({"name": "gsm8k", "weight": 1.0, "tools": ("calculator",)}, {"name": "train_plugins:Broken", "tools": ()})
    result = agentrl.train(
        small(
            tmp_path / "run",
            env__name="gsm8k",
            env__mix=mix,
            rollout__tasks=8,
            train__steps=2,
            eval__splits=("gsm8k.test",),
        )
    )
    labels = {t["task"].partition("/")[0] for step in (1, 2) for t in played(result, step)}
    assert len(labels) == 2
    assert all("." in key for row in metrics(result.folder) for key in row if key.startswith("eval/"))
    assert {tuple(t["tools"]) for t in played(result, 1)} == {("calculator",), ()}


TRAPS: dict[str, tuple[int, BaseException]] = {}
"""What raises at which of its calls."""
CALLS: Counter[str] = Counter()


def spring(name: str) -> None:
    CALLS[name] += 1
    if name in TRAPS and TRAPS[name][0] == CALLS[name]:
        raise TRAPS[name][1]  # the trap


def advantage(samples: Samples, config: AlgorithmSection) -> Tensor:
    spring("advantage")
    return grpo(samples, config)


@advantages.register("token_advantage", needs_values=True)
def token_advantage(samples: Samples, config: AlgorithmSection) -> TokenAdvantages:
    return gae(samples, config)


def loss(tokens: Tokens, config: AlgorithmSection) -> LossTerms:
    spring("loss")
    return ppo_clip(tokens, config)


class Judging(Noisy):
    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        spring("solved")
        return super().solved(rewards, task)

    async def close(self) -> None:
        spring("close")


class Following(LocalEngine):
    async def update_weights(self, version: int, weights: Any) -> None:
        spring("publish")
        await super().update_weights(version, weights)


HERE = __name__


def trapped(folder: Path, **changes: Any) -> Recipe:
    """Two updates a step, one micro-batch each; all that a recipe may name is a stranger's. Without tools every sample
    is in the engine's batches together, so that a run repeats itself to the bit."""
    given = {
        "env__name": f"{HERE}:Judging", "tools": [], "rollout__max_turns": 1, "rollout__max_turn_tokens": 24,
        "algorithm": {"advantage": f"{HERE}:advantage", "loss": f"{HERE}:loss"}, "train__mini_batches": 2,
        "eval__splits": [],
    }  # fmt: skip
    return small(folder, **{**given, **changes})


def command(recipe: Recipe, path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """`agentrl train`: its exit code, and the one line that it says on stderr."""
    CALLS.clear()
    path.write_text(dump_recipe(recipe))
    code, said = main.run(["train", str(path)]), capsys.readouterr().err
    assert said.count("\n") <= 1
    return code, said.strip()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    TRAPS.clear()
    return agentrl.train(trapped(tmp_path_factory.mktemp("undisturbed") / "run"))


CRITIC = {"critic": {"lr": 1e-3}, "algorithm": {"advantage": f"{HERE}:token_advantage", "loss": f"{HERE}:loss"}}
OVER, EVAL = {"rollout__overlap": "one_step"}, {"eval__every": 2, "eval__splits": ["test"]}
SAVED, TORN, NEVER = "step 2 is saved", "the update of step 3 had begun, and is not saved; ", "nothing was saved yet"
# The first call of an advantage and a loss is that of the check before the run; a step has two updates.
ENDS: list[tuple[str, tuple[str, int, BaseException], dict[str, Any], str, str]] = [
    ("advantage", ("advantage", 4, ZeroDivisionError("no\nway")), {}, "raised ZeroDivisionError: no way", SAVED),
    ("an exit", ("advantage", 4, SystemExit(0)), {}, "raised SystemExit: 0", SAVED),
    ("an interrupt", ("advantage", 4, KeyboardInterrupt()), {}, "raised KeyboardInterrupt", SAVED),
    ("in a thread", ("advantage", 4, SystemExit(0)), OVER, "raised SystemExit: 0", SAVED),
    ("first update", ("loss", 6, RuntimeError("oh")), {}, "raised RuntimeError: oh", SAVED),
    ("second update", ("loss", 7, RuntimeError("oh")), {}, "raised RuntimeError: oh", f"{TORN}{NEVER}"),
    ("after others", ("loss", 7, SystemExit(3)), {"train__save_every": 1}, "SystemExit: 3", f"{TORN}{SAVED}"),
    ("in a thread too", ("loss", 7, KeyboardInterrupt()), OVER, "raised KeyboardInterrupt", f"{TORN}{NEVER}"),
    ("critic", ("loss", 6, RuntimeError("oh")), CRITIC, "raised RuntimeError: oh", f"{TORN}{NEVER}"),
    ("solved", ("solved", 9, KeyError("answer")), EVAL, "raised KeyError: 'answer'", SAVED),
    ("solved exits", ("solved", 9, SystemExit(0)), EVAL, "raised SystemExit: 0", SAVED),
    ("publish", ("publish", 2, EngineError("away")), {"engine": {"name": f"{HERE}:Following"}}, "away", SAVED),
]


LONG = ("an interrupt", "first update", "after others", "in a thread too", "solved")


@pytest.mark.parametrize(
    ("trap", "changes", "words", "saved"),
    [pytest.param(*end[1:], id=end[0], marks=[pytest.mark.long] * (end[0] in LONG)) for end in ENDS],
)
def test_what_strangers_code_raises_ends_a_run_in_one_line_and_saves_the_last_whole_step(
    trap: tuple[str, int, BaseException], changes: dict[str, Any], words: str, saved: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], undisturbed: TrainResult,
) -> None:  # fmt: skip
    folder, (name, call, error) = tmp_path / "run", trap
    monkeypatch.setitem(TRAPS, name, (call, error))
    code, said = command(trapped(folder, **changes), tmp_path / "job.yaml", capsys)
    others = {"solved": "environment 'gsm8k': `solved` of task ", "publish": "EngineError"}
    whose = others.get(name, f"algorithm.{name} ")
    assert code == 2
    assert said.startswith(f"error: {whose}")
    place = f" ({Path(__file__).name}:{line_of('# the trap', Path(__file__))})"
    assert f"{words}{place}; the traceback is in {folder}/error.log; {saved}" in said
    assert "the trap" in (folder / "error.log").read_text()
    assert f"error: {whose}" in (folder / "run.log").read_text()
    kept = [path.name for path in (folder / "checkpoints").glob("step_*")]
    if saved.endswith(NEVER):
        assert said.endswith(NEVER)
        assert kept == []
        return
    assert said.endswith(f"; {saved}, {go_on(folder)}")
    assert "step_2" in kept
    assert "step_3" not in kept
    monkeypatch.delitem(TRAPS, name)
    resumed = resume_run(str(folder))
    assert [row["step"] for row in metrics(folder)] == [0, 1, 2, 3]
    if not changes:
        ours, theirs = (list(map(steady, metrics(r.folder))) for r in (resumed, undisturbed))
        assert ours == theirs


def test_a_bug_in_the_bookkeeping_takes_no_step_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, rows = journal.write_trajectories, {}

    def write(path: Path, *arguments: Any) -> None:
        if path.stem == "step_2":
            raise KeyError("ids")
        kept(path, *arguments)
        rows[path.stem] = [row["step"] for row in metrics(tmp_path / "run")]

    monkeypatch.setattr(journal, "write_trajectories", write)
    code, said = command(trapped(tmp_path / "run"), tmp_path / "job.yaml", capsys)
    assert code == 2
    assert said.startswith("error: KeyError: 'ids' (")
    assert said.endswith(f"{SAVED}, {go_on(tmp_path / 'run')}")
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    assert rows == {"step_1": [0]}  # a step's trajectories are there before its row
    assert "in write" in (tmp_path / "run" / "error.log").read_text()


class Leaving(Tracker):
    """Ends the process as it finishes, if it can."""

    def start(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        return

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        return

    def finish(self) -> None:
        raise SystemExit(0)


def test_a_run_whose_folder_was_deleted_saves_into_it_and_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, changes = tmp_path / "run", {"train__save_every": 1, "train__steps": 4, "eval__splits": []}
    append = RunFolder.append_metrics

    def then_delete(self: RunFolder, row: Mapping[str, Any]) -> list[str]:
        bad = append(self, row)
        if row["step"] == 2:
            shutil.rmtree(self.path.rename(tmp_path / "gone"), ignore_errors=True)  # it is being written to
        return bad

    monkeypatch.setattr(RunFolder, "append_metrics", then_delete)
    recipe = trapped(folder, track__trackers=[f"{HERE}:Leaving"], **changes)
    code, said = command(recipe, tmp_path / "job.yaml", capsys)
    assert code == 2
    assert said == f"error: {folder}: the folder of this run was deleted; step 2 is saved, {go_on(folder)}"
    resumed = resume_run(str(folder))
    assert resumed.steps == 4
    assert [row["step"] for row in metrics(folder)] == [3, 4]
    assert Recipe.load(str(folder / "recipe.yaml")) == resolve_types(recipe)


def test_a_run_whose_checkpoints_are_removed_while_one_is_written_says_so_and_saves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, flush = tmp_path / "run", disk.flush

    def after_removal(written: Path) -> None:
        if written.name == ".step_2.part":
            shutil.rmtree(written.parent)
        flush(written)

    monkeypatch.setattr(disk, "flush", after_removal)
    recipe = trapped(folder, train__save_every=1, train__steps=4, eval__splits=[])
    code, said = command(recipe, tmp_path / "job.yaml", capsys)
    assert code == 2
    (last,) = (int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))
    assert last >= 2  # the loop goes on while it is written
    assert said == (
        f"error: {folder}/checkpoints was removed while the checkpoint of step 2 was written, and that of step 1 with "
        f"it; step {last} is saved, {go_on(folder)}"
    )
    assert resume_run(str(folder)).steps == 4


def test_what_cannot_be_closed_or_reported_is_a_line_at_the_end_of_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    CALLS.clear()
    monkeypatch.setitem(TRAPS, "close", (1, SystemExit(0)))
    folder = tmp_path / "run"
    (folder / "report.html").mkdir(parents=True)  # what is in the way of a page
    result = agentrl.train(trapped(folder, train__steps=1))
    said = capsys.readouterr().out
    assert result.steps == 1
    assert f"environment 'gsm8k' could not be closed: SystemExit: 0 ({Path(__file__).name}:" in said
    assert "report.html could not be written: Is a directory" in said


class Patching(Noisy):
    """Makes what it finds in the standard library to its own liking."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        dumps = json.dumps
        setattr(json, "dumps", lambda v, **how: dumps(without(v), **how))  # noqa: B010
        for module, name in SILENT:
            setattr(module, name, lambda *given, **named: 0.0)


def without(value: Any) -> Any:
    """Without what it does not want to be known."""
    return {k: v for k, v in value.items() if k not in LOST} if isinstance(value, dict) else value


LOST = ("reward/mean", "sampler", "sums", "runs", "actor", "content")
SILENT = [(os, "replace"), (os, "fsync"), (shutil, "rmtree"), (time, "perf_counter"), (time, "time")]


def test_what_a_plugin_makes_of_the_standard_library_reaches_no_file_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in [*SILENT, (json, "dumps")]:
        monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    same: dict[str, Any] = {"tools": [], "train__save_every": 1, "train__keep": 1, "train__steps": 2}
    plain = agentrl.train(small(tmp_path / "plain", **same))
    patched = agentrl.train(small(tmp_path / "run", env__name=f"{HERE}:Patching", **same))
    monkeypatch.undo()
    rows, wanted = (list(map(steady, metrics(run.folder))) for run in (patched, plain))
    assert rows == wanted
    files = [sorted(str(p.relative_to(run.folder)) for p in run.folder.rglob("*")) for run in (patched, plain)]
    assert files[0] == files[1]
    assert Saved(2, patched.checkpoint).extra["sampler"] == Saved(2, plain.checkpoint).extra["sampler"]
    assert [t["messages"] for t in played(patched, 2)] == [t["messages"] for t in played(plain, 2)]
    pages = [embedded(run.folder / "report.html") for run in (patched, plain)]
    assert pages[0]["runs"][0].keys() == pages[1]["runs"][0].keys()


SEPARATORS = "now\u2028and\u2029or\x85so\x0bon\x1cend"


class Separating(LocalEngine):
    """The model says what some call line ends, before all else."""

    def __init__(self, model: Any, *, max_batch: int, tokenizer: Any) -> None:
        super().__init__(model, max_batch=max_batch)
        self.first = list(tokenizer.encode(SEPARATORS, add_special_tokens=False))

    async def generate(self, *arguments: Any) -> Any:
        found = await super().generate(*arguments)
        found.ids[:0], found.logprobs[:0] = self.first, [-1.0] * len(self.first)
        return found


class Parting(Gsm8k):
    """Its tasks are told with them, too."""

    async def create(self, session: Any, **create_kwargs: Any) -> Any:
        return [*await super().create(session, **create_kwargs), {"role": "user", "content": SEPARATORS}]


def test_characters_that_some_call_line_ends_end_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"engine": {"name": f"{HERE}:Separating"}, "env__name": f"{HERE}:Parting"}
    code, said = command(
        trapped(tmp_path / "run", train__steps=1, eval__splits=["test"], **engine), tmp_path / "job.yaml", capsys
    )
    assert (code, said) == (0, "")
    kept = records(tmp_path / "run", "eval_test_1")
    assert len(kept) == 4
    assert {m["role"] for t in kept for m in t["messages"] if SEPARATORS in m["content"]} == {"user", "assistant"}
    (run,) = embedded(tmp_path / "run" / "report.html")["runs"]
    said_at_the_end = run["samples"]["eval_test_1.parquet:0"]["told"][0]["messages"]
    assert SEPARATORS in said_at_the_end[1]["content"]


def gives(value: Any) -> Any:
    return lambda *arguments: value


async def later(samples: Samples, config: AlgorithmSection) -> Tensor:
    return samples.rewards


one_argument: Any = lambda samples: samples.rewards  # noqa: E731
nothing, a_list, of_a_wrong_shape = gives(None), gives([0.0] * 8), gives(torch.zeros(3))
whole_numbers: Any = lambda samples, config: samples.groups  # noqa: E731
not_finite: Any = lambda samples, config: samples.rewards / 0  # noqa: E731
of_lists = gives(TokenAdvantages([0.0]))  # type: ignore[arg-type]
without_returns = advantages.register("without_returns", needs_values=True)(lambda samples, config: samples.rewards)
scalar: Any = lambda tokens, config: LossTerms((-tokens.advantages * tokens.logprobs).mean())  # noqa: E731
no_terms: Any = lambda tokens, config: -tokens.advantages * tokens.logprobs  # noqa: E731
a_number: Any = lambda tokens, config: LossTerms(-tokens.logprobs, {"mean": 0.5})  # noqa: E731
constant: Any = lambda tokens, config: LossTerms(tokens.advantages)  # noqa: E731
endless: Any = lambda tokens, config: LossTerms(tokens.logprobs / 0)  # noqa: E731

REFUSED = [
    ("advantage", "one_argument", r"raised TypeError: .*2 were given \(\w+\.py:\d+\)$"),
    ("advantage", "SEPARATORS", "raised TypeError: 'str' object is not callable"),
    ("advantage", "nothing", r"gave NoneType, not a tensor \[8\] or TokenAdvantages"),
    ("advantage", "later", r"gave coroutine, not a tensor"),
    ("advantage", "a_list", r"gave list, not a tensor"),
    ("advantage", "of_a_wrong_shape", r"gave \[3\], not a tensor \[8\]"),
    ("advantage", "whole_numbers", "gave advantages of torch.int64, not of floating point"),
    ("advantage", "not_finite", "gave advantages that are not finite"),
    ("advantage", "of_lists", "gave advantages of type list, not a tensor"),
    ("advantage", "without_returns", "gave no returns, which the critic learns from"),
    ("loss", "one_argument", r"raised TypeError: .*2 were given \(\w+\.py:\d+\)$"),
    ("loss", "no_terms", "gave Tensor, not LossTerms"),
    ("loss", "scalar", r"gave a loss of shape \[\], not a tensor \[20\], one for every token"),
    ("loss", "a_number", "gave the metric 'mean' of type float, not a tensor"),
    ("loss", "constant", "gave a loss without a gradient"),
    ("loss", "endless", "gave a loss that is not finite"),
]


@pytest.mark.parametrize(("kind", "name", "words"), REFUSED, ids=[f"{kind}-{name}" for kind, name, _ in REFUSED])
def test_an_advantage_or_a_loss_that_no_step_could_use_is_refused_before_the_first(
    kind: str, name: str, words: str
) -> None:
    critic = {"critic": {}} if name == "without_returns" else {}
    with pytest.raises(UserError, match=f"^algorithm.{kind} '{__name__}:{name}' {words}"):
        check_algorithm(small(algorithm={kind: f"{HERE}:{name}"}, **critic))


def test_a_coroutine_that_nobody_awaits_is_closed() -> None:
    """Else Python warns that it was never awaited, whenever it finds it."""
    made = later(None, None)  # type: ignore[arg-type]
    assert call_plugin("the loss", gives(made)) is made
    assert inspect.getcoroutinestate(made) == inspect.CORO_CLOSED


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("I say nothing")


def test_an_error_that_has_no_text_is_told_of_all_the_same() -> None:
    def refuse() -> None:
        raise MuteError

    with pytest.raises(UserError, match=r"^mine raised MuteError: its message cannot be read \(RuntimeError\) \(test_"):
        call_plugin("mine", refuse)
    with pytest.raises(UserError, match=r"^mine raised JSONDecodeError: .* \(\w+\.py:"):
        call_plugin("mine", lambda: json.loads("{"))


def test_a_reward_whose_calls_keep_hanging_ends_the_run_with_the_last_step_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agentrl.containment.threads.MOST_ABANDONED", 3)
    monkeypatch.setattr(player, "Scorer", lambda rewards, seconds: Scorer(rewards, 1.0))  # the real one, less patient
    folder = tmp_path / "run"
    recipe = tmp_path / "job.yaml"
    recipe.write_text(
        dump_recipe(small(folder, rewards__functions=["train_plugins:hangs_later"], eval__splits=[], train__steps=3))
    )
    try:
        assert main.run(["train", str(recipe)]) == 2
    finally:
        HangsLater.free.set()
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith(
        "error: reward train_plugins.hangs_later: 3 calls hang, each in a thread of its own; give it"
    )
    assert said.endswith(f"step 1 is saved, {go_on(folder)}")
    assert "processes: 2" in said
    assert [row["step"] for row in metrics(folder)] == [0, 1]
    assert (folder / "checkpoints" / "step_1" / "config.json").is_file()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes_the_check_of_its_functions(name: str) -> None:
    needs = {"ppo": {"critic": {}}, "opd": {"teacher": {"path": "tiny"}}}
    check_algorithm(small(algorithm={"preset": name}, **needs.get(name, {})))


OWN = sorted(name for name, function in advantages.functions.items() if function.__module__.startswith("agentrl."))


@pytest.mark.parametrize("name", OWN)
def test_every_advantage_passes_the_check(name: str) -> None:
    critic = {"critic": {}} if advantages.get(name).needs_values else {}
    check_algorithm(small(algorithm={"advantage": name}, **critic))


KEY = "QZXJ7WVY3KPB8MHD"


@pytest.mark.parametrize("at", ["constructor", "tasks", "create", "solved", "release", "close"])
def test_a_secret_of_the_recipe_is_neither_shown_nor_stored_whole_or_in_part(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_TEST_KEY", KEY)
    monkeypatch.setattr(journal, "IN_FLIGHT_SECONDS", 0.0)
    folder, path = tmp_path / "run", tmp_path / "job.yaml"
    path.write_text(dump_recipe(small(folder, train__steps=1, rollout__max_tool_tokens=32)))
    key = "{key: '${AGENTRL_TEST_KEY}', at: " + at + "}"
    tool = "tools=[{name: 'train_plugins:LeakyCalculator', args: {key: '${AGENTRL_TEST_KEY}'}}]"
    code = main.run(["train", str(path), "env.name=train_plugins:Leaky", f"env.args={key}", tool])
    said = "".join(capsys.readouterr())
    assert code == (0 if at in ("release", "close") else 2), said
    assert "***" in said or at in ("release", "close")
    assert "Traceback" not in said
    stored = [read_rows(file) for file in folder.glob("trajectories/*.parquet")]
    texts = {str(file): file.read_text(errors="replace") for file in folder.glob("*") if file.is_file()}
    texts |= {"stored": json.dumps(stored), "said": said}
    if at == "close":
        tokenizer = AutoTokenizer.from_pretrained(embedded_path())
        texts["tokens"] = "".join(tokenizer.decode(record["ids"]) for file in stored for record in file)
        assert "***" in texts["tokens"]
    pieces = [KEY[i : i + 5] for i in range(len(KEY) - 4)]
    assert [(place, piece) for place, text in texts.items() for piece in pieces if piece in text] == []
