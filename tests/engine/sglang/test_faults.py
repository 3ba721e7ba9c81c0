"""Servers that fail in every way: each ends in a retry, another server or one clear line; the numbers stay right."""

import asyncio
import random
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import aiohttp
import pytest
from processes import eventually
from serving import serving
from sglang_help import GREEDY, PROMPT, StandIn

from agentrl.engine.base import EngineError, Generation, GenerationFinish, Sampling
from agentrl.engine.servers.client import ServerError
from agentrl.engine.servers.engine import ATTEMPTS
from agentrl.engine.servers.fleet import FAULTS
from agentrl.engine.servers.identity import OPENING_TOKENS, PROBE_TOKENS, probe_of
from agentrl.engine.sglang.kind import SglangEngine
from agentrl.errors import UserError

pytestmark = pytest.mark.usefixtures("impatient")


@asynccontextmanager
async def served(parts: Any, *faults: Any, count: int = 1, incremental: bool = True, **args: Any) -> Any:
    """An engine over `count` stand-ins, the first of which has `faults`; (engine, stand-ins, lines said)."""
    model, tokenizer = parts
    said: list[str] = []
    async with AsyncExitStack() as stack:
        servers = [StandIn(model, tokenizer, incremental=incremental) for _ in range(count)]
        for server in servers:
            await stack.enter_async_context(server)
        servers[0].faults = deque(faults)
        engine = SglangEngine(model, max_batch=args.pop("max_batch", 16), tokenizer=tokenizer, say=said.append,
                              urls=tuple(s.url for s in servers), **args)  # fmt: skip
        stack.push_async_callback(engine.close)
        await engine.health()
        yield engine, servers, said


def same(made: Generation, expected: Generation) -> None:
    assert made.ids == expected.ids
    assert made.finish is expected.finish
    assert made.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert made.weight_version == 0


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_healthy_server(parts: Any, expected: Generation, incremental: bool) -> None:
    async with served(parts, incremental=incremental) as (engine, _, _):
        same(await engine.generate(array("i", PROMPT), GREEDY, "x"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("kind", ["cut", "no_json", "few_logprobs", "other_ids", "null_logprob", "lost_piece", "error"])
@pytest.mark.parametrize("after", [0, 2])
async def test_a_piece_goes_wrong(parts: Any, expected: Generation, kind: str, after: int, incremental: bool) -> None:
    """The request goes on after the tokens that came whole, which are sampled and counted once."""
    told: list[int] = []
    async with served(parts, (kind, after), incremental=incremental) as (engine, (server,), _):
        same(await engine.generate(PROMPT, GREEDY, "x", told.extend), expected)
    assert told == expected.ids
    assert server.asked == [PROMPT, PROMPT + expected.ids[: 4 * after]]


@pytest.mark.parametrize("status", [500, 502, 503, 429])
async def test_a_server_error_is_tried_again(parts: Any, expected: Generation, status: int) -> None:
    async with served(parts, ("status", status)) as (engine, (server,), _):
        same(await engine.generate(PROMPT, GREEDY, "x"), expected)
    assert len(server.asked) == 2


async def test_a_refusal_is_final_and_says_why(parts: Any) -> None:
    async with served(parts, ("status", 400)) as (engine, (server,), _):
        with pytest.raises(EngineError, match=r"http://127.0.0.1:\d+/generate: it answers 400: told to fail"):
            await engine.generate(PROMPT, GREEDY, "x")
        assert len(server.asked) == 1
        await engine.generate(PROMPT, GREEDY, "x")


@pytest.mark.slow
async def test_a_server_that_always_fails_is_given_up_in_one_line(parts: Any) -> None:
    faults = [("few_logprobs", 0)] * 100
    async with served(parts, *faults) as (engine, (server,), said):
        with pytest.raises(EngineError, match=r"^http.* 4 ids came with 3 log-probs") as caught:
            await engine.generate(PROMPT, GREEDY, "x")
        assert "\n" not in str(caught.value)
        assert server.url in str(caught.value)
        assert len(server.asked) == ATTEMPTS
    assert any("is taken out" in line for line in said)


async def test_a_dead_server_leaves_its_requests_to_another(parts: Any, expected: Generation) -> None:
    async with served(parts, ("die", 2), count=2) as (engine, (first, second), said):
        made = await asyncio.gather(*(engine.generate(PROMPT, GREEDY, f"{i}") for i in range(8)))
        for one in made:
            same(one, expected)
        assert PROMPT + expected.ids[:8] in second.asked  # on from its tokens so far
        before = len(first.asked)
        await asyncio.gather(*(engine.generate(PROMPT, GREEDY, f"more{i}") for i in range(8)))
        assert len(first.asked) == before
    assert [first.url in line for line in said if "taken out" in line] == [True]


@pytest.mark.slow
async def test_a_server_comes_back(parts: Any, expected: Generation) -> None:
    async with served(parts, ("die", 1), count=2) as (engine, (first, _), said):
        same(await engine.generate(PROMPT, GREEDY, "a"), expected)
        waiting = asyncio.create_task(eventually(lambda: any("is back" in line for line in said)))
        await asyncio.sleep(0.2)
        first.dead = False
        await waiting
        before = len(first.asked)
        await asyncio.gather(*(engine.generate(PROMPT, GREEDY, f"b{i}") for i in range(4)))
        assert len(first.asked) > before


@pytest.mark.slow
async def test_a_server_with_other_weights_stays_out(parts: Any) -> None:
    """It was restarted: its weights have no version of this run, and it takes none."""
    async with served(parts, ("die", 1), count=2) as (engine, (first, _), said):
        await engine.generate(PROMPT, GREEDY, "a")
        first.dead, first.version = False, "default"
        asked = len(first.asked)
        await eventually(lambda: first.calls["/pause_generation"] > 0)
        await asyncio.gather(*(engine.generate(PROMPT, GREEDY, f"b{i}") for i in range(6)))
        assert len(first.asked) == asked
    assert not any("is back" in line for line in said)


@pytest.mark.slow
async def test_a_server_that_never_answers_is_left(parts: Any, expected: Generation) -> None:
    async def one(after: int) -> None:
        async with served(parts, ("hang", after), count=2, stall=3.0) as (engine, (first, second), said):
            same(await engine.generate(PROMPT, GREEDY, "x"), expected)
            assert second.asked == [PROMPT + expected.ids[: 4 * after]]
        assert any("no sign of life" in line and first.url in line for line in said)

    await asyncio.gather(one(0), one(3))


@pytest.mark.slow
async def test_a_loop_of_ours_that_stands_still_is_no_stall(
    parts: Any, expected: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin's code held up the event loop for longer than a server may be silent, while a request was in flight."""
    monkeypatch.setattr("agentrl.engine.servers.fleet.LATE_SECONDS", 0.0)  # also where this machine is slow
    async with served(parts, ("hang", 1), stall=1.0) as (engine, (server,), said):
        made = asyncio.create_task(engine.generate(PROMPT, GREEDY, "x"))
        await eventually(lambda: server.running == 1)
        await asyncio.sleep(0.1)
        time.sleep(1.5)
        server.go_on()
        same(await made, expected)
    assert not any("taken out" in line for line in said), said


class Answers(BaseHTTPRequestHandler):
    """A server's answer to whatever is asked, with the status of the server."""

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """It writes nothing."""


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server in a thread of its own, which no event loop holds up; its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.status = status
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("status", "out"), [(200, False), (500, True)])
async def test_a_loop_of_ours_that_stands_still_takes_out_no_server(
    parts: Any, status: int, out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the server may take for a sign of life after a failed request, each time that it is asked."""
    monkeypatch.setattr("agentrl.engine.servers.fleet.ALIVE_SECONDS", 1.0)
    with answering(status) as url:
        fleet = SglangEngine(parts[0], max_batch=4, urls=url).fleet
        (member,) = fleet.pool.members
        fleet.pool.let_in(member)
        checking = asyncio.create_task(fleet.report_failure(member, ServerError("it failed")))
        while not checking.done():
            await asyncio.sleep(0)
            time.sleep(0 if checking.done() else 1.5)
        await checking
        assert (member.out is not None) is out
        await fleet.close()


async def test_connections_that_our_loop_is_late_for_are_no_faults_of_a_server(parts: Any) -> None:
    with answering(200) as url:
        fleet = SglangEngine(parts[0], max_batch=4, urls=url).fleet
        (member,) = fleet.pool.members
        fleet.pool.let_in(member)
        late = member.client._fault("/generate", aiohttp.ConnectionTimeoutError("Connection timeout to host"))
        for _ in range(FAULTS):
            await fleet.report_failure(member, late)
        assert member.out is None
        for _ in range(FAULTS):
            await fleet.report_failure(member, ServerError("it failed"))
        assert member.out == "it failed"
        await fleet.close()


@pytest.mark.slow
async def test_no_server_is_left(parts: Any) -> None:
    async with served(parts, ("die", 1), patience=0.5) as (engine, (server,), _):
        with pytest.raises(EngineError, match="no SGLang server is left: " + server.url):
            await engine.generate(PROMPT, GREEDY, "x")
        with pytest.raises(EngineError, match="no SGLang server is left"):
            await engine.health()


async def test_a_conversation_stays_where_its_prefix_is(parts: Any) -> None:
    async with served(parts, count=3) as (engine, servers, _):
        for turn in range(3):
            order = random.Random(turn).sample(range(9), 9)  # in which they come to their next turn
            await asyncio.gather(
                *(engine.generate([100 + i, *PROMPT[: turn + 1]], Sampling(3), f"r{i}") for i in order)
            )
        for server in servers:
            assert len(server.asked) == 9  # three conversations of three turns: evenly, and each in one place
            assert len({ids[0] for ids in server.asked}) == 3


@pytest.mark.slow
async def test_bound_of_requests_in_flight(parts: Any) -> None:
    async with served(parts, count=2, max_batch=3) as (engine, servers, _):
        made = await asyncio.gather(*(engine.generate(PROMPT, Sampling(12), f"{i}") for i in range(40)))
        assert [len(m.ids) for m in made] == [12] * 40
        assert [s.most for s in servers] == [3, 3]


@pytest.mark.slow
async def test_abort_while_waiting_for_room(parts: Any) -> None:
    async with served(parts, ("hang", 0), max_batch=1) as (engine, _, _):
        first = asyncio.create_task(engine.generate(PROMPT, GREEDY, "a"))
        await asyncio.sleep(0.2)
        second = asyncio.create_task(engine.generate(PROMPT, GREEDY, "b"))
        await asyncio.sleep(0.1)
        engine.abort("b")
        made = await second
        assert (made.ids, made.finish) == ([], GenerationFinish.ABORT)
        engine.abort("a")  # a server that never answers an abort is not waited for
        assert (await asyncio.wait_for(first, 60)).finish is GenerationFinish.ABORT


async def test_versions_of_each_id(parts: Any) -> None:
    """The server takes new weights while a request is under way, and another one goes on with it."""
    async with served(parts, ("die", 2), count=2) as (engine, (_, second), _):
        second.version = "7"
        made = await engine.generate(PROMPT, GREEDY, "x")
        assert made.weight_version == [0] * 8 + [7] * 16


async def start(parts: Any, **args: Any) -> None:
    engine = SglangEngine(parts[0], max_batch=4, tokenizer=parts[1], **args)
    try:
        await engine.health()
    finally:
        await engine.close()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"urls": ("http://127.0.0.1:1",)}, "engine: http://127.0.0.1:1/model_info: cannot connect"),
        ({"urls": "http://127.0.0.1:1/"}, "engine: http://127.0.0.1:1/model_info: cannot connect"),
        ({"urls": ("127.0.0.1:30000",)}, "engine.args.urls: '127.0.0.1:30000' is not a URL; write http://HOST:PORT"),
        ({"urls": ("http://a b",)}, "http://a b"),
        ({"urls": ("http://x", "http://x/")}, "a server is listed twice"),
        ({"urls": ("http://x",), "servers": 2}, "`urls` are servers that run already"),
        ({"servers": 0}, "engine.args.servers is 0"),
        ({"stall": 0.0, "urls": ("http://x",)}, "engine.args.stall"),
        ({"venv": "/nowhere"}, "engine.args.venv: /nowhere is not a virtual environment"),
        (
            {"command": "no-such-program --x", "model_path": "m"},
            "engine.args.command: there is no program 'no-such-program'",
        ),
        ({"command": "false", "model_path": "m"}, "the server ended as it started"),
    ],
)
async def test_mistakes_in_the_recipe(parts: Any, args: Any, line: str, tmp_path: Any) -> None:
    with pytest.raises(UserError, match=line) as caught:
        await start(parts, log_dir=None if "urls" in args else str(tmp_path), **args)
    assert "\n" not in str(caught.value)


async def test_nothing_says_where_servers_are(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_SGLANG_VENV", raising=False)
    with pytest.raises(UserError, match=r"engine\.args\.urls.*engine\.args\.venv or AGENTRL_SGLANG_VENV"):
        await start(parts)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (
            {"architecture": "Qwen2ForCausalLM"},
            "serves another model: stand-in has a Qwen2ForCausalLM, model.path has a",
        ),
        ({"vocabulary": 1000}, "stand-in has a smaller vocabulary, model.path has 1024 ids"),
        ({"vocabulary": 2000}, "stand-in has a larger vocabulary, model.path has 1024 ids"),
        ({"tokenizer": "other"}, "the tokenizer of http.* is not that of model.path"),
    ],
)
async def test_another_model(parts: Any, how: dict[str, Any], line: str) -> None:
    model, tokenizer = parts
    if how.get("tokenizer"):
        how = {"tokenizer": _Bytes()}
    async with StandIn(model, **{"tokenizer": tokenizer, **how}) as server:
        with pytest.raises(UserError, match=line):
            await start(parts, urls=(server.url,))
        assert not server.asked


async def test_other_weights_that_cannot_be_replaced(parts: Any) -> None:
    async with StandIn(parts[0], parts[1], shift=-0.5) as server:
        with pytest.raises(UserError, match=f"engine: {server.url}"):
            await start(parts, urls=(server.url,))
        assert server.calls["/pause_generation"] > 0  # ours were offered


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("dtype", "shift", "given", "fine"),
    [
        ("bfloat16", -0.05, False, True),  # it rounds
        ("bfloat16", -0.3, True, True),  # it rounds much, or is another step's: it is given ours, and believed
        ("bfloat16", -1.2, True, False),  # it samples from others whatever it is given
        ("float32", -0.01, True, False),
        ("", -0.01, True, False),
    ],
)
async def test_a_right_server_is_not_refused_for_how_it_rounds(
    parts: Any, dtype: str, shift: float, given: bool, fine: bool
) -> None:
    async with StandIn(parts[0], parts[1], shift=shift, dtype=dtype, takes_weights=True) as server:
        if fine:
            await start(parts, urls=(server.url,))
        else:
            with pytest.raises(
                UserError, match=r"nats in the mean, and (0\.5|0\.001) is allowed, also after it was given"
            ):
                await start(parts, urls=(server.url,))
        assert (server.calls["/pause_generation"] > 0) == given


@pytest.mark.slow
def test_what_the_model_expects_is_compared(parts: Any) -> None:
    """Tokens that it samples, where two kernels agree best, not those of the vocabulary's tail."""
    for probe in (probe_of(*parts), probe_of(parts[0])):
        assert len(probe.ids) == PROBE_TOKENS == len(probe.logprobs) + OPENING_TOKENS
        assert sum(probe.logprobs) / len(probe.logprobs) > -4  # random ids have -10 here
        assert probe_of(parts[0]) == probe_of(parts[0])
        assert probe.on("bfloat16").limit > probe.limit == probe.on("float32").limit


async def test_a_late_server_is_not_a_lost_one(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an update: a thread of ours may have held the event loop. One that is gone is left out."""
    monkeypatch.setattr("agentrl.engine.servers.fleet.UPDATE_SECONDS", 0.05)
    model, tokenizer = parts
    said: list[str] = []
    async with AsyncExitStack() as stack:
        servers = [StandIn(model, tokenizer, takes_weights=True) for _ in range(2)]
        for server in servers:
            await stack.enter_async_context(server)
        urls = tuple(server.url for server in servers)
        engine = SglangEngine(model, max_batch=4, tokenizer=tokenizer, say=said.append, urls=urls)
        stack.push_async_callback(engine.close)
        await engine.health()
        before, servers[0].late = servers[0].calls["/model_info"], 0.2
        await engine.update_weights(1)
        assert servers[0].calls["/model_info"] == before + 2
        assert [server.version for server in servers] == ["1", "1"]
        assert not any("taken out" in line for line in said)
        servers[0].late, servers[1].dead = 0.0, True
        await engine.update_weights(2)
        assert [servers[1].url in line for line in said if "taken out" in line] == [True]


@pytest.mark.parametrize(("args", "mode", "flush"), [({}, "retract", True), ({"pause": "in_place"}, "in_place", False)])
async def test_requests_in_flight_go_on_as_the_recipe_says(parts: Any, args: Any, mode: str, flush: bool) -> None:
    """Over the keys and values of the old weights, or over new ones."""
    async with StandIn(parts[0], parts[1], takes_weights=True) as server:
        engine = SglangEngine(parts[0], max_batch=4, tokenizer=parts[1], urls=server.url, **args)
        await engine.health()
        await engine.update_weights(1)
        await engine.close()
        assert server.taken["/pause_generation"] == {"mode": mode}
        assert server.taken["/update_weights_from_tensor"]["flush_cache"] is flush


async def test_a_server_of_another_kind(parts: Any) -> None:
    async with serving({}) as url:
        with pytest.raises(UserError, match="does not speak SGLang's API"):
            await start(parts, urls=(url,))


class _Bytes:
    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())
