"""Text to ids and back, with the text of contents kept plain: no content can write a token that ends a turn."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentrl.errors import UserError
from agentrl.jsonable import dumps, loads
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

_SEPARATOR = "\ufdd0|\ufdd1"  # noncharacters: in no honest text, and broken in two in any other
IMAGE = "\ufdd2"
"""A noncharacter that stands for an image in a content."""
_LONG = 1 << 13  # characters
_MOST_IDS = 1 << 21  # of one text: to make a list of them holds the interpreter
_UNUSED = (range(0x100000, 0x10FFFE), range(0xF0000, 0xFFFFE), range(0x40000, 0xDFFFE))  # private use, unassigned
_TRIALS = ("a", " a", "\nx y\n", "x  y", " \n", "Ünï 漢字 12", "</", "{\"k\": 'v'}")


class Encoder:
    """A fast tokenizer seen twice: whole, and plain, where structural tokens have no meaning.

    Structural: the added tokens that are special, or that stand in `source` (the chat template). Cutting a text at
    them and encoding what lies between as plain text gives the ids of the whole text (`exact`; tried once, at
    construction). Ids of `plain` never hold a structural token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", source: str) -> None:
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise UserError(
                f"the tokenizer {type(tokenizer).__name__} of {getattr(tokenizer, 'name_or_path', '?')!r} has no fast "
                "backend (tokenizer.json): convert it to a fast tokenizer first"
            )
        spec = loads(backend.to_str())
        spec["truncation"] = spec["padding"] = None
        self._full = Tokenizer.from_str(dumps(spec))
        structural = [
            t for t in spec["added_tokens"] if t["special"] or (t["content"].strip() and t["content"] in source)
        ]
        self.structural: dict[str, int] = {t["content"]: t["id"] for t in structural if t["content"]}
        self.swallows = {t["content"]: (t["lstrip"], t["rstrip"]) for t in structural}
        self._plain, self._renumbered = _without(spec, frozenset(self.structural))
        names = sorted(self.structural, key=len, reverse=True)
        self._pattern = _pattern(names, self.swallows)
        self._named = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._separated, self._breaks = False, None
        self.image: tuple[str, list[int]] | None = None
        """What IMAGE stands for, as text and as ids that begin and end with structural tokens."""
        self._breaks = self._self_made(names)
        if not self._cuts_exactly():
            self._separate()
        self.exact = self._cuts_exactly()

    def _separate(self) -> None:
        """Encode behind a token of our own, for tokenizers that treat the beginning of a text in another way."""
        from tokenizers import AddedToken

        self._plain.add_tokens([AddedToken(_SEPARATOR, normalized=False)])
        self._separated = True
        broken = [re.escape(_SEPARATOR), *([self._breaks.pattern] if self._breaks else [])]
        self._breaks = re.compile("|".join(broken))

    def _cuts_exactly(self) -> bool:
        """Whether text after a structural token is encoded as `plain` does it."""
        tokens = [t for t in self.structural if not any(self.swallows[t])]
        return all(
            self._full.encode(token + text, add_special_tokens=False).ids[1:] == self.plain(text)
            for token in tokens[-4:]
            for text in _TRIALS
        )

    def _self_made(self, names: Sequence[str]) -> re.Pattern[str] | None:
        """Structural tokens that the vocabulary itself would make of their text: such texts are broken in
        two."""
        ids = frozenset(self.structural.values())
        bad = [t for t in names if ids.intersection(self.plain(t))]
        return re.compile("|".join(map(re.escape, bad))) if bad else None

    def whole(self, text: str) -> list[int]:
        """Ids of a text whose structural tokens mean what they say."""
        return _ids(self._full, text if self.image is None else text.replace(IMAGE, self.image[0]))

    def raw(self, given: str | Sequence[int]) -> list[int]:
        """Ids of a prompt as it stands; see `Completing.encode_prompt`."""
        ids = _ids(self._full, given) if isinstance(given, str) else list(given)
        if (wrong := next((i for i in ids if not 0 <= i <= self._highest), None)) is not None:
            raise UserError(f"prompt: {wrong} is no token id, the last one is {self._highest}")
        if self.image is not None and not set(self.image[1]).isdisjoint(ids):
            raise UserError("prompt: it holds a placeholder of an image; show images in messages")
        return ids

    @cached_property
    def _highest(self) -> int:
        return max(self._full.get_vocab(with_added_tokens=True).values())

    def plain(self, text: str) -> list[int]:
        """Ids of a text that lies after a structural token and in which nothing is structural."""
        if not text:
            return []
        if self.image is not None and IMAGE in text:
            first, *others = text.split(IMAGE)
            return [*self.plain(first), *(i for other in others for i in (*self.image[1], *self.plain(other)))]
        if self._breaks is None:
            return self._encoded(text)
        ids: list[int] = []
        at = 0
        for match in self._breaks.finditer(text):
            ids += self._encoded(text[at : match.start() + 1])
            at = match.start() + 1
        return ids + self._encoded(text[at:])

    def plain_lengths(self, texts: Sequence[str]) -> list[int]:
        """`len(plain(text))` of each text; many at once run in the tokenizer's own threads."""
        lead = _SEPARATOR if self._separated else ""
        easy = [i for i, text in enumerate(texts) if text and not self._hard(text)]
        try:
            encoded = self._plain.encode_batch_fast([lead + texts[i] for i in easy], add_special_tokens=False)
        except TypeError:  # half a surrogate pair somewhere
            return [len(self.plain(text)) for text in texts]
        found = {i: len(one) - bool(lead) for i, one in zip(easy, encoded, strict=True)}
        return [found[i] if i in found else len(self.plain(text)) for i, text in enumerate(texts)]

    def _hard(self, text: str) -> bool:
        return bool(self._breaks and self._breaks.search(text)) or (self.image is not None and IMAGE in text)

    def _encoded(self, text: str) -> list[int]:
        ids = _ids(self._plain, _SEPARATOR + text)[1:] if self._separated else _ids(self._plain, text)
        if self._renumbered:
            ids = [self._renumbered.get(i, i) for i in ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text: str = self._full.decode(ids, skip_special_tokens=False)
        return text

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids that are single bytes (`<0x0A>`), which the decoder joins: one can undo what those before it spell."""
        if "ByteFallback" not in dumps(loads(self._full.to_str())["decoder"]):
            return frozenset()
        ids = (self._full.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    def split(self, text: str) -> list[tuple[int | None, str]]:
        """The text cut at its structural tokens: (id, token) and (None, what lies between and is not
        swallowed)."""
        pieces: list[tuple[int | None, str]] = []
        at = 0
        for match in self._pattern.finditer(text):
            if match.start() > at:
                pieces.append((None, text[at : match.start()]))
            token = match.group(match.lastindex or 0)
            pieces.append((self.structural[token], token))
            at = match.end()
        if at < len(text):
            pieces.append((None, text[at:]))
        return pieces

    def structural_in(self, text: str) -> bool:
        """Whether a structural token is written in this text."""
        return self._named.search(text) is not None

    def mark(self, text: str, marks: "Marks") -> str:
        """The text with a character of `marks` for each structural token written in it."""
        return self._named.sub(lambda match: marks.of(match.group()), text)

    def marked(self, text: str, marks: "Marks | None", lead: str = "") -> list[int]:
        """Ids of a text with marks: its own structural tokens mean what they say, the marked ones are plain
        text. `lead` is the structural token that stands before it, if any."""
        if marks is None or not marks.used:
            return self.whole(lead + text)[1:] if lead else self.whole(text)
        ids: list[int] = []
        for token, piece in self.split(text):
            ids += [token] if token is not None else self.plain(marks.restored(piece))
        return ids


class PartialText:
    """The text of ids as they come: what `add` returns is, joined, the beginning of `Encoder.decode` of all of them."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._known: list[int] = []  # the last ids of which the text was returned
        self._new: list[int] = []
        self._lost = False

    def add(self, ids: Sequence[int]) -> str:
        """The text that further ids made certain; a character that may be incomplete is not."""
        self._new += ids
        if not self._new or self._new[-1] in self._encoder.byte_ids or self._lost:
            return ""
        before = self._encoder.decode(self._known)
        text = self._encoder.decode([*self._known, *self._new])
        if text.endswith("\ufffd"):
            return ""
        self._lost = not text.startswith(before)  # a decoder that looks further back than this
        self._known, self._new = self._new, []
        return "" if self._lost else text[len(before) :]


class Marks:
    """Characters that stand for structural tokens in contents while a template renders them. None of them occurs in
    `texts`, which are all that the template is given, and so whatever else a text holds stays what it is."""

    def __init__(self, texts: Iterable[str]) -> None:
        taken = frozenset().union(*texts)
        self._free = (c for place in _UNUSED for c in map(chr, place) if c not in taken)
        self._marks: dict[str, str] = {}
        self._tokens: dict[str, str] = {}

    @property
    def used(self) -> bool:
        """True once a mark was handed out."""
        return bool(self._marks)

    def of(self, token: str) -> str:
        """The mark of a token, a new one for a token that has none."""
        mark = self._marks.get(token)
        if mark is None:
            mark = next(self._free, None)
            if mark is None:
                raise UserError("the messages hold every character that has no meaning, and special tokens besides")
            self._marks[token] = mark
            self._tokens[mark], self._tokens[dumps(mark)[1:-1]] = token, dumps(token)[1:-1]
        return mark

    def restored(self, text: str) -> str:
        """The tokens in place of their marks, which a template may have escaped as JSON does."""
        pattern = "|".join(map(re.escape, self._tokens))
        return re.sub(pattern, lambda match: self._tokens[match.group()], text)


def sound(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _ids(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Encode a text; half a surrogate pair, which no tokenizer takes, becomes U+FFFD. A long one is encoded as a batch,
    which lets other threads go on meanwhile."""

    def encoded(whole: str) -> "Encoding":
        if len(whole) < _LONG:
            return tokenizer.encode(whole, add_special_tokens=False)
        return tokenizer.encode_batch_fast([whole], add_special_tokens=False)[0]

    try:
        found = encoded(text)
    except TypeError:
        found = encoded(sound(text))
    if len(found) > _MOST_IDS:
        raise UserError(f"a text of {len(text)} characters has {len(found)} tokens, more than any context")
    ids: list[int] = found.ids
    return ids


def _without(spec: dict[str, Json], structural: frozenset[str]) -> tuple[Any, dict[int, int]]:
    """The tokenizer without its structural tokens, and the true ids of those that got another id by that."""
    from tokenizers import Tokenizer

    kept = [t for t in spec["added_tokens"] if t["content"] not in structural]
    plain = Tokenizer.from_str(dumps({**spec, "added_tokens": kept}))
    moved = ((plain.token_to_id(t["content"]), t["id"]) for t in kept)
    return plain, {now: true for now, true in moved if now is not None and now != true}


def _pattern(names: Sequence[str], swallows: dict[str, tuple[bool, bool]]) -> re.Pattern[str]:
    """A pattern of the tokens: leftmost, longest first, one group each, with the white space that each
    swallows."""
    space = ("", r"\s*")
    forms = [f"{space[swallows[t][0]]}({re.escape(t)}){space[swallows[t][1]]}" for t in names]
    return re.compile("|".join(forms) or r"(?!)")
