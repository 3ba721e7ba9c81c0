"""Exact match and F1 of short answers, normalised as for SQuAD (Rajpurkar et al. 2016), as Search-R1 does too."""

import re
import string
from collections import Counter
from collections.abc import Sequence

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
    """Lower case, without punctuation and articles, words one blank apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    same = sum((Counter(said) & Counter(gold)).values())
    return 2 * same / (len(said) + len(gold))
