"""What the model does wrong goes back to it and is counted; what the machinery does wrong fails its request alone."""

import asyncio
import json

import pytest
import torch
from fakes import TASK, CharChat, Echo, Env, Hooks, ScriptedEngine, call, make_driver

from agentrl.containment import deadline as timer
from agentrl.engine.base import EngineError, Generation, GenerationFinish
from agentrl.errors import UserError
from agentrl.plugins.types import ArgumentError, Reply, ToolResponse
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.request import RequestState
from agentrl.trajectory import Boundary, FinishReason, Group, check_invariants


async def drive(driver, task=TASK):
    request = driver.request(task, 0)
    trajectory = await driver.drive(request)
    check_invariants(trajectory)
    assert (trajectory.failure is not None) == (request.state is RequestState.FAILED)
    return trajectory


def tool_texts(trajectory):
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("<call>echo {bad</call>", "no JSON"),
        (call("ecko", text="x"), "there is no tool named 'ecko'; did you mean 'echo'?"),
        (call("", text="x"), "there is no tool named ''"),
        (call("x" * 5000), "there is no tool named 'xxx"),
        (call("echo", text=3), "text should be a string"),
    ],
)
async def test_the_model_is_told_what_it_did_wrong(written, told):
    hooks = Hooks()
    t = await drive(make_driver([written, "4"], tools=[Echo(hooks)], max_turn_tokens=9000))
    (text,) = tool_texts(t)
    assert text.startswith("Error: ")
    assert told in text
    assert len(text) <= 256
    assert (t.finish, t.reward) == (FinishReason.STOP, 1.0)
    assert t.tool_uses[0].error.startswith("model: ")
    assert len(t.tool_uses[0].error) < 400
    assert hooks.total("echo", "execute") == 0


async def test_six_calls_where_three_are_allowed():
    hooks = Hooks()
    t = await drive(make_driver([call("echo", text="x") * 6, "4"], tools=[Echo(hooks)]))
    assert hooks.total("echo", "execute") == 3
    assert tool_texts(t) == ["x", "x", "x", "Error: 3 calls were not run: at most 3 a turn"]
    assert [u.error is None for u in t.tool_uses] == [True] * 3 + [False] * 3
    assert t.finish is FinishReason.STOP


async def test_an_unclosed_call_cut_by_the_length_limit_is_told_where_there_is_room():
    t = await drive(make_driver([call("echo", text="x" * 90), "4"], tools=[Echo()], max_turn_tokens=50))
    assert tool_texts(t) == ["Error: the call was cut off"]
    assert (t.finish, len(t.turns)) == (FinishReason.STOP, 2)


async def test_an_unclosed_call_without_room_ends_by_length():
    t = await drive(make_driver([call("echo", text="x" * 90), "4"], tools=[Echo()], max_turn_tokens=50, max_tokens=66))
    assert (t.finish, t.valid, t.reward) == (FinishReason.LENGTH, True, 1.0)


async def test_a_whole_call_before_one_that_is_cut_off_is_run():
    written = call("echo", text="a") + call("echo", text="x" * 90)
    t = await drive(make_driver([written, "4"], tools=[Echo()], max_turn_tokens=60))
    assert tool_texts(t) == ["a", "Error: the call was cut off"]


@pytest.mark.parametrize(
    ("does", "told", "side"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero", "tool"),
        (ArgumentError("a must be positive"), "a must be positive", "model"),
        (asyncio.CancelledError(), "SelfCancelledError", "tool"),
        (lambda session, **_: ToolResponse("x", metrics={"m": "high"}), "metric 'm' is str", "tool"),
        (lambda session, **_: ToolResponse("no such place", error=True), "no such place", "model"),
    ],
)
async def test_a_tool_that_goes_wrong_is_told_and_counted(does, told, side):
    t = await drive(make_driver([call("echo"), "4"], tools=[Echo(execute=does)]))
    assert told in tool_texts(t)[0]
    assert t.tool_uses[0].error.startswith(f"{side}: ")
    assert (t.finish, t.reward) == (FinishReason.STOP, 1.0)


@pytest.mark.parametrize("returned", [None, 17, {"text": "4"}, ToolResponse(17)])
async def test_a_tool_that_returns_no_text_is_a_fault_of_its_author(returned):
    t = await drive(make_driver([call("echo"), "4"], tools=[Echo(execute=lambda session, **_: returned)]))
    kind = type(getattr(returned, "text", returned)).__name__
    assert t.failure.boundary is Boundary.TOOL
    assert f"it returned {kind}, not text or a ToolResponse" in t.failure.message


async def test_a_tool_that_hangs_is_told_and_the_other_calls_of_the_turn_are_answered():
    async def hang(session, **_):
        await asyncio.Event().wait()

    tools = [Echo(), Echo(name="slow", execute=hang)]
    driver = make_driver([call("slow") + call("echo", text="a"), call("slow"), "4"], tools=tools, tool_timeout=0.2)
    t = await drive(driver)
    late = "Error: it did not answer within 0.2 seconds"
    assert tool_texts(t) == [late, "a", late]
    assert [u.error for u in t.tool_uses] == [f"tool: {late[7:]}", None, f"tool: {late[7:]}"]
    assert t.finish is FinishReason.STOP


async def test_the_calls_of_a_turn_run_at_once():
    both = asyncio.Barrier(2)

    async def meet(session, **_):
        await both.wait()
        return "met"

    t = await drive(make_driver([call("echo") * 2, "4"], tools=[Echo(execute=meet)], tool_timeout=60))
    assert tool_texts(t) == ["met", "met"]


async def test_ten_megabytes_are_cut_and_say_so():
    encoded = []

    class Chat(CharChat):
        def encode_text(self, text):
            encoded.append(len(text))
            return super().encode_text(text)

    driver = make_driver([call("echo"), "4"], tools=[Echo(execute=lambda session, **_: "x" * 10_000_000)])
    driver.chat = driver.caller._chat = Chat()
    t = await drive(driver)
    assert len(tool_texts(t)[0]) <= 256
    assert "characters left out" in tool_texts(t)[0]
    assert t.tool_uses[0].cut
    assert rollout_metrics([Group(TASK, (t,))])["tool/echo/cut"] == 1
    assert sum(encoded) < 50_000, "ten megabytes cost what ten kilobytes cost"


async def doubled(*_, **__):
    torch.set_default_dtype(torch.float64)
    return "x"


async def without_gradients(*_, **__):
    torch.set_grad_enabled(False)
    return 1.0


async def elsewhere(*_, **__):
    torch.set_default_device("meta")
    return "x"


async def boom(*_, **__):
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("env", "tool", "boundary", "where"),
    [
        ({"create": boom}, {}, Boundary.ENVIRONMENT, "env.create"),
        ({"create": []}, {}, Boundary.ENVIRONMENT, "no opening messages"),
        ({"create": "hello"}, {}, Boundary.ENVIRONMENT, "no opening messages"),
        ({"execute": boom}, {}, Boundary.ENVIRONMENT, "env.execute"),
        ({"execute": None}, {}, Boundary.ENVIRONMENT, "env.execute: it returned NoneType, not a Reply"),
        ({"execute": Reply()}, {}, Boundary.ENVIRONMENT, "no message and is not done"),
        ({"execute": Reply(done=True, reward=float("nan"))}, {}, Boundary.ENVIRONMENT, "nan"),
        ({"execute": UserError("row 3: no answer")}, {}, Boundary.ENVIRONMENT, "row 3: no answer"),
        ({"calc_reward": boom}, {}, Boundary.REWARD, "env.calc_reward"),
        ({"calc_reward": None}, {}, Boundary.REWARD, "NoneType, not a number"),
        ({"calc_reward": float("inf")}, {}, Boundary.REWARD, "inf"),
        ({"calc_reward": {"a": "b"}}, {}, Boundary.REWARD, "'a' is str"),
        ({"calc_reward": {"a": {"judge": 1.0}}}, {}, Boundary.REWARD, "'a' is dict"),
        ({"calc_reward": {"seats": {"judge": "b"}}}, {}, Boundary.REWARD, "'of seat judge' is str"),
        ({"calc_reward": {"seats": {7: 1.0}}}, {}, Boundary.REWARD, "the name of a seat is 7, not text"),
        ({"calc_reward": {"seats": {"": 1.0}}}, {}, Boundary.REWARD, "the name of a seat is '', not text"),
        (
            {"calc_reward": {"b": 1.0}, "parts": ("a",)},
            {},
            Boundary.REWARD,
            "'b' is none of its `reward_parts`: a",
        ),
        ({}, {"create": boom}, Boundary.TOOL, "echo.create"),
        ({}, {"execute": doubled}, Boundary.TOOL, "echo.execute: it changed torch.set_default_dtype for the whole"),
        ({}, {"execute": elsewhere}, Boundary.TOOL, "echo.execute: it changed torch.set_default_device for the whole"),
        ({"calc_reward": without_gradients}, {}, Boundary.REWARD, "env.calc_reward: it changed torch.set_grad_enabled"),
        ({}, {"calc_reward": boom}, Boundary.REWARD, "echo.calc_reward"),
        ({}, {"execute": ToolResponse("x", reward=float("nan"))}, Boundary.REWARD, "echo.execute"),
    ],
)
async def test_what_the_machinery_does_wrong_fails_the_request_with_its_boundary(env, tool, boundary, where):
    hooks = Hooks()
    kind = type("Declaring", (Env,), {"reward_parts": env["parts"]}) if "parts" in env else Env
    environment = kind(hooks, **{key: does for key, does in env.items() if key != "parts"})
    t = await drive(make_driver([call("echo"), "4"], environment, [Echo(hooks, **tool)]))
    assert (t.finish, t.failure.boundary, t.rewards, t.valid) == (FinishReason.ERROR, boundary, {}, False)
    assert where in t.failure.message
    assert "\n" not in t.failure.message
    assert str(torch.get_default_device()) == "cpu"
    hooks.check()


async def hang(*_, **__):
    await asyncio.Event().wait()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("env", "tool", "boundary"),
    [
        ({"create": hang}, {}, Boundary.ENVIRONMENT),
        ({"execute": hang}, {}, Boundary.ENVIRONMENT),
        ({"calc_reward": hang}, {}, Boundary.REWARD),
        ({}, {"create": hang}, Boundary.TOOL),
        ({}, {"calc_reward": hang}, Boundary.REWARD),
    ],
)
async def test_a_hook_that_hangs_fails_the_request(env, tool, boundary):
    hooks = Hooks()
    limits = {"timeout": 0.2} if "create" in (*env, *tool) else {"turn_timeout": 0.2}
    t = await drive(make_driver([call("echo"), "4"], Env(hooks, **env), [Echo(hooks, **tool)], **limits))
    assert t.failure.boundary is boundary
    assert "took too long" in t.failure.message
    hooks.check()


async def test_an_environment_that_is_cut_by_the_deadline_of_the_request_is_a_timeout():
    t = await drive(make_driver(["4"], Env(execute=hang), timeout=0.2))
    assert (t.finish, t.failure, t.reward) == (FinishReason.TIMEOUT, None, 1.0)


class BadEngine(ScriptedEngine):
    def __init__(self, answer):
        super().__init__(["x"])
        self.answer = answer

    async def generate(self, ids, sampling, request_id):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


STOP = GenerationFinish.STOP


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (EngineError("the server is gone"), "the server is gone"),
        (OSError("connection refused"), "OSError: connection refused"),
        (Generation([5, 6], [-1.0], STOP), "2 ids came with 1 logprobs"),
        (Generation([5] * 3000, [-1.0] * 3000, STOP), "at most 2000"),
        (Generation([], [], STOP), "without a token"),
        (Generation([5, None], [-1.0, -1.0], STOP), "TypeError"),
        (Generation([5], [float("nan")], STOP), "no valid logprob"),
        (Generation([5], [1.0], STOP), "no valid logprob"),
        (
            Generation([104, 105], [-1.0, 1.0], STOP),
            "no valid logprob: token 9 of 10, among [50, 43, 50, 63, 1200000, 10, 1200003, 104, 105]: "
            "'2+2?<0>\\n<3>hi'",
        ),
    ],
)
async def test_what_the_engine_does_wrong_fails_the_request(answer, what):
    engine = BadEngine(answer)
    hooks = Hooks()
    driver = make_driver(engine, Env(hooks))
    request = driver.request(TASK, 0)
    t = await driver.drive(request)
    assert t.failure.boundary is (Boundary.INFRASTRUCTURE if "logprob" in what[:17] else Boundary.ENGINE)
    assert what in t.failure.message
    assert (request.state, t.valid) == (RequestState.FAILED, False)
    assert engine.finished[request.id] == 1
    hooks.check()


async def test_an_engine_without_a_token_before_the_deadline_fails_the_request(monkeypatch):
    monkeypatch.setattr(timer, "GRACE", 0.01)

    class Dead(ScriptedEngine):
        async def generate(self, ids, sampling, request_id):
            await asyncio.Event().wait()

    t = await drive(make_driver(Dead(["x"]), turn_timeout=0.02))
    assert t.failure.boundary is Boundary.ENGINE
    assert "rollout.turn_timeout" in t.failure.message


async def test_an_engine_that_fails_to_forget_does_not_spoil_the_trajectory():
    class Engine(ScriptedEngine):
        def finish(self, request_id):
            raise RuntimeError("lost")

    t = await drive(make_driver(Engine(["4"])))
    assert t.valid
    assert "lost" in t.extra["engine_finish"]


async def test_a_chat_that_cannot_express_a_message_fails_the_request():
    class Chat(CharChat):
        def bridge(self, turn_ids, messages):
            raise UserError("the template has no role tool")

    driver = make_driver([call("echo"), "4"], tools=[Echo()])
    driver.chat = Chat()
    t = await drive(driver)
    assert t.failure.boundary is Boundary.INFRASTRUCTURE
    assert t.failure.message == "chat: the template has no role tool"


async def test_images_of_a_tool_become_parts_of_its_message():
    t = await drive(make_driver([call("echo"), "4"], tools=[Echo(execute=ToolResponse("see", images=("a.png",)))]))
    assert tool_texts(t) == [[{"type": "text", "text": "see"}, {"type": "image", "image": "a.png"}]]


async def test_arguments_that_cannot_be_read_stand_in_the_message_as_they_were_written():
    written = "<call>echo {bad</call>"
    t = await drive(make_driver([written + call("echo", text="a"), "4"], tools=[Echo()]))
    calls = [c["function"]["arguments"] for c in t.messages[1]["tool_calls"]]
    assert calls == [written, {"text": "a"}]
    json.dumps(t.messages)
