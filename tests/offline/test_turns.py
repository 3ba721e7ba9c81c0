"""Stored turns in an engine's place: what is said, where it stops, who goes on; tasks as an environment has them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import Env, ScriptedEngine

from agentrl.engine.base import EngineError, Generation, GenerationFinish, Sampling
from agentrl.offline.replay import live_tasks
from agentrl.offline.turns import Script, Spoken, StoredTurns, _typed
from agentrl.plugins.types import Task
from agentrl.testing.agent import call

STOP = 9
FIRST = Spoken([1, 2], [3, STOP], [-0.5, -0.25], [4, 5])
SECOND = Spoken([1, 2, 3, STOP, 6], [7, 8], [-1.0, -2.0], [5, 5])


def say(engine: StoredTurns, ids: Sequence[int], most: int = 10, name: str = "r") -> Generation:
    return asyncio.run(engine.generate(ids, Sampling(most, stop_ids=(STOP,), seed=7), name))


def seated(inner: Any = None, **how: Any) -> tuple[StoredTurns, Script]:
    engine, script = StoredTurns(inner), Script([FIRST, SECOND], **{"limit": 2, **how})
    engine.seat("r", script)
    return engine, script


def test_turns_come_back_with_their_logprobs_and_versions() -> None:
    engine, script = seated()
    assert say(engine, [1, 2]) == Generation([3, STOP], [-0.5, -0.25], GenerationFinish.STOP, [4, 5])
    assert say(engine, [0]) == Generation([7, 8], [-1.0, -2.0], GenerationFinish.LENGTH, [5, 5])  # it was cut
    assert say(engine, [0]).finish is GenerationFinish.ABORT
    assert script.stopped == "it goes on here, and no further turn is stored"
    with pytest.raises(EngineError, match="nothing is stored for another"):
        say(engine, [1], name="another")


@pytest.mark.parametrize(
    ("how", "prompts", "most", "why"),
    [
        ({"strict": True}, [[1, 0]], 10, "what stands before turn 1 is not as stored"),
        ({"strict": True}, [[1, 2], [1, 2, 3, STOP, 5]], 10, "what stands before turn 2 is not as stored"),
        ({"strict": True, "limit": 1}, [[1, 2], [1, 2, 3, STOP, 5]], 10, "what stands before turn 2 is not as stored"),
        ({"branches": True}, [[1, 2, 3]], 10, "what stands before turn 1 is not as stored"),
        ({}, [[1, 2]], 1, "turn 1 has no room any more"),
    ],
)
def test_where_it_stops(how: dict[str, Any], prompts: list[list[int]], most: int, why: str) -> None:
    engine, script = seated(ScriptedEngine(["never said"]), **how)
    *_, last = [say(engine, ids, most) for ids in prompts]
    assert last == Generation([], [], GenerationFinish.ABORT)
    assert script.stopped == why


def test_turns_of_a_tree_are_known_by_what_stands_before_them() -> None:
    engine, _ = seated(branches=True)
    assert say(engine, SECOND.before or [], name="r").ids == [7, 8]
    assert say(engine, FIRST.before or [], name="r/1").ids == [3, STOP]  # of a branch


def test_another_engine_goes_on_from_seeds_of_its_own() -> None:
    seeds = []
    for number in (1, 2):
        inner = ScriptedEngine(["so it goes"])
        engine, script = seated(inner, limit=1, strict=True, number=number)
        assert say(engine, [1, 2]).ids == [3, STOP]
        assert len(say(engine, [1, 2, 3, STOP, 6]).ids) == 10
        assert (script.stopped, script.gone_on) == ("", True)
        seeds.append(inner.samplings[0].seed)
    assert len({7, *seeds}) == 3


class Shelf(Env):  # type: ignore[misc]
    splits = ("test",)

    def tasks(self, split: str) -> list[Task]:
        return [Task(name, {"n": n}) for n, name in enumerate(["t-0", "t-1", "odd", "t-2"])]


def test_tasks_are_found_by_number_else_one_by_one() -> None:
    wanted = {"t-1": '{"n": 1}', "odd": '{"n": 2}', "t-2": '{"n": 3}', "t-0": '{"n": 7}', "gone-3": "{}", "t-9": "{"}
    assert set(live_tasks(Shelf(), "test", wanted)) == {"t-1", "odd", "t-2"}  # t-0 has other data now
    assert live_tasks(Shelf(), "nowhere", wanted) == {}


def test_a_call_is_typed_as_a_person_types_it() -> None:
    function = {"name": "calculator", "arguments": {"expression": "2*3"}}
    message = {"role": "assistant", "content": "/so", "tool_calls": [{"function": function}]}
    assert _typed(message) == "//so\n" + call("calculator", expression="2*3")
