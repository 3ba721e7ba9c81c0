"""What the trackers share: a step's numbers, and a conversation as text or in a table."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Json


def numbers(metrics: Mapping[str, Json]) -> dict[str, float]:
    """The finite numbers of a row of metrics, without its step."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def text_of(sample: Mapping[str, Json]) -> str:
    """A conversation as Markdown; what was said stands in it as code, and so stays text."""
    lines = [f"**{_line(sample['task'])}** · reward {sample['reward']} · {_solved(sample)} · {sample['finish']}"]
    for message in sample["messages"]:
        content = message.get("content")
        parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)] if content else []
        parts += [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
        said = "\n".join(f"    {line}" for part in parts for line in part.splitlines())
        lines.append(f"{_line(message['role'])}:\n\n{said}")
    return "\n\n".join(lines)


class TableTracker(Tracker):
    """A tracker of a package whose runs have `log` and `finish`, and which has a `Table`. A subclass sets `_package` as
    it is made, and `_run` as it starts."""

    _package: Any
    _run: Any

    def log(self, step: int, metrics: Mapping[str, Json]) -> None:
        """Log the numbers of a step."""
        self._run.log(numbers(metrics), step=step)

    def conversations(self, step: int, split: str, samples: Sequence[Mapping[str, Json]]) -> None:
        """Log them as a table."""
        columns = ["task", "sample", "solved", "reward", "finish", "tool_errors", "conversation"]
        rows = [[*(sample[name] for name in columns[:-1]), text_of(sample)] for sample in samples]
        self._run.log({f"conversations/{split}": self._package.Table(columns=columns, data=rows)}, step=step)

    def finish(self) -> None:
        """Send or write down what is left."""
        self._run.finish()


def _solved(sample: Mapping[str, Json]) -> str:
    return "solved" if sample["solved"] else "unsolved"


def _line(text: str) -> str:
    return " ".join(str(text).split()).replace("*", "\\*")
