"""What is done with stored rollouts, on one small run: its updates repeated, its rewards computed again, its
conversations played again and gone on with."""

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from cli_help import refused
from paths import ROOT
from safetensors.torch import load_file
from train_help import metrics, records, small, steady
from transformers import AutoTokenizer

import agentrl
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.offline.replay import live_task, play_again, scripted_player
from agentrl.offline.rescore import rescore
from agentrl.offline.turns import StoredTurns
from agentrl.plugins.registry import make_environment
from agentrl.recipe.schema import Recipe
from agentrl.rollout.stored import StoredSample, read_samples, training_files
from agentrl.rollout.trajectory_file import read_rows
from agentrl.training.run import TrainResult, resume_run, told_of_stored
from agentrl.trajectory import Trajectory

pytestmark = pytest.mark.slow


def job(output: Path, **changes: object) -> Recipe:
    """What an update reads is all in it: rewards that fail, several updates a step, a KL in the reward, decay."""
    made: Recipe = small(
        output,
        **{
            "rewards": {
                "functions": ["reward_functions:picky", "reward_functions:places"],
                "weights": {"places": 0.01},
            },
            "rollout__retries": 0,
            "algorithm": {"kl_coef": 0.01, "kl_in": "reward"},
            "train__mini_batches": 2,
            "train__epochs": 2,
            "train__schedule": "cosine",
            "eval__splits": [],
            **changes,
        },
    )
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return agentrl.train(job(tmp_path_factory.mktemp("stored") / "run"))


def equal_weights(one: TrainResult, other: TrainResult) -> bool:
    ours, theirs = (load_file(result.checkpoint / "model.safetensors") for result in (one, other))
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


# agentrl train --from


def test_updates_are_repeated_to_the_bit(run: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = [t for step in (1, 2, 3) for t in records(run.folder, f"step_{step}") if t["failure"]]
    assert failed, "groups are to lack samples"
    again = agentrl.train(job(tmp_path / "again"), stored=[str(run.folder)])
    assert equal_weights(run, again)
    said = capsys.readouterr().out
    assert "trains on 3 of 3 stored steps" in said
    assert "to the bit" not in said
    for ours, theirs in zip(metrics(again.folder)[1:], metrics(run.folder)[1:], strict=True):
        assert steady(ours) == steady(theirs)
    for step in (1, 2, 3):
        name = f"trajectories/step_{step}.parquet"
        assert read_rows(again.folder / name) == read_rows(run.folder / name)


def test_an_interrupted_repetition_goes_on(
    run: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = agentrl.train(job(tmp_path / "run"), stored=[str(run.folder / "trajectories" / "step_1.parquet")])
    assert first.steps == 1
    said = capsys.readouterr().out
    assert "trains on 1 of 1 stored steps; the learning rates are those of train.steps 3" in said
    with pytest.raises(UserError, match="step 1 of 1 is done; no more steps are stored"):
        resume_run(str(first.folder))
    assert equal_weights(run, resume_run(str(first.folder), stored=[str(run.folder)]))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--from", "nowhere", "RECIPE"], "error: --from nowhere: there is no such file or folder"),
        (["--from", "RUN", "--resume", "RUN"], "error: --from: the run that is resumed samples its rollouts"),
        (["--from", "RUN/trajectories/step_1.parquet"], "error: --from /"),
        (["--from", "RUN", "model.path=TINY", "rollout.n=x"], "error: command line: rollout.n"),
    ],
)
def test_what_cannot_be_repeated_is_one_line(
    arguments: list[str], why: str, run: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"RUN": str(run.folder), "RECIPE": str(ROOT / "recipes" / "gsm8k_tool.yaml")}
    given = arguments
    for name, value in names.items():
        given = [text.replace(name, value) for text in given]
    assert refused(capsys, "train", *given).startswith(why)


def test_it_is_said_why_updates_differ(run: TrainResult, tmp_path: Path) -> None:
    recipe = Recipe.load(str(run.folder / "recipe.yaml"))
    files = training_files([str(run.folder)])
    assert told_of_stored([str(run.folder)], files, recipe) == ["trains on 3 of 3 stored steps"]
    other = Recipe.load(
        str(run.folder / "recipe.yaml"), ["train.lr=0.1", "rollout.concurrency=3", "rewards.weights={}"]
    )
    copy = Path(shutil.copytree(run.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("step_1.parquet")))
    (copy / "recipe.resumed_1.yaml").write_text((copy / "recipe.yaml").read_text())
    _, rewards, line = told_of_stored([str(copy)], training_files([str(copy)]), other)
    assert rewards == f"rewards are those stored in {copy}: agentrl rescore computes them by another recipe"
    assert line == (
        f"not the updates of {copy} to the bit: changed since the run began: train.lr 0.001 -> 0.1; it was resumed "
        "with other recipes; not all of its steps are stored whole (track.trajectories)"
    )


# agentrl rescore


def test_the_same_recipe_flips_nothing(run: TrainResult, tmp_path: Path) -> None:
    found = rescore(run.folder, output=str(tmp_path / "same"))
    assert [one for one in found.samples if one.changed] == []
    assert (found.computed, found.kept) == (("picky", "places"), ("answer", "noise"))
    for step in (1, 2, 3):
        ours, theirs = (records(folder, f"step_{step}") for folder in (found.folder, run.folder))
        for one, other in zip(ours, theirs, strict=True):
            assert one | {"left_out": None} == other | {"left_out": None}
        assert {one["left_out"] for one in ours} <= {None, "failed"}


def test_changed_rewards_are_computed_from_stored_conversations(
    run: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ['rewards.functions=[{name: "reward_functions:strict", part: answer}]', "rewards.weights={noise: 2}"]
    assert main.run(["rescore", str(run.folder), *given, "--step", "2"]) == 0
    said = capsys.readouterr().out
    assert "computed: answer; kept as stored, of environment and tools: noise" in said
    folder = run.folder / "rescored-001"
    assert [path.name for path in (folder / "trajectories").iterdir()] == ["step_2.parquet"]
    former = {t["request"]: t for t in records(run.folder, "step_2")}
    for t in records(folder, "step_2"):
        old = former[t["request"]]
        if old["failure"] is not None:
            assert t["failure"] == old["failure"]
        else:
            answer = old["rewards"]["answer"] - 2 * len(old["turns"])
            assert t["rewards"] == pytest.approx({"answer": answer, "noise": old["rewards"]["noise"]})
            assert t["reward"] == pytest.approx(answer + 2 * old["rewards"]["noise"])
    assert Recipe.load(str(folder / "recipe.yaml")).rewards.weights == {"noise": 2.0}


def test_environment_and_tools_score_anew_where_rollouts_are_played_again(
    run: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = rescore(run.folder, step=1, replay=True, output=str(tmp_path / "same"))
    assert [one for one in same.samples if one.changed] == []
    assert (same.computed, same.kept, same.notes) == (("answer", "noise", "picky", "places"), (), [])
    stored = {t["request"]: t for step in (1, 2, 3) for t in records(run.folder, f"step_{step}")}
    output, given = str(tmp_path / "out"), ["rescore", str(run.folder), "--replay", "--output"]
    assert main.run([*given, output, "rewards.functions=[]", "rewards.weights={noise: 2}"]) == 0
    assert "that had failed are whole now" in capsys.readouterr().out
    for step in (1, 2, 3):
        for t in records(tmp_path / "out", f"step_{step}"):
            former = stored[t["request"]]
            assert t["failure"] is None  # of those, too, that a function had failed
            assert set(t["rewards"]) == {"answer", "noise"}
            if former["failure"] is None:
                assert t["rewards"] == {part: former["rewards"][part] for part in ("answer", "noise")}
    other = rescore(run.folder, overrides=["tools=[train_plugins:Raising]"], step=1, replay=True,
                    output=str(tmp_path / "other"))  # fmt: skip
    unlike = sum(bool(t["tool_uses"]) for t in records(run.folder, "step_1"))
    assert other.notes == [
        f"{unlike} of 8 rollouts could not be played again as they are stored: what environment and tools gave is kept "
        "there"
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere"], "error: nowhere: not a folder with stored rollouts (trajectories/ is missing)"),
        (["RUN", "--step", "9"], "error: --step 9: not stored in RUN; stored are 1-3"),
        (["RUN", "--split", "trian"], "error: --split trian: nothing of it is stored in RUN; did you mean 'train'?"),
        (["RUN", "--output", "RUN"], "error: output: RUN already holds a run"),
        (["RUN", "output=RUN"], "error: output: RUN already holds a run"),
        (["RUN", "rewards.weights.nois=2"], "error: rewards.weights: no stored rollout has the part 'nois'"),
        (["RUN", "rewards.functions=[reward_functions:nothing]"], "error: "),
        (["RUN", "--recipe", "nowhere.yaml"], "error: nowhere.yaml"),
    ],
)
def test_what_cannot_be_rescored_is_one_line(
    arguments: list[str], why: str, run: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    there = set(run.folder.iterdir())
    said = refused(capsys, "rescore", *(text.replace("RUN", str(run.folder)) for text in arguments))
    assert said.startswith(why.replace("RUN", str(run.folder)))
    assert set(run.folder.iterdir()) == there


# agentrl rollout


def test_rollouts_alone_are_those_of_a_run(
    run: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "alone"
    assert main.run(["rollout", str(run.folder / "recipe.yaml"), f"output={output}"]) == 0
    ours, theirs = (read_rows(folder / "trajectories" / "step_1.parquet") for folder in (output, run.folder))
    unlike = {"seconds", "spans", "tool_uses", "left_out", "advantages", "trainer_logprobs"}
    for one, other in zip(ours, theirs, strict=True):
        assert {key for key in one if one[key] != other[key]} <= unlike
        assert (one["advantages"], one["trainer_logprobs"]) == (None, None)
    assert f"folder: {output} (1 of 1 steps)" in capsys.readouterr().out
    assert main.run(["rollout", "--resume", str(output), "--steps", "2"]) == 0
    assert [t["task"] for t in records(output, "step_2")] == [t["task"] for t in records(run.folder, "step_2")]
    assert main.run(["rollout", "--resume", str(output), "--steps", "2"]) == 2
    assert "step 2 of 2 is done; set --steps higher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "error: rollout needs a recipe"),
        (["RUN", "output=RUN"], "error: output: RUN already holds a run"),
        (
            ["RUN", "--split", "tset"],
            "error: --split tset: environment 'gsm8k' has no such split; did you mean 'test'?",
        ),
        (["--resume", "RUN"], "error: --resume RUN: a run that trains"),
        (["RUN", "--resume", "RUN"], "error: --resume goes on with the folder's own recipe"),
    ],
)
def test_what_cannot_be_sampled_is_one_line(
    arguments: list[str], why: str, run: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "rollout", *(text.replace("RUN", str(run.folder)) for text in arguments))
    assert said.startswith(why.replace("RUN", str(run.folder)))
    assert list(tmp_path.iterdir()) == []


# agentrl replay


def samples_of(run: TrainResult, step: int) -> list[StoredSample]:
    return read_samples(run.folder / "trajectories" / f"step_{step}.parquet")


def called(run: TrainResult) -> Trajectory:
    """A sample whose first call went well."""
    each = (sample.trajectory for sample in samples_of(run, 1))
    return next(t for t in each if t.tool_uses and not t.tool_uses[0].error)


def test_every_sample_is_played_again_as_it_was(run: TrainResult) -> None:
    """Environment, tools and the plugins' random numbers say the same, so prompts are equal id for id."""
    recipe = Recipe.load(str(run.folder / "recipe.yaml"))

    async def play() -> None:
        env, engine = make_environment(recipe.env), StoredTurns()
        player = await scripted_player(recipe, env, engine)
        for sample in samples_of(run, 2):
            found = await play_again(player, engine, sample, live_task(env, sample))
            stored, live = sample.trajectory, found.live
            assert [step.same for step in found.steps] == [True] * (len(stored.turns) + 1)
            assert live.finish == stored.finish
            assert (live.failure is None) is (stored.failure is None)
            for name in ("ids", "loss_mask", "logprobs", "weight_version"):
                assert getattr(live, name).tobytes() == getattr(stored, name).tobytes()
            own = {part: value for part, value in stored.rewards.items() if part not in found.group_parts}
            assert live.rewards == own
        assert await player.close() == []

    asyncio.run(play())


def test_a_tool_that_answers_otherwise_is_shown(run: TrainResult, capsys: pytest.CaptureFixture[str]) -> None:
    stored = called(run)
    given = ["replay", str(run.folder), "--id", stored.request_id]
    assert main.run(given) == 0
    said = capsys.readouterr().out
    assert "environment and tools answer as stored" in said
    assert "of the whole group, so not computed" in said
    answer = stored.messages[2]["content"]
    assert main.run([*given, "tools=[train_plugins:Raising]"]) == 1
    said = capsys.readouterr().out
    assert f"-{answer}\n+" in said
    assert "out of paper" in said
    assert "environment or tools answer otherwise after turn 1" in said


@pytest.mark.parametrize("command", ["replay", "continue"])
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere"], "error: nowhere: not a folder with stored rollouts"),
        (["RUN"], "error: RUN: 24 samples match: name one by --id: step_1/"),
        (["RUN", "--id", "step_1/nobody"], "error: RUN: no such sample is stored there"),
        (["RUN", "--step", "7"], "error: --step 7: not stored in RUN; stored are 1-3"),
        (
            ["RUN", "--step", "1", "--task", "TASK", "--sample", "0", "env.name=gsm8k", "env.source=nowhere.jsonl"],
            "error: ",
        ),
        (
            ["RUN", "--step", "1", "--task", "TASK", "--sample", "0", "env.name=text_game"],
            "error: task TASK: environment",
        ),
    ],
)
def test_what_cannot_be_played_again_is_one_line(
    command: str, arguments: list[str], why: str, run: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"RUN": str(run.folder), "TASK": samples_of(run, 1)[0].trajectory.task.id}
    for name, value in names.items():
        arguments, why = [text.replace(name, value) for text in arguments], why.replace(name, value)
    more = ["--turn", "1"] if command == "continue" else []
    assert refused(capsys, command, *arguments, *more).startswith(why)


# agentrl continue


def long_one(run: TrainResult) -> StoredSample:
    return next(s for s in samples_of(run, 3) if len(s.trajectory.turns) > 1 and s.trajectory.valid)


def test_continuations_begin_with_the_stored_tokens(run: TrainResult, capsys: pytest.CaptureFixture[str]) -> None:
    stored = long_one(run).trajectory
    assert main.run(["continue", str(run.folder), "--id", stored.request_id, "--turn", "1", "-n", "5"]) == 0
    said = capsys.readouterr().out
    assert f"{stored.request_id}, 1 of {len(stored.turns)} turns kept" in said
    samples = read_samples(run.folder / "continued-001" / "trajectories" / "step_1.parquet")
    assert len(samples) == 5
    start = stored.turns[1].start
    for _, t in samples:
        assert t.ids[:start].tobytes() == stored.ids[:start].tobytes()
        assert t.logprobs[:start].tobytes() == stored.logprobs[:start].tobytes()
        assert t.weight_version[:start].tobytes() == stored.weight_version[:start].tobytes()
        assert [turn.trained for turn in t.turns] == [False, *[True] * (len(t.turns) - 1)]
        assert t.loss_mask.sum() == sum(turn.end - turn.start for turn in t.turns[1:]) > 0
        assert not t.valid or t.rewards["noise"] == stored.rewards["noise"]  # the plugins' random numbers
    assert len({t.ids.tobytes() for _, t in samples}) > 1


def test_nothing_is_sampled_after_tools_that_answer_otherwise(
    run: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = next(
        s.trajectory for s in samples_of(run, 1) if s.trajectory.tool_uses and not s.trajectory.tool_uses[0].error
    )
    given = ["continue", str(run.folder), "--id", stored.request_id, "tools=[train_plugins:Raising]"]
    output = tmp_path / "out"
    assert main.run([*given, "--turn", "1", "-n", "2", "--output", str(output)]) == 1
    said = capsys.readouterr().out
    assert said.count("what stands before turn 2 is not as stored") == 2
    assert f"agentrl replay {run.folder} --id {stored.request_id}" in said
    assert not output.exists()
    turns = len(stored.turns)
    assert f"has {turns} turns: expected 0 to {turns - 1}" in refused(capsys, *given, "--turn", "9")


def test_another_tokenizer_is_refused(run: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copytree(run.checkpoint, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["zyzzyva"])
    tokenizer.save_pretrained(model)
    chosen = ["--id", long_one(run).trajectory.request_id, "--turn", "1"]
    said = refused(capsys, "continue", str(run.folder), *chosen, "--model", str(model))
    assert f"error: --model: {model} has another tokenizer than tiny" in said
    given = ["--from", str(run.folder), f"model.path={model}", f"output={tmp_path / 'out'}"]
    said = refused(capsys, "train", *given)
    assert f"error: {run.folder}: sampled with the tokenizer of tiny: {model} has another" in said
