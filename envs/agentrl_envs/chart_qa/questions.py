"""Questions about a chart: their words, their answers, and how they are worked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from agentrl_tools.calculator import evaluate, written

from agentrl_envs.chart_qa.chart import Chart, Kind, Mark


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a chart, and how one finds out."""

    text: str
    """Its words."""
    answer: str
    """A number, or one of the chart's labels."""
    marks: tuple[Mark, ...]
    """Whose numbers must be read."""
    steps: tuple[str, ...] = ()
    """Operations on them, one a call of a calculator."""
    tolerance: Fraction = Fraction(0)
    """How far a number may be from the answer."""


def ask(chart: Chart, rng: Random) -> Question:
    """A question about a chart."""
    return rng.choice(_ASKED[chart.kind])(chart, rng)


def _two(chart: Chart, rng: Random) -> tuple[Mark, Mark]:
    """Two marks of a series, the larger number first."""
    series = rng.randrange(len(chart.series))
    first, second = rng.sample([(series, index) for index in range(len(chart.labels))], 2)
    return (first, second) if chart.value(first) > chart.value(second) else (second, first)


def _name(chart: Chart, mark: Mark) -> str:
    label = chart.labels[mark[1]]
    return f"{chart.series[mark[0]]} in {label}" if chart.kind == "lines" else label


def _number(chart: Chart, rng: Random) -> Question:
    mark = (rng.randrange(len(chart.series)), rng.randrange(len(chart.labels)))
    return Question(f"What number does {_name(chart, mark)} have?", str(chart.value(mark)), (mark,))


def _worked(text: str, marks: Sequence[Mark], steps: Sequence[str], tolerance: Fraction = Fraction(0)) -> Question:
    """steps: `@` stands for the result of the step before."""
    result, done = "", []
    for step in steps:
        done.append(step.replace("@", result))
        result = written(evaluate(done[-1])[0])
    return Question(text, result, tuple(marks), tuple(done), tolerance)


def _difference(chart: Chart, rng: Random) -> Question:
    more, less = _two(chart, rng)
    text = f"How much more is {_name(chart, more)} than {_name(chart, less)}?"
    return _worked(text, (more, less), (f"{chart.value(more)}-{chart.value(less)}",))


def _together(chart: Chart, rng: Random) -> Question:
    one, other = _two(chart, rng)
    text = f"How much are {_name(chart, one)} and {_name(chart, other)} together?"
    return _worked(text, (one, other), (f"{chart.value(one)}+{chart.value(other)}",))


def _percent(chart: Chart, rng: Random) -> Question:
    more, less = _two(chart, rng)
    text = f"By how many percent is {_name(chart, more)} larger than {_name(chart, less)}?"
    a, b = chart.value(more), chart.value(less)
    return _worked(text, (more, less), (f"{a}-{b}", f"@/{b}", "@*100"), Fraction(1, 2))


def _gap(chart: Chart, rng: Random) -> Question:
    index = rng.randrange(len(chart.labels))
    more, less = sorted(((0, index), (1, index)), key=chart.value, reverse=True)
    first, second = (chart.series[mark[0]] for mark in (more, less))
    text = f"How much is {first} above {second} in {chart.labels[index]}?"
    return _worked(text, (more, less), (f"{chart.value(more)}-{chart.value(less)}",))


def _extreme(chart: Chart, rng: Random) -> Question:
    series = rng.randrange(len(chart.series))
    choose, word = rng.choice(((max, "largest"), (min, "smallest")))
    marks = [(series, index) for index in range(len(chart.labels))]
    owner = f" of {chart.series[series]}" if chart.kind == "lines" else ""
    what = "month" if chart.kind == "lines" else "name"
    answer = chart.labels[choose(marks, key=chart.value)[1]]
    return Question(f"Which {what} has the {word} number{owner}?", answer, ())


_ASKED: Mapping[Kind, Sequence[Callable[[Chart, Random], Question]]] = {
    "bars": (_number, _difference, _together, _percent, _extreme),
    "lines": (_number, _difference, _gap, _percent, _extreme),
    "pie": (_number, _difference, _together, _extreme),
}
