"""Pairs of conversations that a reward model learns from: rows of files, and rollouts of one task with different
rewards.

Their ids are those that `rewards.model` scores: of a rollout the sampled ones; of a row what the chat template writes,
up to the end of the last turn.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentrl.chat.encode import Encoder
from agentrl.chat.template import Template, TemplateRefusalError
from agentrl.checkpoint.run_folder import RunFolder
from agentrl.data.files import read_files
from agentrl.data.rows import Row
from agentrl.errors import UserError
from agentrl.fine_tuning.conversations import message_of, schemas_of
from agentrl.images import is_image, keyed
from agentrl.models.image_input import check_alike
from agentrl.models.load import load_tokenizer
from agentrl.plugins.types import Json, Message
from agentrl.recipe.load import load_recipe
from agentrl.recipe.sections.sft import RewardModelSection
from agentrl.rollout.model_reward import knows
from agentrl.rollout.stored import read_groups, training_files
from agentrl.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations, of which the first is preferred."""

    chosen: Ids
    """int32 [T]; int64 and keyed (`images.keyed`) where there are images."""
    rejected: Ids
    """The same, [U]."""
    prompt: str
    """What both answer; pairs with the same one are held out together."""


class PairReader:
    """Reads pairs for a model with this tokenizer.

    limit: most tokens of a conversation; None: any number. seed: of the draw among the rollouts of a group. Raises
    UserError: the tokenizer has no chat template that shows a user's message.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", limit: int | None, seed: int = 0) -> None:
        self.tokenizer, self.limit, self.seed = tokenizer, limit, seed
        self._template = Template(tokenizer, None, ())
        self._encoder = Encoder(tokenizer, self._template.source)

    def read(self, section: RewardModelSection) -> list[Pair]:
        """The pairs of every source. Raises UserError: one that cannot be read, with its place."""
        pairs: list[Pair] = []
        for source in section.source:
            folder = Path(source).expanduser()
            found = self._rollouts(folder, section.pairs_per_group) if folder.is_dir() else self._rows(folder)
            pairs += found
        return pairs

    def _rows(self, path: Path) -> Iterator[Pair]:
        rows = read_files([path])
        for i in range(len(rows)):
            row = rows[i]
            try:
                yield self._pair(row)
            except UserError as error:
                raise UserError(f"{rows.where(i)}: {error}") from error
            except TemplateRefusalError as error:
                why = " ".join(str(error).split())
                raise UserError(f"{rows.where(i)}: the chat template does not render it: {why}") from error

    def _pair(self, row: Row) -> Pair:
        opening = _opening(row)
        tools = schemas_of(row.get("tools")) or ()
        chosen, rejected = (_whole(opening, row.get(name), name) for name in ("chosen", "rejected"))
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        prompt = json.dumps([one for one, _ in alike], sort_keys=True)
        return self._checked(self._ids(chosen, tools), self._ids(rejected, tools), prompt)

    def _ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Json]]) -> Ids:
        text = self._template.text(messages, tools, generate=False)
        return np.array(self._encoder.whole(text.rstrip()), np.int32)  # a rollout ends with its stop token

    def _checked(self, chosen: Ids, rejected: Ids, prompt: str) -> Pair:
        if np.array_equal(chosen, rejected):
            raise UserError("chosen and rejected are the same conversation")
        tokens = max(len(chosen), len(rejected))
        if self.limit is not None and tokens > self.limit:
            raise UserError(f"a conversation has {tokens} tokens, the model reads {self.limit}")
        return Pair(chosen, rejected, prompt)

    def _rollouts(self, folder: Path, most: int) -> Iterator[Pair]:
        files = training_files([str(folder)])
        policy = load_tokenizer(load_recipe(RunFolder(folder).recipe()).model)
        if policy.image_input is not None:
            check_alike(policy.image_input, self.tokenizer.image_input, "model.path:")
        if not knows(self.tokenizer, policy):
            raise UserError(
                f"{folder}: its rollouts have another vocabulary than model.path: start from a model with the policy's"
            )
        for path in files:
            for number, group in enumerate(read_groups(path)):
                for better, worse in _differing(group, most, Random(f"{self.seed}/{path.name}/{number}")):
                    try:
                        yield self._checked(_shown(better), _shown(worse), f"{folder}/{group.task.id}")
                    except UserError as error:
                        where = f"{path}, samples {better.sample} and {worse.sample} of task {group.task.id}"
                        raise UserError(f"{where}: {error}") from error


def _differing(group: Group, most: int, rng: Random) -> list[tuple[Trajectory, Trajectory]]:
    """At most `most` pairs of valid samples with different rewards and ids, the higher reward first."""
    found = [
        (a, b) if a.reward > b.reward else (b, a)
        for a, b in combinations(group.trajectories, 2)
        if a.reward != b.reward and not np.array_equal(_shown(a), _shown(b))
    ]
    return found if len(found) <= most else rng.sample(found, most)


def _shown(t: Trajectory) -> Ids:
    """The ids of a rollout's conversation, images among them."""
    return (keyed(t.ids, t.images) if t.images else t.ids)[t.last_path()]


def held_out(pairs: Sequence[Pair], share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """The pairs to learn from, and those of whole prompts that are held out: `share` of them, or a few more.

    Raises UserError: nothing would be left to learn from.
    """
    if not share:
        return list(pairs), []
    prompts = sorted({pair.prompt for pair in pairs})
    Random(f"held out/{seed}").shuffle(prompts)
    counts = dict.fromkeys(prompts, 0)
    for pair in pairs:
        counts[pair.prompt] += 1
    held: set[str] = set()
    while sum(counts[prompt] for prompt in held) < share * len(pairs):
        held.add(prompts[len(held)])
    if len(held) == len(prompts):
        raise UserError(
            f"reward_model.held_out={share} leaves nothing to learn from: the {len(pairs)} pairs have "
            f"{len(prompts)} prompt{'s' * (len(prompts) != 1)}; give more, or hold out 0"
        )
    return [p for p in pairs if p.prompt not in held], [p for p in pairs if p.prompt in held]


def _opening(row: Row) -> list[Message]:
    name = "prompt" if row.get("prompt") is not None else "messages"
    given = row.get(name)
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [] if given is None else _messages(given, name)


def _whole(opening: list[Message], given: Json, name: str) -> list[Message]:
    """The conversation: what follows the opening, or all of it where it begins with the opening."""
    said: list[Message]
    if isinstance(given, str):
        said = [{"role": "assistant", "content": given}]
    elif given is None:
        raise UserError(f"has no {name!r}")
    else:
        said = _messages([given] if isinstance(given, Mapping) else given, name)
    whole = said if said[: len(opening)] == opening else [*opening, *said]
    if not said or whole[-1]["role"] != "assistant":
        raise UserError(f"{name}: does not end with an assistant's message")
    if whole[0]["role"] == "assistant":
        raise UserError(f"{name}: begins with an assistant's message; give the `prompt`")
    return whole


def _messages(given: Json, name: str) -> list[Message]:
    if not isinstance(given, list):
        raise UserError(f"{name}: is neither text nor a list of messages")
    try:
        found = [message_of(each, number) for number, each in enumerate(given, 1)]
    except UserError as error:
        raise UserError(f"{name}, {error}") from error
    for number, message in enumerate(found, 1):
        if isinstance(message["content"], list) and any(map(is_image, message["content"])):
            raise UserError(
                f"{name}, message {number}: has an image; of images a reward model learns from the rollouts of a run "
                "alone"
            )
    return found
