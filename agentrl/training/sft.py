"""`sft`: a warm start on an environment's demonstrations, with the ids, the mask and the packing of RL."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentrl.chat.base import Chat
from agentrl.chat.encode import Encoder
from agentrl.chat.load import load_chat
from agentrl.chat.template import Template
from agentrl.data.sampler import TaskSampler
from agentrl.errors import UserError
from agentrl.models.load import load_model
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_environment, make_tools
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Task
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import NewModel, Recipe, SftSection, SftStage
from agentrl.training.batch import Batch
from agentrl.training.checkpoint import save_model
from agentrl.training.examples import Demonstrator
from agentrl.training.forward import Forward, choose
from agentrl.training.newmodel import bare_tokenizer, new_model, read_template, train_tokenizer
from agentrl.training.optimizer import MuonAdamW, Optimizer, learning_rate
from agentrl.training.packing import micro_batches
from agentrl.training.run_folder import RunFolder

TOKENIZER_TEXTS = 16_000  # demonstrations, over all splits, that a new tokenizer learns from
FLOOR = 0.03  # of a stage's learning rate, at its end


@dataclass(frozen=True, slots=True)
class SftResult:
    """folder: the model's, as `transformers` loads it. loss: mean cross entropy of the last tenth of the last stage,
    nats a token. steps, tokens: done in all (tokens computed). seconds: of training."""

    folder: Path
    loss: float
    steps: int
    tokens: int
    seconds: float


def sft(
    recipe: Recipe | str, output: str | None = None, *, name: str = "sft", console: Console | None = None
) -> SftResult:
    """Train `model.path`, or a new model, on demonstrations by the recipe's `sft` section.

    output: the model's folder; None: `model/` in a new run folder. Raises UserError: one line.
    """
    if isinstance(recipe, str):
        name, recipe = Path(recipe).stem, load_recipe(recipe)
    if recipe.sft is None:
        raise UserError("the recipe has no `sft` section: nothing says what to demonstrate")
    console = console or Console()
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    env, tools = make_environment(recipe.env), make_tools(recipe.tools)
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        stack.callback(lambda: runner.run(_close(env, tools)))
        model, tokenizer, chat = _start(recipe, recipe.sft, env, tools, runner)
        folder = _folder(output, recipe, name)
        school = School(recipe, env, _demonstrator(env, tools, chat, tokenizer, recipe), model, runner, console)
        console.print(f"model of {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters · {school.way}")
        result = school.train(recipe.sft, folder)
    dtype = torch.bfloat16 if recipe.sft.new_model else next(model.parameters()).dtype
    save_model(model.to(dtype), tokenizer, folder)
    console.print(f"model: {folder}", highlight=False)
    return result


async def _close(env: Environment, tools: Sequence[Tool]) -> None:
    plugins: list[Tool | Environment] = [*tools, env]
    for plugin in plugins:
        await plugin.close()


def _folder(output: str | None, recipe: Recipe, name: str) -> Path:
    if output is None:
        return RunFolder.create(recipe.output, name).path / "model"
    folder = Path(output)
    if (folder / "config.json").exists():
        raise UserError(f"{folder} holds a model already: remove it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _start(
    recipe: Recipe, section: SftSection, env: Environment, tools: Sequence[Tool], runner: asyncio.Runner
) -> tuple[Any, Any, Chat]:
    """The model, its tokenizer and its chat; all new where the recipe says so."""
    if section.new_model is None:
        model, tokenizer = load_model(recipe.model)
    else:
        tokenizer = _new_tokenizer(recipe, section.new_model, env, tools, runner)
        model = new_model(section.new_model, tokenizer, recipe.train.seed)
    return model, tokenizer, _chat(recipe, tokenizer, tools)


def _chat(recipe: Recipe, tokenizer: Any, tools: Sequence[Tool]) -> Chat:
    section = recipe.model
    return load_chat(
        tokenizer,
        model_path=section.path if recipe.sft is None or recipe.sft.new_model is None else "",
        kind=section.chat,
        chat_template=section.chat_template,
        tools=[tool.schema for tool in tools],
    )


def _demonstrator(env: Environment, tools: Sequence[Tool], chat: Chat, tokenizer: Any, recipe: Recipe) -> Demonstrator:
    source = recipe.model.chat_template
    text = Path(source).read_text(encoding="utf-8") if source and Path(source).is_file() else source
    template = Template(tokenizer, text, [tool.schema for tool in tools])
    return Demonstrator(env, tools, chat, template, Encoder(tokenizer, template.source))


def _new_tokenizer(
    recipe: Recipe, section: NewModel, env: Environment, tools: Sequence[Tool], runner: asyncio.Runner
) -> Any:
    """From rendered demonstrations of every stage's style over all splits."""
    template = read_template(section)
    bare = bare_tokenizer(template)
    demonstrator = _demonstrator(env, tools, _chat(recipe, bare, tools), bare, recipe)
    styles = list(dict.fromkeys(stage.style for stage in (recipe.sft or SftSection()).stages))

    async def texts() -> list[str]:
        found = []
        for split in ("train", *env.splits):
            tasks = env.tasks(split)
            for i in range(min(len(tasks), TOKENIZER_TEXTS // (1 + len(env.splits)))):
                rng = Random(f"tokenizer/{recipe.train.seed}/{split}/{i}")
                opening, said = await demonstrator.messages(tasks[i], rng, styles[i % len(styles)])
                schemas = demonstrator.schemas(tasks[i])
                found.append(demonstrator.template.text([*opening, *said], schemas, generate=False))
        return found

    return train_tokenizer(runner.run(texts()), section.vocabulary, template, section.context, section.tokens)


class School:
    """Goes through the stages of an `sft` section."""

    def __init__(
        self, recipe: Recipe, env: Environment, demonstrator: Demonstrator, model: Any, runner: asyncio.Runner,
        console: Console,
    ) -> None:  # fmt: skip
        self.recipe, self.model, self.console = recipe, model, console
        self.demonstrator, self.runner = demonstrator, runner
        self.tasks: Sequence[Task] = env.tasks("train")
        self.sampler = TaskSampler(len(self.tasks), recipe.train.seed)
        self.forward: Forward
        self.forward, self.way = choose(model)
        self.tokens = 0

    def train(self, section: SftSection, folder: Path) -> SftResult:
        """All stages, each with an optimizer and a schedule of its own."""
        began = monotonic()
        losses: list[float] = []
        with self._progress() as progress:
            for number, stage in enumerate(section.stages):
                bar = progress.add_task(f"{stage.style}", total=stage.steps, loss="", speed="")
                losses = []
                for loss in self._stage(section, stage, number):
                    losses.append(loss)
                    recent = losses[-50:]
                    speed = f"{self.tokens / (monotonic() - began):,.0f} tokens/s"
                    progress.update(bar, advance=1, loss=f"loss {sum(recent) / len(recent):.4f}", speed=speed)
                self._say(stage, losses)
        last = losses[-max(1, len(losses) // 10) :]
        steps = sum(stage.steps for stage in section.stages)
        return SftResult(folder, sum(last) / len(last), steps, self.tokens, monotonic() - began)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[speed]}"), TimeRemainingColumn(),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip

    def _say(self, stage: SftStage, losses: Sequence[float]) -> None:
        recent = losses[-50:]
        self.console.print(
            f"stage {stage.style}: {stage.steps} steps, loss {losses[0]:.3f} -> {sum(recent) / len(recent):.4f}",
            highlight=False,
        )

    def _stage(self, section: SftSection, stage: SftStage, number: int) -> Iterator[float]:
        train = self.recipe.train
        optimizer = self._optimizer(section, stage)
        for step in range(stage.steps):
            batch = self._batch(stage, f"{train.seed}/{number}/{step}")
            loss = self._gradient(batch)
            optimizer.step(learning_rate(step, stage.steps, stage.lr, "cosine", section.warmup_steps, FLOOR))
            yield loss

    def _optimizer(self, section: SftSection, stage: SftStage) -> Optimizer | MuonAdamW:
        train = self.recipe.train
        if section.optimizer == "adamw":
            return Optimizer(self.model.parameters(), train.betas, section.weight_decay, train.max_grad_norm)
        share = section.muon_lr / stage.lr
        return MuonAdamW(self.model, share, train.betas, section.weight_decay, train.max_grad_norm)

    def _batch(self, stage: SftStage, seed: str) -> Batch:
        """The next demonstrations. All count as one group, so what their prompts have in common is computed once."""

        async def demonstrate() -> Batch:
            drawn = [self.tasks[i] for i in self.sampler.draw(stage.batch)]
            made = [
                await self.demonstrator.trajectory(task, Random(f"{seed}/{i}"), stage.style)
                for i, task in enumerate(drawn)
            ]
            return Batch.from_trajectories(made, [0] * len(made))

        return self.runner.run(demonstrate())

    def _gradient(self, batch: Batch) -> float:
        """Accumulate the gradient of the mean cross entropy over the demonstrated tokens; that mean, in nats."""
        count = int(np.sum(batch.sampled))
        total = 0.0
        for packed in micro_batches(batch, self.recipe.train.micro_batch_tokens):
            logprobs, _ = self.forward(packed, 1.0)
            loss = -logprobs.sum() / count
            loss.backward()
            total += float(loss.detach())
            self.tokens += len(packed.ids)
        return total
