"""`StopWatch`: the token that completes a stop string is the last one, and no part of the string is passed on."""

import random
from collections.abc import Sequence

import pytest

from agentrl.engine.base import Generation, GenerationFinish
from agentrl.engine.stops import StopWatch, shown

WORDS = ["<", "/co", "de", ">\n", "a", "Obs", "Observation", ":", " ", "é"[:1], "Ob"]


def decode(ids: Sequence[int]) -> str:
    """Ids below 256 are bytes, those above are words."""
    return b"".join(bytes([i]) if i < 256 else WORDS[i - 256].encode() for i in ids).decode("utf-8", "replace")


def watched(ids: Sequence[int], stops: Sequence[str], sizes: Sequence[int] = ()) -> tuple[StopWatch, list[int], int]:
    """A watch that was given `ids` in pieces, what it passed on, and how often it ended the turn."""
    told: list[int] = []
    ended: list[bool] = []
    watch = StopWatch(stops, decode, told.extend, lambda: ended.append(True))
    at = 0
    for size in [*sizes, len(ids)]:
        watch.add(ids[at : at + size])
        at += size
    return watch, told, len(ended)


def test_the_turn_ends_at_the_token_that_completes_a_stop_string() -> None:
    ids = [260, 256, 257, 258, 259, 260, 260]  # a</code>\naa
    watch, told, ended = watched(ids, ["</code>"])
    found = watch.cut(Generation(ids, [-0.1] * 7, GenerationFinish.LENGTH, [1, 1, 1, 2, 2, 2, 2]))
    assert (found.ids, len(found.logprobs), found.weight_version) == (ids[:5], 5, [1, 1, 1, 2, 2])
    assert (found.finish, watch.stop, told, ended) == (GenerationFinish.STOP, "</code>", [260], 1)


def test_what_was_not_watched_is_cut_all_the_same_and_nothing_is_lost_without_a_stop() -> None:
    watch = StopWatch(["é"], decode, None, lambda: None)
    assert watch.cut(Generation([97, 0xC3, 0xA9, 98], [0.0] * 4, GenerationFinish.STOP)).ids == [97, 0xC3, 0xA9]
    watch, told, _ = watched([97, 0xC3, 0xA9, 98, 120], ["xy"])
    whole = Generation([97, 0xC3, 0xA9, 98, 120], [0.0] * 5, GenerationFinish.STOP)
    assert watch.cut(whole) is whole
    assert told == [97, 0xC3, 0xA9, 98]


def test_whatever_comes_nothing_of_the_stop_is_passed_on() -> None:
    rng = random.Random(0)
    stops = ["Observation:", "</code>", "aa"]
    ended_early = 0
    for _ in range(300):
        ids = [rng.choice([*range(256, 256 + len(WORDS)), 0xC3, 0xA9]) for _ in range(30)]
        watch, told, ended = watched(ids, stops, [rng.randint(1, 4) for _ in range(5)])
        text = decode(ids[: watch.seen])
        places = [at for stop in stops if (at := text.find(stop)) >= 0]
        assert (watch.stop is not None) == bool(places) == bool(ended)
        assert not any(stop in decode(ids[: watch.seen - 1]) for stop in stops)
        assert told == ids[: len(told)]
        if places:
            ended_early += 1
            assert len(decode(told)) <= min(places)
    assert ended_early > 50


@pytest.mark.parametrize(
    ("content", "stop", "wanted"),
    [("a\nObs: b", "\nObs", "a"), ("a Obs:", "Obs: ", "a "), ("x", "\n", "x"), ("Obs", "\nObs", ""), ("a", "b", "a")],
)
def test_the_text_before_a_stop_is_shown(content: str, stop: str, wanted: str) -> None:
    assert shown(content, stop) == wanted
