"""Tools of a recipe, of a source and of an environment: who offers what, and that all is closed once."""

import asyncio
from typing import ClassVar

import pytest
from fakes import TASK, Echo, Env, call, make_driver

from agentrl.errors import UserError
from agentrl.plugins.decorator import tool
from agentrl.plugins.tool import Tool, ToolSource
from agentrl.plugins.toolbox import Toolbox, offered
from agentrl.plugins.types import InfrastructureError, Task, ToolResponse
from agentrl.recipe.sections.env import ToolSection
from agentrl.rollout.groups import roll_out
from agentrl.trajectory import Boundary, FinishReason


@tool
def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


CLOSED: list[str] = []


class Pair(ToolSource):
    def __init__(self, works: bool = True) -> None:
        self.works = works

    async def open(self):
        if not self.works:
            raise UserError("the server is not there")
        return [Echo(name="left"), Echo(name="right")]

    async def close(self):
        CLOSED.append("pair")


class Closing(Tool):
    name = "closing"

    async def execute(self, session):
        return ""

    async def close(self):
        CLOSED.append("closing")


class Step(Tool):
    """An environment's own tool: its state is the environment's."""

    name = "step"
    parameters: ClassVar = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}

    async def execute(self, session, by):
        session.environment.state += by
        return ToolResponse(f"at {session.environment.state}", reward=float(by), done=session.environment.state >= 3)


class Walk(Env):
    def __init__(self) -> None:
        super().__init__(create=self._begin, calc_reward=lambda session: float(session.state))
        self._tools = (Step(),)

    def tools(self):
        return self._tools

    def _begin(self, session):
        session.state = 0
        return [{"role": "user", "content": "walk to 3"}]


def sections(*names, **args):
    return [ToolSection(name=f"{__name__}:{name}", args=args.get(name, {})) for name in names]


@pytest.fixture(autouse=True)
def closed():
    CLOSED.clear()
    return CLOSED


async def test_tools_and_sources_are_opened_in_order_and_closed_once(closed):
    box = await Toolbox.open(sections("double", "Pair", "Closing"), Env())
    assert [t.name for t in box.tools] == ["double", "left", "right", "closing"]
    assert box.origins == (f"{__name__}:double", f"{__name__}:Pair", f"{__name__}:Pair", f"{__name__}:Closing")
    assert closed == []
    await box.close()
    assert closed == ["closing", "pair"]


async def test_what_was_opened_is_closed_when_a_later_one_cannot_be(closed):
    with pytest.raises(UserError, match="the server is not there"):
        await Toolbox.open(sections("Closing", "Pair", Pair={"works": False}), Env())
    assert closed == ["pair", "closing"]


@pytest.mark.parametrize(
    ("names", "env", "words"),
    [
        (("double", "double"), Env(), rf"{__name__}:double and {__name__}:double both offer 'double' to the model"),
        (("Step",), Walk(), rf"{__name__}:Step and environment env both offer 'step' to the model"),
    ],
)
async def test_two_tools_of_one_name_are_refused(names, env, words):
    with pytest.raises(UserError, match=words):
        await Toolbox.open(sections(*names), env)


def test_a_task_offers_what_it_names_and_the_environments_own():
    tools, env = [Echo(name="a"), Echo(name="b")], Walk()
    assert list(offered(Task("t", {}), tools, env)) == ["a", "b", "step"]
    assert list(offered(Task("t", {}, tools=("b",)), tools, env)) == ["b", "step"]
    assert list(offered(Task("t", {}, tools=()), tools, env)) == ["step"]
    with pytest.raises(UserError, match="task t names the tool 'bb', not in `tools`; did you mean 'b'"):
        offered(Task("t", {}, tools=("bb",)), tools, env)


async def test_an_environments_own_tool_moves_its_state_and_its_rewards_come_at_their_turn():
    driver = make_driver([call("step", by=1), call("echo", text="x"), call("step", by=2)], Walk(), [Echo()])
    t = await driver.drive(driver.request(TASK, 0))
    assert [m["content"] for m in t.messages if m["role"] == "tool"] == ["at 1", "x", "at 3"]
    assert [turn.reward for turn in t.turns] == [1, 0, 2]
    assert t.finish is FinishReason.ENV_DONE
    assert t.rewards == {"env": 3, "step": 3}
    assert t.tools == ("echo", "step")


async def test_a_tool_that_is_cut_off_while_its_machinery_is_down_fails_the_request():
    async def hang(session, **_):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise InfrastructureError("still reconnecting") from None

    driver = make_driver([call("echo"), "4"], tools=[Echo(execute=hang)], tool_timeout=0.05)
    t = await driver.drive(driver.request(TASK, 0))
    assert (t.failure.boundary, t.failure.message) == (Boundary.TOOL, "echo.execute: still reconnecting")


@pytest.mark.parametrize("calls", [call("echo"), call("echo") + call("fine")])
async def test_a_tool_whose_machinery_is_down_fails_the_request_and_says_nothing_to_the_model(calls):
    echo = Echo(execute=InfrastructureError("the retriever at :8000 is down"))
    driver = make_driver([calls, "4"], tools=[echo, Echo(name="fine")], retries=2)
    (group,) = await roll_out(driver, [TASK], 1)
    (t,) = group.failed
    assert (t.failure.boundary, t.failure.message) == (Boundary.TOOL, "echo.execute: the retriever at :8000 is down")
    assert len(t.extra["retried"]) == 2
    assert t.rewards == {}
    assert not any(m["role"] == "tool" for m in t.messages)
    echo.hooks.check()


@pytest.mark.parametrize("parameters", [{"type": "objct"}, {}, {"type": "object", "properties": ["line"]}])
async def test_parameters_that_no_model_could_be_shown_are_named(parameters, monkeypatch):
    monkeypatch.setattr(Closing, "parameters", parameters)
    with pytest.raises(UserError, match=rf"^tool 'closing' \({__name__}:Closing\): its `parameters` want type object"):
        await Toolbox.open([ToolSection(name=f"{__name__}:Closing")], Env())


def test_a_schema_always_has_properties(monkeypatch):
    monkeypatch.setattr(Closing, "parameters", {"type": "object"})
    assert Closing().schema["function"]["parameters"] == {"type": "object", "properties": {}}


async def test_parameters_with_recursion_are_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(Closing, "parameters", {"type": "object", "properties": {"x": {"$ref": "#"}}})
    with pytest.raises(UserError, match=r"^tool 'closing': its parameters refer to themselves \(\$ref '#'\)"):
        await Toolbox.open([ToolSection(name=f"{__name__}:Closing")], Env())


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (lambda task: None, "returned None; expected a sequence of Tool objects"),
        (lambda task: ["step"], r"returned \['step'\]; expected a sequence of Tool objects"),
        (lambda task: {}["no"], "raised KeyError: 'no'"),
    ],
    ids=["nothing", "names", "raises"],
)
def test_tools_for_that_gives_nonsense_fails_in_one_line(gives, words):
    env = Env()
    env.tools_for = gives
    with pytest.raises(UserError, match=f"^environment 'env': `tools_for` of task {TASK.id} {words}"):
        offered(TASK, [], env)
