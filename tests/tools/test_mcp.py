"""The tool source `mcp` against a real server of the official package, over both transports, and its ways to die.

A server takes a second to start, so one serves most of the tests; those that kill it find it started again.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from agentrl_tools.mcp import McpSource, connection, endpoint
from fakes import Env, Hooks, call, make_driver
from mcp_help import SERVER, STDIO, ask, offers, session
from processes import alive, eventually
from processes import children as children_of
from serving import serving

from agentrl import ArgumentError, InfrastructureError, Task, Tool
from agentrl.errors import UserError
from agentrl.images import STORE
from agentrl.trajectory import Boundary, FinishReason

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(connection, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(endpoint, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(connection, "_CLOSE_SECONDS", 2.0)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def source() -> AsyncIterator[McpSource]:
    made = McpSource(**STDIO, retries=1)
    made.offered = await made.open()
    yield made
    await made.close()


@pytest.fixture
def tools(source) -> dict[str, Tool]:
    return {tool.name: tool for tool in source.offered}


@asynccontextmanager
async def opened(**arguments) -> AsyncIterator[tuple[dict[str, Tool], McpSource]]:
    source = McpSource(**{**STDIO, **arguments} if "url" not in arguments else arguments)
    try:
        yield {tool.name: tool for tool in await source.open()}, source
    finally:
        await source.close()


@asynccontextmanager
async def http_server(port: int | None = None) -> AsyncIterator[tuple[str, subprocess.Popen]]:
    if port is None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        await eventually(lambda: _answers(port))
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


async def _everything(tools: dict[str, Tool]) -> None:
    assert tools["add"].description == "Add two numbers."
    assert (await ask(tools["add"], a=2)).text == "3"
    assert (await ask(tools["add"], a="2", b="5")).text == "7"
    failed = await ask(tools["fail"], text="no such town")
    assert failed.error
    assert "no such town" in failed.text
    seen = await ask(tools["picture"])
    assert seen.text == "a pixel:"
    assert [STORE.load(STORE.put(image)).size for image in seen.images] == [(1, 1)]
    assert '"towns": 3' in (await ask(tools["facts"])).text
    assert (await ask(tools["odd_name_x"])).text == "odd"
    texts = await asyncio.gather(*(ask(tools["add"], a=i, b=0) for i in range(100)))
    assert [r.text for r in texts] == [str(i) for i in range(100)]


async def test_stdio(tools):
    await _everything(tools)
    assert (await ask(tools["note"])).text == "noted"
    assert len(children_of(SERVER)) == 1


async def test_http_and_a_server_that_is_restarted():
    async with http_server() as (url, process), opened(url=url) as (tools, _):
        await _everything(tools)
        port = int(url.rpartition(":")[2].partition("/")[0])
        slow = asyncio.create_task(ask(tools["slow"], seconds=20))
        await asyncio.sleep(0.2)
        process.kill()
        process.wait()
        with pytest.raises(InfrastructureError, match=r"MCP server http://127.0.0.1:\d+/mcp, tool slow: .+"):
            await slow
        with pytest.raises(InfrastructureError, match="attempt 3 of 3"):
            await ask(tools["add"], a=2)
        async with http_server(port):
            assert (await ask(tools["add"], a=2)).text == "3"


async def test_a_schema_with_references_and_choices(tools):
    travel = tools["travel"]
    where = travel.schema["function"]["parameters"]["properties"]["where"]
    assert list(where) == ["type", "properties", "required", "title"]
    assert where["properties"]["inside"]["properties"] == {"name": {"type": "string"}}
    assert where["properties"]["inside"]["nullable"] is True
    assert (await ask(travel, where={"name": "Rome"})).text == "Rome - None 1"
    nested = {"name": "Italy", "inside": {"name": "Rome"}}
    assert (await ask(travel, where=nested, how="by train", days=3)).text == "Italy Rome by train 3"
    for wrong in ({}, {"where": {"name": ["x"]}}, {"where": {"name": "x"}, "how": "by boat"}, {"wher": {}}):
        with pytest.raises(ArgumentError):
            travel.check(wrong)


async def test_what_the_server_refuses_goes_back_to_the_model(source):
    """Arguments that our checks let through, where the schema is not theirs to read."""
    refused = await source.call("add", {"a": "many"}, session())
    assert refused.error
    unknown = await source.call("nothing", {}, session())
    assert unknown.error
    assert "nothing" in unknown.text


async def test_a_server_that_is_killed_is_started_again_and_nobody_notices(tools):
    first = int((await ask(tools["pid"])).text)
    waiting = [asyncio.create_task(ask(tools["slow"], seconds=0.5)) for _ in range(5)]
    await asyncio.sleep(0.2)
    os.kill(first, signal.SIGKILL)
    assert [r.text for r in await asyncio.gather(*waiting)] == ["at last"] * 5
    second = int((await ask(tools["pid"])).text)
    assert second != first
    assert children_of(SERVER) == [second]


async def test_what_a_dead_server_leaves_behind_is_killed_too(tools):
    """It holds the pipes, so that their end would never come."""
    left = int((await ask(tools["spawn"])).text)
    os.kill(int((await ask(tools["pid"])).text), signal.SIGKILL)
    assert (await ask(tools["add"], a=1)).text == "2"
    await eventually(lambda: not alive(left))


async def test_a_server_that_dies_of_every_call_fails_the_request_and_the_next_is_served(tools):
    hooks = Hooks()
    driver = make_driver([call("die"), "4"], Env(hooks), [tools["die"]])
    dead = await driver.drive(driver.request(Task("a", {}), 0))
    assert (dead.finish, dead.valid, dead.rewards) == (FinishReason.ERROR, False, {})
    assert dead.failure.boundary in (Boundary.TOOL, Boundary.INFRASTRUCTURE)
    assert "exit code 7" in dead.failure.message
    assert "dying as told" in dead.failure.message
    assert not [m for m in dead.messages if m["role"] == "tool"]
    driver = make_driver([call("add", a=3), "4"], Env(hooks), [tools["add"]])
    alive = await driver.drive(driver.request(Task("b", {}), 0))
    assert (alive.valid, alive.messages[2]["content"]) == (True, "4")
    hooks.check()


async def test_a_slow_tool_ends_at_its_deadline_and_the_connection_lives_on(tools):
    before = (await ask(tools["pid"])).text
    script = [call("slow", seconds=60), call("pid"), "4"]
    driver = make_driver(script, Env(), list(tools.values()), tool_timeout=1.5)
    t = await driver.drive(driver.request(Task("a", {}), 0))
    texts = [m["content"] for m in t.messages if m["role"] == "tool"]
    assert t.valid
    assert "did not answer within 1.5 seconds" in texts[0]
    assert texts[1] == before


def _shell(script: str, **more: Any) -> dict[str, Any]:
    return {"command": "sh", "args": ["-c", script, SERVER], **more}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"command": "no-such-command-here", "args": []}, "the command 'no-such-command-here' is not found"),
        (_shell("echo no licence >&2; echo found >&2; exit 3"), r"exit code 3; its last words: no licence \| found$"),
        (
            _shell("echo thinking >&2; sleep 300 & while read x; do :; done", start_timeout=1.0),
            "no answer to the handshake within 1 s; its last words: thinking$",
        ),
        (
            _shell("echo hello; trap '' TERM; while :; do sleep 1; done", start_timeout=0.5),
            "no answer to the handshake",
        ),
        ({"cwd": "/no/such/folder"}, "its cwd /no/such/folder is not a folder"),
        ({"url": "http://127.0.0.1:9/mcp"}, "http://127.0.0.1:9/mcp: Connect"),
        ({"url": "127.0.0.1:9"}, "does not begin with http"),
    ],
)
async def test_a_server_that_cannot_be_had(arguments, what):
    before = children_of(SERVER)
    with pytest.raises(UserError, match=what) as error:
        async with opened(**arguments):
            pass
    assert "\n" not in str(error.value)
    await eventually(lambda: children_of(SERVER) == before)


async def test_what_ignores_every_request_to_end_is_killed():
    made = McpSource(**_shell("trap '' TERM; sleep 300 & echo $! >&2; while :; do sleep 1; done", start_timeout=1.0))
    with pytest.raises(UserError, match=r"last words: \d+$") as error:
        await made.open()
    await eventually(lambda: not alive(int(str(error.value).rpartition(" ")[2])))


async def test_an_http_server_that_refuses_us():
    from aiohttp import web

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401)

    async with serving({"POST /mcp": refuse}) as url:
        with pytest.raises(UserError, match=r"HTTP 401 Unauthorized") as error:
            await McpSource(url=f"{url.replace('//', '//me:secret@')}/mcp").open()
    assert "secret" not in str(error.value)


async def test_cancelled_while_it_opens_it_leaves_no_process():
    before = children_of(SERVER)
    made = McpSource(**_shell("sleep 300 & while read x; do :; done"))
    task = asyncio.create_task(made.open())
    await eventually(lambda: len(children_of(SERVER)) == len(before) + 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await made.close()
    await eventually(lambda: children_of(SERVER) == before)


async def test_a_session_for_each_request():
    """Two requests, each with a server of its own; when the second one's dies, its state is lost with it."""
    before, hooks = children_of(SERVER), Hooks()
    made = McpSource(**STDIO, sessions="per_request")
    tools = made.chosen(offers("bump", "pid", "die"))

    def script(request: str, turn: int) -> str:
        last = call("bump") if "#0" in request else call("die")
        return [call("bump") + call("pid"), last, "4"][turn]

    driver = make_driver(script, Env(hooks), tools)
    whole, broken = await asyncio.gather(*(driver.drive(driver.request(Task("a", {}), i)) for i in range(2)))
    texts = [[m["content"] for m in t.messages if m["role"] == "tool"] for t in (whole, broken)]
    assert (texts[0][0], texts[0][2], texts[1][0], len(texts[1])) == ("1", "2", "1", 2)
    assert texts[0][1] != texts[1][1]
    assert (whole.valid, broken.valid) == (True, False)
    assert "exit code 7" in broken.failure.message
    hooks.check()
    assert children_of(SERVER) == before
    await tools[0].create(session("held"))
    assert len(children_of(SERVER)) == len(before) + 1
    await made.close()
    assert children_of(SERVER) == before


async def test_a_request_that_gets_no_server_of_its_own_fails():
    made = McpSource(**_shell("exit 5"), sessions="per_request", retries=1)
    hooks = Hooks()
    driver = make_driver(["4"], Env(hooks), made.chosen(offers("a", "b")))
    t = await driver.drive(driver.request(Task("a", {}), 0))
    assert (t.valid, t.rewards) == (False, {})
    assert "exit code 5 (attempt 2 of 2)" in t.failure.message


async def test_a_loop_that_was_closed_without_a_word_leaves_no_server():
    """As the thread of a notebook may do it."""
    made = McpSource(**STDIO, include=["pid", "spawn"])
    loop = asyncio.new_event_loop()

    async def there() -> list[int]:
        return [int((await ask(tool)).text) for tool in await made.open()]

    pids = await asyncio.to_thread(loop.run_until_complete, there())
    loop.close()
    assert all(map(alive, pids))
    await made.close()
    await eventually(lambda: not any(map(alive, pids)))


async def test_those_who_wait_for_a_dead_server_share_one_attempt(monkeypatch, tools):
    attempts = []

    async def no_connection(*args):
        attempts.append(args)
        await asyncio.sleep(0.01)
        raise connection.ConnectError("gone for good")

    pid = int((await ask(tools["pid"])).text)
    monkeypatch.setattr(connection, "connect", no_connection)
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not alive(pid))
    outcomes = await asyncio.gather(*(ask(tools["add"], a=i) for i in range(200)), return_exceptions=True)
    assert {type(o) for o in outcomes} == {InfrastructureError}
    assert len(attempts) < 5
