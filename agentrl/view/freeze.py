"""`report.html`: the page of a run in one file, with some of its conversations, unsolved ones first, of every split."""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from agentrl.jsonable import dumps
from agentrl.plugins.types import Json
from agentrl.view.assets import MODULES, Ranges, Watched, page_file
from agentrl.view.meanings import told_of
from agentrl.view.store import RunStore, Why, column

EACH = 12
"""Samples that are kept of an evaluation, two thirds of them unsolved."""
GROUPS = 3
"""Groups that are kept of the newest training step, those whose rewards differ first."""
_MOST_OF_GROUP = 8
_ROWS = 2000  # of metrics
_TOKENS = 2_000_000  # characters of JSON of token columns, beyond which samples stand without them
_SAMPLES = 8_000_000  # characters of JSON of samples, beyond which they are left out
_COLUMNS = ("ids", "loss_mask", "logprobs", "trainer_logprobs", "advantages", "weight_version", "pieces")

_IMPORT = re.compile(r'^import \{ (.+) \} from "\./(\w+)\.js";$', re.M)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.M)


def write_report(
    folder: Path, title: str, ranges: Ranges | None = None, why: Why | None = None, watched: Watched | None = None
) -> Path:
    """Write `report.html` into a run folder, and return its path. Raises OSError.

    ranges: healthy ranges of metrics. why: says why samples are unsolved. watched: the conditions of health that
    look at metrics. A file that is damaged is a line in the page.
    """
    page = folder / "report.html"
    page.write_text(html(title, frozen(RunStore(folder, title), ranges or {}, why, watched or {})), encoding="utf-8")
    return page


def html(title: str, data: Json) -> str:
    """The page with its modules, styles and data in it. Scripts but its own do not run there."""
    script, style = bundle(), page_file("style.css").decode()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    embedded = dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "<title>agentrl</title>": f"<title>{escape(title)}</title>",
        '<link rel="stylesheet" href="style.css">': f"<style>{style}</style>",
        '<script type="module" src="app.js"></script>': (
            f'<script type="application/json" id="data">{embedded}</script>\n<script type="module">{script}</script>'
        ),
        '<meta charset="utf-8">': (
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
        ),
    }
    text = page_file("index.html").decode()
    for before, after in parts.items():
        assert before in text
        text = text.replace(before, after)
    return text


def bundle() -> str:
    """The page's modules as one, each in a function of its own."""
    return "\n".join(_as_function(name.removesuffix(".js"), page_file(name).decode()) for name in MODULES)


def _as_function(name: str, source: str) -> str:
    exported = [m[2] for m in _EXPORT.finditer(source)]
    source = _IMPORT.sub(lambda m: f"const {{ {m[1]} }} = ${m[2]};", source)
    source = _EXPORT.sub(lambda m: f"{m[1]} {m[2]}", source)
    return f"const ${name} = (() => {{\n{source}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def frozen(run: RunStore, ranges: Ranges, why: Why | None, watched: Watched) -> Json:
    """What the page's modules read in place of the server's answers."""
    state = run.state()
    evaluated = [file["name"] for file in state["files"] if file["evaluation"]]
    steps = [file["name"] for file in state["files"] if not file["evaluation"] and file["step"] >= 0]
    index = run.index([*evaluated, *steps[-1:]])
    state["files"] = [file for file in state["files"] if file["name"] in index]
    reasons = {} if why is None else _reasons(run, state["files"], why)
    chosen = _chosen(state["files"], index, reasons)
    kept = {name: rows for name, rows in chosen.items() if rows or "error" in index[name]}
    samples, left_out, images = _samples(run, kept)
    state["files"] = [file for file in state["files"] if file["name"] in kept]
    note = (
        f"This page holds {len(samples)} of the stored samples, unsolved ones first. For all of them: agentrl view RUN"
    )
    metrics = _metrics(run)
    one = {
        "state": state | {"training": False},
        "rows": _thinned(metrics["rows"]),
        "damaged": metrics["damaged"],
        "index": {name: _of_rows(index[name], rows, left_out.get(name, ())) for name, rows in kept.items()},
        "previews": {name: _some(run.previews(name), index[name], rows) for name, rows in kept.items() if rows},
        "samples": samples,
        "images": images,
        "evaluations": run.evaluations(),
        "notes": {name: said for name, said in run.notes().items() if name in kept},
        "tools": {name: run.tools(name) for name, rows in kept.items() if rows},
        "why": reasons,
    }
    about: Json = {"runs": [run.name]}
    keys = {key for row in one["rows"] for key in row}
    about |= {"follow": False, "frozen": True, "note": note, "meanings": told_of(ranges, watched, keys)}
    return {"about": about, "runs": [one]}


def _metrics(run: RunStore) -> Json:
    found = run.metrics()
    while found["more"]:
        more = run.metrics(found["next"], found["of"])
        found = more | {"rows": found["rows"] + more["rows"], "damaged": found["damaged"] + more["damaged"]}
    return found


def _thinned(rows: Sequence[Json]) -> list[Json]:
    """At most about _ROWS rows: those with an evaluation or a finding of health, and evenly spaced ones."""
    if len(rows) <= _ROWS:
        return list(rows)
    every = -(-len(rows) // (_ROWS // 2))
    marked = [i for i, row in enumerate(rows) if "health" in row or any(key.startswith("eval/") for key in row)]
    marked = marked[:: -(-len(marked) // (_ROWS // 2)) or 1]
    return [rows[i] for i in sorted({*range(0, len(rows), every), *marked, len(rows) - 1})]


def _chosen(files: Sequence[Json], index: Mapping[str, Json], reasons: Mapping[str, Json]) -> dict[str, list[int]]:
    """File -> the rows that are kept: of the first and last evaluation of each split, of the newest step.

    What `reasons` gives as examples comes first.
    """
    good = [file for file in files if "error" not in index[file["name"]]]
    found: dict[str, list[int]] = {file["name"]: [] for file in files}
    for split in dict.fromkeys(file["split"] for file in good if file["evaluation"]):
        stored = [file["name"] for file in good if file["evaluation"] and file["split"] == split]
        examples = _examples(index[stored[-1]], reasons.get(stored[-1], {}))
        last = found[stored[-1]] = _of_evaluation(index[stored[-1]], examples)
        if len(stored) > 1:
            tasks = {column(index[stored[-1]], "task")[row] for row in last}
            found[stored[0]] = _of_tasks(index[stored[0]], tasks)
    steps = [file["name"] for file in good if not file["evaluation"] and file["step"] >= 0]
    if steps:
        found[steps[-1]] = _of_step(index[steps[-1]])
    return found


def _of_evaluation(facts: Json, examples: Sequence[int]) -> list[int]:
    """The rows of samples that are not solved, those of `examples` first, then of others."""
    solved, lost = column(facts, "solved"), column(facts, "boundary")
    unsolved = sorted(
        (row for row in range(facts["rows"]) if solved[row] is not True), key=lambda row: lost[row] is None
    )
    unsolved = list(dict.fromkeys([*examples, *unsolved]))
    kept = unsolved[: EACH * 2 // 3]
    kept += [row for row in range(facts["rows"]) if solved[row] is True][: EACH - len(kept)]
    return sorted([*kept, *unsolved[EACH * 2 // 3 :][: EACH - len(kept)]])


def _of_tasks(facts: Json, tasks: set[str]) -> list[int]:
    """The row of the first sample of each of these tasks."""
    rows = {task: row for row, task in reversed(list(enumerate(column(facts, "task")))) if task in tasks}
    return sorted(rows.values())


def _examples(facts: Json, reason: Json) -> list[int]:
    """The rows of two examples of each cause."""
    rows = {pair: row for row, pair in enumerate(zip(column(facts, "task"), column(facts, "sample"), strict=True))}
    given = [one for cause in reason.get("causes", ()) for one in cause["examples"][:2]]
    return [rows[one["task"], one["sample"]] for one in given if (one["task"], one["sample"]) in rows]


def _of_step(facts: Json) -> list[int]:
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(column(facts, "group")):
        groups.setdefault(group, []).append(row)
    reward = column(facts, "reward")
    varied = sorted(groups.values(), key=lambda rows: len({reward[row] for row in rows}) < 2)
    return sorted(row for rows in varied[:GROUPS] for row in rows[:_MOST_OF_GROUP])


def _samples(
    run: RunStore, kept: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Json], dict[str, set[int]], dict[str, str]]:
    """File:row -> sample; file -> the rows that cannot be shown, or for which there is no room; and the images
    of the samples, as `_taken_out`."""
    found: dict[str, Json] = {}
    left_out: dict[str, set[int]] = {}
    images: dict[str, str] = {}
    whole = tokens = 0
    for name, rows in kept.items():
        for row, sample in zip(rows, run.samples(name, rows), strict=True):
            if sample is None:
                left_out.setdefault(name, set()).add(row)
                continue
            columns = {key: sample.pop(key) for key in _COLUMNS if key in sample}
            new = {key: url for key, url in _taken_out(sample["told"]).items() if key not in images}
            size = len(dumps(sample)) + sum(map(len, new.values()))
            more = len(dumps(columns))
            if whole + size > _SAMPLES:
                left_out.setdefault(name, set()).add(row)
                continue
            if tokens + more <= _TOKENS:
                sample |= columns
                tokens += more
            images |= new
            whole += size
            found[f"{name}:{row}"] = sample
    return found, left_out, images


def _taken_out(told: Sequence[Json]) -> dict[str, str]:
    """Put into the messages the hash of each image in place of its `data:` URL, so that the page holds one that stands
    in many messages once. Returns hash -> URL."""
    found: dict[str, str] = {}
    for conversation in told:
        for message in conversation["messages"]:
            content = message.get("content")
            for at, part in enumerate(content if isinstance(content, list) else ()):
                url = _url(part)
                if url is not None:
                    key = hashlib.sha256(url.encode()).hexdigest()
                    found[key] = url
                    content[at] = {"type": "image_url", "image_url": {"kept": key}}
    return found


def _url(part: Json) -> str | None:
    """The `data:` URL of a part; None: it has none."""
    held = part.get("image_url", part.get("image")) if isinstance(part, Mapping) else None
    url = held.get("url") if isinstance(held, Mapping) else held
    return url if isinstance(url, str) and url.startswith("data:") else None


def _of_rows(facts: Json, rows: Sequence[int], without: Iterable[int]) -> Json:
    """An index of these rows alone; `at` names them."""
    if "error" in facts:
        return facts
    rows = [row for row in rows if row not in set(without)]
    tasks = {column(facts, "task")[row] for row in rows}

    def kept(values: Json) -> Json:
        return [values[row] for row in rows] if isinstance(values, list) else values

    columns = {key: kept(values) for key, values in facts.items()}
    columns["parts"] = {name: kept(values) for name, values in facts["parts"].items()}
    return columns | {"at": rows, "tasks": {task: facts["tasks"].get(task, {}) for task in tasks}}


def _some(previews: Mapping[str, Json], facts: Json, rows: Iterable[int]) -> Json:
    tasks = {column(facts, "task")[row] for row in rows}
    return {task: previews[task] for task in sorted(tasks) if task in previews}


def _reasons(run: RunStore, files: Sequence[Json], why: Why) -> Json:
    newest = {file["split"]: file["name"] for file in files if file["step"] >= 0}
    found = {name: run.why(name, why) for name in newest.values()}
    return {name: one for name, one in found.items() if "error" not in one}
