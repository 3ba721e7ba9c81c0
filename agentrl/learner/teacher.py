"""`Teacher`: a model in the trainer's processes that the policy is distilled from; and `Guide`, which asks each teacher
of a run about the samples of its environment.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from agentrl.compute.batch import KEYED, Array, Batch
from agentrl.compute.forward import Forward, choose, computed_in
from agentrl.compute.kernels import top_logprobs
from agentrl.compute.micro_batches import SINGLE_PROCESS, ProcessGroup, aligned_micro_batches
from agentrl.compute.packing import Packed
from agentrl.errors import UserError
from agentrl.images import ImageSpan, keyed
from agentrl.learner.columns import PartOf, learned_by
from agentrl.learner.reference import narrow
from agentrl.models.load import load_model, load_tokenizer
from agentrl.plugins.types import Message, Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import TeacherSection
from agentrl.recipe.sections.model import ModelSection
from agentrl.trajectory import Trajectory

POLICY = "policy"
"""The path of a teacher that is the policy itself."""
Hinted = Callable[[Trajectory, str], tuple[Sequence[int], Sequence[ImageSpan]] | None]
"""The ids of a trajectory's opening prompt with a hint in it, and where images stand in them; None: where the
opening ends is not known."""


class TeacherRole(Protocol):
    """What the learner needs of a teacher, wherever it computes. `Teacher` is one."""

    def columns(self, batch: Batch) -> Batch:
        """The samples with these token columns alone: `teacher_logprobs`, float32 [T], of the sampled tokens;
        by `form: top_k` also `teacher_ids`, int64 [T, K], the likeliest tokens there, and `teacher_top`, float32
        [T, K], their log-probs, -inf where there are fewer. Elsewhere they have no meaning."""


class Teacher:
    """The tensor work of a local teacher, in one process or as one rank of several.

    forward: computes it. sharded: its weights are whole only while it computes.
    """

    def __init__(
        self,
        section: TeacherSection,
        recipe: Recipe,
        forward: Forward,
        ranks: ProcessGroup = SINGLE_PROCESS,
        sharded: bool = False,
    ) -> None:
        self.section, self._recipe, self._forward, self._ranks = section, recipe, forward, ranks
        self._sharded = sharded
        self._output: tuple[Tensor | None, Tensor | None] | None = None

    @classmethod
    def in_process(cls, section: TeacherSection, recipe: Recipe, policy: Forward) -> "Teacher":
        """A teacher of this process. Raises UserError: the model cannot be loaded."""
        if section.path == POLICY:
            return cls(section, recipe, policy)
        model = teacher_model(section, recipe)
        compute = computed_in(recipe.model)
        with _of_teacher():
            frozen = load_model(model, light=True)[0].requires_grad_(False).eval()
        forward = choose(frozen, compute)[0]
        if compute is not None:
            narrow(frozen, compute)
        return cls(section, recipe, forward)

    def columns(self, batch: Batch) -> Batch:
        """See `TeacherRole.columns`."""
        size, k = int(batch.offsets[-1]), self.section.top_k
        found: dict[str, Array] = {"teacher_logprobs": np.zeros(size, np.float32)}
        top = self.section.compared == "top_k"
        read = partial(top_logprobs, k=k, temperature=self.section.temperature) if top else None
        with torch.no_grad():
            for packed in aligned_micro_batches(batch, self._recipe.train.micro_batch_tokens, self._ranks):
                logprobs, _, *more = self._forward(packed, self.section.temperature, *([read] if read else []))
                found["teacher_logprobs"][packed.source] = logprobs.float().cpu().numpy()
                for ids, likeliest in more:
                    _put(found, "teacher_ids", ids.cpu().numpy(), packed.source, size)
                    _put(found, "teacher_top", likeliest.float().cpu().numpy(), packed.source, size)
        return Batch(batch.offsets, found, {})

    def distribution(self, packed: Packed) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The log-probs [N] of a packed row's predictions, and what gives all others: the states [N, E], and the
        matrix [V, E] and bias [V] of the output layer (see `Further`)."""

        def read(states: Tensor, head: Tensor | None, bias: Tensor | None) -> Tensor:
            if self._output is None or not self._sharded:
                kept = (each if each is None or not self._sharded else each.clone() for each in (head, bias))
                self._output = (next(kept), next(kept))
            return states

        with torch.no_grad():
            logprobs, _, states = self._forward(packed, self.section.temperature, read)
        assert self._output is not None
        return (logprobs, states, *self._output)


def teacher_model(section: TeacherSection, recipe: Recipe) -> ModelSection:
    """The section by which a local teacher is loaded: as the policy, frozen, from its own path."""
    return recipe.model.model_copy(update={"path": section.path, "chat_template": None}).frozen


@contextmanager
def _of_teacher() -> Iterator[None]:
    """Name the teacher's key in errors that name the policy's."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path", "teacher.path", 1)) from error


def local_teachers(recipe: Recipe, make: Callable[[TeacherSection], Teacher]) -> dict[int, Teacher]:
    """The recipe's teachers in the trainer's processes, by the index of their environment; each is made once."""
    made: list[tuple[TeacherSection, Teacher]] = []
    found: dict[int, Teacher] = {}
    for part, section in enumerate(recipe.part_teachers):
        if section is None or section.served:
            continue
        known = next((teacher for other, teacher in made if other == section), None)
        found[part] = known or make(section)
        made.append((section, found[part]))
    return found


def compared_whole(teachers: Mapping[int, Teacher]) -> dict[int, Teacher]:
    """Those whose whole distributions the actor compares (`form: full`)."""
    return {part: teacher for part, teacher in teachers.items() if teacher.section.compared == "full"}


def check_teachers(recipe: Recipe) -> None:
    """Compare the tokenizers of local teachers with the policy's. Raises UserError: another one; it cannot be read."""
    for section in recipe.part_teachers:
        if section is None or section.served or section.path in (POLICY, recipe.model.path):
            continue
        with _of_teacher():
            theirs = load_tokenizer(teacher_model(section, recipe), light=True).get_vocab()
        ours = load_tokenizer(recipe.model, light=True).get_vocab()
        if theirs != ours:
            differ = sum(theirs.get(token) != index for token, index in ours.items()) or len(theirs) - len(ours)
            raise UserError(
                f"teacher.path {section.path}: its tokenizer is not that of {recipe.model.path} ({differ} tokens "
                "differ), so it cannot say how likely the sampled tokens are; choose a teacher of the same family"
            )


class Guide:
    """Asks the teachers of a run. teachers: by the index of the environment in `env.mix`. part_of: see `PartOf`.
    hinted: see `Hinted`; None where no teacher has a hint."""

    def __init__(
        self,
        recipe: Recipe,
        teachers: Mapping[int, TeacherRole],
        part_of: PartOf = lambda task: 0,
        hinted: Hinted | None = None,
    ) -> None:
        self.recipe, self.teachers, self.part_of, self._hinted = recipe, teachers, part_of, hinted

    def taught(self, batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
        """The batch with what the teachers say of the samples that are distilled (see `TeacherRole.columns`);
        but for full vocabularies, which the actor compares."""
        chosen = learned_by(batch, "distill") & (batch.sampled > 0)
        if not chosen.any():
            return batch
        size = int(batch.offsets[-1])
        columns: dict[str, Array] = {"teacher_logprobs": np.zeros(size, np.float32)}
        for part, section in enumerate(self.recipe.part_teachers):
            rows = np.flatnonzero(chosen & (batch.samples["part"] == part))
            if section is None or not len(rows) or section.compared == "full":
                continue
            asked = batch.select(rows)
            if section.hint is not None:
                asked = self._with_hints(asked, [trajectories[i] for i in batch.rollouts[rows].tolist()], section.hint)
            found = self.teachers[part].columns(asked)
            here, there = batch.positions(rows), _sampled_of_each(asked)
            here = here[batch.tokens["loss_mask"][here] > 0]
            for name, column in found.tokens.items():
                _put(columns, name, column[there], here, size)
        return batch.with_tokens(**columns)

    def _with_hints(self, batch: Batch, trajectories: Sequence[Trajectory], hint: str) -> Batch:
        """The samples with the hint in their openings: the tokens after these are the same. trajectories: of
        each sample."""
        assert self._hinted is not None
        names = [name for name in ("ids", "loss_mask", KEYED) if name in batch.tokens]
        pieces: list[dict[str, Array]] = []
        for index, t in enumerate(trajectories):
            columns = {name: batch.tokens[name][batch.span(index)] for name in names}
            opening = keyed(t.ids, t.images)[: t.prompt_length]
            begins = columns.get(KEYED, columns["ids"])[: len(opening)]
            hinted = self._hinted(t, hint) if np.array_equal(begins, opening) else None
            if hinted is not None:
                ids, images = hinted
                new = {"ids": ids, "loss_mask": np.zeros(len(ids)), KEYED: keyed(ids, images)}
                columns = {
                    name: np.concatenate([np.asarray(new[name], column.dtype), column[len(opening) :]])
                    for name, column in columns.items()
                }
            pieces.append(columns)
        first = [int(columns["loss_mask"].argmax()) for columns in pieces]
        return Batch(
            np.concatenate([[0], np.cumsum([len(columns["ids"]) for columns in pieces])]).astype(np.int64),
            {name: np.concatenate([columns[name] for columns in pieces]) for name in names},
            {**batch.samples, "prompt_length": np.array(first, np.int32)},
        )


def _sampled_of_each(batch: Batch) -> Array:
    return np.flatnonzero(batch.tokens["loss_mask"])


def _put(columns: dict[str, Array], name: str, values: Array, at: Array, size: int) -> None:
    """Put `values` into the column `name` at the indices `at`. Wider columns hold what several teachers say: -inf is
    no token of the teacher's."""
    empty = -np.inf if name == "teacher_top" else 0
    width = values.shape[1:]
    column = columns.get(name)
    if column is None:
        column = np.full((size, *width), empty, values.dtype)
    elif width and column.shape[1] < width[0]:
        wider = np.full((size, *width), empty, values.dtype)
        wider[:, : column.shape[1]] = column
        column = wider
    if width:
        column[at, : width[0]] = values
    else:
        column[at] = values
    columns[name] = column


def opening_of(t: Trajectory, render: Callable[[Sequence[Message]], Sequence[int]]) -> Sequence[Message] | None:
    """The messages of a trajectory's opening prompt: those that render to its ids; None: none do."""
    messages = t.branches[0] if t.branches else t.messages
    wanted = t.ids[: t.prompt_length].tolist()
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"] or [len(messages)]
    return next((messages[:end] for end in ends if end and list(render(messages[:end])) == wanted), None)


def filled(hint: str, task: Task) -> str:
    """A hint with the columns of the task's data in place of {column}; what names no column stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda found: str(task.data.get(found[1], found[0])), hint)
