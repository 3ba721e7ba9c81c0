"""`agentrl sweep`: runs of one recipe over values of its keys, in one folder, which can be gone on with.

A configuration is a choice of values of all keys but `train.seed`; each of its seeds is a trial, a run of its own.
"""

import csv
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

from agentrl.checkpoint.disk import write_whole
from agentrl.checkpoint.run_folder import FolderLock
from agentrl.errors import UserError
from agentrl.eval.compare import Comparison, Paired, compare
from agentrl.eval.sides import AGAINST, LETTERS, SEED
from agentrl.jsonable import dumps
from agentrl.plugins.environment import is_validation
from agentrl.plugins.types import Json
from agentrl.recipe.load import dump_recipe, load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.training.axes import Axis, Range
from agentrl.training.proposals import Proposals, check_installed
from agentrl.training.trials import Processes, Trial, read_json

PLAN, BASE, TABLE, TRIALS = "sweep.json", "base.yaml", "table.csv", "trials"
RISK = 0.05
"""The probability that halving drops the best configuration in one of its rounds."""
_SEED = 20_000_003  # of random configurations
Say = Callable[[str], None]


@dataclass(slots=True)
class Plan:
    """What a sweep tries; it is written to PLAN."""

    keys: list[str]
    """The keys that vary, without `train.seed`."""
    seeds: list[str]
    """The values of `train.seed`; empty: the recipe's own."""
    steps: int
    """Training steps of a run."""
    configurations: list[list[str]] = field(default_factory=list)
    """The values of `keys` of each configuration."""
    proposed: int = 0
    """Configurations that Optuna proposes in all; 0: all are known."""
    axes: dict[str, str] = field(default_factory=dict)
    """The keys' values or ranges as they were given."""
    halve: list[int] = field(default_factory=list)
    """Steps after which the lower half is dropped, as far as the data say so."""
    halved: list[int] = field(default_factory=list)
    """Those of `halve` after which that was done."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Index of a configuration that was dropped -> why."""

    def trials(self, folder: Path, index: int) -> list[Trial]:
        """The runs of a configuration."""
        chosen = [f"{key}={value}" for key, value in zip(self.keys, self.configurations[index], strict=True)]
        found = []
        for own in [[f"{SEED}={seed}"] for seed in self.seeds] or [[]]:
            keys = (*chosen, *own)
            told = "-".join(re.sub(r"^[^=]*\.", "", key) for key in keys)  # the last part of each key
            name = re.sub(r"[^\w.=+-]+", "_", f"{index + 1:03d}-{told}")[:100].rstrip(".")
            found.append(Trial(index, keys, folder / TRIALS / name))
        return found

    def told(self, index: int) -> str:
        """A configuration by its values."""
        return ", ".join(f"{key}={value}" for key, value in zip(self.keys, self.configurations[index], strict=True))

    @property
    def alive(self) -> list[int]:
        """The configurations that were not dropped."""
        return [index for index in range(len(self.configurations)) if str(index) not in self.dropped]


def plan(recipe: Recipe, axes: Mapping[str, Axis], drawn: int, proposed: int, halve: Sequence[int]) -> Plan:
    """The plan of a sweep. drawn: configurations at random; proposed: by Optuna; neither: all of them. Raises
    UserError."""
    seeds = axes.get(SEED, ())
    chosen = {key: axis for key, axis in axes.items() if key != SEED}
    if isinstance(seeds, Range):
        raise UserError(f"{SEED}: name seeds one by one, such as {SEED}=0,1,2: each configuration is run with all")
    if not chosen and not seeds:
        raise UserError("a sweep needs a key with several values, such as train.lr=1e-4,3e-4 or train.seed=0,1,2")
    ranges = [key for key, axis in chosen.items() if isinstance(axis, Range)]
    if ranges and not drawn and not proposed:
        raise UserError(f"{ranges[0]}: a range has no end of values: add --random N, or --optuna N")
    if recipe.eval.splits == ():
        raise UserError("eval.splits=[]: a sweep compares what runs come to on held-out tasks: name a split")
    _check_rounds(recipe, halve, proposed)
    if proposed:
        check_installed()
    told = {
        key: f"{axis.low:g}..{axis.high:g}" if isinstance(axis, Range) else ",".join(axis)
        for key, axis in chosen.items()
    }
    found = Plan(list(chosen), list(seeds), recipe.train.steps, axes=told, proposed=proposed, halve=sorted(set(halve)))
    if drawn:
        found.configurations = _drawn(chosen, drawn)
    elif not proposed:
        found.configurations = [list(values) for values in product(*map(_each, chosen.values()))]
    return found


def _each(axis: Axis) -> tuple[str, ...]:
    assert not isinstance(axis, Range)  # it was refused
    return axis


def _drawn(axes: Mapping[str, Axis], count: int) -> list[list[str]]:
    """Different configurations at random, the same ones each time; fewer where there are no more."""
    rng = random.Random(_SEED)
    found: list[list[str]] = []
    for _ in range(50 * count):
        one = [axis.drawn(rng) if isinstance(axis, Range) else rng.choice(axis) for axis in axes.values()]
        if one not in found and len(found) < count:
            found.append(one)
    return found


def _check_rounds(recipe: Recipe, halve: Sequence[int], proposed: int) -> None:
    """Raise UserError where halving is not possible, or would not train as a run of all steps does."""
    if not halve:
        return
    if proposed:
        raise UserError("--halve and --optuna: Optuna chooses by whole runs; use one of them")
    if min(halve) < 1 or max(halve) >= recipe.train.steps:
        raise UserError(f"--halve: expected steps from 1 to {recipe.train.steps - 1}, below train.steps")
    if recipe.train.schedule != "constant" or 0 < recipe.train.warmup < 1:
        raise UserError(
            "--halve: runs are trained to an earlier step first, and this learning rate depends on the last one: set "
            "train.schedule=constant, and train.warmup to a number of steps"
        )


@dataclass(slots=True)
class Sweep:
    """A sweep on disk: PLAN, BASE, TABLE, and the run folders in TRIALS."""

    folder: Path
    """Its folder."""
    plan: Plan
    """What it tries."""
    say: Say
    """Told what begins, ends and is dropped."""

    @classmethod
    def new(cls, folder: Path, recipe: Recipe, made: Plan, say: Say) -> "Sweep":
        """Make the folder. Raises UserError: it holds something, or a configuration is not a recipe."""
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--output {folder}: is not empty; name another folder, or go on with --resume {folder}")
        found = cls(folder, made, say)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / BASE, dump_recipe(recipe))
            try:
                for trial in found.trials():
                    load_recipe(folder / BASE, trial.keys)
            except UserError:
                (folder / BASE).unlink()
                folder.rmdir()
                raise
            found.write()
        except OSError as error:
            raise UserError(f"--output {folder}: cannot be written to: {error.strerror}") from error
        return found

    @classmethod
    def existing(cls, folder: Path, say: Say) -> "Sweep":
        """The sweep of a folder. Raises UserError: there is none, or it is damaged."""
        if not (folder / PLAN).is_file():
            raise UserError(f"--resume {folder}: no sweep there ({PLAN} is missing)")
        try:
            return cls(folder, Plan(**read_json(folder / PLAN)), say)
        except TypeError as error:
            raise UserError(f"{folder / PLAN}: not what a sweep writes: {error}") from error

    def write(self) -> None:
        """Write the plan."""
        write_whole(self.folder / PLAN, dumps(asdict(self.plan), indent=1) + "\n")

    def trials(self) -> list[Trial]:
        """The runs of all configurations that were not dropped."""
        return [trial for index in self.plan.alive for trial in self.plan.trials(self.folder, index)]

    def run(self, processes: Processes, most_steps: int | None = None) -> bool:
        """Train what is left; return whether all of it has been tried. most_steps: training steps of all runs together,
        those that were done before included.

        Raises UserError, and KeyboardInterrupt once all runs have saved what they did."""
        lock = FolderLock(self.folder)
        try:
            if self.plan.proposed:
                return self._propose(processes, most_steps)
            for step in self.plan.halve:
                if step not in self.plan.halved:
                    if not self._train(processes, self.trials(), step, most_steps):
                        return False
                    self._halve(step)
            return self._train(processes, self.trials(), self.plan.steps, most_steps)
        finally:
            self.table()
            lock.release()

    def _train(self, processes: Processes, trials: Sequence[Trial], step: int, most_steps: int | None) -> bool:
        """Train trials up to a step as far as the budget of steps goes."""
        left = [trial for trial in trials if not trial.done(step)]
        if most_steps is not None:
            spent = sum(
                trial.steps
                for index in range(len(self.plan.configurations))
                for trial in self.plan.trials(self.folder, index)
            )
            affordable: list[Trial] = []
            for trial in left:
                spent += step - trial.steps
                if spent > most_steps:
                    break
                affordable.append(trial)
            processes.train(affordable, step)
            return len(affordable) == len(left)
        return processes.train(left, step)

    def _propose(self, processes: Processes, most_steps: int | None) -> bool:
        """Run the configurations that Optuna proposes, `parallel` at a time."""
        proposals = Proposals(self.folder, self.plan.axes)
        self.plan.configurations += proposals.known()[len(self.plan.configurations) :]
        while True:
            open_ = [index for index in range(len(self.plan.configurations)) if not proposals.told(index)]
            if not open_ and len(self.plan.configurations) >= self.plan.proposed:
                return True
            wanted = min(processes.parallel, self.plan.proposed - len(self.plan.configurations))
            if not open_:
                self.plan.configurations += [proposals.ask() for _ in range(wanted)]
                self.write()
                continue
            trials = [trial for index in open_ for trial in self.plan.trials(self.folder, index)]
            if not self._train(processes, trials, self.plan.steps, most_steps):
                return False
            for index in open_:
                proposals.tell(index, self.score(index, self.plan.steps))

    def split(self, step: int) -> str | None:
        """The split that chooses: one for validation where runs were evaluated on it after a step, else the first."""
        for trial in self.trials():
            if found := trial.held_out(step):
                return next((split for split in found if is_validation(split)), next(iter(found)))
        return None

    def score(self, index: int, step: int) -> float | None:
        """The mean over seeds of a configuration: the accuracy, or the mean reward where no run solves anything."""
        split = self.split(step)
        rows = [trial.held_out(step).get(split or "") for trial in self.plan.trials(self.folder, index)]
        known = [row for row in rows if row]
        if not known or len(known) < len(rows):
            return None
        name = "accuracy" if any(self._solved(step, split)) else "reward/mean"
        return sum(row[name] for row in known) / len(known)

    def _solved(self, step: int, split: str | None) -> Iterator[bool]:
        for trial in self.trials():
            yield trial.held_out(step).get(split or "", {}).get("accuracy", 0.0) > 0

    def _halve(self, step: int) -> None:
        """Drop of the lower half what the data tell from the best: for a best configuration to be dropped by mistake,
        one of the others must look better by chance, which Bonferroni's bound over them, and over the rounds, keeps
        below RISK in all."""
        scores = {index: score for index in self.plan.alive if (score := self.score(index, step)) is not None}
        ranked = sorted(scores, key=lambda index: -scores[index])
        lower, split = ranked[math.ceil(len(ranked) / 2) :], self.split(step)
        level = RISK / len(self.plan.halve) / max(1, len(ranked) - 1)
        for index in lower:
            found = self._against(ranked[0], index, step, split or "")
            p = found.found.p / 2  # one-sided: only the better one drops the other
            told = f"{found.measure.told(abs(found.found.value))}{' points' if found.measure.share else ''}"
            line = f"{told} below {self.plan.told(ranked[0])} on {split} after step {step} (one-sided p = {p:.2g})"
            if p < level and scores[index] < scores[ranked[0]]:
                self.plan.dropped[str(index)] = line
                self.say(f"dropped: {self.plan.told(index)}: {line}")
            else:
                self.say(f"kept: {self.plan.told(index)}: {line}: not told apart at p < {level:.2g}")
        about = "recipes" if len(self.plan.seeds) > 1 else "single runs, not recipes"
        self.say(
            f"after step {step} the best configuration is dropped in at most {RISK / len(self.plan.halve):.1%} of "
            f"sweeps; this is about {about} after that step, not after the last"
        )
        self.plan.halved.append(step)
        self.write()

    def _against(self, best: int, other: int, step: int, split: str) -> Paired:
        first, second = ([f"{one.folder}@{step}" for one in self.plan.trials(self.folder, i)] for i in (other, best))
        return compare(*first, AGAINST, *second, splits=[split]).paired[0]

    def rows(self) -> list[dict[str, Json]]:
        """A row for each run: configuration, seed, steps done, what it came to on each split, and its state."""
        found = []
        for index in range(len(self.plan.configurations)):
            for trial in self.plan.trials(self.folder, index):
                chosen = dict(text.partition("=")[::2] for text in trial.keys)
                row: dict[str, Json] = {"run": trial.folder.name, **chosen, "steps": trial.steps}
                for split, values in trial.held_out(trial.steps).items():
                    row |= {f"{split} {name}": value for name, value in values.items()}
                row["state"] = self._state(trial)
                found.append(row)
        return found

    def _state(self, trial: Trial) -> str:
        if trial.done(self.plan.steps):
            return "done"
        if str(trial.configuration) in self.plan.dropped:
            return "dropped"
        return "begun" if trial.folder.exists() else "not begun"

    def table(self) -> None:
        """Write TABLE."""
        rows = self.rows()
        with (self.folder / TABLE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)

    def comparison(self) -> Comparison | None:
        """Every configuration whose runs are done against the first of them, or, where `compare` has no letters for
        all, the best; None where there are not two."""
        steps = self.plan.steps
        groups = {index: self.plan.trials(self.folder, index) for index in self.plan.alive}
        done = [index for index, trials in groups.items() if all(trial.done(steps) for trial in trials)]
        if len(done) < 2:
            return None
        first, *others = done
        best = sorted(others, key=lambda index: -(self.score(index, steps) or 0.0))[: len(LETTERS) - 1]
        if len(best) < len(others):
            self.say(f"{len(done)} configurations are done; the first is compared with the best {len(best)} others")
        compared = (groups[index] for index in (first, *sorted(best)))
        names = [name for trials in compared for name in (*(str(trial.folder) for trial in trials), AGAINST)]
        return compare(*names[:-1])


def deadline(budget: str | None) -> tuple[float, int | None]:
    """The time by the monotonic clock, and the steps, of a budget such as `90m`, `8h`, `600s` or `2000steps`. Raises
    UserError."""
    if budget is None:
        return math.inf, None
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?) ?(s|m|h|steps)", budget)
    if found is None or not float(found[1]) or (found[2] == "steps" and "." in found[1]):
        raise UserError(
            f"--budget {budget}: expected a time such as 600s, 90m or 8h, or training steps such as 2000steps"
        )
    if found[2] == "steps":
        return math.inf, int(found[1])
    return time.monotonic() + float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]], None
