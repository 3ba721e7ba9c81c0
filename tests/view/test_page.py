import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.plugins.types import Task
from agentrl.recipe.schema import TrajectoriesSection
from agentrl.rollout.journal import Journal
from agentrl.trajectory import Boundary, Failure, FinishReason, Group, Segment, Trajectory
from agentrl.view.chart import line_chart, thinned, ticks
from agentrl.view.page import write_report

RECORD = {
    "task": "test/1",
    "reward": 1.0,
    "finish": "stop",
    "messages": [
        {"role": "user", "content": "Is 2 < 3 & <script>alert(1)</script>?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": "3-2"}}}],
        },
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "#### 1"},
    ],
}


def run_folder(path: Path) -> Path:
    rows = [{"step": 0, "eval/test/accuracy": 0.25}]
    rows += [{"step": s, "reward/mean": s / 10, "stop/stop": 8, "stop/error": 0} for s in range(1, 11)]
    rows[-1]["eval/test/accuracy"] = 0.9375
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "trajectories").mkdir()
    for step in (0, 10):
        (path / "trajectories" / f"eval_test_{step}.jsonl").write_text(json.dumps(RECORD) + "\n")
    return path


def test_the_page_shows_what_the_run_wrote_and_escapes_what_the_model_said(tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path), "job-001").read_text()
    assert "25.0% → 93.8%" in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "→ calculator({&quot;expression&quot;: &quot;3-2&quot;})" in page
    assert page.index("test, after step 0") < page.index("test, after step 10")


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 1000, 12_345])
def test_a_line_has_no_more_points_than_it_can_show(count: int) -> None:
    points = [(float(step), 3.0 * step) for step in range(count)]
    found = thinned(points, 10)
    assert len(found) == min(count, 10)
    assert (found[0], found[-1]) == (points[0], points[-1])
    assert all(y == pytest.approx(3 * x) for x, y in found)
    drawn = line_chart("Reward", {"mean": points})
    assert len(drawn) < 20_000


def test_a_mark_is_the_word_of_the_environment_not_the_sign_of_the_reward(tmp_path: Path) -> None:
    for solved, marks in ((True, (1, 0)), (False, (0, 1)), (None, (0, 0))):
        folder = tmp_path / str(solved)
        folder.mkdir()
        for path in (run_folder(folder) / "trajectories").iterdir():
            path.write_text(json.dumps(RECORD | {"solved": solved}) + "\n")
        page = write_report(folder, "job-001").read_text()
        assert (page.count("✓"), page.count("✗")) == (2 * marks[0], 2 * marks[1])


def test_images_reward_parts_and_step_rewards_can_be_read(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "image", "image": "<70 bytes>"}]
    changed = RECORD | {
        "messages": [{"role": "user", "content": parts}, *RECORD["messages"][1:]],
        "rewards": {"answer": 1.0, "brevity": -0.25},
        "turns": [{"reward": 0.0}, {"reward": 0.5}],
    }
    (run_folder(tmp_path) / "trajectories" / "eval_test_10.jsonl").write_text(json.dumps(changed) + "\n")
    page = write_report(tmp_path, "job-001").read_text()
    assert "Look:\n[image: &lt;70 bytes&gt;] <span>(reward 1" in page
    assert '<div class="user" data-role="user">Look:\n[image: &lt;70 bytes&gt;]</div>' in page
    assert "<p>answer 1 · brevity -0.25 · turn 2 +0.5</p>" in page


def test_every_conversation_of_a_rollout_that_branched_is_shown(tmp_path: Path) -> None:
    ids, said = np.arange(6, dtype=np.int32), [{"role": "user", "content": f"{i} \ud800"} for i in range(3)]
    t = Trajectory(
        request_id="r", task=Task("t", {}), sample=0, ids=ids, loss_mask=np.zeros(6, np.uint8),
        logprobs=np.zeros(6, np.float32), weight_version=np.full(6, -1, np.int32), prompt_length=2, turns=(),
        messages=(said[0], said[2]), rewards={}, finish=FinishReason.STOP,
        segments=(Segment(0, 2), Segment(2, 4, 0), Segment(4, 6, 0)), branches=tuple((message,) for message in said),
        extra={"depths": (0, 0, 1)},
    )  # fmt: skip
    lost = replace(t, segments=(), branches=(), finish=FinishReason.ERROR, failure=Failure(Boundary.TOOL, "away"))
    folder = run_folder(tmp_path)
    journal = Journal(TrajectoriesSection(), lambda: folder / "trajectories")
    journal.evaluation("test", 10, [Group(t.task, (t,), (lost,))], lambda t: True)
    page = write_report(folder, "job-001").read_text()
    shown = page[page.index("test, after step 10") :]
    bubbles = re.findall(r'<p>([^<]*)</p>|<div class="user" data-role="user">([^<]*)', shown)
    assert [heading or text for heading, text in bubbles] == [
        "conversation 1 of 2", "0 \\ud800", "1 \\ud800",
        "conversation 2 of 2 (sub-agent), which leaves conversation 1 after message 1", "2 \\ud800",
        "0 \\ud800", "2 \\ud800", "failed (tool): away",
    ]  # fmt: skip
    assert "(no reward, error)" in page


def test_every_environment_of_a_mixture_shows_its_leading_split(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    for split in ("test", "gsm8k.large", "gsm8k.test", "text_game.test"):
        (folder / "trajectories" / f"eval_{split}_0.jsonl").write_text(json.dumps(RECORD) + "\n")
    (folder / "trajectories" / "eval_gsm8k.test_20.jsonl").write_text(json.dumps(RECORD) + "\n")
    page = write_report(folder, "job-001").read_text()
    for heading in ("gsm8k.test, after step 0", "gsm8k.test, after step 20", "text_game.test, after step 0"):
        assert f"<h2>{heading}</h2>" in page
    assert "gsm8k.large, after" not in page


def test_what_was_evaluated_once_shows_no_way_that_it_went(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[0]["eval/large/accuracy"] = 0.125
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(folder, "job-001").read_text()
    assert "<span>large, held out, step 0</span><b>12.5%</b>" in page
    first = page.index("<span>test, held out, steps 0 and 10</span><b>25.0% → 93.8%</b>")
    assert first < page.index("large, held out")  # as they were evaluated


def test_a_run_that_was_stopped_in_its_first_evaluation_has_a_page_too(tmp_path: Path) -> None:
    assert "<p>0 steps</p>" in write_report(tmp_path, "job-001").read_text()


def test_reasons_that_never_occurred_are_not_drawn(tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path), "job-001").read_text()
    assert "</i>stop <b>8</b>" in page
    assert "</i>error" not in page


def test_what_the_critic_explains_is_drawn_where_there_is_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    assert "explained variance" not in write_report(folder, "job-001").read_text()
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 11, "critic/explained_variance": 0.42}) + "\n")
    assert "</i>explained variance <b>0.42</b>" in write_report(folder, "job-001").read_text()


def test_a_chart_leaves_out_points_that_are_not_finite() -> None:
    svg = line_chart("loss", {"loss": [(0, 1.0), (1, float("nan")), (2, 3.0)], "empty": []})
    assert svg.count("<circle") == 2
    assert "nan" not in svg
    assert "empty" not in svg


def test_steps_have_no_fractions() -> None:
    assert ticks(1, 2, 6, whole=True) == [1, 2]
    assert ticks(0, 40, 6, whole=True) == [0, 10, 20, 30, 40]


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0, 130, 6) == pytest.approx([0, 25, 50, 75, 100, 125])


def test_a_browser_draws_the_page(chromium: str, tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path), "job-001")
    shot = tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'browser'}"]
    command = [chromium, *flags, "--window-size=1100,900", f"--screenshot={shot}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert shot.stat().st_size > 20_000  # a blank page of this size is far smaller
    assert done.stdout.count("<svg") >= 2
    assert done.stdout.count("<details>") == 2
