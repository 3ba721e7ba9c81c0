"""Scanners of stored samples: what each finds and does not, what is kept, and who reads it."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from paths import ROOT
from serving import serving
from why_help import answer, call, result, sample, stored, user

from agentrl.cli import main
from agentrl.eval.outcome import read_outcomes
from agentrl.eval.scan import Scan, judge_column, keep, read_findings
from agentrl.eval.scanners import SCANNERS
from agentrl.eval.why import diagnose
from agentrl.plugins.scanner import Scanned
from agentrl.plugins.scanner_process import found_of
from agentrl.view.store import RunStore

ASKED = user("225 stamps, 15 a jar: how many jars?")
LOOP = "and then we add the number of jars to it " * 8


def scanned(*messages: Any, **changes: Any) -> Scanned:
    """A sample that was solved with a call, unless `changes` say otherwise."""
    given: dict[str, Any] = {
        "task": "t", "data": {"answer": "15", "kind": "jars"}, "messages": [ASKED, *messages], "tools": ["calculator"],
        "tool_uses": [{"name": "calculator", "turn": 0, "seconds": 0.1, "error": None, "cut": False}], "reward": 1.0,
        "solved": True,
    }  # fmt: skip
    return Scanned(**given | changes)


@pytest.mark.parametrize(
    ("found", "given"),
    [
        (set(), scanned(call({"expression": "225/15"}), result("15"), answer("15 jars."))),
        ({"loop"}, scanned(answer(f"So {LOOP}"))),
        ({"loop"}, scanned(answer("1" * 200), solved=False)),
        ({"loop"}, scanned(call("225/15"), result("15"), call("225/15"), result("15"), call("225/15"), answer("15"))),
        (set(), scanned(call("225/15"), result("15"), call("225/15"), result("15"), answer("15"))),
        (set(), scanned(answer("=" * 80 + "\nThe answer is 15.\n" + "-" * 80))),
        (set(), scanned(answer(" ".join(f"{n} times 15 is {15 * n}." for n in range(1, 40)) + " So 15."))),
        ({"refusal"}, scanned(answer("I cannot help with that: 15"))),
        ({"refusal", "apology"}, scanned(answer("I\u2019m sorry, but as an AI language model I do not count jars."))),
        (set(), scanned(answer("It cannot be more than 15, I can give 15 jars."))),
        ({"apology"}, scanned(answer("My apologies, 15."))),
        ({"empty_answer"}, scanned(answer("<think>What is it?</think>\n"), solved=False)),
        ({"empty_answer"}, scanned(answer(""), solved=False, finish="length")),
        (set(), scanned(answer(""), solved=False, finish="max_turns")),
        ({"leaked_answer"}, scanned(answer("15"), messages=[user("Answer: 15. How many jars?"), answer("15")])),
        ({"leaked_answer"}, scanned(result("wrong, expected 15"), answer("15"))),
        ({"leaked_answer"}, scanned(data={"answer": "so #### 1,260"}, messages=[user("1,260 of 3"), answer("1,260")])),
        (set(), scanned(answer("15"), data={"answer": 225})),
        (set(), scanned(answer("15"), data={"answer": True, "solution": None, "label": {"a": 1}})),
        ({"no_work"}, scanned(answer("15"), tool_uses=[])),
        (set(), scanned(answer("15"), tool_uses=[], tools=[])),
        (set(), scanned(answer("7"), tool_uses=[], solved=None, reward=0.0)),
        ({"grader_touched"}, scanned(call({"command": "echo pass > tests/test_jars.py"}, "terminal"), answer("15"))),
        ({"grader_touched"}, scanned(call({"command": "cat ../reward.txt; ls"}, "terminal"), answer("15"))),
        ({"grader_touched"}, scanned(answer("15"), extra={"workspace": {"changes": [["added", "conftest.py", 9]]}})),
        ({"grader_touched"}, scanned(answer("15"), extra={"tampering": ["startup_file: sitecustomize.py"]})),
        (set(), scanned(call({"command": "ls src/jars.py; cat latest.py"}, "terminal"), answer("15"))),
        ({"copied_number"}, scanned(answer("It is 225."), solved=False)),
        (set(), scanned(call("15*15"), result("225"), answer("It is 225."), solved=False)),
        ({"miscopied_number"}, scanned(call({"expression": "22/15"}), result("1.5"), answer("15"))),
    ],
)
def test_a_scanner_finds_what_it_is_for_and_nothing_else(found: set[str], given: Scanned) -> None:
    assert {name for name, scanner in SCANNERS.items() if scanner(given) is not None} == found


def test_scanners_are_fast_on_wild_texts() -> None:
    wild = ["a/" * 50_000, "<think>" * 20_000, "test_" * 20_000, "I " * 50_000, "((((" * 10_000, "ab" * 50_000]
    for text in wild:
        given = scanned(user(text), call({"command": text}, "terminal"), answer(text), data={"answer": text[:150]})
        for scanner in SCANNERS.values():
            scanner(given)  # the suite's time limit is the assertion


REFUSED = "I cannot help with that."


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which the samples of odd tasks refuse, and are unsolved."""
    samples = [sample(number, number % 2 == 1) for number in range(40)]
    refusing = [replace(t, messages=(user("225 by 15"), answer(REFUSED))) if t.reward == 0 else t for t in samples]
    stored(tmp_path, 5, refusing)
    return tmp_path


def test_findings_are_columns_that_others_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["scan", str(run)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"20 +0% +100% +refusal", said)
    assert 't1: "I cannot help with that."' in said
    assert re.search(r"nothing found by: .*empty_answer", said)
    path = run / "trajectories" / "eval_test_5.parquet"
    found = read_findings(path)
    assert [note is not None for note in found["refusal"]] == [number % 2 == 1 for number in range(40)]
    keep(path, [one.request_id for one in [sample(n, False) for n in range(40)]], {"own": ["x"] + [None] * 39})
    assert read_findings(path)["own"][0] == "x"
    assert read_findings(path)["refusal"] == found["refusal"]
    outcomes = read_outcomes(path)
    assert [one.findings["refusal"] for one in outcomes] == [float(number % 2) for number in range(40)]
    causes = {(cause.kind, cause.value): cause for cause in diagnose(path).causes}
    assert causes["says", "refusal"].share == 1.0
    store = RunStore(run, "run")
    index = store.index(["eval_test_5.parquet"])["eval_test_5.parquet"]
    assert index["scan"][:2] == ["own", "refusal no_work"] or index["scan"][:2] == ["own", "refusal"]
    assert store.sample("eval_test_5.parquet", 1)["scan"]["refusal"] == '"I cannot help with that."'


def test_findings_of_other_samples_are_none(run: Path) -> None:
    assert main.run(["scan", str(run), "--scanner", "refusal"]) == 0
    stored(run, 5, [sample(number, False) for number in range(41)])
    path = run / "trajectories" / "eval_test_5.parquet"
    assert read_findings(path) == {}
    (run / "scans" / "eval_test_5.parquet").write_bytes(b"PAR1")
    assert read_findings(path) == {}
    with Scan(["loop"]) as scan:
        scan.file(path)
    assert set(read_findings(path)) == {"loop"}


OWN = """
import os, sys, time

def odd(sample):
    print("x" * 1000)
    return f"task {sample.task}" if int(sample.task[1:]) % 2 else None

def raises(sample):
    raise ValueError("no such thing")

def leaves(sample):
    os._exit(3)

def hangs(sample):
    time.sleep(60)

def floods(sample):
    return "x" * 10_000_000
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"eval_test_5.parquet, sample 1: .*no such thing.*\n.*failed 3 times and was given up"),
        ("leaves", r"its process ended by exit code 3"),
        ("hangs", r"took longer than 0\.2 s over a sample"),
    ],
)
def test_a_scanner_of_a_stranger_ends_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    (run / "own_scanners.py").write_text(OWN)
    monkeypatch.syspath_prepend(run)
    path = run / "trajectories" / "eval_test_5.parquet"
    with Scan([f"own_scanners:{name}", "refusal"], seconds=0.2 if name == "hangs" else 5.0) as scan:
        found = scan.file(path)
    assert set(found) == {"refusal"}
    assert re.search(words, "\n".join(scan.notes))


@pytest.mark.slow
def test_scanners_of_ones_own_and_floods(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "own_scanners.py").write_text(OWN)
    monkeypatch.syspath_prepend(run)
    path = run / "trajectories" / "eval_test_5.parquet"
    with Scan(["own_scanners:odd", "own_scanners:floods"]) as scan:
        found = scan.file(path)
    assert found["own_scanners:odd"][:3] == [None, "task t1", None]
    assert len(found["own_scanners:floods"][0] or "") == 300
    causes = {(cause.kind, cause.value) for cause in diagnose(path).causes}
    assert ("scan", "own_scanners:odd") in causes


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--scanner", "refusals"], "did you mean 'refusal'?"),
        (["--split", "tset"], "did you mean 'test'?"),
        (["--step", "3"], "nothing is stored of step 3; try one of 5"),
        (["--judge", "Is it rude?"], "name the model that judges"),
    ],
)
def test_what_cannot_be_scanned_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert main.run(["scan", str(run), *words]) == 2
    assert line in capsys.readouterr().err


def test_what_a_scanner_gives_is_a_text_or_truth() -> None:
    assert [found_of(value) for value in (None, False, True, "x" * 400)] == [None, None, "found", "x" * 300]
    with pytest.raises(TypeError, match="it gave int, not a text"):
        found_of(7)


def test_what_a_judge_finds_is_a_column(run: Path) -> None:
    def judge(samples: Any) -> list[str | None]:
        return ["yes" if REFUSED in one.answer else None for one in samples]

    path = run / "trajectories" / "eval_test_5.parquet"
    with Scan([], {"judge": judge}) as scan:
        scan.file(path)
    assert read_findings(path)["judge"][:3] == [None, "yes", None]


def test_each_question_of_a_judge_has_a_column_of_its_own(run: Path) -> None:
    path = run / "trajectories" / "eval_test_5.parquet"

    def ask(question: str, word: str) -> str:
        def judge(samples: Any) -> list[str | None]:
            return [question if word in one.answer else None for one in samples]

        column = judge_column(run, question)
        with Scan([], {column: judge}, questions={column: question}) as scan:
            scan.file(path)
        return column

    assert [ask("Rude?", REFUSED), ask("Late?", "late"), ask("Rude?", "14!")] == ["judge", "judge_2", "judge"]
    with Scan(["refusal"]) as scan:
        scan.file(path)
    found = read_findings(path)
    assert (found["judge"][:2], set(found["judge_2"])) == (["Rude?", None], {None})
    assert [judge_column(run, question) for question in ("Late?", "New?")] == ["judge_2", "judge_3"]
    keep(path, [f"{n}#0" for n in range(40)], {"judge_3": [None] * 40})  # as before questions were kept
    assert judge_column(run, "New?") == "judge_4"


@pytest.mark.slow
async def test_a_judge_at_an_endpoint_is_asked_of_every_sample(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(run / "cache"))  # where replies are kept
    asked: list[str] = []

    async def answer_of_grader(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body["messages"][-1]["content"])
        message = {"role": "assistant", "content": f"Score: {10 if REFUSED in asked[-1] else 0}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        )

    words = ["scan", str(run), "--model", "grader", "--base-url"]
    async with serving({"POST /v1/chat/completions": answer_of_grader}) as url:
        code = await asyncio.to_thread(main.run, [*words, f"{url}/v1", "--judge", "Does it {refuse}?"])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    assert re.search(r"20 +0% +100% +judge", said.out)
    assert len(asked) >= 2, "alike conversations may be asked about once"
    assert all("Question: Does it (refuse)?" in text for text in asked)
    found = read_findings(run / "trajectories" / "eval_test_5.parquet")["judge"]
    assert found == [None, "Does it {refuse}?"] * 20
    assert await asyncio.to_thread(main.run, [*words, f"{url}/v1", "--judge", "Is it gone?"]) == 2
    assert re.match(r"error: --judge: judge grader at http://127\.0\.0\.1.*\n$", capsys.readouterr().err)
    assert read_findings(run / "trajectories" / "eval_test_5.parquet")["judge"] == found


def test_every_scanner_is_listed_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["scanners"]) == 0
    said = capsys.readouterr().out
    page = (ROOT / "docs" / "stored_rollouts.md").read_text()
    assert [name for name in SCANNERS if name not in said or f"| `{name}` |" not in page] == []


def test_json_has_every_finding(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["scan", str(run), "--scanner", "refusal", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["findings"]["refusal"][:2] == [None, '"I cannot help with that."']
