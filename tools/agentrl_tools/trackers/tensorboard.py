"""TensorBoard: event files in the run's folder, or in one of the recipe."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Json
from agentrl_tools.extras import package
from agentrl_tools.trackers.shared import numbers, text_of


class TensorBoard(Tracker):
    """Writes event files, which `tensorboard --logdir FOLDER` shows.

    folder: holds a folder for each run; default: `tensorboard/` in the run's own. name: that of the run; default: the
    name of its folder. tags: noted beside the recipe.
    """

    def __init__(self, folder: str | None = None, name: str | None = None, tags: Sequence[str] = ()) -> None:
        package("tensorboard", "tensorboard")
        self._folder, self._name, self._tags = folder, name, tags

    def start(self, folder: Path, recipe: Mapping[str, Json]) -> None:
        """Open an event file; note the recipe."""
        place = Path(self._folder) / (self._name or folder.name) if self._folder else folder / "tensorboard"
        self._writer = package("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(place))
        text = yaml.safe_dump({"tags": list(self._tags), **recipe}, sort_keys=False, allow_unicode=True)
        self._writer.add_text("recipe", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, step: int, metrics: Mapping[str, Json]) -> None:
        """Write a scalar for each number."""
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def conversations(self, step: int, split: str, samples: Sequence[Mapping[str, Json]]) -> None:
        """Write them as texts."""
        for number, sample in enumerate(samples):
            self._writer.add_text(f"{split}/{number}", text_of(sample), step)

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()
