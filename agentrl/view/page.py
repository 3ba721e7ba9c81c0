"""`report.html`: a run's charts and some of its conversations, in one file without external resources."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from agentrl.rollout.trajectory_file import Told, conversations, read_records, stored_files
from agentrl.view.chart import Points, line_chart

SHOWN = 6  # conversations shown of each evaluation
# By `solved` of the record; None: the environment's `solved` was not called.
MARKS = {True: '<b class="good">✓</b>', False: '<b class="bad">✗</b>', None: ""}

STYLE = """
:root { color-scheme: light dark; --ink:#1c2430; --soft:#667085; --line:#d8dde6; --card:#fff; --page:#f5f7fa;
  --user:#eef2f8; --assistant:#e7f3ec; --tool:#fdf1e3; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6e9ef; --soft:#9aa4b5; --line:#343b48; --card:#1d222b;
  --page:#14181f; --user:#262d3a; --assistant:#1d3328; --tool:#3a2d1c; } }
* { box-sizing: border-box } body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui, sans-serif } main { max-width:1040px; margin:0 auto; padding:24px 16px }
h1 { font-size:24px; margin:0 0 4px } h2 { font-size:18px; margin:32px 0 8px } p { color:var(--soft); margin:0 0 12px }
.cards { display:flex; flex-wrap:wrap; gap:12px } .card { background:var(--card); border:1px solid var(--line);
  border-radius:10px; padding:12px 18px } .card b { display:block; font-size:22px } .card span { color:var(--soft) }
.figures { display:grid; grid-template-columns:repeat(auto-fit,minmax(320px,1fr)); gap:14px }
figure { margin:0; background:var(--card); border:1px solid var(--line); border-radius:10px; padding:10px 12px }
figcaption { font-weight:600 } svg { width:100%; height:auto } svg text { font-size:11px; fill:var(--soft) }
.grid { stroke:var(--line); stroke-width:1 } .legend { display:flex; flex-wrap:wrap; gap:14px; font-size:13px }
.legend i { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:5px }
details { background:var(--card); border:1px solid var(--line); border-radius:10px; margin:8px 0; padding:8px 14px }
summary { cursor:pointer } .talk { display:grid; gap:6px; padding:8px 0 }
.talk div { border-radius:8px; padding:6px 10px;
  white-space:pre-wrap; overflow-wrap:anywhere } .talk div::before { content:attr(data-role) ": "; color:var(--soft) }
.user,.system { background:var(--user) } .assistant { background:var(--assistant) } .tool { background:var(--tool) }
.good { color:#2a9d72 } .bad { color:#d64545 }
"""

FIGURES: tuple[tuple[str, tuple[tuple[str, str], ...], tuple[float, float] | None], ...] = (
    ("Reward", (("mean", "reward/mean"),), None),
    ("Tokens per second", (("sampled", "rollout/tokens_per_s"), ("trained", "train/tokens_per_s")), None),
    ("Turns per sample", (("turns", "rollout/turns_mean"),), None),
    ("Entropy of the sampled tokens (nats)", (("entropy", "train/entropy"),), None),
    ("Gradient norm", (("before clipping", "train/grad_norm"),), None),
    ("Returns explained by the critic", (("explained variance", "critic/explained_variance"),), None),
    (
        "Trainer against engine, |log-prob difference|",
        (("max", "mismatch/logprob_max"), ("mean", "mismatch/logprob_mean")),
        None,
    ),
    ("Seconds per step", (("all", "time/step_s"), ("sampling", "time/rollout_s"), ("training", "time/train_s")), None),
)


def write_report(folder: Path, title: str) -> Path:
    """Write `report.html` from a run folder's `metrics.jsonl` and `trajectories/`, if they exist; return its path."""
    metrics = folder / "metrics.jsonl"  # missing if the first evaluation was interrupted
    lines = metrics.read_text(encoding="utf-8").split("\n") if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line]
    page = folder / "report.html"
    page.write_text(render(title, rows, _evaluations(folder)), encoding="utf-8", errors="backslashreplace")
    return page


def render(
    title: str, rows: Sequence[Mapping[str, Any]], evaluations: Mapping[str, Sequence[Mapping[str, Any]]]
) -> str:
    """Return the page as HTML. rows: the lines of metrics.jsonl. evaluations: heading -> trajectory records."""
    conversations = "".join(
        f"<h2>{escape(heading)}</h2>" + "".join(_conversation(record) for record in records[:SHOWN])
        for heading, records in evaluations.items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head><body><main>'
        f"<h1>{escape(title)}</h1><p>{max((r['step'] for r in rows), default=0)} steps</p>"
        f'<div class="cards">{_cards(rows)}</div><h2>Training</h2><div class="figures">{_figures(rows)}</div>'
        f"{conversations}</main></body></html>\n"
    )


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> Points:
    return [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]


def _accuracy(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Return held-out accuracy by split, in the order of the evaluations."""
    keys = dict.fromkeys(k for row in rows for k in row if k.startswith("eval/") and k.endswith("/accuracy"))
    return {key.split("/")[1]: _series(rows, key) for key in keys}


def _cards(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(_card(split, points) for split, points in _accuracy(rows).items() if points)


def _card(split: str, points: Points) -> str:
    """Return a card with the first and last accuracy of a split, or with one if there was one evaluation."""
    (first, before), (last, after) = points[0], points[-1]
    value = f"{before:.1%} → {after:.1%}" if last > first else f"{after:.1%}"
    steps = f"steps {first} and {last}" if last > first else f"step {first}"
    return f'<div class="card"><span>{escape(split)}, held out, {steps}</span><b>{value}</b></div>'


def _figures(rows: Sequence[Mapping[str, Any]]) -> str:
    drawn = [line_chart("Held-out accuracy", _accuracy(rows), (0.0, 1.0))]
    for title, lines, bounds in FIGURES:
        drawn.append(line_chart(title, {label: _series(rows, key) for label, key in lines}, bounds))
    drawn.append(line_chart("Peak memory of each phase (GB)", _family(rows, "memory/", "_gb")))
    drawn.append(line_chart("Why samples ended", _family(rows, "stop/", "")))
    drawn.append(line_chart("Tool errors per step", _family(rows, "tool/", "/errors")))
    return "".join(drawn)


def _family(rows: Sequence[Mapping[str, Any]], prefix: str, suffix: str) -> dict[str, Points]:
    """Return the series of all keys `<prefix><label><suffix>` that are not always 0, by label."""
    keys = sorted({k for row in rows for k, v in row.items() if k.startswith(prefix) and k.endswith(suffix) and v})
    return {key.removeprefix(prefix).removesuffix(suffix): _series(rows, key) for key in keys}


def _conversation(record: Mapping[str, Any]) -> str:
    reward = record["reward"]
    question = next((_content(m) for m in record["messages"] if m["role"] == "user"), record["task"])
    mark = MARKS[record.get("solved")]
    earned = "no reward" if reward is None else f"reward {reward:g}"
    summary = f"{mark} {escape(str(question))} <span>({earned}, {escape(record['finish'])})</span>"
    talks = "".join(map(_talk, conversations(record)))
    return f"<details><summary>{summary}</summary>{talks}{_parts(record)}</details>"


def _talk(told: Told) -> str:
    bubbles = "".join(
        f'<div class="{escape(m["role"])}" data-role="{escape(m["role"])}">{escape(_text(m))}</div>'
        for m in told.messages
    )
    return (f"<p>{escape(told.heading)}</p>" if told.heading else "") + f'<div class="talk">{bubbles}</div>'


def _parts(record: Mapping[str, Any]) -> str:
    """Return what failed, the parts of the reward by name, before weighting, and the step rewards of turns."""
    failure = record.get("failure")
    given = [f"failed ({failure['boundary']}): {failure['message']}"] if failure else []
    given += [f"{name} {value:g}" for name, value in record.get("rewards", {}).items()]
    steps = [(i, turn["reward"]) for i, turn in enumerate(record.get("turns", ()), 1) if turn["reward"]]
    given += [f"turn {i} {value:+g}" for i, value in steps]
    return f"<p>{escape(' · '.join(given))}</p>" if given else ""


def _text(message: Mapping[str, Any]) -> str:
    content = _content(message)
    calls = [c["function"] for c in message.get("tool_calls") or ()]
    called = [f"→ {c['name']}({json.dumps(c['arguments'], ensure_ascii=False)})" for c in calls]
    return "\n".join([*([content] if content else []), *called])


def _content(message: Mapping[str, Any]) -> str:
    """Return the content as text; other parts, such as images, as their type and name in brackets."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else f"[{_label(part)}]" for part in content)


def _label(part: Mapping[str, Any]) -> str:
    """Return a part's type and name, such as `image: plot.png` or `image: <70 bytes>`; a data URL is truncated."""
    what = part.get(part["type"])
    return f"{part['type']}: {what[:60]}" if isinstance(what, str) else str(part["type"])


def _evaluations(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of the first and the last evaluation of each environment's leading split, by heading."""
    stored = stored_files(folder / "trajectories")
    found = {(one.split, one.step): one.path for one in stored if one.evaluation}
    splits = sorted({split for split, _ in found}, key=lambda split: (split.split(".")[-1] != "test", split))
    leading = {split.rpartition(".")[0]: split for split in reversed(splits)}  # environment of a mixture -> split
    chosen = []
    for split in reversed(leading.values()):
        steps = [step for name, step in found if name == split]
        chosen += [(split, step) for step in sorted({min(steps), max(steps)})]
    return {f"{split}, after step {step}": read_records(found[split, step]) for split, step in chosen}
