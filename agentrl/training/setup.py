"""Make the parts of a run, in the order in which a mistake costs least."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, TypeVar

from agentrl.chat.base import Seeing
from agentrl.checkpoint.checkpoints import ADAPTER, Checkpoints, Saved
from agentrl.checkpoint.code import record_code
from agentrl.checkpoint.mirror import Mirror
from agentrl.checkpoint.run_folder import LOG, LOGS, RECIPE, FolderLock, RunFolder
from agentrl.data.prompts import PromptLengths
from agentrl.data.sampler import TaskSampler
from agentrl.errors import UserError, describe
from agentrl.eval.held_out import HeldOut
from agentrl.eval.result import Accuracy
from agentrl.images import FOLDER as IMAGES
from agentrl.images import STORE, ImageSpan
from agentrl.learner.learner import Learner
from agentrl.learner.monitors import Health
from agentrl.learner.roles import USUAL, LocalRoles, RoleHost, make_trainer
from agentrl.learner.teacher import Guide, TeacherRole, filled, opening_of
from agentrl.plugins.environment import is_validation
from agentrl.plugins.mixture import environment_of, part_of
from agentrl.plugins.types import Json, Task
from agentrl.profiling.step import PROFILE, StepProfiler
from agentrl.recipe.load import dump_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.compaction import said_by_user
from agentrl.rollout.journal import Journal
from agentrl.rollout.model_reward import add_reward_model
from agentrl.rollout.player import Player
from agentrl.rollout.selection import most_groups
from agentrl.training.display import Display
from agentrl.training.interrupt import Interrupts
from agentrl.training.introduction import introduction
from agentrl.training.loop import Loop
from agentrl.training.preflight import Checked
from agentrl.training.rollouts import OverlappedRollouts, Rollouts, SerialRollouts, StoredRollouts
from agentrl.training.taught import FILE, FOLDER, Taught
from agentrl.training.trackers import Trackers
from agentrl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Start:
    """What is known of a run before its parts are made."""

    recipe: Recipe
    """The recipe of the run."""
    name: str
    """Of a numbered run folder, where the recipe names no `output`."""
    resumed: RunFolder | None
    """The folder of the run that is resumed."""
    saved: Saved | None
    """The checkpoint that it continues from; None: from the first step."""
    checked: Checked
    """What the checks have loaded."""
    display: Display
    """Shows the progress."""
    interrupts: Interrupts
    """Runs asynchronous work and handles signals."""
    stack: ExitStack
    """Closes the parts when the run ends."""
    stored: Sequence[Path] = ()
    """Files to train on, a file a step; empty: rollouts are sampled."""
    folder: RunFolder | None = None
    """The run's folder, once it exists."""
    mirror: Mirror | None = None
    """Its copy at a URL."""
    taught: Taught | None = None
    """What the recipe's `start` made; of a resumed run it is in the run's folder."""
    written: Recipe | None = None
    """The recipe as it was written, where `recipe` begins with another model than that names."""

    def open_folder(self) -> RunFolder:
        """The run's folder, created and locked if it is new; removed at the end if nothing was written there."""
        if self.folder is None and self.resumed is not None:
            self.folder = self.resumed  # locked since its checkpoint was looked for
        if self.folder is None:
            self.folder = RunFolder.create(self.recipe.output, self.name)
            self.stack.callback(_remove_if_empty, self.folder.path)
            self.stack.callback(FolderLock(self.folder.path).release)
            RunFolder.check_free(str(self.folder.path))  # another run may have come and gone before we had the lock
        return self.folder

    def open_checkpoints(self, tokenizer: "PreTrainedTokenizerBase") -> Checkpoints:
        """The run's checkpoints, which its mirror follows from now on to the run's end."""
        folder, mirror, keep = self.open_folder(), self.mirror, self.recipe.train.keep
        if mirror is None:
            return Checkpoints(folder.checkpoints, keep, tokenizer)
        mirror.follow(folder.path, self.display.note)
        self.at_end("the mirror", mirror.close)
        return Checkpoints(folder.checkpoints, keep, tokenizer, mirror.saved)

    def at_end(self, what: str, close: Callable[[], Iterable[str] | None]) -> None:
        """Call `close` when the run ends, however it does. The lines that it may return are printed, and so is what it
        raises: nothing can be lost any more."""
        self.stack.callback(self._close, what, close)

    def _close(self, what: str, close: Callable[[], Iterable[str] | None]) -> None:
        try:
            unclosed = close()
        except Exception as error:  # noqa: BLE001 - the run has ended, well or with an error of its own
            unclosed = [f"{what} could not be closed: {describe(error)}"]
        for line in unclosed or ():
            self.display.note(line)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def set_up(start: Start) -> Loop:
    """Make the parts of the run. Raises UserError; Interrupted."""
    check_resumed(start)
    written = start.recipe
    begin_taught(start)
    recipe, interrupts = start.recipe, start.interrupts
    initial, player = make_player(start)
    if player.engine.settled:
        written = written.changed(engine={"args": {**written.engine.args, **player.engine.settled}})
    for line in introduction(recipe, start.checked, player, len(start.stored)):
        start.display.note(line)
    held_out, sampler = _prepare_tasks(start, player)
    role_host = make_role_host(start, initial, player)
    profiler = make_profiler(start, recipe, role_host)
    if profiler.roles.reward_model is not None:
        add_reward_model(player, profiler.roles.reward_model.scores)
    kind: Callable[..., Rollouts] = SerialRollouts if recipe.rollout.overlap == "none" else OverlappedRollouts
    if start.stored:
        kind = partial(StoredRollouts, start.stored)
    journal = make_journal(start, player)
    rollouts = kind(
        recipe, player, start.checked.tasks, sampler, interrupts, role_host.weights, on_group=journal.finished
    )
    learner = Learner(recipe, profiler.roles, guide_of(player, role_host))
    make = partial(
        Loop, recipe=recipe, player=player, learner=learner, profiler=profiler, role_host=role_host,
        rollouts=rollouts, held_out=held_out, journal=journal, taught=start.taught,
    )  # fmt: skip
    loop = assemble(start, make, rollouts, player, written, len(start.checked.tasks))
    if not role_host.in_process:  # the engine has loaded the recipe's model; the workers may have restored a later one
        interrupts.complete(lambda: player.engine.update_weights(loop.step, role_host.weights()))
    return loop


def begin_taught(start: Start) -> None:
    """Begin with the model that the recipe's `start` made, which the run's folder keeps. Raises UserError: it is not
    there."""
    recipe = start.recipe
    if recipe.start is None:
        return
    folder = start.open_folder().path
    if start.taught is None and start.resumed is None:
        raise UserError("start: this run was given no model that was taught: call agentrl.train, which does it first")
    if start.resumed is None:
        start.stack.callback(_remove_unbegun, folder)
    start.taught = Taught.read(folder) if start.taught is None else start.taught.put_into(folder)
    start.written, start.recipe = recipe, start.taught.begun(recipe)


def _remove_unbegun(folder: Path) -> None:
    """Remove the model of a run that ended before it began."""
    if not (folder / RECIPE).exists():
        rmtree(folder / FOLDER, ignore_errors=True)
        (folder / FILE).unlink(missing_ok=True)


L = TypeVar("L", bound=Loop)


def assemble(
    start: Start, make: Callable[..., L], rollouts: Rollouts, player: Player, written: Recipe, tasks: int
) -> L:
    """Open the run folder and the trackers, make the loop of the parts that `make` has already, and go on from the
    checkpoint where there is one. written: the recipe of the folder. tasks: how many there are to train on."""
    start.at_end("the rollouts", lambda: start.interrupts.complete(rollouts.close))
    start.interrupts.check()
    folder = start.open_folder()
    folder.write_recipe(dump_recipe(written), start.saved.step if start.saved else 0)
    with suppress(OSError):  # nothing of the run needs it
        record_code(folder.path)
    STORE.keep_in(folder.path / IMAGES)
    player.engine.keep_logs(folder.path)
    trackers = Trackers(start.display.note)
    trackers.start(start.checked.trackers, folder.path, written.shown(), start.stack)
    loop = make(
        folder=folder, checkpoints=start.open_checkpoints(player.tokenizer), display=start.display,
        interrupts=start.interrupts, health=Health(start.recipe), trackers=trackers,
    )  # fmt: skip
    if start.saved is not None:
        restore(loop, start.saved, tasks)
    elif start.resumed is not None:
        folder.rewind(-1)
    start.display.keep(folder.path / LOG)
    start.display.note(f"run folder: {folder.path}")
    return loop


def make_profiler(start: Start, recipe: Recipe, role_host: RoleHost) -> StepProfiler:
    """What measures the steps of the run, its roles in it."""
    folder = start.open_folder().path / PROFILE
    return StepProfiler(role_host, folder, recipe.profile.steps, engine=recipe.engine.name == "local")


def make_journal(start: Start, player: Player) -> Journal:
    """What writes the trajectories of the run."""
    place = partial(environment_of, player.env)
    return Journal(start.recipe.track.trajectories, lambda: start.open_folder().trajectories, place)


def check_resumed(start: Start) -> None:
    """Raises UserError: the checkpoint or metrics.jsonl is damaged."""
    if start.saved is not None:
        start.display.phase("checking the checkpoint")
        start.saved.verify()
        _read_progress(start.saved, len(start.checked.tasks))
    if start.resumed is not None:
        start.resumed.metrics()


def make_player(start: Start) -> tuple[Recipe, Player]:
    """The recipe with the policy's initial model, and the player that samples from it."""
    recipe, saved, display = start.recipe, start.saved, start.display
    display.phase("loading")
    initial, trained_elsewhere = with_initial_model(recipe, saved), recipe.cluster.used
    named, path = initial, None
    if recipe.model.lora is None and recipe.new_model is None and (saved is not None or start.written is not None):
        named, path = start.written or recipe, initial.model.path  # by the model's name its chat is known
    player = start.interrupts.run(
        lambda: Player.build(
            named, path, start.checked.env, display.note, display.phase, trained_elsewhere, start.checked.placement
        )
    )
    start.at_end("the player", lambda: start.interrupts.complete(player.close))
    if recipe.sft is not None and recipe.start is None:
        display.note("sft: not part of this run: run `agentrl sft RECIPE --out DIR` first, then set model.path=DIR")
    if recipe.reward_model is not None:
        display.note("reward_model: not part of this run: run `agentrl reward-model RECIPE`, then set rewards.model")
    return initial, player


def _prepare_tasks(start: Start, player: Player) -> tuple[HeldOut, TaskSampler]:
    """The held-out tasks and the sampler of training tasks, both without those whose prompts are too long."""
    recipe, checked = start.recipe, start.checked
    start.display.phase("measuring the prompts")
    held_out, notes = start.interrupts.run(lambda: HeldOut.prepare(player, recipe, checked.splits, checked.choosing))
    sampler = checked.sampler
    if not start.stored:
        needed = recipe.train.steps * most_groups(recipe)
        notes += exclude_long(player, checked.tasks, needed, sampler, start.interrupts)
    if checked.choosing in checked.splits and 0 < recipe.eval.every < recipe.train.steps:
        notes.append(
            f"the best checkpoint is chosen on {checked.choosing}, which is also reported and therefore biased upwards"
            + ("" if is_validation(checked.choosing) else "; a split called validation would keep the two apart")
        )
    for note in notes:
        start.display.note(note)
    return held_out, sampler


def exclude_long(
    player: Player, tasks: Sequence[Task], needed: int, sampler: TaskSampler, interrupts: Interrupts
) -> list[str]:
    """Measure the prompts of the `needed` tasks that are drawn first, exclude those that are too long or hold a broken
    image; return a note. Those of an `Order`, whose draws depend on results, are measured as they are drawn. Raises
    UserError: none fits."""
    if sampler.order is not None:
        return []
    need = min(needed, len(tasks) - len(sampler.excluded))
    probe = replace(sampler, epoch=0, position=0)
    found: dict[int, int] = {}
    broken: dict[int, str] = {}
    limit = player.prompt_limit
    while sum(n <= limit and i not in broken for i, n in found.items()) < need:
        if not (new := [i for i in dict.fromkeys(probe.draw(need)) if i not in found]):
            break
        lengths = interrupts.run(lambda new=new: player.measure([tasks[i] for i in new]))  # type: ignore[misc]
        found |= dict(zip(new, lengths.lengths, strict=True))
        broken |= {new[i]: why for i, why in lengths.broken.items()}
    sampler.excluded |= {i for i, n in found.items() if n > limit or i in broken}
    places = {i: place for place, i in enumerate(found)}
    misfits = {places[i]: why for i, why in broken.items()}
    line = PromptLengths(tuple(found.values()), limit, misfits).report("training")
    return [line] if line else []


def make_role_host(start: Start, initial: Recipe, player: Player) -> RoleHost:
    """The host of the roles: this process, or a cluster whose workers log into the run folder."""
    recipe, display = start.recipe, start.display
    display.detail(f"chat: {player.chat.description}")
    if player.chat.rewrites_history:
        display.note(f"chat: the template rewrites its history: {player.chat.rewrites_history}")
    role_host: RoleHost
    if recipe.cluster.trainer is not None:
        logs = start.open_folder().path / LOGS
        role_host = make_trainer(recipe, initial, logs, display.note, display.phase)
    elif recipe.cluster.used:
        from agentrl.distributed.remote import RayRoles

        logs, placement = start.open_folder().path / LOGS, start.checked.placement
        role_host = RayRoles(recipe, initial, logs, display.note, display.phase, placement)
    else:
        role_host = LocalRoles(recipe, player.model)
    start.at_end("the roles", role_host.close)
    for line in role_host.describe():
        (display.detail if line == USUAL else display.note)(line)
    return role_host


def guide_of(player: Player, role_host: RoleHost) -> Guide:
    """What asks the run's teachers: those of the role host, and servers."""
    recipe, schemas = player.recipe, {tool.name: tool.schema for tool in (*player.toolbox.tools, *player.env.tools())}

    def hinted(t: Trajectory, hint: str) -> tuple[Sequence[int], Sequence[ImageSpan]] | None:
        tools = [schemas[name] for name in t.tools]
        opening = opening_of(t, lambda messages: player.chat.render(messages, tools))
        if opening is None:
            return None
        messages = said_by_user(opening, filled(hint, t.task))
        ids = player.chat.render(messages, tools)
        return ids, player.chat.images_in(ids, messages) if isinstance(player.chat, Seeing) else ()

    teachers: dict[int, TeacherRole] = dict(role_host.teachers)
    for part, section in enumerate(recipe.part_teachers):
        if section is not None and section.served:
            from agentrl.learner.teacher_server import TeacherServer  # with a client of HTTP

            teachers[part] = server = TeacherServer(section, player.tokenizer)
            server.check()
    return Guide(recipe, teachers, partial(part_of, player.env), hinted)


def with_initial_model(recipe: Recipe, saved: Saved | None) -> Recipe:
    """The recipe with the saved model in `model`, if there is one; an adapter is loaded into the base that it
    was trained on, which the merged weights no longer show."""
    if saved is None:
        return recipe
    if recipe.model.lora is None:
        return recipe.changed(model={"path": str(saved.path)})
    return recipe.changed(model={"lora": {"start": str(saved.path / ADAPTER)}})


def _read_progress(saved: Saved, tasks: int) -> tuple[dict[str, Json], dict[str, Json]]:
    """The held-out accuracies before the run, by split, and the sampler's state. Raises UserError."""
    before, sampler = (saved.extra.get(name) for name in ("before", "sampler"))
    if not isinstance(before, dict) or not all(map(_is_accuracy, before.values())):
        raise saved.damaged("`before` in its state.json is not a mapping of accuracies")
    listed = [sampler.get(name, []) for name in ("outstanding", "left_out")] if isinstance(sampler, dict) else []
    if not isinstance(sampler, dict) or not all(isinstance(found, list) for found in listed):
        raise saved.damaged("`sampler` in its state.json is not a position among the tasks")
    counts = [sampler.get("epoch"), sampler.get("position"), *chain(*listed)]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise saved.damaged("`sampler` in its state.json is not a position among the tasks")
    if max(counts[1:]) >= tasks:
        raise saved.damaged(f"it was at task {max(counts[1:])}, and now there are {tasks} tasks to train on")
    return before, sampler


def stored_of(saved: Saved) -> list[str]:
    """The files that the run of a checkpoint trains on; empty where it samples, or its state cannot be read,
    which is told as the checkpoint is verified. Raises UserError."""
    try:
        sampler = saved.extra.get("sampler")
    except UserError:
        return []
    files = sampler.get("stored", []) if isinstance(sampler, dict) else []
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise saved.damaged("`stored` in its state.json is not a list of files")
    return files


def _read_coefficient(saved: Saved, default: float) -> float:
    """The coefficient of the KL that a checkpoint was at. Raises UserError."""
    found = saved.extra.get("kl_coef", default)
    if type(found) not in (int, float) or not 0 <= found < float("inf"):
        raise saved.damaged("`kl_coef` in its state.json is no coefficient")
    return float(found)


def _is_accuracy(value: object) -> bool:
    """Whether it is an accuracy with its interval, or without one, as older versions wrote it."""
    first, *interval = value if isinstance(value, list) and len(value) == len(Accuracy._fields) else [value]
    return type(first) in (int, float) and all(type(bound) in (int, float, type(None)) for bound in interval)


def restore(loop: Loop, saved: Saved, tasks: int) -> None:
    """Continue from a checkpoint of a run on so many tasks. Raises UserError."""
    loop.role_host.load(saved.path)
    loop.step = loop.learner.steps = saved.step
    if loop.recipe.algorithm.kl_target is not None:
        loop.learner.kl_coef = _read_coefficient(saved, loop.learner.kl_coef)
    before, sampler = _read_progress(saved, tasks)
    loop.before = {split: Accuracy.read(value) for split, value in before.items()}
    if (best := loop.checkpoints.best()) is not None and best.split == loop.held_out.choosing:
        loop.best = best.accuracy or 0.0
    loop.rollouts.restore(saved.step, sampler)
    loop.folder.rewind(saved.step or -1)  # before the first step is done, step 0 is evaluated again
    row = saved.extra.get("unwritten")
    if row and (not isinstance(row, dict) or type(row.get("step")) is not int):
        raise saved.damaged("`unwritten` in its state.json is not a row of metrics")
    if saved.step and row and row["step"] not in {written["step"] for written in loop.folder.metrics()}:
        loop.folder.append_metrics(row)
    loop.health = Health(loop.recipe, loop.folder.metrics())
    loop.display.note(f"resumed after step {saved.step}")
