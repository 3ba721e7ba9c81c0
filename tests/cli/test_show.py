"""`agentrl show`: stored conversations in the terminal, hostile and damaged ones too."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agentrl.cli import main
from agentrl.errors import nearest
from agentrl.images import STORE, ImageSpan
from agentrl.models import embedded_path
from agentrl.plugins.types import Task
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout import journal as journals
from agentrl.rollout.journal import Journal
from agentrl.trajectory import Boundary, Failure, FinishReason, Group, Learned, Segment, ToolUse, Trajectory, Turn

CALL = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+2"}}}
SAID = (
    {"role": "user", "content": "What is 2+2?\x1b[2J"},
    {"role": "assistant", "content": "", "reasoning_content": "I compute.", "tool_calls": [CALL]},
    {
        "role": "tool",
        "name": "calculator",
        "content": [{"type": "text", "text": "4"}, {"type": "image", "image": "<3 bytes>"}],
    },
    {"role": "assistant", "content": "It is [red]4[/red]."},
)


def sample(task: str, number: int) -> Trajectory:
    ids, mask = np.arange(20, 28, dtype=np.int32), np.array([0, 0, 0, 1, 1, 0, 1, 1], np.uint8)
    return Trajectory(
        request_id=f"{task}#{number}", task=Task(task, {"n": number}), sample=number, ids=ids, loss_mask=mask,
        logprobs=-0.5 * mask.astype(np.float32), weight_version=np.where(mask, 2, -1).astype(np.int32), prompt_length=3,
        turns=(Turn(3, 5), Turn(6, 8)), messages=SAID, rewards={"answer": number, "brevity": 0.5},
        finish=FinishReason.STOP, weights={"brevity": 0.1}, seconds={"total": 1.25},
        tool_uses=(ToolUse("calculator", 0, 0.1, "model: no"),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show") / "run"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("model: {path: tiny}\nenv: {name: gsm8k}\n")
    journal = Journal(TrajectoriesSection(), lambda: folder / "trajectories", lambda task: "home")
    lost = replace(
        sample("b", 1), rewards={}, finish=FinishReason.ERROR, failure=Failure(Boundary.TOOL, "search: away\x07")
    )
    tree = replace(
        sample("tree", 0), segments=(Segment(0, 5), Segment(5, 8, 0), Segment(8, 9, 0)),
        ids=np.arange(20, 29, dtype=np.int32),
        branches=(SAID[:2], SAID[2:], ({"role": "user", "content": "another way"},)),
        loss_mask=np.array([0, 0, 0, 1, 1, 0, 1, 1, 0], np.uint8), logprobs=np.zeros(9, np.float32),
        weight_version=np.array([-1, -1, -1, 2, 2, -1, 2, 2, 0], np.int32),
    )  # fmt: skip
    for step in (1, 2, 4):
        a = [sample("a", n) for n in range(2)]
        made = [Learned(True, t.loss_mask * np.float32(0.7), t.logprobs * 2) for t in (*a, sample("b", 0))]
        journal.step(step, [Group(a[0].task, tuple(a)), Group(lost.task, (sample("b", 0),), (lost,))], made)
    journal.evaluation("test", 4, [Group(tree.task, (tree,))], lambda t: True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journals, "IN_FLIGHT_SECONDS", 0.0)
        journal.finished(Group(Task("c", {}), (sample("c", 0),)))
    return folder


def show(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str, code: int = 0) -> str:
    assert main.run(["show", str(run), *arguments]) == code
    said = capsys.readouterr()
    assert bool(said.err) == bool(code)
    return said.err if code else said.out


def test_the_newest_step_is_printed_and_nothing_steers_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = show(capsys, run)
    assert said.count("== train, step 4 · home · task ") == 4
    assert "\x1b[2J" not in said
    assert "\x07" not in said
    first = said.split("\n== ")[0].splitlines()
    assert first == [
        "== train, step 4 · home · task a · sample 0 · reward 0.05: answer 0, brevity 0.5 x 0.1 · ended by stop",
        "[user]", "What is 2+2?\\x1b[2J", "[assistant]", "I compute.", '-> calculator({"expression": "2+2"})',
        "[tool calculator]", "4", '{"type": "image", "image": "<3 bytes>"}', "[assistant]", "It is [red]4[/red].",
        "(8 tokens, 4 of them trained · 1.25 s · 1 tool calls, 1 with an error)",
    ]  # fmt: skip


def test_unsolved_samples_are_those_that_earned_below_the_mean(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = show(capsys, run, "--unsolved")
    assert [line.partition(" · reward")[0] for line in said.splitlines() if line.startswith("==")] == [
        f"== train, step 4 · home · task {task} · sample 0" for task in ("a", "b")
    ]
    assert show(capsys, run, "--unsolved", "--split", "test") == "every sample there is solved\n"
    assert nearest("zz", map(str, range(100, 140))).startswith("; the nearest of 40: ")
    assert "exclude each other" in show(capsys, run, "--unsolved", "--failed", code=2)


def test_what_is_asked_for_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = show(capsys, run, "--failed")
    assert [line for line in failed.splitlines() if line.startswith("==")] == [
        f"== train, step {step} · home · task b · sample 1 · no reward · ended by error · not trained: failed"
        for step in (4, 2, 1)
    ]
    assert failed.count("failed (tool): search: away\\x07") == 3
    assert show(capsys, run, "--failed", "--task", "a") == "no rollout failed there\n"
    one = show(capsys, run, "--task", "a", "--step", "2", "--limit", "1")
    assert one.count("== train, step 2 · home · task a") == one.count("==") == 1
    assert one.endswith("1 more: --limit 0 prints all of them\n")
    assert show(capsys, run, "--task", "a", "--limit", "0").count("· task a ·") == 6
    assert "== in flight · home · task c · sample 0" in show(capsys, run, "--in-flight")


def test_a_tree_is_shown_as_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = show(capsys, run, "--split", "test")
    assert "== test, step 4 · home · task tree" in said
    assert "· solved · ended by stop" in said
    assert said.count("What is 2+2?") == 1
    assert said.index("-- conversation 1 of 2") < said.index("What is 2+2?") < said.index("It is [red]4[/red].")
    end = said[said.index("-- conversation 2 of 2, which leaves conversation 1 after message 2") :]
    assert end.splitlines()[1:3] == ["[user]", "another way"]


def test_calls_of_an_agent_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    t = sample("a", 0)
    first = replace(t.turns[0], asked={"temperature": 0.2, "top_k": 5})
    second = replace(t.turns[1], role="judge", trained=False, untrained="unreceived")
    mask = t.loss_mask.copy()
    mask[second.start : second.end] = 0
    (tmp_path / "trajectories").mkdir()
    journal = Journal(TrajectoriesSection(), lambda: tmp_path / "trajectories", lambda task: "home")
    kept = replace(t, turns=(first, second), loss_mask=mask, seats={"judge": 0.25})
    journal.step(1, [Group(t.task, (kept, replace(t, sample=1)))])
    text = show(capsys, tmp_path)
    assert "reward 0.05: answer 0, brevity 0.5 x 0.1 · seats: judge 0.25 · ended by stop" in text
    assert text.count('answer 1: asked for {"temperature": 0.2, "top_k": 5}\n') == 1
    assert text.count("answer 2 (judge): not trained: nobody received it\n") == 1


def test_pictures_are_named_by_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "recipe.yaml").write_text("model: {path: tiny}\nenv: {name: gsm8k}\n")
    key, lost = STORE.put(Image.new("RGB", (6, 4))), "0" * 64
    said = {"role": "user", "content": [{"type": "image", "image": key}, {"type": "image", "image": lost}]}
    seen = replace(sample("a", 0), messages=(said,), images=(ImageSpan(1, 2, (1, 2, 4), key),))
    journal = Journal(TrajectoriesSection(), lambda: tmp_path / "trajectories", lambda task: "home")
    journal.evaluation("test", 1, [Group(seen.task, (seen,))], lambda t: True)
    lines = show(capsys, tmp_path, "--split", "test").splitlines()
    assert lines[2] == f"(image of 6 x 4 pixels: {tmp_path / 'images' / key}.png)"
    assert lines[3] == f"(image whose file is gone: {tmp_path / 'images' / lost}.png)"
    tokens = show(capsys, tmp_path, "--split", "test", "--tokens").splitlines()
    assert tokens[2].endswith(f"[image {key[:12]}: 2 tokens]")


def test_tokens_are_shown_by_what_they_were(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(embedded_path()).decode
    said = show(capsys, run, "--tokens", "--limit", "1").splitlines()
    assert said[1:9] == [
        "[read: 3 tokens]", decode([20, 21, 22]),
        "[trained: 2 tokens, weights 2, log-prob -0.500, trainer -1.000, advantage +0.700]", decode([23, 24]),
        "[read: 1 tokens]", decode([25]),
        "[trained: 2 tokens, weights 2, log-prob -0.500, trainer -1.000, advantage +0.700]", decode([26, 27]),
    ]  # fmt: skip
    tree = show(capsys, run, "--tokens", "--split", "test")
    after = tree[tree.index("-- conversation 2 of 2") :].splitlines()
    assert after[1:3] == ["[sampled, not trained: 1 tokens, weights 0, log-prob 0.000]", decode([28])]


MISTAKES = {
    "--step 3": "--step 3: not stored in .*; stored are 1-2, 4",
    "--step -1": "Invalid value for '--step'",
    "--split tset": r"--split tset: no evaluation of it is stored in .*; did you mean 'test'\?",
    "--split test --step 2": "--step 2: not stored in .*; stored are 4",
    "--task z": "--task z: no sample of it is stored there; known: a, b",
    "--in-flight --tokens": "holds no tokens: an older version wrote it, or its step is not whole",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_wrong_wish_is_one_line(arguments: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = show(capsys, run, *arguments.split(), code=2)
    assert re.fullmatch(r"error: [^\n]*\n", said)
    assert re.search(MISTAKES[arguments], said)


OLD = {"task": "t", "reward": 1.0, "finish": "stop", "messages": [{"role": "user", "content": "2+2?"}]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("step_1.parquet", b"PAR1", "cannot be read: "),
        ("step_1.jsonl", b"{", "cannot be read: "),
        ("step_1.jsonl", json.dumps(OLD | {"reward": "x"}).encode(), "damaged: one of its samples cannot be shown"),
        ("step_1.jsonl", json.dumps(OLD | {"failure": 3}).encode(), "damaged: one of its samples cannot be shown"),
        ("step_1.jsonl", json.dumps({"messages": []}).encode(), "cannot be read: a sample lacks 'task'"),
        ("eval_test_1.jsonl", json.dumps(OLD).encode(), "holds no training step; evaluations are: --split test"),
        ("notes.txt", b"", "holds no training step"),
        (None, b"", "not a run folder with stored conversations"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_line(
    name: str | None, content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name is not None:
        (tmp_path / "trajectories").mkdir()
        (tmp_path / "trajectories" / name).write_bytes(content)
    said = show(capsys, tmp_path, code=2)
    assert words in said
    assert said.count("\n") == 1


def test_runs_of_older_versions_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_7.jsonl").write_text(json.dumps(OLD) + "\n")
    assert show(capsys, tmp_path).splitlines()[:3] == [
        "== train, step 7 · task t · sample 0 · reward 1 · ended by stop", "[user]", "2+2?"
    ]  # fmt: skip


def test_what_a_sample_changed_in_its_workspace_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diff = "--- a/home/user/n\n+++ b/home/user/n\n@@ -1,1 +1,1 @@\n-1\n+two\x1b[2J\n"
    changes = [["modified", "/home/user/n", 4096], ["deleted", "/home/user/[b]", 0]]
    kept = {"changes": changes, "more": True, "diff": diff}
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_7.jsonl").write_text(json.dumps(OLD | {"extra": {"workspace": kept}}))
    assert show(capsys, tmp_path).splitlines()[3:-2] == [
        "-- files: 2 or more changed", "modified /home/user/n (4,096 bytes)", "deleted /home/user/[b]",
        "--- a/home/user/n", "+++ b/home/user/n", "@@ -1,1 +1,1 @@", "-1", "+two\\x1b[2J",
    ]  # fmt: skip
