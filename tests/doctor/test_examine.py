"""Checks in processes of their own: all pass here; whatever becomes of one, the others run, and the report says it."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from paths import SUPPORT
from processes import until
from train_help import small
from warm import Python

from agentrl.cli import main
from agentrl.doctor import examine as examining
from agentrl.doctor.check import Finding, Status
from agentrl.doctor.checks import CHECKS
from agentrl.doctor.examine import examine
from agentrl.doctor.report import cleaned, write_report
from agentrl.errors import UserError

PLANTED = "doctor_plugins:CHECKS"
WANTED = {
    "first": (Status.OK, "42 per second", ""),
    "fails": (Status.FAILED, "it is broken", "package wheel"),
    "rests": (Status.ABSENT, "the check `fails` did not succeed", ""),
    "absent": (Status.ABSENT, "no such thing", ""),
    "hangs": (Status.FAILED, "it took more than 0.5 s", "key c.d"),
    "dies": (Status.FAILED, "its process ended (see the log in the report)", "key e.f"),
    "exits": (Status.FAILED, "SystemExit: 3", "key g.h"),
    "last": (Status.OK, "42 per second", ""),
}


@pytest.mark.slow
def test_a_check_that_fails_hangs_dies_or_exits_ends_no_other(tmp_path: Path) -> None:
    shown: list[str] = []
    findings = examine(small(), checks=PLANTED, began=lambda c: shown.append(c.name), ended=lambda f: None)
    found = {f.name: (f.status, f.figure.partition(" (doctor_plugins")[0], f.remedy) for f in findings}
    assert found == WANTED
    assert list(found) == list(WANTED)
    assert "rests" not in shown
    logs = {f.name: f.log for f in findings}
    assert logs["fails"] == "what the part wrote"
    assert logs["dies"] == "its last words"
    assert logs["first"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_an_examination_that_is_ended_leaves_no_folder(number: int, tmp_path: Path) -> None:
    """SIGTERM left three of them."""
    code = """
import sys
from agentrl.doctor import examine
examine.CHECKS = examine.examine.__kwdefaults__["checks"] = "doctor_plugins:LASTS"
from agentrl.cli.main import main
sys.argv[1:] = ["doctor"]
main()
"""
    process = Python(["-c", code], env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(SUPPORT)})
    try:
        until(lambda: list(tmp_path.glob("of-a-check-*")) or process.poll() is not None)
        assert {path.name.rpartition("-")[0] for path in tmp_path.iterdir()} == {"of-a-check", "agentrl-doctor"}
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, list(tmp_path.iterdir())) == (130, []), said
    assert "Traceback" not in said


@pytest.mark.ray
def test_every_check_passes_on_this_machine(
    bubblewrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "report.json"
    monkeypatch.setattr(examining, "CHILD", (sys.executable, "-m", "warm_ray", "agentrl.doctor.child"))
    assert main.run(["doctor", "--output", str(folder)]) == 0, capsys.readouterr().out
    findings = [Finding.read(found) for found in json.loads(folder.read_text())["findings"]]
    assert {found.name: found.status for found in findings} == {check.name: Status.OK for check in CHECKS}
    assert all(found.figure for found in findings)


def test_an_unknown_check_is_named() -> None:
    with pytest.raises(UserError, match="there is no check 'pariti'; did you mean 'parity'"):
        examine(small(), only=["pariti"])


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Finding]:
    """What the command finds, and a folder for what it writes."""
    findings = [Finding("first", "something", Status.OK, "42 per second")]
    monkeypatch.setattr(examining, "examine", lambda recipe, **how: findings)
    monkeypatch.chdir(tmp_path)
    return findings


def test_all_is_well_exits_with_0_and_writes_nothing(planted: list[Finding], tmp_path: Path, capsys) -> None:
    assert main.run(["doctor"]) == 0
    assert "42 per second" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_failure_exits_with_1_and_writes_a_report(planted: list[Finding], tmp_path: Path, capsys) -> None:
    planted.append(Finding("second", "a part", Status.FAILED, "it is broken", "key a.b", 1.0, "line"))
    assert main.run(["doctor"]) == 1
    assert "key a.b" in capsys.readouterr().out
    report = json.loads((tmp_path / "agentrl-doctor.json").read_text())
    assert [Finding.read(found) for found in report["findings"]] == planted
    assert report["environment"]["packages"]["torch"]


def test_the_report_is_written_where_it_is_asked_for(planted: list[Finding], tmp_path: Path, capsys) -> None:
    assert main.run(["doctor", "gsm8k_tool", "train.steps=3", "--output", "report.json"]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["recipe"]["train"]["steps"] == 3
    assert main.run(["doctor", "--output", "no/folder/report.json"]) == 2
    assert "--output: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["gsm8k_tol"], ["env.name=gsm9k"], ["gsm8k_tool", "tools=[calc]"], ["train.x=1"]]
)
def test_a_bad_recipe_exits_with_2(planted: list[Finding], arguments: list[str], capsys) -> None:
    assert main.run(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_report_has_no_secret_and_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("SOME_API_KEY", "a-long-secret-value")
    log = f"/home/somebody/x.py read a-long-secret-value from {os.getcwd()}/y and https://me:pw@host"
    assert cleaned([log]) == ["~/x.py read *** from ./y and https://***@host"]
    path = tmp_path / "report.json"
    write_report(path, small(), [Finding("a", "b", Status.FAILED, "c", "d", 1.0, log)])
    text = path.read_text()
    assert "somebody" not in text
    assert "a-long-secret-value" not in text
