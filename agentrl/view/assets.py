"""The files of the page, which the server serves and `report.html` holds."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

Ranges = Mapping[str, tuple[float | None, float | None]]
"""Name of a metric -> its healthy low and high; None where it has no such bound."""
Watched = Mapping[str, Sequence[str]]
"""Name of a metric -> names of the conditions of health that look at it."""

MODULES = (
    "dom.js", "data.js", "chart.js", "curves.js", "runs.js", "overview.js", "query.js", "samples.js", "notes.js",
    "copies.js", "sample.js", "side.js", "time.js", "errors.js", "log.js", "app.js",
)  # fmt: skip
"""The page's modules, each after those that it imports."""


@cache
def page_file(name: str) -> bytes:
    """A file of the page."""
    return (files("agentrl.view") / "page" / name).read_bytes()
