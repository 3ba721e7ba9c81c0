"""`SftTrainer`: the stages of a warm start, each with an optimizer and a learning rate that falls by a cosine."""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from time import monotonic
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentrl.compute.batch import Batch
from agentrl.compute.forward import choose, computed_in
from agentrl.compute.packing import micro_batches
from agentrl.data.sampler import TaskSampler
from agentrl.errors import UserError
from agentrl.learner.optimizer import MuonAdamW, Optimizer, learning_rate
from agentrl.plugins.registry import tasks_of
from agentrl.plugins.types import Task
from agentrl.recipe.schema import Recipe, SftSection, SftStage
from agentrl.rollout.event_loop import Runner
from agentrl.sft.demonstrations import Demonstrator
from agentrl.trajectory import Trajectory

FLOOR = 0.03  # of a stage's learning rate, at its end
RECENT = 50  # steps that a shown loss is the mean of
LINE_EVERY = 100  # steps, where no live bar can be shown


class SftTrainer:
    """Teaches `model` what `demonstrator` shows. `way` says how it computes log-probs; `tokens` were computed so far.

    journal: called once a step with the metrics that a run folder keeps.
    """

    def __init__(
        self, recipe: Recipe, demonstrator: Demonstrator, model: Any, runner: Runner, console: Console,
        journal: Callable[[dict[str, float]], object],
    ) -> None:  # fmt: skip
        self.recipe, self.model, self.console, self.journal = recipe, model, console, journal
        self.demonstrator, self.runner = demonstrator, runner
        self.tasks: Sequence[Task] = tasks_of(demonstrator.env, "train")
        self.sampler = TaskSampler(len(self.tasks), recipe.train.seed)
        self.forward, self.way = choose(model, computed_in(recipe.model), recipe.model.checkpointing)
        self.steps = self.tokens = 0
        self.began = monotonic()

    def teach(self, section: SftSection) -> list[float]:
        """Return all stages. Returns the losses of the last, one a step, in nats a token."""
        losses: list[float] = []
        self.began = monotonic()
        with self._progress() as progress:
            for number, stage in enumerate(section.stages):
                bar = progress.add_task(escape(stage.style), total=stage.steps, said="")
                losses = []
                for loss, rate in self._stage(stage, number):
                    losses.append(loss)
                    self._report(stage, losses, rate)
                    progress.update(bar, advance=1, said=self._said(losses))
        return losses

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"), TimeRemainingColumn(),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip

    def _said(self, losses: Sequence[float]) -> str:
        recent = losses[-RECENT:]
        speed = self.tokens / (monotonic() - self.began)
        return f"loss {sum(recent) / len(recent):.4f}  {speed:,.0f} tokens/s"

    def _report(self, stage: SftStage, losses: Sequence[float], rate: float) -> None:
        self.steps += 1
        self.journal({"step": self.steps, "train/loss": losses[-1], "train/lr": rate, "train/tokens": self.tokens})
        done = len(losses)
        if done == stage.steps or (done % LINE_EVERY == 0 and not self.console.is_terminal):
            self.console.print(
                f"{stage.style} {done}/{stage.steps}  {self._said(losses)}", highlight=False, markup=False
            )

    def _stage(self, stage: SftStage, number: int) -> Iterator[tuple[float, float]]:
        train = self.recipe.train
        optimizer = self._optimizer(stage)
        for step in range(stage.steps):
            batch = self._batch(stage, f"{train.seed}/{number}/{step}")
            loss = self._gradient(batch)
            rate = learning_rate(step, stage.steps, stage.lr, "cosine", stage.warmup_steps, FLOOR)
            optimizer.step(rate)
            yield loss, rate

    def _optimizer(self, stage: SftStage) -> Optimizer | MuonAdamW:
        train = self.recipe.train
        if stage.optimizer == "adamw":
            return Optimizer(self.model.parameters(), train.betas, stage.weight_decay, train.max_grad_norm)
        share = stage.muon_lr / stage.lr
        return MuonAdamW(self.model, share, train.betas, stage.weight_decay, train.max_grad_norm)

    def _batch(self, stage: SftStage, seed: str) -> Batch:
        """Return the next demonstrations. All count as one group, so what their prompts have in common is computed
        once."""

        async def demonstrate() -> Batch:
            drawn = [self.tasks[i] for i in self.sampler.draw(stage.batch)]
            made = [
                await self.demonstrator.trajectory(task, Random(f"{seed}/{i}"), stage.style)
                for i, task in enumerate(drawn)
            ]
            self._check_lengths(made)
            return Batch.from_trajectories(made, [0] * len(made))

        return self.runner.run(demonstrate())

    def _check_lengths(self, made: Sequence[Trajectory]) -> None:
        longest, tokens = max(((t, max(map(len, t.paths()))) for t in made), key=lambda pair: pair[1])
        config = self.model.config
        context = getattr(config, "text_config", config).max_position_embeddings
        if tokens > context:
            raise UserError(
                f"the demonstration of {longest.task.id} has {tokens} tokens, but the model's context only {context}"
            )

    def _gradient(self, batch: Batch) -> float:
        """Accumulate the gradient of the mean cross entropy over the demonstrated tokens; that mean, in nats."""
        count = int(np.sum(batch.sampled))
        total = 0.0
        for packed in micro_batches(batch, self.recipe.train.micro_batch_tokens):
            logprobs, _ = self.forward(packed, 1.0)
            loss = -logprobs.sum() / count
            torch.autograd.backward(loss)
            total += float(loss.detach())
            self.tokens += len(packed.ids)
        return total
