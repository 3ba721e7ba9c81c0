"""A chart: its numbers, and the picture of it, in which their print is too small to be read without a closer look."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

Kind = Literal["bars", "lines", "pie"]
KINDS: tuple[Kind, ...] = ("bars", "lines", "pie")
Mark = tuple[int, int]
"""A series and a label, by their indices."""
Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in percent of the picture."""

WIDTH, HEIGHT = 1344, 1008
"""Pixels of a drawn chart, before it is made smaller."""
_TOPICS = {
    "Visitors": ("Oslo", "Lima", "Rome", "Cairo", "Delhi", "Quito", "Seoul", "Tunis"),
    "Books sold": ("Poems", "Crime", "Travel", "Cooking", "History", "Comics", "Drama", "Science"),
    "Trees planted": ("Oak", "Pine", "Birch", "Maple", "Cedar", "Willow", "Ash", "Elm"),
    "Hours of work": ("Anna", "Bela", "Chen", "Dora", "Emil", "Fatma", "Goran", "Hana"),
}
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_COLORS = ("#4472c4", "#ed7d31", "#70ad47", "#a64d79", "#bf9000", "#3c9d9b", "#7f7f7f")
_INK, _GRID, _PAPER = "#202020", "#d0d0d0", "#ffffff"
_LEFT, _TOP, _RIGHT, _BOTTOM = 110, 150, WIDTH - 50, HEIGHT - 110  # of the plot
_SMALL, _LARGE = 22, 46  # heights of print, in pixels
_MIDDLE, _RADIUS = (430, 570), 340  # of a pie


@dataclass(frozen=True, slots=True)
class Chart:
    """What a chart shows: a number for each series and label."""

    kind: Kind
    """How it is drawn."""
    title: str
    """What it is about."""
    labels: tuple[str, ...]
    """What the numbers of a series are of."""
    series: tuple[str, ...]
    """Names of lines; elsewhere there is one series, the title."""
    values: tuple[tuple[int, ...], ...]
    """Numbers from 5 to 99, by series and label; those of a pie add up to 100."""

    @classmethod
    def draft(cls, rng: Random) -> "Chart":
        """A chart; no two numbers of a series, or of a label, are the same."""
        kind = rng.choice(KINDS)
        title = rng.choice(sorted(_TOPICS))
        if kind == "lines":
            first, count = rng.randrange(6), rng.randint(5, 7)
            series = tuple(rng.sample(_TOPICS[title], 2))
            above = tuple(rng.sample(range(10, 95), count))
            below = tuple(rng.sample([n for n in range(10, 95) if n not in above], count))
            return cls(kind, title, _MONTHS[first : first + count], series, (above, below))
        labels = tuple(rng.sample(_TOPICS[title], rng.randint(4, 7) if kind == "bars" else rng.randint(3, 5)))
        numbers = _shares(rng, len(labels)) if kind == "pie" else tuple(rng.sample(range(10, 99), len(labels)))
        return cls(kind, title, labels, (title,), (numbers,))

    def value(self, mark: Mark) -> int:
        """The number of a mark."""
        return self.values[mark[0]][mark[1]]

    def box(self, mark: Mark) -> Box:
        """A part of the picture in which the number of a mark stands."""
        x, y = _place(self, mark)
        left, top = (round(100 * at / size) - half for at, size, half in ((x, WIDTH, 10), (y, HEIGHT, 8)))
        left, top = max(0, min(left, 80)), max(0, min(top, 84))
        return left, top, left + 20, top + 16

    def picture(self) -> "Image":
        """Draw it, at its full size."""
        return _drawn(self)


def _shares(rng: Random, count: int) -> tuple[int, ...]:
    """Numbers of at least 5, all different, that add up to 100."""
    while True:
        cuts = sorted(rng.sample(range(5, 96), count - 1))
        shares = tuple(b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True))
        if min(shares) >= 5 and len(set(shares)) == count:
            return shares


def _height(value: float) -> float:
    """Where a number lies on the plot, in pixels from the top."""
    return _BOTTOM - (_BOTTOM - _TOP) * value / 100


def _column(chart: Chart, index: int) -> float:
    return _LEFT + (_RIGHT - _LEFT) * (index + 0.5) / len(chart.labels)


def _slices(chart: Chart) -> Iterator[tuple[float, float]]:
    """Yield where each slice of a pie begins and ends, in degrees."""
    at = -90.0
    for value in chart.values[0]:
        yield at, at + 3.6 * value
        at += 3.6 * value


def _place(chart: Chart, mark: Mark) -> tuple[float, float]:
    """The middle of the print of a number: over a bar, beyond a point, in a slice."""
    index = mark[1]
    if chart.kind == "pie":
        begin, end = list(_slices(chart))[index]
        angle = math.radians((begin + end) / 2)
        return _MIDDLE[0] + 0.8 * _RADIUS * math.cos(angle), _MIDDLE[1] + 0.8 * _RADIUS * math.sin(angle)
    value = chart.value(mark)
    upper = chart.kind == "bars" or value == max(line[index] for line in chart.values)
    return _column(chart, index), _height(value) + (-24 if upper else 24)


@lru_cache(16)  # 4 MB each
def _drawn(chart: Chart) -> "Image":
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WIDTH, HEIGHT), _PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((WIDTH / 2, 60), chart.title, _INK, font=_font(60), anchor="mm")
    if chart.kind == "pie":
        _draw_pie(draw, chart)
    else:
        _draw_axes(draw, chart)
        (_draw_bars if chart.kind == "bars" else _draw_lines)(draw, chart)
    for series in range(len(chart.series)):
        for index in range(len(chart.labels)):
            _draw_number(draw, chart, (series, index))
    return image


def _draw_number(draw: "ImageDraw", chart: Chart, mark: Mark) -> None:
    place, font = _place(chart, mark), _font(_SMALL)
    if chart.kind == "pie":
        draw.text(place, f"{chart.value(mark)}%", _PAPER, font=font, anchor="mm")
    else:  # on a white ground, since lines may run there
        draw.text(place, str(chart.value(mark)), _INK, font=font, anchor="mm", stroke_width=4, stroke_fill=_PAPER)


@lru_cache
def _font(size: int) -> "ImageFont | FreeTypeFont":
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _draw_axes(draw: "ImageDraw", chart: Chart) -> None:
    for value in range(0, 101, 20):
        draw.line((_LEFT, _height(value), _RIGHT, _height(value)), _GRID, 3)
        draw.text((_LEFT - 16, _height(value)), str(value), _INK, font=_font(_SMALL), anchor="rm")
    for index, label in enumerate(chart.labels):
        draw.text((_column(chart, index), _BOTTOM + 44), label, _INK, font=_font(_LARGE), anchor="mm")


def _draw_bars(draw: "ImageDraw", chart: Chart) -> None:
    half = 0.32 * (_RIGHT - _LEFT) / len(chart.labels)
    for index, value in enumerate(chart.values[0]):
        x = _column(chart, index)
        draw.rectangle((x - half, _height(value), x + half, _BOTTOM), _COLORS[0])


def _draw_lines(draw: "ImageDraw", chart: Chart) -> None:
    for series, (name, values) in enumerate(zip(chart.series, chart.values, strict=True)):
        points = [(_column(chart, index), _height(value)) for index, value in enumerate(values)]
        draw.line(points, _COLORS[series], 8, joint="curve")
        for x, y in points:
            draw.ellipse((x - 9, y - 9, x + 9, y + 9), _COLORS[series])
        _draw_key(draw, (_LEFT + 60 + 500 * series, 118), _COLORS[series], name)


def _draw_pie(draw: "ImageDraw", chart: Chart) -> None:
    (x, y), r = _MIDDLE, _RADIUS
    for index, (begin, end) in enumerate(_slices(chart)):
        draw.pieslice((x - r, y - r, x + r, y + r), begin, end, _COLORS[index], _PAPER, 4)
        _draw_key(draw, (880, 330 + 110 * index), _COLORS[index], chart.labels[index])


def _draw_key(draw: "ImageDraw", at: tuple[int, int], color: str, name: str) -> None:
    x, y = at
    draw.rectangle((x, y - 20, x + 40, y + 20), color)
    draw.text((x + 60, y), name, _INK, font=_font(_LARGE), anchor="lm")
