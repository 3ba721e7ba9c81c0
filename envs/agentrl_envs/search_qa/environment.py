"""The environment `search_qa`: a question, a search tool, and rewards for the answer between `<answer>` tags.

Exact match and F1 of short answers are normalised as for SQuAD (Rajpurkar et al. 2016), as Search-R1 does too.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from agentrl_tools.search import Search

from agentrl.data.source import Source, open_source
from agentrl.errors import UserError
from agentrl.plugins.environment import Environment
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Json, Message, Session, Task, answer_of
from agentrl_envs.conversation import check_split, check_style, opening
from agentrl_envs.search_qa import generated
from agentrl_envs.search_qa.demonstrations import STYLES, demonstrate
from agentrl_envs.search_qa.rows import question_of, read_tasks
from agentrl_envs.search_qa.world import world

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def read_answer(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`; None where there is none."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def exact_match(answer: str, golden: Sequence[str]) -> float:
    """1.0 when the answer is one of the golden ones, else 0.0."""
    said = normalized(answer)
    return float(any(said == normalized(gold) for gold in golden))


def f1(answer: str, golden: Sequence[str]) -> float:
    """The best harmonic mean of precision and recall over words, from 0 to 1."""
    return max((_f1(normalized(answer).split(), normalized(gold).split()) for gold in golden), default=0.0)


def normalized(text: str) -> str:
    """A text in lower case, without punctuation and articles, words one blank apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    same = sum((Counter(said) & Counter(gold)).values())
    return 2 * same / (len(said) + len(gold))


SYSTEM_PROMPT = (
    "Answer the question. Search for what you do not know, as often as you need, one fact at a time. "
    "End with the answer alone, as short as it can be, between <answer> and </answer>."
)
SHORT_PROMPT = "Search, then say <answer>...</answer>"
"""For generated questions, so that prompts stay short for a tiny model."""


class SearchQa(Environment):
    """Questions to be looked up.

    source: `generated`, whose made-up encyclopedia comes with a search tool of its own; or rows in Search-R1's shape
    (`question` and `golden_answers`, or `reward_model.ground_truth.target`) from a file, a folder, a hub name or a
    function, with a search tool that the recipe lists. splits, config, and what is held out: as `agentrl.data.source`
    has it. seed: of the order of generated training questions, and of what is held out of a file.
    topk: passages a search, of the generated encyclopedia. system_prompt: None takes the source's own. format: whether
    there is a reward part of that name, 1 for an answer in tags after a search.
    """

    name = "search_qa"

    def __init__(
        self,
        source: str | list[str] = "generated",
        splits: dict[str, str | list[str]] | None = None,
        config: str | None = None,
        seed: int = 0,
        topk: int = 2,
        system_prompt: str | None = None,
        format: bool = False,
    ) -> None:
        self._seed, self._format = seed, format
        self._rows: Source | None = None
        self._search: Search | None = None
        if source == "generated":
            if splits is not None or config is not None:
                raise UserError("env.args: `splits` and `config` are for data that is read; env.source is generated")
            self.splits = generated.SPLITS[1:]
            self._search = Search.over(world().documents, topk)
        else:
            self._rows = open_source(source, splits=splits, config=config, seed=seed, key=question_of)
            self.splits = self._rows.splits
        default = SYSTEM_PROMPT if self._search is None else SHORT_PROMPT
        self._system_prompt = default if system_prompt is None else system_prompt

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(self, split)
        if self._rows is not None:
            return read_tasks(self._rows.rows(split), split)
        return generated.tasks(split, self._seed)

    def tools(self) -> Sequence[Tool]:
        return () if self._search is None else (self._search,)

    async def create(self, session: Session, **create_kwargs: Json) -> list[Message]:
        return opening(session.task.data["question"], self._system_prompt)

    @property
    def reward_parts(self) -> tuple[str, ...]:  # type: ignore[override]
        """`em`, `f1`, and `format` if it is rewarded."""
        return ("em", "f1", "format") if self._format else ("em", "f1")

    async def calc_reward(self, session: Session, **kwargs: Json) -> dict[str, float]:
        answer = read_answer(answer_of(session.messages))
        golden = session.task.data["answers"]
        parts = {"em": exact_match(answer, golden), "f1": f1(answer, golden)} if answer else {"em": 0.0, "f1": 0.0}
        if self._format:
            searched = any(m["role"] == "tool" for m in session.messages)
            parts["format"] = float(bool(answer) and searched)
        return parts

    def solved(self, rewards: Mapping[str, float], task: Task) -> bool:
        """Decide by exact match alone."""
        return rewards.get("em", 0.0) >= 1.0

    def demonstrate(self, task: Task, rng: Random, style: str) -> list[Message]:
        """A question answered in a style of `demonstrations.STYLES`; of the generated ones only."""
        if self._search is None:
            raise UserError("search_qa demonstrates generated questions only: set env.source to generated")
        check_style(self, style, STYLES)
        return demonstrate(generated.question_of(task), self._search, rng, style)

    async def close(self) -> None:
        if self._search is not None:
            await self._search.close()
