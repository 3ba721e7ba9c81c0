"""What metrics mean, by `docs/reference/metrics.md`: meaning, healthy values, remedy, and where each is computed."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from agentrl.plugins.types import Json
from agentrl.view.assets import Ranges, Watched

_PACKAGE = Path(__file__).parents[1]
_PAGE = "metrics.md"
_PLACES = ("rollout", "learner", "training", "fine_tuning", "profiling")
"""Packages that compute metrics."""
_READERS = {"monitors.py", "history.py", "display.py", "introduction.py", "trackers.py", "sweep.py", "trials.py"}
"""Modules that only read them."""
_ROLES = ("train", "critic", "imitate", "time")
"""Prefixes that are put before names which stand elsewhere."""
_ELSEWHERE = {
    "agentrl/algo/loss.py": ("train/approx_kl", "train/ratio_mean", "train/clip_fraction", "train/clip_fraction_high",
                             "train/clip_fraction_low", "train/clip_fraction_dual"),
    "agentrl/learner/actor.py": ("train/loss",),
    "agentrl/learner/critic.py": ("critic/loss",),
    "agentrl/learner/metrics.py": ("train/grad_norm", "train/lr", "critic/grad_norm", "critic/lr"),
    "agentrl/profiling/step.py": ("train/tflops", "train/mfu", "reward_model/tflops", "reward_model/mfu",
                                  "time/reward_model_s"),
    "agentrl/rollout/metrics.py": ("tool/unknown/names",),
}  # fmt: skip
"""Where metrics are computed whose names do not stand there."""
_ROW = re.compile(r"\| `([^`]+)`(?:, `([^`]+)`)? \|(.*)\|\s*$")
_CONDITION = re.compile(r"^- `(\w+)`: (.+(?:\n  .+)*)", re.MULTILINE)
_PART = re.compile(r"<[^>]*>")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@cache
def meanings() -> Mapping[str, Json]:
    """Name of a metric, perhaps with parts such as <tool> -> section, meaning, healthy, remedy and where it is
    computed. Empty where the page is not installed."""
    sources = list(_sources())
    found = {}
    for key, one in _rows(_text().splitlines()):
        own = [pair for pair in sources if ("reward_model" in pair[0]) == ("reward model" in one["section"])]
        found[key] = one | {"where": _where(key, own)}
    return found


def conditions() -> Mapping[str, str]:
    """Name of a condition of health -> what it says."""
    found = _CONDITION.findall(_text())
    return {name: _plain(" ".join(said.split())) for name, said in found}


def _text() -> str:
    shipped = _PACKAGE / "view" / _PAGE  # a wheel has it there, a checkout among its docs
    page = shipped if shipped.is_file() else _PACKAGE.parent / "docs" / "reference" / _PAGE
    try:
        return page.read_text(encoding="utf-8")
    except OSError:
        return ""


def told_of(ranges: Ranges, watched: Watched, keys: Iterable[str] | None = None) -> Json:
    """What the page reads: `ranges`, `metrics`, `watched` and `conditions`, of these metrics alone if given."""
    names = None if keys is None else set(keys)
    metrics = {
        name: one
        for name, one in meanings().items()
        if names is None or name in names or any(_is(name, key) for key in names)
    }
    there = {key: list(found) for key, found in watched.items() if names is None or key in names}
    wanted = {name for found in there.values() for name in found}
    return {
        "ranges": {name: list(bounds) for name, bounds in ranges.items()},
        "metrics": metrics,
        "watched": there,
        "conditions": {name: said for name, said in conditions().items() if name in wanted},
    }


def _is(name: str, key: str) -> bool:
    return "<" in name and re.fullmatch("[^/]+".join(map(re.escape, _PART.split(name))), key) is not None


def _rows(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Json]]]:
    section, heads, before = "", ["meaning"], ""
    for line in lines:
        if line.startswith("## "):
            section = line.removeprefix("## ").strip()
        elif line.startswith("| key |"):
            heads = [cell.strip() for cell in line.strip("| \n").split("|")][1:]
        elif m := _ROW.match(line):
            cells = dict(zip(heads, (_plain(cell) for cell in m[3].split("|")), strict=False))
            said = cells.get("meaning", "")
            before = before if said in ("as above", "the same, spread", "the same, largest") and before else said
            one = {
                "section": section,
                "meaning": said if said == before else f"{before} ({said})".replace(" (as above)", ""),
                "healthy": cells.get("healthy", ""),
                "remedy": cells.get("what to do", ""),
            }
            for key in filter(None, (m[1], m[2])):
                yield key, one


def _plain(cell: str) -> str:
    return _LINK.sub(r"\1", cell).replace("`", "").replace("\\", "").strip()


def _sources() -> Iterator[tuple[str, str]]:
    """The text of each module that computes metrics, by its path."""
    for place in _PLACES:
        for path in sorted((_PACKAGE / place).rglob("*.py")):
            if path.name not in _READERS:
                with suppress(OSError, ValueError):
                    yield path.relative_to(_PACKAGE.parent).as_posix(), path.read_text(encoding="utf-8")


def _where(key: str, sources: Sequence[tuple[str, str]]) -> str:
    """The path and line at which a metric is computed, as far as its name stands there; an empty string: nowhere."""
    for path, keys in _ELSEWHERE.items():
        if key in keys:
            return path
    for wanted in _written(key):
        for path, text in sources:
            if (at := text.find(wanted)) >= 0:
                return f"{path}:{text.count(chr(10), 0, at) + 1}"
    return ""


def _written(key: str) -> Iterator[str]:
    """How code may write a metric's name, the surest first: whole, with its last part alone, or put together."""
    pieces = _PART.split(key)
    head, _, tail = key.rpartition("/")
    base = re.sub(r"_(?:mean|std|min|max|low|high)$", "", tail)
    if len(pieces) == 1:
        yield f'"{key}"'
        yield f'"{head}/{base}"'
        yield from (f'"{key[: m.end()]}{{' for m in reversed(list(re.finditer("_", key))))
        if head not in _ROLES:
            yield f'"{head}/{{'
        for name in dict.fromkeys((tail, base)):
            yield from (f'"{name}"', f"{name}=")
    yield f'"{pieces[0]}{{'
