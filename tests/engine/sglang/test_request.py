"""An answer whose ids were sampled from several weights, in the trajectory."""

from array import array

import pytest

from agentrl.engine.base import EngineError, Generation, GenerationFinish
from agentrl.plugins.types import Task
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trajectory import check_invariants


def request() -> AsyncRolloutRequest:
    made = AsyncRolloutRequest("r", Task("t", {}), 0, 1)
    made.open_with(array("i", [1, 2, 3]))
    return made


def generation(ids: list[int], version: object) -> Generation:
    return Generation(ids, [-0.5] * len(ids), GenerationFinish.STOP, version)


def test_every_id_keeps_its_version() -> None:
    made = request()
    made.add_sampled(generation([4, 5, 6, 7], [3, 3, 4, 4]))
    made.close_turn()
    made.add_bridge([8, 9])
    made.add_sampled(generation([10, 11], 4))
    made.add_sampled(generation([12], [5]))
    made.close_turn()
    t = made.trajectory()
    check_invariants(t)
    assert t.weight_version.tolist() == [-1, -1, -1, 3, 3, 4, 4, -1, -1, 4, 4, 5]


def test_versions_that_do_not_match_the_ids_are_an_engine_error() -> None:
    made = request()
    with pytest.raises(EngineError, match="2 ids came with 3 weight versions"):
        made.add_sampled(generation([4, 5], [1, 1, 1]))
    assert made.ids.tolist() == [1, 2, 3]  # nothing of it is kept
    assert not made.versions
