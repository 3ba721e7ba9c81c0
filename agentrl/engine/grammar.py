"""`Grammars`: which ids a constraint allows next, found by `llguidance` on a CPU."""

import json
from functools import lru_cache
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from agentrl.constraint import Constraint, Shape, packed
from agentrl.containment.threads import in_thread
from agentrl.engine.base import ConstraintError, Sampling
from agentrl.plugins.types import Json

LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)
"""What a schema may cost, which an agent wrote."""
KEPT = 64
"""Grammars that are kept compiled: those of the tools of as many tasks."""
CHARACTERS = 200_000
"""The longest grammar that is read."""
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` and chat templates write it: a model that may write any white space may write it for ever."""


class Matcher:
    """The state of one turn under a constraint."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros(-(-vocabulary // 32), np.int32)
        self._computed = False
        self._known: dict[bytes, bytes] = {}
        self.error: str | None = None
        """Why it could not go on: from there on only the end of the turn was allowed."""
        self.allowed: list[bytes | None] = []
        """Of each token that was taken, which were allowed (`constraint.packed`); None: all of them."""

    def bits(self) -> npt.NDArray[np.uint8] | None:
        """Which ids are allowed next, one bit each. Valid until a token is taken."""
        if not self._computed:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._computed = True
            if self._matcher.is_error():
                self.error = _line(self._matcher.get_error())
        return self._bits.view(np.uint8)

    def take(self, token: int) -> None:
        """Go on behind a token that was sampled from those that are allowed."""
        self.bits()
        bits = self._bits.tobytes()
        if bits not in self._known:
            self._known[bits] = packed(self._bits.view(np.uint8))
        self.allowed.append(self._known[bits])
        if self.error is None:
            self._matcher.consume_token(token)
        self._computed = False


class CallMatcher(Matcher):
    """The state of a turn that may be anything, but for what follows `opener`: that is one of the shapes."""

    def __init__(self, shapes: llguidance.LLMatcher, opener: int, vocabulary: int) -> None:
        super().__init__(shapes, vocabulary)
        self._shapes, self._opener, self._inside = shapes, opener, False

    def bits(self) -> npt.NDArray[np.uint8] | None:
        """Which ids are allowed next; None: all of them."""
        return super().bits() if self._inside else None

    def take(self, token: int) -> None:
        """Go on behind a token."""
        if self._inside:
            super().take(token)
            self._inside = not self._matcher.is_accepting()  # the shape is whole
        else:
            self.allowed.append(None)
            if token == self._opener:
                self._matcher, self._inside, self._computed = self._shapes.deep_copy(), True, False
                self._matcher.consume_token(token)


class Grammars:
    """Makes matchers for one tokenizer. vocabulary: size of the model's output layer."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self.vocabulary = tokenizer, vocabulary
        self._made: dict[tuple[int, ...], llguidance.LLTokenizer] = {}
        self._compiled = lru_cache(KEPT)(self._compile)

    def matcher(self, sampling: Sampling) -> Matcher | None:
        """A matcher for a turn, behind what was said of it; None where it is not constrained. May take a second. Raises
        ConstraintError."""
        if (constraint := sampling.constraint) is None:
            return None
        compiled = self._compiled(constraint, sampling.stop_ids)
        if constraint.opener:
            opener = self._tokenizer.convert_tokens_to_ids(constraint.opener)
            made: Matcher = CallMatcher(compiled, opener, self.vocabulary)
        else:
            made = Matcher(compiled.deep_copy(), self.vocabulary)
        for token in sampling.said:
            made.take(token)
        made.allowed.clear()
        return made

    def _compile(self, constraint: Constraint, stop_ids: tuple[int, ...]) -> llguidance.LLMatcher:
        known = self._of(stop_ids)
        grammar = self._grammar(constraint, known)
        if len(grammar) > CHARACTERS:
            raise ConstraintError(f"the schema has {len(grammar)} characters, more than {CHARACTERS}")
        made = llguidance.LLMatcher(known, grammar, log_level=0, limits=LIMITS)
        if made.is_error():
            raise ConstraintError(f"the schema cannot be kept to: {_line(made.get_error())}")
        return made

    def _of(self, stop_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
        if stop_ids not in self._made:
            try:
                backend = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
                backend.no_padding()
                backend.no_truncation()
                ends = list(stop_ids) or self._tokenizer.eos_token_id
                self._made[stop_ids] = llguidance.LLTokenizer(backend.to_str(), n_vocab=self.vocabulary, eos_token=ends)
            except (ValueError, RuntimeError, AttributeError) as error:
                raise ConstraintError(f"llguidance does not read this tokenizer: {_line(str(error))}") from error
        return self._made[stop_ids]

    def _grammar(self, constraint: Constraint, known: llguidance.LLTokenizer) -> str:
        """The constraint in llguidance's own language."""
        forms = [self._shape(i, shape, known) for i, shape in enumerate(constraint.shapes)]
        lines = [f"start: {'answer' if constraint.thought is None else 'thought answer'}"]
        if constraint.thought is not None:
            opening, closing = (self._text(text, known) for text in constraint.thought)
            whole = "closed /\\n{0,2}/" if constraint.begun else f"({opening} closed /\\n{{0,2}}/)?"
            special = closing.startswith("<")
            lines += [f"thought: {whole}", f"closed{'' if special else '[lazy]'}: /(.|\\n)*/ {closing}"]
        lines.append("answer: " + " | ".join(f"shape{i}" for i in range(len(forms))))
        return "%llguidance {}\n" + "\n".join([*lines, *forms]) + "\n"

    def _shape(self, index: int, shape: Shape, known: llguidance.LLTokenizer) -> str:
        schema: Json = json.loads(shape.schema)
        if not isinstance(schema, dict):
            schema = {} if schema is True else {"enum": []}
        value = f"value{index}"
        parts = [self._text(shape.before, known), value, self._text(shape.after, known)]
        written = json.dumps({**schema, "x-guidance": WRITTEN}, ensure_ascii=False)
        return f"shape{index}: {' '.join(filter(None, parts))}\n{value}: %json {written}"

    def _text(self, text: str, known: llguidance.LLTokenizer) -> str:
        """A text as the grammar has it: tokens that llguidance takes for special ones by their ids."""
        parts: list[str] = []
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        for one in ids:
            if known.is_special_token(one):
                before, _, text = text.partition(self._tokenizer.convert_ids_to_tokens(one))
                parts += [*([json.dumps(before)] if before else []), f"<[{one}]>"]
        return " ".join([*parts, *([json.dumps(text)] if text else [])])


def compiled_matcher(grammars: Grammars | None, sampling: Sampling) -> Matcher | None:
    """A matcher for a turn; None where it is not constrained. May take a second. Raises ConstraintError."""
    if sampling.constraint is None:
        return None
    if grammars is None:
        raise ConstraintError("the engine was given no tokenizer to read a schema by")
    return grammars.matcher(sampling)


async def matcher_for(grammars: Grammars | None, sampling: Sampling) -> Matcher | None:
    """`compiled_matcher`, in a thread where there is anything to compile."""
    return None if sampling.constraint is None else await in_thread(compiled_matcher, grammars, sampling)


def _line(text: str) -> str:
    """The first lines of an error, as one, without the grammar that it quotes."""
    return " ".join(text.partition("\n<state>")[0].partition("\n   1 |")[0].split())[:300]
