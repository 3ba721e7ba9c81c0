"""`rollout.strict_calls`: a model that never saw its tools calls them as their schemas want, and is trained on that."""

import asyncio
import json
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fakes import Env, ScriptedEngine

from agentrl.chat.load import load_chat
from agentrl.compute.batch import Batch, prefix_trees
from agentrl.compute.forward import BlockForward
from agentrl.compute.packing import pack
from agentrl.engine.base import Generation, GenerationFinish, Sampling
from agentrl.engine.local.engine import LocalEngine
from agentrl.errors import UserError
from agentrl.gateway.call import Call, Origin
from agentrl.models.load import load_model
from agentrl.plugins.decorator import tool
from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Session, Task
from agentrl.recipe.sections.model import ModelSection
from agentrl.recipe.sections.rollout import CompactSection, RolloutSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.serve import ServedModel
from agentrl.trajectory import Trajectory, check_invariants


@tool
def order_status(order: str, urgent: bool = False) -> str:
    """The status of an order."""
    return f"{order} was sent"


@tool
def place_order(product: str, pieces: int) -> str:
    """Order some pieces of a product."""
    return f"{pieces} of {product} are ordered"


TOOLS = (order_status, place_order)
LIMITS = {"max_turns": 4, "max_turn_tokens": 60, "max_tokens": 700}


class Desk(Env):
    """A desk with two tools that the embedded model has never seen."""

    def tools(self) -> Any:
        return TOOLS

    async def create(self, session: Any, **kwargs: Any) -> Any:
        await super().create(session, **kwargs)
        return [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many has he now?"}]


def play(count: int = 12, seed: int = 0, **limits: Any) -> list[Trajectory]:
    """Rollouts of the embedded model."""
    model, tokenizer = load_model(ModelSection(path="tiny"))
    chat = load_chat(tokenizer, model_path="tiny", kind="auto", tools=[one.schema for one in TOOLS])

    async def run() -> list[Trajectory]:
        engine = LocalEngine(model, max_batch=16, max_context=800, tokenizer=tokenizer)
        section = RolloutSection(**{**LIMITS, "strict_calls": True, **limits})
        driver = Driver(engine=engine, chat=chat, environment=Desk(), tools=(), limits=section)
        try:
            return await asyncio.gather(
                *(driver.drive(driver.request(Task("t", {}), i, seed=seed)) for i in range(count))
            )
        finally:
            await engine.close()

    return asyncio.run(run())


def calls(trajectories: list[Trajectory]) -> list[tuple[str, Any]]:
    """Names and arguments of what was called, as the messages have them."""
    said = [message for t in trajectories for message in t.messages if message["role"] == "assistant"]
    found = [call["function"] for message in said for call in message.get("tool_calls") or ()]
    return [(one["name"], one["arguments"]) for one in found]


def checked(made: list[tuple[str, Any]]) -> int:
    """Count the calls that have a name, and check them; the others were cut by max_turn_tokens. Raises KeyError,
    ArgumentError."""
    whole = [(name, arguments) for name, arguments in made if name]
    for name, arguments in whole:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        {one.name: one for one in TOOLS}[name].check(given)
    return len(whole)


def test_tools_that_were_never_seen_are_called_as_their_schemas_want() -> None:
    loose, strict = (play(strict_calls=on) for on in (False, True))
    assert not {name for name, _ in calls(loose)} & {one.name for one in TOOLS}
    whole = [t for t in strict if t.tool_uses]
    assert len(whole) >= 8
    assert checked(calls(strict))
    assert {name for name, _ in calls(strict)} & {"order_status", "place_order"}


def test_the_trainer_computes_what_the_engine_drew_by() -> None:
    trajectories = play()
    for t in trajectories:
        check_invariants(t)
    held = [sum(one is not None for one in t.allowed) for t in trajectories if t.allowed is not None]
    assert 0 < sum(held) < sum(int(t.loss_mask.sum()) for t in trajectories)
    batch = Batch.from_trajectories(trajectories, [0] * len(trajectories))
    row = pack(batch, prefix_trees(batch))
    with torch.no_grad():
        found, _ = BlockForward(load_model(ModelSection(path="tiny"))[0])(row, 1.0)
    np.testing.assert_allclose(found.numpy(), batch.tokens["logprobs"][row.source], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_was_allowed_stays_with_its_tokens_where_conversations_begin_anew() -> None:
    compact = CompactSection(at=150)
    trajectories = play(8, max_turns=6, compact=compact)
    assert any(t.segments for t in trajectories)
    for t in trajectories:
        check_invariants(t)
    later = [t.allowed[t.segments[-1].start :] for t in trajectories if t.segments and t.allowed is not None]
    assert any(one is not None for allowed in later for one in allowed)


def test_an_agent_that_offers_the_tools_itself_gets_such_calls() -> None:
    model, tokenizer = load_model(ModelSection(path="tiny"))
    offered = tuple(one.schema for one in TOOLS)
    chat = load_chat(tokenizer, model_path="tiny", kind="auto", tools=offered)
    asked = {"role": "user", "content": "Tom has 3 apples and buys 4 more. How many has he now?"}

    async def run() -> list[Any]:
        engine = LocalEngine(model, max_batch=16, max_context=800, tokenizer=tokenizer)
        served = ServedModel(engine, chat, RolloutSection(strict_calls=True, max_turn_tokens=60))
        try:
            seeded = [Call((asked,), tools=offered, asked={"seed": seed}) for seed in range(16)]
            return await asyncio.gather(*(served.complete(one, Origin(b"%d" % i)) for i, one in enumerate(seeded)))
        finally:
            await engine.close()

    made = [call["function"] for found in asyncio.run(run()) for call in found.message.get("tool_calls") or ()]
    assert checked([(call["name"], call["arguments"]) for call in made]) >= 4


async def test_a_turn_that_was_stopped_goes_on_where_its_call_was() -> None:
    model, tokenizer = load_model(ModelSection(path="tiny"))
    chat = load_chat(tokenizer, model_path="tiny", kind="auto", tools=[one.schema for one in TOOLS])
    said = tuple(tokenizer.encode('<tool_call>\n{"name": "', add_special_tokens=False))
    asked: list[Sampling] = []

    class Stopped(LocalEngine):
        async def generate(self, ids: Any, sampling: Sampling, request_id: str, on_tokens: Any = None) -> Generation:
            asked.append(sampling)
            if len(asked) == 1:
                return Generation(list(said), [-1.0] * len(said), GenerationFinish.ABORT)
            return await super().generate(ids, sampling, request_id, on_tokens)

    engine = Stopped(model, max_batch=4, max_context=800, tokenizer=tokenizer)
    section = RolloutSection(**{**LIMITS, "strict_calls": True})
    driver = Driver(engine=engine, chat=chat, environment=Desk(), tools=(), limits=section)
    try:
        request = driver.request(Task("t", {}), 0)
        await driver.drive(request, resumable=True)
        found = await driver.drive(request)
    finally:
        await engine.close()
    assert [one.said for one in asked[:2]] == [(), said]
    assert calls([found])[0][0] in {"order_status", "place_order"}


def test_a_schema_that_cannot_be_kept_to_is_refused_before_the_first_rollout() -> None:
    class Pack(Tool):
        name, description = "pack", "Pack what has a code, which is not 0."
        parameters: ClassVar = {"type": "object", "properties": {"code": {"type": "string", "not": {"enum": ["0"]}}}}

        async def execute(self, session: Session, **arguments: Any) -> str:
            return "packed"

    model, tokenizer = load_model(ModelSection(path="tiny"))
    chat = load_chat(tokenizer, model_path="tiny", kind="auto", tools=[Pack().schema])
    engine = LocalEngine(model, max_batch=1, max_context=800, tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"^rollout\.strict_calls: the schema cannot be kept to: "):
        Driver(engine=engine, chat=chat, environment=Env(), tools=(Pack(),), limits=RolloutSection(strict_calls=True))


def test_an_engine_that_tells_no_ids_is_refused_in_one_line() -> None:
    chat = load_chat(load_model(ModelSection(path="tiny"))[1], model_path="tiny", kind="auto", tools=[])
    section = RolloutSection(strict_calls=True)
    with pytest.raises(UserError, match=r"rollout\.strict_calls: ScriptedEngine does not hold calls to schemas"):
        Driver(engine=ScriptedEngine([]), chat=chat, environment=Desk(), tools=(), limits=section)
