"""A run that is stopped and resumed is the run that was never stopped."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from train_help import lines, metrics, numbers, records, small, steady
from train_plugins import Noisy

import agentrl
from agentrl.checkpoint.checkpoints import Saved
from agentrl.checkpoint.run_folder import RunFolder
from agentrl.errors import UserError
from agentrl.eval.held_out import HeldOut
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.training.run import TrainResult, resume_run
from agentrl.trajectory import Group

pytestmark = pytest.mark.slow

STEPS = 5


def job(output: Path, **changes: Any) -> Recipe:
    """What a resumed run could get wrong is all in it: warm-up, decay, several updates a step, a KL in the reward."""
    return small(
        output,
        **{
            "train": {
                "steps": STEPS, "lr": 3e-4, "schedule": "cosine", "warmup": 2, "mini_batches": 2, "epochs": 2,
                "weight_decay": 0.01, "save_every": 0, "threads": 1, "seed": 7,
            },
            "algorithm": {"kl_coef": 0.01, "kl_in": "reward", "kl_target": 0.001, "kl_horizon": 100},
            "eval__every": 3,
            **changes,
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return agentrl.train(job(tmp_path_factory.mktemp("resume") / "whole"))


def same(a: TrainResult, b: TrainResult) -> None:
    """Equal but for the clock. The log-probs of a batch differ in their last bits with who was in it, which hangs on
    the clock too: hence the tolerance."""
    import torch
    from transformers import AutoModelForCausalLM

    assert a.steps == b.steps
    for ours, theirs in zip(metrics(a.folder), metrics(b.folder), strict=True):
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-3, abs=2e-5)
    for step in range(1, a.steps + 1):
        ours, theirs = (records(r.folder, f"step_{step}") for r in (a, b))
        assert [t["messages"] for t in ours] == [t["messages"] for t in theirs]
    first, second = (AutoModelForCausalLM.from_pretrained(r.checkpoint).state_dict() for r in (a, b))
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The same job, whose tracker presses Ctrl-C at step 3."""
    folder = tmp_path_factory.mktemp("resume") / "stopped"
    return agentrl.train(job(folder, track__trackers=["train_plugins:StopsAfterThree"]))


def copied(result: TrainResult, to: Path) -> Path:
    shutil.copytree(result.folder, to)
    return to


def test_a_run_of_several_sampling_processes_is_the_run_of_one(whole: TrainResult, tmp_path: Path) -> None:
    """Also where it is stopped and goes on, with as many as its recipe says."""
    trackers = ["train_plugins:StopsAfterThree"]
    first = agentrl.train(job(tmp_path / "apart", engine={"args": {"processes": 2}}, track__trackers=trackers))
    assert first.steps == 3
    same(whole, resume_run(str(first.folder), overrides=["track.trackers=[]"]))


def test_ctrl_c_saves_the_last_whole_step(stopped: TrainResult) -> None:
    assert stopped.interrupted
    assert stopped.steps == 3
    assert stopped.checkpoint == stopped.folder / "checkpoints" / "step_3"
    assert [row["step"] for row in metrics(stopped.folder)] == [0, 1, 2, 3]
    assert [entry["what"] for entry in lines(stopped.folder / "book.jsonl")][-1] == "finish"


def test_resumed_it_is_the_same_run(whole: TrainResult, stopped: TrainResult, tmp_path: Path) -> None:
    resumed = resume_run(str(copied(stopped, tmp_path / "run")))
    assert not resumed.interrupted
    assert resumed.before == whole.before
    assert resumed.after == whole.after
    same(whole, resumed)


def test_a_run_that_was_stopped_in_its_last_evaluation_is_evaluated(
    whole: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = HeldOut.sample

    async def stopping(self: HeldOut, split: str, *, after: int = 0, **options: Any) -> list[Group]:
        if after == STEPS and split == "test":  # once `validation` has been evaluated
            os.kill(os.getpid(), signal.SIGINT)
        return await sample(self, split, after=after, **options)

    with monkeypatch.context() as patch:
        patch.setattr(HeldOut, "sample", stopping)
        first = agentrl.train(job(tmp_path / "run"))
    assert first.interrupted
    assert first.steps == STEPS
    assert not [key for key in metrics(first.folder)[-1] if key.startswith("eval/")]
    resumed = resume_run(str(first.folder))
    assert resumed.after == whole.after
    same(whole, resumed)
    assert Saved(STEPS, resumed.checkpoint).accuracy == Saved(STEPS, whole.checkpoint).accuracy is not None
    with pytest.raises(UserError, match=f"step {STEPS} of {STEPS} is done; set train.steps higher"):
        resume_run(str(first.folder))


def test_steps_after_the_checkpoint_are_written_anew(stopped: TrainResult, tmp_path: Path) -> None:
    """As after a kill: the metrics are ahead of the last checkpoint, and their last line is cut."""
    folder = copied(stopped, tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/mean": 9}\n{"step": 5, "rew')
    stored = folder / "trajectories"
    shutil.copy(stored / "step_3.parquet", stored / "step_4.parquet")
    shutil.copy(stored / "step_3.parquet", stored / "step_6.parquet")  # killed before its row of metrics
    old = json.dumps({"request": "old", "messages": []})
    for name in ("step_5.jsonl", "eval_test_6.jsonl", "in_flight.jsonl", "step_1.jsonl"):
        (stored / name).write_text(old)
    (stored / "step_1.parquet").unlink()  # of an older version
    resumed = resume_run(str(folder), overrides=["train.steps=4", "eval.every=0", "eval.splits=[]"])
    rows = metrics(resumed.folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4]["reward/mean"] < 3
    assert {path.name for path in stored.iterdir()} == {
        "step_1.jsonl", "step_2.parquet", "step_3.parquet", "step_4.parquet", "eval_test_0.parquet",
        "eval_validation_3.parquet",
    }  # fmt: skip
    assert (stored / "step_1.jsonl").read_text() == old
    assert {t["step"] for t in records(folder, "step_4")} == {4}


def test_a_run_that_was_done_goes_on_from_its_mirror_when_it_is_given_more_steps(tmp_path: Path) -> None:
    url, fresh = f"file://{tmp_path}/bucket/a", tmp_path / "fresh"
    first = agentrl.train(small(tmp_path / "run", train__steps=1, eval__splits=[], train__mirror=url))
    assert (tmp_path / "bucket/a/report.html").read_bytes() == (first.folder / "report.html").read_bytes()
    shutil.rmtree(first.folder)  # with its machine
    more = resume_run(url, overrides=["train.steps=2", f"output={fresh}"])
    assert more.folder == fresh
    assert sorted(p.name for p in (tmp_path / "bucket/a/checkpoints").glob("*.whole.json")) == [
        "step_1.whole.json", "step_2.whole.json",
    ]  # fmt: skip
    assert [row["step"] for row in metrics(more.folder)] == [0, 1, 2]
    assert Recipe.load(str(more.folder / "recipe.yaml")).train.steps == 1  # what the run began with
    assert RunFolder(more.folder).recipe() == more.folder / "recipe.resumed_1.yaml"
    assert Recipe.load(str(more.folder / "recipe.resumed_1.yaml")).train.steps == 2
    with pytest.raises(UserError, match="step 2 of 2 is done"):  # and not step 2 of 1
        resume_run(str(more.folder))


def trained(result: TrainResult, step: int | None = None) -> dict[str, Any]:
    """All that is kept of what is trained, by name: float32 masters, moments, random numbers."""
    import torch

    from agentrl.checkpoint import state_file

    path = result.checkpoint if step is None else result.checkpoint.with_name(f"step_{step}")
    found: dict[str, Any] = {}
    for role in sorted(p.name for p in (path / "trainer").iterdir() if p.is_dir()):
        described = state_file.describe(path / "trainer" / role)
        tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in described.items()}
        state_file.read(tensors, path / "trainer" / role)
        found |= {f"{role}.{name}": tensor for name, tensor in tensors.items()}
    return found


def test_weights_of_less_precision_go_on_from_their_float32_masters(tmp_path: Path) -> None:
    bfloat16 = {**EPOCHS, "model": {"dtype": "bfloat16"}, "train__lr": 2e-5, "eval__splits": []}
    whole = agentrl.train(small(tmp_path / "whole", train__steps=2, **bfloat16))
    first = agentrl.train(small(tmp_path / "run", train__steps=1, **bfloat16))
    resumed = resume_run(str(first.folder), overrides=["train.steps=2"])
    same(whole, resumed)
    first_of, second_of = (
        {name: t for name, t in trained(r).items() if name.startswith("actor.weight.")} for r in (whole, resumed)
    )
    apart = [float((ours - second_of[name]).abs().mean()) for name, ours in first_of.items()]
    assert max(apart) < 1e-6  # an update is 2e-5, and what bfloat16 rounds away of it as much


def test_stopped_before_its_first_step_it_begins_with_the_evaluation(tmp_path: Path) -> None:
    stopped = agentrl.train(small(tmp_path / "run", train__steps=1, track__trackers=["train_plugins:StopsAtOnce"]))
    assert stopped.interrupted
    assert stopped.steps == 0
    resumed = resume_run(str(stopped.folder), overrides=["track.trackers=[]"])
    assert [row["step"] for row in metrics(resumed.folder)] == [0, 1]
    assert resumed.before == stopped.before


def test_a_folder_without_a_checkpoint_is_not_resumed(whole: TrainResult, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint was saved there"):
        resume_run(str(folder))


def test_a_damaged_checkpoint_is_refused_with_one_line(stopped: TrainResult, tmp_path: Path) -> None:
    folder = copied(stopped, tmp_path / "run")
    (folder / "checkpoints" / "step_3" / "trainer" / "actor" / "state.safetensors").write_bytes(b"not a checkpoint")
    (folder / "checkpoints" / "step_1").mkdir()
    with pytest.raises(
        UserError, match=r"the trainer's state cannot be restored.*; to go on from step 1, move .*step_3 "
    ):
        resume_run(str(folder))


OTHER_RUNS = {
    f"env.name={__name__}:Five": f"env.name train_plugins:Noisy -> {__name__}:Five",
    "tools=[]": "tools.0.name calculator -> none",
    "algorithm.kl_coef=0.5": "algorithm.kl_coef 0.01 -> 0.5",
    "model.lora={}": "model.lora.rank none -> 16",
    "rewards.weights={answer: 2}": "rewards.weights.answer none -> 2",
    "train.seed=8": "train.seed 7 -> 8",
    "tools.0.args.api_key=hunter2": r"tools.0.args.api_key none -> \$\{AGENTRL_SECRET_API_KEY\}",
}


@pytest.mark.parametrize("override", OTHER_RUNS)
def test_a_run_is_not_resumed_as_another(stopped: TrainResult, override: str) -> None:
    before = (stopped.folder / "recipe.yaml").read_text()
    with pytest.raises(UserError, match=f"not what the run began with: {OTHER_RUNS[override]}.*--force") as told:
        resume_run(str(stopped.folder), overrides=[override, "train.lr=1"])
    assert "hunter2" not in str(told.value)
    assert "train.lr" not in str(told.value)  # which may change on the way
    assert (stopped.folder / "recipe.yaml").read_text() == before


def test_forced_it_is_and_its_own_recipe_stands(
    stopped: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.cli import main

    monkeypatch.setenv("AGENTRL_TEST_OUTPUT", "hunter2")
    folder = copied(stopped, tmp_path / "run")
    own = (folder / "recipe.yaml").read_text()
    arguments = ["train", "--resume", str(folder), "rewards.weights={answer: 2}", "train.steps=4", "eval.splits=[]"]
    assert main.run(arguments) == 2
    assert (
        main.run([*arguments, "track.trackers=[train_plugins:Book]", "output=${AGENTRL_TEST_OUTPUT}", "--force"]) == 0
    )
    assert "changed since the run began: " in capsys.readouterr().out
    assert (folder / "recipe.yaml").read_text() == own
    assert Recipe.load(str(folder / "recipe.resumed_1.yaml")).rewards.weights == {"answer": 2}
    assert "output: ${AGENTRL_TEST_OUTPUT}" in (folder / "recipe.resumed_1.yaml").read_text()
    assert [e["output"] for e in lines(folder / "book.jsonl") if e["what"] == "start"][-1] == "${AGENTRL_TEST_OUTPUT}"
    (folder / "recipe.resumed_1.yaml").write_text("nothing: known")
    with pytest.raises(UserError, match=r"the run's own recipe cannot be compared: .*nothing: unknown key.*--force"):
        resume_run(str(folder), recipe=str(folder / "recipe.yaml"))


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


TRAINER = "checkpoints/step_3/trainer"
STATE, SUMS, SHARD = f"{TRAINER}/state.json", f"{TRAINER}/checksums.json", f"{TRAINER}/actor/state.safetensors"


def flip(path: Path) -> None:
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 1
    path.write_bytes(found)


def unsigned(folder: Path) -> None:
    """As an older version left it: nothing is known of the bytes."""
    (folder / SUMS).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard": (lambda run: flip(run / SHARD), "trainer/actor/state.safetensors is not what was written"),
    "weights": (lambda run: flip(run / "checkpoints/step_3/model.safetensors"), "model.safetensors is not what was"),
    "gone": (lambda run: (run / SHARD).unlink(), "names 'trainer/actor/state.safetensors', which is not a file of it"),
    "state": (lambda run: edited(run / STATE, accuracy=0.5), "trainer/state.json is not what was written"),
    "state list": (lambda run: (run / STATE).write_text("[1]"), "state.json is not what was written"),
    "sums": (lambda run: (run / SUMS).write_text('{"../../../recipe.yaml": "1"}'), "which is not a file of it"),
    "sums list": (lambda run: (run / SUMS).write_text("[[[["), "Expecting value"),
    "row": (lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n[1]\n'), "metrics.jsonl:2: not a row"),
    "step": (lambda run: (run / "metrics.jsonl").write_text('{"step": "0"}\n'), "metrics.jsonl:1: not a row"),
    "text": (lambda run: (run / "metrics.jsonl").write_text('oh\n{"step": 0}\n'), "metrics.jsonl:1: not a row"),
}  # fmt: skip
SHAPES: dict[str, Any] = {
    "[]": "is not what this version writes",
    '{"extra": []}': "is not what this version writes",
    '{"extra": {}, "accuracy": "high"}': "is not what this version writes",
    '{"extra": {}}': "`before` in its state.json",
    '{"extra": {"before": {"test": "?"}}}': "`before` in its state.json",
    '{"extra": {"before": {}, "sampler": 3}}': "`sampler` in its state.json",
    '{"extra": {"before": {}, "sampler": {"epoch": 0, "position": -1}}}': "`sampler` in its state.json",
    '{"extra": {"before": {}, "sampler": {"epoch": 0, "position": 0, "outstanding": 3}}}': "`sampler` in its",
    '{"extra": {"before": {}, "sampler": {"epoch": 0, "position": 123456}}}': "it was at task 123456, and now",
    "[" * 100_000: "restored: ",
}


@pytest.mark.parametrize("case", [*DAMAGES, *SHAPES], ids=lambda case: case[:70])
def test_a_damaged_run_folder_is_one_line(
    stopped: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    from agentrl.cli import main

    folder = copied(stopped, tmp_path / "run")
    if case in DAMAGES:
        damage, words = DAMAGES[case]
        damage(folder)
    else:
        words = SHAPES[case]
        unsigned(folder)
        (folder / STATE).write_text(case)
    rows = (folder / "metrics.jsonl").read_bytes()
    assert main.run(["train", "--resume", str(folder)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert words in said[0]
    assert str(folder) in said[0]
    assert (folder / "metrics.jsonl").read_bytes() == rows


def test_a_checkpoint_without_checksums_is_resumed(stopped: TrainResult, tmp_path: Path) -> None:
    folder = copied(stopped, tmp_path / "run")
    unsigned(folder)
    resumed = resume_run(str(folder), overrides=["train.steps=4", "eval.splits=[]", "track.trackers=[]"])
    assert resumed.steps == 4


class Five(Noisy):
    """Five tasks, of which a step takes two: epochs end in the middle of steps and between them."""

    def tasks(self, split: str) -> Sequence[Task]:
        return super().tasks(split)[:5]


def same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(ours[name].equal(theirs[name]) for name in ours)


EPOCHS: dict[str, Any] = {
    "env": {"name": f"{__name__}:Five"},
    "tools": [],
    "rollout__max_turns": 1,
    "rollout__max_turn_tokens": 24,
}
"""Without tools all samples of a step are in the batches of the engine together, whatever the clock says: then all is
equal to the bit."""
KINDS: dict[str, tuple[dict[str, Any], int, Sequence[int]]] = {
    "plain": ({}, 6, (2, 5)),
    "adapter and critic": (
        {
            "model": {"lora": {"rank": 2, "dropout": 0.2}}, "critic": {"lr": 1e-3, "warmup_steps": 2},
            "algorithm": {"advantage": "gae"},
        }, 3, (1,),
    ),
}  # fmt: skip
"""What differs, how many steps the run has, and from which it goes on. Epochs end inside of step 3 and with step 5; a
critic's warm-up ends with step 2."""


@pytest.mark.parametrize("kind", ["plain", pytest.param("adapter and critic", marks=pytest.mark.long)])
def test_interrupted_at_any_step_it_is_the_same_run_to_the_bit(tmp_path: Path, kind: str) -> None:
    changes, last, steps = KINDS[kind]
    every_step = {"train__steps": last, "train__save_every": 1, "train__keep": last}
    whole = agentrl.train(job(tmp_path / "whole", **{**EPOCHS, **changes, **every_step, "eval__every": last - 1}))
    told = [steady(row) for row in metrics(whole.folder)]
    drawn = [row["task"] for step in range(1, last + 1) for row in records(whole.folder, f"step_{step}")]
    assert all(len(set(drawn[start : start + 5 * 4])) == 5 for start in range(0, len(drawn) - 5 * 4 + 1, 5 * 4))
    assert not same_state(trained(whole, 1), trained(whole, last))
    for step in steps:
        folder = copied(whole, tmp_path / f"from_{step}")
        for later in range(step + 1, last + 1):
            shutil.rmtree(folder / "checkpoints" / f"step_{later}")
        resumed = resume_run(str(folder))
        assert [steady(row) for row in metrics(resumed.folder)] == told
        assert same_state(trained(resumed), trained(whole))
        assert (resumed.before, resumed.after) == (whole.before, whole.after)


def full_disk(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """From its second use on, what writes there is refused."""
    import errno

    from agentrl.checkpoint import state_file
    from agentrl.checkpoint.run_folder import RunFolder

    owner, name = {"checkpoint": (state_file, "write"), "metrics": (RunFolder, "append_metrics")}[what]
    kept, uses = getattr(owner, name), iter(range(99))

    def write(*arguments: Any) -> None:
        if next(uses) >= 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        kept(*arguments)

    monkeypatch.setattr(owner, name, write)


@pytest.mark.parametrize("what", ["checkpoint", "metrics"])
def test_a_full_disk_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    from agentrl.cli import main
    from agentrl.recipe.load import dump_recipe

    folder, recipe = tmp_path / "run", tmp_path / "job.yaml"
    recipe.write_text(dump_recipe(small(folder, train__save_every=1, train__steps=4, eval__splits=[], **EPOCHS)))
    full_disk(monkeypatch, what)
    assert main.run(["train", str(recipe)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(said) == 1
    if what == "checkpoint":
        assert f"{folder}/checkpoints: a checkpoint could not be written: No space left on device (" in said[0]
        stands = "the checkpoint of step 2 is lost, that of step 1 is kept"
        assert said[0].endswith(f"{stands}; go on with: agentrl train --resume {folder}")
        assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step_1"]
    else:
        saved = f"step 1 is saved, go on with: agentrl train --resume {folder}"
        assert said[0] == f"error: {folder}: No space left on device; {saved}"
        assert [row["step"] for row in metrics(folder)] == [0]
    monkeypatch.undo()
    resumed = resume_run(str(folder))
    assert [row["step"] for row in metrics(resumed.folder)] == [0, 1, 2, 3, 4]
