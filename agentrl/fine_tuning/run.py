"""`sft`: a run of supervised training, on conversations or on an environment's demonstrations.

The run is one of reinforcement learning (`training/`) whose steps are given what they learn from: folder, checkpoints,
resumption, workers, adapters, trackers and evaluations are the same.
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.chat.base import Chat
from agentrl.chat.encode import Encoder
from agentrl.chat.load import load_chat
from agentrl.chat.template import Template
from agentrl.checkpoint.checkpoints import save_model
from agentrl.checkpoint.mirror import open_mirror
from agentrl.checkpoint.roles import TRAINER
from agentrl.checkpoint.run_folder import FolderLock, RunFolder, check_export
from agentrl.containment.event_loop import blocking
from agentrl.data.rows import Rows
from agentrl.data.sampler import TaskSampler
from agentrl.errors import UserError
from agentrl.eval.evaluate import choosing_split, chosen_splits, reported
from agentrl.eval.held_out import HeldOut
from agentrl.fine_tuning.conversations import Layout
from agentrl.fine_tuning.demonstrations import Demonstrator, demonstration
from agentrl.fine_tuning.lessons import (
    Lessons,
    chosen_files,
    is_stored,
    open_rows,
    read_rows,
    read_stored,
    tools_of,
    write_report,
)
from agentrl.fine_tuning.new_model import (
    SPLIT,
    SPLIT_WORDS,
    bare_tokenizer,
    new_model,
    read_template,
    train_tokenizer,
)
from agentrl.fine_tuning.trainer import (
    HELD_OUT,
    Course,
    LessonRollouts,
    SftDisplay,
    SftLearner,
    SftLoop,
    learning_recipe,
)
from agentrl.fine_tuning.writer import Writer
from agentrl.images import FOLDER as IMAGES
from agentrl.images import STORE
from agentrl.learner.roles import RoleHost
from agentrl.models.load import load_model, resolve_types
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_environment, tasks_of, tracker_makers
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import Toolbox
from agentrl.plugins.types import Json, Task
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.env import EnvSection, RewardsSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.rollout import EngineSection
from agentrl.recipe.sections.sft import NewModel, SftSection
from agentrl.rollout.model_reward import ask_reward_model
from agentrl.rollout.player import Player
from agentrl.training.interrupt import Interrupts
from agentrl.training.preflight import Checked, lacking, placement_of
from agentrl.training.run import changes, check_same_run, last_checkpoint, local_run, run_with_restarts
from agentrl.training.setup import Start, assemble, make_journal, make_player, make_profiler, make_role_host

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START = "start"
"""In the run folder: a new model before its first step."""
COMMAND = "agentrl sft"
FIXED = ("env", "tools", "model", "train.seed", "sft.source", "sft.format", "sft.images", "sft.image_folder",
         "sft.learn", "sft.history", "sft.select", "sft.held_out", "sft.new_model")  # fmt: skip
"""Keys that a resumed run must keep, because they define what is learned, and by which model."""


@dataclass(frozen=True, slots=True)
class SftResult:
    """The result of a run."""

    folder: Path
    """The model's folder, as `transformers` loads it."""
    loss: float
    """Mean cross entropy of the last tenth of the last stage's steps, in nats a token."""
    steps: int
    """Steps done, those before a resumption included."""
    tokens: int
    """Tokens computed in these steps."""
    seconds: float
    """Duration of the run, or of its resumption."""
    run: Path
    """The run folder."""
    held_out_loss: float | None = None
    """Mean cross entropy of the held-out conversations after the last step; None: none are held out."""
    before: dict[str, float] = field(default_factory=dict)
    """Held-out accuracy (0..1) before the first step, by split, if evaluated."""
    after: dict[str, float] = field(default_factory=dict)
    """Held-out accuracy (0..1) after the last step, by split, if evaluated."""
    interrupted: bool = False
    """Whether Ctrl-C or another signal stopped the run; it can be resumed."""


def sft(
    recipe: Recipe | str, output: str | None = None, *, name: str = "sft", console: Console | None = None
) -> SftResult:
    """Train `model.path`, or a new model, by the recipe's `sft` section, in a new run folder.

    output: a folder for a copy of the model; None: it lies in the run folder alone. name: of the run folder, where the
    recipe has no `output`. Raises UserError: one line.
    """
    if isinstance(recipe, str):
        name, recipe = Path(recipe).stem, load_recipe(recipe)
    return _run(_Job(_resolved(recipe), name, output, console), None)


def resume_sft(
    run: str, *, overrides: Sequence[str] = (), output: str | None = None, console: Console | None = None
) -> SftResult:
    """Continue the run in folder `run`, or of the mirror at that URL, from its last checkpoint. Raises UserError, also
    for overrides that change what is learned."""
    folder = RunFolder.existing(local_run(run, overrides))
    recipe = _resolved(load_recipe(folder.recipe(), overrides))
    check_same_run(folder.recipe(), recipe, FIXED)
    return _run(_Job(recipe, folder.path.name, output, console), folder)


def _resolved(recipe: Recipe) -> Recipe:
    """The recipe with what its section leaves open. Raises UserError: it has none, or it cannot be run."""
    section = recipe.sft
    if section is None:
        raise UserError("the recipe has no `sft` section: nothing says what to learn from")
    if section.new_model is not None and recipe.model.lora is not None:
        raise UserError("model.lora adapts a model that exists, sft.new_model makes one: choose one")
    if recipe.cluster.used and any(stage.muon_lr is not None for stage in section.stages):
        raise UserError("sft.stages: Muon trains in one process: leave out muon_lr, or leave out the cluster's workers")
    if section.accuracy is None:
        measured = section.source is not None and "env" in recipe.model_fields_set
        recipe = recipe.changed(sft={"accuracy": measured})
    return resolve_types(recipe)


@dataclass(slots=True)
class _Job:
    """What is known of a run from its beginning to its end."""

    recipe: Recipe
    name: str
    output: str | None
    console: Console | None
    rows: Rows | None = None
    """Of a source that has rows."""

    @property
    def section(self) -> SftSection:
        assert self.recipe.sft is not None
        return self.recipe.sft

    @property
    def played(self) -> Recipe:
        """The recipe of what samples: idle parts where nothing is sampled."""
        changed: dict[str, object] = {"sft": None}
        if not self.section.accuracy:
            changed["engine"] = EngineSection(name="agentrl.fine_tuning.idle:Idle")
            changed |= {"rewards": RewardsSection(), "agent": None}
            own = self.section.select.solved or self.recipe.start is not None  # it is asked, or brings the tools
            if self.section.source is not None and not own:
                changed["env"] = EnvSection(name="agentrl.fine_tuning.idle:Conversations")
        return self.recipe.changed(**changed)


def _run(job: _Job, resumed: RunFolder | None) -> SftResult:
    began = monotonic()
    if job.output is not None:
        check_export(job.output)
    with Interrupts(job.recipe.rollout.stuck_timeout) as interrupts:

        def prepare(folder: RunFolder | None, restarted: bool) -> Start:
            return _prepare(job, folder, restarted, interrupts)

        found = blocking(
            lambda: run_with_restarts(job.recipe, job.name, resumed, interrupts, prepare, partial(_set_up, job))
        )
    rows = [row for row in RunFolder(found.folder).metrics() if "train/loss" in row]
    last = [row["train/loss"] for row in rows][-max(1, _last_stage(job, len(rows)) // 10) :]
    folder = found.checkpoint
    if job.output is not None and not found.interrupted:
        folder = _export(job, found.checkpoint, Path(job.output))
    _console(job).print(f"model: {folder}", highlight=False, markup=False, soft_wrap=True)
    return SftResult(
        folder, sum(last) / max(1, len(last)), found.steps, sum(row["train/tokens"] for row in rows),
        monotonic() - began, found.folder, rows[-1].get(HELD_OUT) if rows else None, found.before, found.after,
        found.interrupted,
    )  # fmt: skip


def _last_stage(job: _Job, done: int) -> int:
    stages = job.section.stages
    return (stages[-1].steps or done) if len(stages) > 1 else done


def _console(job: _Job) -> Console:
    from agentrl.terminal import terminal

    return job.console or terminal()


def _export(job: _Job, checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint's model to `folder`; a new model in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    if job.section.new_model is not None:
        section = job.recipe.model.changed(path=str(checkpoint), device="cpu", dtype="bfloat16")
        save_model(*load_model(section), folder)
    else:
        shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(TRAINER), dirs_exist_ok=True)
    return folder


def _prepare(job: _Job, folder: RunFolder | None, restarted: bool, interrupts: Interrupts) -> Start:
    """Lock the folder, find the checkpoint, and check what can be checked before a model is loaded."""
    recipe, played, section, saved = job.recipe, job.played, job.section, None
    with ExitStack() as stack:
        if folder is None:
            RunFolder.check_free(recipe.output)
        else:
            stack.callback(FolderLock(folder.path).release)
            saved = last_checkpoint(recipe, folder, restarted)
        mirror = open_mirror(recipe.train.mirror, folder is not None)
        display = SftDisplay(0, job.name, job.console, saved.step if saved else 0)
        if folder is not None and not restarted and (line := changes(folder.recipe(), recipe)):
            display.note(line)
        trackers = tracker_makers(recipe.track.trackers)
        if section.source is not None and not is_stored(section.source):
            job.rows = open_rows(section.source)
        elif section.source is not None:
            chosen_files(Path(section.source), section.select.split)
        model = recipe.model if section.new_model is None else ModelSection()
        if missing := lacking(played.changed(model=model)):
            raise UserError(missing[0])
        env = make_environment(played.env)
        tasks = tasks_of(env, "train") if section.source is None else ()
        if section.source is None:
            _check_demonstrations(env, section, tasks)
        splits = chosen_splits(env, recipe) if section.accuracy else ()
        choosing = choosing_split(env, recipe, splits) if section.accuracy else None
        for split in dict.fromkeys((*splits, *((choosing,) if choosing is not None else ()))):
            if not len(tasks_of(env, split)):
                raise UserError(f"environment {env.name!r} has no task in {split}")
        sampler = TaskSampler(max(1, len(tasks)), recipe.train.seed)
        checked = Checked(env, splits, choosing, tasks, sampler, trackers, placement_of(played))
        return Start(played, job.name, folder, saved, checked, display, interrupts, stack.pop_all(), mirror=mirror)


def _check_demonstrations(env: Environment, section: SftSection, tasks: Sequence[Task]) -> None:
    """Ask for one of each style, before anything is made. Raises UserError where there is none."""
    if not len(tasks):
        raise UserError(f"environment {env.name!r} has no task in train")
    for stage in section.stages:
        demonstration(env, tasks[0], Random(0), stage.style)


def _set_up(job: _Job, start: Start) -> SftLoop:
    """Make the parts of the run. Raises UserError; Interrupted."""
    saved, display, interrupts, section = start.saved, start.display, start.interrupts, job.section
    assert isinstance(display, SftDisplay)
    if saved is not None:
        display.phase("checking the checkpoint")
        saved.verify()
    if start.resumed is not None:
        start.resumed.metrics()
    if section.new_model is not None:
        start.recipe = _with_new_model(job, start, section.new_model)
    initial, player = make_player(start)
    start.display.note(player.describe())
    if job.recipe.rewards.model is not None and section.accuracy:
        ask_reward_model(player)
    context = int(player.model.config.get_text_config().max_position_embeddings)
    lessons = Lessons() if section.source is None else _read(job, player, context, display)
    course = Course.of(job.recipe, None if section.source is None else len(lessons.taught))
    due = bool(lessons.held_out) or start.checked.choosing is not None  # a run may be stopped in its last evaluation
    unevaluated = due and start.resumed is not None and not start.resumed.evaluated(course.steps)
    if saved is not None and (saved.step > course.steps or (saved.step == course.steps and not unevaluated)):
        raise UserError(f"--resume: step {saved.step} of {course.steps} is done; add steps to its stages to go on")
    display.expect(course.steps)
    held_out, notes = HeldOut(player, {}, 1, {}, (), None), list[str]()
    if section.accuracy:
        splits, choosing = start.checked.splits, start.checked.choosing
        held_out, notes = interrupts.run(lambda: HeldOut.prepare(player, job.recipe, splits, choosing))
    for note in notes:
        display.note(note)
    recipe = start.recipe = learning_recipe(start.recipe, course, section.source is not None)
    role_host = make_role_host(start, learning_recipe(initial, course, section.source is not None), player)
    profiler = make_profiler(start, recipe, role_host)
    learner = SftLearner(recipe, profiler.roles, course)
    if saved is not None:
        learner.begin_stage(course.place(max(0, saved.step - 1))[0])
    size = len(start.checked.tasks) or len(lessons.taught)
    rollouts = _rollouts(job, start, player, role_host, lessons, course)
    make = partial(
        SftLoop, recipe=recipe, player=player, learner=learner, profiler=profiler, role_host=role_host,
        rollouts=rollouts, held_out=held_out, journal=make_journal(start, player), command=COMMAND,
        held_out_rollouts=lessons.held_out,
    )  # fmt: skip
    loop = assemble(start, make, rollouts, player, job.recipe, size)
    if section.source is not None:
        write_report(loop.folder.path, lessons)
    for t in (*lessons.taught, *lessons.held_out):
        STORE.copy({span.hash for span in t.images}, loop.folder.path / IMAGES)
    return loop


def _rollouts(
    job: _Job, start: Start, player: Player, role_host: RoleHost, lessons: Lessons, course: Course
) -> LessonRollouts:
    """What gives each step its conversations: those that were read, or demonstrations."""
    recipe, conversations, demonstrator = start.recipe, lessons.taught, None
    if job.section.source is None:
        demonstrator = _demonstrator(start.checked.env, player.toolbox.tools, player.chat, player.tokenizer, job.recipe)
    return LessonRollouts(
        recipe, player, start.checked.tasks,
        TaskSampler(len(start.checked.tasks) or len(conversations), recipe.train.seed),
        start.interrupts, role_host.weights, course=course, demonstrator=demonstrator, taught=conversations,
        limit=int(player.model.config.get_text_config().max_position_embeddings),
        digest=lessons.digest() if conversations else "",
    )  # fmt: skip


def _read(job: _Job, player: Player, context: int, display: SftDisplay) -> Lessons:
    """Read the source, and say what was used and refused. Raises UserError."""
    section = job.section
    limit = min(section.max_tokens or context, context)
    images = job.recipe.rollout.max_images
    own = [tool.schema for tool in (*player.toolbox.tools, *player.env.tools())]
    if job.rows is None:
        layout = Layout(section, _writer(player.chat, player.tokenizer, own), own, limit, images)
        vocabulary = player.model.config.get_text_config().vocab_size
        lessons = read_stored(job.recipe, layout, vocabulary, display.phase, player.env)
    else:
        shown = {str(schema["function"]["name"]): schema for schema in (*tools_of(job.rows, section), *own)}
        tools = list(shown.values())
        writer = _writer(_chat(job.recipe, player.tokenizer, tools), player.tokenizer, tools)
        layout = Layout(section, writer, own, limit, images)
        lessons = read_rows(job.rows, layout, job.recipe.train.seed, display.phase)
        if section.history == "sampled" and (why := layout.chat.rewrites_history):
            display.note(
                f"the chat template rewrites its history ({why}): earlier turns are kept as they were said, as in "
                "rollouts; sft.history=template lays out each turn as the template does"
            )
    for line in lessons.told():
        display.note(line)
    return lessons


def _chat(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[dict[str, Json]]) -> Chat:
    path = recipe.model.path if recipe.sft is None or recipe.sft.new_model is None else ""
    return load_chat(tokenizer, model_path=path, kind=recipe.model.chat, tools=tools)


def _writer(chat: Chat, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[dict[str, Json]]) -> Writer:
    template = Template(tokenizer, None, tools)
    return Writer(chat, template, Encoder(tokenizer, template.source))


def _demonstrator(
    env: Environment, tools: Sequence[Tool], chat: Chat, tokenizer: "PreTrainedTokenizerBase", recipe: Recipe
) -> Demonstrator:
    template = Template(tokenizer, None, [tool.schema for tool in (*tools, *env.tools())])
    return Demonstrator(env, tools, chat, template, Encoder(tokenizer, template.source), recipe.rollout)


def _with_new_model(job: _Job, start: Start, section: NewModel) -> Recipe:
    """The recipe with a model made from nothing, which lies in the run folder."""
    folder = start.open_folder().path / START
    if not (folder / "config.json").is_file():
        start.display.note(f"making a tokenizer from {section.texts:,} demonstrations")
        tokenizer = start.interrupts.run(lambda: _new_tokenizer(job.recipe, section, start.checked.env))
        model = new_model(section, tokenizer, job.recipe.train.seed)
        folder.mkdir(exist_ok=True)
        save_model(model, tokenizer, folder)
    return start.recipe.changed(model={"path": str(folder)})


async def _new_tokenizer(recipe: Recipe, section: NewModel, env: Environment) -> "PreTrainedTokenizerBase":
    """Train a tokenizer on rendered demonstrations of every stage's style over the splits that the section
    names."""
    template = read_template(section)
    bare = bare_tokenizer(template)
    toolbox = await Toolbox.open(recipe.tools, env)
    try:
        tools = toolbox.tools
        chat = _chat(recipe, bare, [tool.schema for tool in (*tools, *env.tools())])
        demonstrator = _demonstrator(env, tools, chat, bare, recipe)
        styles = list(dict.fromkeys(stage.style for stage in (recipe.sft or SftSection()).stages))
        found = []
        splits = section.splits or ("train", *reported(env))
        for split in splits:
            tasks = tasks_of(env, split)
            for i in range(min(len(tasks), section.texts // len(splits))):
                rng = Random(f"tokenizer/{recipe.train.seed}/{split}/{i}")
                opening, said = await demonstrator.messages(tasks[i], rng, styles[i % len(styles)])
                schemas = demonstrator.schemas(tasks[i])
                found.append(demonstrator.template.text([*opening, *said], schemas, generate=False))
    finally:
        await toolbox.close()
    context = section.config["max_position_embeddings"]
    split = SPLIT_WORDS if section.pre_tokenizer == "words" else SPLIT
    return train_tokenizer(found, section.vocabulary, template, context, section.tokens, split)
