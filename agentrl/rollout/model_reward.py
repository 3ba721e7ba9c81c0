"""`ModelReward`: a reward model as the reward part `model`, where the rollouts are; its tensor work may be elsewhere.

Groups that finish while one call is under way wait and are scored together by the next one. A group whose conversation
cannot be put into the reward model's tokens fails alone.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentrl.chat.template import CONTENT, USER, Template, TemplateRefusalError, probe_result, probe_turn
from agentrl.compute.batch import Batch
from agentrl.compute.classifier import RewardModel, classifier_config, classifier_folder, scoring_batch
from agentrl.containment.threads import in_thread
from agentrl.errors import UserError
from agentrl.models.image_input import ImageInput, check_alike, image_input
from agentrl.plugins.reward import GroupReward, Sample
from agentrl.plugins.rewards import MODEL
from agentrl.plugins.types import Json, Message
from agentrl.recipe.schema import Recipe
from agentrl.rollout.player import Player

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Translate = Callable[[Sample], Ids]
Scores = Callable[[Batch], npt.NDArray[np.float32]]


@dataclass(slots=True)
class _Waiting:
    samples: Sequence[Sample]
    scores: "asyncio.Future[list[float]]"


@dataclass(slots=True)
class ModelReward(GroupReward):
    """translate: a finished conversation as the reward model's ids. scores: the ids of many, [S], as `scoring_batch`
    puts them together, to their scores; it is called in a thread, never twice at once."""

    translate: Translate
    scores: Scores
    name: str = MODEL
    """The reward part that it fills."""
    _queue: list[_Waiting] = field(default_factory=list)
    _caller: "asyncio.Task[None] | None" = None

    async def score(self, samples: Sequence[Sample]) -> Sequence[float]:
        waiting = _Waiting(samples, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        if self._caller is None or self._caller.done():
            self._caller = asyncio.create_task(self._call())
        return await waiting.scores

    async def _call(self) -> None:
        while self._queue:
            taken, self._queue = self._queue, []
            try:
                outcomes = await in_thread(self._together, [waiting.samples for waiting in taken])
            except Exception as error:  # noqa: BLE001 - boundary: it is raised where the scores are waited for
                outcomes = [error] * len(taken)
            for waiting, outcome in zip(taken, outcomes, strict=True):
                if waiting.scores.done():  # nobody waits any more
                    continue
                if isinstance(outcome, Exception):
                    waiting.scores.set_exception(outcome)
                else:
                    waiting.scores.set_result(outcome)

    def _together(self, groups: Sequence[Sequence[Sample]]) -> "list[list[float] | Exception]":
        """The scores of every group, or what was wrong with it alone."""
        outcomes: list[list[float] | Exception] = []
        rows: list[Ids] = []
        named: list[int] = []
        for number, samples in enumerate(groups):
            try:
                own = [self.translate(sample) for sample in samples]
            except (UserError, TemplateRefusalError) as error:
                outcomes.append(error)
                continue
            outcomes.append([])
            rows += own
            named += [number] * len(own)
        for number, score in zip(named, self.scores(scoring_batch(rows, named)).tolist() if rows else [], strict=True):
            found = outcomes[number]
            assert isinstance(found, list)
            found.append(score)
        return outcomes


def add_reward_model(player: Player, scores: Scores) -> None:
    """Give what `player` plays from now on the reward part `model`. Raises UserError: what `translation` raises, and a
    reward function that fills the part too."""
    if {MODEL} & (player.rewards.samples.keys() | player.rewards.groups.keys()):
        raise UserError(
            f"rewards.functions: one of them fills the part {MODEL!r}, as rewards.model does; give it `part`"
        )
    tools = [tool.schema for tool in (*player.toolbox.tools, *player.env.tools())]
    reward = ModelReward(translation(player.recipe, player.tokenizer, tools), scores)
    player.rewards = replace(player.rewards, groups={**player.rewards.groups, MODEL: reward})


def ask_reward_model(player: Player) -> None:
    """Load the recipe's reward model into this process and let it score what `player` plays, unless that is behind an
    endpoint, whose ids nobody knows. Raises UserError."""
    if player.tokenizer is None:
        raise UserError(f"rewards.model: engine {player.recipe.engine.name!r} gives no token ids to score")
    add_reward_model(player, RewardModel(player.recipe).scores)


def translation(
    recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[dict[str, Json]] = ()
) -> Translate:
    """How conversations of the policy, whose `tokenizer` this is, become ids of the recipe's `rewards.model`.

    As they are, where the reward model knows every token of the policy by the same id; else rendered anew by its own
    chat template and tokenized by its own tokenizer. tools: as in `Tool.schema`, all that a task may offer.

    Raises UserError: what `classifier_config` raises; a vocabulary that does not fit and no tokenizer that would help;
    a template that cannot show such conversations; fewer positions than `rollout.max_tokens`.
    """
    path = str(recipe.rewards.model)
    config = classifier_config(path, recipe.model)
    theirs = _tokenizer(path, recipe.model.trust_remote_code)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    ours: ImageInput | None = getattr(tokenizer, "image_input", None)
    if ours is not None:
        known = theirs is None or knows(theirs, tokenizer)
        check_alike(
            ours, image_input(classifier_folder(path), recipe.model.trust_remote_code), f"rewards.model: {path}"
        )
        if not known:
            raise UserError(
                f"rewards.model: {path} has another vocabulary than the policy, which sees: train one from it"
            )
    if theirs is None or knows(theirs, tokenizer):
        return _same(path, recipe, tokenizer, config.get_text_config().vocab_size, limit)
    return _rendered(path, theirs, tools, limit)


def _same(
    path: str, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", vocabulary: int, limit: int | None
) -> Translate:
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocabulary:
        raise UserError(
            f"rewards.model: {path} has a vocabulary of {vocabulary} and no tokenizer of its own, but the policy's ids "
            f"go up to {largest}: save its tokenizer beside it"
        )
    if limit is not None and limit < recipe.rollout.max_tokens:
        raise UserError(
            f"rewards.model: {path} reads {limit} tokens, but rollout.max_tokens is {recipe.rollout.max_tokens}: "
            f"set it to {limit} or less"
        )

    def translate(sample: Sample) -> Ids:
        return np.asarray(sample.ids, np.int32) if sample.keyed is None else sample.keyed

    return translate


def _rendered(
    path: str, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[dict[str, Json]], limit: int | None
) -> Translate:
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"rewards.model: {path} has another vocabulary than the policy, and its tokenizer has no chat template to "
            "write conversations with"
        )
    template = Template(tokenizer, None, tools)
    conversation: list[Message] = [{"role": "user", "content": USER}, probe_turn(0, CONTENT)]
    if tools:
        conversation[1:1] = [probe_turn(1), probe_result(0, CONTENT)]
    try:
        template.text(conversation, tools, generate=False)
    except TemplateRefusalError as error:
        what = "conversations with tool calls" if tools else "a conversation"
        raise UserError(f"rewards.model: {path}: its chat template does not render {what}: {error}") from error

    def translate(sample: Sample) -> Ids:
        text = template.text(sample.messages, tools, generate=False)
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        if limit is not None and len(ids) > limit:
            raise UserError(f"rewards.model: {path} reads {limit} tokens, a conversation has {len(ids)}")
        return ids

    return translate


def knows(theirs: "PreTrainedTokenizerBase", ours: "PreTrainedTokenizerBase") -> bool:
    """Whether every token of `ours` has the same id in `theirs`."""
    vocabulary = theirs.get_vocab()
    return all(vocabulary.get(token) == number for token, number in ours.get_vocab().items())


def _tokenizer(path: str, trust_remote_code: bool) -> "PreTrainedTokenizerBase | None":
    """The tokenizer saved beside the classifier; None where there is none (transformers then may make an empty
    one)."""
    from transformers import AutoTokenizer

    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            classifier_folder(path), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # transformers has no one error for it
        return None
    return found if found.get_vocab().keys() - found.get_added_vocab().keys() else None
