"""`sft`: a warm start on an environment's demonstrations, with the ids, the mask and the packing of RL."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import torch
from rich.console import Console

from agentrl.chat.base import Chat
from agentrl.chat.encode import Encoder
from agentrl.chat.load import load_chat
from agentrl.chat.template import Template
from agentrl.checkpoint.checkpoints import save_model
from agentrl.checkpoint.run_folder import MODEL, RunFolder
from agentrl.errors import UserError
from agentrl.eval.evaluate import reported
from agentrl.models.load import load_model, resolve_types
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_environment, tasks_of
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import Toolbox, close_all
from agentrl.recipe.load import dump_recipe, load_recipe
from agentrl.recipe.schema import NewModel, Recipe, RolloutSection, SftSection
from agentrl.rollout.event_loop import Runner
from agentrl.sft.demonstrations import Demonstrator, demonstration
from agentrl.sft.new_model import bare_tokenizer, new_model, read_template, train_tokenizer
from agentrl.sft.trainer import SftTrainer
from agentrl.terminal import terminal


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
    recipe = resolve_types(recipe)
    if recipe.sft is None:
        raise UserError("the recipe has no `sft` section: nothing says what to demonstrate")
    console = console or terminal()
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    env = make_environment(recipe.env)
    with ExitStack() as stack:
        runner = stack.enter_context(Runner())
        parts: dict[str, Any] = {f"environment {env.name!r}": env}

        def close() -> None:
            for line in runner.run(close_all(parts)):
                console.print(line, markup=False)

        stack.callback(close)
        toolbox = runner.run(Toolbox.open(recipe.tools, env))
        parts = {"tools": toolbox, **parts}
        tools = toolbox.tools
        _check_demonstrations(env, recipe.sft)
        if recipe.sft.new_model:
            console.print(f"making a tokenizer from {recipe.sft.new_model.texts:,} demonstrations", highlight=False)
        model, tokenizer, chat = _start(recipe, recipe.sft, env, tools, runner)
        folder, journal = _places(output, recipe, name)
        demonstrator = _demonstrator(env, tools, chat, tokenizer, recipe.rollout)
        trainer = SftTrainer(recipe, demonstrator, model, runner, console, journal)
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        console.print(
            f"model of {parameters:.2f} M parameters · training forward: {trainer.way}", highlight=False, markup=False
        )
        losses = trainer.teach(recipe.sft)
        dtype = torch.bfloat16 if recipe.sft.new_model else next(model.parameters()).dtype
        save_model(model.to(dtype), tokenizer, folder)
    console.print(f"model: {folder}", highlight=False, markup=False)
    last = losses[-max(1, len(losses) // 10) :]
    return SftResult(folder, sum(last) / len(last), trainer.steps, trainer.tokens, monotonic() - trainer.began)


def _check_demonstrations(env: Environment, section: SftSection) -> None:
    """Ask for one of each style, before anything is made. Raises UserError where there is none."""
    tasks = tasks_of(env, "train")
    if not len(tasks):
        raise UserError(f"environment {env.name!r} has no task in train")
    for stage in section.stages:
        demonstration(env, tasks[0], Random(0), stage.style)


def _places(output: str | None, recipe: Recipe, name: str) -> tuple[Path, Callable[[dict[str, float]], object]]:
    """Return the model's folder, and who takes the metrics: a new run folder unless `output` names a folder for the
    model."""
    if output is None:
        run = RunFolder.create(recipe.output, name)
        run.write_recipe(dump_recipe(recipe))
        return run.path / MODEL, run.append_metrics
    folder = Path(output)
    if (folder / "config.json").exists():
        raise UserError(f"{folder} holds a model already: remove it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder, lambda metrics: None


def _start(
    recipe: Recipe, section: SftSection, env: Environment, tools: Sequence[Tool], runner: Runner
) -> tuple[Any, Any, Chat]:
    """Return the model, its tokenizer and its chat; all new where the recipe says so."""
    if section.new_model is None:
        model, tokenizer = load_model(recipe.model, recipe.train.seed)
    elif recipe.model.lora is not None:
        raise UserError("model.lora adapts a model that exists, sft.new_model makes one: choose one")
    else:
        tokenizer = _new_tokenizer(recipe, section.new_model, env, tools, runner)
        model = new_model(section.new_model, tokenizer, recipe.train.seed)
    return model, tokenizer, _chat(recipe, tokenizer, env, tools)


def _chat(recipe: Recipe, tokenizer: Any, env: Environment, tools: Sequence[Tool]) -> Chat:
    section = recipe.model
    return load_chat(
        tokenizer,
        model_path=section.path if recipe.sft is None or recipe.sft.new_model is None else "",
        kind=section.chat,
        tools=[tool.schema for tool in (*tools, *env.tools())],
    )


def _demonstrator(
    env: Environment, tools: Sequence[Tool], chat: Chat, tokenizer: Any, limits: RolloutSection
) -> Demonstrator:
    template = Template(tokenizer, None, [tool.schema for tool in (*tools, *env.tools())])
    return Demonstrator(env, tools, chat, template, Encoder(tokenizer, template.source), limits)


def _new_tokenizer(recipe: Recipe, section: NewModel, env: Environment, tools: Sequence[Tool], runner: Runner) -> Any:
    """Train a tokenizer on rendered demonstrations of every stage's style over all splits that are trained on or
    reported."""
    template = read_template(section)
    bare = bare_tokenizer(template)
    demonstrator = _demonstrator(env, tools, _chat(recipe, bare, env, tools), bare, recipe.rollout)
    styles = list(dict.fromkeys(stage.style for stage in (recipe.sft or SftSection()).stages))

    async def texts() -> list[str]:
        found = []
        splits = ("train", *reported(env))
        for split in splits:
            tasks = tasks_of(env, split)
            for i in range(min(len(tasks), section.texts // len(splits))):
                rng = Random(f"tokenizer/{recipe.train.seed}/{split}/{i}")
                opening, said = await demonstrator.messages(tasks[i], rng, styles[i % len(styles)])
                schemas = demonstrator.schemas(tasks[i])
                found.append(demonstrator.template.text([*opening, *said], schemas, generate=False))
        return found

    context = section.config["max_position_embeddings"]
    return train_tokenizer(runner.run(texts()), section.vocabulary, template, context, section.tokens)
