"""Progress bars of an evaluation, on a terminal only: one bar per split, which counts tasks with all samples ended."""

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from agentrl.terminal import terminal
from agentrl.trajectory import Group


class Progress:
    """Progress bars that disappear when the evaluation ends; nothing is shown if stderr is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console = console or terminal(stderr=True)
        self._phase: TaskID | None = None
        columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=40), MofNCompleteColumn())
        self._bars = Bars(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip

    def __enter__(self) -> "Progress":
        """Show the bars."""
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        """Print a line that stays, such as the description of an engine that starts."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def phase(self, text: str) -> None:
        """Show the current activity, until `follow` is called."""
        if self._phase is None:
            self._phase = self._bars.add_task(escape(text), total=None)
        self._bars.update(self._phase, description=escape(text))

    def follow(self, split: str, tasks: int) -> Callable[[Group], None]:
        """Add a bar for a split of `tasks` tasks; return the function to call as each group ends."""
        if self._phase is not None:
            self._bars.remove_task(self._phase)
            self._phase = None
        bar = self._bars.add_task(escape(split), total=tasks)
        return lambda group: self._bars.advance(bar)
