"""An answer as a server sends it, and one whose ids were sampled from several weights, in the trajectory."""

import json
import random
from array import array
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from agentrl.engine.base import EngineError, Generation, GenerationFinish, Sampling
from agentrl.engine.servers.answer import INTERVAL, STREAM_INTERVAL, Answer, Features, Wanted
from agentrl.engine.servers.client import ServerError
from agentrl.engine.sglang.wire import Reader, request_body
from agentrl.plugins.types import Task
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trajectory import check_invariants


def request() -> AsyncRolloutRequest:
    made = AsyncRolloutRequest("r", Task("t", {}), 0, seed=1)
    made.main.open_with(array("i", [1, 2, 3]))
    return made


def generation(ids: list[int], version: object) -> Generation:
    return Generation(ids, [-0.5] * len(ids), GenerationFinish.STOP, version)


def test_every_id_keeps_its_version() -> None:
    made = request()
    made.main.add_sampled(generation([4, 5, 6, 7], [3, 3, 4, 4]))
    made.main.close_turn()
    made.main.add_bridge([8, 9])
    made.main.add_sampled(generation([10, 11], 4))
    made.main.add_sampled(generation([12], [5]))
    made.main.close_turn()
    t = made.trajectory()
    check_invariants(t)
    assert t.weight_version.tolist() == [-1, -1, -1, 3, 3, 4, 4, -1, -1, 4, 4, 5]


def test_versions_that_do_not_match_the_ids_are_an_engine_error() -> None:
    made = request()
    with pytest.raises(EngineError, match="2 ids came with 3 weight versions"):
        made.main.add_sampled(generation([4, 5], [1, 1, 1]))
    assert made.main.ids.tolist() == [1, 2, 3]  # nothing of it is kept
    assert not made.main.versions


def test_versions_in_any_order_are_kept_as_runs() -> None:
    chance = random.Random(0)
    for count in (1, 2, 7, 300):
        versions = [chance.randrange(3) for _ in range(count)]
        made = request()
        made.main.add_sampled(generation(list(range(count)), versions))
        runs = [(version, len(list(run))) for version, run in groupby(versions)]
        assert list(zip(made.main.versions, made.main.version_counts, strict=True)) == runs
        assert made.trajectory().weight_version[3:].tolist() == versions


def test_an_answer_of_several_weights_names_those_of_each_id() -> None:
    answer = Answer(list(range(6)), array("d", [-1.0] * 6), [(3, 2), (4, 1), (3, 3)])
    assert answer.generation(GenerationFinish.STOP, 9).weight_version == [3, 3, 4, 3, 3, 3]
    assert Answer().generation(GenerationFinish.ABORT, 9).weight_version == 9


@pytest.mark.parametrize(
    ("incremental", "interval", "expected"),
    [
        (True, INTERVAL, INTERVAL),
        (True, STREAM_INTERVAL, STREAM_INTERVAL),
        (False, INTERVAL, 500),
        (False, STREAM_INTERVAL, 63),
    ],
)
def test_pieces_are_few_where_each_repeats_those_before_it(incremental: bool, interval: int, expected: int) -> None:
    ids = np.array([5, 6, 7], np.int32)
    wanted = Wanted(ids, Sampling(4000), 4000, "r", interval=interval)
    body: Any = request_body(wanted, Features(incremental=incremental))
    assert body["sampling_params"]["stream_interval"] == expected


def piece_of(ids: list[object], logprobs: list[object], total: int) -> bytes:
    pairs = [[value, token, None] for token, value in zip(ids, logprobs, strict=True)]
    meta = {"completion_tokens": total, "output_token_logprobs": pairs, "weight_version": "0", "finish_reason": None}
    return json.dumps({"output_ids": ids, "meta_info": meta}).encode()


def test_log_probs_are_read_to_the_last_digit() -> None:
    chance = random.Random(0)
    values = [-chance.expovariate(0.5) for _ in range(500)] + [-5e-324, -1.7976931348623157e308, 0.0, -0.0]
    answer = Answer()
    Reader(answer, "u", 0).add(piece_of(list(range(len(values))), list(values), len(values)))
    assert answer.logprobs.tolist() == values
    assert answer.ids == list(range(len(values)))


@pytest.mark.parametrize(
    ("ids", "logprobs", "said"),
    [
        ([3, True], [-1.0, -1.0], "id True came with the log-prob"),
        ([3, 4.0], [-1.0, -1.0], "id 4.0 came with the log-prob"),
        ([3, 4], [-1.0, None], r"id 4 came with the log-prob \[None, 4, None\]"),
        ([3, 4], [float("nan"), -1.0], r"id 3 came with the log-prob \[nan, 3, None\]"),
        ([3, 4], [float("-inf"), float("inf")], r"id 3 came with the log-prob \[-inf"),
        ([3, 4], ["-1.0", -1.0], "id 3 came with the log-prob"),
    ],
)
def test_what_is_no_log_prob_of_an_id_is_malformed(ids: list[object], logprobs: list[object], said: str) -> None:
    answer = Answer()
    with pytest.raises(ServerError, match=f"^u/generate: the answer is malformed: {said}"):
        Reader(answer, "u", 0).add(piece_of(ids, logprobs, len(ids)))
    assert answer.ids == []
