"""`agentrl audit`: what it prints and writes, its exit code, environments that it must survive, and its page."""

import json
import time
from pathlib import Path
from typing import cast

import axe_core_python
import pytest
from audited import Exits, Hangs, NamesAny, NamesThem, OneByOne, Prints, Unordered
from browser import Browser
from cli_help import refused
from paths import RECIPES

from agentrl import Environment
from agentrl.audit.apart import Watched, _broken, _follow, audit_apart
from agentrl.audit.finding import Finding, Report, Row, Severity, found
from agentrl.audit.page import render, write_page
from agentrl.audit.run import Options, audit
from agentrl.cli import main
from agentrl.containment.event_loop import run
from agentrl.containment.process_tree import ProcessTree
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.env import EnvSection

AXE = Path(axe_core_python.__file__).parent / "axe.min.js"
HOSTILE = "</pre><script>document.title = 'taken'</script><img src=x onerror=document.title='taken'>"


def apart(env: type[Environment], **options: float) -> Report:
    recipe = Recipe(env=EnvSection(name=f"audited:{env.__name__}"))
    return audit_apart(env.__name__, recipe, tasks=2, seconds=20, **options)


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings if finding.severity is Severity.HIGH}


@pytest.mark.slow
def test_a_shipped_environment_has_no_finding(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, page = tmp_path / "audit.json", tmp_path / "audit.html"
    arguments = ["audit", "gsm8k", "--tools", "calculator", "--tasks", "4", "--seconds", "30"]
    assert main.run([*arguments, "--fail-on", "high", "--json", str(file), "--page", str(page)]) == 0
    out = capsys.readouterr().out
    assert "oracle" in out
    assert "50,000" in out
    told = json.loads(file.read_text())
    assert told["worst"] == "info"
    assert {row["policy"] for row in told["policies"]} >= {
        "oracle",
        "nothing",
        "random",
        "echo",
        "constant",
        "injecting",
    }
    oracle = next(row for row in told["policies"] if row["policy"] == "oracle")
    assert oracle["solved"] == oracle["reward"] == 1.0
    assert "What each policy earns" in page.read_text()


LONG = ("chart_qa", "code_tool", "search_qa", "sub_agents", "swe", "terminal", "tiny_tools", "user_sim", "vision_game")


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize("name", ["text_game", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_what_ships_has_no_high_finding(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tools = ["--tools", "calculator"] if name == "chart_qa" else []
    what = str(RECIPES / "terminal.yaml") if name == "terminal" else name  # a tool has that name, too
    given = ["audit", what, *tools, "--tasks", "4", "--seconds", "5" if name == "text_game" else "30"]
    assert main.run([*given, "--fail-on", "high"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_exit_code_says_what_was_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    given = ["audit", "audited:SaysIt", "--tasks", "4", "--seconds", "30", "--fail-on", "high", "--json", str(file)]
    assert main.run(given) == 1
    told = json.loads(file.read_text())
    assert told["worst"] == "high"
    echo = next(f for f in told["findings"] if f["kind"] == "echo")
    assert echo["tasks"][0].startswith("train-")
    assert "echo" in capsys.readouterr().out


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "is a tool" in refused(capsys, "audit", "calculator")
    assert "gsm8k" in refused(capsys, "audit", "gsm9k")
    assert "--json" in refused(capsys, "audit", "gsm8k", "--json", str(tmp_path / "no" / "file.json"))


@pytest.mark.slow
def test_an_environment_that_cannot_be_had_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs data" in refused(capsys, "audit", "dataset", "--args", "reward=match")


@pytest.mark.slow
def test_an_environment_that_ends_the_process_is_a_finding() -> None:
    report = apart(Exits)
    assert "exits" in kinds(report)
    broken = next(f for f in report.findings if f.kind == "exits")
    assert broken.tasks
    assert broken.tasks[0].startswith("train-")


@pytest.mark.slow
def test_an_environment_that_hangs_is_a_finding() -> None:
    assert "hangs" in kinds(apart(Hangs, still=4.0))


@pytest.mark.slow
def test_an_environment_may_print_what_it_wants() -> None:
    report = apart(Prints)
    assert kinds(report) == set()
    assert [f.severity for f in report.findings if f.kind == "prints"] == [Severity.MEDIUM]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "found"), [(Unordered, {"unsteady_tasks"}), (NamesAny, {"unseeded"}), (NamesThem, set())]
)
def test_what_differs_between_processes_is_found(env: type[Environment], found: set[str]) -> None:
    assert kinds(apart(env)) == found


@pytest.mark.slow
def test_a_slow_environment_is_accused_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.audit.subject.HOOK_SECONDS", 1.2)
    report = run(audit("slow", Recipe(), OneByOne, Options(tasks=6, seconds=5)))
    assert [f.line for f in report.findings if f.severity is not Severity.INFO] == []
    assert "nothing" in {row.policy for row in report.rows}


def test_an_audit_whose_time_is_over_does_not_say_that_something_hangs(tmp_path: Path) -> None:
    (tmp_path / "lines").touch()
    watched, tree = Watched(Report("slow"), "policies", "echo, task train-3"), cast("ProcessTree", Living())
    why = _follow(tmp_path / "lines", tree, watched, (time.monotonic() - 1.0, 60.0), lambda name: None)
    finding = _broken(why, watched, "", 60.0, 210.0)
    assert (finding.kind, finding.severity, finding.tasks) == ("not_examined", Severity.INFO, ("train-3",))
    assert "the 210 s that an audit may take were over" in finding.line


class Living:
    """A process that does not end."""

    running = True


@pytest.mark.slow
def test_a_model_plays_too(tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    given = ["audit", "gsm8k_tool", "rollout.max_turns=2", "rollout.max_turn_tokens=16", "--model", "tiny"]
    assert main.run([*given, "--tasks", "2", "--seconds", "5", "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    rows = {row["policy"]: row for row in told["policies"]}
    assert rows["model 1"]["tasks"] == rows["model 0.3"]["tasks"] == 2
    assert all(0.0 <= rows[name]["solved"] <= 1.0 for name in ("model 1", "model 0.3"))
    lines = [f["line"] for f in told["findings"] if f["kind"] == "difficulty"]
    assert {line.partition(" the model solves")[0] for line in lines} == {"at temperature 1", "at temperature 0.3"}
    assert all("of 2 groups of 8 would teach it" in line for line in lines)


@pytest.mark.long
def test_openings_are_measured_by_the_tokenizer_of_a_recipe() -> None:
    recipe = load_recipe("gsm8k_tool", ["rollout.max_tokens=60", "rollout.max_turn_tokens=8"])
    report = audit_apart("gsm8k_tool", recipe, tasks=2, seconds=10, measured=True)
    lines = [f.line for f in report.findings if f.kind == "long_prompt"]
    assert len(lines) == 1
    assert "estimated" not in lines[0]


def shown() -> Report:
    """A report with every severity, and with texts that a page must escape."""
    findings = [
        found("echo", Severity.HIGH, f"the last number: 100% {HOSTILE}", ["train-1", HOSTILE], HOSTILE),
        found("twice", Severity.MEDIUM, "train: 12 of 80 tasks ask what another one asks", ["train-3"]),
        found("schema", Severity.LOW, "3 parameters have no description: find.x"),
        found("not_examined", Severity.INFO, "4 of 65 attempts: there was no time for them"),
    ]
    rows = [Row("oracle", "answer", 16, 1.0, 1.0), Row("echo", HOSTILE, 16, 0.5, 0.5), Row("nothing", "", 16, -0.2, 0)]
    return Report("my_env", findings, rows, {"train": 80, "test": 20}, 612, 9.5)


def test_a_report_comes_back_from_its_json() -> None:
    report = shown()
    assert [Finding.read(one.written()) for one in report.findings] == report.findings
    assert report.json()["worst"] == "high"
    assert [row.policy for row in report.best()] == ["oracle", "echo", "nothing"]


def test_texts_are_escaped() -> None:
    assert "<script>document" not in render(shown())
    assert "<img" not in render(shown())


def test_the_page_in_a_browser(chromium: str, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    write_page(shown(), str(page))
    browser = Browser(chromium, tmp_path / "profile")
    try:
        for dark, width in ((False, 1280), (True, 1280), (False, 400)):
            browser.look(width=width, dark=dark)
            browser.open(page.as_uri())
            assert browser.evaluate("document.title") == "Audit of my_env"
            assert browser.evaluate("document.querySelectorAll('.finding').length") == 4
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
            colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            assert colour == ("rgb(20, 24, 31)" if dark else "rgb(245, 247, 250)")
            browser.evaluate(AXE.read_text())
            broken = browser.evaluate(
                "axe.run(document).then(found => found.violations.map(v => v.id + v.nodes[0].html))"
            )
            assert broken == []
        assert browser.errors == []
    finally:
        browser.close()
