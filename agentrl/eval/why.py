"""Why samples are unsolved: what is more frequent among the unsolved than among the solved.

`diagnose` reads the stored samples of an evaluation (or training step), and those of the first one of the same split
for the change since then. Each sample has signs (`signs.py`, the fields of its task, what scanners found, `scan.py`); a
sign is a cause where unsolved samples have it more often than solved ones do, and so much more often that chance does
not explain it: where nothing tells them apart, anything at all is listed with a probability of at most CHANCE. Where no
sample was solved, what many of them did is listed in place of causes: there is nothing to compare it with.
"""

import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from agentrl.errors import UserError
from agentrl.eval.scan import read_findings
from agentrl.eval.scanners import PHRASES
from agentrl.eval.signs import UNSURE, Said, Sign, changed, ended, miscopied, repeated, said, unsure
from agentrl.plugins.types import Json
from agentrl.rollout.call_counts import CallCounts, CallFault, add_row
from agentrl.rollout.trajectory_file import Record, Row, read_batches, read_records, read_rows, stored_files

CHANCE = 0.05
"""Probability, under chance alone, of any cause being listed, of any kind."""
EXAMPLES = 20
"""Examples that a cause keeps, each of another task."""
_VALUES = (
    12  # values of a field that are compared one by one; numbers and texts with more of them by quarters of the tasks
)
_RANGED = 5  # distinct numbers from which on their ranges are compared too
_PATHS = 200  # fields of a task that are looked at, and values of a list
_DEPTH = 6  # of fields in fields
_SLOW = 0.05  # seconds below which no call is slow
_TASKS = 4  # tasks that texts must agree on in the mean to be compared one by one, where there are more
_COMMON = 0.2
"""Share of the unsolved samples that must have a sign for it to be listed where no sample was solved."""
_DONE = ("tool error", "calls", "finish")  # kinds of what a sample did wrong, by itself
_ENDED = ("finish", "stop")  # which is nothing wrong
_LINE = 80  # characters of a field's value
_NOTE = 200  # characters of an error
_COLUMNS = (
    "task", "environment", "sample", "reward", "solved", "finish", "boundary", "task_data", "messages", "branches",
    "segments", "tools", "tool_uses", "turns", "error",
    "extra",
)  # fmt: skip


class Example(NamedTuple):
    """An unsolved sample that has a cause."""

    file: str
    """Name of the file in `trajectories/`."""
    task: str
    """Id of its task."""
    sample: int
    """Index of the sample among those of its task."""
    note: str
    """What was found, such as `225 -> 22 in "22/15"`; may be empty."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A sign that unsolved samples have more often than solved ones."""

    kind: str
    """`field`, `finish`, `tool error`, `calls`, `slow`, `says`, `scan`, `files`, `miscopied`, `made up` or `unsure`."""
    value: str
    """Which of its kind, such as `number in a call of calculator` or `kind = trip`."""
    unsolved: int
    """Number of unsolved samples that have it."""
    tasks: int
    """Number of tasks among these."""
    share: float
    """`unsolved` as a share of all unsolved samples, 0..1."""
    solved: float
    """Share of the solved samples that have it, 0..1."""
    lift: float | None
    """`share` over `solved`; None: no solved sample has it."""
    chance: float
    """Probability, by chance alone, of as large a difference (Fisher's exact test, one-sided)."""
    before: float | None
    """Share of the unsolved samples that had it in the first evaluation, 0..1; None: there is no other evaluation."""
    unsolved_before: int | None
    """Number of unsolved samples that had it then."""
    examples: tuple[Example, ...]
    """Unsolved samples that have it, at most EXAMPLES."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why samples of an evaluation are unsolved. Those lost to an error that is not the model's are in `lost` alone."""

    file: str
    """Name of the file in `trajectories/`."""
    samples: int
    """Number of samples."""
    unsolved: int
    """Number of samples that are unsolved."""
    below: float | None
    """Reward below which a sample counts as unsolved, where the environment was not asked; None where it was."""
    lost: int
    """Number of samples lost to an error that is not the model's."""
    errors: dict[str, int]
    """Their errors, `boundary: message`, each with the number of samples, the most frequent first."""
    faults: tuple[CallFault, ...]
    """What at least half of the calls, or of the samples, have wrong, where a sample is unsolved."""
    first_file: str | None
    """Name of the file of the first evaluation; None: there is no other."""
    first_samples: int
    """Number of samples then."""
    first_unsolved: int
    """Number of samples that were unsolved then."""
    causes: tuple[Cause, ...]
    """The causes, those first whose share among unsolved samples exceeds that of solved ones most."""
    gone: tuple[Cause, ...]
    """What was a cause in the first evaluation, and is at most half as frequent among today's unsolved samples;
    shares are today's."""
    unexplained: int
    """Number of unsolved samples that have none of the causes."""
    notes: tuple[str, ...] = ()
    """What could not be looked at."""

    def json(self) -> dict[str, Json]:
        """The fields as a dictionary, which `json.dumps` takes."""
        found = asdict(self)
        found["faults"] = [fault._asdict() for fault in self.faults]
        for kind in ("causes", "gone"):
            for cause in found[kind]:
                cause["examples"] = [example._asdict() for example in cause["examples"]]
        return found


def diagnose(
    path: Path,
    first: Path | None = None,
    *,
    piece: Callable[[int], str] | None = None,
    turn_limit: int | None = None,
    chance: float = CHANCE,
) -> Diagnosis:
    """Why samples of a file of trajectories are unsolved, and what changed since the file `first`.

    piece: returns the text of a token id; without it nothing is said about where the model was not sure. turn_limit:
    the tokens that a turn might have; without it no call counts as cut off by it. chance: as CHANCE, of what is listed
    of both files.

    A sample is unsolved where the environment does not call it solved; in a training step, which does not ask it,
    where it earned less than the mean, or all earned the same. Raises UserError: a file cannot be read, or is damaged.
    """
    each = chance if first is None else chance / 2
    now = _Counted(path, piece, turn_limit, each)
    then = None if first is None else _Counted(first, piece, turn_limit, each)
    labels, slow = labels_of([*now.data(), *(then.data() if then else ())]), now.slow_calls()
    for counted in (now, *([then] if then else [])):
        counted.count_fields(labels)
        counted.count_slow(slow)
    listed, gone = now.causes(), []
    if then is not None:
        gone = [sign for sign in then.causes() if sign not in listed and 2 * now.share(sign) <= then.share(sign)]
    return Diagnosis(
        file=path.name,
        samples=now.samples,
        unsolved=now.unsolved,
        below=now.below,
        lost=now.errors.total(),
        errors=dict(now.errors.most_common()),
        faults=tuple(now.calls.faults(turn_limit)) if now.unsolved else (),
        first_file=None if first is None else first.name,
        first_samples=0 if then is None else then.samples,
        first_unsolved=0 if then is None else then.unsolved,
        causes=tuple(_cause(sign, now, then) for sign in listed),
        gone=tuple(_cause(sign, now, then) for sign in gone),
        unexplained=sum(not found.intersection(listed) for found in now.signs),
        notes=(*(() if piece is not None and now.tokens else (_NO_TOKENS,)), *now.untested()),
    )


_NO_TOKENS = "without tokens, nothing is said about where it was not sure"


def _cause(sign: Sign, now: "_Counted", then: "_Counted | None") -> Cause:
    tally = now.tally(sign)
    share, solved = now.share(sign), tally.solved.total() / max(1, now.solved)
    return Cause(
        kind=sign[0],
        value=sign[1],
        unsolved=tally.unsolved.total(),
        tasks=len(tally.unsolved),
        share=share,
        solved=solved,
        lift=share / solved if solved else None,
        chance=now.chance(tally) if now.unsolved and now.solved else 1.0,
        before=None if then is None else then.share(sign),
        unsolved_before=None if then is None else then.tally(sign).unsolved.total(),
        examples=tuple(tally.examples),
    )


@dataclass(slots=True)
class _Tally:
    """The samples that have a sign."""

    unsolved: Counter[str] = field(default_factory=Counter)
    """Task -> number of unsolved samples."""
    solved: Counter[str] = field(default_factory=Counter)
    """Task -> number of solved samples."""
    examples: list[Example] = field(default_factory=list)


def reasons(path: Path, first: Path | None, piece: Callable[[int], str] | None) -> dict[str, Json]:
    """`diagnose` as JSON values, for the page of a run; `turn_limit` is that of the run's recipe."""
    evaluation = any(one.evaluation for one in stored_files(path.parent) if one.path == path)
    return diagnose(path, first, piece=piece, turn_limit=turn_limit_of(path.parent.parent, evaluation)).json()


def turn_limit_of(run: Path, evaluation: bool) -> int | None:
    """The tokens that a turn of a run might have, by its recipe; None where that cannot be read."""
    from agentrl.checkpoint.run_folder import recipe_of
    from agentrl.recipe.load import load_recipe

    try:
        path, folder = recipe_of(str(run))
        recipe = load_recipe(path) if folder else None
    except UserError:
        return None
    if recipe is None:
        return None
    limits = recipe.rollout.changed(**recipe.eval.rollout) if evaluation else recipe.rollout
    return limits.max_turn_tokens


class _Counted:
    """The samples of a file, and their signs.

    unsolved, solved: number of samples. errors: see Diagnosis, like `below`. calls: of samples that were not lost.
    signs: of each unsolved sample. tokens: whether it holds any.
    """

    def __init__(
        self, path: Path, piece: Callable[[int], str] | None, turn_limit: int | None, chance: float = CHANCE
    ) -> None:
        self.path = path
        self._chance = chance
        self.unsolved = self.solved = 0
        self.errors: Counter[str] = Counter()
        self.calls = CallCounts()
        self._turn_limit = turn_limit
        self.tokens = path.suffix == ".parquet"
        self.signs: list[set[Sign]] = []
        self.below = solving_reward(path)
        self._piece = piece if self.tokens else None
        self._tallies: dict[Sign, _Tally] = defaultdict(_Tally)
        self._data: dict[str, dict[str, Json]] = {}  # task -> its data, scalars alone
        self._examples: list[Example] = []  # in the order of `signs`
        self._solutions: list[str] = []  # tasks
        self._tasks: dict[str, tuple[int, int]] = {}  # task -> its unsolved samples, all of its samples
        self._seconds: dict[str, list[tuple[int | None, str, float]]] = defaultdict(list)
        # tool -> of each sample that called it: its index among the unsolved (None: solved), task, longest call
        self._findings = {name: notes for name, notes in read_findings(path).items() if name not in PHRASES}
        for number, row in enumerate(_rows(path, with_tokens=self._piece is not None), 1):
            try:
                self._add(row, number - 1)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                raise UserError(f"{path}, sample {number}: damaged: {why}; move the file away") from error

    @property
    def samples(self) -> int:
        """Number of samples that were not lost."""
        return self.unsolved + self.solved

    def _add(self, row: Row, index: int) -> None:
        if row["boundary"] is not None or row["reward"] is None:
            told = " ".join(str(row["error"] or "").split())[:_NOTE]
            self.errors[f"{row['boundary'] or row['finish']}: {told}".removesuffix(": ")] += 1
            return
        add_row(self.calls, row, self._turn_limit)
        unsolved = is_unsolved(row, self.below)
        task = str(row["task"])
        if task not in self._data:
            self._data[task] = _fields(row)
        before, all_before = self._tasks.get(task, (0, 0))
        self._tasks[task] = (before + unsolved, all_before + 1)
        scanned = [(("scan", name), notes[index] or "") for name, notes in self._findings.items() if notes[index]]
        found = dict(reversed([*self._signs(row), *scanned]))  # of several notes the first
        for name, longest in _longest_calls(row).items():
            self._seconds[name].append((self.unsolved if unsolved else None, task, longest))
        if unsolved:
            self.unsolved += 1
            self.signs.append(set())
            self._examples.append(Example(self.path.name, task, int(row["sample"]), ""))
            for sign, note in found.items():
                self._count(-1, sign, note)
        else:
            self.solved += 1
            self._solutions.append(task)
            for sign in found:
                self._tallies[sign].solved[task] += 1

    def _count(self, index: int, sign: Sign, note: str = "") -> None:
        """Count a sign of the unsolved sample at this index."""
        tally, example = self._tallies[sign], self._examples[index]
        if example.task not in tally.unsolved and len(tally.examples) < EXAMPLES:
            tally.examples.append(example._replace(note=note))
        tally.unsolved[example.task] += 1
        self.signs[index].add(sign)

    def _signs(self, row: Row) -> Iterator[tuple[Sign, str]]:
        messages, branches, tools = _conversations(row)
        yield from ended(row)
        yield from changed(_parsed(row["extra"]))
        yield from repeated(messages)
        yield from miscopied(messages, tools)
        texts = [message.text for message in messages if message.sampled]
        yield from ((("says", name), note) for name, found in PHRASES.items() if (note := found(texts)) is not None)
        if self._piece is None or row["lowest"] is None or (turn := _turn(row, messages, branches)) is None:
            return
        number, message = turn
        start, end = row["turns"][number]["start"], row["turns"][number]["end"]
        if row["logprob"] >= math.log(UNSURE):
            yield ("unsure", "nowhere"), ""
        elif end <= len(row["ids"]):
            pieces, at = [self._piece(token) for token in row["ids"][start:end].tolist()], row["lowest"] - start
            note = f'"{pieces[at]}" at {math.exp(row["logprob"]):.0%}'
            yield unsure(pieces, at, message, last=number == len(row["turns"]) - 1, tools=tools), note

    def count_fields(self, labels: Callable[[Mapping[str, Json]], Sequence[Sign]]) -> None:
        """Count the signs that `labels` gives for the data of each sample's task."""
        found = {task: labels(data) for task, data in self._data.items()}
        for index, example in enumerate(self._examples):
            for sign in found[example.task]:
                self._count(index, sign)
        for task in self._solutions:
            for sign in found[task]:
                self._tallies[sign].solved[task] += 1

    def slow_calls(self) -> dict[str, float]:
        """Tool -> seconds that the longest call of a quarter of the samples exceeds, where that is far above the
        middle."""
        found = {}
        for name, uses in self._seconds.items():
            middle, edge = np.quantile([seconds for *_, seconds in uses], [0.5, 0.75]).tolist()
            if edge >= _SLOW and edge > 1.5 * middle:
                found[name] = edge
        return found

    def count_slow(self, edges: Mapping[str, float]) -> None:
        """Count a sign for each sample with a call that took longer than the tool's edge."""
        for name, edge in edges.items():
            sign = ("slow", f"a call of {name} over {edge:.2g} s")
            for index, task, seconds in self._seconds.get(name, ()):
                if seconds <= edge:
                    continue
                if index is None:
                    self._tallies[sign].solved[task] += 1
                else:
                    self._count(index, sign, f"{seconds:.2g} s")

    def untested(self) -> list[str]:
        """What could not be compared, as lines."""
        found = []
        if self.solved and self.unsolved:
            limits, least = self._limits(), self._least(self.unsolved)
            if weak := sorted({kind for kind, _ in self._tallies if least > limits[_family(kind)]}):
                found.append(
                    f"{self.unsolved} unsolved and {self.solved} solved samples are too few for a cause of the kinds "
                    f"{', '.join(weak)}: whatever they had in common could be chance"
                )
            rare = sum(tally.unsolved.total() == 1 and not tally.solved for tally in self._tallies.values())
            if rare:
                found.append(f"{rare} things that one unsolved sample alone has were not compared")
        texts = sorted({name for data in self._data.values() for name, value in data.items() if _is_long(value)})
        if texts:
            shown = ", ".join(texts[:5]) + (", ..." if len(texts) > 5 else "")
            found.append(f"of long texts among the fields the length alone was compared: {shown}")
        return found

    def data(self) -> Iterable[dict[str, Json]]:
        """The fields in the data of each task."""
        return self._data.values()

    def tally(self, sign: Sign) -> _Tally:
        """The samples that have a sign."""
        return self._tallies.get(sign, _Tally())

    def share(self, sign: Sign) -> float:
        """The share of the unsolved samples that have a sign."""
        return self.tally(sign).unsolved.total() / max(1, self.unsolved)

    def chance(self, tally: _Tally) -> float:
        """The chance of a sign that has this tally; those of a task count as fewer as far as they agree."""
        size = self._design_effect(tally)
        a, b, unsolved, solved = (
            round(n / size) for n in (tally.unsolved.total(), tally.solved.total(), self.unsolved, self.solved)
        )
        return fisher(min(a, unsolved), unsolved, min(b, solved), solved)

    def _design_effect(self, tally: _Tally) -> float:
        """By how much the variance of the difference exceeds that of independent samples: 1 up to the number of
        samples of a task."""
        each = self.samples / len(self._data)
        having = sum(tally.unsolved.values()) + sum(tally.solved.values())
        x, f = having / self.samples, self.unsolved / self.samples
        expected = self.samples * x * (1 - x) * f * (1 - f)
        if each <= 1 or not expected:
            return 1.0
        found = 0.0
        for task, (unsolved, samples) in self._tasks.items():
            a, b = tally.unsolved[task], tally.solved[task]
            found += (a - f * (a + b) - x * unsolved + x * f * samples) ** 2
        return max(1.0, min(each, found / expected))

    def causes(self) -> list[Sign]:
        """The signs that are causes, see the module, the largest difference of the shares first."""
        if not self.solved:
            shares = [(-self.share(sign), sign) for sign in self._tallies if sign[0] in _DONE and sign != _ENDED]
            return [sign for share, sign in sorted(shares) if share <= -_COMMON]
        if not self.unsolved:
            return []
        limits, found = self._limits(), []
        for sign, tally in self._tallies.items():
            difference = self.share(sign) - tally.solved.total() / self.solved
            if tally.unsolved.total() > 1 and difference > 0 and self.chance(tally) <= limits[_family(sign[0])]:
                found.append((-difference, sign))
        return self._of_ranges([sign for _, sign in sorted(found)])

    def _limits(self) -> dict[str, float]:
        """Family of kinds -> the chance up to which a sign of it is a cause.

        Families share CHANCE evenly, and so do the signs of a family, without those that could not reach the limit
        however the samples that have them had ended (Tarone 1990): so a thousand rare errors hide no frequent one.
        """
        least: dict[str, list[float]] = defaultdict(list)
        for (kind, _), tally in self._tallies.items():
            least[_family(kind)].append(self._least(tally.unsolved.total() + tally.solved.total()))
        own = self._chance / max(1, sum(min(each) <= self._chance for each in least.values()))
        found = {}
        for family, each in least.items():
            each.sort()
            found[family] = own / next(n for n in range(1, len(each) + 1) if bisect_right(each, own / n) <= n)
        return found

    def _least(self, having: int) -> float:
        """The least chance of a sign that so many samples have: that as many of them as can be are unsolved."""
        unsolved = min(having, self.unsolved)
        return fisher(unsolved, self.unsolved, having - unsolved, self.solved)

    def _of_ranges(self, signs: list[Sign]) -> list[Sign]:
        """The signs, of several ranges of one field only that which chance explains least."""
        best: dict[str, Sign] = {}
        for sign in signs:
            name = range_of(sign)
            if name and (name not in best or self.chance(self.tally(sign)) < self.chance(self.tally(best[name]))):
                best[name] = sign
        return [sign for sign in signs if not (name := range_of(sign)) or best[name] == sign]


def _family(kind: str) -> str:
    """The kinds that are tested together, and share their part of CHANCE."""
    return "scan" if kind in ("says", "slow") else kind


def fisher(a: int, m: int, b: int, n: int) -> float:
    """The probability that a or more of m have a sign where b of n others have it, if both are drawn alike
    (Fisher's exact test, one-sided)."""
    both, total = a + b, 0.0
    for found in range(a, min(m, both) + 1):
        if both - found > n:
            continue
        term = math.exp(_choose(m, found) + _choose(n, both - found) - _choose(m + n, both))
        total += term
        if term < 1e-12 * total:
            break
    return min(1.0, total)


def _choose(n: int, k: int) -> float:
    """The logarithm of n over k."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


# Samples of a file


def is_unsolved(row: Row, below: float | None) -> bool:
    """Whether a sample was scored and counts as unsolved. below: see `solving_reward`."""
    if row["boundary"] or row.get("reward") is None:
        return False
    return bool(row["reward"] < below) if below is not None else not row.get("solved")


def solving_reward(path: Path) -> float | None:
    """The reward below which samples count as unsolved where no sample has the environment's word, else None: the
    mean, or just above it where all earned the same, so that all count as unsolved."""
    rows = read_rows(path, ["reward", "solved"]) if path.suffix == ".parquet" else read_records(path)
    if any(row.get("solved") is not None for row in rows):
        return None
    rewards = [row["reward"] for row in rows if isinstance(row.get("reward"), int | float)]
    if not rewards:
        return None
    return math.nextafter(rewards[0], math.inf) if min(rewards) == max(rewards) else sum(rewards) / len(rewards)


def _rows(path: Path, *, with_tokens: bool) -> Iterator[Row]:
    """Yield the samples of a file: the columns of `_COLUMNS`, and where `with_tokens` the ids, and index and value of
    the lowest log-prob among the sampled tokens, as `ids`, `lowest` and `logprob`."""
    if path.suffix != ".parquet":
        yield from map(_of_record, read_records(path))
        return
    for batch in read_batches(path, [*_COLUMNS, "ids", "logprobs"] if with_tokens else _COLUMNS):
        rows = batch.select(_COLUMNS).to_pylist()
        yield from _with_lowest(rows, batch) if with_tokens else rows


def _of_record(record: Record) -> Row:
    """A sample of JSON lines, which have neither segments nor tokens."""
    row = dict.fromkeys(_COLUMNS) | {name: record[name] for name in _COLUMNS if name in record}
    failure = record.get("failure") or {}
    row |= {"boundary": failure.get("boundary"), "error": failure.get("message")}
    return row | {"task_data": record.get("data"), "sample": record.get("sample") or 0}


def _with_lowest(rows: Iterable[Row], batch: pa.RecordBatch) -> Iterator[Row]:
    ids, logprobs = batch.column("ids"), batch.column("logprobs")
    tokens, values = ids.values.to_numpy(zero_copy_only=False), logprobs.values.to_numpy(zero_copy_only=False)
    places = zip(ids.offsets.tolist(), logprobs.offsets.tolist(), strict=True)
    for row, ((i, low), (j, high)) in zip(rows, pairwise(places), strict=True):
        own = values[low:high]
        at = int(own.argmin()) if len(own) else None
        yield row | {"ids": tokens[i:j], "lowest": at, "logprob": None if at is None else float(own[at])}


def _conversations(row: Row) -> tuple[list[Said], list[list[Said]], Sequence[str]]:
    """What was said, what each segment of a tree adds to it, and the names of the tools."""
    branches = [[said(message) for message in one] for one in _parsed(row["branches"]) or ()]
    messages = [message for one in branches for message in one] or [said(one) for one in _parsed(row["messages"])]
    return messages, branches, row["tools"] or ()


def _parsed(value: object) -> Json:
    return json.loads(value) if isinstance(value, str) else value


def _turn(row: Row, messages: list[Said], branches: list[list[Said]]) -> tuple[int, Said] | None:
    """Index and message of the turn that the token of the lowest log-prob is of; None where it is of none."""
    at, spans = row["lowest"], row["turns"] or []
    number = next((i for i, turn in enumerate(spans) if turn["start"] <= at < turn["end"]), None)
    if number is None:
        return None
    later = spans[number + 1 :]
    for segment, own in zip(row["segments"], branches, strict=True) if branches else ():
        if segment["start"] <= at < segment["end"]:
            messages, later = own, [turn for turn in later if turn["start"] < segment["end"]]
    sampled = [message for message in messages if message.sampled]  # from the end: the opening may have some too
    return (number, sampled[-1 - len(later)]) if len(later) < len(sampled) else None


# Fields of tasks, and calls


def _longest_calls(row: Row) -> dict[str, float]:
    """Tool -> the seconds of its longest call in a sample."""
    found: dict[str, float] = {}
    for use in row["tool_uses"] or ():
        name, seconds = str(use["name"]), use.get("seconds")
        if name in (row["tools"] or ()) and isinstance(seconds, int | float):
            found[name] = max(found.get(name, 0.0), float(seconds))
    return found


def _fields(row: Row) -> dict[str, Json]:
    """What is compared of a task's data, by path: `a.b` of nested fields; of lists the values (`tags[]`, a tuple) and
    their number; and its environment."""
    data = _parsed(row["task_data"]) or {}
    if not isinstance(data, Mapping):
        raise TypeError("a task's data is no object")
    found = dict(_flat(data))
    return found | ({"environment": row["environment"]} if row["environment"] else {})


def _flat(data: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    found: dict[str, Json] = {}
    waiting: list[tuple[str, Json, int]] = [("", data, 0)]
    while waiting and len(found) < _PATHS:
        path, value, depth = waiting.pop(0)
        if isinstance(value, str | int | float):
            found[path] = (*found.get(path, ()), value) if "[]" in path else value
        elif isinstance(value, Mapping) and depth < _DEPTH:
            waiting += [(f"{path}.{key}" if path else str(key), one, depth + 1) for key, one in value.items()]
        elif isinstance(value, list) and depth < _DEPTH:
            found |= {} if "[]" in path else {f"number of {path}": len(value)}
            waiting += [(f"{path}[]", one, depth + 1) for one in value[:_PATHS]]
    yield from found.items()


def _is_long(value: Json) -> bool:
    return isinstance(value, str) and len(value) > _LINE


def range_of(sign: Sign) -> str:
    """The field of a sign that is a range of numbers, or of lengths; empty of another sign."""
    name, between, _ = sign[1].rpartition(" from ")
    return name if between and sign[0] == "field" else ""


def labels_of(tasks: Iterable[Mapping[str, Json]]) -> Callable[[Mapping[str, Json]], list[Sign]]:
    """A function from a task's data to its signs, of each field in which tasks agree.

    Values are compared one by one where there are few, and what lists hold; numbers also by quarters and halves of the
    tasks, the middle half among these; texts of which there are many by their lengths.
    """
    columns: dict[str, list[Json]] = {}
    for data in tasks:
        for name, value in data.items():
            columns.setdefault(name, []).append(value)
    readers = {name: found for name, values in columns.items() if (found := _readers(name, values))}

    def labels(data: Mapping[str, Json]) -> list[Sign]:
        found = (label for name, value in data.items() for reader in readers.get(name, ()) for label in reader(value))
        return [("field", label) for label in dict.fromkeys(found)]

    return labels


_Reader = Callable[[Json], Sequence[str]]
"""Names the groups of a value."""


def _readers(name: str, values: Sequence[Json]) -> list[_Reader]:
    """What names the groups of a field's values; empty where all are equal."""
    if any(isinstance(value, tuple) for value in values):
        held = Counter(str(one) for value in values if isinstance(value, tuple) for one in set(value))
        kept = {one for one, count in held.most_common(_VALUES) if 1 < count < len(values)}
        return [lambda value: [f"{name} has {str(one)[:_LINE]}" for one in value if str(one) in kept]] if kept else []
    distinct = {str(value) for value in values}
    if len(distinct) < 2:
        return []
    numbers = [number for value in values if (number := _number(value)) is not None]
    agree = len(distinct) * _TASKS <= len(values) and len(numbers) < len(values)
    found: list[_Reader] = []
    if len(distinct) <= _VALUES or agree:
        found.append(lambda value: [f"{name} = {str(value)[:_LINE]}"])
    if len(numbers) == len(values) and len(distinct) >= _RANGED:
        found.append(_ranges(name, numbers, _number, ""))
    elif not found:
        found.append(_ranges(name, [_letters(value) for value in values], _letters, " characters"))
    return found


def _ranges(name: str, sizes: Sequence[float], size: Callable[[Json], float | None], unit: str) -> _Reader:
    """What names the quarter of a value, and the halves that it is in: the lower, the middle, the upper."""
    edges = np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1]).tolist()

    def groups(value: Json) -> list[str]:
        found = size(value)
        place = 3 if found is None else max(0, min(3, bisect_left(edges, found) - 1))
        parts = [(place, place + 1), *((low, low + 2) for low in (0, 1, 2) if low <= place < low + 2)]
        return [f"{name} from {edges[low]:.6g} to {edges[high]:.6g}{unit}" for low, high in parts]

    return groups


def _number(value: Json) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _letters(value: Json) -> float:
    return float(len(str(value)))
