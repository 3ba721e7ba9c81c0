"""The training loop: one sequential program, which does not know where the tensor work is done.

Each step: choose tasks, sample groups, compute advantages, update, publish the weights, log the metrics. A step is
logged whole or not at all: what an interrupt cuts short leaves no trace.
"""

import errno
from collections.abc import Mapping, Sequence
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
from agentrl.rollout.journal import Journal
from agentrl.rollout.player import Player
from agentrl.training.display import Display
from agentrl.training.interrupt import Interrupted, Interrupts
from agentrl.training.rollouts import Rollouts
from agentrl.training.trackers import Trackers
from agentrl.trajectory import Group


@dataclass(slots=True)
class Loop:
    """A run: its parts, which `setup.py` makes, and its position."""

    recipe: Recipe
    player: Player
    learner: Learner
    profiler: StepProfiler
    role_host: RoleHost
    rollouts: Rollouts
    held_out: HeldOut
    folder: RunFolder
    journal: Journal
    checkpoints: Checkpoints
    display: Display
    interrupts: Interrupts
    mismatch: MismatchWatch
    contrast: ContrastWatch
    trackers: Trackers
    step: int = 0
    """Whole steps so far."""
    best: float = -1.0
    """Accuracy (0..1) of the best checkpoint; -1: none was evaluated."""
    before: dict[str, Accuracy] = field(default_factory=dict)
    """Held-out accuracy before the first step, by split."""
    after: dict[str, Accuracy] = field(default_factory=dict)
    """Held-out accuracy after the last step, by split."""
    _sampler: dict[str, Any] = field(default_factory=dict)  # the state of `rollouts` after `step`
    _updates: int = 0  # of the learner after `step`
    _saved: int = -1  # step of the last checkpoint
    _unwritten: dict[str, Any] | None = None  # the row that could not be appended to metrics.jsonl
    _accuracy: float | None = None  # of `step` on the split that chooses the best checkpoint, if evaluated
    _weights_checked: bool = False

    @property
    def whole(self) -> bool:
        """Whether the weights are those of `step`: no optimizer step of an unfinished update has been made."""
        return self.learner.updates == self._updates

    def run(self) -> bool:
        """Run the steps up to `train.steps`, save the last one, and return whether the run was interrupted.

        Other exceptions are left to `run.py`, which saves by `whole` and `save_after_error`.
        """
        self._sampler, self._updates = self.rollouts.state(), self.learner.updates
        self._saved = self.step if self.step else -1
        self.folder.remember()
        interrupted = False
        try:
            if self.step == 0:
                self.before = self._evaluate(self.held_out.splits)
                self._log({"step": 0, **_accuracy_keys(self.before)})
            self.display.begin()
            while self.step < self.recipe.train.steps:
                self._one_step()
        except Interrupted:
            interrupted = True
        self.save_and_wait()
        return interrupted

    def _one_step(self) -> None:
        start, step = perf_counter(), self.step + 1
        self.display.phase("sampling")
        with self.profiler.phase(ROLLOUT, step):
            groups, metrics = self.rollouts.next(step)
        self.interrupts.check()
        self._report_failures(f"step {step}", groups)
        self._check_reward_weights(groups)

        self.display.phase("training")
        metrics |= self._update(step, groups)
        self.step, self._sampler, self._updates = step, self.rollouts.state(), self.learner.updates
        self._accuracy = None
        try:
            self._finish_step(groups, metrics, start)
        finally:  # once the weights are whole, neither an interrupt nor an error loses the step
            self._log({"step": step, **metrics})
        every = self.recipe.train.save_every
        if (every and step % every == 0) or self._is_best():
            self.save()
        self.checkpoints.check()

    def _update(self, step: int, groups: Sequence[Group]) -> dict[str, Any]:
        start = perf_counter()
        with self.profiler.phase(TRAIN, step):
            metrics = dict(self.rollouts.learn(lambda: self.learner.learn(groups)))
        seconds = perf_counter() - start
        return metrics | {"time/train_s": seconds, "train/tokens_per_s": metrics.get("train/tokens", 0) / seconds}

    def _finish_step(self, groups: Sequence[Group], metrics: dict[str, Any], start: float) -> None:
        """Publish, report and evaluate after the update; adds to `metrics`. start: of the step, by perf_counter."""
        step, trained = self.step, perf_counter()
        with self.profiler.phase(SYNC, step):
            self.rollouts.publish(step)
        metrics |= {"time/sync_s": perf_counter() - trained, **self.profiler.take(metrics["time/train_s"])}
        for line in (self.mismatch.warning(step, metrics), self.contrast.warning(step, metrics)):
            if line:
                self.display.note(line)
        metrics["time/step_s"] = perf_counter() - start
        self.display.step(step, metrics)
        self.journal.step(step, groups)
        metrics |= self._evaluate_when_due(step)

    def _evaluate_when_due(self, step: int) -> dict[str, Any]:
        """Evaluate the split that chooses the best checkpoint, and after the last step those that are reported."""
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
        self.rollouts.sync_engine()
        found: dict[str, Accuracy] = {}
        for split in splits:
            result, groups = self.interrupts.run(partial(self.held_out.play, split, after=self.step))
            found[split] = result.interval
            self._report_failures(f"evaluation of {split} after step {self.step}", groups)
            self.journal.evaluation(split, self.step, groups, self.held_out.solved)
        if found:
            self.display.evaluation(self.step, found, self.held_out.choosing)
        return found

    def _report_failures(self, what: str, groups: Sequence[Group]) -> None:
        if line := failures(what, groups):
            self.display.note(line)

    def _check_reward_weights(self, groups: Sequence[Group]) -> None:
        """Once a run, name the keys of `rewards.weights` that no trajectory has as a part of its reward."""
        parts = {part for group in groups for t in group.trajectories for part in t.rewards}
        unused = [part for part in self.recipe.rewards.weights if part not in parts and part != STEP]
        if unused and parts and not self._weights_checked:
            self.display.note(f"rewards.weights: no {', '.join(unused)} in this step{nearest(unused[0], parts)}")
        self._weights_checked = True

    def _log(self, metrics: Mapping[str, Any]) -> None:
        try:
            bad = self.folder.append_metrics(metrics)
        except OSError:  # the checkpoint keeps the row, and a resumed run appends it
            self._unwritten = dict(metrics)
            raise
        if bad:
            self.display.note(f"step {metrics['step']}: not finite, so left out of metrics.jsonl: {', '.join(bad)}")
        self.trackers.log(metrics["step"], metrics)

    def _is_best(self) -> bool:
        """Whether the step was evaluated, and better than every one before it."""
        if self._accuracy is None or self._accuracy <= self.best:
            return False
        self.best = self._accuracy
        return True

    def save(self) -> None:
        """Begin a checkpoint of the last whole step, unless there is one; the run goes on while it is written."""
        if self._saved == self.step:
            return
        if self.folder.gone:  # a new folder would hold a checkpoint without its recipe
            raise FileNotFoundError(errno.ENOENT, "deleted", str(self.folder.path))
        self.display.phase("saving")
        extra = {"sampler": self._sampler, "before": self.before, "unwritten": self._unwritten}
        rated = None if self._accuracy is None else (self.held_out.choosing, self._accuracy)
        self.checkpoints.begin(self.step, self.role_host.save, extra, rated)
        self._saved = self.step

    def save_and_wait(self) -> None:
        """Save the last whole step, and wait until its checkpoint is complete."""
        self.save()
        self.checkpoints.finish()

    def save_after_error(self) -> None:
        """`save_and_wait`, after a deleted run folder is made again."""
        if self.folder.put_back():
            with suppress(NotSaved):  # the checkpoint under way was deleted with the folder
                self.checkpoints.finish()
            self._saved = -1
        self.save_and_wait()


def _accuracy_keys(found: Mapping[str, Accuracy]) -> dict[str, float]:
    return {f"eval/{split}/accuracy": accuracy.value for split, accuracy in found.items()}
