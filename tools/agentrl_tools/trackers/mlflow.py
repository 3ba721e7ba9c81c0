"""MLflow, through `mlflow-skinny`: a server, a database, or files."""

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Json
from agentrl_tools.extras import package
from agentrl_tools.trackers.shared import numbers, text_of

_AT_ONCE = 100  # of what MLflow takes in one request: 1000 metrics, 100 parameters
_LENGTH = 500  # characters of a parameter's value


class MLflow(Tracker):
    """Logs to MLflow; a resumed run goes on in the same one there, with the parameters that it began with.

    project: the experiment. name: that of the run; default: the name of its folder. tags: names, or names with values.
    uri: the tracking server, or where the files lie; default: MLFLOW_TRACKING_URI, else `mlruns/` in the run's folder.
    """

    def __init__(
        self,
        project: str = "agentrl",
        name: str | None = None,
        tags: Sequence[str] | Mapping[str, str] = (),
        uri: str | None = None,
    ) -> None:
        self._entities = package("mlflow.entities", "mlflow")
        self._project, self._name, self._uri = project, name, uri
        self._tags = dict(tags) if isinstance(tags, Mapping) else dict.fromkeys(tags, "")

    def start(self, folder: Path, recipe: Mapping[str, Json]) -> None:
        """Begin a run there, with the keys of the recipe as its parameters."""
        place = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or (folder.resolve() / "mlruns").as_uri()
        if place.startswith("file:") or "://" not in place:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # files are what it calls in maintenance mode
        self._client = package("mlflow", "mlflow").MlflowClient(tracking_uri=place)
        found = self._client.get_experiment_by_name(self._project)
        experiment = found.experiment_id if found else self._client.create_experiment(self._project)
        given = repr((self._uri, self._project, self._name)).encode()
        named = folder / "mlflow" / hashlib.sha256(given).hexdigest()[:12]  # stays with the run's folder
        run = self._previous(named, experiment)
        if run is None:
            run = self._client.create_run(experiment, run_name=self._name or folder.name, tags=self._tags)
            named.parent.mkdir(parents=True, exist_ok=True)
            named.write_text(run.info.run_id)
        self._run = run.info.run_id
        there = run.data.params  # which never change
        leaves = [(_key(key), str(value)[:_LENGTH]) for key, value in _leaves(recipe)]
        keys = [self._entities.Param(key, value) for key, value in leaves if key not in there]
        for begin in range(0, len(keys), _AT_ONCE):
            self._client.log_batch(self._run, params=keys[begin : begin + _AT_ONCE])
        self._client.log_dict(self._run, dict(recipe), "recipe.yaml")

    def _previous(self, named: Path, experiment: str) -> Any:
        """The run whose id lies at `named`, going on; None where the server has no such run."""
        if not named.is_file():
            return None
        try:
            run = self._client.get_run(named.read_text().strip())
        except package("mlflow.exceptions", "mlflow").MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if run.info.experiment_id != experiment or run.info.lifecycle_stage != "active":
            return None
        self._client.update_run(run.info.run_id, status="RUNNING")
        return run

    def log(self, step: int, metrics: Mapping[str, Json]) -> None:
        """Log the numbers of a step."""
        now = int(time.time() * 1000)
        found = [self._entities.Metric(_key(name), value, now, step) for name, value in numbers(metrics).items()]
        for begin in range(0, len(found), _AT_ONCE):
            self._client.log_batch(self._run, metrics=found[begin : begin + _AT_ONCE])

    def conversations(self, step: int, split: str, samples: Sequence[Mapping[str, Json]]) -> None:
        """Log them as a file."""
        text = "\n\n---\n\n".join(map(text_of, samples))
        self._client.log_text(self._run, text, f"conversations/{_key(split).replace('/', '_')}_{step}.md")

    def finish(self) -> None:
        """End the run there."""
        self._client.set_terminated(self._run)


def _key(name: str) -> str:
    """A name with what MLflow does not take replaced."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]


def _leaves(value: Json, key: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the dotted keys of a recipe, and their values."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, item in items:
        if isinstance(item, Mapping | list | tuple) and item:
            yield from _leaves(item, f"{key}{name}.")
        else:
            yield f"{key}{name}", item
