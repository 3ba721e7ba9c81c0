"""Health of a run: each condition by rows that raise it and rows that do not, each said once."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from rich.console import Console
from train_help import metrics, small

import agentrl
from agentrl.learner.history import History
from agentrl.learner.monitors import CONDITIONS, RANGES, Finding, Health
from agentrl.recipe.schema import Recipe
from agentrl.training.display import Display

FLAT = {
    "groups/varied": 0, "groups/equal": 2, "groups/few": 0, "train/samples": 0, "rollout/trajectories": 8,
    "rollout/failed": 0, "stop/length": 0, "stop/max_turns": 0, "stop/timeout": 0, "reward/mean": 0.0,
}  # fmt: skip
WELL = FLAT | {
    "groups/varied": 2, "groups/equal": 0, "train/samples": 8, "reward/mean": 0.5, "train/entropy": 0.4,
    "train/grad_norm": 0.3, "train/updates_not_finite": 0, "mismatch/logprob_mean": 1e-3, "mismatch/logprob_max": 0.3,
    "mismatch/ess": 0.99, "tool/calculator/calls": 16, "tool/calculator/errors": 1, "tool/calculator/seconds": 0.01,
    "tool/unknown/calls": 4, "tool/unknown/errors": 4, "rollout/staleness_mean": 1.0, "reward/answer": 0.4,
    "reward/brevity": 0.1, "time/rollout_s": 5.0, "time/step_s": 6.0, "time/sample_engine_s": 4.0,
    "time/sample_tools_s": 0.1, "time/sample_environment_s": 0.1, "time/sample_hooks_s": 0.1,
}  # fmt: skip
GAMED = {"reward/brevity": 0.6, "reward/answer": 0.2}
FAILING = {"rollout/failed": 2, "rollout/failed/tool": 1.5, "rollout/failed/reward": 0.5}
ASTRAY = {
    "tool/unknown/calls": 128, "calls/unknown": 128, "tool/calculator/calls": 0, "tool/unknown/names": "calc (128)"
}  # fmt: skip
SILENT = {"tool/calculator/calls": 0, "tool/unknown/calls": 0, "reward/mean": 0.0}
DEAD = {
    "reward/mean": 0.0, "stop/length": 8, "groups/varied": 0, "groups/equal": 2, "train/samples": 0,
    "calls/cut": 20, "rollout/response_tokens_mean": 300.0,
}  # fmt: skip
UPDATED = {"train/lr": 0.05, "train/updates": 1, "rollout/response_tokens_mean": 40.0}
MILD = UPDATED | {"train/clip_fraction": 0.25, "train/lr": 1e-3}
STEPS = 40

Changes = dict[str, Any]
Rows = list[dict[str, Any]]


def found(rows: Iterable[Mapping[str, Any]], recipe: Recipe | None = None) -> list[tuple[int, Finding]]:
    """What the rows raise, with the step."""
    health = Health(recipe or small())
    return [(row["step"], finding) for row in rows for finding in health.step(row)]


def well(changes: Mapping[str, Any] | None = None, *, of: range = range(STEPS // 2, STEPS)) -> Rows:
    """The rows of a run that is well, with a little noise, but for `changes` in the steps `of`: values, or functions of
    the step."""
    rows = []
    for step in range(1, STEPS + 1):
        row = WELL | {"step": step}
        if step - 1 in of:
            row |= {key: value(step) if callable(value) else value for key, value in (changes or {}).items()}
        noise = 1 + 0.02 * (step * 7 % 5 - 2)
        rows.append({
            key: value * noise if isinstance(value, float) and key.startswith(("reward", "train/e")) else value
            for key, value in row.items()
        })  # fmt: skip
    return rows


def test_a_run_that_is_well_raises_nothing() -> None:
    assert found(well()) == []


def once(step: int) -> range:
    return range(step - 1, step)


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize(
    ("name", "changes", "of", "step", "words"),
    [
        ("cut_by_length", {"stop/length": 3}, range(10, 40), 13, r"steps 11 to 13: 38% .*max_turn_tokens is 48"),
        ("cut_by_length", {"stop/length": 3}, range(10, 12), None, ""),
        ("cut_by_length", {"stop/length": 1}, range(40), None, ""),
        ("cut_by_time", {"stop/timeout": 4}, range(10, 40), 13, r"50% of the samples ran out of time"),
        ("cut_by_time", {"stop/timeout": 1}, range(40), None, ""),
        ("answers_unreceived", {"gateway/calls": 8, "gateway/unreceived": 4}, range(10, 40), 13, r"received 50% of"),
        ("answers_unreceived", {"gateway/calls": 8, "gateway/unreceived": 1}, range(40), None, ""),
        ("tools_unknown", ASTRAY, range(40), 1, r"step 1: 128 of 128 calls name tools that do not exist: calc \(128\); "
         r"the tasks offer calculator\. .*start: demonstrations"),
        ("tools_unknown", ASTRAY | {"calls/unknown": 15, "tool/unknown/calls": 15, "tool/calculator/calls": 17},
         range(40), None, ""),
        ("tools_unknown", ASTRAY | {"calls/unknown": 7, "tool/unknown/calls": 7}, range(40), None, ""),
        ("calls_unreadable", {"calls/unreadable": 12}, range(40), 1,
         r"step 1: 12 of 20 calls cannot be read\. .*--unsolved"),
        ("calls_unreadable", {"calls/unreadable": 9}, range(40), None, ""),
        ("calls_cut", {"calls/cut": 12}, range(40), 1, r"step 1: 12 of 20 calls were cut off by "
         r"rollout\.max_turn_tokens, which is 48\. .*rollout\.max_turn_tokens=96"),
        ("calls_cut", {"calls/cut": 9}, range(40), None, ""),
        ("tools_not_called", SILENT, range(40), 3,
         r"24 of 24 samples of 3 steps called none of the tools that their tasks offer \(calculator\)"),
        ("tools_not_called", {"tool/calculator/calls": 0}, range(40), 10, r"80 of 80 samples of 10 steps called none"),
        ("tools_not_called", {"tool/calculator/calls": 0}, range(20, 40), 30, r"hardly calls calculator any more"),
        ("tools_not_called", {"tool/calculator/calls": 8}, range(20, 40), None, ""),
        ("tools_not_called", {"tool/calculator/calls": 0}, range(9), None, ""),
        ("entropy_collapse", {"train/entropy": 0.01}, range(20, 40), 30, r"0\.4 -> 0\.01 nats, reward 0\.5 -> 0\.5"),
        ("entropy_collapse", {"train/entropy": 0.01, "reward/mean": 0.9}, range(20, 40), None, ""),
        ("entropy_collapse", {"train/entropy": 0.05}, range(20, 40), None, ""),
        ("mismatch", {"mismatch/ess": 0.4}, range(20, 40), 21, r"step 21: .*effective sample size 40%. Likely"),
        ("mismatch", {"mismatch/logprob_mean": 0.2}, once(5), 5, r"0\.200 nats"),
        ("mismatch_growing", {"mismatch/logprob_mean": 0.03}, range(20, 40), 24, r"drift apart: 0\.001 -> "),
        ("mismatch_growing", {"mismatch/logprob_mean": 0.005}, range(20, 40), None, ""),
        ("gradient_spike", {"train/grad_norm": 30.0}, once(20), 20, r"is 30, 100 times what it was \(0\.3\)"),
        ("gradient_spike", {"train/grad_norm": 0.9}, once(20), None, ""),
        ("gradient_spike", {"train/grad_norm": 30.0}, once(2), None, ""),
        ("update_discarded", {"train/updates_not_finite": 2}, once(7), 7, r"of 2 updates was not finite"),
        ("part_gamed", GAMED, range(15, 40), 23, r"'brevity' rose \(0\.1 -> .*'answer' fell \(0\.4"),
        ("part_gamed", {"reward/brevity": 0.6}, range(15, 40), None, ""),
        ("part_gamed", {"reward/brevity": 0.6, "reward/answer": 0.38}, range(15, 40), None, ""),
        ("stale", {"rollout/staleness_mean": 3.5}, range(5, 40), 8, r"3\.5 updates old"),
        ("stale", {"rollout/staleness_mean": 2.0}, range(40), None, ""),
        ("samples_failed", FAILING, range(5, 40), 8, r"20% of .*most by tool"),
        ("samples_failed", {"rollout/failed": 2}, once(5), None, ""),
        ("tool_fails", {"tool/calculator/errors": 12}, range(10, 40), 20, r"75% of the calls of calculator"),
        ("tool_fails", {"tool/calculator/errors": lambda step: 16 - step // 3}, range(40), None, ""),
        ("tool_fails", {"tool/calculator/errors": 6}, range(40), None, ""),
        ("tool_slow", {"tool/calculator/seconds": 20.0}, range(3, 40), 6, r"takes 20 s \(rollout.tool_timeout"),
        ("tool_slow", {"tool/calculator/seconds": 2.0}, range(25, 40), 28, r"takes 2 s, 0\.01 s in the beginning"),
        ("tool_slow", {"tool/calculator/seconds": 2.0}, range(40), None, ""),
        ("environment_slow", {"time/sample_environment_s": 6.0}, range(5, 40), 8, r"spend 6\.1 s.*rollout.overlap"),
        ("environment_slow", {"time/sample_environment_s": 6.0, "time/step_s": 20.0}, range(40), None, ""),
    ],
)  # fmt: skip
def test_a_condition_is_raised_by_its_rows_alone_and_once(
    name: str, changes: Changes, of: range, step: int | None, words: str
) -> None:
    raised = found(well(changes, of=of))
    assert [(at, one.name) for at, one in raised] == ([] if step is None else [(step, name)])
    assert step is None or re.search(words, raised[0][1].line)


def evaluated(rows: Rows, measured: Mapping[int, tuple[float, float, float]]) -> Rows:
    for step, (value, low, high) in measured.items():
        key = "eval/test/accuracy"
        rows[step] |= {key: value, f"{key}_low": low, f"{key}_high": high}
    return rows


@pytest.mark.parametrize(
    ("later", "reward", "between", "raised"),
    [
        ((0.3, 0.2, 0.4), 0.8, range(0), True),
        ((0.5, 0.4, 0.62), 0.8, range(0), False),
        ((0.3, 0.2, 0.4), 0.3, range(0), False),
        ((0.3, 0.2, 0.4), 0.8, range(21, 40), True),
        ((0.47, 0.38, 0.56), 0.8, range(0), True),
        ((0.47, 0.38, 0.56), 0.8, range(21, 40), False),
    ],
)
def test_accuracy_that_falls_while_the_reward_rises_is_said(
    later: tuple[float, float, float], reward: float, between: range, raised: bool
) -> None:
    """The best of many evaluations is high by chance."""
    rows = [{"step": 0}, *well({"reward/mean": reward})]
    measured = dict.fromkeys(between, (0.6, 0.5, 0.7))
    rows = evaluated(rows, {0: (0.4, 0.3, 0.5), 20: (0.7, 0.6, 0.8)} | measured | {40: later})
    lines = [(step, one.line) for step, one in found(rows) if one.name == "accuracy_falls"]
    assert [step for step, _ in lines] == ([40] if raised else [])
    assert not raised or re.search(
        r"reward rose .* accuracy on test fell \(70.0% after step 20 -> \d\d.0%\)", lines[0][1]
    )


TAUGHT = {"step": 0, "start/steps": 60, "start/loss_first": 8.0, "start/loss_last": 0.02, "start/test/accuracy": 0.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval/test/accuracy": 0.6}, None),
        ({"eval/test/accuracy": 0.0}, r"did not take: held-out accuracy did not rise \(test 0\.0% -> 0\.0%\)"),
        ({"eval/test/accuracy": 0.6, "start/loss_last": 7.9}, r"the loss hardly fell \(8 -> 7\.9 nats"),
        ({"eval/test/accuracy": 0.2, "eval/test/tool_calls": 2.0, "eval/test/tool_errors": 0.75}, "on test 75% of"),
        ({"eval/test/accuracy": 0.2, "eval/test/tool_calls": 0.6, "eval/test/tool_errors": 0.5}, None),
        ({"start/loss_first": float("nan")}, None),
    ],
)  # fmt: skip
def test_a_start_that_did_not_take_is_said(changes: dict[str, float], words: str | None) -> None:
    raised = Health(small()).step(TAUGHT | changes)
    assert [one.name for one in raised] == ([] if words is None else ["start_not_taken"])
    assert words is None or re.search(words, raised[0].line)
    for one in raised:
        assert one.evidence["start/loss_last"] == (None, (TAUGHT | changes)["start/loss_last"])
        assert one.evidence["eval/test/accuracy"] == (None, changes["eval/test/accuracy"])
    assert Health(small()).step({**TAUGHT, **changes, "step": 1}) == []


def test_a_resumed_run_goes_on_where_it_was_and_says_nothing_twice() -> None:
    rows = well({"stop/length": 4, "train/entropy": 0.001})
    whole = found(rows)
    assert [(step, one.name) for step, one in whole] == [(23, "cut_by_length"), (29, "entropy_collapse")]
    for stopped in (22, 25):
        health, written = Health(small()), []
        for row in rows[:stopped]:
            raised = [one._asdict() for one in health.step(row)]
            written.append(row | ({"health": raised} if raised else {}))
        again = Health(small(), json.loads(json.dumps(written)))
        late = [(row["step"], one) for row in rows[stopped:] for one in again.step(row)]
        assert late == [(step, one) for step, one in whole if step > stopped]


def test_rows_of_strangers_are_read_as_far_as_they_go() -> None:
    odd = {"step": 1, "health": [1, {"line": "x"}], "reward/mean": "high", "groups/varied": None, "stop/length": [3]}
    health = Health(small(), [odd, {"step": 2}, {"step": 3, "train/grad_norm": float("nan")}])
    assert health.step({"step": 4, "groups/varied": 0}) == []
    health = Health(small(), [{"step": n} for n in range(1, 30)])
    assert [one.name for n in range(30, 34) for one in health.step(FLAT | {"step": n})] == ["no_contrast"]


@pytest.mark.slow
def test_planted_pathologies_are_named_and_healthy_runs_raise_nothing() -> None:
    """The table of the benchmark: 95 % right by name and cause, and no alarm in the healthy runs."""
    command = [sys.executable, str(ROOT / "benchmarks" / "health.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (right, planted, _, _, alarms, runs) = map(int, re.findall(r"(?<=[: ])\d+(?= of|$|\n|;)", done.stdout)[-6:])
    assert planted >= 50
    assert right >= 0.95 * planted
    assert runs >= 29
    assert alarms == 0


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", sorted(RANGES))
def test_each_range_of_the_page_is_one_of_a_condition(name: str) -> None:
    """A metric outside of its range in every step raises the condition whose range it is."""
    low, high = RANGES[name]
    value = low - 0.2 if high is None and low is not None else (high or 0.0) + 1.0
    recipe = small(algorithm={"advantage": "gae"}, critic={"warmup_steps": 1}) if name.startswith("critic/") else None
    owner = next(one for one, condition in CONDITIONS.items() if name in condition.ranges)
    assert owner in [one.name for _, one in found(well({name: value}), recipe)]


def test_what_gets_twice_as_bad_is_said_again_and_three_times_at_most() -> None:
    raised = found(well({"train/kl": lambda step: 0.15 * 2 ** ((step - 20) // 3)}))
    assert [one.name for _, one in raised] == ["kl_high"] * 3
    assert [one.line.startswith("worse than before") for _, one in raised] == [False, True, True]
    health = Health(small(), [{"step": 1, "health": [one._asdict() for _, one in raised]}])
    assert health.step({"step": 2}) == []


def named(rows: Rows, recipe: Recipe | None = None) -> list[tuple[int, str, str]]:
    """What the rows raise: step, condition, cause."""
    return [(step, one.name, one.cause) for step, one in found(rows, recipe)]


def two_tools(**of: range) -> Rows:
    """Rows in which the calculator and a search fail in the steps `of`."""
    rows = [row | {"tool/search/calls": 16} for row in well()]
    for name in ("calculator", "search"):
        rows = [row | {f"tool/{name}/errors": 16 * (row["step"] in of.get(name, ()))} for row in rows]
    return rows


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"calculator": range(10, 17), "search": range(30, 41)}, [(12, "calculator"), (32, "search")]),
        ({"calculator": range(10, 41), "search": range(12, 41)}, [(12, "calculator"), (14, "search")]),
        ({"search": range(10, 41)}, [(12, "search")]),
        ({"search": range(10, 14), "calculator": range(5, 8)}, [(7, "calculator"), (12, "search")]),
        ({"search": [*range(10, 17), *range(21, 30)]}, [(12, "search")]),
        ({"search": [*range(10, 17), *range(30, 41)]}, [(12, "search"), (32, "search")]),
    ],
)
def test_each_tool_that_fails_is_said_and_again_where_it_comes_back(
    of: dict[str, range], said: list[tuple[int, str]]
) -> None:
    lines = found(two_tools(**of))
    assert {one.name for _, one in lines} == {"tool_fails"}
    assert [(step, one.cause.removeprefix("tool/")) for step, one in lines] == said
    for _, one in lines:
        assert one.evidence[f"{one.cause}/errors"] == (0.0, 16)
    assert [one.line.startswith("again: ") for _, one in lines][1:] == [said[0][1] == one for _, one in said[1:]]


def test_each_tool_that_is_slow_is_said() -> None:
    rows = [row | {"tool/search/seconds": 20.0 if row["step"] > 20 else 0.01, "tool/search/calls": 4} for row in well()]
    rows = [row | {"tool/calculator/seconds": 18.0} if row["step"] > 5 else row for row in rows]
    said = found(rows)
    assert [(step, one.cause) for step, one in said] == [(8, "tool/calculator/seconds"), (23, "tool/search/seconds")]
    assert said[1][1].evidence["tool/search/seconds"] == (0.01, 20.0)


def test_a_second_owner_of_failed_samples_is_said() -> None:
    first = well(FAILING, of=range(4, 10))
    rows = [*first[:29], *well({"rollout/failed": 3, "rollout/failed/reward": 3}, of=range(29, 40))[29:]]
    assert named(rows) == [(7, "samples_failed", "tool fails"), (32, "samples_failed", "reward fails")]


@pytest.mark.parametrize("stopped", [None, 20, 35, 42])
def test_a_policy_that_breaks_again_is_said_again(stopped: int | None) -> None:
    """Also where the run is resumed between."""
    broken = {10, 11, 12, *range(40, 45)}
    rows = [WELL | UPDATED | (DEAD if step in broken else {}) | {"step": step} for step in range(1, 45)]
    health, written, said = Health(small()), [], []
    for row in rows:
        if row["step"] == stopped:
            health = Health(small(), json.loads(json.dumps(written)))
        lines = health.step(row)
        written.append(row | ({"health": [one._asdict() for one in lines]} if lines else {}))
        said += [(row["step"], one.name, one.cause) for one in lines]
    assert said == [(10, "policy_broken", "train.lr"), (40, "policy_broken", "train.lr")]


def test_a_policy_that_stays_broken_is_said_once() -> None:
    """Also once the step that broke it is no more among the rows that are kept."""
    grown = WELL | UPDATED | DEAD | {"train/entropy": 4.0}
    rows = [(WELL | UPDATED if step < 10 else grown) | {"step": step} for step in range(1, 90)]
    assert named(rows, small(algorithm={"entropy_coef": 0.1})) == [(10, "policy_broken", "algorithm.entropy_coef")]


@pytest.mark.parametrize(
    ("later", "name", "steps"),
    [
        (DEAD, "policy_broken", range(20, 21)),
        ({"reward/mean": lambda step: max(0.02, 0.6 - 0.04 * (step - 20))}, "reward_falls", range(21, 31)),
    ],
)
def test_a_mild_finding_does_not_silence_a_collapse_of_its_cause(later: Changes, name: str, steps: range) -> None:
    rows = [MILD | row for row in well(later, of=range(19, 40))]
    (first, second, *more), collapse = named(rows), (name, "train.lr")
    assert first == (3, "updates_too_large", "train.lr")
    assert second[0] in steps
    assert {one[1:] for one in (second, *more)} == {collapse}
    assert named([row | {"train/clip_fraction": 0.1} for row in rows]) == [second, *more]


@pytest.mark.parametrize("kind", ["unknown", "unreadable", "cut"])
@pytest.mark.parametrize(("before", "cause"), [(4, "train.lr"), (5, None)])
def test_calls_that_were_right_a_step_before_were_unlearned(kind: str, before: int, cause: str | None) -> None:
    """The reward fell by half alone: the advice was to teach what the model had known, or to allow longer turns."""
    rows = well(UPDATED | {f"calls/{kind}": 12, "reward/mean": 0.25})
    for row in rows[:20]:
        row |= {f"calls/{kind}": before, "train/updates": 1}
    name = "tools_unknown" if kind == "unknown" else f"calls_{kind}"
    assert named(rows)[0] == (21, name, cause or name)


def test_what_changed_just_before_is_listed() -> None:
    recipe = small(algorithm={"advantage": "gae"}, critic={"warmup_steps": 4}, engine={"name": "sglang"})
    history = History(recipe)
    history.add({"step": 0, "eval/test/accuracy": 0.1})
    for step in range(1, 12):
        row = {"step": step, "data/epoch": step / 10, "train/updates": int(step > 4), "time/sync_s": 2.5}
        measured = {"eval/test/accuracy": 0.5} if step == 6 else {}
        history.add(row | measured | {"train/lr": 1e-4 if step < 8 else 1e-3})
    told = {step: "; ".join(history.changes(step)) for step in range(1, 12)}
    assert told[1] == "an evaluation after step 0"
    assert told[4] == told[5] == ""
    warm = "the critic's warm-up ended with step 4, and the policy is updated since"
    update = "the update of step {} (train.lr {}, gradient 0); the sync of its weights (2.5 s)"
    assert told[6] == f"{warm}; {update.format(5, 0.0001)}"
    assert told[7] == f"{warm}; an evaluation after step 6; {update.format(6, 0.0001)}"
    assert told[9] == f"the learning rate went from 0.0001 to 0.001 in step 8; {update.format(8, 0.001)}"
    assert told[10] == f"pass 2 over the tasks began in step 10; {update.format(9, 0.001)}"
    history.resumed = 10
    assert history.changes(11)[0].startswith("the run was resumed after step 10")


def test_evaluations_of_every_step_are_no_change() -> None:
    history = History(small())
    for step in range(4):
        history.add({"step": step, "eval/test/accuracy": 0.5})
    assert [history.changes(step) for step in (2, 3)] == [[], []]


def test_one_update_that_destroys_the_policy_is_blamed_on_the_learning_rate() -> None:
    before = WELL | UPDATED
    rows = [before | ({"step": step} if step < 4 else DEAD | {"step": step}) for step in range(1, 12)]
    ((step, one),) = found(rows)
    assert (step, one.name, one.cause) == (4, "policy_broken", "train.lr")
    assert "the update of step 3 (train.lr 0.05, gradient 0.3)" in one.line
    assert one.evidence["reward/mean"] == (0.5, 0.0)
    health = Health(small(), rows[:3])  # resumed where it broke: another recipe may have done it
    assert [finding.cause for row in rows[3:] for finding in health.step(row)] == ["resume"]


def test_every_condition_and_range_is_documented() -> None:
    """The page's healthy values of what has a range begin with that range."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert set(CONDITIONS) == set(re.findall(r"^- `(\w+)`: ", page, re.M))
    cells = dict(re.findall(r"^\| `([^`]+)` \|[^|]*\| ([^|]*) \|", page, re.M))
    told = {name: "0" if found == (None, 0.0) else _told(*found) for name, found in RANGES.items()}
    assert {name: cells[name] for name in told if not re.match(rf"{told[name]}(?![.\d])", cells[name])} == {}


def _told(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"at least {low:g}" if low is not None else f"at most {high:g}"
    return f"{low:g} to {high:g}"


@pytest.mark.parametrize(
    ("recipe", "metrics", "words"),
    [
        (
            {},
            {},
            r"steps 1 to 3: no two .* grpo learned nothing. Likely cause: a reward that is the same",
        ),
        ({}, {"reward/mean": 1.0}, r"too easy .*mean reward 1\b"),
        ({}, {"stop/max_turns": 5}, r"5 of 8 samples were cut off \(rollout.max_turn_tokens"),
        ({"algorithm": {"kl_coef": 0.1}}, {"train/samples": 8}, r"grpo learned nothing"),  # the KL alone was trained
        ({"algorithm": {"advantage": "reinforce_plus_plus"}}, {}, r"reinforce_plus_plus learned nothing"),
        ({"algorithm": {"advantage": "reinforce_plus_plus"}}, {"train/samples": 8}, None),
        ({}, {"groups/varied": 1, "train/samples": 4}, None),
    ],
)
def test_steps_without_contrast_are_told_once(recipe: Changes, metrics: Changes, words: str | None) -> None:
    raised = found([FLAT | metrics | {"step": step} for step in range(1, 9)], small(**recipe))
    lines = [(step, one.line) for step, one in raised if one.name == "no_contrast"]
    assert [step for step, _ in lines] == ([] if words is None else [3])
    assert words is None or re.search(words, lines[0][1])


def test_what_follows_from_failures_is_not_said_too() -> None:
    raised = found(
        [FLAT | {"groups/few": 2, "groups/equal": 0, "rollout/failed": 7, "step": step} for step in range(1, 9)]
    )
    assert [(step, one.name) for step, one in raised] == [(3, "samples_failed")]
    assert "47% of the samples failed" in raised[0][1].line


def test_steps_apart_are_no_row() -> None:
    assert found(FLAT | {"step": step, "groups/varied": step % 3 == 0} for step in range(1, 9)) == []


def test_a_critic_that_warms_up_is_not_taken_for_it() -> None:
    recipe = small(algorithm={"advantage": "gae"}, critic={"warmup_steps": 4})
    assert [step for step, _ in found([FLAT | {"step": step} for step in range(1, 9)], recipe)] == [7]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout__temperature": 0.0}, r"rollout.temperature is 0, so .* grpo, which compares them"),
        ({"rollout__top_k": 1}, r"rollout.top_k is 1, so"),
        ({"rollout__temperature": 0.0, "algorithm": {"advantage": "reinforce_plus_plus"}}, None),
        ({"rollout__temperature": 0.0, "train__steps": 0}, None),
        ({"algorithm": {"loss": "kl_cov"}}, r"algorithm.loss 'kl_cov' pulls tokens back .*: set train.mini_batches=4"),
        ({"algorithm": {"loss": "dro"}}, r"algorithm.loss 'dro' pulls"),
        ({"algorithm": {"loss": "dro"}, "train__epochs": 2}, None),
        ({"algorithm": {"loss": "kl_cov"}, "train__mini_batches": 2}, None),
        ({"algorithm": {"loss": "clip_cov"}}, None),
    ],
)
def test_what_cannot_be_learned_from_is_told_before_the_first(changes: Changes, words: str | None) -> None:
    health = Health(small(**changes))
    lines = [one.line for one in health.before_start()]
    assert len(lines) == (words is not None)
    if words is not None:
        assert re.search(words, lines[0])
    if "rollout__temperature" in changes and words is not None:
        assert not any(health.step(FLAT | {"step": step}) for step in range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "step", "words"),
    [
        ({"rollout__temperature": 0.0}, 0, "rollout.temperature is 0"),
        ({"env__name": "train_plugins:Flat"}, 3, "no two samples of a task differed in their reward"),
    ],
)
def test_a_run_says_it(tmp_path: Path, changes: Changes, step: int, words: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    folder = agentrl.train(
        small(tmp_path / "run", **changes, eval__splits=[], train__steps=4), display=Display(4, "x", console)
    ).folder
    said = console.file.getvalue()  # type: ignore[attr-defined]
    again = [line.startswith("still so at the end: ") for line in said.splitlines() if words in line]
    assert again == [False, True][: 2 if step else 1]  # what is known before the first step is said once
    written = [(row["step"], one) for row in metrics(folder) for one in row.get("health", ())]
    assert [(at, one["name"], words in one["line"]) for at, one in written] == [(step, "no_contrast", True)]


def test_the_causes_of_a_mismatch_depend_on_the_engine() -> None:
    recipe = Recipe.model_validate({"engine": {"name": "sglang"}})
    ((_, one),) = found([WELL | {"step": 1, "mismatch/logprob_mean": 0.2}], recipe)
    assert "weights that did not reach the engine" in one.line
    assert "number format" in one.line
