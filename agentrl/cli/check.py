"""`agentrl check`: show what a recipe would run, without loading a model."""

from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from agentrl.cli.common import Overrides
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from agentrl.containment.event_loop import Runner
    from agentrl.models.memory import MemoryPlan
    from agentrl.plugins.environment import Environment
    from agentrl.plugins.toolbox import Toolbox
    from agentrl.plugins.types import Message, Task
    from agentrl.recipe.schema import Recipe
    from agentrl.recipe.sections.model import ModelSection

FIRST_TASKS = 3  # tasks of each split to show


def check_command(
    recipe: Annotated[str, Argument(help="A recipe: a file, or the name of one that ships.")],
    overrides: Overrides = None,
    whole: Annotated[bool, Option("--recipe", help="Also print the whole recipe: every key with its value.")] = False,
) -> None:
    """Print the first prompt, tasks and tools, the memory that a recipe needs and what is missing, without a model."""
    from agentrl.recipe.load import load_recipe, show_recipe

    loaded = load_recipe(recipe, overrides or [])  # before anything heavy is imported
    from agentrl.cli.common import console
    from agentrl.containment.event_loop import Runner
    from agentrl.learner.monitors import Health
    from agentrl.models.load import resolve_types
    from agentrl.plugins.registry import find, make_environment, tracker_makers
    from agentrl.plugins.rewards import make_rewards
    from agentrl.plugins.toolbox import Toolbox
    from agentrl.training.preflight import check_names

    checked = resolve_types(loaded)
    env = make_environment(checked.env)
    make_rewards(checked.rewards)
    check_names(checked)
    find("engines", checked.engine.name)
    tracker_makers(checked.track.trackers)
    out = console()
    if whole:
        _title(out, f"recipe {recipe}")
        out.print(show_recipe(checked).rstrip(), markup=False, soft_wrap=True)
    for finding in Health(checked).before_start():
        _warn(out, finding.line)
    with Runner() as runner:
        toolbox = runner.run(Toolbox.open(checked.tools, env))
        try:
            _show_parts(out, checked, env, toolbox, runner)
        finally:
            runner.run(_close(toolbox, env))


def _show_parts(out: "Console", checked: "Recipe", env: "Environment", toolbox: "Toolbox", runner: "Runner") -> None:
    """Print the prompt, tasks, tools and memory. Raises UserError, once all is shown that can be: the tasks or the
    first prompt cannot be read, or workspaces cannot be had as they are asked for."""
    from agentrl.errors import UserError
    from agentrl.rollout.hooks import opening_of
    from agentrl.training.preflight import check_workspace

    first, wrong = None, None
    try:
        first = _first_task(checked, env, toolbox)
    except UserError as error:
        wrong = error
    plan = _plan(checked, fetch=first is not None)  # it may fetch the tokenizer that the prompt is rendered with
    try:
        if first is not None:
            opening = runner.run(opening_of(env, first, checked.rollout.timeout, checked.train.seed))
            _show_prompt(out, checked, opening, env, toolbox, first)
    except UserError as error:
        wrong = error
    if wrong is not None:
        out.print("\n(the first prompt cannot be shown, see below)", style="dim")
    _show_tasks(out, checked, env)
    _show_tools(out, checked, env, toolbox)
    if checked.start is not None and wrong is None:
        _show_start(out, checked)
    _show_memory(out, checked, plan)
    if wrong is not None:
        raise wrong
    check_workspace(checked, env, toolbox.tools, ("train", *env.splits))


def _warn(out: "Console", line: str) -> None:
    out.print(f"warning: {line}", style="yellow", markup=False, soft_wrap=True)


def _title(out: "Console", text: str) -> None:
    out.print(f"\n{text}", style="bold", markup=False)


async def _close(toolbox: "Toolbox", env: "Environment") -> None:
    await toolbox.close()
    await env.close()


def _first_task(recipe: "Recipe", env: "Environment", toolbox: "Toolbox") -> "Task":
    """The first task to train on; the first ones of every split are looked at. Raises UserError."""
    from agentrl.errors import UserError, nearest
    from agentrl.plugins.registry import tasks_of
    from agentrl.plugins.toolbox import offered

    for split in recipe.eval.splits or ():
        if split not in env.splits:
            raise UserError(
                f"eval.splits: environment {recipe.env.name!r} has no {split!r}{nearest(split, env.splits)}"
            )
    first: Task | None = None
    for split in ("train", *env.splits):
        tasks = tasks_of(env, split)
        for i in range(min(FIRST_TASKS, len(tasks))):
            offered(tasks[i], toolbox.tools, env)
            first = first or tasks[i]
    if first is None:
        raise UserError(f"environment {env.name!r} (source {recipe.shown()['env']['source']}) has no task")
    return first


def _show_tasks(out: "Console", recipe: "Recipe", env: "Environment") -> None:
    """Print the size and first tasks of every split."""
    from agentrl.cli.common import shortened
    from agentrl.errors import UserError
    from agentrl.plugins.registry import tasks_of

    source = "" if recipe.env.mix else f", source {recipe.shown()['env']['source']}"
    _title(out, f"tasks of environment {env.name}{source}")
    for split in ("train", *env.splits):
        try:
            tasks = tasks_of(env, split)
            count, first = len(tasks), [tasks[i] for i in range(min(FIRST_TASKS, len(tasks)))]
        except UserError:
            out.print("(they cannot be read, see below)", style="dim")
            return
        out.print(f"{split}: {count} tasks", markup=False)
        for task in first:
            out.print(f"  {task.id}  {shortened(str(dict(task.data)))}", markup=False, soft_wrap=True)


def _show_tools(out: "Console", recipe: "Recipe", env: "Environment", toolbox: "Toolbox") -> None:
    """Print the tools, and a warning where the model has never seen them."""
    import json

    from agentrl.models import never_seen
    from agentrl.plugins.mixture import left_out
    from agentrl.plugins.schema import outline

    own = [(tool, f"environment {env.name}") for tool in env.tools()]
    tools = [*zip(toolbox.tools, toolbox.origins, strict=True), *own]
    _title(out, "tools" if tools else "tools: none")
    for tool, origin in tools:
        out.print(f"{tool.name} {outline(tool.parameters)} from {origin}", markup=False)
        out.print(f"  {tool.description}", markup=False, soft_wrap=True)
        shown = tool.schema["function"]["parameters"]
        out.print(f"  {json.dumps(shown, ensure_ascii=False)}", markup=False, soft_wrap=True)
    for lacking in left_out(env, toolbox.tools, recipe.agent):
        out.print(lacking, markup=False, soft_wrap=True)
    own_format = recipe.model.chat_template is not None or recipe.model.chat != "auto"
    line = never_seen(recipe.model.path, [tool.name for tool, _ in tools], own_format)
    if line is not None and recipe.start is None:
        _warn(out, line)


def _show_start(out: "Console", recipe: "Recipe") -> None:
    """Print what is taught before the first step, and whether it is kept from a run before."""
    from agentrl.fine_tuning.stage import stage_recipe
    from agentrl.fine_tuning.start import kept, place_of
    from agentrl.fine_tuning.trainer import RATES, size_of

    place, section = place_of(recipe), stage_recipe(recipe).sft
    assert section is not None
    _title(out, f"start: {recipe.start}" + (", of a new model (sft.new_model)" if recipe.new_model is not None else ""))
    for stage in section.stages:
        length = f"{stage.steps} steps" if stage.steps else f"{stage.epochs:g} epochs"
        size = "new_model" if recipe.new_model is not None else size_of(recipe)
        rate = f"lr {stage.lr or RATES[size]:g}"
        optimizer = "AdamW" if stage.muon_lr is None else f"Muon at {stage.muon_lr:g} and AdamW"
        out.print(f"{length} of {stage.batch} conversations, {optimizer}, {rate}", highlight=False)
    told = "taught already: a run begins with" if kept(place) else "taught before the first step, and kept in"
    out.print(f"{told} {place}", style="dim", markup=False, soft_wrap=True)


def _plan(recipe: "Recipe", fetch: bool) -> "MemoryPlan | None":
    """The memory plan; None where the model, or how it is laid out, is not known.

    fetch: ask the hub for a configuration that is not on this machine.
    """
    from agentrl.models.memory import plan_memory

    if recipe.new_model is not None or recipe.cluster.trainer is not None:
        return None
    plan = plan_memory(recipe)
    if plan is None and fetch and _fetched(recipe):
        plan = plan_memory(recipe)
    return plan


def _show_memory(out: "Console", recipe: "Recipe", plan: "MemoryPlan | None") -> None:
    from agentrl.models.memory import plan_pools

    computed = ", computed in bfloat16" if recipe.model.mixed else ""
    named = "a new model" if recipe.new_model is not None else recipe.model.path
    _title(out, f"memory of the trainer ({named}, {recipe.model.dtype}{computed})")
    if recipe.new_model is not None:
        out.print("(unknown before sft.new_model is made)", style="dim")
    elif recipe.cluster.trainer is not None:
        out.print("(unknown: cluster.trainer has a layout of its own)", style="dim")
    elif plan is None:
        out.print("(unknown: the model's configuration is not on this machine)", style="dim")
    else:
        trained = "" if plan.trained is None else f", of which {plan.trained / 1e6:,.2f} M are trained (LoRA)"
        out.print(f"{plan.parameters / 1e6:,.1f} M parameters{trained}")
        _show_plan(out, recipe, plan, "of the actor" if recipe.cluster.pools else "", recipe.cluster.size)
        _show_traffic(out, recipe)
        for pool, own in plan_pools(recipe):
            _show_plan(out, recipe, own, f"of the pool ({', '.join(pool.roles)})", pool.workers)
        _show_update(out, recipe)
        out.print(f"the engine's cache takes {_size(plan.cache_token)} per token", highlight=False)
    _show_context(out, recipe)
    _show_devices(out, recipe, plan)
    for line in _missing(recipe, plan):
        out.print(f"missing: {line}", style="yellow", markup=False, soft_wrap=True)
    for line in _advice(recipe, plan):
        out.print(f"advice: {line}", style="dim", markup=False, soft_wrap=True)


def _show_context(out: "Console", recipe: "Recipe") -> None:
    from agentrl.engine.base import engine_class
    from agentrl.models.shape import expected_context, short_context

    if engine_class(recipe.engine.name).brings_chat:
        return
    context = expected_context(recipe)
    if context is not None and (line := short_context(recipe, context)):
        out.print(line, style="yellow", markup=False, soft_wrap=True)


def _fetched(recipe: "Recipe") -> bool:
    """Download configurations and tokenizer (some MB), as a run would. Returns whether the configurations are here."""
    from transformers import AutoConfig, AutoTokenizer

    from agentrl.models.load import resolve

    model, others = recipe.model, (recipe.critic.path if recipe.critic else None, recipe.rewards.model)
    try:
        for path in (model.path, *filter(None, others)):
            AutoConfig.from_pretrained(resolve(path), trust_remote_code=model.trust_remote_code)
        AutoTokenizer.from_pretrained(resolve(model.path), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError):
        return False
    return True


PARTS = (
    "weights", "gradients", "optimizer", "reference", "critic", "reward_model", "teachers", "gathered",
    "activations", "tower", "logits",
)  # fmt: skip


def _show_plan(out: "Console", recipe: "Recipe", plan: "MemoryPlan", owner: str, workers: int) -> None:
    """Print the memory of one worker, part by part."""
    from agentrl.engine.base import launched_by
    from agentrl.models.load import on_gpu

    if recipe.cluster.used:
        place = "a GPU each" if recipe.cluster.gpus else "on CPUs"
        names = " ".join(word for word in (f"{workers} worker{'s' if workers > 1 else ''}", owner) if word)
        out.print(f"{names}, {place}; {_size(plan.device)} on each:", highlight=False)
    else:
        out.print(f"{_size(plan.device)} in total:", highlight=False)
    notes = {
        "activations": f"of {recipe.train.micro_batch_tokens:,} packed tokens"
        + (", with activation checkpointing" if recipe.model.checkpointing else ""),
        "tower": "activations of the vision tower, if all of these tokens are of images"
        + (", frozen" if "vision" in recipe.model.freeze else ""),
        "gathered": "whole layers while they are computed"
        if recipe.cluster.used
        else "the weights in the type that is computed in",
    }
    for name in PARTS:
        if size := getattr(plan, name):
            note = f" ({notes[name]})" if name in notes else ""
            out.print(f"  {name:<12}{_size(size):>10}{note}", highlight=False)
    if recipe.cluster.gpus or on_gpu(recipe):
        launched = launched_by(recipe.engine)
        shared = recipe.engine.sleep and bool(launched.servers or launched.elsewhere)
        asleep = ", a server that sleeps" if shared else ""
        beside = _size(plan.beside(launched.ranks if shared else 0))
        out.print(f"  {'beside':<12}{beside:>10} (not in the sum: CUDA, NCCL{asleep}; estimated)", highlight=False)
    if plan.host:
        out.print(f"and {_size(plan.host)} of CPU memory for each worker (cluster.offload)", highlight=False)


def _show_traffic(out: "Console", recipe: "Recipe") -> None:
    from agentrl.models.memory import Setting, Traffic
    from agentrl.models.shape import read_shape

    how, shape = Setting.of(recipe, recipe.cluster.size), read_shape(recipe.model)
    if how.shard > 1 and shape is not None:
        moved = Traffic.of(shape, how)
        tokens = f", and {_size(moved.tokens)} of tokens for its experts and back" if moved.tokens else ""
        out.print(
            f"each worker receives {_size(moved.update)} of weights and {_size(moved.gradients)} of gradients per "
            f"micro-batch{tokens}",
            highlight=False,
            soft_wrap=True,
        )


def _show_update(out: "Console", recipe: "Recipe") -> None:
    """Print how long the longest update takes on GPUs, by arithmetic: those that are here, else H100s."""
    import torch

    from agentrl.compute.flops import AGAIN, TERA, USUAL_MFU, known_peak, longest_update
    from agentrl.models.load import on_gpu

    if not (recipe.cluster.gpus or on_gpu(recipe)) or (flops := longest_update(recipe)) is None:
        return
    name = torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else "H100"
    half = "bfloat16" in (recipe.model.dtype, recipe.model.compute)
    if (peak := known_peak(name, torch.bfloat16 if half else torch.float32)) is None:
        return
    gpus, rollout = recipe.cluster.size if recipe.cluster.gpus else 1, recipe.rollout
    seconds = flops * (AGAIN if recipe.model.checkpointing else 1) / (gpus * peak * USUAL_MFU)
    spent, done = (f"{of:,.0f}" if of >= 10 else f"{of:.2g}" for of in (seconds, flops / TERA / 1000))
    whole = f"{rollout.tasks * rollout.n:,} samples of {rollout.max_tokens:,} tokens"
    out.print(
        f"a step's update takes at most {spent} s ({done} PFLOP: {whole}, on {gpus} x {name} at an MFU of "
        f"{USUAL_MFU:g}; estimated, `agentrl doctor` tries one)",
        highlight=False,
        soft_wrap=True,
    )


def _show_devices(out: "Console", recipe: "Recipe", plan: "MemoryPlan | None") -> None:
    """Print which part of the run gets which device, and what it is expected to take of it."""
    import torch

    from agentrl.cluster.placement import Expected, Row, named
    from agentrl.models.memory import plan_pools
    from agentrl.training.preflight import placement_of

    pools = {pool: own.device for pool, own in plan_pools(recipe)} if plan is not None else {}
    weights = plan.parameters * (4 if recipe.model.dtype == "float32" else 2) if plan is not None else None
    actor = plan.device if plan is not None else None
    expected = Expected(actor, tuple(pools.get(pool) for pool in recipe.cluster.pools), weights)
    placement = placement_of(recipe, member=True, expected=expected)
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]

    def cells(row: Row) -> tuple[str, str, str, str]:
        where = {None: "where Ray has room", 0: "this machine"}.get(row.node, f"machine {(row.node or 0) + 1}")
        unknown = f"{row.workers} GPUs" if row.node is None else "CPUs"
        cost = _size(row.memory) if row.memory is not None else ""
        if row.share is not None:
            held = [sizes[device] for device in row.devices if device < len(sizes)]
            cost = f"{row.share:g} of the GPU" + (f", {_size(row.share * min(held))}" if held else "")
        return where, named(row.devices) if row.devices else unknown, row.part, cost

    found = [cells(row) for row in placement.rows]
    widths = [max(len(cell[column]) for cell in found) for column in range(4)]
    _title(out, "devices" + (", shared: the engine sleeps while the trainer works" if placement.shared else ""))
    for row in found:
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def _missing(recipe: "Recipe", plan: "MemoryPlan | None") -> list[str]:
    """What this machine lacks to run the recipe, or to be one of the machines of its cluster."""
    from agentrl.training.preflight import lacking, lacking_gpus, lacking_memory

    lines = lacking(recipe)
    lines += [line for line in lacking_gpus(recipe, member=True) if line not in lines]
    return lines + lacking_memory(recipe, plan)


LARGE = 200e6
"""Parameters from which the engine `local` is far slower on a GPU than a server."""


def _advice(recipe: "Recipe", plan: "MemoryPlan | None") -> list[str]:
    """What would make the run faster."""
    from importlib.util import find_spec

    from agentrl.models.dense import cpu_has_bfloat16
    from agentrl.models.load import on_gpu

    lines = []
    if not on_gpu(recipe):
        half = "bfloat16" in (recipe.model.dtype, recipe.model.compute)
        if half and not cpu_has_bfloat16():
            lines.append(
                "this CPU has no products in bfloat16, in which its updates take several times as long as in float32: "
                "model.dtype=float32 model.compute=same"
            )
        return lines
    if find_spec("liger_kernel") is None:
        lines.append("norms and gates run as one kernel each with liger-kernel: pip install 'agentrl[gpu]'")
    if recipe.engine.name == "local" and plan is not None and plan.parameters > LARGE:
        lines.append("the engine `local` decodes on one GPU, without CUDA graphs: engine.name=sglang is far faster")
    return lines


def _size(count: float) -> str:
    """A number of bytes in words."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _show_prompt(
    out: "Console",
    recipe: "Recipe",
    messages: "Sequence[Message]",
    env: "Environment",
    toolbox: "Toolbox",
    task: "Task",
) -> None:
    from agentrl.plugins.toolbox import offered

    schemas = [tool.schema for tool in offered(task, toolbox.tools, env).values()]
    _title(out, f"first prompt (task {task.id})")
    text, note = _rendered(recipe, messages, schemas)
    out.print(text, markup=False, soft_wrap=True)
    out.print(note, style="dim", markup=False, soft_wrap=True)


def _plain(content: object) -> str:
    """A content as text, with `<image>` where one stands."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "".join(str(part.get("text", f"<{part.get('type')}>")) for part in parts)


def _rendered(recipe: "Recipe", messages: "Sequence[Message]", tools: list[dict[str, Json]]) -> tuple[str, str]:
    """The prompt as the model reads it, and its length; the messages if the tokenizer is not on this machine."""
    from agentrl.chat.base import Seeing, images_in
    from agentrl.chat.load import load_chat
    from agentrl.images import check_count, stored
    from agentrl.models.image_input import limit_images
    from agentrl.models.load import resolve

    model = recipe.model
    place = resolve(model.path)
    tokenizer = _tokenizer(place, model)
    if tokenizer is None:
        text = "\n".join(f"{message['role']}: {_plain(message['content'])}" for message in messages)
        return text, f"(the messages, not rendered: the tokenizer of {model.path} is not on this machine)"
    chat = load_chat(tokenizer, model_path=place, kind=model.chat, chat_template=model.chat_template, tools=tools)
    if isinstance(chat, Seeing):
        limit_images(recipe)
        messages = list(map(stored, messages))
        check_count(messages, recipe.rollout.max_images)
    ids = chat.render(messages, tools)
    images = [span.tokens for span in images_in(chat, ids, messages)]
    rewrites = f"; the template rewrites its history: {chat.rewrites_history}" if chat.rewrites_history else ""
    seen = f", {sum(images)} of them of images" if images else ""
    length = f"{len(ids)} tokens{seen}; rollout.max_tokens is {recipe.rollout.max_tokens}"
    return chat.decode(ids), f"({length}{rewrites})\n{_images_note(recipe, images)}(chat: {chat.description})"


def _images_note(recipe: "Recipe", tokens: "Sequence[int]") -> str:
    """A line about the images of an opening, by the tokens of each; an empty text where it has none."""
    if not tokens:
        return ""
    limits, largest = recipe.rollout, max(tokens)
    least = f"{min(tokens):,} to " if min(tokens) < largest else ""
    most = min(limits.max_images * largest, limits.max_tokens)
    return (
        f"(an image takes {least}{largest:,} tokens; {limits.max_images} of that size, which rollout.max_images allows "
        f"in a rollout, take {most:,} of rollout.max_tokens)\n"
    )


def _tokenizer(place: str, model: "ModelSection") -> "PreTrainedTokenizerBase | None":
    from agentrl.models import fast_tokenizer
    from agentrl.models.image_input import image_input
    from agentrl.models.load import load_tokenizer

    if fast_tokenizer.reads(place, model):
        return load_tokenizer(model, light=True)
    from transformers import AutoTokenizer

    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            place, local_files_only=True, trust_remote_code=model.trust_remote_code
        )
        found.image_input = image_input(place, model.trust_remote_code)
        return found
    except (OSError, ValueError):
        return None
