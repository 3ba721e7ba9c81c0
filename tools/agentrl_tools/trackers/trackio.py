"""trackio: local, or in a Space of the Hugging Face hub."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.plugins.types import Json
from agentrl_tools.extras import package
from agentrl_tools.trackers.shared import TableTracker


class Trackio(TableTracker):
    """Logs to trackio, which `trackio show` shows; a resumed run goes on under its name.

    project, group: as `trackio.init` takes them. name: that of the run; default: the name of its folder. space: a Space
    of the hub, else it stays on this machine. folder: where its database lies (TRACKIO_DIR); default: trackio's own.
    tags: noted in the configuration.
    """

    def __init__(
        self,
        project: str = "agentrl",
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        space: str | None = None,
        folder: str | None = None,
    ) -> None:
        if folder is not None:
            os.environ["TRACKIO_DIR"] = str(Path(folder).resolve())  # it reads this when it is imported
        self._package = package("trackio", "trackio")
        self._name, self._tags = name, list(tags)
        self._given = {"project": project, "group": group, "space_id": space}

    def start(self, folder: Path, recipe: Mapping[str, Json]) -> None:
        """Begin a run there, with the recipe as its configuration."""
        self._run = self._package.init(
            name=self._name or folder.name,
            config={"tags": self._tags, **recipe},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **self._given,
        )
