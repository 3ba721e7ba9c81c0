"""The contract of engines: what a class derives, and what a recipe may name."""

from collections.abc import Sequence

import pytest

from agentrl.cluster.placement import Launched
from agentrl.engine.base import Engine, Generation, GenerationFinish, Sampling, engine_class
from agentrl.engine.sglang.kind import SglangEngine
from agentrl.errors import UserError
from agentrl.plugins.registry import make_engine
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.rollout import EngineSection


class Mute(Engine):
    """The least that an engine has to define."""

    max_context = 8

    def __init__(self, model: object, max_batch: int) -> None: ...

    async def generate(self, ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        return Generation([], [], GenerationFinish.LENGTH)


class Deaf(Engine):
    max_context = 8


class Duck:
    """It has the methods of an engine, and says nothing of its capabilities."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module under a name that a recipe may give, whatever pytest calls it."""
    import sys

    monkeypatch.setitem(sys.modules, "my_engines", sys.modules[__name__])


async def test_what_an_engine_does_not_define_has_a_default(tmp_path) -> None:
    kind = engine_class("my_engines:Mute")
    assert (kind.brings_chat, kind.missing(Recipe()), kind.launched({})) == (False, [], Launched())
    engine = make_engine(EngineSection(name="my_engines:Mute"), None)
    engine.keep_logs(tmp_path)
    for call in (engine.health(), engine.update_weights(1), engine.sleep(), engine.wake(), engine.close()):
        await call
    assert (engine_class("openai").brings_chat, engine_class("sglang")) == (True, SglangEngine)


@pytest.mark.parametrize("name", ["my_engines:Duck", "my_engines:importable"])
def test_a_class_that_does_not_derive_from_it_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"engine '{name}' is not a class derived from agentrl\.engine\.base\.Engine"):
        engine_class(name)


def test_a_class_without_generate_is_refused() -> None:
    with pytest.raises(UserError, match=r"engine\.args: .*generate"):
        make_engine(EngineSection(name="my_engines:Deaf"), None)
