"""Trajectories on disk: which steps, how many tasks of each, how many files stay; and that what is read is what was."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from learner_help import make_groups

from agentrl.errors import UserError
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.track import TrackSection
from agentrl.rollout import journal as module
from agentrl.rollout import trajectory_file
from agentrl.rollout.journal import Journal
from agentrl.rollout.stored import read_groups
from agentrl.rollout.trajectory_file import (
    ALLOWED,
    FACTS,
    FILTERED,
    IN_FLIGHT,
    SCHEMA,
    SURPLUS,
    TOKENS,
    conversations,
    join_trajectories,
    note_schemas,
    read_records,
    read_rows,
    read_schemas,
    read_table,
    record,
    row,
    stored_files,
)
from agentrl.trajectory import (
    Boundary,
    Failure,
    FinishReason,
    Group,
    InvariantError,
    Learned,
    Segment,
    Span,
    ToolUse,
    Trajectory,
    Turn,
)

GROUPS = make_groups([[1, 0], [0, 1], [0, 0], [1, 1], [1, 0]])


def journal(folder: Path, **policy: int) -> Journal:
    recipe = Recipe(track=TrackSection.model_validate({"trajectories": policy}))
    return Journal(recipe.track.trajectories, lambda: folder, lambda task: "home")


def names(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=lambda name: (len(name), name))


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ({}, range(1, 13)),
        ({"every": 0}, ()),
        ({"every": 5}, (5, 10)),
        ({"keep": 3}, (10, 11, 12)),
        ({"keep": 2, "every": 4}, (8, 12)),
        ({"keep": 0}, range(1, 13)),
    ],
)
def test_which_steps_are_kept(policy: dict[str, int], steps: list[int], tmp_path: Path) -> None:
    written = journal(tmp_path, **policy)
    for step in range(1, 13):
        written.step(step, GROUPS[:1])
    assert names(tmp_path) == [f"step_{step}.parquet" for step in steps]


def test_old_files_of_a_resumed_run_go_too_and_others_stay(tmp_path: Path) -> None:
    for name in (
        "step_1.jsonl",
        "step_2.jsonl.zst",
        "step_3.jsonl",
        "step_mine.jsonl",
        "notes.txt",
        "eval_step_1.jsonl",
    ):
        (tmp_path / name).write_text("")
    journal(tmp_path, keep=1).step(3, GROUPS)
    assert names(tmp_path) == ["notes.txt", "step_3.parquet", "step_mine.jsonl", "eval_step_1.jsonl"]


def test_the_first_evaluation_of_a_split_stays(tmp_path: Path) -> None:
    written = journal(tmp_path, keep=2)
    for step in (0, 20, 40, 60, 80):
        for split in ("test", "test_2", "a.[x]"):
            written.evaluation(split, step, GROUPS[:1], lambda trajectory: True)
    kept = {(step, split) for split in ("test", "test_2", "a.[x]") for step in (0, 60, 80)}
    assert set(names(tmp_path)) == {f"eval_{split}_{step}.parquet" for step, split in kept}
    assert {(one.step, one.split) for one in stored_files(tmp_path) if one.evaluation} == kept


@pytest.mark.parametrize(
    ("sample", "tasks"), [(0, [0, 1, 2, 3, 4]), (2, [0, 2]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])]
)
def test_how_many_tasks_of_a_step_are_written(sample: int, tasks: list[int], tmp_path: Path) -> None:
    written = journal(tmp_path, sample=sample)
    written.step(1, GROUPS)
    written.step(2, [])
    played = read_rows(tmp_path / "step_1.parquet", ["group", "sample"])
    assert [(r["group"], r["sample"]) for r in played] == [(group, sample) for group in tasks for sample in (0, 1)]
    assert read_records(tmp_path / "step_2.parquet") == []
    written.evaluation("test", 0, GROUPS, lambda trajectory: True)
    assert len(read_records(tmp_path / "eval_test_0.parquet")) == 10


def test_a_switch_is_short_for_every_step_or_none() -> None:
    off, on = (TrackSection.model_validate({"trajectories": switch}).trajectories for switch in (False, True))
    assert (off.every, on.every) == (0, 1)


def said(*texts: str) -> tuple[dict[str, Any], ...]:
    return tuple({"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts))


BRANCHES = (said("2+2?", "4"), said("and 3+3?", "6"), said("or 4+4?", "8"))


def tree() -> Trajectory:
    """Three calls: two follow the first."""
    ids, mask = np.arange(12, dtype=np.int32), np.array([0, 0, 1, 1] * 3, np.uint8)
    return Trajectory(
        request_id="step_1/t#0.1", task=Task("t", {"question": "2+2?", "n": [1, 2.5, None, True]}), sample=3, ids=ids,
        loss_mask=mask, logprobs=-(mask * np.arange(12)).astype(np.float32),
        weight_version=np.where(mask, 7, -1).astype(np.int32), prompt_length=2,
        turns=(Turn(2, 4), Turn(6, 8, 0.5, role="judge"), Turn(10, 12, asked={"top_k": 5})),
        messages=(*BRANCHES[0], *BRANCHES[2]),
        rewards={"answer": 1.0, "brevity": -0.25}, finish=FinishReason.ENV_DONE,
        weights={"brevity": 2.0, "unused": 1.0}, seconds={"total": 1.5, "engine": 1.0},
        tool_uses=(ToolUse("calculator", 1, 0.25, "model: no", {"hits": 3.0}, True),),
        tools=("calculator",), extra={"retried": ("tool: api_key='abcdefgh'",), "gateway": {"calls": 3}},
        segments=(Segment(0, 4), Segment(4, 8, 0), Segment(8, 12, 0)), branches=BRANCHES, seed=2**63 - 1,
        spans=(Span("engine", 1e9, 1e9 + 1),), seats={"judge": 0.5},
    )  # fmt: skip


def test_a_file_holds_the_schemas_of_the_tools_that_its_samples_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_file, "_offered", {})
    t = tree()
    schema = {"type": "function", "function": {"name": "calculator", "description": "\ud800", "parameters": {}}}
    note_schemas([schema, {"function": {"name": "other"}}])
    journal(tmp_path).evaluation("test", 1, [Group(t.task, (t,))], lambda _: True)
    path, joined = tmp_path / "eval_test_1.parquet", tmp_path / "joined.parquet"
    assert read_schemas(path) == [schema]
    monkeypatch.setattr(trajectory_file, "_offered", {})  # as in another process
    join_trajectories(joined, [path])
    assert read_schemas(joined) == [schema]
    monkeypatch.setattr(trajectory_file, "_MOST_SCHEMAS", 10)
    journal(tmp_path).evaluation("test", 1, [Group(t.task, (t,))], lambda _: True)
    assert read_schemas(path) == []


def test_what_is_read_is_what_was(tmp_path: Path) -> None:
    t = tree()
    failed = replace(
        tree(), rewards={}, finish=FinishReason.ERROR, sample=4,
        failure=Failure(Boundary.TOOL, "search: https://me:secret@host is away"),
    )  # fmt: skip
    made = Learned(True, t.loss_mask * np.float32(0.5), t.logprobs * np.float32(2))
    journal(tmp_path).step(9, [Group(t.task, (t,), (failed,))], [made])
    path = tmp_path / "step_9.parquet"
    assert pq.read_schema(path).equals(SCHEMA, check_metadata=False)
    assert pq.read_schema(path).metadata[b"agentrl.trajectories"] == b"2"
    one, other = read_records(path, tokens=True)
    for name in ("ids", "loss_mask", "logprobs", "weight_version"):
        assert one.pop(name) == other.pop(name) == getattr(t, name).tolist()
    assert one.pop("advantages") == made.advantages.tolist()
    assert one.pop("trainer_logprobs") == (t.logprobs * 2).tolist()
    assert (other["advantages"], other["trainer_logprobs"]) == (None, None)
    assert one == {
        "step": 9, "evaluation": False, "split": "train", "environment": "home", "task": "t", "group": 0, "sample": 3,
        "images": None, "seats": {"judge": 0.5},
        "calls": [
            {"role": role, "asked": asked, "untrained": None}
            for role, asked in ((None, {}), ("judge", {}), (None, {"top_k": 5}))
        ],
        "seed": 2**63 - 1, "request": "step_1/t#0.1", "reward": 0.5, "rewards": {"answer": 1.0, "brevity": -0.25},
        "weights": {"answer": 1.0, "brevity": 2.0}, "solved": None, "finish": "env_done", "left_out": None,
        "tokens": {"prompt": 2, "sampled": 6, "all": 12}, "tool_errors": 1,
        "turns": [
            {"start": s, "end": s + 2, "reward": r, "trained": True, "state": None}
            for s, r in ((2, 0), (6, 0.5), (10, 0))
        ],
        "segments": [{"start": 4 * i, "end": 4 * i + 4, "parent": p} for i, p in enumerate((-1, 0, 0))],
        "tools": ["calculator"],
        "tool_uses": [{
            "name": "calculator", "turn": 1, "seconds": 0.25, "error": "model: no", "cut": True, "metrics": {"hits": 3},
        }],
        "seconds": {"total": 1.5, "engine": 1.0, "tools": 0.0, "environment": 0.0, "hooks": 0.0},
        "spans": [{"part": "engine", "start": 1e9, "end": 1e9 + 1}],
        "data": {"question": "2+2?", "n": [1, 2.5, None, True]}, "messages": list(t.messages), "failure": None,
        "branches": [list(messages) for messages in BRANCHES],
        "extra": {"retried": ["tool: api_key='***'"], "gateway": {"calls": 3}},
    }  # fmt: skip
    assert other["failure"] == {"boundary": "tool", "message": "search: https://***@host is away"}
    assert (other["reward"], other["left_out"], other["sample"]) == (None, "failed", 4)
    told = conversations(one)
    assert [list(c.messages) for c in told] == [[*BRANCHES[0], *BRANCHES[1]], list(BRANCHES[2])]
    assert [c.heading for c in told] == [
        "conversation 1 of 2", "conversation 2 of 2, which leaves conversation 1 after message 2"
    ]  # fmt: skip
    (alone,) = conversations({**one, "branches": []})
    assert (alone.messages, alone.heading) == (list(t.messages), "")


def test_why_a_sample_was_left_out_is_written(tmp_path: Path) -> None:
    groups = make_groups([[1, 0], [1, 1], [1], [1, 0], [1, 0]])
    lost = replace(groups[0].trajectories[0], rewards={}, finish=FinishReason.ABORTED)
    groups.append(Group(groups[0].task, (), (lost,)))
    whole = [t for group in groups for t in group.trajectories]
    flat = [np.zeros(len(t.ids), np.float32) for t in whole]
    made = [Learned(index not in (2, 3, 4, 5, 8), column) for index, column in enumerate(flat)]
    made[8] = replace(made[8], advantages=whole[8].loss_mask.astype(np.float32))  # such as while a critic warms up
    journal(tmp_path).step(1, groups, made)
    reasons = [r["left_out"] for r in read_rows(tmp_path / "step_1.parquet", ["left_out"])]
    assert reasons == [None, None, "equal", "equal", "few", "no_advantage", None, None, "not_updated", "aborted"]


def test_groups_that_no_update_saw_are_written_behind_the_others(tmp_path: Path) -> None:
    """As many tasks in all as `sample` says."""
    kept, others = GROUPS[:2], {FILTERED: GROUPS[2:4], SURPLUS: GROUPS[4:]}
    lost = replace(GROUPS[2].trajectories[1], rewards={}, finish=FinishReason.ERROR)
    others[FILTERED] = [Group(GROUPS[2].task, GROUPS[2].trajectories[:1], (lost,)), *others[FILTERED][1:]]
    made = [Learned(True, np.zeros(len(t.ids), np.float32)) for group in kept for t in group.trajectories]
    written = journal(tmp_path)
    for group in [*kept, *others[FILTERED], *others[SURPLUS]]:
        written.finished(group)
    written.step(1, kept, made, left_out=others)
    assert names(tmp_path) == ["step_1.parquet"]  # nothing is in flight any more
    found = read_rows(tmp_path / "step_1.parquet", ["group", "left_out"])
    assert [r["group"] for r in found] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    reasons = [None] * 4 + [FILTERED, "failed", FILTERED, FILTERED, SURPLUS, SURPLUS]
    assert [r["left_out"] for r in found] == reasons
    assert len(read_groups(tmp_path / "step_1.parquet")) == 5
    again = read_groups(tmp_path / "step_1.parquet", trained=True)
    assert [[t.request_id for t in g.trajectories] for g in again] == [
        [t.request_id for t in g.trajectories] for g in kept
    ]
    journal(tmp_path, sample=2).step(2, kept, made, left_out=others)
    assert [r["group"] for r in read_rows(tmp_path / "step_2.parquet", ["group"])] == [0, 0, 2, 2]


class Odd(dict[str, Any]):
    def items(self) -> Any:
        raise SystemExit(3)


def test_hostile_content_is_kept_as_far_as_json_has_it(tmp_path: Path) -> None:
    inside: list[Any] = []
    inside.append(inside)
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    data = {
        "nan": float("nan"), "large": 10**5000, "itself": inside, "deep": deep, "odd": Odd(a=1), "bytes": b"abc",
        "huge": "x" * 60_000_000, "many": list(range(200_000)), 5: {1, 2},
    }  # fmt: skip
    texts = ("lone \ud800 and \udfff", "\x1b[2J\x00\u202e\u2028", "漢字 🙂", '"\\ \t')
    t = replace(
        tree(), task=Task("t\ud800", data), messages=said(*texts), branches=(), segments=(), request_id="\udc00"
    )
    t = replace(t, tool_uses=(replace(t.tool_uses[0], name="\ud800"),))
    journal(tmp_path).step(1, [Group(t.task, (t,))])
    (found,) = read_records(tmp_path / "step_1.parquet")
    assert [m["content"] for m in found["messages"]] == list(texts)
    assert (found["task"], found["request"], found["tool_uses"][0]["name"]) == ("t\\ud800", "\\udc00", "\\ud800")
    kept = found["data"]
    assert kept["nan"] == "<nan>"
    assert kept["large"] == "<integer of 16610 bits>"
    assert kept["itself"] == ["<list nested too deeply>"]
    assert (kept["odd"], kept["bytes"], kept["huge"]) == ("<Odd>", "<3 bytes>", "<60000000 characters left out>")
    assert 0 < len(kept["many"]) < 200_000


@pytest.mark.parametrize(
    ("changes", "made"),
    [
        ({"rewards": {"answer": float("nan")}}, None),
        ({"rewards": {"answer": float("inf")}}, None),
        ({"seconds": {"total": float("nan")}}, None),
        ({"logprobs": np.full(12, np.nan, np.float32)}, None),
        ({}, Learned(True, np.full(12, np.inf, np.float32))),
        ({}, Learned(True, np.zeros(12, np.float32), np.full(12, -np.inf, np.float32))),
    ],
)
def test_a_number_that_is_not_finite_is_refused(changes: dict[str, Any], made: Learned | None, tmp_path: Path) -> None:
    t = replace(tree(), **changes)
    with pytest.raises(InvariantError, match=r"step_1/t#0\.1: .* not .*finite"):
        journal(tmp_path).step(1, [Group(t.task, (t,))], [made] if made else ())
    assert names(tmp_path) == []


def test_a_large_step_is_cut_into_pieces_that_can_be_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.trajectory_file._CHARACTERS", 1000)
    monkeypatch.setattr("agentrl.rollout.trajectory_file._PIECE", 3)
    long = replace(tree(), messages=said("x" * 900))
    journal(tmp_path).step(1, [Group(long.task, (tree(), long, long, *GROUPS[0].trajectories * 4))])
    file = pq.ParquetFile(tmp_path / "step_1.parquet")
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    assert sizes == [1, 1, 1, 3, 3, 2]
    assert len(read_records(tmp_path / "step_1.parquet")) == 11


def test_what_is_in_flight_is_appended_and_gone_once_its_step_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IN_FLIGHT_SECONDS", 0.0)
    written, path = journal(tmp_path), tmp_path / IN_FLIGHT
    lengths = []
    for group in GROUPS[:3]:
        written.finished(group)
        lengths.append(len(path.read_bytes().splitlines()))
    assert lengths == [2, 4, 6]
    assert {record(json.loads(line))["request"] for line in path.read_text().splitlines()} == {"r0", "r1"}
    written.step(1, [GROUPS[1], GROUPS[0]])
    assert [r["rewards"][0]["value"] for r in read_rows(tmp_path / "step_1.parquet", ["rewards"])] == [0, 1, 1, 0]
    assert len(path.read_bytes().splitlines()) == 2  # the third group belongs to a later step
    written.step(2, [GROUPS[2]])
    assert names(tmp_path) == ["step_1.parquet", "step_2.parquet"]
    off = journal(tmp_path, every=0)
    off.finished(GROUPS[0])
    assert not path.exists()
    path.mkdir()
    written.finished(GROUPS[3])  # a disk that refuses ends no rollout
    with pytest.raises(IsADirectoryError):
        written.step(3, [GROUPS[3]])


def test_a_step_of_less_than_a_second_writes_only_its_own_file(tmp_path: Path) -> None:
    written, path = journal(tmp_path), tmp_path / IN_FLIGHT
    written._wrote = time.monotonic() + 1000.0
    written.finished(GROUPS[0])
    written.finished(GROUPS[1])
    written.step(1, [GROUPS[1]])
    assert names(tmp_path) == ["step_1.parquet"]
    written._wrote = 0.0
    written.finished(GROUPS[2])
    assert len(path.read_bytes().splitlines()) == 4  # and the first group's
    written._wrote = time.monotonic() + 1000.0
    written.finished(GROUPS[3])
    written.step(2, [GROUPS[0]])
    assert len(path.read_bytes().splitlines()) == 2
    written._wrote = 0.0
    written.finished(GROUPS[1])
    assert len(path.read_bytes().splitlines()) == 6


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = journal(tmp_path)
    written.step(1, GROUPS[:1])
    before = (tmp_path / "step_1.parquet").read_bytes()

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentrl.rollout.trajectory_file.flush_file", full)
    with pytest.raises(OSError, match="No space left"):
        written.step(1, GROUPS)
    assert names(tmp_path) == ["step_1.parquet"]
    assert (tmp_path / "step_1.parquet").read_bytes() == before


def test_secrets_of_the_recipe_stand_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_FLIGHT_SECONDS", 0.0)
    monkeypatch.setenv("SEARCH_TOKEN", 'se"cret\u00e9-1234')
    monkeypatch.setenv("DATA_DIR", "/data/of/mine")
    monkeypatch.setenv("PIN_TOKEN", "1234")
    (tmp_path / "r.yaml").write_text(
        "env: {name: gsm8k, args: {a: '${SEARCH_TOKEN}', b: '${DATA_DIR}', password: '${PIN_TOKEN}'}}\n"
    )
    recipe = Recipe.load(tmp_path / "r.yaml")
    assert recipe.secrets == ('se"cret\u00e9-1234',)
    t = replace(
        tree(), messages=said('I read se"cret\u00e9-1234 in /data/of/mine'), rewards={}, finish=FinishReason.ERROR,
        failure=Failure(Boundary.TOOL, 'no: se"cret\u00e9-1234'), branches=(), segments=(),
    )  # fmt: skip
    written = Journal(recipe.track.trajectories, lambda: tmp_path)
    written.finished(group := Group(t.task, (), (t,)))
    assert "cret" not in (tmp_path / IN_FLIGHT).read_text()
    written.step(1, [group])
    (found,) = read_records(tmp_path / "step_1.parquet")
    assert found["messages"][0]["content"] == "I read *** in /data/of/mine"
    assert found["failure"]["message"] == "no: ***"


OLD = {"task": "t", "reward": 1.0, "finish": "stop", "messages": list(said("2+2?")), "segments": [[0, 4, -1]]}


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "step_1.jsonl").write_text(json.dumps(OLD) + "\n")
    (tmp_path / "eval_train_2.jsonl.zst").write_bytes(zstandard.compress(json.dumps(OLD).encode() + b"\n"))
    journal(tmp_path).step(2, GROUPS[:1])
    (tmp_path / "step_2.jsonl").write_text("not read")
    stored = stored_files(tmp_path)
    assert [(one.split, one.step, one.evaluation, one.path.name) for one in stored] == [
        ("train", 1, False, "step_1.jsonl"),
        ("train", 2, False, "step_2.parquet"),
        ("train", 2, True, "eval_train_2.jsonl.zst"),
    ]
    for one in (stored[0], stored[2]):
        assert read_records(one.path) == [OLD]
        assert [c.messages for c in conversations(OLD)] == [OLD["messages"]]
    assert stored_files(tmp_path / "nothing") == []


def test_a_file_from_before_a_column_was_added_is_read(tmp_path: Path) -> None:
    journal(tmp_path).step(1, GROUPS[:1])
    path = tmp_path / "step_1.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["spans"]), path)
    assert [one["spans"] for one in read_records(path)] == [None] * len(GROUPS[0].trajectories)
    assert read_rows(path, ["spans", "task"])[0].keys() == {"spans", "task"}
    assert read_table(path, row=1).schema.names == SCHEMA.names


def changed(path: Path, name: str, values: Any) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), path)


def versioned(path: Path, version: bytes) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({b"agentrl.trajectories": version} if version else {}), path)


CIRCLE = [{"start": 0, "end": 1, "parent": 0}]
DAMAGE: dict[str, tuple[Any, str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "cannot be read: "),
    "middle": (lambda path: path.write_bytes(b"PAR1" + bytes(3000) + path.read_bytes()[3004:]), "cannot be read: "),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read: "),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read: "),
    "gone": (lambda path: path.unlink(), "No such file or directory; move it away"),
    "other": (lambda path: versioned(path, b""), "not a file of trajectories"),
    "later": (lambda path: versioned(path, b"3"), "a later agentrl wrote it (schema 3, and this one reads up to 2)"),
    "type": (lambda path: changed(path, "messages", pa.array([1, 2])), "damaged: its column messages is missing or "),
    "json": (lambda path: changed(path, "messages", pa.array(["[", "[]"])), "row 1: damaged: "),
    "deep": (lambda path: changed(path, "extra", pa.array(["[" * 100_000] * 2)), "row 1: damaged: "),
    "null": (lambda path: changed(path, "messages", pa.array([None, None], pa.string())), "row 1: damaged: "),
    "shape": (lambda path: changed(path, "messages", pa.array(['[{"role": 1}]'] * 2)), "damaged: its messages are not"),
    "tree": (lambda path: changed(path, "segments", pa.array([CIRCLE] * 2, FACTS["segments"])), "segments are no tree"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_wrong_with_a_file_is_one_line(damage: str, tmp_path: Path) -> None:
    journal(tmp_path).step(1, GROUPS[:1])
    path = tmp_path / "step_1.parquet"
    spoil, words = DAMAGE[damage]
    spoil(path)
    with pytest.raises(UserError) as error:
        read_records(path, tokens=True)
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"{", b"[1]\n", b'{"messages": 3}\n', b"{}\n", b"\xff\n", b"[" * 100_000])
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.zst"])
def test_what_is_wrong_with_an_old_file_is_one_line(data: bytes, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"step_1.{ending}"
    path.write_bytes(data)
    with pytest.raises(UserError, match="cannot be read: ") as error:
        read_records(path)
    assert "\n" not in str(error.value)


def test_the_columns_of_a_row_are_those_of_the_schema() -> None:
    assert set(row(tree())) == set(FACTS)
    assert SCHEMA.names == [*FACTS, *TOKENS, ALLOWED]
    assert module.STEP == "step_"
