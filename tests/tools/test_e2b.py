"""The backend `e2b`: the real SDK in its debug mode, against a server on loopback that really runs the code."""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from agentrl_tools.python import Python
from agentrl_tools.sandbox import Limits, SandboxSession, Stop, make_sandbox
from agentrl_tools.sandbox import e2b as backend
from agentrl_tools.sandbox.e2b import E2bSandbox
from aiohttp import web
from serving import serving

from agentrl import InfrastructureError, UserError

pytestmark = pytest.mark.usefixtures("bubblewrap")


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """One that is free, in place of the SDK's own, which other processes of this machine may be given."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
    monkeypatch.setattr("e2b_code_interpreter.code_interpreter_async.JUPYTER_PORT", number)
    return number


class Service:
    """Speaks the protocol; `faults` says what the next calls of a path come to instead of an answer."""

    def __init__(self) -> None:
        self.sandbox = make_sandbox("bwrap", limits=Limits(wall_seconds=20, output=1 << 20), pool=0)
        self.contexts: dict[str, SandboxSession] = {}
        self.faults: dict[str, list[str]] = {}
        self.seen: list[str] = []

    def routes(self) -> dict[str, Any]:
        restart = "POST /contexts/{id}/restart"
        return {"POST /contexts": self.create, restart: self.restart, "POST /execute": self.execute}

    @web.middleware
    async def faulty(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.seen.append(request.path)
        fault = self.faults.get(request.path, [])
        match fault.pop(0) if fault else "":
            case "500":
                return web.Response(status=500, text="out of order")
            case "502":
                return web.Response(status=502, text="no such sandbox")
            case "disconnect":
                response = web.StreamResponse()
                await response.prepare(request)
                await response.write(b'{"type": "stdout", "text": "half", "timestamp": 0}\n')
                request.transport.abort()
                return response
            case "nonsense":
                return web.Response(text="<html>\n")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def create(self, request: web.Request) -> web.Response:
        name = f"c{len(self.contexts)}"
        self.contexts[name] = await self.sandbox.open()
        return web.json_response({"id": name, "language": "python", "cwd": "/tmp"})

    async def restart(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        await self.contexts[name].close()
        self.contexts[name] = await self.sandbox.open()
        return web.json_response({})

    async def execute(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        execution = await self.contexts[asked["context_id"]].run(asked["code"])
        lines: list[dict[str, Any]] = []
        for kind in ("stdout", "stderr"):
            if text := getattr(execution, kind):
                lines.append({"type": kind, "text": text, "timestamp": 0})
        for image in execution.images:
            lines.append({"type": "result", "text": "Image", "png": base64.b64encode(image).decode()})
        if execution.value is not None:
            lines.append({"type": "result", "text": execution.value, "is_main_result": True})
        if execution.error:
            told = f"\x1b[31m{execution.error}\x1b[0m"
            lines.append({"type": "error", "name": "Error", "value": "", "traceback": told})
        for line in lines:
            await response.write(json.dumps(line).encode() + b"\n")
        await response.write_eof()
        return response


@pytest.fixture
async def service(port: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setenv("E2B_DEBUG", "true")
    monkeypatch.setattr(backend, "_PAUSE", 0.01)
    service = Service()
    more = {"middlewares": [service.faulty], "handler_cancellation": True}
    async with serving(service.routes(), port, "localhost", **more):
        yield service
    await service.sandbox.close()


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sandboxes that the SDK was asked to kill; in debug mode it does no more than that."""
    from e2b_code_interpreter import AsyncSandbox

    killed: list[str] = []

    async def kill(self: Any) -> bool:
        killed.append(self.sandbox_id)
        return True

    monkeypatch.setattr(AsyncSandbox, "kill", kill)
    return killed


async def test_state_output_value_and_error(service: Service, kills: list[str]) -> None:
    sandbox = make_sandbox("e2b")
    async with sandbox.session() as session:
        assert (await session.run("x = 20")).ok
        execution = await session.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nx + 1")
        assert (execution.stdout, execution.stderr, execution.value) == ("out\n", "err\n", "21")
        failed = await session.run("1 / 0")
        assert failed.error.startswith("Traceback")  # without its colours
        assert failed.error.endswith("ZeroDivisionError: division by zero")
        assert kills == []
    assert len(kills) == 1


async def test_images(service: Service, kills: list[str]) -> None:
    async with make_sandbox("e2b").session() as session:
        execution = await session.run("display(b'\\x89PNG\\r\\n\\x1a\\n1234')\n'value'")
        assert execution.images == (b"\x89PNG\r\n\x1a\n1234",)
        assert execution.value == "'value'"


def test_images_of_the_services_results() -> None:
    heard = backend._Heard()
    png, jpeg = (base64.b64encode(data).decode() for data in (b"\x89PNG\r\n\x1a\n1", b"\xff\xd8\xff2"))
    heard.results = [
        SimpleNamespace(png=png, jpeg=None, text="Image", is_main_result=False),
        SimpleNamespace(png=None, jpeg=jpeg, text="Image", is_main_result=True),
        SimpleNamespace(png="a", jpeg=None, text="Image", is_main_result=False),
        SimpleNamespace(png=None, jpeg=None, text="shown", is_main_result=False),
    ]
    found = heard.execution(Limits(), None, lost_before=False, seconds=0.0)
    assert found.images == (b"\x89PNG\r\n\x1a\n1", b"\xff\xd8\xff2", b"a")
    assert (found.stdout, found.value, found.cut) == ("shown\n", None, False)
    few = heard.execution(Limits(images=1), None, lost_before=False, seconds=0.0)
    assert (few.images, few.cut) == (found.images[:1], True)


async def test_a_timeout_is_told_and_the_next_call_works(service: Service, kills: list[str]) -> None:
    async with make_sandbox("e2b").session() as session:
        await session.run("x = 1")
        execution = await session.run("import time\ntime.sleep(60)", seconds=0.3)
        assert execution.stop is Stop.WALL
        assert execution.lost
        assert "NameError" in ((await session.run("x")).error or "")
        assert (await session.run("1 + 1")).value == "2"
    assert "/contexts/c0/restart" in service.seen


async def test_a_timeout_is_told_though_the_client_swallows_it(
    service: Service, kills: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from e2b_code_interpreter import AsyncSandbox

    async def swallow(self: Any, code: str, **options: Any) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    async with make_sandbox("e2b").session() as session:
        with monkeypatch.context() as patch:
            patch.setattr(AsyncSandbox, "run_code", swallow)
            assert (await session.run("1", seconds=0.1)).stop is Stop.WALL
        assert (await session.run("1 + 1")).value == "2"


async def test_a_cancelled_call_leaves_an_interpreter_that_works(service: Service, kills: list[str]) -> None:
    async with make_sandbox("e2b").session() as session:
        call = asyncio.create_task(session.run("import time\ntime.sleep(60)"))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        execution = await session.run("1 + 1")
        assert execution.value == "2"
        assert execution.lost_before


@pytest.mark.parametrize("fault", ["500", "502", "disconnect", "nonsense"])
async def test_failures_of_the_service_are_not_the_models(service: Service, kills: list[str], fault: str) -> None:
    async with make_sandbox("e2b").session() as session:
        service.faults["/execute"] = [fault]
        with pytest.raises(InfrastructureError, match="e2b failed to run code"):
            await session.run("1 + 1")
    assert len(kills) == 1


async def test_opening_is_tried_again_and_then_fails(service: Service, kills: list[str]) -> None:
    service.faults["/contexts"] = ["500", "500"]
    async with make_sandbox("e2b").session() as session:
        assert (await session.run("1 + 1")).value == "2"
    service.faults["/contexts"] = ["500"] * 3
    with pytest.raises(InfrastructureError, match="500"):
        await make_sandbox("e2b").open()
    assert len(kills) == 2


async def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_DEBUG", "true")
    monkeypatch.setattr(backend, "_PAUSE", 0.01)
    with pytest.raises(InfrastructureError, match="failed to create a context"):
        await make_sandbox("e2b").open()


async def test_prints_too_much(service: Service, kills: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_LOUD", 10_000)
    async with make_sandbox("e2b", limits=Limits(output=1000)).session() as session:
        execution = await session.run("print('x' * 50_000)")
        assert execution.stop is Stop.OUTPUT
        assert len(execution.stdout) < 1200
        execution = await session.run("print('x' * 5000)")
        assert execution.ok
        assert execution.cut


async def test_close_kills_the_sessions_that_are_open(service: Service, kills: list[str]) -> None:
    sandbox = make_sandbox("e2b")
    await sandbox.open()
    await sandbox.open()
    await sandbox.close()
    assert len(kills) == 2


def test_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    monkeypatch.delenv("E2B_DEBUG", raising=False)
    with pytest.raises(UserError, match="E2B_API_KEY"):
        Python(backend="e2b")


def test_auto_falls_to_the_service_where_there_is_no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    monkeypatch.delenv("E2B_DEBUG", raising=False)
    with pytest.raises(UserError, match="bubblewrap is not installed"):
        make_sandbox()
    monkeypatch.setenv("E2B_API_KEY", "e2b_0")
    assert isinstance(make_sandbox(), E2bSandbox)
