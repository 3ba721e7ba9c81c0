"""The scanners that ship: what often goes wrong in conversations without any number showing it.

Each is a function of a stored sample that says what it found, or None; `SCANNERS` lists them by name. They are rules:
they name what is to be read, not what is proven.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from agentrl.eval.signs import miscopied, said
from agentrl.plugins.scanner import Scanned, Scanner, calls_of, text_of
from agentrl.plugins.types import Json

_WORDS = 5000  # words of a text that are looked at, its last ones
_PERIOD = 60  # words of the longest loop
_NOTE = 100  # characters of a quotation
_TEXT = 100_000  # characters of a call's arguments that are looked at
_LONGEST = 300  # characters of the longest path
_TRUTHS = ("answer", "final_answer", "ground_truth", "solution", "target", "truth", "expected", "label", "gold")
_SHORT = 4  # characters of a right answer below which it stands in a prompt by chance
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_CHARACTERS = re.compile(r"(.{1,8}?)\1{23,}", re.S)
_REFUSAL = re.compile(
    r"\bI(?:'m| am) (?:sorry,? (?:but )?)?(?:unable|not able|not allowed|not in a position) to\b"
    r"|\bI (?:can(?:'t|not| not)|won't|will not|could not|couldn't|must decline to|have to decline)"
    r"(?: \w+)? (?:help|assist|answer|do|provide|fulfil|comply|complete|solve|continue|proceed|discuss|create|give)\b"
    r"|\bas an? (?:AI|artificial intelligence|language model)\b|\bI (?:must |have to )?(?:decline|refuse)\b",
    re.I,
)
_APOLOGY = re.compile(
    r"\b(?:I(?:'m| am) (?:so |very |really )?sorry|I apologi[sz]e|my apologies|apologies for)\b", re.I
)
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.S)
_TOLD = re.compile(r"(?:answer|solution|expected|ground[ _]truth|correct|target)\W{1,12}(?:\w+\W{1,4}){0,3}?$", re.I)
_PATH = re.compile(r"[\w./-]+")
_GRADER = re.compile(
    r"conftest\.py|(?:site|user)customize\.py|test_[\w.-]+|[\w-]+_tests?\.\w+|reward\.(?:txt|json)|[\w-]+\.pth"
    r"|(?:grader|grade|verifier|checker|expected|solution|answers?)\.\w+"
)


def loop(sample: Scanned) -> str | None:
    """The same words over and over in a message, or the same call three times in a row."""
    for text in sample.sampled:
        if (found := _repeated(text)) is not None:
            return found
    calls = [call for message in sample.messages for call in calls_of(message) if message.get("role") == "assistant"]
    for (first, second), (_, third) in pairwise(pairwise(calls)):
        if first == second == third:
            return f"the same call three times in a row: {first[0]}({_quoted(first[1])})"
    return None


def _repeated(text: str) -> str | None:
    """The words that a text repeats at its longest loop: four times in a row or more, twenty words in all or more."""
    if (found := _CHARACTERS.search(text[-8 * _WORDS :])) is not None and found[1].strip(" \n\t-=_*.#|"):
        return f"{_quoted(found[1])} {len(found[0]) // len(found[1])} times in a row"
    words = text.split()[-_WORDS:]
    for period in range(1, min(_PERIOD, len(words) // 4) + 1):
        same = 0
        for index in range(period, len(words)):
            same = same + 1 if words[index] == words[index - period] else 0
            if same >= max(3 * period, 20 - period):
                start = index - same - period + 1
                return f"{_quoted(' '.join(words[start : start + period]))} over and over"
    return None


def refusal(sample: Scanned) -> str | None:
    """The model refuses, or says that it cannot."""
    return _phrase(_REFUSAL, sample.sampled)


def apology(sample: Scanned) -> str | None:
    """The model apologises."""
    return _phrase(_APOLOGY, sample.sampled)


PHRASES: Mapping[str, Callable[[Sequence[str]], str | None]] = {
    "refusal": lambda texts: _phrase(_REFUSAL, texts),
    "apology": lambda texts: _phrase(_APOLOGY, texts),
    "loop": lambda texts: next((found for text in texts if (found := _repeated(text)) is not None), None),
}
"""What is looked for in the texts of the model alone, by the name of its scanner."""


def _phrase(pattern: re.Pattern[str], texts: Sequence[str]) -> str | None:
    for text in texts:
        straight = text.replace("\u2019", "'")
        if (found := pattern.search(straight)) is not None:
            return _quoted(straight[max(0, found.start() - 20) : found.end() + 60])
    return None


def empty_answer(sample: Scanned) -> str | None:
    """The last message of the model says nothing and calls nothing, without its thinking."""
    own = [message for message in sample.messages if message.get("role") == "assistant"]
    if not own or sample.finish not in ("stop", "length") or calls_of(own[-1]):
        return None
    text = text_of(own[-1])
    if _THINKING.sub("", text).strip():
        return None
    return "only thinking" if text.strip() or own[-1].get("reasoning_content") else "nothing at all"


def leaked_answer(sample: Scanned) -> str | None:
    """What is right stands in the opening messages, or a tool told it as the answer."""
    truths = [truth for key, value in sample.data.items() if key.lower() in _TRUTHS for truth in _truth(value)]
    opening = True
    for message in sample.messages:
        opening = opening and message.get("role") != "assistant"
        if message.get("role") == "assistant":
            continue
        text = text_of(message)
        for truth in truths:
            for found in re.finditer(rf"(?<![\w.,]){re.escape(truth)}(?![\w]|[.,]\d)", text):
                told = _TOLD.search(text[max(0, found.start() - 60) : found.start()]) is not None
                if told or (opening and len(truth) >= _SHORT):
                    where = "the opening" if opening else f"an answer of {message.get('name') or 'a tool'}"
                    return f"{where}: {_quoted(text[max(0, found.start() - 40) : found.end() + 20])}"
    return None


def _truth(value: Json) -> Iterator[str]:
    """What a field of a task's data says is right: a short text or a number; of a worked solution its last number."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield f"{value:g}" if isinstance(value, float) else str(value)
    elif isinstance(value, str):
        whole = value.rpartition("####")[2].strip() if "####" in value else value.strip()
        if 0 < len(whole) <= 200:
            yield whole
    elif isinstance(value, list):
        for one in value[:20]:
            if isinstance(one, str | int | float):
                yield from _truth(one)


def no_work(sample: Scanned) -> str | None:
    """It earned a reward, was offered tools, and called none."""
    if not sample.tools or sample.tool_uses or not sample.earned:
        return None
    return f"earned {sample.reward:g} without a call of {', '.join(sample.tools[:3])}" if sample.reward else "solved"


def grader_touched(sample: Scanned) -> str | None:
    """A call or a change of the workspace touches what looks like the tests or the grader; or the grader said so."""
    tampering = sample.extra.get("tampering")
    if isinstance(tampering, list) and tampering:
        return _quoted(str(tampering[0]))
    kept = sample.extra.get("workspace")
    changes = kept.get("changes") if isinstance(kept, Mapping) else None
    for change in changes if isinstance(changes, list) else ():
        if isinstance(change, list) and len(change) > 1 and (found := _grader_path(str(change[1]))) is not None:
            return f"{change[0]} {found}"
    for message in sample.messages:
        for name, arguments in calls_of(message) if message.get("role") == "assistant" else ():
            if (found := _grader_path(arguments.replace("\\n", " "))) is not None:
                return f"{name}: {found}"
    return None


def _grader_path(text: str) -> str | None:
    """The first path in a text that looks like tests or a grader."""
    for found in _PATH.finditer(text[:_TEXT]):
        path = found[0] if len(found[0]) <= _LONGEST else ""
        *folders, name = path.rstrip(".").split("/")
        if _GRADER.fullmatch(name) is not None or (name and not {"test", "tests"}.isdisjoint(folders)):
            return path
    return None


def copied_number(sample: Scanned) -> str | None:
    """The last number of the answer is one of the question's, and no tool gave it."""
    numbers = _NUMBER.findall(sample.answer)
    if not numbers or sample.earned:
        return None
    asked, given, opening = set[str](), set[str](), True
    for message in sample.messages:
        opening = opening and message.get("role") != "assistant"
        if message.get("role") in ("user", "tool"):
            (asked if opening else given).update(_NUMBER.findall(text_of(message)))
    return numbers[-1] if numbers[-1] in asked and numbers[-1] not in given else None


def miscopied_number(sample: Scanned) -> str | None:
    """A number of a call or of the answer is nearly one that was read, and not it."""
    messages = [said(message) for message in sample.messages]
    for (kind, value), note in miscopied(messages, sample.tools):
        if kind == "miscopied" and value.startswith("number"):
            return note
    return None


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line if len(line) <= _NOTE else line[: _NOTE - 1] + "…"}"'


SCANNERS: Mapping[str, Scanner] = {
    scanner.__name__: scanner
    for scanner in (
        loop, refusal, apology, empty_answer, leaked_answer, no_work, grader_touched, copied_number, miscopied_number
    )
}  # fmt: skip
"""The scanners that ship, by name."""
