"""Measure the page of a run of 50,000 trajectories in Chromium.

    python benchmarks/view.py [--files 196] [--samples 256]

196 steps of 256 samples, about 300 tokens each (14 different files, each 14 times). Times are those of the page's own
clock, from what somebody does to the frame in which its result is drawn. Needs Chromium on the PATH.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.plugins.types import Task
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.journal import Journal
from agentrl.trajectory import FinishReason, Group, Learned, ToolUse, Trajectory, Turn
from agentrl.view.catalog import Catalog
from agentrl.view.server import Shown, serve

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from browser import Browser

DIFFERENT = 14  # files
GROUP = 8  # samples of a task
LENGTH, PROMPT = 300, 80  # tokens
WORDS = "the number of apples that she bought on Monday is three times as large as what was left over"
SERVERS: list[Any] = []  # a task that nobody holds is collected
DRAWN = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))"


def trajectory(rng: np.random.Generator, task: Task, sample: int) -> Trajectory:
    """A sample of three turns with two calls."""
    mask = np.zeros(LENGTH, np.uint8)
    turns = tuple(Turn(start, start + 40) for start in (PROMPT, PROMPT + 70, PROMPT + 140))
    for turn in turns:
        mask[turn.start : turn.end] = 1
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.data["question"]}]
    for _ in range(2):
        call = {
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": f"{rng.integers(99)}+1"}},
        }
        messages += [{"role": "assistant", "content": said(rng, 20), "tool_calls": [call]}]
        messages += [{"role": "tool", "name": "calculator", "content": str(rng.integers(999))}]
    messages += [{"role": "assistant", "content": said(rng, 60)}]
    error = "model: not a number" if rng.random() < 0.1 else None
    seconds = {"total": float(rng.gamma(4)), "engine": 0.6, "tools": 0.1, "environment": 0.0, "hooks": 0.01}
    return Trajectory(
        request_id=f"{task.id}#{sample}", task=task, sample=sample, ids=rng.integers(0, 512, LENGTH, np.int32),
        loss_mask=mask, logprobs=-rng.exponential(0.3, LENGTH).astype(np.float32) * mask,
        weight_version=np.where(mask, 1, -1).astype(np.int32), prompt_length=PROMPT, turns=turns,
        messages=tuple(messages), rewards={"answer": float(rng.integers(2))},
        finish=FinishReason.STOP if rng.random() < 0.9 else FinishReason.LENGTH,
        tool_uses=(ToolUse("calculator", 0, 0.01), ToolUse("calculator", 1, 0.01, error)),
        seconds=seconds, tools=("calculator",), seed=sample,
    )  # fmt: skip


def said(rng: np.random.Generator, words: int) -> str:
    """Some words."""
    return " ".join(rng.choice(WORDS.split(), words))


def make(folder: Path, files: int, samples: int) -> None:
    """Write a run's folder."""
    (folder / "trajectories").mkdir(parents=True)
    journal = Journal(TrajectoriesSection(keep=0), lambda: folder / "trajectories")
    rng = np.random.default_rng(0)
    for step in range(1, files + 1):
        path = folder / "trajectories" / f"step_{step}.parquet"
        if step > DIFFERENT:
            shutil.copy(path.with_name(f"step_{(step - 1) % DIFFERENT + 1}.parquet"), path)
            continue
        tasks = [
            Task(f"train-{step}-{i}", {"question": said(rng, 40), "kind": f"kind {i % 12}", "answer": i})
            for i in range(samples // GROUP)
        ]
        groups = [Group(task, tuple(trajectory(rng, task, i) for i in range(GROUP)), ()) for task in tasks]
        learned = [
            Learned(True, (t.reward - 0.5) * t.loss_mask.astype(np.float32), t.logprobs)
            for g in groups
            for t in g.trajectories
        ]
        journal.step(step, groups, learned)
    rows = [
        {"step": s, **{f"group{k % 6}/metric{k}": float(rng.random()) for k in range(60)}} for s in range(1, files + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text("model: {path: tiny}\n")


def served(folder: Path) -> str:
    """Serve a run in a thread, and return the page's address."""
    loop, told, addresses = asyncio.new_event_loop(), threading.Event(), []

    def tell(address: str) -> None:
        addresses.append(address)
        told.set()

    threading.Thread(target=loop.run_forever, daemon=True).start()
    SERVERS.append(asyncio.run_coroutine_threadsafe(serve(Shown(Catalog([folder])), 0, tell), loop))
    told.wait()
    return addresses[0]


def timed(browser: Browser, action: str, until: str = "true") -> float:
    """The milliseconds from an action to the frame in which a condition holds."""
    script = f"""(async () => {{
        const start = performance.now();
        {action};
        for (;;) {{ await {DRAWN}; if ({until}) return performance.now() - start; }}
    }})()"""
    return float(browser.evaluate(script))


def smoothness(browser: Browser) -> tuple[float, float]:
    """Scroll through all rows in 120 frames; return the median and the longest frame, in milliseconds."""
    script = """(async () => {
        const list = document.querySelector('.long'), frames = [];
        const frame = () => new Promise(done => requestAnimationFrame(done));
        let before = await frame();
        for (let k = 1; k <= 120; k++) {
            list.scrollTop = (k / 120) * list.scrollHeight;
            const now = await frame();
            frames.push(now - before);
            before = now;
        }
        frames.sort((a, b) => a - b);
        return [frames[60], frames[119]];
    })()"""
    middle, longest = browser.evaluate(script)
    return middle, longest


def measure(browser: Browser, address: str, count: int) -> list[tuple[str, float]]:
    """What was done, and the milliseconds that it took."""
    browser.look()
    start = time.perf_counter()
    browser.open(address)
    browser.evaluate("location.hash = 'samples'")
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    found = [("first paint", float(browser.until(paint)))]
    browser.until("document.querySelector('.row .prompt')")
    found.append(("first rows of the table", float(browser.evaluate("performance.now()"))))
    browser.until(f"globalThis.app && app.ready && app.samples.count === {count}", 120)
    found.append((f"all {count:,} rows", 1000 * (time.perf_counter() - start)))
    browser.open("about:blank")
    browser.open(address)
    browser.evaluate("location.hash = 'samples'")
    browser.until(f"globalThis.app && app.ready && app.samples.count === {count}", 120)
    found.append(("all rows again (the server's memory)", float(browser.evaluate("performance.now()"))))
    pick = "const s = document.querySelector('[aria-label={}]'); s.value = '{}'; s.dispatchEvent(new Event('change'))"
    fewer = f"app.list.length < {count}"
    found.append(("filter: finish", timed(browser, pick.format("finish", "length"), fewer)))
    found.append(("no filter again", timed(browser, pick.format("finish", ""), f"app.list.length === {count}")))
    field = pick.format('"task field"', 'kind:\\"kind 3\\"')
    found.append(("filter: a field of the task", timed(browser, field, fewer)))
    browser.evaluate("[...document.querySelectorAll('button')].find(b => b.textContent === 'Clear').click()")
    by = "document.querySelector('[aria-label=\"sort by {}\"]').click()"
    found.append(("sort by tokens", timed(browser, by.format("tokens"))))
    found.append(("sort by time", timed(browser, by.format("time"))))
    middle, longest = smoothness(browser)
    found += [("scroll through all rows: median frame", middle), ("longest frame", longest)]
    asks = "const q = document.querySelector('.wide input'); q.value = {}; q.dispatchEvent(new Event('input'))"
    query = "'reward<1 AND (finish:length OR tokens>400) NOT kind:k*3'"
    found.append(("filter: a query, 200 ms after it is typed", timed(browser, asks.format(query), fewer)))
    for what, text in (("search a text in all conversations", "left over"), ("search another", "9+1")):
        found.append((what, timed(browser, asks.format(f"'\"{text}\"'"), f"app.texts.has('{text}')")))
    chat, tokens = (f"document.querySelector('.{kind}')" for kind in ("chat", "tokens"))
    found.append(("open a conversation", timed(browser, "location.hash = app.linkOf(9)", chat)))
    found.append(
        (
            "its tokens",
            timed(browser, "document.querySelectorAll('[aria-label=\"shown as\"] button')[1].click()", tokens),
        )
    )
    assert not browser.errors, browser.errors
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=196, help="steps")
    parser.add_argument("--samples", type=int, default=256, help="samples of a step")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("needs Chromium on the PATH")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = str(Path(scratch) / "cache")
        folder = Path(scratch) / "run"
        make(folder, arguments.files, arguments.samples)
        size = sum(path.stat().st_size for path in (folder / "trajectories").iterdir())
        browser = Browser(chromium, Path(scratch) / "browser")
        found = measure(browser, served(folder), arguments.files * arguments.samples)
        browser.close()
    count = arguments.files * arguments.samples
    print(f"{count:,} trajectories in {arguments.files} files of {size / 1e6:.0f} MB in all\n")
    for name, milliseconds in found:
        print(f"{name:42}{milliseconds:10.0f} ms")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the server's thread is not waited for
