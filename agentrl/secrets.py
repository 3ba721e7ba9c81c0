"""Texts without secrets: what every line to a person and every stored text goes through.

Two kinds are found: values that the program knows to be secret, wherever they stand (`remember`: those of a recipe's
`${VAR}`), and what is written as one: `token=...`, passwords of URLs, bearer tokens. Contents of conversations lose the
first kind alone, since a model may write `token='...'` in a program. What is cut is masked before.
"""

import json
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote

MASK = "***"
LEAST = 8
"""Characters of a value that is looked for in texts; shorter ones would be found in any text."""

_WORDS = r"(?:key|token|secret|pass(?:word|wd|phrase)?|credential|auth(?:orization|entication)?|cookie)s?"
_NAME = re.compile(rf"(?:.*[^a-z])?(?:api|access|private)?{_WORDS}", re.IGNORECASE | re.DOTALL)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_TEXT = (
    (re.compile(r"(?<=://)[^/\s@]+(?=@)"), MASK),  # https://user:password@host
    (re.compile(rf"([?&;][^=&;\s]*{_WORDS}=)[^&;\s]+", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(rf"^(-*[\w-]*{_WORDS}=)(?!\d+\b).+", re.IGNORECASE | re.DOTALL),
        rf"\1{MASK}",
    ),  # --token=..., API_KEY=...
    (
        re.compile(rf"({_WORDS}['\"]?\s*[=:]\s*(['\"]))(?:(?!\2).){{6,}}(?=\2)", re.IGNORECASE),
        rf"\1{MASK}",
    ),  # api_key='...'
    (re.compile(r"\b(bearer\s+)[\w.~+/=-]{16,}", re.IGNORECASE), rf"\1{MASK}"),
)

_known: dict[str, tuple[str, ...]] = {}  # each secret value with the forms in which texts may hold it
_forms: tuple[str, ...] = ()  # those of all, the longest first


def remember(values: Iterable[str]) -> None:
    """Hide these values from now on in all that this process says and stores. Those shorter than LEAST are left out."""
    global _forms
    for value in values:
        if len(value) >= LEAST:
            _known[value] = _forms_of(value)
    _forms = tuple(sorted({form for forms in _known.values() for form in forms}, key=len, reverse=True))


def known() -> tuple[str, ...]:
    """The values that are known to be secret, for `remember` in another process."""
    return tuple(_known)


def _forms_of(value: str) -> tuple[str, ...]:
    """A value as it stands in texts: by itself, in JSON, in Python's repr, in a URL."""
    as_json = (json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
    return (value, *as_json, repr(value)[1:-1], quote(value, safe=""))


def without_known(text: str) -> str:
    """A text without the values that are known to be secret."""
    for form in _forms:
        if form in text:
            text = text.replace(form, MASK)
    return text


def masked_text(text: str) -> str:
    """A line of the program without secrets: values that are known or stand in this process's variables, and
    what is written as one."""
    text = without_known(text)
    for name, value in os.environ.items():
        if len(value) >= LEAST and value in text and is_secret_name(name):
            text = text.replace(value, MASK)
    for pattern, shown in _IN_TEXT:
        text = pattern.sub(shown, text)
    return text


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether what is called so is a secret: `api_key`, `HF_TOKEN`, `authToken`."""
    return _NAME.fullmatch(_CAMEL.sub("_", name)) is not None
