"""Display of a run's progress and result: live on a terminal, one line per step elsewhere."""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import monotonic, strftime
from types import MappingProxyType, TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agentrl.errors import UserError
from agentrl.eval.result import Accuracy, MeanReward
from agentrl.plugins.types import Json
from agentrl.secrets import masked_text
from agentrl.terminal import terminal

SPARKS = "▁▂▃▄▅▆▇█"
_UNLOGGED = 1000  # lines that wait for a log
_SAME = 1e-9  # between a mean reward and an accuracy that are the same figure
WIDTH = 48  # maximum width of a curve, in characters


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """A curve from `low` to `high` in block characters, averaged down to at most WIDTH columns."""
    if not values:
        return ""
    columns = min(len(values), WIDTH)
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    span = (high - low) or 1.0
    return "".join(SPARKS[min(len(SPARKS) - 1, max(0, int((m - low) / span * len(SPARKS))))] for m in means)


def _groups(metrics: Mapping[str, Json], compares: bool) -> str:
    """How many groups of those sampled are kept, and teach: where samples of a group are compared, those whose rewards
    differ."""
    varied = metrics.get("groups/varied", 0)
    total = varied + metrics.get("groups/equal", 0) + metrics.get("groups/few", 0)
    found = [f"{varied} of {total} groups teach"] if total and compares else []
    if "groups/kept" in metrics:
        kept = metrics["groups/kept"]
        found.append(f"{kept} of {kept + metrics['groups/left_out']} groups kept")
        found += [f"{metrics['groups/abandoned']} abandoned"] if metrics["groups/abandoned"] else []
    return ", ".join(found)


def _tool_errors(metrics: Mapping[str, Json]) -> str:
    """The share of the calls that ended in an error; empty where no tool was called."""
    counts = {what: sum(n for key, n in metrics.items() if _is_count(key, what)) for what in ("calls", "errors")}
    return f"tool errors {counts['errors'] / counts['calls']:.0%}" if counts["calls"] else ""


def _is_count(key: str, what: str) -> bool:
    return key.startswith("tool/") and key.endswith(f"/{what}") and key.count("/") == 2


def clock(seconds: float) -> str:
    """Format seconds as 1:05 or 2:01:05."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}" if minutes >= 60 else f"{minutes}:{s:02d}"


def _with_interval(figure: Accuracy | MeanReward | None) -> str:
    if figure is None:
        return "-"
    value, _, interval = str(figure).partition(" ")
    return f"[bold]{value}[/bold] {interval}".rstrip()


class Display:
    """Display of step, reward, held-out accuracy, tokens per second and the time left.

    steps: steps of the whole run. title: name of the run. console: default stdout. first_step: steps done before.
    """

    followed = "reward", "reward/mean", (".3f", ".2f")
    """What the curve shows: its name, its key among the metrics, and the formats of a step and of the end."""
    speed = "sampled tokens/s", "rollout/tokens_per_s"
    """The speed: its name, and its key."""
    every = 1
    """A line is printed for the first step, the last one, and those whose number this divides."""

    def __init__(self, steps: int, title: str, console: Console | None = None, first_step: int = 0):
        self.console = console or terminal()
        self.steps, self.title, self.first_step = steps, title, first_step
        self.values: list[float] = []
        """What the curve shows of each step: `followed`."""
        self.accuracies: list[float] = []
        """Held-out accuracy (0..1) of each evaluation of the split whose curve is shown."""
        self._start = monotonic()
        self._evaluating: list[tuple[float, int]] = []  # seconds of each evaluation, and its number of splits
        self._evaluated = 0.0  # seconds of those since the clock was started
        self.evaluations_left: Callable[[int], int] = lambda step: 0
        """How many splits will be evaluated after a step, those of the step left out."""
        self.compares = True
        """Whether only groups teach whose rewards differ."""
        self.latest: dict[str, float] = {}
        """Metrics of the last step."""
        self._phase = ""
        self._closed: str | None = None
        self._log: Path | None = None
        self._unlogged: list[str] = []  # lines from before there was a log
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._bar = self._progress.add_task(escape(title), total=steps, completed=first_step)
        self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def keep(self, path: Path) -> None:
        """Append every line from now on to a file, those from before first. A disk that refuses it ends that, and not
        the run."""
        self._log = path
        lines, self._unlogged = self._unlogged, []
        self._write("".join(lines))

    def log(self, text: str) -> None:
        """Write a line to the log alone."""
        line = f"{strftime('%Y-%m-%d %H:%M:%S')}  {masked_text(text)}\n"
        if self._log is not None:
            self._write(line)
        elif len(self._unlogged) < _UNLOGGED:
            self._unlogged.append(line)

    def _write(self, text: str) -> None:
        if self._log is not None and text:
            try:
                with self._log.open("a", encoding="utf-8", errors="replace") as file:
                    file.write(text)
            except OSError:
                self._log = None

    def _print(
        self,
        shown: RenderableType,
        *,
        highlight: bool | None = None,
        markup: bool | None = None,
        soft_wrap: bool = False,
    ) -> None:
        """Print, unless stdout was closed or cannot be written to, which `check` raises."""
        try:
            self.console.print(shown, highlight=highlight, markup=markup, soft_wrap=soft_wrap)
        except (OSError, SystemExit, ValueError) as error:  # rich exits when a pipe has no reader
            if isinstance(error, ValueError) and not self.console.file.closed:  # a plugin may have closed it
                raise
            self.console.quiet = True
            why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
            self._closed = f"stdout was closed, so nobody sees the progress of the run{why}"

    def check(self) -> None:
        """Raise UserError, once, if nobody sees what is shown. The run asks between steps, where nothing is lost."""
        closed, self._closed = self._closed, None
        if closed is not None:
            raise UserError(closed)

    def note(self, text: str) -> None:
        """Print a line, which stays above the live display."""
        self.log(text)
        self._print(masked_text(text), highlight=False, markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Print a line for who asked for more (`agentrl train -v`, or the logger `agentrl` at INFO)."""
        if logging.getLogger("agentrl").isEnabledFor(logging.INFO):
            self.note(text)

    def phase(self, name: str) -> None:
        """Show the current activity (loading, sampling, training, evaluating)."""
        self._phase = name

    def begin(self) -> None:
        """Start the clock from which the time left is estimated, before the first step."""
        self._start, self._evaluated = monotonic(), 0.0

    def evaluated(self, seconds: float, splits: int) -> None:
        """Take the time that an evaluation took, for the time left."""
        self._evaluating.append((seconds, splits))
        self._evaluated += seconds

    def step(self, step: int, metrics: Mapping[str, Json]) -> None:
        """Show a finished step and its metrics."""
        self.latest = dict(metrics)
        self.values.append(metrics[self.followed[1]])
        self._progress.update(self._bar, completed=step)
        self.log(self._line(step, metrics))
        if not self.console.is_terminal and (step % self.every == 0 or step in (1, self.steps)):
            self._print(self._line(step, metrics), highlight=False, soft_wrap=True)

    def evaluation(self, step: int, found: Mapping[str, Accuracy], followed: str | None) -> None:
        """Show an evaluation after `step`. found: accuracy by split. followed: the split whose curve is shown."""
        if followed is not None and followed in found:
            self.accuracies.append(found[followed].value)
        shown = "  ".join(f"{split} {accuracy.value:.1%}" for split, accuracy in found.items())
        self.note(f"step {step:>4}  held-out accuracy: {shown}")

    def time_left(self, step: int) -> float | None:
        """Estimate the seconds left after `step` from the mean durations of steps and evaluations so far; None before
        the first step."""
        done = step - self.first_step
        if done <= 0:
            return None
        steps = (monotonic() - self._start - self._evaluated) / done * (self.steps - step)
        splits = sum(count for _, count in self._evaluating)
        mean = sum(seconds for seconds, _ in self._evaluating) / splits if splits else 0.0
        return max(0.0, steps) + mean * self.evaluations_left(step)

    def _line(self, step: int, metrics: Mapping[str, Json]) -> str:
        (name, key, (form, _)), (unit, speed) = self.followed, self.speed
        return (
            f"step {step:>4}/{self.steps}  {name} {metrics[key]:{form}}  {self._more(metrics)}"
            f"{metrics[speed]:,.0f} {unit}  {metrics['time/step_s']:.2f} s"
            + (f"  {clock(left)} left" if (left := self.time_left(step)) is not None else "")
        )

    def _more(self, metrics: Mapping[str, Json]) -> str:
        """What a step's line says between its value and its speed."""
        return "".join(f"{text}  " for text in (_groups(metrics, self.compares), _tool_errors(metrics)) if text)

    def _curve(self) -> str:
        return sparkline(self.values)

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        step = self.first_step + len(self.values)
        (name, _, (form, _)), (unit, speed) = self.followed, self.speed
        if self.values:
            table.add_row(name, f"{self.values[-1]:{form}}", Text(self._curve(), style="green"))
        if self.accuracies:
            table.add_row(
                "held-out accuracy", f"{self.accuracies[-1]:.1%}", Text(sparkline(self.accuracies), style="cyan")
            )
        if self.latest:
            table.add_row(unit, f"{self.latest[speed]:,.0f}", f"{self.latest['time/step_s']:.2f} s per step")
            if more := self._more(self.latest):
                table.add_row("", more.rstrip())
        left = self.time_left(step)
        table.add_row("time left", clock(left) if left is not None else "…", Text(self._phase, style="dim"))
        return Group(self._progress, table)

    def final(
        self,
        rows: Sequence[tuple[str, Accuracy | None, Accuracy]],
        folder: str,
        seconds: float,
        untaught: Mapping[str, Accuracy] = MappingProxyType({}),
        rewards: Mapping[str, Sequence[MeanReward | None]] = MappingProxyType({}),
    ) -> None:
        """Print the result. rows: (split, accuracy before, accuracy after). seconds: duration of the whole run.
        untaught: accuracy before the recipe's `start`, by split; the accuracy before is then that after it. rewards:
        by split the mean rewards before the `start`, before and after, which are shown where they are not the
        accuracies."""
        for split, before, after in rows:
            self.log(f"{split}: held-out accuracy {'' if before is None else f'{before} before, '}{after} after")
        self.log(f"{clock(seconds)} in total")
        caption = "in brackets: 95 % confidence intervals over tasks"
        table = Table(title=escape(self.title), title_justify="left", caption=caption, caption_justify="left")
        for column in ("held-out split", "before", *(["after the start"] if untaught else []), "after"):
            table.add_column(column, justify="left" if column == "held-out split" else "right")
        for split, before, after in rows:
            found, means = (untaught.get(split), before, after), rewards.get(split, ())
            table.add_row(escape(split), *map(_with_interval, found[0 if untaught else 1 :]))
            both = zip(found, means, strict=False)
            if any(one and mean and abs(one.value - mean.value) > _SAME for one, mean in both):
                table.add_row("  mean reward", *map(_with_interval, means[0 if untaught else 1 :]))
        if rows:
            self._print(table)
        if self.values:
            first, last = (f"{value:{self.followed[2][1]}}" for value in (self.values[0], self.values[-1]))
            self._print(f"{self.followed[0]} {self._curve()}  {first} → {last}")
        self._print(f"{clock(seconds)} in total. Run folder: [bold]{escape(folder)}[/bold]", highlight=False)
