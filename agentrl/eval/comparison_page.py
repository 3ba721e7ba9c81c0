"""A comparison as one HTML file without external resources: figures, intervals, and tasks gained and lost, whose
conversations stand side by side. All texts are escaped: tools, models and data wrote them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from agentrl.errors import UserError
from agentrl.eval.compare import Comparison, Paired, TaskPair, sentences
from agentrl.eval.show_comparison import look, words
from agentrl.eval.sides import Side
from agentrl.plugins.types import Json
from agentrl.rollout.trajectory_file import Record, Told, conversations, read_records

TASKS = 12
"""Tasks of each list whose conversations are on the page."""
LETTERS = 20_000
"""Characters of a message that are on the page."""

STYLE = """
:root { color-scheme: light dark; --ink:#1c2430; --soft:#5b6675; --line:#d8dde6; --card:#fff; --page:#f5f7fa;
  --good:#17734f; --bad:#b3261e; --mark:#2f5fd0; --user:#eef2f8; --assistant:#e7f3ec; --tool:#fdf1e3; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6e9ef; --soft:#a3adbd; --line:#343b48; --card:#1d222b;
  --page:#14181f; --good:#5fc79a; --bad:#ff8a80; --mark:#8fb0ff; --user:#262d3a; --assistant:#1d3328; --tool:#3a2d1c } }
* { box-sizing:border-box } body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,sans-serif } main { max-width:1100px; margin:0 auto; padding:20px 16px }
h1 { font-size:24px; margin:0 0 8px } h2 { font-size:19px; margin:28px 0 6px } h3 { font-size:16px; margin:16px 0 4px }
p { margin:0 0 8px } .soft { color:var(--soft) } .good { color:var(--good) } .bad { color:var(--bad) }
.scroll { overflow-x:auto } table { border-collapse:collapse; background:var(--card) }
th,td { border:1px solid var(--line); padding:4px 10px; text-align:right; white-space:nowrap }
th:first-child,td:first-child { text-align:left } svg text { fill:var(--ink) }
details { background:var(--card); border:1px solid var(--line); border-radius:8px; margin:6px 0; padding:6px 12px }
summary { cursor:pointer } code { overflow-wrap:anywhere }
.two { display:grid; grid-template-columns:1fr 1fr; gap:12px } .two > div { min-width:0 }
@media (max-width:700px) { .two { grid-template-columns:1fr } }
.told { border-radius:8px; padding:5px 9px; margin:4px 0; white-space:pre-wrap; overflow-wrap:anywhere;
  background:var(--user) } .told.assistant { background:var(--assistant) } .told.tool { background:var(--tool) }
"""


def write_page(comparison: Comparison, path: str) -> None:
    """Write the page. Raises UserError: what is stored is damaged, or the file cannot be written."""
    text = render(comparison)
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"--page {path}: cannot be written: {error.strerror}") from error


def render(comparison: Comparison) -> str:
    """The page. Raises UserError: what is stored is damaged."""
    sides = {side.letter: side for side in comparison.sides}
    title = " and ".join(side.name for side in comparison.sides)
    names = "".join(
        f"<p><b>{side.letter}</b> {escape(side.name)} <span class=soft>{escape(side.model)}</span></p>"
        for side in comparison.sides
    )
    notes = "".join(f"<p><b>{escape(note)}</b></p>" for note in comparison.notes)
    notes += "".join(f"<p class=soft>{escape(told)}</p>" for told in comparison.beside)
    parts = "".join(_part(one, sides) for one in comparison.paired)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main><h1>Comparison</h1>{names}{notes}{_drawings(comparison.paired)}{parts}</main></body></html>\n"
    )


def _drawings(paired: Sequence[Paired]) -> str:
    """A drawing for each measure that the splits are compared by."""
    measures = dict.fromkeys(one.measure for one in paired)
    return "".join(_intervals([one for one in paired if one.measure == measure]) for measure in measures)


def _intervals(paired: Sequence[Paired]) -> str:
    """A drawing of the differences of one measure with their intervals."""
    measure = paired[0].measure
    ends = [0.0, *(bound for one in paired for bound in (one.found.low, one.found.high))]
    low, high = min(ends), max(ends)
    room = (high - low) * 0.08 or 0.1
    low, high = low - room, high + room
    top, row, left, width = 8, 30, 190, 560

    def x(value: float) -> float:
        return round(left + (value - low) / (high - low) * width, 1)

    end = top + row * len(paired)
    lines = [f'<line x1="{x(0)}" x2="{x(0)}" y1="0" y2="{end}" stroke="currentColor" opacity=".4"/>']
    for number, one in enumerate(paired):
        y, d = top + row * number + 14, one.found
        value, *bounds = (measure.told(number, True) for number in (d.value, d.low, d.high))
        told = f"{value} ({bounds[0]} to {bounds[1]})"
        lines.append(
            f'<text x="0" y="{y + 4}" font-size="13">{escape(one.split[:22])}, {one.b} - {one.a}</text>'
            f'<line x1="{x(d.low)}" x2="{x(d.high)}" y1="{y}" y2="{y}" stroke="var(--mark)" stroke-width="3"/>'
            f'<circle cx="{x(d.value)}" cy="{y}" r="5" fill="var(--mark)"/>'
            f'<text x="{left + width + 8}" y="{y + 4}" font-size="13">{told}</text>'
        )
    whole, height = left + width + 190, end + 8
    return (
        f"<h2>Differences in {'points' if measure.share else escape(measure.name)}, with 95 % intervals</h2>"
        f'<div class="scroll" tabindex="0"><svg viewBox="0 0 {whole} {height}" width="{whole}" role="img" '
        f'aria-label="Differences with their intervals, as in the tables below">{"".join(lines)}</svg></div>'
    )


def _part(one: Paired, sides: Mapping[str, Side]) -> str:
    said = "".join(f"<p>{escape(line)}</p>" for line in sentences(one))
    heading = f"<h2>{escape(one.split)}, {one.b} against {one.a}</h2>"
    return (
        heading
        + said
        + _figures(one)
        + _tasks(one, one.gained, sides, better=True)
        + _tasks(one, one.lost, sides, better=False)
    )


def _figures(one: Paired) -> str:
    a, b = one.results
    rows = [("accuracy", f"{a.accuracy:.1%}", f"{b.accuracy:.1%}")]
    if one.replicated:
        told = [", ".join(one.measure.mean(mean) for mean in means) for means in one.means]
        rows.append((f"{one.measure.name} of each seed", told[0], told[1]))
    else:
        rows.append(("95 % interval", f"{a.low:.1%} to {a.high:.1%}", f"{b.low:.1%} to {b.high:.1%}"))
    rows.append(("reward", f"{a.reward:,.4g}", f"{b.reward:,.4g}"))
    if not one.replicated:
        told = [f"{side.reward_low:.4g} to {side.reward_high:.4g}" for side in one.results]
        rows.append(("its 95 % interval", told[0], told[1]))
    for name in ("samples", "failed", "turns", "tool_calls", "tool_errors", "tokens", "seconds"):
        rows.append((name.replace("_", " "), f"{getattr(a, name):,.4g}", f"{getattr(b, name):,.4g}"))
    body = "".join(f"<tr><td>{name}</td><td>{first}</td><td>{second}</td></tr>" for name, first, second in rows)
    head = f"<tr><th>{len(one.pairs):,} tasks that pair</th><th>{one.a}</th><th>{one.b}</th></tr>"
    return f'<div class="scroll" tabindex="0"><table>{head}{body}</table></div>'


def _tasks(one: Paired, pairs: Sequence[TaskPair], sides: Mapping[str, Side], better: bool) -> str:
    if not pairs:
        return ""
    shown = pairs[:TASKS]
    what = words(one.measure)[0 if better else 1].capitalize()
    found = [
        _chosen(sides[letter], one.split, {pair.task for pair in shown}, solved)
        for letter, solved in ((one.a, not better), (one.b, better))
    ]
    rest = f"<p>And {len(pairs) - len(shown):,} more: {escape(', '.join(p.task for p in pairs[TASKS:200]))}</p>"
    tasks = "".join(_task(pair, one, sides, found) for pair in shown)
    style = "good" if better else "bad"
    return f'<h3 class="{style}">{what}: {len(pairs):,}</h3>{tasks}{rest if len(pairs) > len(shown) else ""}'


def _task(pair: TaskPair, one: Paired, sides: Mapping[str, Side], found: Sequence[Mapping[str, Record]]) -> str:
    columns = "".join(
        f"<div><p><b>{letter}</b> {_told(one, right, count)}<br>"
        f"<code class=soft>{escape(look(sides[letter], one.split, pair.task))}</code></p>"
        f"{''.join(_messages(records[pair.task])) if pair.task in records else ''}</div>"
        for letter, (right, count), records in zip((one.a, one.b), (pair.a, pair.b), found, strict=True)
    )
    told = f"{escape(pair.task)}: {_told(one, *pair.a)} to {_told(one, *pair.b)}"
    return f'<details><summary>{told}</summary><div class="two">{columns}</div></details>'


def _told(one: Paired, total: float, count: int) -> str:
    """What a side has of a task."""
    return f"solves {total:g} of {count}" if one.measure.share else f"{escape(one.measure.name)} {total / count:.4g}"


def _chosen(side: Side, split: str, tasks: set[str], solved: bool) -> dict[str, Record]:
    """A sample of each task, one that is solved or not as asked where there is one."""
    found: dict[str, Record] = {}
    for record in read_records(side.files[split].path):
        task = record["task"]
        if (
            task in tasks
            and not record.get("failure")
            and (task not in found or (found[task]["solved"] != solved and record["solved"] == solved))
        ):
            found[task] = record
    return found


def _messages(record: Record) -> Iterator[str]:
    told: Told
    for told in conversations(record):
        if told.heading:
            yield f"<p class=soft>{escape(told.heading)}</p>"
        for message in told.messages:
            role = message["role"] if message["role"] in ("assistant", "tool") else "user"
            text = escape(_text(message)[:LETTERS])
            yield f'<div class="told {role}"><b class=soft>{escape(message["role"])}</b> {text}</div>'
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:g}"
    yield f"<p class=soft>{reward}, ended by {escape(str(record['finish']))}</p>"


def _text(message: Mapping[str, Json]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    lines = [text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) for text in texts if text]
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        name, given = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else ("", call)
        lines.append(f"-> {name}({given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)})")
    return "\n".join(lines)
