"""Supervised training as a run: its course through the stages, what each step learns, and the update that learns it.

The loop, the roles and the checkpoints are those of reinforcement learning. An update is that of `reinforce` with the
advantage 1 for each token: the mean cross entropy of what was said.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from random import Random
from statistics import fmean
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from agentrl.compute.batch import Batch
from agentrl.errors import UserError
from agentrl.eval.result import Accuracy
from agentrl.fine_tuning.demonstrations import Demonstrator
from agentrl.learner.learner import Learner, learned
from agentrl.learner.metrics import MicroBatchMetrics
from agentrl.learner.monitors import Finding, not_taken
from agentrl.learner.optimizer import learning_rate
from agentrl.learner.roles import Roles
from agentrl.models.shape import read_shape
from agentrl.plugins.types import Json
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection, LossSection
from agentrl.recipe.sections.env import EnvSection, RewardsSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.section import steps_of
from agentrl.recipe.sections.sft import SftStage
from agentrl.rollout.metrics import reward_metrics
from agentrl.training.display import Display, sparkline
from agentrl.training.loop import Loop
from agentrl.training.rollouts import Rollouts, StepGroups
from agentrl.trajectory import Group, Trajectory

T = TypeVar("T")

DEMONSTRATED = 1000
"""Steps of a stage of demonstrations that does not say how many."""
WARMUP = 60
"""Steps of the warm-up of such a stage."""
SMALL = 100_000_000
"""Parameters below which a model is taught as one of its own making is: by large steps."""
RATES = {"new_model": 1e-3, "small": 1e-3, "adapter": 1e-4, "model": 1e-5}
"""Learning rates of stages that do not say theirs."""
HELD_OUT = "eval/loss"
ENDS = 10
"""Steps of the end of a run whose mean loss is told; of the beginning half as many."""
LINES = 50  # of progress, where no live display can be shown
HELD_OUT_BATCH = 32  # conversations whose loss is computed at once


def size_of(recipe: Recipe) -> str:
    """What the recipe trains of `model.path`, as RATES knows it: an adapter, a small model, or a model."""
    if recipe.model.lora is not None:
        return "adapter"
    return "small" if is_small(recipe.model) else "model"


def is_small(section: ModelSection) -> bool:
    """Whether a model is known to have less than SMALL parameters."""
    shape = read_shape(section)
    return shape is not None and shape.parameters < SMALL


class Stage(SftStage):
    """A stage with every value known."""

    steps: int
    lr: float
    warmup: float


@dataclass(frozen=True, slots=True)
class Course:
    """The stages of a run, one after the other."""

    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, recipe: Recipe, conversations: int | None) -> "Course":
        """The course of a recipe. conversations: those that are learned; None: demonstrations, without end."""
        assert recipe.sft is not None
        rate = RATES["new_model" if recipe.sft.new_model is not None else size_of(recipe)]
        stages = []
        for stage in recipe.sft.stages:
            passed = DEMONSTRATED if conversations is None else math.ceil(stage.epochs * conversations / stage.batch)
            steps = stage.steps or passed
            warmup = WARMUP if conversations is None else steps // 10
            known = {"steps": steps, "lr": stage.lr or rate}
            known["warmup"] = warmup if stage.warmup is None else steps_of(stage.warmup, steps)
            stages.append(Stage(**{**stage.model_dump(), **known}))
        return cls(tuple(stages))

    @property
    def steps(self) -> int:
        """Number of steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def place(self, done: int) -> tuple[int, Stage, int]:
        """The number of the stage that follows `done` steps, that stage, and the steps of it that are done."""
        ends = list(accumulate(stage.steps for stage in self.stages))
        number = next((i for i, end in enumerate(ends) if done < end), len(ends) - 1)
        stage = self.stages[number]
        return number, stage, done - ends[number] + stage.steps


def learning_recipe(recipe: Recipe, course: Course, conversations: bool) -> Recipe:
    """The recipe that the roles and the loop have: that of the update, with the steps of the course.
    conversations: whether what is learned are no tasks of the environment."""
    algorithm = AlgorithmSection(
        loss=LossSection(name="reinforce"), off_policy="none", aggregation=recipe.algorithm.aggregation
    )
    recipe = recipe.changed(
        algorithm=algorithm, critic=None, teacher=None, rewards=RewardsSection(), cluster={"pools": ()},
        train={
            "steps": course.steps, "mini_batches": 1, "epochs": 1, "weight_decay": course.stages[0].weight_decay,
        },
        rollout={"temperature": 1.0, "n": max(2, recipe.rollout.n), "overlap": "none", "oversample": 1.0},
    )  # fmt: skip
    return recipe.changed(env=EnvSection()) if conversations else recipe


class SftLearner(Learner):
    """Learns conversations by a course. recipe: see `learning_recipe`."""

    def __init__(self, recipe: Recipe, role_host: Roles, course: Course) -> None:
        super().__init__(recipe, role_host)
        self.course = course
        self._stage = -1

    def begin_stage(self, number: int) -> None:
        """Go on with the optimizer of a stage, unless it is that already."""
        if number == self._stage:
            return
        stage, self._stage = self.course.stages[number], number
        self.actor.begin_stage(stage.weight_decay, None if stage.muon_lr is None else stage.muon_lr / stage.lr)

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make one update on the conversations of `groups`; return its metrics, train/...

        All count as one group, so what their openings have in common is computed once.
        """
        number, stage, at = self.course.place(self.steps)
        self.begin_stage(number)
        trajectories = [t for group in groups for t in group.trajectories]
        batch = Batch.from_trajectories(trajectories, [0] * len(trajectories))
        batch = batch.with_tokens(advantages=batch.tokens["loss_mask"].astype(np.float32))
        rate = learning_rate(at, stage.steps, stage.lr, stage.schedule, int(stage.warmup), stage.min_lr_ratio)
        metrics = MicroBatchMetrics(rate)
        logprobs = self._update_actor(batch, rate, metrics)
        self.steps += 1
        self.learned = learned(trajectories, batch, batch.sampled > 0, logprobs)
        return {
            **metrics.of_updates("train"),
            "train/tokens": metrics.tokens,
            "train/samples": metrics.samples,
            "train/updates": len(metrics.finite),
            "train/updates_not_finite": len(metrics.norms) - len(metrics.finite),
            "train/entropy": metrics.mean("train/entropy"),
            "train/parameters": self.actor.trained,
        }

    def loss(self, trajectories: Sequence[Trajectory]) -> float:
        """The mean cross entropy of the learned tokens of conversations, in nats."""
        total, count = 0.0, 0
        for start in range(0, len(trajectories), HELD_OUT_BATCH):
            part = trajectories[start : start + HELD_OUT_BATCH]
            batch = Batch.from_trajectories(part, [0] * len(part))
            mask = batch.tokens["loss_mask"].astype(bool)
            total -= float(self.actor.logprobs(batch)[mask].astype(np.float64).sum())
            count += int(mask.sum())
        return total / max(1, count)


class LessonRollouts(Rollouts):
    """Gives each step its conversations: of `taught`, or what `demonstrator` makes of `tasks`."""

    def __init__(
        self, *args: Any, course: Course, demonstrator: Demonstrator | None, taught: Sequence[Trajectory], digest: str,
        limit: int, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        self._course, self._demonstrator, self._taught = course, demonstrator, taught
        self._digest, self._context = digest, limit
        self._trained = 0

    @property
    def steps(self) -> int:
        return self._course.steps

    def next(self, step: int) -> StepGroups:
        start = perf_counter()
        number, stage, at = self._course.place(step - 1)
        drawn = self._sampler.draw(stage.batch)
        if self._demonstrator is None:
            made = [self._taught[i] for i in drawn]
        else:
            made = self._demonstrated(drawn, stage.style, f"{self._recipe.train.seed}/{number}/{at}")
        groups = [Group(t.task, (t,)) for t in made]
        metrics = {"time/rollout_s": perf_counter() - start, "train/epoch": self._sampler.progress}
        if any(t.rewards for t in made):
            metrics |= reward_metrics(made)
        return StepGroups(groups, metrics)

    def _demonstrated(self, drawn: Sequence[int], style: str, seed: str) -> list[Trajectory]:
        demonstrator = self._demonstrator
        assert demonstrator is not None

        async def demonstrate() -> list[Trajectory]:
            tasks = [self._tasks[i] for i in drawn]
            return [await demonstrator.trajectory(task, Random(f"{seed}/{i}"), style) for i, task in enumerate(tasks)]

        made = self._interrupts.run(demonstrate)
        check_lengths(self._context, made)
        return made

    def learn(self, work: Callable[[], T]) -> T:
        """Run the update. It is not interrupted."""
        return work()

    def publish(self, step: int) -> None:
        """Note the step: the engine is given its weights before an evaluation."""
        self._trained = step

    def sync_engine(self) -> None:
        self._interrupts.complete(lambda: self._player.engine.update_weights(self._trained, self._weights()))

    def state(self) -> dict[str, Json]:
        return {**super().state(), "conversations": self._digest}

    def restore(self, step: int, state: Mapping[str, Json]) -> None:
        if state.get("conversations", "") != self._digest:
            raise UserError("--resume: sft.source does not hold what the run began with: start a new run")
        super().restore(step, state)
        self._trained = step


def check_lengths(context: int, made: Sequence[Trajectory]) -> None:
    """Raise UserError where a demonstration is longer than the model's context."""
    longest, tokens = max(((t, max(map(len, t.paths()))) for t in made), key=lambda pair: pair[1])
    if tokens > context:
        raise UserError(
            f"the demonstration of {longest.task.id} has {tokens} tokens, but the model's context only {context}"
        )


@dataclass
class SftLoop(Loop):
    """A run of supervised training, which also measures the loss of held-out conversations."""

    held_out_rollouts: Sequence[Trajectory] = ()
    """The held-out conversations."""

    def _evaluate(self, splits: Sequence[str]) -> tuple[dict[str, Accuracy], dict[str, float]]:
        found, metrics = super()._evaluate(splits)
        if self.held_out_rollouts and isinstance(self.learner, SftLearner):
            metrics[HELD_OUT] = self.learner.loss(self.held_out_rollouts)
            line = f"step {self.step:>4}  held-out loss: {metrics[HELD_OUT]:.4f}"
            self._to_show.append(partial(self.display.note, line))
        return found, metrics

    def _evaluate_when_due(self, step: int) -> dict[str, Json]:
        last, every = step == self.rollouts.steps, self.recipe.eval.every
        if self.held_out.choosing is not None:
            found = super()._evaluate_when_due(step)
        else:
            found = self._evaluate(())[1] if last or (every and step % every == 0) else {}
        if last and self.recipe.start is None:  # of a start is told what came of it
            self._doubt()
        return found

    def _doubt(self) -> None:
        """Warn where what was taught did not take."""
        losses = [row["train/loss"] for row in self.folder.metrics() if "train/loss" in row]
        if len(losses) < ENDS:  # too few to tell; that of the last step is not written yet
            return
        before, after = ({s: a.value for s, a in found.items()} for found in (self.before, self.after))
        line = not_taken(self.step, (fmean(losses[: ENDS // 2]), fmean(losses[-ENDS:])), before, after)
        if line is not None:
            found = [Finding("lessons_not_taken", f"the lessons did not take: {line}")]
            self._findings += found
            self._to_show.append(partial(self._show, found))


class SftDisplay(Display):
    """Shows the loss of a run in place of rewards."""

    followed = "loss", "train/loss", (".4f", ".4f")
    speed = "tokens/s", "train/tokens_per_s"

    def expect(self, steps: int) -> None:
        """Take the number of steps, once it is known."""
        self.steps, self.every = steps, max(1, steps // LINES)
        self._progress.update(self._bar, total=steps)

    def _more(self, metrics: Mapping[str, Json]) -> str:
        return f"lr {metrics['train/lr']:.2e}  "

    def _curve(self) -> str:
        return sparkline(self.values, min(self.values), max(self.values))
