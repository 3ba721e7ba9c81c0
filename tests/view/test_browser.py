"""The page in Chromium: what is seen, keys, filters, hostile texts, accessibility. One browser for all of it."""

import asyncio
import csv
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import axe_core_python
import pytest
from browser import Browser
from view_help import HOSTILE, embedded, group, journal, learned, run_folder, trajectory
from vision_help import file_of, picture

from agentrl.cli.main import run
from agentrl.eval.notes import Change, write_change
from agentrl.learner.monitors import WATCHED
from agentrl.plugins.types import Task
from agentrl.trajectory import Span
from agentrl.view.catalog import Catalog
from agentrl.view.freeze import write_report
from agentrl.view.server import Shown, serve

READY = "globalThis.app && app.ready"
AXE = Path(axe_core_python.__file__).parent / "axe.min.js"


def why(path: Path, first: Path | None, piece: object) -> dict[str, object]:
    """What `agentrl why` gives, in short."""
    example = {"file": path.name, "task": "large-1", "sample": 0, "note": '225 -> 22 in "22/15"'}
    cause = {
        "kind": "miscopied", "value": "number anywhere", "unsolved": 4, "tasks": 4, "share": 0.8, "solved": 0.0,
        "lift": None, "chance": 1e-9, "before": 0.6, "unsolved_before": 4, "examples": [example],
    }  # fmt: skip
    return {
        "file": path.name, "samples": 10, "unsolved": 5, "below": None, "lost": 0, "first_file": first and first.name,
        "first_samples": 10, "first_unsolved": 7, "unexplained": 1, "notes": [], "gone": [],
        "causes": [cause, *({**cause, "kind": kind} for kind in ("slow", "says", "scan", "files"))],
    }  # fmt: skip


class Served:
    """A run's page, served in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loop = asyncio.new_event_loop()
        opened, addresses = threading.Event(), []

        def tell(address: str) -> None:
            addresses.append(address)
            opened.set()

        shown = Shown(Catalog([folder]), lambda: {"train/entropy": (0.6, None)}, lambda: WATCHED, why)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._task = asyncio.run_coroutine_threadsafe(serve(shown, 0, tell), self._loop)
        assert opened.wait(30)
        self.address = addresses[0]

    def close(self) -> None:
        """End the server."""
        self._task.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture(scope="module")
def browser(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(chromium, tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def served(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(run_folder(tmp_path_factory.mktemp("view") / "first", tasks=30))
    browser.look()
    browser.open(one.address)
    browser.until(READY)
    assert "token" not in browser.evaluate("location.href")
    yield one
    one.close()


def go(browser: Browser, place: str, until: str = READY) -> None:
    browser.evaluate(f"location.hash = {json.dumps(place)}")
    browser.evaluate("new Promise(done => setTimeout(done, 0))")
    browser.until(until)


def text(browser: Browser, selector: str = "main") -> str:
    found: str = browser.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
    return found


def sample(file: str, row: int, **more: str) -> str:
    return "#sample?" + "&".join([f"run=0&file={file}&row={row}", *(f"{key}={value}" for key, value in more.items())])


VIEWS = {
    "#overview": "document.querySelectorAll('.card').length === 2",
    "#curves": "document.querySelectorAll('.slot svg').length >= 2",
    "#samples": "document.querySelector('.row .prompt')?.textContent",
    "#errors": "document.querySelector('.cause')",
    "#time": "document.querySelector('.lane')",
    sample("step_2.parquet", 1, way="tokens", by="gap"): "document.querySelectorAll('.tokens span').length === 12",
    sample("step_2.parquet", 1, way="data"): "document.querySelector('.data')",
    sample("step_2.parquet", 1, way="text"): "document.querySelectorAll('.data .sampled').length === 2",
    "#side?run=0&file=step_2.parquet&row=1": "document.querySelectorAll('.column').length === 4",
}
OTHERS = {
    "#runs": "document.querySelector('.runs .room .row')",
    "#log": "document.querySelector('.log')?.textContent",
    sample("eval_test_2.parquet", 32): "document.querySelector('.chat img')",
    sample("eval_test_2.parquet", 31, way="tree"): "document.querySelectorAll('.node').length === 3",
    "#side?run=0&file=eval_test_2.parquet&row=3&over=1": "document.querySelectorAll('.column').length === 2",
}
"""Views that a frozen page does not hold."""


def faults(browser: Browser, views: dict[str, str]) -> list[tuple[str, ...]]:
    """What axe finds in each of these views, which must fit the screen."""
    browser.evaluate(AXE.read_text(encoding="utf-8") + ";0")
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    found = []
    for place, until in views.items():
        go(browser, place, until)
        answer = browser.evaluate(f"axe.run(document, {json.dumps(rules)}).then(found => found.violations)")
        found += [(place, one["id"], one["nodes"][0]["html"], one["nodes"][0]["failureSummary"]) for one in answer]
        wide = browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{place} is wider than the screen by {wide} pixels"
    return found


@pytest.mark.parametrize("dark", [False, True])
def test_every_view_opens_without_an_error_and_can_be_used_by_everybody(
    browser: Browser, served: Served, dark: bool
) -> None:
    browser.errors.clear()
    browser.look(*((390, 844) if dark else (1280, 860)), dark=dark)
    found = faults(browser, VIEWS | OTHERS)
    assert not found, "\n".join(map(str, found))
    assert browser.errors == []
    assert browser.evaluate("globalThis.owned") is None
    browser.look()


def test_filters_sorting_and_keys_lead_to_a_conversation_and_back(browser: Browser, served: Served) -> None:
    go(browser, "#samples")
    assert "144 of 144 samples" in text(browser)
    browser.key("/")
    browser.write("reward<1 kind:odd")
    browser.until("document.querySelector('[role=status].soft') && app.list.length === 54")
    browser.key("Escape")
    browser.evaluate("document.querySelector('[aria-label=\"sort by task\"]').click()")
    ordered = browser.evaluate("app.list.slice(0, 3).map(i => app.samples.column.task[i])")
    assert ordered == sorted(ordered)
    assert "reward%3C1" in browser.evaluate("location.hash")
    for _ in range(3):
        browser.key("j")
    browser.key("k")
    place = browser.evaluate("document.querySelector('.row.at a').getAttribute('href')")
    browser.key("Enter")
    browser.until("document.querySelector('.chat')")
    assert browser.evaluate("location.hash") == place
    browser.key("v")
    browser.until("document.querySelector('.tokens')")
    browser.key("j")
    browser.until(f"location.hash !== {json.dumps(place)} && document.querySelector('.tokens')")
    browser.key("Escape")
    browser.until("document.querySelector('.samples')")
    assert browser.evaluate("app.list.length") == 54
    browser.key("Escape")  # the filter is cleared
    browser.until("app.list.length === 144")
    browser.key("3")
    browser.until("document.querySelector('.slot svg')")
    browser.key("?")
    browser.until("document.querySelector('dialog').open")
    browser.evaluate("document.querySelector('dialog').close()")
    browser.key("d")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    browser.key("d")


def test_what_the_conversations_say_is_found(browser: Browser, served: Served) -> None:
    go(browser, "#samples?q=owned")
    browser.until("app.list.length === 2")
    assert browser.evaluate("app.list.map(i => app.samples.column.task[i])") == ["test-hostile"] * 2
    go(browser, "#samples?outcome=failed", "app.list.length === 2")
    go(browser, "#samples?split=train&errors=no&step=2", "app.list.length === 8")


QUERIES = {
    "reward<1 AND kind:odd": 54,
    "reward<1 kind:odd": 54,
    "reward<1 NOT kind:odd": 24,
    "NOT (reward>=1 OR kind:odd)": 26,
    "owned OR left": 4,
    '"What is" (owned OR left)': 2,
    "tool:calculator NOT tool:*": 0,
    "failed_tool:none": 144,
    "part.answer<1": 78,
    "finish!=stop": 2,
    "finish:s*p": 142,
    'data.question:"what is test-3?"': 2,
    "boundary:tool": 2,
    "label:*": 0,
}
"""What is typed, and how many samples it finds."""

WRONG = {
    "rewrd<1": "rewrd: no such column, reward part or field of the tasks; did you mean reward?",
    "http://x": 'To look for the text, write "http://x"',
    "reward<x": 'reward<x: "x" is no number',
    "finish:": "a value is missing after finish:",
    "(a": "a ( is not closed",
    "a)": "a ) has no (",
    "a AND": "AND: something is missing after it",
    "OR a": "OR: something is missing before it",
    "NOT": "NOT: something is missing after it",
    'a "b': 'a " is not closed',
}


def test_a_query_finds_what_it_says_and_what_is_wrong_with_it_is_said(browser: Browser, served: Served) -> None:
    for asked, count in QUERIES.items():
        go(browser, f"#samples?{urlencode({'q': asked})}", f"app.list.length === {count}")
        assert browser.evaluate("document.querySelector('main .bad:not([role=img])')") is None, asked
    for asked, said in WRONG.items():
        go(browser, f"#samples?{urlencode({'q': asked})}", "document.querySelector('[aria-invalid=true]')")
        assert said in text(browser), asked
    go(browser, "#samples?q=finish:stpo", "app.list.length === 0")
    assert "No sample has finish stpo; did you mean stop?" in text(browser)


def test_the_field_suggests_names_and_values(browser: Browser, served: Served) -> None:
    go(browser, "#samples")
    browser.key("/")
    browser.write("reward<1 (fin")
    for key in ("ArrowDown", "Enter"):  # finish:
        browser.key(key)
    assert browser.evaluate("[...document.querySelectorAll('[role=option] b')].map(one => one.textContent)") == [
        "finish:stop", "finish:error",
    ]  # fmt: skip
    browser.until("document.querySelector('[aria-invalid=true]')")  # what is typed was looked at: they stay open
    browser.key("ArrowDown")
    assert browser.evaluate("document.activeElement.getAttribute('aria-activedescendant')") == "suggested-0"
    browser.key("Tab")
    browser.write("OR ki")
    for key in ("ArrowDown", "Enter", "ArrowDown", "Enter"):
        browser.key(key)
    browser.write(")")
    assert browser.evaluate("document.activeElement.value") == "reward<1 (finish:stop OR kind:even )"
    browser.until("app.list.length === 78")
    browser.key("Escape")


def test_what_scanners_found_is_filtered(browser: Browser, served: Served) -> None:
    assert run(["scan", str(served.folder), "--split", "large", "--step", "2", "--scanner", "miscopied_number"]) == 0
    go(browser, "#samples", "document.querySelector('[aria-label=scanner]')")
    browser.evaluate("document.querySelector('[aria-label=scanner]').selectedIndex = 1")
    browser.evaluate("document.querySelector('[aria-label=scanner]').dispatchEvent(new Event('change'))")
    found = browser.until("app.list.length === 12 && location.hash")
    assert "scan%3Amiscopied_number" in found
    browser.key("j")
    browser.key("Enter")
    browser.until("document.querySelector('.chat')")
    assert "scan: miscopied_number" in text(browser, ".summary")


def test_columns_are_chosen_and_given_as_a_file(browser: Browser, served: Served, tmp_path: Path) -> None:
    browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    go(browser, "#samples?q=split:large step:2&cols=task,kind,part.answer", "app.list.length === 30")
    heads = browser.evaluate("[...document.querySelectorAll('[role=columnheader]')].map(one => one.innerText)")
    assert heads == ["task", "kind", "answer"]
    browser.evaluate("document.querySelector('.more').open = true")
    browser.until("document.querySelector('.ticks input')")
    browser.evaluate("[...document.querySelectorAll('.ticks label')].find(one => one.innerText === 'tool').click()")
    assert "part.answer%2Ctool" in browser.evaluate("location.hash")
    browser.evaluate("[...document.querySelectorAll('.more button')].find(one => one.innerText === 'CSV').click()")
    file = tmp_path / "samples.csv"
    for _ in range(6000):
        if file.is_file() and file.stat().st_size:  # Chromium puts an empty file there first
            break
        time.sleep(0.01)
    rows = list(csv.DictReader(file.open()))
    assert len(rows) == 30
    assert rows[1]["task"] == "large-1"
    assert (rows[1]["part.answer"], rows[1]["tool"]) == ("0", "calculator")
    browser.evaluate("localStorage.removeItem('agentrl-columns')")


def press(browser: Browser, words: str, number: int = 0) -> None:
    found = f"[...document.querySelectorAll('button')].filter(one => one.innerText === {json.dumps(words)})[{number}]"
    browser.until(found)
    browser.evaluate(f"{found}.click()")


def test_notes_and_labels_are_written_found_and_taken_away(browser: Browser, served: Served) -> None:
    place = sample("eval_large_2.parquet", 1)
    go(browser, place, "document.querySelector('.chat')")
    browser.key("+")
    browser.until("document.querySelector('.said .tag')?.innerText.startsWith('good')")
    browser.evaluate("document.querySelectorAll('.say').forEach(one => one.open = true)")
    press(browser, "bad", 1)  # of its first turn
    browser.until("document.querySelector('.message .tag')")
    browser.evaluate("document.querySelector('[aria-label=\"note on turn 1\"]').focus()")
    browser.write(HOSTILE[:40] + " is copied wrongly")
    press(browser, "Write", 1)
    browser.until("document.querySelector('.message .note')")
    said = [json.loads(line) for line in (served.folder / "notes.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["value"], one.get("turn")) for one in said[:2]] == [
        ("label", "good", None), ("label", "bad", 0),
    ]  # fmt: skip
    for asked in ("label:bad", 'note:"copied wrongly"', "notes>0", "label:good NOT label:odd"):
        go(browser, f"#samples?{urlencode({'q': asked})}", "app.list.length === 1")
    write_change(served.folder, Change("label", "large-2#0", "odd", None, "eval_large_2.parquet"))  # another page did
    browser.until("app.samples.column.label.includes('odd')")
    go(browser, "#samples", "document.querySelector('[aria-label=label]')")
    go(browser, place, "document.querySelector('.message .note')")
    browser.evaluate("document.querySelector('.message .note .away').click()")
    browser.until("!document.querySelector('.message .note')")
    browser.key("+")  # takes it off again
    browser.until("!document.querySelector('.said .tag')?.innerText.startsWith('good')")
    label = "document.querySelector('[aria-label=\"label of the conversation\"]')"
    browser.evaluate(f"{label}.value = 'two words', {label}.form.requestSubmit()")
    browser.until("document.querySelector('.notes .bad')?.textContent.includes('use letters')")
    browser.errors.clear()  # the status 422


def test_a_conversation_is_searched_and_copied(browser: Browser, served: Served) -> None:
    browser.evaluate("navigator.clipboard.writeText = async (text) => { globalThis.copied = text }")
    go(browser, sample("eval_large_2.parquet", 3, find="3-2"), "document.querySelectorAll('mark').length === 1")
    assert "1 of 1" in text(browser)
    folder = served.folder
    for words, copied in (
        ("Copy: agentrl replay", f"agentrl replay {folder} --id 'large-3#0'"),
        ("Copy: agentrl why", f"agentrl why {folder} --split large --step 2"),
    ):
        press(browser, words)
        browser.until(f"globalThis.copied === {json.dumps(copied)}")
    browser.evaluate("document.querySelector('details.more').open = true")
    browser.until("document.querySelector('.more .data')?.innerText.includes('globalThis.owned=1')")
    browser.evaluate("document.querySelectorAll('.say').forEach(one => one.open = true)")
    press(browser, "Copy: continue from here", 1)
    browser.until(f"globalThis.copied === \"agentrl continue {folder} --id 'large-3#0' --turn 1 -n 4\"")
    press(browser, "Copy Markdown")
    told = browser.until("globalThis.copied.startsWith('# ') && globalThis.copied")
    assert "## tool calculator\n\n```\n1\n```" in told
    go(browser, sample("eval_test_2.parquet", 31, way="tree", find="left"), "document.querySelector('mark')")
    assert browser.evaluate("document.querySelector('mark').closest('details').open")
    press(browser, "Copy link")
    link = browser.until("globalThis.copied.startsWith('http') && globalThis.copied")
    browser.evaluate("localStorage.clear()")  # as of another browser
    browser.open("about:blank")
    browser.open(link)
    browser.until("globalThis.app?.ready && document.querySelector('.tree')")
    assert "token" not in browser.evaluate("location.href")


def test_a_token_tells_what_is_known_of_it(browser: Browser, served: Served) -> None:
    go(browser, sample("step_2.parquet", 1, way="tokens"), "document.querySelector('.tokens')")
    browser.evaluate("document.querySelector('.tokens').focus()")
    for _ in range(7):
        browser.send("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    told = text(browser, ".facts")
    for known in ("token 6 of 12", "trained", "log-prob -2 (13.5 %)", "after 3 updates", "trainer -2.25", "0.5"):
        assert known in told
    coloured = "[...document.querySelectorAll('.tokens span')].map(token => token.style.backgroundColor !== '')"
    assert browser.evaluate(coloured) == [False] * 4 + [True] * 3 + [False] * 2 + [True] * 3


def test_the_overview_and_the_curves_say_what_is_wrong(browser: Browser, served: Served) -> None:
    go(browser, "#overview", VIEWS["#overview"])
    told = text(browser)
    for known in ("entropy collapse", HOSTILE[:40], "recipe.resumed_1.yaml", "train.steps", "54.5 %"):
        assert known in told
    go(browser, "#curves?q=entropy", "document.querySelector('.healthy')")
    assert "outside of its healthy range" in text(browser)
    browser.until("Object.keys(app.meanings.metrics).length")
    browser.evaluate("document.querySelector('.term').click()")
    told = text(browser, ".meaning")
    for known in ("entropy of the sampled tokens", "at least 0.6", "agentrl/learner/actor.py:", "entropy collapse"):
        assert known in told
    browser.evaluate("document.querySelector('.term').click()")
    assert browser.evaluate("document.querySelector('.meaning').hidden")


def test_a_conversation_says_what_each_message_took(browser: Browser, served: Served) -> None:
    go(browser, sample("step_2.parquet", 1), "document.querySelector('.chat')")
    told = text(browser, ".chat")
    for known in ("3 tokens · 48.0 % a token · advantage 0.5", "tool calculator 2 ms", "step reward 0.5"):
        assert known in told


def test_the_errors_page_leads_to_an_example(browser: Browser, served: Served) -> None:
    go(browser, "#errors", "document.querySelector('.examples a')")
    told = text(browser)
    for known in (
        "5 of 10 samples are unsolved",
        "7 of 10 (70.0 %)",
        "a number copied wrongly",
        "a slow call",
        "a phrase that it says",
        "what a scanner found",
        "a change of its workspace",
        "+20.0 points",
        '"22/15"',
    ):
        assert known in told
    browser.evaluate("document.querySelector('.examples a').click()")
    browser.until("document.querySelector('.chat')")
    assert "task large-1" in text(browser, "h1")


def test_a_run_that_goes_on_is_followed(browser: Browser, served: Served) -> None:
    go(browser, "#curves?q=reward", "document.querySelector('.slot svg')")
    groups = [group(*(trajectory("train-new", s, s % 2) for s in range(4)))]
    journal(served.folder).step(3, groups, learned(groups))
    with (served.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/mean": 0.625}\n{"step": 4, "rew')
    browser.until("document.querySelector('.slot .legend b')?.textContent === '0.625'")
    go(browser, "#samples?split=train", "app.list.length === 20")
    browser.until("app.samples.count === 148")
    assert browser.evaluate("app.samples.column.step[app.list[0]]") == 3
    assert browser.errors == []


def test_names_that_are_no_words_are_typed_in_quotes(browser: Browser, tmp_path: Path) -> None:
    """Names of fields and of reward parts are anybody's, also those of columns and of other names for these."""
    groups = []
    for n in range(6):
        data = {"question type": "a trip" if n % 2 else 'a "b"', "length": n % 3, "step": n < 2, "3d:": n > 0}
        one = replace(trajectory(f"t{n}"), task=Task(f"t{n}", data), rewards={"format/strict": n / 10})
        groups.append(group(one))
    journal(tmp_path).evaluation("test", 0, groups, lambda t: t.reward > 0)
    one = Served(tmp_path)
    browser.open(one.address)
    browser.until(READY)
    for asked, count in (
        ('"question type":"a trip"', 3), ("part.format/strict<0.2", 2), ('"part.format/strict"<0.2', 2),
        ("data.length=2", 2), ("length=12", 6), ('"3d:":false', 1),
        ('NOT "3d:":false "question type":"a *b*"', 2),
    ):  # fmt: skip
        go(browser, f"#samples?{urlencode({'q': asked})}", f"app.list.length === {count}")
        assert browser.evaluate("document.querySelector('main .bad:not([role=img])')") is None, asked
    field = "document.querySelector('[aria-label=\"task field\"]')"
    go(browser, "#samples", field)
    values = browser.evaluate(f"[...{field}.options].map((one) => [one.value, one.textContent])")
    assert len(values) == 1 + 2 + 3 + 2 + 2
    for value, shown in values[1:]:
        browser.evaluate(f"{field}.value = {json.dumps(value)}, {field}.dispatchEvent(new Event('change'))")
        assert browser.evaluate(f"{field}.value") == value
        assert 0 < browser.evaluate("app.list.length") < 6, shown
    go(browser, "#samples?sort=-data.length&cols=task,data.length", "app.list.length === 6")
    assert browser.evaluate("app.list.map((i) => app.samples.data(i).length)") == [2, 2, 1, 1, 0, 0]
    go(browser, "#samples", "app.list.length === 6")
    browser.key("/")
    browser.write("typ")
    for key in ("ArrowDown", "Enter", "ArrowDown", "ArrowDown", "Enter"):
        browser.key(key)
    assert browser.evaluate("document.activeElement.value") == '"question type":"a trip" '
    browser.until("app.list.length === 3")
    browser.evaluate("localStorage.removeItem('agentrl-columns')")
    one.close()


def test_a_curve_stands_over_steps_tokens_time_or_cost_with_its_interval(browser: Browser, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", tasks=2)
    spent = {"rollout/tokens": 100, "time/step_s": 1800}
    rows = [
        {"step": 0, "eval/test/accuracy": 0.5, "eval/test/accuracy_low": 0.25, "eval/test/accuracy_high": 0.75},
        *({"step": step, "reward/mean": step / 4, **spent} for step in (1, 2, 3)),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = Served(folder)
    browser.open(one.address)
    browser.until(READY)
    go(browser, "#curves?q=test/accuracy", "document.querySelectorAll('.slot circle').length === 1")
    assert browser.evaluate("document.querySelectorAll('.slot .band').length") == 1
    assert browser.evaluate("document.querySelectorAll('.slot').length") == 1  # its bounds are no curves of their own
    for axis, ends in (("tokens", ["300"]), ("time", ["90"]), ("cost&price=4", ["6"])):
        go(browser, f"#curves?q=reward/mean&axis={axis}", "document.querySelector('.slot svg')")
        assert browser.evaluate("[...document.querySelectorAll('.slot text')].at(-1).textContent") in ends, axis
    go(browser, "#overview", "document.querySelector('.card')")
    assert "after" not in text(browser, ".card")  # nothing was evaluated after training
    assert "before" in text(browser, ".card")
    one.close()


def test_a_folder_of_runs_is_a_list_that_leads_to_them(browser: Browser, tmp_path: Path) -> None:
    for name, rate in (("one", 0.1), ("two", 0.2)):
        folder = run_folder(tmp_path / name, tasks=4)
        (folder / "recipe.yaml").write_text(f"model: {{path: tiny}}\ntrain: {{steps: 2, lr: {rate}}}\n")
        (folder / "recipe.resumed_1.yaml").unlink()
    (tmp_path / "broken" / "metrics.jsonl").mkdir(parents=True)
    one = Served(tmp_path)
    browser.errors.clear()
    browser.open(one.address)
    browser.until("document.querySelectorAll('.runs .room .row').length === 3")
    told = text(browser)
    for known in ("3 of 3 runs", "finished", "broken", "cannot be read", "lr", "0.2", "75.0 %"):
        assert known in told
    browser.key("/")
    browser.write("train.lr=0.2")
    browser.until("document.querySelectorAll('.runs .room .row').length === 1")
    browser.key("Escape")
    browser.key("Escape")
    browser.until("document.querySelectorAll('.runs .room .row').length === 3")
    browser.evaluate("document.querySelectorAll('.runs .room input').forEach((one) => one.click())")
    browser.evaluate(
        "[...document.querySelectorAll('.links a')].find((a) => a.textContent.startsWith('curves')).click()"
    )
    browser.until("document.querySelector('.slot svg')")
    assert browser.evaluate("app.names") == ["two", "one", "broken"]
    (tmp_path / "one" / "run.log").write_text(f"first line\n{HOSTILE}\n".encode("utf-8", "replace").decode())
    go(browser, "#log?run=1", "document.querySelector('.log').textContent.includes('first line')")
    with (tmp_path / "one" / "run.log").open("a") as file:
        file.write("another line\n")
    browser.until("document.querySelector('.log').textContent.includes('another line')")
    assert browser.evaluate("globalThis.owned") is None
    assert faults(browser, {"#overview": "document.querySelector('.beside')"}) == []
    browser.key("1")
    browser.until("document.querySelector('.runs .room a')")
    browser.evaluate("[...document.querySelectorAll('.runs a')].find((a) => a.textContent === 'one').click()")
    browser.until("app.name === 'overview' && app.ready && document.querySelector('.card')")
    assert browser.evaluate("app.names") == ["one"]
    go(browser, "#samples", "app.ready && app.list.length > 0")
    made = run_folder(tmp_path / "three", tasks=4)
    browser.key("1")
    browser.until("document.querySelectorAll('.runs .room .row').length === 4")
    assert made.name in text(browser)
    assert [line for line in browser.errors if "422" not in line] == []  # the broken one is refused
    one.close()


def test_rewards_have_intervals_in_the_list_of_runs_and_side_by_side(browser: Browser, tmp_path: Path) -> None:
    for name, reward in (("a", 2.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        bounds = {"eval/test/reward_low": reward - 0.5, "eval/test/reward_high": reward + 0.5}
        rows = [
            {"step": 0, "eval/test/accuracy": 0.25, "eval/test/reward/mean": 1.0, "start/test/accuracy": 0.0,
             "start/test/reward": 0.5},
            {"step": 1, "eval/test/accuracy": 0.5, "eval/test/reward/mean": reward, **bounds},
        ]  # fmt: skip
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = Served(tmp_path)
    browser.open(one.address)
    browser.until("document.querySelectorAll('.runs .room .row').length === 2")
    go(
        browser,
        "#runs?figure=eval/test/reward/mean",
        "document.querySelector('.runs').innerText.includes('1.5 to 2.5')",
    )
    go(browser, "#overview?runs=a%0Ab", "document.querySelector('.beside td b')")
    told = " ".join(text(browser, ".beside").split())
    for known in ("test, accuracy 0.0 % → 50.0 %", "test, reward 0.5 → 2 1.5 to 2.5 0.5 → 3 2.5 to 3.5"):
        assert known in told
    fits = "[...document.querySelectorAll('.card')].every((one) => one.scrollWidth <= one.clientWidth)"
    assert browser.evaluate(fits)
    one.close()


def test_the_frozen_page_shows_the_same_without_a_server(browser: Browser, tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path / "run"), "first", {"train/entropy": (0.6, None)}, why)
    browser.errors.clear()
    browser.open(page.as_uri())
    browser.until(READY)
    kept = len(embedded(page)["runs"][0]["samples"])
    assert faults(browser, VIEWS) == []
    go(browser, "#samples?q=owned AND tool:calculator", "app.list.length === 2")
    go(browser, sample("step_2.parquet", 1), "document.querySelector('details.more')")
    browser.evaluate("document.querySelector('details.more').open = true")
    browser.until("document.querySelector('.more .data')")
    assert browser.evaluate("document.querySelector('.say, textarea')") is None  # nothing can be written there
    go(browser, "#samples", f"app.list.length === {kept}")
    assert browser.errors == []
    assert browser.evaluate("globalThis.owned") is None


def test_the_frozen_page_shows_pictures(browser: Browser, tmp_path: Path) -> None:
    key = "1" * 64
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / f"{key}.png").write_bytes(file_of(picture(1, 40, 30)))
    parts = [{"type": "image", "image": key}] * 2
    seen = trajectory("t", messages=({"role": "user", "content": parts}, {"role": "assistant", "content": "a"}))
    journal(tmp_path).evaluation("test", 0, [group(seen)], lambda t: True)
    page = write_report(tmp_path, "run")
    browser.errors.clear()
    browser.open(page.as_uri())
    browser.until(READY)
    go(browser, sample("eval_test_0.parquet", 0), "document.querySelectorAll('.chat img').length === 2")
    browser.until("[...document.querySelectorAll('.chat img')].every((one) => one.naturalWidth === 40)")
    assert browser.errors == []


def test_the_samples_of_a_group_are_aligned_where_they_differ(browser: Browser, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    said = ("#### 1", "#### 2", "#### 1")
    samples = [trajectory("t", number, said=answer) for number, answer in enumerate(said)]
    journal(folder).step(3, [group(*samples)], learned([group(*samples)]))
    other = Served(folder)
    browser.open(other.address)
    browser.until(READY)
    go(browser, "#side?run=0&file=step_3.parquet&row=0", "document.querySelectorAll('.column').length === 3")
    assert "They differ first in message 4, turn 2 of the model." in text(browser)
    marks = "[...document.querySelectorAll('.column')].map(one => one.querySelectorAll('.leaves').length)"
    assert browser.evaluate(marks) == [0, 1, 0]
    tops = browser.evaluate("[...document.querySelectorAll('.cell')].map(one => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    go(browser, "#side?run=0&file=step_2.parquet&row=0", "document.querySelectorAll('.column').length === 4")
    assert "All 4 say the same." in text(browser)
    other.close()


def test_the_time_line_of_a_step_has_its_parts_and_what_plugins_named(browser: Browser, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    named = (Span("engine", 1e9 + 1, 1e9 + 3), Span("lookup <b>", 1e9 + 2, 1e9 + 3))
    groups = [group(trajectory("t", spans=named))]
    journal(folder).step(3, groups, learned(groups))
    spans = [["rollout", 0, 3], ["update", 3, 7], ["evaluation test", 8, 10], ["mine", 4, 5]]
    wrong = ["?", ["a", None, 1], [1, 2, 3]]
    placed = [[name, 1e9 + start, 1e9 + end] for name, start, end in spans]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "time/spans": [*placed, *wrong]}) + "\n")
    other = Served(folder)
    browser.errors.clear()
    browser.open(other.address)
    browser.until(READY)
    go(browser, "#time?of=0%0Astep_3.parquet", "document.querySelectorAll('.lane i').length === 7")
    lanes = browser.evaluate("[...document.querySelectorAll('.lane b')].map(one => one.innerText)")
    assert lanes == ["rollout", "update", "evaluation test", "mine"]
    bars = "[...document.querySelectorAll('.lane i')].map(one => [one.className, one.style.left, one.style.width])"
    assert browser.evaluate(bars) == [
        ["phase", "0%", "30%"], ["phase", "30%", "40%"], ["phase", "80%", "20%"], ["named", "40%", "10%"],
        ["waiting", "10%", "20%"], ["engine", "10%", "20%"], ["named", "20%", "10%"],
    ]  # fmt: skip
    assert "lookup <b> 1 s" in text(browser)
    assert browser.errors == []
    other.close()


def test_seeds_of_a_recipe_are_drawn_as_their_mean(browser: Browser, tmp_path: Path) -> None:
    for name, rate, seed, values in (
        ("a", 0.1, 0, (0.2, 0.4, 0.9)), ("b", 0.1, 1, (0.4, 0.8)), ("c", 0.2, 0, (0.1, 0.2, 0.3)),
    ):  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        recipe = f"model: {{path: tiny}}\ntrain: {{steps: 3, lr: {rate}, seed: {seed}}}\noutput: {name}\n"
        (folder / "recipe.yaml").write_text(recipe)
        rows = [{"step": step, "reward/mean": value, "time/step_s": 2.0} for step, value in enumerate(values, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = Served(tmp_path)
    browser.open(one.address)
    browser.until("document.querySelectorAll('.runs .room .row').length === 3")
    runs = "runs=a%0Ab%0Ac"
    go(browser, f"#curves?{runs}&q=reward/mean", "document.querySelectorAll('.slot path.line').length === 3")
    assert browser.evaluate("document.querySelectorAll('.slot path.band').length") == 0
    pick = (
        "const s = document.querySelector('[aria-label=seeds]'); s.value = 'mean'; s.dispatchEvent(new Event('change'))"
    )
    browser.evaluate(pick)
    browser.until("document.querySelectorAll('.slot path.line').length === 2")
    assert browser.evaluate("document.querySelectorAll('.slot path.band').length") == 1
    assert "seeds=mean" in browser.evaluate("location.hash")
    label = browser.evaluate("document.querySelector('.slot svg').getAttribute('aria-label')")
    # The seed that is longer counts as far as the other one goes.
    assert label == "reward/mean: train.lr=0.1, mean of 2 seeds 0.6, c 0.3"
    assert "from the lowest to the highest seed" in text(browser, ".view")
    go(browser, f"#curves?{runs}&q=reward/mean&seeds=mean&axis=time", "document.querySelector('.slot path.band')")
    assert faults(browser, {f"#curves?{runs}&seeds=mean": "document.querySelector('.slot path.band')"}) == []
    go(browser, "#curves?runs=a%0Ac&q=reward/mean", "document.querySelectorAll('.slot path.line').length === 2")
    browser.until("document.querySelector('[aria-label=seeds]').closest('label').hidden")
    assert not browser.errors
    one.close()


def test_what_a_sample_changed_in_its_workspace_is_shown(browser: Browser, tmp_path: Path) -> None:
    changes = [["modified", HOSTILE[:40], 4096], ["deleted", "/home/user/old", 0]]
    kept = {"changes": changes, "more": True, "diff": "--- a/n\n+++ b/n\n@@ -1,2 +1,2 @@\n one\n-<b>2\n+two\n"}
    groups = [group(trajectory("test-1", extra={"workspace": kept})), group(trajectory("test-2"))]
    journal(tmp_path).evaluation("test", 0, groups, lambda t: t.reward > 0)
    one = Served(tmp_path)
    browser.open(one.address)
    browser.until(READY)
    go(browser, sample("eval_test_0.parquet", 0), "document.querySelector('section.workspace')")
    told = text(browser, ".workspace").splitlines()
    assert told[0] == "Workspace: 2 or more files changed"
    assert told[1:3] == [f"modified {HOSTILE[:40]} 4,096 bytes", "deleted /home/user/old"]
    lines = "[...document.querySelectorAll('.diff span')].map((line) => [line.className, line.textContent.trimEnd()])"
    assert browser.evaluate(lines)[3:6] == [["", " one"], ["removed", "-<b>2"], ["added", "+two"]]
    go(browser, sample("eval_test_0.parquet", 1), "document.querySelector('.chat')")
    assert browser.evaluate("document.querySelector('section.workspace')") is None
    assert browser.evaluate("globalThis.owned") is None
    assert browser.errors == []
    one.close()
