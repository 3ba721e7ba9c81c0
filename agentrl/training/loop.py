"""The training loop: one sequential program. It does not know where the tensor work is done.

Each step: draw tasks, roll out groups, turn them into a batch with advantages, update, publish the weights, write down.
A step is written down whole or not at all: what an interrupt cuts short leaves no trace.
"""

import errno
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from agentrl.checkpoint.checkpoints import Checkpoints, NotSaved
from agentrl.checkpoint.run_folder import RunFolder
from agentrl.errors import nearest
from agentrl.eval.held_out import HeldOut
from agentrl.eval.result import Accuracy, failures
from agentrl.learner.contrast import ContrastWatch
from agentrl.learner.learner import Learner
from agentrl.learner.mismatch import MismatchWatch
from agentrl.learner.roles import RoleHost
from agentrl.profiling.step import ROLLOUT, SYNC, TRAIN, StepProfiler
from agentrl.recipe.schema import Recipe
from agentrl.rollout.hooks import STEP
from agentrl.rollout.journal import write_journal
from agentrl.rollout.player import Player
from agentrl.training.display import Display
from agentrl.training.interrupt import Interrupted, Interrupts
from agentrl.training.rollouts import Rollouts
from agentrl.training.trackers import Trackers
from agentrl.trajectory import Group, Trajectory


@dataclass(slots=True)
class Loop:
    """Everything a run needs, put together by `run.py`."""

    recipe: Recipe
    player: Player
    learner: Learner
    profiler: StepProfiler
    role_host: RoleHost
    rollouts: Rollouts
    held_out: HeldOut
    folder: RunFolder
    checkpoints: Checkpoints
    display: Display
    interrupts: Interrupts
    mismatch: MismatchWatch
    contrast: ContrastWatch
    trackers: Trackers
    step: int = 0
    best: float = -1.0  # accuracy of the best checkpoint
    before: dict[str, Accuracy] = field(default_factory=dict)
    after: dict[str, Accuracy] = field(default_factory=dict)
    _drawn: dict[str, Any] = field(default_factory=dict)
    _updates: int = 0  # the learner's when `step` was whole
    _saved: int = -1
    _unwritten: dict[str, Any] | None = None  # the row that metrics.jsonl did not take
    _accuracy: float | None = None  # of the last whole step on the split to choose by, where it was evaluated there
    _weights_said: bool = False

    @property
    def whole(self) -> bool:
        """Whether the weights are those of `step`: no optimizer step has begun of an update that is not finished."""
        return self.learner.updates == self._updates

    def run(self) -> bool:
        """From `step` to `train.steps`. Returns whether it was interrupted; the last whole step is saved either way.
        What is raised is left to `run.py`, which saves by `whole` and `save_after_error`."""
        self._drawn, self._updates = self.rollouts.state(), self.learner.updates
        self._saved = self.step if self.step else -1
        self.folder.remember()
        try:
            if self.step == 0:
                self.before = self._evaluate(self.held_out.splits)
                self._write_down({"step": 0, **_accuracy_keys(self.before)})
            self.display.begin()
            while self.step < self.recipe.train.steps:
                self._one_step()
        except Interrupted:
            self.save_at_last()
            return True
        self.save_at_last()
        return False

    def _one_step(self) -> None:
        began = perf_counter()
        step = self.step + 1
        self.display.phase("sampling")
        with self.profiler.phase(ROLLOUT, step):
            groups, metrics = self.rollouts.next(step)
        self.interrupts.check()
        self._say_failures(f"step {step}", groups)
        self._say_idle_weights(groups)

        self.display.phase("training")
        metrics |= self._update(step, groups)
        self.step, self._drawn, self._updates = step, self.rollouts.state(), self.learner.updates
        self._accuracy = None
        try:
            self._follow_up(groups, metrics, began)
        finally:  # what is cut short, or fails, once the weights are whole takes no step with it
            self._write_down({"step": step, **metrics})
        every = self.recipe.train.save_every
        if (every and step % every == 0) or self._is_best():
            self.save()
        self.checkpoints.check()

    def _update(self, step: int, groups: Sequence[Group]) -> dict[str, Any]:
        began = perf_counter()
        with self.profiler.phase(TRAIN, step):
            metrics = dict(self.rollouts.learn(lambda: self.learner.learn(groups)))
        seconds = perf_counter() - began
        return metrics | {"time/train_s": seconds, "train/tokens_per_s": metrics.get("train/tokens", 0) / seconds}

    def _follow_up(self, groups: Sequence[Group], metrics: dict[str, Any], began: float) -> None:
        """What comes after the update of `step`; adds to its `metrics`. began: when the step did."""
        step, trained = self.step, perf_counter()
        with self.profiler.phase(SYNC, step):
            self.rollouts.publish(step)
        metrics |= {"time/sync_s": perf_counter() - trained, **self.profiler.take(metrics["time/train_s"])}
        for line in (self.mismatch.warning(step, metrics), self.contrast.warning(step, metrics)):
            if line:
                self.display.note(line)
        metrics["time/step_s"] = perf_counter() - began
        self.display.step(step, metrics)
        self._keep_trajectories(f"step_{step}", groups)
        metrics |= self._evaluate_when_due(step)

    def _evaluate_when_due(self, step: int) -> dict[str, Any]:
        """The split to choose by, and after the last step those to report."""
        every, choosing, last = self.recipe.eval.every, self.held_out.choosing, step == self.recipe.train.steps
        splits = self.held_out.splits if last else ()
        if choosing is None or not (last or (every and step % every == 0)):
            return {}
        found = self._evaluate(tuple(dict.fromkeys((choosing, *splits))))
        self.after = {split: found[split] for split in splits}
        self._accuracy = found[choosing].value
        return _accuracy_keys(found)

    def _evaluate(self, splits: Sequence[str]) -> dict[str, Accuracy]:
        self.display.phase("evaluating")
        self.rollouts.current()
        found: dict[str, Accuracy] = {}
        for split in splits:
            play = partial(self.held_out.play, split, after=self.step)
            result, groups = self.interrupts.run(play)
            found[split] = result.interval
            self._say_failures(f"evaluation of {split} after step {self.step}", groups)
            self._keep_trajectories(f"eval_{split}_{self.step}", groups, self.held_out.solved)
        if found:
            self.display.evaluation(self.step, found, self.held_out.choosing)
        return found

    def _say_failures(self, what: str, groups: Sequence[Group]) -> None:
        if line := failures(what, groups):
            self.display.note(line)

    def _say_idle_weights(self, groups: Sequence[Group]) -> None:
        """Once a run: names in `rewards.weights` that no trajectory of its first step has as a part."""
        parts = {part for group in groups for t in group.trajectories for part in t.rewards}
        idle = [part for part in self.recipe.rewards.weights if part not in parts and part != STEP]
        if idle and parts and not self._weights_said:
            self.display.note(f"rewards.weights: no {', '.join(idle)} in this step{nearest(idle[0], parts)}")
        self._weights_said = True

    def _keep_trajectories(
        self, name: str, groups: Sequence[Group], solved: Callable[[Trajectory], bool] | None = None
    ) -> None:
        if self.recipe.track.trajectories:
            write_journal(self.folder.trajectories, name, groups, solved)

    def _write_down(self, metrics: Mapping[str, Any]) -> None:
        try:
            bad = self.folder.append_metrics(metrics)
        except OSError:  # the checkpoint keeps it, and a resumed run writes it down
            self._unwritten = dict(metrics)
            raise
        if bad:
            self.display.note(f"step {metrics['step']}: not finite, and so not in metrics.jsonl: {', '.join(bad)}")
        self.trackers.log(metrics["step"], metrics)

    def save(self) -> None:
        """A checkpoint of the last whole step, unless it is saved already; the run goes on while it is written."""
        if self._saved == self.step:
            return
        if self.folder.gone:  # or a new one would be made, in which nothing says what the run is
            raise FileNotFoundError(errno.ENOENT, "deleted", str(self.folder.path))
        self.display.phase("saving")
        extra = {"sampler": self._drawn, "before": self.before, "unwritten": self._unwritten}
        rated = None if self._accuracy is None else (self.held_out.choosing, self._accuracy)
        self.checkpoints.begin(self.step, self.role_host.save, extra, rated)
        self._saved = self.step

    def _is_best(self) -> bool:
        """Whether the step was evaluated, and higher than any before it."""
        if self._accuracy is None or self._accuracy <= self.best:
            return False
        self.best = self._accuracy
        return True

    def save_at_last(self) -> None:
        """`save`, and wait until it is there."""
        self.save()
        self.checkpoints.finish()

    def save_after_error(self) -> None:
        """`save_at_last`, into a run folder that is put back where it was deleted."""
        if self.folder.put_back():
            with suppress(NotSaved):  # what was being written is gone with it
                self.checkpoints.finish()
            self._saved = -1
        self.save_at_last()


def _accuracy_keys(found: Mapping[str, Accuracy]) -> dict[str, float]:
    return {f"eval/{split}/accuracy": accuracy.value for split, accuracy in found.items()}
