"""What `compare` is given: names of evaluations and models, the sides that they form, and where these differ."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.checkpoint.code import read_code
from agentrl.checkpoint.run_folder import EVALUATION, RECIPE, TRAJECTORIES, RunFolder
from agentrl.errors import UserError, nearest
from agentrl.eval.folder import API, new_folder
from agentrl.eval.outcome import read_outcomes
from agentrl.models import EMBEDDED
from agentrl.plugins.types import Json
from agentrl.recipe.load import differing, leaves, load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.trajectory_file import Stored, stored_files

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
AGAINST = "vs"
"""The word between the runs of one side and those of the next."""
SEED = "train.seed"
PLAYED = (
    "env", "tools", "rewards", "agent", "workspace", "eval.samples", "eval.tasks", "rollout.temperature",
    "rollout.top_", "rollout.max_", "rollout.compact",
)  # fmt: skip
"""How the keys begin that say how evaluations are played."""
PASSING = (
    "output", "track", "cluster", "eval", "model.device", "train.threads", "train.keep", "train.save_every",
    "train.mirror", SEED,
)  # fmt: skip
"""How the keys begin that are not part of what a recipe trains."""
SHOWN = 8  # keys of a line
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation."""

    name: str
    """What was asked for, with the step of a run's evaluation."""
    folder: Path
    """The run folder or evaluation folder."""
    files: Mapping[str, Stored]
    """Split -> its stored samples."""
    model: str = ""
    """What was evaluated, where that is written down."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The training steps that came before, one number for all splits that agree; empty where it is not known."""
        if (found := re.search(r"checkpoints/step_(\d{1,9})/?$", self.model)) is not None:
            return (int(found[1]),)
        if (self.folder / EVALUATION).is_file():
            return ()
        return tuple(sorted({one.step for one in self.files.values()}))

    def recipe(self) -> Recipe | None:
        """The recipe in force; None: there is none, or it cannot be read."""
        try:
            return load_recipe(RunFolder(self.folder).recipe())
        except (UserError, OSError):
            return None


@dataclass(frozen=True, slots=True)
class Side:
    """One of the recipes or models that are compared."""

    letter: str
    """A, B, ..."""
    members: tuple[Evaluated, ...]
    """Its evaluations: of one run or model, or of several seeds."""
    called: str = ""
    """What its runs have in common, where they were put together by a key."""
    behind: tuple[Evaluated, ...] = ()
    """Runs that were put together with them, and are left out, since the others were evaluated after more steps."""

    @property
    def name(self) -> str:
        """What was asked for."""
        return self.called or ", ".join(one.name for one in self.members)

    @property
    def model(self) -> str:
        """What was evaluated, where that is written down; of several, each once."""
        return ", ".join(dict.fromkeys(one.model for one in self.members if one.model))

    @property
    def folder(self) -> Path:
        """The folder of the first evaluation."""
        return self.members[0].folder

    @property
    def files(self) -> Mapping[str, Stored]:
        """The stored samples of the first evaluation by split."""
        return self.members[0].files

    @property
    def splits(self) -> list[str]:
        """The splits that all of its evaluations have."""
        return [split for split in self.files if all(split in one.files for one in self.members)]

    @property
    def trained(self) -> bool:
        """Whether it is the outcome of training, so that another seed would have given another."""
        return any(step for one in self.members for step in one.steps)


_Found = tuple[Path, dict[str, Stored]]


def sides_of(
    names: Sequence[str],
    splits: Sequence[str] | None,
    recipe: str | None,
    by: Sequence[str],
    say: Callable[[str], None],
) -> list[Side]:
    """The sides that names form: one each, or, with AGAINST among them, those between. by: keys of the recipes, by
    whose values all runs in the folders named are put together. The rest: as of `compare`. Raises UserError."""
    if by:
        called, groups = _grouped(names, by)
    else:
        called, groups = [], _between(names)
    if len(groups) > len(LETTERS):
        raise UserError(f"at most {len(LETTERS)} can be compared")
    every = [name for group in groups for name in group]
    found = [_stored(name) for name in every]
    if len(every) == 1 and "@" in Path(every[0]).name:
        raise UserError(f"{every[0]}: name what it is to be compared with")
    if len(every) == 1 and found[0] is not None:
        first, last = _first_and_last(every[0], found[0])
        every, found = [_at(*first), _at(*last)], [first, last]
        groups = [[name] for name in every]
    if not every:
        raise UserError("name the runs, evaluations or models to compare")
    known = [one for one in found if one is not None]
    evaluated = []
    for name, one in zip(every, found, strict=True):
        folder, files = one if one is not None else _evaluated(name, splits, recipe, known, say)
        evaluated.append(Evaluated(_named(name, folder, files), folder, files, _model(folder, files)))
    sides, start = [], 0
    for index, group in enumerate(groups):
        members = tuple(evaluated[start : start + len(group)])
        start += len(group)
        sides.append(_grown(LETTERS[index], members, called[index]) if called else Side(LETTERS[index], members))
        _check_seeds(sides[-1])
    return sides


def _grown(letter: str, runs: Sequence[Evaluated], called: str) -> Side:
    """The side of runs that keys put together, without those that did not get as far as the others."""
    most = max((one.steps for one in runs), key=lambda steps: (max(steps, default=-1), min(steps, default=-1)))
    members = tuple(one for one in runs if one.steps in ((), most))
    return Side(letter, members, called, tuple(one for one in runs if one not in members))


def _between(names: Sequence[str]) -> list[list[str]]:
    """The names of each side. Raises UserError: one is empty."""
    if AGAINST not in names:
        return [[name] for name in names]
    groups: list[list[str]] = [[]]
    for name in names:
        if name == AGAINST:
            groups.append([])
        else:
            groups[-1].append(name)
    if not all(groups):
        raise UserError(f"{AGAINST}: name a run before and after it, such as A1 A2 {AGAINST} B1 B2")
    return groups


def _grouped(names: Sequence[str], by: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The runs in folders by the values of keys: what each group is called, and its runs. Raises UserError."""
    if AGAINST in names:
        raise UserError(f"--by and {AGAINST}: the one or the other says what the sides are")
    found: dict[tuple[str, ...], list[str]] = {}
    for folder in (folder for name in names for folder in _runs_in(Path(name))):
        values = dict(leaves(load_recipe(RunFolder(folder).recipe()).shown()))
        for key in by:
            if key not in values:
                raise UserError(f"--by {key}: {folder} has no such key of a recipe{nearest(key, list(values))}")
        found.setdefault(tuple(f"{values[key]}" for key in by), []).append(str(folder))
    if len(found) < 2:
        told = ", ".join(f"{key}={value}" for values in found for key, value in zip(by, values, strict=True))
        raise UserError(f"--by {','.join(by)}: all runs have the same ({told or 'there is no run'})")
    ordered = sorted(found, key=lambda values: [_order(value) for value in values])
    called = [", ".join(f"{key}={value}" for key, value in zip(by, values, strict=True)) for values in ordered]
    return called, [found[values] for values in ordered]


def _order(value: str) -> tuple[bool, float, str]:
    try:
        return False, float(value), ""
    except ValueError:
        return True, 0.0, value


def _runs_in(folder: Path) -> list[Path]:
    """The folders with stored evaluations: itself, or those in it. Raises UserError: there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    candidates = [folder] if (folder / RECIPE).is_file() else inside
    runs = [one for one in candidates if (one / RECIPE).is_file() and _files(one, None)]
    if not runs:
        raise UserError(f"{folder}: no run with a stored evaluation is in it")
    return runs


def _check_seeds(side: Side) -> None:
    """Raise UserError where the evaluations of a side are not those of seeds."""
    first = side.members[0]
    for index, one in enumerate(side.members[1:], 1):
        if any(one.folder.resolve() == other.folder.resolve() for other in side.members[:index]):
            raise UserError(f"{one.name}: named twice on side {side.letter}; a seed counts once")
        if one.steps != first.steps and one.steps and first.steps:
            raise UserError(
                f"{first.name} and {one.name}: no seeds of one recipe, since they were trained for different steps; "
                f"name both after the same one, as RUN@STEP"
            )


def _stored(name: str) -> _Found | None:
    """The folder and files of the evaluation that a name stands for; None: it is a model that is to be
    evaluated. Raises UserError."""
    folder, step = Path(name), None
    if not folder.exists() and (m := re.fullmatch(r"(.+)@(\d{1,9})", name)) and Path(m[1]).is_dir():
        folder, step = Path(m[1]), int(m[2])
    if (run := _run_of(folder)) is not None:
        folder, step = run
    elif not folder.exists():
        if (
            name in EMBEDDED
            or name.startswith(API)
            or (_HUB_NAME.fullmatch(name) and not name.endswith((".yaml", ".yml", ".json")))
        ):
            return None
        raise UserError(f"{name}: there is no such folder, nor is it a model's name on the hub")
    files = _files(folder, step)
    if files:
        return folder, files
    if step is not None and run is None:
        raise UserError(f"{name}: no evaluation after step {step} is stored there{_steps(folder)}")
    if list((folder / TRAJECTORIES).glob(".eval_*.part_*.parquet")):
        raise UserError(f"{name}: an evaluation that is not whole: agentrl eval --resume {folder}")
    if (folder / "config.json").is_file() or (folder / "checkpoints").is_dir():
        return None
    raise UserError(f"{name}: neither a run or evaluation with stored conversations ({TRAJECTORIES}/) nor a model")


def _run_of(folder: Path) -> tuple[Path, int] | None:
    """Run and step of a checkpoint of a run that was evaluated after it."""
    m = re.fullmatch(r"step_(\d{1,9})", folder.name)
    run = folder.parent.parent
    if m is None or folder.parent.name != "checkpoints" or not _files(run, int(m[1])):
        return None
    return run, int(m[1])


def _files(folder: Path, step: int | None) -> dict[str, Stored]:
    """The stored evaluations of a folder by split: those after a step, or the newest of each."""
    found = [one for one in stored_files(folder / TRAJECTORIES) if one.evaluation and step in (None, one.step)]
    return {one.split: one for one in found}


def _steps(folder: Path) -> str:
    steps = sorted({one.step for one in stored_files(folder / TRAJECTORIES) if one.evaluation})
    return f"; stored are those after {', '.join(map(str, steps))}" if steps else ""


def _first_and_last(name: str, stored: _Found) -> tuple[_Found, _Found]:
    """The first and the newest evaluation of each split that a run has evaluated twice; `stored`: the newest.
    Raises UserError: there is none."""
    folder, newest = stored
    every = [one for one in stored_files(folder / TRAJECTORIES) if one.evaluation]
    first = {one.split: one for one in reversed(every)}
    again = [split for split in newest if first[split].step < newest[split].step]
    if not again:
        raise UserError(f"{name}: has one evaluation only; name what it is to be compared with")
    return (folder, {split: first[split] for split in again}), (folder, {split: newest[split] for split in again})


def _named(name: str, folder: Path, files: Mapping[str, Stored]) -> str:
    """A name with the steps of the run's evaluations."""
    if all(one.step == 0 for one in files.values()) or re.search(r"@[\d,]+$|checkpoints/step_\d+/?$", name):
        return name
    return _at(folder, files)


def _at(folder: Path, files: Mapping[str, Stored]) -> str:
    return f"{folder}@{','.join(map(str, sorted({one.step for one in files.values()})))}"


def _model(folder: Path, files: Mapping[str, Stored]) -> str:
    try:
        found = json.loads((folder / EVALUATION).read_bytes())
        return str(found["model"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        steps = {one.step for one in files.values()}
        return "" if len(steps) > 1 else f"after step {max(steps)}" if max(steps) else "before training"


def _evaluated(
    name: str, splits: Sequence[str] | None, recipe: str | None, known: Sequence[_Found], say: Callable[[str], None]
) -> _Found:
    """Evaluate a model as what is stored was, and return where that is kept. Raises UserError."""
    from agentrl.eval.evaluate import evaluate, model_of  # torch and all, which what is stored does without

    if recipe is None and not (known and (known[0][0] / RECIPE).is_file()):
        raise UserError(
            f"{name}: not evaluated yet, and nothing else that is compared has a recipe to do it by: add --recipe "
            "RECIPE, or evaluate it by agentrl eval RECIPE --model MODEL and name the folder that is kept"
        )
    how = load_recipe(recipe if recipe is not None else RunFolder(known[0][0]).recipe())
    model = name if name.startswith(API) else model_of(name)
    if known:
        how, splits = _alike(how, known, splits)
    folder = new_folder(None, Path(name.removeprefix(API)).name)
    say(f"{name} is evaluated now, and kept in {folder}")
    evaluate(how, model=model, splits=splits, keep=folder)
    return folder, _files(folder, None)


def _alike(how: Recipe, known: Sequence[_Found], splits: Sequence[str] | None) -> tuple[Recipe, list[str]]:
    """A recipe with as many tasks and samples as the stored evaluations have, and their splits."""
    chosen = list(splits or [split for split in known[0][1] if all(split in files for _, files in known)])
    played = [
        one for _, files in known for split in chosen if split in files for one in read_outcomes(files[split].path)
    ]
    tasks, samples = (1 + max((getattr(one, key) for one in played), default=0) for key in ("group", "sample"))
    return how.changed(eval={"tasks": max(tasks, 1), "samples": samples}), chosen


def differences(sides: Sequence[Side], runs: Mapping[Path, Recipe | None]) -> tuple[list[str], list[str]]:
    """What makes evaluations unlike, which is to be read first, and how the recipes and the code of the sides differ.
    runs: the recipe of each folder. What is not stored is not told."""
    first: list[str] = []
    steps = {side.letter: side.members[0].steps for side in sides}
    if len({side.folder for side in sides}) > 1 and len({one for one in steps.values() if one}) > 1:
        told = ", ".join(f"{letter} {_trained(one)}" for letter, one in steps.items() if one)
        first.append(f"after different training: {told}")
    for side in sides:
        if side.behind:
            left = ", ".join(one.name for one in side.behind)
            first.append(f"{side.letter}: left out, since its other runs were evaluated after more steps: {left}")
        first += _unlike_seeds(side, [runs[one.folder] for one in side.members])
    recipes = {side.letter: found for side in sides if (found := runs[side.folder]) is not None}
    evaluations = {letter: _evaluating(one) for letter, one in recipes.items()}
    played = _unlike_play(list(recipes.values()))
    if played:
        first.append(f"not played alike: {_values(played, evaluations)}")
    keys = _differing(list(recipes.values()))
    trained = [key for key in keys if key not in played and not _below(key, PASSING)]
    beside = [f"recipes: {_values(trained, recipes)}"] if trained else []
    return first, beside + _code(sides)


def _trained(steps: tuple[int, ...]) -> str:
    last = max(steps)
    return f"after step {last}" if last else "before training"


def _unlike_seeds(side: Side, recipes: Sequence[Recipe | None]) -> Iterator[str]:
    """Yield what is wrong with taking the runs of a side as seeds of one recipe."""
    known = [one for one in recipes if one is not None]
    if len(side.members) == 1 or len(known) < 2:
        return
    if keys := _unlike_play(known):
        yield f"{side.letter}: its runs were not played alike, they differ in {_some(keys)}"
    if keys := [key for key in _differing(known) if not _below(key, PASSING)]:
        yield f"{side.letter}: its runs are not of one recipe, they differ in {_some(keys)}"
    seeds = [one.train.seed for one in known]
    if len(set(seeds)) < len(seeds):
        yield f"{side.letter}: some of its runs have the same {SEED}, so they vary less than seeds do"


def _evaluating(recipe: Recipe) -> Recipe:
    """The recipe with the limits of its evaluations as those of its rollouts."""
    return recipe.changed(rollout=dict(recipe.eval.rollout))


def _unlike_play(recipes: Sequence[Recipe]) -> list[str]:
    """The keys by which evaluations were played, in which those by these recipes differ."""
    return [key for key in _differing([_evaluating(one) for one in recipes]) if key.startswith(PLAYED)]


def _differing(recipes: Sequence[Recipe]) -> list[str]:
    """The keys in which recipes differ from the first."""
    return list(dict.fromkeys(key for one in recipes[1:] for key in differing(recipes[0], one)))


def _below(key: str, parents: Sequence[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _values(keys: Sequence[str], recipes: Mapping[str, Recipe]) -> str:
    """The values of keys by side."""
    values = {letter: dict(leaves(one.shown())) for letter, one in recipes.items()}
    told = [
        f"{key} " + ", ".join(f"{_short(found.get(key))} ({letter})" for letter, found in values.items())
        for key in keys[:SHOWN]
    ]
    return "; ".join(told) + (f"; and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:SHOWN]) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")


def _short(value: Json) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _code(sides: Sequence[Side]) -> list[str]:
    """A line about the code that the sides were made with, where it differs, or is not known of some."""
    states = {side.letter: [read_code(one.folder) for one in side.members] for side in sides}
    if not any(state for those in states.values() for state in those):
        return []
    told = []
    for key in dict.fromkeys(key for those in states.values() for state in those for key in state):
        values = {
            letter: "/".join(dict.fromkeys(state.get(key, "unknown") for state in those))
            for letter, those in states.items()
        }
        if len(set(values.values())) > 1 or any("/" in value for value in values.values()):
            told.append(f"{key} " + ", ".join(f"{_short(value)} ({letter})" for letter, value in values.items()))
    return [f"code: {'; '.join(told)}"] if told else []
