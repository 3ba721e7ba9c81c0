"""Line charts as SVG, without scripts or dependencies, readable on light and dark backgrounds."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

Points = Sequence[tuple[float, float]]
"""The (x, y) pairs of a line, in order of x."""

WIDTH, HEIGHT = 460, 220  # of the drawing, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 28  # margins
COLOURS = ("#2f6fdb", "#d9682b", "#2a9d72", "#a34fc4", "#8a8f98")


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Return about `count` round numbers from low to high, for the ticks of an axis. whole: whole numbers only."""
    if high <= low:
        return [low]
    raw = max((high - low) / count, 1.0 if whole else 0.0)
    unit = 10 ** math.floor(math.log10(raw))
    round_ones = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(m * unit for m in round_ones if m * unit >= raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(points: Points, most: int) -> Points:
    """Return at most `most` points: means of as many runs of neighbours, so that a page does not grow with a run. The
    first and the last stay as they are."""
    if len(points) <= most:
        return points
    inner, runs = points[1:-1], most - 2
    edges = [i * len(inner) // runs for i in range(runs + 1)]
    parts = [inner[a:b] for a, b in pairwise(edges)]
    means = [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
    return [points[0], *means, points[-1]]


def number(value: float) -> str:
    """Format a number as 12,300 or 0.25 or 3e-06."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.0e}"


def line_chart(title: str, series: Mapping[str, Points], bounds: tuple[float, float] | None = None) -> str:
    """Return one figure as HTML; an empty string if no point is finite. Points that are not finite are left out.

    series: label -> points. bounds: (low, high) of the y axis; None: those of the points, from 0 if none is negative.
    """
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return ""
    xs = [x for points in kept.values() for x, _ in points]
    ys = [y for points in kept.values() for _, y in points]
    low, high = bounds or (min(0.0, *ys) if min(ys) >= 0 else min(ys), max(ys))
    frame = _Frame(min(xs), max(xs), low, high if high > low else low + 1)
    parts = [frame.axes()]
    for (name, points), colour in zip(kept.items(), COLOURS * len(kept), strict=False):
        parts.append(frame.line(name, points, colour))
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)} <b>{number(points[-1][1])}</b></span>'
        for (name, points), colour in zip(kept.items(), COLOURS * len(kept), strict=False)
    )
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f'<figure><figcaption>{escape(title)}</figcaption>{drawing}<div class="legend">{legend}</div></figure>'


class _Frame:
    """Coordinate system of a chart: maps values to SVG units."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float):
        self.x0, self.x1, self.y0, self.y1 = x0, x1 if x1 > x0 else x0 + 1, y0, y1

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> str:
        parts = []
        for value in ticks(self.y0, self.y1):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
        for value in ticks(self.x0, self.x1, 6, whole=True):
            parts.append(f'<text x="{self.x(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{number(value)}</text>')
        return "".join(parts)

    def line(self, name: str, points: Points, colour: str) -> str:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in thinned(points, 2 * WIDTH))
        dots = ""
        if len(points) <= 30:
            dots = "".join(
                f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3" fill="{colour}">'
                f"<title>{escape(name)}, step {number(x)}: {number(y)}</title></circle>"
                for x, y in points
            )
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'
