"""`agentrl check`: what a recipe would run, without a model."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from agentrl.plugins.environment import Environment
    from agentrl.plugins.tool import Tool
    from agentrl.plugins.types import Message, Task
    from agentrl.recipe.schema import Recipe

FIRST_TASKS = 3  # shown of each split


def check_command(
    recipe: Annotated[str, typer.Argument(help="A recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change.")] = None,
) -> None:
    """Print the resolved recipe, its tasks, its tools and the first prompt, without a model."""
    from agentrl.cli.common import console
    from agentrl.plugins.registry import find, make_environment, make_tools
    from agentrl.recipe.load import dump_recipe, load_recipe

    checked = load_recipe(recipe, overrides or [])
    env, tools = make_environment(checked.env), make_tools(checked.tools)
    find("engines", checked.engine.name)
    for tracker in checked.track.trackers:
        find("trackers", tracker)
    out = console()
    _title(out, f"recipe {recipe}")
    out.print(dump_recipe(checked).rstrip(), markup=False, soft_wrap=True)
    first = _show_tasks(out, checked, env, tools)
    _show_tools(out, checked, tools)
    if first is not None:
        _show_prompt(out, checked, env, tools, first)


def _title(out: "Console", text: str) -> None:
    out.print(f"\n[bold]{text}[/bold]")


def _show_tasks(out: "Console", recipe: "Recipe", env: "Environment", tools: "Sequence[Tool]") -> "Task | None":
    """Prints every split's size and first tasks. Returns the first one to train on."""
    from rich.markup import escape

    from agentrl.cli.common import shortened
    from agentrl.errors import UserError, nearest

    _title(out, f"tasks of environment {recipe.env.name}, source {escape(recipe.env.source)}")
    for split in recipe.eval.splits or ():
        if split not in env.splits:
            raise UserError(
                f"eval.splits: environment {recipe.env.name!r} has no {split!r}{nearest(split, env.splits)}"
            )
    first: Task | None = None
    for split in ("train", *env.splits):
        tasks = env.tasks(split)
        out.print(f"{split}: {len(tasks)} tasks")
        for i in range(min(FIRST_TASKS, len(tasks))):
            _check_task(tasks[i], tools)
            first = first or tasks[i]
            out.print(f"  {tasks[i].id}  {shortened(str(dict(tasks[i].data)))}", markup=False, soft_wrap=True)
    return first


def _check_task(task: "Task", tools: "Sequence[Tool]") -> None:
    from agentrl.errors import UserError, nearest

    names = {tool.name for tool in tools}
    for name in task.tools or ():
        if name not in names:
            raise UserError(
                f"task {task.id} names the tool {name!r}, which the recipe does not list{nearest(name, names)}"
            )


def _show_tools(out: "Console", recipe: "Recipe", tools: "Sequence[Tool]") -> None:
    import json

    from agentrl.plugins.registry import find
    from agentrl.plugins.schema import outline

    _title(out, "tools" if tools else "tools: none")
    for section, tool in zip(recipe.tools, tools, strict=True):
        out.print(f"{tool.name} {outline(tool.parameters)} from {find('tools', section.name).origin}", markup=False)
        out.print(f"  {tool.description}", markup=False, soft_wrap=True)
        out.print(f"  {json.dumps(dict(tool.parameters), ensure_ascii=False)}", markup=False, soft_wrap=True)


def _show_prompt(out: "Console", recipe: "Recipe", env: "Environment", tools: "Sequence[Tool]", task: "Task") -> None:
    import asyncio

    messages = asyncio.run(_opening(env, task, recipe.rollout.timeout, recipe.train.seed))
    offered = [tool.schema for tool in tools if task.tools is None or tool.name in task.tools]
    _title(out, f"first prompt (task {task.id})")
    text, note = _rendered(recipe, messages, offered)
    out.print(text, markup=False, soft_wrap=True)
    out.print(note, style="dim", markup=False, soft_wrap=True)


async def _opening(env: "Environment", task: "Task", seconds: float, seed: int) -> "Sequence[Message]":
    from random import Random
    from time import monotonic

    from agentrl.plugins.types import Session

    session = Session(f"check/{task.id}", task, Random(seed), monotonic() + seconds)
    try:
        return await env.create(session, **task.create_kwargs)
    finally:
        await env.release(session)
        await env.close()


def _rendered(recipe: "Recipe", messages: "Sequence[Message]", tools: list[dict[str, Any]]) -> tuple[str, str]:
    """The prompt as the model reads it and its length; the messages where the tokenizer is not on this machine."""
    from agentrl.chat.load import load_chat
    from agentrl.models.load import resolve

    model = recipe.model
    place = resolve(model.path)
    tokenizer = _tokenizer(place, model.trust_remote_code)
    if tokenizer is None:
        text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        return text, f"(the messages, not rendered: the tokenizer of {model.path} is not on this machine)"
    chat = load_chat(tokenizer, model_path=place, kind=model.chat, chat_template=model.chat_template, tools=tools)
    ids = chat.render(messages, tools)
    rewrites = f"; the template rewrites its history: {chat.rewrites_history}" if chat.rewrites_history else ""
    return chat.decode(ids), f"({len(ids)} tokens; rollout.max_tokens is {recipe.rollout.max_tokens}{rewrites})"


def _tokenizer(place: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None
