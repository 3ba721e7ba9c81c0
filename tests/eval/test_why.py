"""Why samples are unsolved: signs of samples, which of them are causes, and `agentrl why`."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from why_help import TEXT, answer, call, result, sample, stored, user

from agentrl.chat.calls import UNREADABLE
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.eval.scan import keep
from agentrl.eval.signs import miscopied, repeated, said, unsure
from agentrl.eval.why import Diagnosis, diagnose, fisher, reasons
from agentrl.trajectory import Boundary, Failure, FinishReason, Segment, ToolUse, Trajectory

SUM, WRITTEN = call({"expression": "22/15"}), ['<call>{"x": "', "22", "/", '15"}', "<end>"]
ASKED = user("225 stamps, 15 a jar, 1,260.50 dollars in src/stamps.py")


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([call({"expression": "225/15"})], {}),
        ([call({"expression": "22/15"})], {"miscopied: number in a call of calculator": '225 -> 22 in "22/15"'}),
        ([call({"a": [{"b": 1260.5}], "c": True, "d": None})], {}),
        ([call("0225 * 1260.5")], {}),
        ([call("7*15")], {"made up: number in a call of calculator": '7 in "7*15"'}),
        ([call("15", "nothing")], {}),
        ([call("16", "nothing")], {"miscopied: number in a call of an unknown tool": '15 -> 16 in "16"'}),
        ([call("15*15"), result("225.0"), answer("15, so 225")], {}),
        ([call("15*15"), answer("99, and 777")], {"made up: number in the answer": '777 in "99, and 777"'}),
        ([call({"path": "src/stamps.py"})], {}),
        (
            [call({"path": "src/stanps.py"})],
            {"miscopied: word in a call of calculator": 'src/stamps.py -> src/stanps.py in "src/stanps.py"'},
        ),
        ([call({"query": "history of philately"})], {}),
        ([call("9" * 1000), answer("9" * 1000)], {}),
    ],
)
def test_what_is_copied_is_held_to_what_was_read(messages: list[Any], found: dict[str, str]) -> None:
    signs = list(miscopied([said(message) for message in (ASKED, *messages)], ["calculator"]))
    assert {f"{kind}: {value}": note for (kind, value), note in signs if not value.endswith("anywhere")} == found


def test_a_call_made_twice_is_a_sign() -> None:
    messages = [said(one) for one in (call("1+1"), result("2"), call("1+2"), call("1+1"), answer("2"))]
    assert list(repeated(messages)) == [(("calls", "the same call again"), 'calculator("1+1")')]


@pytest.mark.parametrize(
    ("message", "pieces", "at", "last", "place"),
    [
        (SUM, WRITTEN, 1, False, "a number in the arguments of calculator"),
        (SUM, WRITTEN, 2, False, "the arguments of calculator"),
        (SUM, WRITTEN, 0, False, "how a call is written"),
        (call({"c": 'a = "b"\nc'}), ['{"', "a =", ' \\"b', '\\"\\n', 'c"}'], 3, False, "the arguments of calculator"),
        (call("x", "made up"), ["say", " x"], 1, False, "the arguments of an unknown tool"),
        (answer("It is 4."), ["It", " is", " 4", ".", "<end>"], 2, True, "a number in the answer"),
        (answer("It is 4."), ["It", " is", " 4", ".", "<end>"], 1, True, "the answer"),
        (answer("It is 4."), ["It", " is", " 4", ".", " "], 4, True, "the end of a turn"),
        (answer("Go on"), ["Go", " on"], 1, False, "a turn without a call"),
        ({**answer("So."), "reasoning_content": "I think"}, ["I", " think", "So."], 1, True, "reasoning"),
    ],
)  # fmt: skip
def test_a_token_is_named_by_its_place(message: Any, pieces: list[str], at: int, last: bool, place: str) -> None:
    assert unsure(pieces, at, said(message), last=last, tools=["calculator"]) == ("unsure", place)


def test_fishers_test_is_that_of_the_tea() -> None:
    assert fisher(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert fisher(0, 4, 1, 4) == pytest.approx(1)
    assert fisher(4, 4, 0, 4) == pytest.approx(1 / 70)


def untold(number: int) -> Trajectory:
    """A sample that called no tool and is unsolved."""
    return replace(sample(number, True), tool_uses=(), messages=(user("225 by 15"), answer("Nothing.")))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose unsolved samples at first called no tool, and copy numbers wrongly in the end, most at level 0."""
    stored(tmp_path, 0, [untold(n) if n % 2 else sample(n, False) for n in range(60)])
    lost = sample(60, True, rewards={}, finish=FinishReason.ERROR, failure=Failure(Boundary.TOOL, "away"))
    stored(tmp_path, 5, [*(sample(n, n % 3 == 0) for n in range(60)), lost])
    return tmp_path


def told(found: Diagnosis) -> dict[str, tuple[int, float, float, float | None]]:
    return {f"{c.kind}: {c.value}": (c.unsolved, c.share, c.solved, c.before) for c in found.causes}


def test_causes_are_what_unsolved_samples_have_more_often(run: Path) -> None:
    files = [run / "trajectories" / f"eval_test_{step}.parquet" for step in (5, 0)]
    found = diagnose(*files, piece=lambda token: TEXT[token])
    assert (found.samples, found.unsolved, found.lost, found.first_unsolved) == (60, 20, 1, 30)
    assert told(found) == {
        "field: level = 0": (20, 1.0, 0.0, 1 / 3),
        "miscopied: number anywhere": (20, 1.0, 0.0, 0.0),
        "miscopied: number in a call of calculator": (20, 1.0, 0.0, 0.0),
        "unsure: a number in the arguments of calculator": (20, 1.0, 0.0, 0.0),
    }
    cause = next(c for c in found.causes if c.kind == "miscopied")
    assert (cause.lift, cause.tasks) == (None, 20)
    assert cause.chance < 1e-9
    assert cause.examples[1] == ("eval_test_5.parquet", "t3", 0, '225 -> 22 in "22/15"')
    assert [(c.kind, c.value, c.unsolved_before, c.unsolved) for c in found.gone] == [
        ("calls", "no tool was called", 30, 0)
    ]
    assert found.unexplained == 0
    again = json.loads(json.dumps(found.json()))
    assert again["causes"][0]["examples"][0]["task"] == "t0"


def test_what_the_machinery_said_is_grouped_without_its_numbers(tmp_path: Path) -> None:
    def wrong(number: int) -> Trajectory:
        use = ToolUse("calculator", 0, 0.1, f"cannot read '{number}+': at {number}", cut=True)
        return sample(number, True, tool_uses=(use,), finish=FinishReason.LENGTH, messages=(user("1"), answer("1")))

    found = diagnose(stored(tmp_path, 1, [wrong(n) if n % 2 else sample(n, False) for n in range(40)]))
    assert set(told(found)) == {
        "tool error: calculator: cannot read …: at …",
        "finish: length",
        "calls: the answer of calculator was shortened",
    }
    assert [c.examples[0].note for c in found.causes if c.kind == "tool error"] == ["cannot read '1+': at 1"]
    assert (found.first_file, found.causes[0].before) == (None, None)
    assert found.notes


@pytest.mark.parametrize("each", [1, 8])
def test_chance_makes_no_cause(tmp_path: Path, each: int) -> None:
    """Failures drawn by lot, all samples of a task alike: what one task has is not found often by its samples."""
    lots = random.Random(each)
    samples = []
    for number in range(48):
        wrong, known = lots.random() < 0.5, lots.random() < 0.5
        messages = (user("225 by 15"), call({"expression": "225/15"}), *([call("225/15")] if known else []))
        samples += [
            sample(number, False, index, rewards={"answer": float(not wrong)}, messages=messages)
            for index in range(each)
        ]
    assert diagnose(stored(tmp_path, 1, samples)).causes == ()


def lines(folder: Path, samples: list[dict[str, Any]], split: str = "test", step: int = 1) -> Path:
    """The file of an evaluation of these samples as JSON lines, of which each says what it has that others do not."""
    use = {"name": "calculator", "error": None, "cut": False}
    usual = {
        "sample": 0, "data": {}, "finish": "stop", "messages": [user("225 by 15"), answer("15")],
        "tools": ["calculator"], "tool_uses": [use],
    }  # fmt: skip
    path = folder / "trajectories" / f"eval_{split}_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    told = [usual | {"task": f"t{n}", "reward": float(one["solved"])} | one for n, one in enumerate(samples)]
    path.write_text("\n".join(map(json.dumps, told)))
    return path


def noise(lots: random.Random, tasks: int, each: int) -> list[dict[str, Any]]:
    """Samples whose outcomes have nothing to do with what else they have; those of a task are alike in both."""
    found = []
    for task in range(tasks):
        data = {
            "kind": lots.choice("abc"), "size": lots.randrange(50), "level": lots.randrange(4),
            "tags": lots.sample("pqrs", 2),
        }  # fmt: skip
        hard, odd = lots.random(), [lots.random() for _ in range(6)]
        for index in range(each):
            again, wrong, refuses, error, cut, long = (lots.random() < one for one in odd)
            called = call({"expression": "22/15" if wrong else "225/15"})
            said = answer("I cannot help with that." if refuses else "15")
            use = {"name": "calculator", "error": "cannot read it" if error else None, "cut": cut}
            found.append({
                "task": f"t{task}", "sample": index, "data": data, "solved": lots.random() >= hard,
                "finish": "length" if long else "stop", "tool_uses": [use | {"seconds": lots.expovariate(1.0)}],
                "messages": [user("225 by 15"), called, *([called] if again else []), said],
            })  # fmt: skip
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("each", "runs"), [(1, 80), (4, 40)])
def test_of_twenty_runs_of_noise_one_has_a_cause_at_most(tmp_path: Path, each: int, runs: int) -> None:
    lots = random.Random(each)
    found = [diagnose(lines(tmp_path, noise(lots, 80, each))).causes for _ in range(runs)]
    assert sum(map(bool, found)) <= 0.05 * runs


def test_what_one_command_prints_shares_the_chance_of_a_false_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five of 20 unsolved samples and no solved one of 20 are cut off, by chance in 2.4 % of runs."""
    weak = [{"solved": n >= 20, "finish": "length" if n < 5 else "stop"} for n in range(40)]
    path = lines(tmp_path, weak)
    assert list(told(diagnose(path))) == ["finish: length"]
    assert diagnose(path, lines(tmp_path, weak, step=0)).causes == ()
    assert main.run(["why", str(tmp_path), "--step", "0"]) == 0
    assert "finish: length" in capsys.readouterr().out
    lines(tmp_path, weak, "other", step=0)
    assert main.run(["why", str(tmp_path), "--step", "0"]) == 0
    assert "finish: length" not in capsys.readouterr().out


def test_rare_errors_hide_no_frequent_one(tmp_path: Path) -> None:
    """Each of 200 errors of one sample could be no cause however it had ended, and takes no part of the chance."""
    errors = [f"no {chr(97 + n % 26)}{chr(97 + n // 26)} there" for n in range(200)]
    samples = []
    for n, error in enumerate(errors):
        use = {"name": "calculator", "error": "too large" if n in range(1, 18, 2) else error, "cut": False}
        samples.append({"solved": n % 2 == 0, "tool_uses": [use]})
    assert list(told(diagnose(lines(tmp_path, samples)))) == ["tool error: calculator: too large"]


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (lambda n, wrong: {"world": {"kind": "trip" if wrong else "home", "size": 3}}, "world.kind = trip"),
        (lambda n, wrong: {"tags": ["a", "b" if wrong else "c"]}, "tags[] has b"),
        (lambda n, wrong: {"steps": [{"op": "add"}, {"op": "mul" if wrong else "add"}]}, "steps[].op has mul"),
        (lambda n, wrong: {"rooms": list(range(2 + wrong))}, "number of rooms = 3"),
        (lambda n, wrong: {"size": n + 20 * wrong}, "size from 19.5 to 39"),
        (lambda n, wrong: {"size": 10 + n if wrong else n + 20 * (n >= 10)}, "size from 9.75 to 29.25"),
        (lambda n, wrong: {"story": f"{n:02}" + "x" * (n + 100 * wrong)}, "story from 61.5 to 121 characters"),
    ],
)  # fmt: skip
def test_fields_lists_and_ranges_are_compared(tmp_path: Path, data: Any, cause: str) -> None:
    """Of 20 unsolved samples and 20 solved ones, each by its number among these."""
    samples = [{"solved": n >= 20, "data": data(n % 20, n < 20)} for n in range(40)]
    found = diagnose(lines(tmp_path, samples))
    assert (found.causes[0].kind, found.causes[0].value, found.causes[0].share) == ("field", cause, 1.0)
    assert all("long texts" not in note for note in found.notes) == ("story" not in samples[0]["data"])


def test_a_call_that_takes_far_longer_than_others_is_slow(tmp_path: Path) -> None:
    seconds = [3.0] * 9 + [1.0] * 6 + [0.1] * 25
    samples = [
        {"solved": n >= 20, "tool_uses": [{"name": "calculator", "error": None, "cut": False, "seconds": took}]}
        for n, took in enumerate(seconds)
    ]
    (cause,) = diagnose(lines(tmp_path, samples)).causes
    assert (cause.kind, cause.value, cause.unsolved) == ("slow", "a call of calculator over 1 s", 9)
    assert cause.examples[0].note == "3 s"


def test_kinds_that_cannot_be_causes_are_named(tmp_path: Path) -> None:
    """Kinds of one family share its chance, so what few samples cannot tell of one they cannot tell of the others."""
    refuses = [user("225 by 15"), answer("I cannot help with that.")]
    path = lines(tmp_path, [{"solved": n >= 4} | ({"messages": refuses} if n < 4 else {}) for n in range(8)])
    assert list(told(diagnose(path))) == ["says: refusal"]
    columns = {f"own_{k}": ["found" if n < 4 else None for n in range(8)] for k in range(4)}
    keep(path, [f"t{n}#0" for n in range(8)], columns)
    found = diagnose(path)
    assert found.causes == ()
    assert found.notes[-1] == (
        "4 unsolved and 4 solved samples are too few for a cause of the kinds says, scan: whatever they had in common "
        "could be chance"
    )


@pytest.mark.parametrize(("split", "name"), [("test", "calls_cut"), ("train", "calls_unreadable")])
def test_the_page_is_told_of_calls_that_the_turn_limit_cut(tmp_path: Path, split: str, name: str) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "model: {path: tiny}\nenv: {name: gsm8k}\neval: {rollout: {max_turn_tokens: 6}}\n"
    )
    cut = ToolUse("", 0, 0.1, f"model: {UNREADABLE}")
    path = stored(tmp_path, 1, [sample(n, True, tool_uses=(cut,)) for n in range(8)], split)
    (fault,) = reasons(path, None, None)["faults"]
    assert fault["name"] == name


def test_where_none_was_solved_what_many_did_is_listed(tmp_path: Path) -> None:
    def astray(number: int) -> Trajectory:
        uses = (ToolUse("search", 0, 0.1, "there is no tool named 'search'"),) if number % 2 else ()
        return sample(number, True, tool_uses=uses, rewards={"answer": 0.0})

    found = diagnose(stored(tmp_path, 1, [astray(n) for n in range(8)], split="train"))
    assert (found.unsolved, found.samples) == (8, 8)
    assert told(found)["tool error: an unknown tool: there is no tool named …"] == (4, 0.5, 0.0, None)
    assert not any(cause.kind in ("field", "miscopied") for cause in found.causes)


def test_unsolved_samples_of_a_training_step_earned_less_than_the_mean(tmp_path: Path) -> None:
    path = stored(tmp_path, 3, [sample(n, (n + i) % 2 == 0, i) for n in range(20) for i in range(4)], split="train")
    found = diagnose(path)
    assert (found.below, found.unsolved, found.samples) == (0.5, 40, 80)
    assert "miscopied: number in a call of calculator" in told(found)


def test_a_trees_turns_are_read_in_their_segments(tmp_path: Path) -> None:
    def tree(number: int) -> Trajectory:
        one = sample(number, True)
        branches = (one.messages[:2], (user("again"), answer("14!")))
        return replace(one, segments=(Segment(0, 7), Segment(7, 11)), branches=branches)

    path = stored(tmp_path, 3, [tree(n) if n % 2 else sample(n, False) for n in range(40)])
    found = told(diagnose(path, piece=lambda token: TEXT[token]))
    assert "unsure: a number in the arguments of calculator" in found
    assert "miscopied: number in a call of calculator" in found


def test_lines_of_older_versions_are_read(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "trajectories" / "eval_old_1.jsonl"
    lines = []
    for number in range(40):
        t = sample(number, number % 2 == 0)
        lines.append({
            "task": t.task.id, "sample": 0, "data": dict(t.task.data), "reward": t.reward, "solved": t.reward > 0,
            "finish": "stop", "messages": list(t.messages), "tools": ["calculator"],
            "tool_uses": [{"name": "calculator", "error": None, "cut": False}],
        })  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    found = diagnose(path)
    assert found.causes[0].kind == "miscopied"
    assert found.notes


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("column", ["messages", "task_data", "branches"])
@pytest.mark.parametrize("damage", ["{", "[1]", "[[[[", "true"])
def test_a_damaged_sample_is_one_line(run: Path, column: str, damage: str) -> None:
    path = run / "trajectories" / "eval_test_5.parquet"
    table = pq.read_table(path)
    texts = pa.array([damage] * len(table), pa.string())
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, texts), path)
    with pytest.raises(UserError, match=r"eval_test_5.parquet, sample 1: damaged: .*; move the file away"):
        diagnose(path, piece=lambda token: TEXT[token])


def test_what_is_no_message_says_nothing() -> None:
    wild = said({"role": "assistant", "content": {}, "tool_calls": [1, {"function": 2}, {"function": {"name": 3}}]})
    assert (wild.text, wild.calls) == ("", [("3", [])])


def test_a_run_whose_samples_all_failed_says_whose_errors_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = [
        sample(n, True, rewards={}, finish=FinishReason.ERROR, failure=Failure(Boundary.TOOL, f"away{n // 3}"))
        for n in range(4)
    ]
    stored(tmp_path, 2, lost)
    assert main.run(["why", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "test, after step 2: all 4 samples failed by errors that are not the model's"
    assert "  3 failed: tool: away0" in said
    assert f"agentrl show {tmp_path} --split test --step 2 --failed" in said


def test_calls_are_counted_where_no_sample_is_solved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    astray = ToolUse("abacus", 0, 0.1, "model: there is no tool named 'abacus'")
    stored(tmp_path, 2, [replace(sample(n, True), tool_uses=(astray,)) for n in range(8)])
    (fault,) = diagnose(tmp_path / "trajectories" / "eval_test_2.parquet").faults
    assert fault.line == "8 of 8 calls name tools that do not exist: abacus (8); the tasks offer calculator"
    assert main.run(["why", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"{fault.line}. Likely cause: this model has not learned to call" in said
    assert "no sample is solved, so there is none to compare with" in said
    assert main.run(["why", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["faults"][0]["name"] == "tools_unknown"


def test_why_is_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "recipe.yaml").write_text("model: {path: tiny}\nenv: {name: gsm8k}\n")
    stored(run, 5, [sample(n, n == 0) for n in range(3)], split="hard")
    assert main.run(["why", str(run)]) == 0
    said = capsys.readouterr().out
    assert "test, after step 5: 20 of 60 samples are unsolved; after step 0: 30 of 60; 1 more failed" in said
    assert 't3: 225 -> 22 in "22/15"' in said
    assert "no tool was called (30 -> 0 samples)" in said
    assert f"agentrl show {run} --split test --step 5 --task t0" in said.replace("\n", "")
    assert "hard, after step 5: 1 of 3" in said
    assert "1 of the 1 have nothing more often" in said
    assert main.run(["why", str(run), "--split", "test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["causes"][0]["value"] == "level = 0"
    for words, line in (
        (["--split", "tset"], "did you mean 'test'?"),
        (["--step", "3"], "try one of 0, 5"),
        (["--split", "train"], "nothing of train is stored"),
    ):
        assert main.run(["why", str(run), *words]) == 2
        assert line in capsys.readouterr().err
    assert main.run(["why", str(run / "nothing")]) == 2


@pytest.mark.parametrize(
    ("unsolved", "solved", "causes"),
    [
        (
            [["added", "/home/user/total", 3], ["deleted", "/home/user/bills", 0]], [["modified", "/n", 1]],
            {"added /home/user/total": "3 bytes", "deleted /home/user/bills": ""},
        ),
        ([], [["added", "/home/user/total", 3]], {"none changed": ""}),
    ],
)  # fmt: skip
def test_what_unsolved_samples_changed_in_their_workspaces_is_a_cause(
    unsolved: list[Any], solved: list[Any], causes: dict[str, str], tmp_path: Path
) -> None:
    def changing(number: int) -> Trajectory:
        kept = {"changes": solved if number % 2 else unsolved, "more": False, "diff": ""}
        return sample(number, number % 2 == 0, extra={"workspace": kept})

    found = diagnose(stored(tmp_path, 1, [changing(number) for number in range(40)]))
    assert {c.value: c.examples[0].note for c in found.causes if c.kind == "files"} == causes
