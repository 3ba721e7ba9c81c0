"""Training of a reward model on pairs by Bradley-Terry: -log sigmoid(score of the chosen - score of the rejected), mean
over pairs (arXiv:2203.02155, equation 1).

Scores are computed as `rewards.model` computes them, in one process; what both conversations of a pair begin with is
computed once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl.checkpoint.checkpoints import save_model
from agentrl.checkpoint.run_folder import MODEL, RunFolder
from agentrl.compute.activation_checkpointing import recompute
from agentrl.compute.batch import joined, prefix_trees
from agentrl.compute.classifier import choose, mark_ends, padding_of, scoring_batch
from agentrl.compute.packing import pack
from agentrl.errors import UserError
from agentrl.fine_tuning.pairs import Pair, PairReader, held_out
from agentrl.learner.optimizer import Optimizer, learning_rate
from agentrl.models.allocator import expand_segments
from agentrl.models.load import load_scorer
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.section import steps_of
from agentrl.recipe.sections.sft import RewardModelSection
from agentrl.terminal import terminal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINE_EVERY = 10  # steps, where no live bar can be shown
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class RewardModelResult:
    """folder: the model's, for `rewards.model`. metrics: the last row of metrics.jsonl."""

    folder: Path
    metrics: Metrics


def train_reward_model(
    recipe: Recipe, *, name: str = "reward-model", console: Console | None = None
) -> RewardModelResult:
    """Train `model.path` as a reward model by the recipe's `reward_model` section, into a new run folder.

    Raises UserError: one line; the folder is made when everything has been read.
    """
    section = _checked(recipe)
    console = console or terminal()
    RunFolder.check_free(recipe.output)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    expand_segments(recipe)
    model, tokenizer = load_scorer(recipe.model, recipe.train.seed)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    with console.status("reading pairs"):
        pairs = PairReader(tokenizer, limit, recipe.train.seed).read(section)
    if not pairs:
        raise UserError("reward_model.source: no two rollouts of a task have different rewards")
    training, held = held_out(pairs, section.held_out, recipe.train.seed)
    trainer = RewardTrainer(recipe, section, model)
    run = RunFolder.create(recipe.output, name)
    run.write_recipe(dump_recipe(recipe))
    console.print(
        f"{len(training):,} pairs to learn from, {len(held):,} held out · scores: {trainer.way}", markup=False
    )
    metrics = trainer.teach(training, held, run.append_metrics, console)
    save_model(model, tokenizer, run.path / MODEL)
    console.print(f"model, for rewards.model: {run.path / MODEL}", markup=False)
    return RewardModelResult(run.path / MODEL, metrics)


def _checked(recipe: Recipe) -> RewardModelSection:
    if recipe.reward_model is None:
        raise UserError("the recipe has no `reward_model` section: nothing says what to learn from")
    if recipe.cluster.used:
        raise UserError("cluster: a reward model is trained in one process; leave the section out")
    if recipe.model.lora is not None:
        raise UserError("model.lora: a reward model is trained whole; leave the adapter out")
    if recipe.model.compile:
        raise UserError("model.compile: the layers of a reward model are not compiled; leave it out")
    return recipe.reward_model


class RewardTrainer:
    """Trains `model`, a sequence classifier with one label. `way` says how it computes scores."""

    def __init__(self, recipe: Recipe, section: RewardModelSection, model: "PreTrainedModel") -> None:
        self.recipe, self.section, self.model = recipe, section, model
        kind, self.way = choose(model)
        if recipe.model.checkpointing:
            recompute(model)
        self.forward = kind(model)
        self._pad = padding_of(model.config)
        train = recipe.train
        self.optimizer = Optimizer(model.parameters(), train.betas, train.weight_decay, train.max_grad_norm)

    def scores(self, pairs: Sequence[Pair]) -> Tensor:
        """The scores of the chosen and the rejected conversation of each pair, float32 [pairs, 2], with
        gradients."""
        rows = [ids for pair in pairs for ids in (pair.chosen, pair.rejected)]
        batch = mark_ends(scoring_batch(rows, np.repeat(np.arange(len(pairs)), 2).tolist()), self._pad)
        packed = pack(batch, joined(batch, prefix_trees(batch)))
        found = self.forward(packed)
        sample = np.searchsorted(batch.offsets, packed.source, side="right") - 1
        ordered: Tensor = found[torch.from_numpy(np.argsort(sample)).to(found.device)].view(-1, 2)
        return ordered

    def gradient(self, pairs: Sequence[Pair]) -> Metrics:
        """Accumulate the gradient of the mean loss; return `loss` and `accuracy`, the share of pairs whose chosen
        conversation has the higher score."""
        return self._over(pairs, torch.autograd.backward)

    def evaluate(self, pairs: Sequence[Pair]) -> Metrics:
        """What `gradient` returns, without one."""
        with torch.no_grad():
            return self._over(pairs, lambda loss: None)

    def _over(self, pairs: Sequence[Pair], use: Callable[[Tensor], object]) -> Metrics:
        total, right = 0.0, 0
        for part in self._micro_batches(pairs):
            scores = self.scores(part)
            margins = scores[:, 0] - scores[:, 1]
            loss = -logsigmoid(margins).sum() / len(pairs)
            use(loss)
            total += float(loss.detach())
            right += int((margins.detach() > 0).sum())
        return {"loss": total, "accuracy": right / len(pairs)}

    def _micro_batches(self, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
        """Yield the pairs in parts of at most `train.micro_batch_tokens`, or one pair; the longest first, so that
        memory that is too small shows at once."""
        part: list[Pair] = []
        filled = 0
        for pair in sorted(pairs, key=_tokens, reverse=True):
            if part and filled + _tokens(pair) > self.recipe.train.micro_batch_tokens:
                yield part
                part, filled = [], 0
            part.append(pair)
            filled += _tokens(pair)
        if part:
            yield part

    def teach(
        self, pairs: Sequence[Pair], held: Sequence[Pair], journal: Callable[[Metrics], object], console: Console
    ) -> Metrics:
        """Learn from the pairs. journal: called once a step with its metrics. Returns the last."""
        section, every = self.section, self.recipe.eval.every
        total = section.epochs * ceil(len(pairs) / section.batch)
        warmup = steps_of(self.recipe.train.warmup, total)
        metrics = self._measured({"step": 0}, held)
        if held:
            journal(metrics)
        columns = TextColumn("{task.fields[said]}"), TimeRemainingColumn()
        with Progress(
            TextColumn("[bold]pairs"), BarColumn(), MofNCompleteColumn(), *columns,
            console=console, disable=not console.is_terminal,
        ) as progress:  # fmt: skip
            bar = progress.add_task("", total=total, said=_said(metrics))
            for step, batch in enumerate(self._batches(pairs), 1):
                rate = learning_rate(step - 1, total, section.lr, "cosine", warmup)
                metrics = {"step": step, **_named("train", self.gradient(batch)), "train/lr": rate}
                metrics["train/grad_norm"] = self.optimizer.step(rate)
                if step == total or (every and step % every == 0):
                    metrics = self._measured(metrics, held)
                journal(metrics)
                progress.update(bar, advance=1, said=_said(metrics))
                if step == total or (step % LINE_EVERY == 0 and not console.is_terminal):
                    console.print(f"step {step}/{total}  {_said(metrics)}", markup=False)
        return metrics

    def _measured(self, metrics: Metrics, held: Sequence[Pair]) -> Metrics:
        return {**metrics, **_named("eval", self.evaluate(held))} if held else metrics

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
        for epoch in range(self.section.epochs):
            order = list(pairs)
            Random(f"pairs/{self.recipe.train.seed}/{epoch}").shuffle(order)
            for first in range(0, len(order), self.section.batch):
                yield order[first : first + self.section.batch]


def _tokens(pair: Pair) -> int:
    return len(pair.chosen) + len(pair.rejected)


def _named(where: str, found: Metrics) -> Metrics:
    return {f"{where}/{name}": value for name, value in found.items()}


def _said(metrics: Metrics) -> str:
    shown = {"train/loss": "loss", "train/accuracy": "accuracy", "eval/accuracy": "held-out accuracy"}
    return "  ".join(f"{name} {metrics[key]:.3f}" for key, name in shown.items() if key in metrics)
