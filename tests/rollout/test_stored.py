"""Stored rollouts come back as what they were, and damaged or foreign files are one line."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learner_help import make_groups

from agentrl.constraint import packed
from agentrl.errors import UserError
from agentrl.plugins.types import Message, Task
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.journal import Journal
from agentrl.rollout.stored import chosen_files, ranges, read_groups, training_files
from agentrl.rollout.trajectory_file import SCHEMA
from agentrl.trajectory import Boundary, Failure, FinishReason, Group, Segment, ToolUse, Trajectory, Turn

NUMBERS = st.floats(-1e6, 1e6)
TEXTS = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NOT_TRAINED = st.sampled_from(["", "", "marked"])
NAMES = st.sampled_from(["answer", "step", "brevity", "a part"])


@st.composite
def trajectories(draw: Any, failed: bool = False) -> Trajectory:
    """A valid sample, or one that failed; one conversation, or a tree with a turn in each segment."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    prompt, turns, end = draw(st.integers(1, 5)), [], 0
    segments: list[Segment] = []
    branches: list[tuple[Message, ...]] = []
    tree = draw(st.booleans())
    for index in range(draw(st.integers(1, 4))):
        first = prompt if index == 0 else draw(st.integers(0, 3))
        length = draw(st.integers(1, 4))
        start, begin = end + first, end
        end = start + length
        asked = draw(st.sampled_from([{}, {"temperature": 0.5, "reasoning": {"effort": "low"}}]))
        call = {"role": draw(st.sampled_from(["", "judge"])), "asked": asked, "untrained": draw(NOT_TRAINED)}
        turns.append(Turn(start, end, draw(NUMBERS), draw(st.booleans()), **call))
        segments.append(Segment(begin, end, draw(st.integers(-1, index - 1))))
        branches.append(({"role": "user", "content": draw(TEXTS)}, {"role": "assistant", "content": f"turn {index}"}))
    sampled, mask = np.zeros(end, bool), np.zeros(end, np.uint8)
    for turn in turns:
        sampled[turn.start : turn.end], mask[turn.start : turn.end] = True, turn.trained
    leaf = draw(st.integers(0, len(segments) - 1))
    said: list[Message] = []
    at = leaf
    while at >= 0:
        said[:0] = branches[at]
        at = segments[at].parent
    ids, allowed = rng.integers(0, 150_000, end).astype(np.int32), None
    if draw(st.booleans()):  # its last turn was constrained
        allowed = np.full(end, None, object)
        for place in range(turns[-1].start, end):
            bits = np.zeros(18_752, np.uint8)
            bits[ids[place] // 8] = 255
            allowed[place] = packed(bits)
    parts = {} if failed else draw(st.dictionaries(NAMES, NUMBERS, max_size=3))
    extra: dict[str, Any] = draw(st.sampled_from([{}, {"retried": ("tool: away",)}, {"gateway": {"calls": 3}}]))
    return Trajectory(
        request_id=draw(TEXTS),
        task=Task("", draw(st.dictionaries(TEXTS, JSON, max_size=3))),
        sample=draw(st.integers(0, 7)),
        ids=ids,
        allowed=allowed,
        loss_mask=mask,
        logprobs=np.where(sampled, -rng.exponential(size=end), 0).astype(np.float32),
        weight_version=np.where(sampled, rng.integers(0, 9, end), -1).astype(np.int32),
        prompt_length=prompt,
        turns=tuple(turns),
        messages=tuple(said if tree else [message for branch in branches for message in branch]),
        rewards=parts,
        finish=FinishReason.ERROR if failed else draw(st.sampled_from(list(FinishReason)[:6])),
        weights={name: draw(NUMBERS) for name in parts},
        tool_uses=tuple(
            ToolUse(draw(TEXTS), 0, 0.25, draw(st.none() | TEXTS), {"hits": draw(NUMBERS)}, draw(st.booleans()))
            for _ in range(draw(st.integers(0, 2)))
        ),
        failure=Failure(draw(st.sampled_from(list(Boundary))), draw(TEXTS)) if failed else None,
        seconds=dict.fromkeys(("total", "engine", "tools", "environment", "hooks"), 0.5),
        tools=tuple(draw(st.lists(TEXTS, max_size=2))),
        seats=draw(st.dictionaries(st.sampled_from(["judge", "critic"]), NUMBERS, max_size=2)),
        extra=extra,
        segments=tuple(segments) if tree else (),
        branches=tuple(branches) if tree else (),
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
        leaf=leaf if tree else -1,
    )


@st.composite
def groups(draw: Any) -> list[Group]:
    found = []
    for number in range(draw(st.integers(1, 3))):
        valid = draw(st.lists(trajectories(), min_size=0, max_size=2))
        lost = draw(st.lists(trajectories(failed=True), min_size=not valid, max_size=1))
        task = Task(f"task-{number}", (valid or lost)[0].task.data)
        own = [{name: getattr(t, name) for name in NAMES_OF} | {"task": task} for t in (*valid, *lost)]
        each = [Trajectory(**one) for one in own]
        found.append(Group(task, tuple(each[: len(valid)]), tuple(each[len(valid) :])))
    return found


NAMES_OF = [field.name for field in fields(Trajectory)]


def store(folder: Path, given: list[Group], step: int = 1) -> Path:
    Journal(TrajectoriesSection(), lambda: folder).step(step, given)
    return folder / f"step_{step}.parquet"


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(groups())
def test_what_is_read_is_what_was(tmp_path_factory: pytest.TempPathFactory, given: list[Group]) -> None:
    found = read_groups(store(tmp_path_factory.mktemp("stored"), given))
    for ours, theirs in zip(found, given, strict=True):
        assert ours.task == theirs.task
        for one, other in zip((*ours.trajectories, *ours.failed), (*theirs.trajectories, *theirs.failed), strict=True):
            for name in set(NAMES_OF) - {"leaf"}:
                mine, its = getattr(one, name), getattr(other, name)
                if isinstance(its, np.ndarray):
                    assert mine.dtype == its.dtype
                    whole = its.dtype == object  # whose bytes are addresses
                    assert mine.tolist() == its.tolist() if whole else mine.tobytes() == its.tobytes()
                else:
                    assert mine == its, name
            said = [message for index in _path(one) for message in one.branches[index]] if one.segments else []
            assert not one.segments or said == list(other.messages)  # of equal conversations any may be the one


def _path(t: Trajectory) -> list[int]:
    path, at = [], t.leaf % len(t.segments)
    while at >= 0:
        path.append(at)
        at = t.segments[at].parent
    return path[::-1]


def test_weights_of_parts_that_a_sample_lacks_are_the_recipe_s(tmp_path: Path) -> None:
    (group, *_) = read_groups(store(tmp_path, make_groups([[1, 0]])), {"step": 3.0, "answer": 9.0})
    assert group.trajectories[0].weights == {"step": 3.0, "answer": 1.0}


def _with(path: Path, name: str, values: Any) -> None:
    table = pq.read_table(path)
    column = pa.array([values] * len(table), SCHEMA.field(name).type)
    pq.write_table(table.set_column(table.column_names.index(name), SCHEMA.field(name), column), path)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("ids", None, "its column ids has nulls"),
        ("ids", [1], "row 1: damaged: r0: lengths of ids"),
        ("loss_mask", [None], "its column loss_mask has nulls"),
        ("finish", "nirvana", "row 1: damaged: 'nirvana' is not a valid FinishReason"),
        ("task_data", "[1]", "row 1: damaged: its task data or extra is no object"),
        ("task_data", "{", "row 1: damaged: Expecting property name"),
        ("messages", '["hello"]', "row 1: damaged: its messages are not a list"),
        ("messages", "[" * 100_000, "row 1: damaged: "),
        ("sample", None, "row 1: damaged: its column sample is null"),
        ("turns", [None], "row 1: damaged: "),
        ("segments", [{"start": 0, "end": 4, "parent": 7}], "row 1: damaged: "),
        ("group", None, "row 1: damaged: its column group is null"),
    ],
)
def test_what_is_wrong_with_a_row_is_one_line(name: str, values: Any, why: str, tmp_path: Path) -> None:
    path = store(tmp_path, make_groups([[1, 0]]))
    _with(path, name, values)
    with pytest.raises(UserError) as caught:
        read_groups(path)
    assert str(caught.value).startswith(str(path))
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_which_files_are_trained_on(tmp_path: Path) -> None:
    own = tmp_path / "run" / "trajectories"
    own.mkdir(parents=True)
    for step in (1, 2, 10):
        store(own, make_groups([[1, 0]]), step)
    Journal(TrajectoriesSection(), lambda: own).evaluation("test", 0, make_groups([[1, 0]]), lambda t: True)
    run = str(tmp_path / "run")
    assert [path.name for path in training_files([run])] == [f"step_{n}.parquet" for n in (1, 2, 10)]
    named = [str(own / "step_10.parquet"), str(own / "eval_test_0.parquet"), run]
    assert [path.name for path in training_files(named)][:3] == [
        "step_10.parquet",
        "eval_test_0.parquet",
        "step_1.parquet",
    ]
    assert len(chosen_files(tmp_path / "run")) == 4
    assert [one.path.name for one in chosen_files(tmp_path / "run", 10, "train")] == ["step_10.parquet"]
    assert ranges([1, 2, 3, 7]) == "1-3, 7"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "nothing: there is no such file or folder"),
        ("nothing.parquet", "nothing.parquet: there is no such file"),
        ("empty", "empty: not a folder with stored rollouts (trajectories/ is missing)"),
        ("old", "old: an older version wrote its rollouts, as JSON lines without tokens"),
        ("old/trajectories/step_1.jsonl", "step_1.jsonl: JSON lines hold no tokens"),
        ("bare", "bare: no whole step or evaluation is stored there"),
        ("evaluated", "evaluated: holds evaluations only; name their files to train on them"),
    ],
)
def test_what_cannot_be_trained_on_is_one_line(name: str, why: str, tmp_path: Path) -> None:
    for folder in ("empty", "old/trajectories", "bare/trajectories", "evaluated/trajectories"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "old" / "trajectories" / "step_1.jsonl").write_text("{}\n")
    evaluated = tmp_path / "evaluated" / "trajectories"
    Journal(TrajectoriesSection(), lambda: evaluated).evaluation("test", 0, make_groups([[1, 0]]), lambda t: True)
    with pytest.raises(UserError, match=f"{why}$".replace("(", r"\(").replace(")", r"\)")):
        training_files([str(tmp_path / name)])
