"""Weights & Biases, through its own package."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from agentrl.plugins.types import Json
from agentrl_tools.extras import package
from agentrl_tools.trackers.shared import TableTracker


class WeightsAndBiases(TableTracker):
    """Logs to Weights & Biases; a resumed run goes on in the same one there.

    project, entity, group, tags, notes: as `wandb.init` takes them. name: that of the run; default: the name of its
    folder. mode: `online`, `offline` (for `wandb sync` later), or as WANDB_MODE says. folder: where its files lie;
    default: the run's.
    """

    def __init__(
        self,
        project: str = "agentrl",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        mode: str | None = None,
        folder: str | None = None,
    ) -> None:
        self._package = package("wandb", "wandb")
        self._name, self._folder = name, folder
        self._given = {"project": project, "entity": entity, "group": group, "notes": notes, "mode": mode}
        self._tags = list(tags)

    def start(self, folder: Path, recipe: Mapping[str, Json]) -> None:
        """Begin a run there, with the recipe as its configuration."""
        place = Path(self._folder) if self._folder else folder
        named = folder / "wandb" / "run_id"  # stays with the run's folder
        if not named.is_file():
            named.parent.mkdir(parents=True, exist_ok=True)
            named.write_text(uuid4().hex[:12])
        self._run = self._package.init(
            id=named.read_text().strip(),
            resume="allow",
            name=self._name or folder.name,
            dir=str(place),
            tags=self._tags,
            config=dict(recipe),
            settings=self._package.Settings(silent=True, console="off"),
            **self._given,
        )
