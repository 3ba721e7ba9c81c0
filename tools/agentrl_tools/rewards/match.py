"""`match`: 1.0 where the final answer is the truth. As text, or as an exact number."""

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

from agentrl.plugins.patterns import Pattern, TooHardError
from agentrl.plugins.reward import Reward, Sample
from agentrl_tools.rewards.grade import read_number
from agentrl_tools.rewards.truth import marked, truth_of

_EDGES = " \t\n.,;:!?\"'`*_$"
_OPENING = re.compile(rf"\A(?:[{_EDGES.replace('.', '')}]|\.(?![0-9]))+")  # .5 keeps its point
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


class Match(Reward):
    """1.0 where the marked answer is the truth, else 0.0.

    It compares what the answer marks (`#### x`, `\\boxed{x}`, `<answer>x</answer>`; the last mark counts) with the
    truth; an answer without a mark counts as a whole.

    mode: `exact` (the same text, whatever its case, white space and surrounding punctuation, or the same number where
    both are one) or `numeric` (the same number; the truth must be one). truth: the field of the task's data that holds
    it, or a list of them there, any of which will do. pattern: a regular expression whose first group (else the whole
    match) is the answer, the last match counting, instead of the marks; no match in bounded time is no answer.
    """

    name = "match"

    def __init__(
        self, mode: Literal["exact", "numeric"] = "exact", truth: str | None = None, pattern: str | None = None
    ) -> None:
        self._mode, self._truth = mode, truth
        self._pattern = Pattern(pattern, dot_all=True) if pattern else None

    async def score(self, sample: Sample) -> float:
        return 1.0 if self.right(sample.answer, truth_of(sample.task, self._truth)) else 0.0

    def right(self, text: str, truth: Any) -> bool:
        """Whether a text answers with the truth, or with one of several. Raises ValueError for a truth that is
        none."""
        given = self._given(text)
        truths = truth if isinstance(truth, Sequence) and not isinstance(truth, str) else (truth,)
        if not truths:
            raise ValueError("the ground truth is an empty list")
        return True in [self._same(given, one) for one in truths]  # every truth is looked at: a bad one is an error

    def check(self, truth: object) -> None:
        """Raise ValueError for a truth that nothing could match."""
        self.right("", truth)

    def _given(self, text: str) -> str | None:
        if self._pattern is None:
            found = marked(text)
            return text if found is None else found
        try:
            return self._pattern.last(text)
        except TooHardError:
            return None

    def _same(self, given: str | None, truth: object) -> bool:
        if isinstance(truth, bool) or not isinstance(truth, str | int | float):
            raise ValueError(f"the ground truth {truth!r:.60} is neither text nor a number")
        written = str(truth)
        wanted = marked(written) or written
        number = read_number(wanted)
        if self._mode == "numeric" and number is None:
            raise ValueError(f"the ground truth {written!r:.60} is not a single number")
        if given is None:
            return False
        if number is not None and (self._mode == "numeric" or _is_number(wanted)):
            return read_number(given) == number
        return bool(normalized(given)) and normalized(given) == normalized(wanted)


def normalized(text: str) -> str:
    """A text for comparison: case folded, white space collapsed, articles and surrounding punctuation gone."""
    plain = _OPENING.sub("", unicodedata.normalize("NFKC", text).casefold()).rstrip(_EDGES)
    return " ".join(_ARTICLE.sub(" ", plain).split()) or plain


def _is_number(text: str) -> bool:
    """Whether it is a number and nothing else: then other spellings of that number are right too."""
    try:
        Fraction(text.strip().replace(",", "").removeprefix("$"))
    except (ValueError, ZeroDivisionError):
        return False
    return True
