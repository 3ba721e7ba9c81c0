"""`Subject`: what checks look at: a recipe, its model and its engine, each made when a check first asks for it."""

import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.containment.event_loop import Runner
from agentrl.models.load import find_device, load_model, resolve_types
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.recipe.sections.eval import EvalSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.track import ProfileSection, TrackSection

if TYPE_CHECKING:  # what is heavy is imported by what needs it
    import torch

    from agentrl.rollout.player import Player

T = TypeVar("T")
TASKS, SAMPLES, TURN_TOKENS = 2, 4, 128
"""Of the step that is tried, at most."""


class Subject:
    """recipe: as it is to be run. folder: where checks write; all checks of an examination share it."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = resolve_types(recipe), folder
        self.version = 0
        """The version of the last weights that the engine was given."""
        self._model: Any = None
        self._player: Player | None = None
        self._runner: Runner | None = None

    @property
    def device(self) -> "torch.device":
        """Of the trainer. Raises UserError where it is not there."""
        found: torch.device = find_device(self.recipe.model.device)
        return found

    @property
    def half(self) -> bool:
        """Whether the trainer or a server computes in half precision."""
        return self.recipe.model.dtype != "float32" or self.recipe.model.compute == "bfloat16"

    @property
    def model(self) -> Any:
        """The recipe's model, with its adapter: the engine's where there is one. Checks leave it as it was."""
        if self._player is not None:
            return self._player.model
        if self._model is None:
            self._model, _ = load_model(self.recipe.model, self.recipe.train.seed)
        return self._model

    @property
    def player(self) -> "Player":
        """The parts that sample, the engine of the recipe among them, with one server at most."""
        if self._player is None:
            self._player = self.build(self.recipe)
        return self._player

    def build(self, recipe: Recipe) -> "Player":
        """Make a player for `recipe` in this process; the model and the player before are let go of. Whoever calls it
        for another recipe than its own closes it."""
        from agentrl.rollout.player import Player

        self.free()
        args = dict(recipe.engine.args)
        args.pop("remote_nodes", None)  # one here serves
        if "servers" in args:
            args["servers"] = 1
        alone = recipe.changed(cluster=ClusterSection(), engine={"args": args})
        return self.wait(lambda: Player.build(alone, say=print))

    def adopt(self, player: "Player") -> None:
        """Make `player` the one that checks see, until `free`."""
        self._player = player

    def wait(self, work: Callable[[], Coroutine[object, None, T]]) -> T:
        """Run it in the event loop that the engine belongs to."""
        self._runner = self._runner or Runner()
        return self._runner.run(work())

    def free(self) -> None:
        """Let go of model and engine, and of their memory."""
        import torch

        player, self._player, self._model = self._player, None, None
        if player is not None:
            for line in self.wait(player.close):
                print(line)
        del player
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free everything."""
        if self._player is not None or self._model is not None:
            self.free()
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def small(recipe: Recipe, output: Path) -> Recipe:
    """`recipe` with one step of a few short samples, written to `output`, without start, evaluation and trackers:
    what a step does is the same, and how long it takes is not."""
    limits, train = recipe.rollout, recipe.train
    fewer = {
        "tasks": min(limits.tasks, TASKS),
        "n": min(limits.n, SAMPLES),
        "max_turn_tokens": min(limits.max_turn_tokens, TURN_TOKENS),
    }
    size = fewer["tasks"] * fewer["n"]
    return recipe.changed(
        start=None, rollout=fewer, eval=EvalSection(every=0, tasks=2, splits=()),
        profile=ProfileSection(), track=TrackSection(),
        train={"steps": 1, "save_every": 0, "mini_batches": min(train.mini_batches, size)}, output=str(output),
    )  # fmt: skip


def embedded(recipe: Recipe, output: Path, device: str | None = None) -> Recipe:
    """The recipe of a small run of the shipped problems with the embedded model, on the recipe's device or
    `device`."""
    model = ModelSection(device=device or recipe.model.device)
    return small(Recipe(model=model, env={"name": "gsm8k"}, tools=({"name": "calculator"},)), output)  # type: ignore[arg-type]
