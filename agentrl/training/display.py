"""What a person sees while a run goes on, and at its end. On a terminal it is live; elsewhere it is a line a step."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from time import monotonic
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agentrl.errors import UserError
from agentrl.eval.result import Accuracy
from agentrl.recipe.secrets import masked_text
from agentrl.terminal import terminal

SPARKS = "▁▂▃▄▅▆▇█"
WIDTH = 48  # of a curve, in characters


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """A curve in block characters; long ones are averaged down to WIDTH columns."""
    if not values:
        return ""
    columns = min(len(values), WIDTH)
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    span = (high - low) or 1.0
    return "".join(SPARKS[min(len(SPARKS) - 1, max(0, int((m - low) / span * len(SPARKS))))] for m in means)


def clock(seconds: float) -> str:
    """1:05, or 2:01:05."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _with_interval(accuracy: Accuracy) -> str:
    value, _, interval = str(accuracy).partition(" ")
    return f"[bold]{value}[/bold] {interval}".rstrip()


class Display:
    """Shows step, reward, held-out accuracy, tokens a second and the time left."""

    def __init__(self, steps: int, title: str, console: Console | None = None, first_step: int = 0):
        self.console = console or terminal()
        self.steps, self.title, self.first_step = steps, title, first_step
        self.rewards: list[float] = []
        self.accuracies: list[float] = []
        self._began = monotonic()
        self.latest: dict[str, float] = {}
        self._phase = ""
        self._over = False
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

    def _print(self, shown: Any, **how: Any) -> None:
        """Raises UserError, once: whoever reads it has gone, or what it is written to takes no more."""
        try:
            self.console.print(shown, **how)
        except (OSError, SystemExit) as error:  # an exit is what rich makes of a pipe that nobody reads
            self.console.quiet = True
            why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
            if not self._over:
                raise UserError(f"stdout was closed, so nobody sees what the run says{why}") from None

    def over(self) -> None:
        """The run has ended: from here on nothing is lost if nobody reads what is said."""
        self._over = True

    def note(self, text: str) -> None:
        """A line that stays."""
        self._print(masked_text(text), highlight=False, markup=False, soft_wrap=True)

    def phase(self, name: str) -> None:
        """What goes on right now (loading, sampling, training, evaluating)."""
        self._phase = name

    def begin(self) -> None:
        """The first step begins now: the time left is counted from here."""
        self._began = monotonic()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.latest = dict(metrics)
        self.rewards.append(metrics["reward/mean"])
        self._progress.update(self._bar, completed=step)
        if not self.console.is_terminal:
            self._print(self._line(step, metrics), highlight=False, soft_wrap=True)

    def evaluation(self, step: int, found: Mapping[str, Accuracy], followed: str | None) -> None:
        """found: by split. followed: the one whose curve is drawn."""
        if followed is not None and followed in found:
            self.accuracies.append(found[followed].value)
        shown = "  ".join(f"{split} {accuracy.value:.1%}" for split, accuracy in found.items())
        self.note(f"step {step:>4}  held-out accuracy: {shown}")

    def time_left(self, step: int) -> float | None:
        """Seconds, from the mean of the steps so far; None before the first."""
        done = step - self.first_step
        return (monotonic() - self._began) / done * (self.steps - step) if done > 0 else None

    def _line(self, step: int, metrics: Mapping[str, Any]) -> str:
        left = self.time_left(step)
        return (
            f"step {step:>4}/{self.steps}  reward {metrics['reward/mean']:.3f}  "
            f"{metrics['rollout/tokens_per_s']:,.0f} sampled tokens/s  {metrics['time/step_s']:.2f} s"
            + (f"  {clock(left)} left" if left is not None else "")
        )

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        step = self.first_step + len(self.rewards)
        if self.rewards:
            table.add_row("reward", f"{self.rewards[-1]:.3f}", Text(sparkline(self.rewards), style="green"))
        if self.accuracies:
            table.add_row(
                "held-out accuracy", f"{self.accuracies[-1]:.1%}", Text(sparkline(self.accuracies), style="cyan")
            )
        if self.latest:
            speed = f"{self.latest['rollout/tokens_per_s']:,.0f}"
            table.add_row("sampled tokens/s", speed, f"{self.latest['time/step_s']:.2f} s a step")
        left = self.time_left(step)
        table.add_row("time left", clock(left) if left is not None else "…", Text(self._phase, style="dim"))
        return Group(self._progress, table)

    def final(self, rows: Sequence[tuple[str, Accuracy, Accuracy]], folder: str, seconds: float) -> None:
        """The table at the end: (split, accuracy before, accuracy after), with intervals, and where the run lies."""
        caption = "in brackets: 95 % intervals, by tasks"
        table = Table(title=escape(self.title), title_justify="left", caption=caption, caption_justify="left")
        for column in ("held-out split", "before", "after"):
            table.add_column(column, justify="left" if column == "held-out split" else "right")
        for split, before, after in rows:
            table.add_row(escape(split), *map(_with_interval, (before, after)))
        self._print(table)
        if self.rewards:
            self._print(f"reward {sparkline(self.rewards)}  {self.rewards[0]:.2f} → {self.rewards[-1]:.2f}")
        self._print(f"{clock(seconds)} in all. The run lies in [bold]{escape(folder)}[/bold]", highlight=False)
