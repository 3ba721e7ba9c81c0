"""`Taught`: the model that a recipe's `start` made, and its place in the folder of the run that begins with it."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.checkpoint.checkpoints import ADAPTER
from agentrl.checkpoint.disk import write_whole
from agentrl.errors import UserError
from agentrl.eval.result import Accuracy, MeanReward
from agentrl.jsonable import dumps, loads
from agentrl.plugins.types import Json
from agentrl.recipe.schema import Recipe

FOLDER = "start"
"""In the run folder: the model before the first step."""
FILE = "start.json"
"""Beside it: what is known of how it was taught."""


@dataclass(frozen=True, slots=True)
class Taught:
    """A model that was taught before reinforcement learning."""

    folder: Path
    """Its folder, as `transformers` loads it; an adapter lies in it."""
    steps: int
    """Training steps of the stage."""
    loss: tuple[float, float]
    """Cross entropy of its first and of its last steps, in nats a token."""
    before: Mapping[str, Accuracy] = field(default_factory=dict)
    """Held-out accuracy before the stage, by split; empty where it was not evaluated."""
    rewards: Mapping[str, MeanReward] = field(default_factory=dict)
    """Mean reward before the stage, by split; empty where it was not evaluated, or by an older version."""

    @classmethod
    def read(cls, place: Path) -> "Taught":
        """What lies in a folder: the model in `start`, and its file. Raises UserError: it is not whole."""
        folder, file = place / FOLDER, place / FILE
        try:
            found = loads(file.read_text(encoding="utf-8"))
            before = {str(split): Accuracy.read(value) for split, value in found["before"].items()}
            rewards = {str(split): MeanReward(*value) for split, value in found.get("rewards", {}).items()}
            first, last = map(float, found["loss"])
            taught = cls(folder, int(found["steps"]), (first, last), before, rewards)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{file}: what `start` taught cannot be read: {error}; start a new run") from error
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: the model that the run began with is gone: start a new run")
        return taught

    def write(self, place: Path) -> None:
        """Write its file into a folder."""
        before, rewards = ({s: list(one) for s, one in found.items()} for found in (self.before, self.rewards))
        found = {"steps": self.steps, "loss": list(self.loss), "before": before, "rewards": rewards}
        write_whole(place / FILE, dumps(found, indent=1) + "\n")

    def put_into(self, place: Path) -> "Taught":
        """Put it into a run's folder, by links to the same files where the file system has them."""
        if not (place / FILE).is_file():
            shutil.rmtree(place / FOLDER, ignore_errors=True)  # of a run that was killed as it put it there
            shutil.copytree(self.folder, place / FOLDER, copy_function=_linked)
            self.write(place)
        return replace(self, folder=place / FOLDER)

    def begun(self, recipe: Recipe) -> Recipe:
        """A recipe whose model is this one; an adapter goes on in the base that it was trained on."""
        if recipe.model.lora is not None:
            return recipe.changed(model={"lora": {"start": str(self.folder / ADAPTER)}})
        return recipe.changed(model={"path": str(self.folder)})

    def metrics(self) -> dict[str, Json]:
        """The metrics start/... of the row of step 0."""
        found: dict[str, Json] = {
            "start/steps": self.steps, "start/loss_first": self.loss[0], "start/loss_last": self.loss[1]
        }  # fmt: skip
        for kind, figures in (("accuracy", self.before), ("reward", self.rewards)):
            for split, one in figures.items():
                name = f"start/{split}/{kind}"
                found |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
        return {name: value for name, value in found.items() if value is not None}


def _linked(source: str, target: str) -> None:
    """A file under another name; a copy where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
