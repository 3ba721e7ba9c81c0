"""`Catalog`: the runs and evaluations that a page can show: those named, and all in the folders named.

Folders come, grow and go while the page is open; what is wrong with one of them is a line beside its name.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from agentrl.checkpoint.code import read_code
from agentrl.checkpoint.run_folder import (
    CHECKPOINTS,
    ERRORS,
    EVALUATION,
    EVALUATIONS,
    LOCK,
    METRICS,
    MODEL,
    RECIPE,
    SCANS,
    TRAJECTORIES,
)
from agentrl.errors import UserError
from agentrl.images import FOLDER as IMAGES
from agentrl.plugins.types import Json
from agentrl.view.store import RunStore, is_run, is_training, read_json, version_of

PATIENCE = 0.3
"""Seconds after which an answer leaves what is not read yet to the next one."""
MOST = 2000
"""Runs and evaluations that are looked at."""
_DEEP = 4  # folders between a folder that was named and a run
_MOST_FOLDERS = 20_000  # that are looked into
_INSIDE = {TRAJECTORIES, CHECKPOINTS, SCANS, IMAGES, MODEL}  # folders of a run that hold no run
_VALUE = 60  # characters of a recipe's value
_MAIN = ("reward/mean", "train/loss", "eval/loss")
_LOWER = ("train/loss", "eval/loss")  # metrics of which the lowest is the best


@dataclass(slots=True)
class Figures:
    """What a run's metrics come to, read as they grow."""

    start: int = 0
    """The byte from which on nothing was read yet."""
    of: str = ""
    """The file that was read, as `RunStore.metrics` names it."""
    step: int | None = None
    """Of the last row."""
    damaged: int = 0
    """Lines that are no rows."""
    tokens: float = 0.0
    """Sampled in all steps."""
    seconds: float = 0.0
    """Of all steps."""
    health: set[str] = field(default_factory=set)
    """Names of what health said."""
    found: dict[str, dict[str, Json]] = field(default_factory=dict)
    """Metric -> first, last and best value, with the steps of the last two and the interval of the last."""

    def add(self, rows: Sequence[Json]) -> None:
        """Take further rows."""
        for row in rows:
            self.step = row["step"]
            self.tokens += _positive(row.get("rollout/tokens"))
            self.seconds += _positive(row.get("time/step_s"))
            said = row.get("health")
            self.health |= (
                {str(one.get("name")) for one in said if isinstance(one, dict)} if isinstance(said, list) else set()
            )
            for key, value in row.items():
                if key in _MAIN or (key.startswith("eval/") and key.endswith(("/accuracy", "/reward/mean"))):
                    self._take(key, value, row)

    def _take(self, key: str, value: Json, row: Json) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        known = self.found.setdefault(key, {"first": value, "best": value, "best_step": row["step"]})
        if value < known["best"] if key in _LOWER else value > known["best"]:
            known |= {"best": value, "best_step": row["step"]}
        base = key.removesuffix("/mean")
        known |= {"last": value, "step": row["step"], "low": row.get(f"{base}_low"), "high": row.get(f"{base}_high")}


def _positive(value: Json) -> float:
    return value if isinstance(value, int | float) and value > 0 else 0.0


@dataclass(slots=True)
class _Known:
    """What was read of a run's folder, and of which state of it."""

    version: str = ""
    row: dict[str, Json] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)


class Catalog:
    """Finds runs. Safe to call from several threads."""

    def __init__(self, named: Sequence[Path]) -> None:
        """named: folders of runs or evaluations, and folders of such folders."""
        self._named = [(path, name, _is_one(path)) for path, name in zip(named, names_of(named), strict=True)]
        self._stores: dict[str, RunStore] = {}
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """How the folders that were named are called."""
        return [name for _, name, _ in self._named]

    def check(self, wait: bool = False) -> None:
        """Raises UserError: one of the folders holds nothing that can be shown. wait: it may be about to."""
        for root, _, _ in self._named:
            if root.exists() and not root.is_dir():
                raise UserError(f"{root}: not a folder")
            if not wait and not root.exists():
                raise UserError(f"{root}: no such folder")
            if not wait and _is_one(root) and not is_run(root):
                missing = f"{METRICS}, {TRAJECTORIES}/ and {RECIPE} are missing"
                raise UserError(f"{root}: neither a run folder ({missing}) nor a folder of runs")

    def chosen(self) -> list[str]:
        """The names of the runs that were named themselves; none where folders of runs were named."""
        return [name for _, name, one in self._named if one]

    def store(self, name: str) -> RunStore:
        """The run of a name. Raises UserError: there is none."""
        if (found := self.stores([name])[0]) is None:
            raise UserError(f"{name[:100]}: no such run")
        return found

    def stores(self, names: Sequence[str]) -> list[RunStore | None]:
        """The runs of these names; None for what is none, or no more."""
        if not self._stores.keys() >= set(names):
            self.find()
        return [self._stores.get(name) for name in names]

    def find(self) -> tuple[dict[str, RunStore], list[str]]:
        """Every run by its name, as they are now, and a line for each thing that could not be looked at."""
        notes: list[str] = []
        budget = iter(range(_MOST_FOLDERS))
        found: dict[str, Path] = {}
        for root, name, one in self._named:
            alone = len(self._named) == 1 and not one
            for path, below in _runs(root, one, notes, budget):
                if len(found) == MOST:
                    notes.append(f"more than {MOST} runs: name a folder of fewer")
                    break
                found[_free("/".join(below if alone else [name, *below]), path, found)] = path
        with self._lock:
            for name in self._stores.keys() - found.keys():
                del self._stores[name]
                self._known.pop(name, None)
            for name, path in found.items():
                if name not in self._stores or self._stores[name].folder != path:
                    self._stores[name] = RunStore(path, name)
                    self._known[name] = _Known()
            return dict(self._stores), list(dict.fromkeys(notes))

    def listing(self) -> Json:
        """A row for each run: its state, its figures, and where its recipe differs from those of others.

        What takes longer than PATIENCE to read is left to the next call, and `reading` says how many are left.
        """
        stores, notes = self.find()
        end = time.monotonic() + PATIENCE
        rows, waiting = [], 0
        for name, store in stores.items():
            known = self._known.get(name) or _Known()
            if time.monotonic() < end or known.version == "":
                fresh = time.monotonic() < end and _update(known, store)
                waiting += not fresh
            rows.append({"name": name, **known.row})
        keys = _varied([row.get("recipe", {}) for row in rows])
        for row in rows:
            recipe = row.pop("recipe", {})
            row["recipe"] = {key: recipe[key] for key in keys if key in recipe}
        return {"runs": rows, "keys": keys, "notes": notes, "reading": waiting}


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its own, with as many of those above as tell it from the others."""
    parts = [tuple(map(_shown, folder.resolve().parts)) for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{part[-1]} ({number})" for number, part in enumerate(parts, 1)]


def _shown(name: str) -> str:
    """A folder's name as one line of text that can be sent."""
    return "".join(c if c.isprintable() else "?" for c in name.encode("utf-8", "replace").decode())


def _free(name: str, path: Path, taken: dict[str, Path]) -> str:
    """The name, with a number where another folder is shown by it."""
    if name not in taken or taken[name] == path:
        return name
    return next(other for n in count(2) if (other := f"{name} ({n})") not in taken)


def _is_one(path: Path) -> bool:
    """Whether a folder is a run, or about to be one, rather than a folder of runs."""
    return is_run(path) or next(_runs(path, False, [], iter(range(_MOST_FOLDERS))), None) is None


def _runs(root: Path, one: bool, notes: list[str], budget: Iterator[int]) -> Iterator[tuple[Path, list[str]]]:
    """Every run in a folder and below with the names of the folders between, the last by name first. one: the folder
    is a run, also where it is about to begin."""
    waiting: list[tuple[Path, list[str]]] = [(root, [])]
    while waiting:
        folder, below = waiting.pop()
        if next(budget, None) is None:
            notes.append(f"more than {_MOST_FOLDERS} folders: not all of {root} was looked at")
            return
        if (found := is_run(folder)) or (one and not below):
            yield folder, below
        if len(below) >= _DEEP:
            continue
        try:
            with os.scandir(folder / EVALUATIONS if found else folder) as entries:
                there = sorted((e.name for e in entries if _may_hold(e)), key=_number)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"{folder}: cannot be looked at: {error.strerror}")
            continue
        above, names = (folder / EVALUATIONS, [*below, EVALUATIONS]) if found else (folder, below)
        waiting += [(above / name, [*names, _shown(name)]) for name in there]


def _may_hold(entry: os.DirEntry[str]) -> bool:
    try:
        return not entry.name.startswith(".") and entry.name not in _INSIDE and entry.is_dir()
    except OSError:
        return False


def _number(name: str) -> list[tuple[bool, int, str]]:
    """Sorts run-2 before run-10."""
    parts = "".join(c if c.isdecimal() and c.isascii() else f"\0{c}\0" for c in name).split("\0")
    return [(part.isdecimal(), int(part) if part.isdecimal() and len(part) < 19 else 0, part) for part in parts if part]


def _update(known: _Known, store: RunStore) -> bool:
    """Read what is new of a run; return whether all is read."""
    folder = store.folder
    names = (METRICS, RECIPE, EVALUATION, ERRORS, LOCK)
    now = " ".join(version_of(folder / name) for name in names) + f" {version_of(folder)} {is_training(folder)}"
    if known.version == now:
        return True
    try:
        whole = _read(known, store)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, UserError, ValueError) as error:
        why = str(error) if isinstance(error, UserError) else f"cannot be read: {type(error).__name__}: {error}"
        known.row, whole = {"state": "broken", "error": " ".join(why.split())[:500]}, True
    if whole:
        known.version = now
    return whole


def _read(known: _Known, store: RunStore) -> bool:
    figures = known.figures
    more = store.metrics(figures.start, figures.of)
    if more["start"] == 0 and figures.start:
        figures = known.figures = Figures()
    figures.start, figures.of = more["next"], more["of"]
    figures.damaged += more["damaged"]
    figures.add(more["rows"])
    known.row = _row(store, figures)
    return not more["more"]


def _row(store: RunStore, figures: Figures) -> dict[str, Json]:
    folder = store.folder
    recipes = store.recipes()
    tree: Json = next((recipe["tree"] for recipe in reversed(recipes) if isinstance(recipe.get("tree"), dict)), {})
    evaluation = read_json(folder / EVALUATION)
    evaluation = evaluation if isinstance(evaluation, dict) else {}
    is_evaluation = (folder / EVALUATION).exists() or folder.parent.name == EVALUATIONS
    planned = _in(tree, "train", "steps")
    planned = planned if isinstance(planned, int) and not is_evaluation else None
    errors = [f"{recipe['name']}: {recipe['error']}" for recipe in recipes if "error" in recipe]
    if figures.damaged:
        lines = "1 damaged line is" if figures.damaged == 1 else f"{figures.damaged} damaged lines are"
        errors.append(f"{METRICS}: {lines} left out")
    if is_evaluation:
        splits = evaluation.get("splits")
        found = _of_splits(splits.items() if isinstance(splits, dict) else ())
        found = found or _of_splits((one["split"], one) for one in store.evaluations())
    else:
        found = figures.found
    return {
        "folder": str(folder),
        "kind": "evaluation" if is_evaluation else "run",
        "state": _state(folder, is_evaluation, bool(evaluation), figures.step, planned),
        "error": "; ".join(errors)[:500],
        "step": figures.step,
        "steps": planned,
        "began": _time(folder / RECIPE),
        "last": max(_time(folder / METRICS), _time(folder / EVALUATION), _time(folder / TRAJECTORIES)) or None,
        "figures": found,
        "tokens": figures.tokens or None,
        "seconds": round(figures.seconds, 3) or None,
        "health": sorted(figures.health),
        "model": str(evaluation.get("model") or _in(tree, "model", "path") or "")[:200],
        "recipe": dict(_leaves(tree)) | {f"code.{key}": value[:_VALUE] for key, value in read_code(folder).items()},
    }


def _state(folder: Path, is_evaluation: bool, evaluated: bool, step: int | None, planned: int | None) -> str:
    if is_training(folder):
        return "running"
    if evaluated or (planned is not None and step is not None and step >= planned):
        return "finished"
    if (folder / LOCK).exists():
        return "killed"
    if _time(folder / ERRORS) >= max(_time(folder / METRICS), 1):
        return "failed"
    return "stopped" if step is not None or is_evaluation or (folder / TRAJECTORIES).exists() else "not begun"


def _of_splits(splits: Iterable[tuple[str, Json]]) -> dict[str, Json]:
    """The figures of an evaluation by what is known of each split, with their intervals."""
    figures = {"accuracy": ("accuracy", "low", "high"), "reward/mean": ("reward", "reward_low", "reward_high")}
    found = {}
    for split, one in splits:
        for key, names in figures.items():
            value, low, high = (one.get(name) if isinstance(one, dict) else None for name in names)
            if isinstance(value, int | float):
                at = {"first": value, "last": value, "best": value, "step": 0, "best_step": 0, "low": low, "high": high}
                found[f"eval/{split}/{key}"] = at
    return found


def _time(path: Path) -> float:
    """When a file was last written; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _in(tree: Json, *keys: str) -> Json:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _leaves(tree: Json, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of a recipe by their dotted keys, each as a short text."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        if isinstance(value, dict | list) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"[:_VALUE], ("null" if value is None else str(value))[:_VALUE]


def _varied(recipes: Sequence[dict[str, str]]) -> list[str]:
    """The keys whose values are not the same in all recipes."""
    read = [recipe for recipe in recipes if recipe]
    keys = dict.fromkeys(key for recipe in read for key in recipe if key != "output")
    return [key for key in keys if len({recipe.get(key) for recipe in read}) > 1]
