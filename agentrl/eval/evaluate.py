"""`evaluate`: play held-out tasks with a model, and score them with the rewards that the recipe trains on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentrl.checkpoint.checkpoints import Checkpoints
from agentrl.checkpoint.run_folder import EVALUATION, MODEL, RunFolder, recipe_of
from agentrl.containment.event_loop import blocking, run
from agentrl.errors import UserError, nearest
from agentrl.eval.folder import API, EvaluationFolder, Keeper
from agentrl.eval.held_out import HeldOut
from agentrl.eval.outcome import Outcome
from agentrl.eval.progress import Progress
from agentrl.eval.result import SplitResult, losses, summarize
from agentrl.models.load import resolve_types
from agentrl.plugins.environment import Environment, is_validation
from agentrl.plugins.mixture import environment_of, left_out
from agentrl.plugins.registry import make_environment, tasks_of
from agentrl.plugins.types import Json, Task
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.model_reward import ask_reward_model
from agentrl.rollout.player import Player
from agentrl.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of `evaluate`. `evaluation["test"]` is the result of one split."""

    model: str
    """The model's folder or hub name; for an engine that brings its own chat, the chat's description."""
    env: str
    """The environment's name, and its source in brackets unless it is a mixture."""
    splits: tuple[SplitResult, ...]
    """One result per split, in the order requested."""
    notes: tuple[str, ...] = ()
    """Lines about tasks or samples that were left out, and about resources that could not be closed."""

    def __getitem__(self, split: str) -> SplitResult:
        """The result of `split`. Raises StopIteration if it was not evaluated."""
        return next(r for r in self.splits if r.split == split)

    outcomes: Mapping[str, Sequence[Outcome]] = field(default_factory=dict, compare=False, repr=False)
    """Split -> how each of its samples ended."""
    folder: Path | None = field(default=None, compare=False)
    """Where the conversations are; None where they were not kept."""

    def json(self) -> dict[str, Json]:
        """Model, environment, notes and the results by split as JSON values."""
        splits = {r.split: r.json() for r in self.splits}
        return {"model": self.model, "env": self.env, "notes": list(self.notes), "splits": splits}


def evaluate(
    recipe: Recipe | str,
    *,
    overrides: Sequence[str] = (),
    model: str | None = None,
    splits: Sequence[str] | None = None,
    samples: int | None = None,
    by: str | None = None,
    keep: str | Path | None = None,
    resume: str | Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a model on `eval.tasks` tasks of each split, with `samples` (default: `eval.samples`) samples per task.

    recipe: a Recipe, the path of a recipe, or a run folder: then that run's recipe and its best checkpoint are used.
    overrides: `key=value`, only with a path. model: replaces the recipe's model: a folder, a run folder (its best
    checkpoint), a hub name, or `openai:NAME`. splits: replaces `eval.splits`. by: a field of the tasks' data, by whose
    values the accuracy is given too. keep: a folder for the conversations and the result, which `agentrl show`,
    `view` and `compare` read. resume: such a folder, whose samples count as played, unless they failed; `recipe` is
    then what `EvaluationFolder.recipe` returned for it. progress: where to show progress; default: stderr. A reward
    model (`rewards.model`) is loaded into this process.

    Raises UserError for bad input; before a model is loaded, wherever the mistake can be found without one.
    """
    if isinstance(recipe, str):
        path, folder = recipe_of(recipe)
        recipe, model = load_recipe(path, overrides), model or folder
    elif overrides:
        raise UserError("overrides go with a recipe's path; a Recipe object is complete")
    if model is not None and model.startswith(API):
        recipe, model = _behind_api(recipe, model.removeprefix(API)), None
    model = model_of(model) if model is not None else None
    changed = {"samples": samples or recipe.eval.samples, "splits": tuple(splits) if splits else recipe.eval.splits}
    recipe = resolve_types(recipe.changed(eval=changed))
    extend = None if recipe.rewards.model is None else ask_reward_model
    store = None
    if keep is not None or resume is not None:
        store = EvaluationFolder.new(Path(keep)) if keep is not None else EvaluationFolder.existing(Path(resume or ""))
    try:
        with progress or Progress() as shown:
            return blocking(lambda: run(play(recipe, model, shown, extend, by, store)))
    finally:
        if store is not None:
            store.close()


def _behind_api(recipe: Recipe, name: str) -> Recipe:
    """The recipe with a model behind OpenAI's API; how it is reached stays, where the recipe says that."""
    args = recipe.engine.args if recipe.engine.name == "openai" else {}
    return recipe.changed(engine={"name": "openai", "args": {**args, "model": name}})


def model_of(path: str) -> str:
    """The model folder of a run: its best checkpoint, else its last one, else the model of its warm start.

    Any path or name that is not a run folder is returned unchanged. Raises UserError for a run without a checkpoint.
    """
    if recipe_of(path)[1] is None:
        return path
    folder = RunFolder(Path(path))
    if (folder.path / EVALUATION).exists():
        raise UserError(f"{path}: an evaluation, not a run or a model: agentrl eval --resume {path} goes on with it")
    checkpoints = Checkpoints(folder.checkpoints, 1)
    if (saved := checkpoints.best() or checkpoints.latest()) is not None:
        return str(saved.path)
    if (folder.path / MODEL / "config.json").is_file():
        return str(folder.path / MODEL)
    raise UserError(f"{path}: this run has saved no checkpoint to be evaluated")


async def play(
    recipe: Recipe,
    model: str | None,
    progress: Progress,
    extend: Callable[[Player], None] | None = None,
    by: str | None = None,
    store: EvaluationFolder | None = None,
) -> Evaluation:
    """Run the evaluation that the recipe's `eval` section describes, in the running event loop.

    model: a folder or hub name that replaces the recipe's. extend: called once with the player, before it plays.
    by: see `evaluate`. store: where it is kept, and what of it is there already.

    Raises UserError for bad input; before a model is loaded, wherever the mistake can be found without one.
    """
    env = make_environment(recipe.env)
    chosen = chosen_splits(env, recipe)
    check_tasks(env, chosen, recipe)
    if by is not None:
        for split in chosen:
            check_field(by, tasks_of(env, split)[0], split)
    player = await Player.build(recipe, model_path=model, env=env, say=progress.say, phase=progress.phase)
    try:
        for lacking in left_out(env, player.toolbox.tools, recipe.agent):
            progress.say(lacking)
        held_out, notes = await HeldOut.prepare(player, recipe, chosen)
        if extend is not None:
            extend(player)
        if store is not None:
            store.begin(played_recipe(recipe, model, chosen))
        outcomes = await held_out.at_once(held_out.splits, partial(play_split, held_out, progress, store))
        if store is not None:
            for split in outcomes:
                store.join(split)
        notes += [line for split, found in outcomes.items() if (line := losses(f"evaluation of {split}", found))]
    finally:
        unclosed = await player.close()
    results = tuple(summarize(split, found, by, recipe.engine.args.get("prices")) for split, found in outcomes.items())
    played = player.chat.description if player.model is None else model or recipe.model.path
    source = "" if recipe.env.mix else f" ({recipe.env.source})"
    folder = None if store is None else store.path
    evaluation = Evaluation(played, f"{env.name}{source}", results, (*notes, *unclosed), outcomes, folder)
    if store is not None:
        store.write(evaluation.json(), outcomes)
    return evaluation


def played_recipe(recipe: Recipe, model: str | None, splits: Sequence[str]) -> Recipe:
    """The recipe that says what is played: with the model and the splits in it."""
    recipe = recipe.changed(eval={"splits": tuple(splits)}, output=None)
    return recipe if model is None else recipe.changed(model={"path": model, "lora": None})


async def play_split(
    held_out: HeldOut, progress: Progress, store: EvaluationFolder | None, split: str, limits: Mapping[str, Json]
) -> list[Outcome]:
    """Play what is not stored of a split, and return the outcomes of all of it. limits: as of `HeldOut.sample`. Raises
    UserError."""
    tasks, env = held_out.tasks[split], held_out.player.env
    known = {} if store is None else done(store, split, tasks, together=bool(held_out.player.rewards.groups))
    found = dict(known)
    only = [[i for i in range(held_out.samples) if (group, i) not in known] for group in range(len(tasks))]
    keeper = None
    if store is not None:
        keeper = Keeper(store, split, lambda t: environment_of(env, t.task))

    def on_sample(group: int, trajectory: Trajectory) -> None:
        solved = held_out.solved(trajectory) if trajectory.valid else None
        one = Outcome.of(trajectory, group, solved, environment_of(env, trajectory.task))
        found[group, trajectory.sample] = one
        if keeper is not None:
            keeper.add(trajectory, one)

    places = {id(task): group for group, task in enumerate(tasks)}
    advance = progress.follow(split, sum(map(bool, only)))

    def on_group(group: Group) -> None:
        for trajectory in (*group.trajectories, *group.failed):
            on_sample(places[id(group.task)], trajectory)
        advance(group)

    try:
        if held_out.player.rewards.groups:  # a sample is not whole before its group is scored
            await held_out.sample(split, only=only, on_group=on_group, limits=limits)
        else:
            await held_out.sample(split, only=only, on_sample=on_sample, on_group=advance, limits=limits)
    finally:
        if keeper is not None:
            keeper.flush()
    return [found[place] for place in sorted(found)]


def done(store: EvaluationFolder, split: str, tasks: Sequence[Task], together: bool) -> dict[tuple[int, int], Outcome]:
    """The valid outcomes that are stored of a split, by task and sample. together: a task of which a sample
    failed is left out as a whole, since its samples are scored together.

    Raises UserError: the environment has other tasks by now.
    """
    stored = store.stored(split)
    if wrong := [one for one in stored if one.group >= len(tasks) or tasks[one.group].id != one.task]:
        raise UserError(
            f"--resume {store.path}: task {wrong[0].task} of {split} is not at its place any more: the environment "
            "gives other tasks than when the evaluation began"
        )
    broken = {one.group for one in stored if not one.valid} if together else set()
    return {(one.group, one.sample): one for one in stored if one.valid and one.group not in broken}


def check_evaluated(recipe: Recipe, splits: Sequence[str] | None, wanted: Iterable[str]) -> None:
    """Raise UserError where one of the splits that are `wanted` is not among those to be evaluated. splits: as of
    `evaluate`."""
    env = make_environment(recipe.env)
    chosen = chosen_splits(env, recipe.changed(eval={"splits": tuple(splits)}) if splits else recipe)
    if lost := [split for split in wanted if split not in chosen]:
        raise UserError(f"--fail-below: {lost[0]} is not evaluated, but {', '.join(chosen)}{nearest(lost[0], chosen)}")


def check_field(name: str, task: Task, split: str) -> None:
    """Raise UserError unless the first task of a split has a field of this name in its data."""
    if name not in task.data:
        raise UserError(f"--by {name}: the tasks of {split} have no such field{nearest(name, list(task.data))}")


def check_tasks(env: Environment, splits: Iterable[str], recipe: Recipe) -> None:
    """Raise UserError where the recipe's environment has no task in one of `splits`."""
    if empty := [split for split in splits if not len(tasks_of(env, split))]:
        raise UserError(f"environment {env.name!r} (source {recipe.env.source}) has no task in {', '.join(empty)}")


def chosen_splits(env: Environment, recipe: Recipe) -> tuple[str, ...]:
    """The splits to report: those of `eval.splits`, else those of `reported`.

    Raises UserError for a split that the environment does not have.
    """
    if recipe.eval.splits is None:
        return reported(env)
    for split in recipe.eval.splits:
        if split not in (*env.splits, "train"):
            raise UserError(f"eval.splits: environment {env.name!r} has no split {split!r}{nearest(split, env.splits)}")
    return recipe.eval.splits


def reported(env: Environment) -> tuple[str, ...]:
    """The held-out splits that are not for validation; all held-out splits if there are no others."""
    return tuple(split for split in env.splits if not is_validation(split)) or tuple(env.splits)


def choosing_split(env: Environment, recipe: Recipe, splits: tuple[str, ...]) -> str | None:
    """The split that is evaluated during training to choose the best checkpoint; None: nothing is evaluated.

    It is the environment's first validation split if the recipe evaluates during training, else the first of `splits`,
    the reported ones.
    """
    own = next((split for split in env.splits if is_validation(split)), None)
    if not splits or own is None or not 0 < recipe.eval.every < recipe.train.steps:
        return splits[0] if splits else None
    return own
