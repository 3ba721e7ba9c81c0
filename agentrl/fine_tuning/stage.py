"""The stage of a recipe's `start`: the recipe that teaches it, by the model's size, and a key of what it depends on."""

import hashlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from agentrl import __version__
from agentrl.containment.event_loop import Runner
from agentrl.errors import UserError
from agentrl.fine_tuning.demonstrations import OPENING_SECONDS, demonstration
from agentrl.fine_tuning.lessons import chosen_files, is_stored, open_rows
from agentrl.fine_tuning.trainer import is_small
from agentrl.jsonable import dumps
from agentrl.models.load import resolve
from agentrl.plugins.registry import load, make_environment, tasks_of
from agentrl.plugins.types import Json, Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.sft import SftSection, SftStage
from agentrl.recipe.sections.track import ProfileSection
from agentrl.rollout.hooks import opening_of

TASKS = 2000
"""Tasks that are looked at for the key, evenly spread."""
SHOWN = 32
"""Of them those whose opening and demonstration are."""
BLOCKS, BLOCK = 64, 1 << 16
"""Of a file of weights that is larger than all of them: how many blocks are read for the key, and their bytes."""
MUON_LR = 0.02  # the usual one
_TOLD = ("seed", "betas", "max_grad_norm")
_MODEL = ("path", "device", "checkpointing", "compile")


def stages_for(recipe: Recipe) -> tuple[SftStage, ...]:
    """The stages of a recipe's `start` that says nothing of them, by the size of what is trained.

    A model of less than 100 M parameters is taught in large steps, mostly by muon, which learns to copy from the prompt
    where AdamW does not in as many steps. A larger one knows how to talk and is shown a format: a few small steps.
    """
    style = recipe.start.style if recipe.start is not None else "clean"
    demonstrated = recipe.start is not None and recipe.start.source is None
    if not is_small(recipe.model):
        few = {"steps": 100} if demonstrated else {"epochs": 2.0}
        return (SftStage(style=style, batch=16, warmup=10 if demonstrated else None, **few),)
    adapted = recipe.model.lora is not None
    muon_lr = None if adapted or recipe.cluster.used else MUON_LR
    rate = 3e-3 if adapted else 1e-3
    return (SftStage(style=style, steps=300, batch=16, warmup=30, lr=rate, muon_lr=muon_lr),)


def stage_recipe(recipe: Recipe) -> Recipe:
    """The recipe by which `agentrl sft` teaches a recipe's `start`. Raises UserError."""
    assert recipe.start is not None
    if recipe.new_model is not None and recipe.model.path != ModelSection().path:
        raise UserError(
            f"model.path: {recipe.model.path} is not used, since start teaches the model that sft.new_model makes; "
            "to train yours add start=null, to teach it first add sft.new_model=null"
        )
    section = recipe.sft or SftSection(stages=stages_for(recipe))
    if recipe.start.run is not None:
        if not is_stored(recipe.start.run):
            raise UserError(f"start.run: {recipe.start.run} is no folder of a run, of rollouts or of an evaluation")
        section = section.changed(select={"solved": True})
    elif recipe.start.source is not None and is_stored(recipe.start.source):
        raise UserError(f"start.conversations: {recipe.start.source} is the folder of a run: name it in start.run")
    section = section.changed(source=recipe.start.source, accuracy=False)
    return recipe.changed(
        sft=section, eval={"every": 0}, train={"mirror": None}, track={"trackers": ()}, profile=ProfileSection()
    )


def stage_key(recipe: Recipe) -> str:
    """A text that differs where another model would be taught: by the stage, the model, the environment with its tools
    and demonstrations, or the conversations. Raises UserError: one of them cannot be read."""
    stage = stage_recipe(recipe)
    written: Any = stage.written()
    told = {
        "version": __version__,
        "workers": recipe.cluster.used,
        "aggregation": written["algorithm"]["aggregation"],
        "train": {key: written["train"][key] for key in _TOLD},
        "rollout": {key: written["rollout"][key] for key in ("compact", "max_tokens", "max_images")},
        "model": {key: value for key, value in written["model"].items() if key not in _MODEL},
        **{key: written[key] for key in ("sft", "env", "tools")},
    }
    parts = [*_weights(recipe), *_plugins(recipe), *_lessons(stage)]
    return digest([told, *parts])


def digest(value: Json) -> str:
    """A short text that differs for other values."""
    return hashlib.sha256(dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _weights(recipe: Recipe) -> Iterator[Json]:
    """What tells the model from another: its files, or the revision of the hub that is here; of a model that is made,
    its template."""
    if recipe.new_model is not None:
        yield file_digest(Path(recipe.new_model.chat_template))
        return
    folder = Path(resolve(recipe.model.path))
    if folder.is_dir():
        yield _files(folder)
    else:
        from transformers.utils.hub import cached_file

        found = cached_file(str(folder), "config.json", _raise_exceptions_for_missing_entries=False)
        yield [str(folder), Path(found).parent.name if found else ""]
    if recipe.model.lora is not None and recipe.model.lora.start is not None:
        yield _files(Path(recipe.model.lora.start))
    if recipe.model.chat_template is not None and Path(recipe.model.chat_template).is_file():
        yield file_digest(Path(recipe.model.chat_template))


def _files(folder: Path) -> Json:
    files = sorted(file for file in folder.glob("*") if file.is_file() and not file.name.startswith("."))
    return [[file.name, file_digest(file)] for file in files]


def file_digest(file: Path) -> str:
    """The digest of a file's bytes; of a large one that of its size and of blocks that are evenly spread in it."""
    size, found = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        if size <= BLOCKS * BLOCK:
            found.update(opened.read())
        else:
            found.update(str(size).encode())
            for number in range(BLOCKS):
                opened.seek(number * (size - BLOCK) // (BLOCKS - 1))
                found.update(opened.read(BLOCK))
    return found.hexdigest()


def _plugins(recipe: Recipe) -> Iterator[Json]:
    """The source files of the environments' and the tools' modules."""
    named = [("envs", part.name) for part in recipe.env.mix] or [("envs", recipe.env.name)]
    for group, name in [*named, *(("tools", tool.name) for tool in recipe.tools)]:
        try:
            file = inspect.getsourcefile(inspect.unwrap(load(group, name)))
        except TypeError:  # an object: its module is not known
            file = None
        yield file_digest(Path(file)) if file is not None and Path(file).is_file() else name


def _lessons(stage: Recipe) -> Iterator[Json]:
    """What is taught: demonstrations and openings of tasks, rows, or the files of rollouts."""
    section = stage.sft
    assert section is not None
    if section.source is None:
        yield from _demonstrations(stage, section)
    elif is_stored(section.source):
        yield [file_digest(file.path) for file in chosen_files(Path(section.source), section.select.split)]
    else:
        try:
            rows = open_rows(section.source)
        except UserError as error:
            raise UserError(str(error).replace("sft.source", "start.conversations")) from error
        yield digest([dict(rows.row(i)) for i in range(len(rows))])


def _demonstrations(stage: Recipe, section: SftSection) -> Iterator[Json]:
    env = make_environment(stage.env)
    with Runner() as runner:
        try:
            tasks = tasks_of(env, "train")
            if not len(tasks):
                raise UserError(f"environment {env.name!r} has no task in train")
            yield len(tasks)
            yield [[task.id, dict(task.data)] for task in _spread(tasks, TASKS)]
            for task in _spread(tasks, SHOWN):
                yield [dict(message) for message in runner.run(opening_of(env, task, OPENING_SECONDS, 0))]
                yield [[dict(m) for m in demonstration(env, task, Random(0), one.style)] for one in section.stages]
            yield [tool.schema for tool in env.tools()]
        finally:
            runner.run(env.close())


def _spread(tasks: Any, count: int) -> Iterable[Task]:
    count = min(count, len(tasks))
    return (tasks[number * len(tasks) // count] for number in range(count))
