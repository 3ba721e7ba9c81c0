"""The assistant's message of a turn, and the bound on what a tool returned."""

import re

from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat.base import ParsedCall, ParsedTurn
from agentrl.rollout.calls import assistant_message, bound_text


def test_a_call_keeps_the_id_that_the_model_wrote() -> None:
    own = ParsedCall("calculator", {}, "{}", id="functions.calculator:0")
    without = ParsedCall("calculator", {}, "{}")
    message = assistant_message(ParsedTurn("", (own, without)), turn=3)
    assert [call["id"] for call in message["tool_calls"]] == ["functions.calculator:0", "call_3_1"]


def by_character(text):
    return [ord(c) for c in text]


def by_word(text):
    """Tokens of many characters."""
    return re.findall(r"\w+|\W", text)


def test_a_text_that_fits_is_left_alone():
    assert bound_text("hello", 5, by_character) == "hello"
    assert bound_text("a long word " * 20, 120, by_word) == "a long word " * 20


def test_a_short_text_is_not_tokenized():
    def never(text):
        raise AssertionError("a token holds at least a byte")

    assert bound_text("hello", 5, never) == "hello"


def test_the_middle_goes_and_the_note_counts_it():
    text = "start " + "x" * 1000 + " the end"
    short = bound_text(text, 100, by_character)
    head, count, tail = re.fullmatch(r"(.*)\n\[\.\.\. (\d+) characters left out \.\.\.\]\n(.*)", short, re.S).groups()
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) + int(count) == len(text)
    assert 90 <= len(short) <= 100


@given(st.text(max_size=400), st.integers(1, 80), st.sampled_from([by_character, by_word]))
def test_it_is_never_longer_than_its_limit(text, limit, encode):
    short = bound_text(text, limit, encode)
    assert len(encode(short)) <= limit
    if len(encode(text)) <= limit and len(text) <= 16 * limit:
        assert short == text


def test_ten_megabytes_cost_no_more_than_what_is_kept():
    seen = []
    bound_text("word " * 2_000_000, 256, lambda text: seen.append(len(text)) or by_word(text))
    assert sum(seen) <= 3 * 16 * 256
