"""The training loop: one sequential program, independent of where the tensor work is done.

Each step: choose tasks, sample groups, compute advantages, update, publish the weights, log the metrics. Only whole
steps are logged: a step that is interrupted before its update is complete leaves nothing behind.
"""

import errno
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from agentrl.checkpoint.checkpoints import Checkpoints, NotSaved
from agentrl.checkpoint.run_folder import RunFolder
from agentrl.errors import nearest
from agentrl.eval.held_out import HeldOut
from agentrl.eval.result import Accuracy, SplitResult, failures
from agentrl.images import FOLDER as IMAGES
from agentrl.images import STORE
from agentrl.learner.history import UNKNOWN_NAMES
from agentrl.learner.learner import Learner
from agentrl.learner.monitors import Finding, Health
from agentrl.learner.roles import RoleHost
from agentrl.plugins.mixture import environment_of
from agentrl.plugins.span import kept_steps, span, take_step
from agentrl.plugins.types import Json
from agentrl.profiling.step import ROLLOUT, SYNC, TRAIN, StepProfiler
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import COMPARING
from agentrl.rollout.call_counts import count_calls
from agentrl.rollout.journal import Journal
from agentrl.rollout.metrics import by_environment, reward_metrics
from agentrl.rollout.player import Player
from agentrl.training.display import Display
from agentrl.training.interrupt import Interrupted, Interrupts
from agentrl.training.rollouts import Rollouts, StepGroups
from agentrl.training.taught import Taught
from agentrl.training.trackers import Trackers, samples_of
from agentrl.trajectory import STEP, Group


@dataclass(slots=True)
class Loop:
    """A run: its parts, which `setup.py` builds, and its position."""

    recipe: Recipe
    """The recipe, complete."""
    player: Player
    """Environment, tools, rewards, chat and engine."""
    learner: Learner
    """Computes advantages and updates the weights."""
    profiler: StepProfiler
    """Measures phases, FLOPs and memory."""
    role_host: RoleHost
    """Holds the roles (policy, critic, reference, reward model) and saves them."""
    rollouts: Rollouts
    """Samples the groups of each step, and publishes weights to the engine."""
    held_out: HeldOut
    """The held-out tasks."""
    folder: RunFolder
    """The run folder."""
    journal: Journal
    """Writes trajectories into the run folder."""
    checkpoints: Checkpoints
    """The checkpoints in the run folder."""
    display: Display
    """Shows the progress."""
    interrupts: Interrupts
    """Runs asynchronous work and handles signals."""
    health: Health
    """Says what is wrong with the run by its metrics."""
    trackers: Trackers
    """Receive the metrics of each step."""
    taught: Taught | None = None
    """The model that the recipe's `start` made, and that the run began with."""
    command: str = "agentrl train"
    """The command that goes on with it by `--resume`."""
    step: int = 0
    """Number of whole steps so far."""
    best: float = -1.0
    """Accuracy (0..1) of the best checkpoint; -1: no checkpoint was evaluated."""
    before: dict[str, Accuracy] = field(default_factory=dict)
    """Held-out accuracy before the first step, by split."""
    after: dict[str, Accuracy] = field(default_factory=dict)
    """Held-out accuracy after the last step, by split."""
    _sampler: dict[str, Json] = field(default_factory=dict)  # the state of `rollouts` after `step`
    _updates: int = 0  # the learner's number of updates after `step`
    _kl_coef: float = 0.0  # the learner's coefficient of the KL after `step`
    _saved: int = -1  # step of the last checkpoint
    _unwritten: dict[str, Json] | None = None  # the row that could not be appended to metrics.jsonl
    _accuracy: float | None = None  # accuracy of `step` on the split that chooses the best checkpoint, if evaluated
    _updating: bool = False
    _weights_checked: bool = False
    _findings: list[Finding] = field(default_factory=list)  # those of the next row of metrics
    _to_show: list[Callable[[], None]] = field(default_factory=list)  # what `_record` shows, in this order

    @property
    def whole(self) -> bool:
        """Whether the weights are those of `step`, without optimizer steps of an unfinished update."""
        return self.learner.updates == self._updates and not self._updating

    def run(self) -> bool:
        """Run the steps up to the last, save the last one, and return whether the run was interrupted.

        Other exceptions go to `run.py`, which uses `whole` and `save_after_error`.
        """
        with kept_steps():
            return self._run()

    def _run(self) -> bool:
        self._sampler, self._updates = self.rollouts.state(), self.learner.updates
        self._kl_coef = self.learner.kl_coef
        self._saved = self.step if self.step else -1
        self.folder.remember()
        self._findings += self.health.before_start()
        self._show(self._findings)
        interrupted = False
        try:
            if self.step == 0:
                before = self.recipe.eval.before
                self.before, measured = self._evaluate(self.held_out.splits) if before else ({}, {})
                known = self.taught.metrics() if self.taught is not None else {}
                self._record({"step": 0, **known, **measured})
            self.display.evaluations_left = self._evaluations_left
            self.display.compares = self.recipe.algorithm.advantage.name in COMPARING
            self.display.begin()
            if self.step == self.rollouts.steps:
                self._evaluate_last()
            while self.step < self.rollouts.steps:
                self.display.check()
                self._one_step()
        except Interrupted:
            interrupted = True
        self.save_and_wait()
        return interrupted

    def _one_step(self) -> None:
        start, step = perf_counter(), self.step + 1
        self.display.phase("sampling")
        with span(ROLLOUT), self.profiler.phase(ROLLOUT, step):
            found = self.rollouts.next(step)
        groups, metrics = found.groups, found.metrics
        self.interrupts.check()
        self._report_failures(f"step {step}", found.sampled)
        self._check_reward_weights(found.sampled)
        self._report_missing(step, metrics)

        self.display.phase("training")
        if self.recipe.env.mix:
            metrics |= by_environment(found.sampled, partial(environment_of, self.player.env))
        metrics |= self._update(step, groups)
        self.step, self._sampler, self._updates = step, self.rollouts.state(), self.learner.updates
        self._kl_coef = self.learner.kl_coef
        self._accuracy = None
        try:
            self._finish_step(found, metrics, start)
        finally:  # the update is complete: neither an interrupt nor an error loses the step
            self._record({"step": step, **metrics})
        every = self.recipe.train.save_every
        if (every and step % every == 0) or self._is_best():
            self.save()
        self.checkpoints.check()

    def _update(self, step: int, groups: Sequence[Group]) -> dict[str, Json]:
        start = perf_counter()
        shown = (span.hash for group in groups for t in group.trajectories for span in t.images)
        STORE.copy(shown, self.folder.path / IMAGES)  # for workers, also where another run stored them
        self._updating = True
        try:
            with span("update"), self.profiler.phase(TRAIN, step):
                metrics = dict(self.rollouts.learn(lambda: self.learner.learn(groups)))
        finally:
            self._updating = False
        seconds = perf_counter() - start
        return metrics | {"time/train_s": seconds, "train/tokens_per_s": metrics.get("train/tokens", 0) / seconds}

    def _finish_step(self, found: StepGroups, metrics: dict[str, Json], start: float) -> None:
        """Publish, keep the trajectories and evaluate after the update; add to `metrics`. start: perf_counter() as the
        step began."""
        step, trained = self.step, perf_counter()
        with span(SYNC), self.profiler.phase(SYNC, step):
            self.rollouts.publish(step)
        metrics |= {"time/sync_s": perf_counter() - trained, **self.profiler.take(metrics["time/train_s"])}
        metrics["time/step_s"] = perf_counter() - start
        calls = count_calls(found.sampled, self.recipe.rollout.max_turn_tokens)
        metrics |= calls.metrics() | ({UNKNOWN_NAMES: calls.named()} if calls.names else {})
        self._to_show.append(partial(self.display.step, step, metrics))
        self.journal.step(step, found.groups, self.learner.learned, left_out=found.left_out)
        metrics |= self._evaluate_when_due(step)

    def _evaluate_when_due(self, step: int) -> dict[str, Json]:
        """Evaluate the split that chooses the best checkpoint when it is due, and all reported ones after the last
        step."""
        every, choosing, last = self.recipe.eval.every, self.held_out.choosing, step == self.rollouts.steps
        splits = self.held_out.splits if last else ()
        if choosing is None or not (last or (every and step % every == 0)):
            return {}
        found, measured = self._evaluate(tuple(dict.fromkeys((choosing, *splits))))
        self.after = {split: found[split] for split in splits}
        self._accuracy = found[choosing].value
        return measured

    def _evaluate_last(self) -> None:
        """Evaluate after the last step, where an interrupt prevented it: the figures join the row of that step, and its
        checkpoint."""
        metrics = self._evaluate_when_due(self.step)
        self.folder.add_metrics(self.step, metrics)
        self._saved = -1
        self.trackers.log(self.step, metrics)
        shown, self._to_show = self._to_show, []
        for show in shown:
            show()

    def _evaluations_left(self, step: int) -> int:
        """How many splits are evaluated after later steps than `step`."""
        every, last = self.recipe.eval.every, self.rollouts.steps
        if self.held_out.choosing is None or step >= last:
            return 0
        between = (last - 1) // every - step // every if every else 0
        return between + len({self.held_out.choosing, *self.held_out.splits})

    def _evaluate(self, splits: Sequence[str]) -> tuple[dict[str, Accuracy], dict[str, float]]:
        """The accuracies of these splits, and their metrics."""
        if not splits:
            return {}, {}
        self.display.phase("evaluating")
        self.rollouts.sync_engine()
        found: dict[str, Accuracy] = {}
        metrics: dict[str, float] = {}
        start = perf_counter()
        with span(f"evaluation {', '.join(splits)}"):
            played = self.interrupts.run(partial(self.held_out.play_all, splits, after=self.step))
        for split, (result, groups) in played.items():
            found[split] = result.interval
            metrics |= {f"eval/{split}/{name}": value for name, value in _held_out(result, groups).items()}
            self.journal.evaluation(split, self.step, groups, self.held_out.solved)
            self._to_show.append(
                partial(self._report_failures, f"evaluation of {split} after step {self.step}", groups)
            )
            if self.trackers:
                environment = partial(environment_of, self.player.env)
                shown = samples_of(groups, self.held_out.solved, environment)
                self.trackers.conversations(self.step, split, shown)
        self.display.evaluated(perf_counter() - start, len(splits))
        if found:
            self._to_show.append(partial(self.display.evaluation, self.step, found, self.held_out.choosing))
        return found, metrics

    def _report_failures(self, what: str, groups: Sequence[Group]) -> None:
        if line := failures(what, groups):
            self.display.note(line)

    def _report_missing(self, step: int, metrics: Mapping[str, Json]) -> None:
        """Report a step for which dynamic sampling found fewer groups than it wants."""
        needed = self.recipe.rollout.tasks
        kept = metrics.get("groups/kept", needed)  # stored rollouts are not selected again
        if self.recipe.algorithm.dynamic_sampling is not None and kept < needed:
            sampled = kept + metrics["groups/left_out"]
            self.display.note(
                f"step {step}: dynamic sampling found {kept} groups of {needed} among {sampled}, which is its budget"
            )

    def _check_reward_weights(self, groups: Sequence[Group]) -> None:
        """Once per run, report keys of `rewards.weights` that are no reward part of any trajectory."""
        parts = {part for group in groups for t in group.trajectories for part in t.rewards}
        unused = [part for part in self.recipe.rewards.weights if part not in parts and part != STEP]
        if unused and parts and not self._weights_checked:
            self.display.note(f"rewards.weights: no {', '.join(unused)} in this step{nearest(unused[0], parts)}")
        self._weights_checked = True

    def _show(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self.display.note(finding.line)

    def _record(self, metrics: Mapping[str, Json]) -> None:
        """Write down the row of a step, whose trajectories the journal has by now, and show the step after that: what
        is shown may fail, and loses nothing then."""
        found, shown, self._to_show = self.health.step(metrics), self._to_show, []
        self._findings += found
        row = dict(metrics) | ({"health": [finding._asdict() for finding in self._findings]} if self._findings else {})
        self._findings = []
        if spans := take_step():
            row["time/spans"] = [[name, round(start, 6), round(end, 6)] for name, start, end in spans]
        try:
            bad = self.folder.append_metrics(row)
        except OSError:  # the checkpoint keeps the row, and a resumed run appends it
            self._unwritten = row
            raise
        self.trackers.log(metrics["step"], metrics)
        for show in shown:
            show()
        self._show(found)
        if bad:
            self.display.note(f"step {metrics['step']}: not finite, so left out of metrics.jsonl: {', '.join(bad)}")

    def _is_best(self) -> bool:
        """Whether the step was evaluated and is better than all before; remember its accuracy then."""
        if self._accuracy is None or self._accuracy <= self.best:
            return False
        self.best = self._accuracy
        return True

    def save(self) -> None:
        """Start a checkpoint of the last whole step, unless it has one; the run continues while it is written.

        Raises FileNotFoundError if the run folder was deleted.
        """
        if self._saved == self.step:
            return
        if self.folder.gone:  # a new folder would hold a checkpoint without its recipe
            raise FileNotFoundError(errno.ENOENT, "deleted", str(self.folder.path))
        self.display.phase("saving")
        with span("save"):
            self._begin_save()
        self._saved = self.step

    def _begin_save(self) -> None:
        extra: dict[str, Json] = {"sampler": self._sampler, "before": self.before, "unwritten": self._unwritten}
        if self.recipe.algorithm.kl_target is not None:
            extra["kl_coef"] = self._kl_coef
        rated = None if self._accuracy is None else (self.held_out.choosing, self._accuracy)
        self.checkpoints.begin(self.step, self.role_host.save, extra, rated)

    def save_and_wait(self) -> None:
        """Save the last whole step and wait until its checkpoint is complete. Raises NotSaved."""
        self.save()
        self.checkpoints.finish()

    def save_after_error(self) -> None:
        """Restore the run folder if it was deleted, then `save_and_wait`, again where the checkpoints were removed.
        Raises NotSaved."""
        if self.folder.put_back() or self.checkpoints.removed:
            with suppress(NotSaved):  # the checkpoint being written was deleted with the folder
                self.checkpoints.finish()
            self._saved = -1
        self.save_and_wait()


def _held_out(result: SplitResult, groups: Sequence[Group]) -> dict[str, float]:
    """The metrics of an evaluation of a split, without `eval/<split>/`."""
    return {
        "accuracy": result.accuracy,
        "accuracy_low": result.low,
        "accuracy_high": result.high,
        **reward_metrics([t for group in groups for t in group.trajectories]),
        "reward_low": result.reward_low,
        "reward_high": result.reward_high,
        **{f"pass_at_{k}": value for k, value in result.pass_at.items() if k > 1},
        "turns": result.turns,
        "response_tokens": result.tokens,
        "tool_calls": result.tool_calls,
        "tool_errors": result.tool_errors,
        "failed": result.failed,
    }
