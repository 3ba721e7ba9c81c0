"""`Subject`: what checks look at: a recipe, its model and its engine, each made when a check first asks for it."""

import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.containment.event_loop import Runner
from agentrl.errors import UserError
from agentrl.models.load import find_device, load_model, resolve_types
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.recipe.sections.eval import EvalSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.track import ProfileSection, TrackSection

if TYPE_CHECKING:  # what is heavy is imported by what needs it
    import torch

    from agentrl.distributed.remote import RayRoles
    from agentrl.doctor.trainer import Trainer
    from agentrl.engine.base import Engine
    from agentrl.rollout.player import Player

T = TypeVar("T")
TASKS, SAMPLES, TURN_TOKENS = 2, 4, 128
"""Of the step that is tried, at most."""
LAYERS = 2
"""Layers of a model that no process has as a whole."""


class Subject:
    """recipe: as it is to be run. folder: where checks write; all checks of an examination share it."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = resolve_types(recipe), folder
        self.version = 0
        """The version of the last weights that the engine was given."""
        self._model: Any = None
        self._player: Player | None = None
        self._roles: RayRoles | None = None
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
        if self._player is not None and not self.apart:
            return self._player.model
        if self._model is None:
            section = first_layers(self.recipe.model) if self.apart else self.recipe.model
            self._model, _ = load_model(section, self.recipe.train.seed)
        return self._model

    @property
    def apart(self) -> bool:
        """Whether the recipe trains in workers. Then nobody has the whole model, and checks of how it computes look at
        its first layers."""
        return self.recipe.cluster.used

    @property
    def trainer(self) -> "Trainer":
        """Who has the weights that the engine is to have."""
        from agentrl.doctor.trainer import HereTrainer, WorkersTrainer

        player = self.player
        return WorkersTrainer(self.roles) if self.apart else HereTrainer(player.model)

    @property
    def roles(self) -> "RayRoles":
        """The recipe's roles on its workers."""
        if self._roles is None:
            from agentrl.distributed.remote import RayRoles
            from agentrl.training.preflight import placement_of

            if (trainer := self.recipe.cluster.trainer) is not None:
                raise UserError(f"cluster.trainer: doctor tries our own trainers, not {trainer.name}; leave it out")
            recipe = self._alone(self.recipe).changed(rollout={"temperature": 1.0})  # that of log-probs
            logs = self.folder / "run" / "logs"
            self._roles = RayRoles(recipe, recipe, logs, print, print, placement_of(recipe))
        return self._roles

    @property
    def player(self) -> "Player":
        """The parts that sample, the engine of the recipe among them, with one server at most."""
        if self._player is None:
            self._player = self.build(self.recipe)
        return self._player

    def build(self, recipe: Recipe) -> "Player":
        """Make a player for `recipe` in this process; the model and the player before are let go of. Whoever calls it
        for another recipe than its own closes it."""
        from agentrl.doctor.trainer import WorkersTrainer
        from agentrl.rollout.player import Player
        from agentrl.training.preflight import placement_of

        self.free(workers=False)
        alone = self._alone(recipe)
        if not self.apart:
            return self.wait(lambda: Player.build(alone, say=print))
        placement = placement_of(alone)
        player = self.wait(lambda: Player.build(alone, say=print, trained_elsewhere=True, placement=placement))
        try:
            self.publish(player.engine, WorkersTrainer(self.roles))
        except BaseException:
            self.wait(player.close)
            raise
        return player

    def _alone(self, recipe: Recipe) -> Recipe:
        """`recipe` with one server: one of those on other machines, where the workers are apart too. The embedded
        engine samples in this process, whose memory is looked at."""
        from agentrl.engine.servers.launch import plain_flags

        args = dict(recipe.engine.args)
        if args.pop("remote_nodes", 0) and self.apart:
            args["remote_nodes"] = plain_flags(args.get("flags") or {}).get("nnodes", 1)
        args |= {"servers": 1} if "servers" in args else {}
        args |= {"processes": 1} if recipe.engine.name == "local" else {}
        return recipe.changed(engine={"args": args}, **({} if self.apart else {"cluster": ClusterSection()}))

    def publish(self, engine: "Engine", trainer: "Trainer") -> float:
        """Give the engine the trainer's weights, and wake it; return the seconds that the update took."""
        self.version += 1
        began = perf_counter()
        self.wait(lambda: engine.update_weights(self.version, trainer.weights()))
        seconds = perf_counter() - began
        self.wait(engine.wake)
        return seconds

    def rest(self, engine: "Engine") -> None:
        """Have an engine that shares the workers' GPUs give its memory back, as in a run, until the next `publish`."""
        if self.apart and self.recipe.engine.sleep:
            self.wait(engine.sleep)

    def adopt(self, player: "Player") -> None:
        """Make `player` the one that checks see, until `free`."""
        self._player = player

    def wait(self, work: Callable[[], Coroutine[object, None, T]]) -> T:
        """Run it in the event loop that the engine belongs to."""
        self._runner = self._runner or Runner()
        return self._runner.run(work())

    def free(self, workers: bool = True) -> None:
        """Let go of model and engine, and of their memory; and of the workers."""
        import torch

        player, self._player, self._model = self._player, None, None
        if player is not None:
            for line in self.wait(player.close):
                print(line)
        del player
        if workers and self._roles is not None:
            roles, self._roles = self._roles, None
            roles.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free everything."""
        if (self._player, self._model, self._roles) != (None, None, None):
            self.free()
        if self._runner is not None:
            self._runner.close()
            self._runner = None


def first_layers(section: ModelSection) -> ModelSection:
    """The model with its first `LAYERS` layers alone; as it is where it has no more."""
    from agentrl.models.shape import read_config

    config = read_config(section, fetch=True)
    text = config.get_text_config() if config is not None else None
    if text is None or text.num_hidden_layers <= LAYERS:
        return section
    kinds = {"layer_types": list(text.layer_types[:LAYERS])} if getattr(text, "layer_types", None) else {}
    fewer = {**section.config, "num_hidden_layers": LAYERS, **kinds}
    return section.model_copy(update={"config": fewer})


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
