"""What is learned from, as trajectories: conversations of a source or rollouts of a run; and what was refused."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path

import numpy as np

from agentrl.checkpoint.run_folder import RECIPE, TRAJECTORIES
from agentrl.data.files import file_type
from agentrl.data.media import Images
from agentrl.data.rows import Rows
from agentrl.data.source import open_source
from agentrl.errors import UserError
from agentrl.eval.held_out import solved_by
from agentrl.fine_tuning.conversations import Layout, Refusal, Talk, fitting, images_of, read_row, trained
from agentrl.images import keyed
from agentrl.jsonable import dumps
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Json
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.sft import SftSection, SftSelect
from agentrl.rollout.stored import folder_files, of_split, read_samples
from agentrl.rollout.trajectory_file import TRAIN, Stored
from agentrl.training.run import check_tokenizer
from agentrl.trajectory import Trajectory

FIRST = 100  # refused rows that the report names
LINES = 4  # reasons that are printed
NOT_SOLVED = "it is not solved (sft.select.solved)"
LOOKED_AT = 32  # rows whose tools the chat is loaded with

Say = Callable[[str], None]


@dataclass(slots=True)
class Lessons:
    """Conversations to learn from."""

    taught: list[Trajectory] = field(default_factory=list)
    """Those that are learned."""
    held_out: list[Trajectory] = field(default_factory=list)
    """Those whose loss is measured."""
    read: int = 0
    """Rows that were read."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Of each row that was refused its place, and why."""

    @property
    def reasons(self) -> Counter[str]:
        """How many rows were refused for which reason; numbers of the single row left out."""
        return Counter(re.sub(r"\d+", "N", why) for _, why in self.refused)

    def told(self) -> list[str]:
        """Lines for people."""
        held = f", {len(self.held_out):,} held out" if self.held_out else ""
        lines = [f"read {self.read:,} conversations: {len(self.taught):,} used{held}, {len(self.refused):,} refused"]
        places: dict[str, tuple[str, str]] = {}
        for place, why in self.refused:
            places.setdefault(re.sub(r"\d+", "N", why), (place, why))
        counted = self.reasons.most_common()
        lines += [
            f"refused {count:,}: {places[reason][1]} (first: {places[reason][0]})" for reason, count in counted[:LINES]
        ]
        left = sum(count for _, count in counted[LINES:])
        return lines + ([f"refused {left:,} for {len(counted) - LINES} further reasons"] if left else [])

    def report(self) -> dict[str, Json]:
        """Counts, reasons and the first refused rows as JSON values."""
        return {
            "read": self.read, "used": len(self.taught), "held_out": len(self.held_out), "refused": len(self.refused),
            "reasons": dict(self.reasons.most_common()),
            "first_refused": [{"row": place, "why": why} for place, why in self.refused[:FIRST]],
        }  # fmt: skip

    def digest(self) -> str:
        """A text that differs where other tokens are learned."""
        found = hashlib.sha256()
        for t in self.taught:
            found.update(_seen(t) + t.loss_mask.tobytes())
        return found.hexdigest()[:16]


def _seen(t: Trajectory, end: int | None = None) -> bytes:
    """Bytes that two trajectories have in common only if their first `end` tokens are the same, and their
    images."""
    ids = keyed(t.ids, t.images) if t.images else np.asarray(t.ids)
    return ids[:end].tobytes()


def is_stored(source: str) -> bool:
    """Whether a source is the folder of a run or an evaluation."""
    return (Path(source) / TRAJECTORIES).is_dir() or (Path(source) / RECIPE).is_file()


def open_rows(source: str) -> Rows:
    """The rows of a source that is not the folder of a run. Raises UserError."""
    files = file_type(Path(source)) is not None
    try:
        if files:
            return open_source(None, splits={TRAIN: source}).rows(TRAIN)
        return open_source(source, splits={TRAIN: TRAIN}).rows(TRAIN)
    except UserError as error:
        text = re.sub(r"env\.(source|args\.splits\.train)", "sft.source", str(error))
        raise UserError(text if "sft.source" in text else f"sft.source: {text}") from error


def tools_of(rows: Rows, section: SftSection) -> list[dict[str, Json]]:
    """The schemas of tools that the first rows offer, one of each name. Raises UserError for a row that is no
    conversation."""
    found: dict[str, dict[str, Json]] = {}
    for i in range(min(len(rows), LOOKED_AT)):
        with suppress(Refusal):  # it is counted once it is laid out
            for schema in _talk(rows, i, section.format, images_of(section)).tools or ():
                found.setdefault(str(schema["function"]["name"]), schema)
    return list(found.values())


def _talk(rows: Rows, index: int, form: str, images: Images) -> Talk:
    row = rows.row(index)
    try:
        return read_row(row, form, sparse=rows.sparse, images=images, folder=rows.folder(index))
    except Refusal:
        raise
    except UserError as error:
        raise UserError(f"{rows.where(index)}: {error}") from error


def read_rows(rows: Rows, layout: Layout, seed: int, phase: Say) -> Lessons:
    """The conversations of rows, with those of `sft.held_out` apart. Raises UserError: a row is no
    conversation, or none can be learned."""
    section = layout.section
    found = Lessons()
    every = _laid_out(rows, layout, found, phase)
    if isinstance(section.held_out, str):
        found.taught = every
        found.held_out = _laid_out(_held_out_rows(section), layout, found, phase)
    else:
        _hold_out(every, section.held_out, seed, found)
    return _some(found)


def _held_out_rows(section: SftSection) -> Rows:
    assert isinstance(section.held_out, str)
    where = section.held_out
    if file_type(Path(where)) is not None:
        splits = {TRAIN: where}
        source = None
    else:
        splits, source = {TRAIN: TRAIN, where: where}, section.source
    try:
        return open_source(source, splits=splits).rows(TRAIN if source is None else where)
    except UserError as error:
        text = re.sub(r"env\.(source|args\.splits\.\w+)", "sft.held_out", str(error))
        raise UserError(text if "sft.held_out" in text else f"sft.held_out: {text}") from error


def _laid_out(rows: Rows, layout: Layout, found: Lessons, phase: Say) -> list[Trajectory]:
    made = []
    for i in range(len(rows)):
        if i % 100 == 0:
            phase(f"laying out conversations: {i:,} of {len(rows):,}")
        try:
            talk = _talk(rows, i, layout.section.format, layout.images)
            made.append(layout.trajectory(talk, f"row-{rows.number(i) + 1}"))
        except Refusal as refusal:
            found.refused.append((rows.where(i), str(refusal)))
    found.read += len(rows)
    return made


def _hold_out(every: Sequence[Trajectory], share: float, seed: int, found: Lessons) -> None:
    """Put a seeded share apart: by their opening, so that a question never stands on both sides."""
    for t in every:
        opening = hashlib.sha256(f"{seed}/".encode() + _seen(t, t.prompt_length)).digest()
        held = int.from_bytes(opening[:7], "big") / (1 << 56) < share
        (found.held_out if held else found.taught).append(t)


def _some(found: Lessons) -> Lessons:
    if not found.taught:
        why = f": {found.told()[1]}" if found.refused else ""
        held = f" ({len(found.held_out)} are held out)" if found.held_out else ""
        raise UserError(f"sft.source: none of the {found.read} conversations is left to learn from{held}{why}")
    return found


def read_stored(recipe: Recipe, layout: Layout, vocabulary: int, phase: Say, env: Environment) -> Lessons:
    """The rollouts of the folder `sft.source` that `sft.select` takes. vocabulary: size of the model's. env: says which
    are solved. Raises UserError: there are none, or they are of another tokenizer."""
    section = recipe.sft
    assert section is not None
    assert section.source is not None
    folder = Path(section.source)
    if section.learn == "flagged":
        raise UserError("sft.learn: flagged is for rows whose messages say so; rollouts have no flags")
    files = chosen_files(folder, section.select.split)
    if not section.retokenize and (folder / RECIPE).is_file():
        previous = load_recipe(str(folder / RECIPE))
        try:
            check_tokenizer(folder, previous, recipe)
        except UserError as error:
            raise UserError(f"{error}; sft.retokenize=true lays out their messages anew") from error
    found = Lessons()
    every: list[tuple[str, Trajectory]] = []
    for number, file in enumerate(files, 1):
        phase(f"reading rollouts: {number} of {len(files)} files")
        samples = read_samples(file.path)
        found.read += len(samples)
        for row, sample in enumerate(samples, 1):
            place, t = f"{file.path}, row {row}", sample.trajectory
            try:
                every.append((place, _usable(t, section, layout, vocabulary)))
            except Refusal as refusal:
                found.refused.append((place, str(refusal)))
    if section.select.solved:
        solved = [solved_by(env, t) for _, t in every]
        found.refused += [(place, NOT_SOLVED) for (place, _), yes in zip(every, solved, strict=True) if not yes]
        every = list(compress(every, solved))
    kept = _selected(every, section.select, found.refused)
    if isinstance(section.held_out, str):
        raise UserError("sft.held_out: of rollouts a share can be held out; expected a number below 1")
    _hold_out(kept, section.held_out, recipe.train.seed, found)
    return _some(found)


def chosen_files(folder: Path, split: str | None) -> list[Stored]:
    """The files of a folder with rollouts of this split; see `SftSelect.split`. Raises UserError."""
    files = folder_files(folder)
    if split is not None:
        return of_split(files, split, f"sft.select.split {split}", folder)
    return [one for one in files if not one.evaluation] or files


def _usable(t: Trajectory, section: SftSection, layout: Layout, vocabulary: int) -> Trajectory:
    if not t.valid:
        raise Refusal("it failed or was aborted")
    if section.retokenize:
        return _anew(t, layout)
    if not len(t.ids):
        raise Refusal("it is stored without token ids; sft.retokenize=true lays out its messages")
    if (outside := int(t.ids.max())) >= vocabulary or int(t.ids.min()) < 0:
        raise Refusal(f"it holds token {outside}, and the model has a vocabulary of {vocabulary}")
    if section.learn == "last":
        last = max((i for i, turn in enumerate(t.turns) if turn.trained), default=-1)
        t = trained(t, [i == last for i in range(len(t.turns))])
    if not t.loss_mask.any():
        raise Refusal("no turn of it is to be learned")
    return fitting(t, layout.limit)


def _anew(t: Trajectory, layout: Layout) -> Trajectory:
    """A stored rollout laid out by its messages, with its rewards."""
    if t.segments:
        raise Refusal("it branched: only its token ids can be learned")
    known = {str(schema["function"]["name"]): schema for schema in layout.tools}
    if unknown := [name for name in t.tools if name not in known]:
        raise Refusal(f"its tool {unknown[0]!r} is not among the recipe's tools")
    talk = Talk(t.messages, (None,) * len(t.messages), tuple(known[name] for name in t.tools))
    made = layout.trajectory(talk, t.task.id)
    return replace(made, task=t.task, sample=t.sample, rewards=t.rewards, weights=t.weights, request_id=t.request_id)


def _selected(
    every: Iterable[tuple[str, Trajectory]], select: SftSelect, refused: list[tuple[str, str]]
) -> list[Trajectory]:
    """What `select` takes, in the order in which it was sampled."""
    left: list[tuple[str, Trajectory]] = []
    for place, t in every:
        if select.reward is not None and t.reward < select.reward - 1e-9:
            refused.append((place, f"its reward is below sft.select.reward {_word(select.reward)}"))
        elif select.turns is not None and len(t.turns) > select.turns:
            refused.append((place, "it has more turns than sft.select.turns"))
        else:
            left.append((place, t))
    highest: dict[str, float] = {}
    for _, t in left:
        highest[t.task.id] = max(t.reward, highest.get(t.task.id, t.reward))
    order = sorted(range(len(left)), key=lambda i: -left[i][1].reward)  # stable: of equal rewards the first sampled
    counts: Counter[str] = Counter()
    seen: set[tuple[str, bytes]] = set()
    kept = []
    for i in order:
        place, t = left[i]
        same = t.task.id, _seen(t)
        if select.best and t.reward < highest[t.task.id] - 1e-9:
            refused.append((place, "its reward is not the highest of its task (sft.select.best)"))
        elif select.distinct and same in seen:
            refused.append((place, "its tokens are those of another of its task (sft.select.distinct)"))
        elif select.per_task is not None and counts[t.task.id] >= select.per_task:
            refused.append((place, "enough of its task are taken (sft.select.per_task)"))
        else:
            counts[t.task.id] += 1
            seen.add(same)
            kept.append(i)
    return [left[i][1] for i in sorted(kept)]


def _word(number: float) -> str:
    return f"{number:g}"


def write_report(folder: Path, lessons: Lessons) -> Path:
    """Write `lessons.report()` into a run folder; return the file."""
    path = folder / "conversations.json"
    path.write_text(dumps(lessons.report(), indent=1) + "\n", encoding="utf-8")
    return path
