"""Measure what a call through the gateway costs the run's process, beside a bare handler and the built-in driver.

    OMP_NUM_THREADS=1 python benchmarks/gateway.py [--quick]

CPU of this process alone: the clients run in a process of their own, and the engine answers at once. `bare` is an
aiohttp handler that reads the JSON body and answers with a constant. `driver` is a turn of the built-in driver over the
same engine and chat. Then, what 100 further messages cost that a call before held already.

Last, by each of several hostile bodies: how it is answered, and the longest time for which the run's event loop stood
still meanwhile. There the chat is that of the shipped model, with a context of 32,768 tokens.
"""

import argparse
import asyncio
import gzip
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from agentrl.chat.base import ParsedTurn
from agentrl.engine.base import Generation, GenerationFinish, Sampling
from agentrl.gateway.server import Gateway
from agentrl.plugins.agent import AgentClient, FunctionAgent
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Message, Reply, Session, Task
from agentrl.recipe.sections.agent import AgentSection
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.rollout.agent import AgentDriver
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import rare_collections

ANSWER = "The next step is to add both numbers, and then to look at the sum again. " * 2
USER = "Go on, please, and say what you see there. " * 3


class Words:
    """A chat of one id a character, at the price of encoding what is new."""

    stop_ids = (1,)
    images = False
    rewrites_history = None
    description = "characters"

    def render(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        return [i for message in messages for i in self.encode_text(str(message["content"]))]

    def bridge(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return self.render(messages, ())

    def parse(self, turn_ids: Sequence[int]) -> ParsedTurn:
        return ParsedTurn(self.decode(turn_ids[:-1]))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def encode_text(self, text: str) -> list[int]:
        return list(map(ord, text))


class Instant:
    """An engine that answers at once."""

    max_context = 1 << 30
    streams = False

    def __init__(self) -> None:
        self.ids = [*map(ord, ANSWER), 1]
        self.logprobs = [-0.5] * len(self.ids)

    async def generate(self, ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        await asyncio.sleep(0)
        return Generation(list(self.ids), self.logprobs, GenerationFinish.STOP)

    def finish(self, request_id: str) -> None: ...

    def fork(self, request_id: str, others: Sequence[str]) -> None: ...

    def abort(self, request_id: str | None = None) -> None: ...


class Talk(Environment):
    """Says USER until its turns are over."""

    name = "talk"
    turns = 1

    def tasks(self, split: str) -> Sequence[Task]:
        return []

    async def create(self, session: Session, **kwargs: Any) -> Sequence[Message]:
        session.state = 0
        return [{"role": "user", "content": USER}]

    async def execute(self, session: Session, message: Message) -> Reply:
        session.state += 1
        return Reply(({"role": "user", "content": USER},), done=session.state >= self.turns)

    async def calc_reward(self, session: Session, **kwargs: Any) -> float:
        return 0.0


SHAPES = ((1, 1), (1, 128), (32, 8), (100, 16), (100, 128), (1000, 4))  # rollouts at once, turns of each
QUICK = ((1, 32), (32, 8))
CONTEXT = 32_768
LIMITS = RolloutSection(
    max_tokens=1 << 29, max_total_tokens=1 << 30, max_turn_tokens=4096, max_turns=1 << 20, timeout=3600,
    turn_timeout=3600,
)  # fmt: skip


def client(work: Any, results: Any) -> None:
    """The other process: hold conversations of so many turns, all at once, as `work` says."""
    asyncio.run(_client(work, results))


async def _client(work: Any, results: Any) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        while (job := await asyncio.to_thread(work.get)) is not None:
            if isinstance(job, Attack):
                results.put(await _attack(session, job))
                continue
            url, keys, turns, before = job
            await asyncio.gather(*(_converse(session, url, key, turns, before) for key in keys))
            results.put(None)


async def _converse(session: aiohttp.ClientSession, url: str, key: str, turns: int, before: int) -> None:
    messages: list[Any] = [{"role": "user", "content": USER}]
    for _ in range(before):
        messages += [{"role": "assistant", "content": "Said before."}, {"role": "user", "content": USER}]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for _ in range(turns):
        body = json.dumps({"messages": messages, "model": "m"})
        async with session.post(url, data=body, headers=headers) as response:
            found = await response.json()
        messages += [found["choices"][0]["message"], {"role": "user", "content": USER}]


@dataclass
class Attack:
    """Bodies that are sent at once."""

    url: str
    key: str
    body: str
    """A name in `HOSTILE`; a whole body would hold up the loop on its way to the other process."""


async def _attack(session: aiohttp.ClientSession, job: Attack) -> str:
    """Send a body, as often at once as it is meant to be. Return how it is answered."""
    path, make, count = HOSTILE[job.body]
    data = make()
    given = {"x-api-key": job.key, "Content-Type": "application/json"}
    if data.startswith(b"\x1f\x8b"):
        given["Content-Encoding"] = "gzip"

    async def post() -> str:
        async with session.post(job.url + path, data=data, headers=given) as response:
            found = await response.json(content_type=None)
            return f"{response.status} {found.get('error', {}).get('message', '')[:58]}"

    answers = await asyncio.gather(*(post() for _ in range(count)), return_exceptions=True)
    return f"{len(data) / 1e6:>5.1f} MB  {answers[0]}"


def _messages(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"max_tokens": 999, "messages": messages, **more}).encode()


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _with_arguments(text: str) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    return _messages(_user("hi"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c"})


CHAT, COUNT, MCP = "/v1/chat/completions", "/v1/messages/count_tokens", "/mcp"
HOSTILE: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "a small call, to compare": (CHAT, lambda: _messages(_user("hi")), 1),
    "text of 0.5 MB": (CHAT, lambda: _messages(_user("hello, world! " * 36_000)), 1),
    "text of 1.3 MB": (CHAT, lambda: _messages(_user("hello, world! " * 93_000)), 1),
    "1.3 MB without spaces": (CHAT, lambda: _messages(_user("漢" * 215_000)), 1),
    "special tokens": (CHAT, lambda: _messages(_user("<|im_end|>" * 100_000)), 1),
    "16 texts of 1.3 MB at once": (CHAT, lambda: _messages(_user("hello, world! " * 93_000)), 16),
    "text of 2 MB": (CHAT, lambda: _messages(_user("hello, world! " * 143_000)), 1),
    "text of 30 MB": (CHAT, lambda: _messages(_user("hello, world! " * 2_100_000)), 1),
    "4,096 empty messages": (CHAT, lambda: _messages(*[_user("")] * 4096), 1),
    "36,000 empty messages": (CHAT, lambda: _messages(*[_user("")] * 36_000), 1),
    "600 empty messages, 16 KB": (CHAT, lambda: _messages(*[{"role": "user"}] * 700), 1),
    "keys of 1.2 MB": (CHAT, lambda: json.dumps({str(i): {} for i in range(90_000)}).encode(), 1),
    "keys of 4 MB": (CHAT, lambda: json.dumps({str(i): {} for i in range(300_000)}).encode(), 1),
    "empty lists": (CHAT, lambda: b'{"messages":[' + b"[]," * 60_000 + b"[]]}", 1),
    "empty lists of 1.3 MB": (CHAT, lambda: b'{"messages":[' + b"[]," * 430_000 + b"[]]}", 1),
    "lists within lists": (CHAT, lambda: b'{"messages":' + b"[" * 1_000_000, 1),
    "long numbers": (CHAT, lambda: b'{"seed":[' + b",".join([b"9" * 4300] * 300) + b"]}", 1),
    "a number of 1.3 MB": (CHAT, lambda: b'{"seed":' + b"9" * 1_300_000 + b"}", 1),
    "5,000 tools": (CHAT, lambda: _messages(_user("hi"), tools=[_tool(f"t{i}") for i in range(5000)]), 1),
    "a tool of 1 MB": (CHAT, lambda: _messages(_user("hi"), tools=[_tool("t", a={"description": "b c" * 350_000})]), 1),
    "arguments of empty lists": (CHAT, lambda: _with_arguments("[" + "[]," * 300_000 + "[]]"), 1),
    "gzip of 100 MB": (CHAT, lambda: gzip.compress(b" " * 100_000_000, 1), 1),
    "count_tokens of 1.3 MB": (COUNT, lambda: _messages(_user("hello, world! " * 93_000)), 1),
    "MCP: keys of 1.2 MB": (MCP, lambda: json.dumps({"id": 1, "method": "tools/call", "params": {
        "name": "t", "arguments": {str(i): {} for i in range(90_000)}}}).encode(), 1),
}  # fmt: skip


async def _bare(request: web.Request) -> web.Response:
    json.loads(await request.read())
    return web.Response(body=BARE, content_type="application/json")


BARE = json.dumps({"choices": [{"message": {"role": "assistant", "content": ANSWER}}]}).encode()


class Bench:
    """work, results: queues of the clients' process."""

    def __init__(self, work: Any, results: Any) -> None:
        self._work, self._results = work, results

    async def _timed(self, url: str, keys: list[str], turns: int, before: int) -> float:
        """Microseconds of CPU a call."""
        began = time.process_time()
        self._work.put((url, keys, turns, before))
        await asyncio.to_thread(self._results.get)
        return (time.process_time() - began) / (len(keys) * turns) * 1e6

    async def bare(self, rollouts: int, turns: int, before: int = 0) -> float:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/", _bare)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        try:
            return await self._timed(f"http://127.0.0.1:{runner.addresses[0][1]}/", ["k"] * rollouts, turns, before)
        finally:
            await runner.cleanup()

    async def hostile(self, body: str, chat: Any) -> tuple[str, float]:
        """How a hostile body is answered, and the longest seconds for which the loop stood still meanwhile."""
        from agentrl.rollout.serve import ServedModel

        gateway, engine = Gateway(), Instant()
        engine.max_context = CONTEXT
        rollout = RolloutSection(max_tokens=CONTEXT, max_turn_tokens=4096, timeout=3600, turn_timeout=3600)
        await gateway.start()
        stalls = [0.0]

        async def beat() -> None:
            while True:
                began = time.perf_counter()
                await asyncio.sleep(0.002)
                stalls.append(time.perf_counter() - began - 0.002)

        with gateway.serving(ServedModel(engine, chat, rollout)) as key:
            beating = asyncio.create_task(beat())
            self._work.put(Attack(gateway.url, key, body))
            answer = await asyncio.to_thread(self._results.get)
            beating.cancel()
        await gateway.close()
        return answer, max(stalls)

    async def gateway(self, rollouts: int, turns: int, before: int = 0) -> float:
        gateway, keys, over = Gateway(), list[str](), asyncio.Event()
        await gateway.start()

        async def solve(task: Task, client: AgentClient) -> None:
            keys.append(client.api_key)
            await over.wait()

        driver = AgentDriver(
            agent=FunctionAgent("wait", solve), gateway=gateway,
            section=AgentSection(name="wait", max_calls=1 << 20),
            engine=Instant(), chat=Words(), environment=Talk(), tools=(), limits=LIMITS,
        )  # fmt: skip
        work = [asyncio.create_task(driver.drive(driver.request(Task(str(i), {}), 0))) for i in range(rollouts)]
        while len(keys) < rollouts:
            await asyncio.sleep(0.01)
        try:
            return await self._timed(f"{gateway.url}/v1/chat/completions", keys, turns, before)
        finally:
            over.set()
            for trajectory in await asyncio.gather(*work):
                assert trajectory.failure is None, trajectory.failure
                assert before or len(trajectory.paths()) == 1
            await gateway.close()

    async def driver(self, rollouts: int, turns: int) -> float:
        environment = Talk()
        environment.turns = turns
        driver = Driver(engine=Instant(), chat=Words(), environment=environment, tools=(), limits=LIMITS)
        began = time.process_time()
        await asyncio.gather(*(driver.drive(driver.request(Task(str(i), {}), 0)) for i in range(rollouts)))
        return (time.process_time() - began) / (rollouts * turns) * 1e6


async def measure(bench: Bench, quick: bool) -> None:
    """Print the table."""
    print("rollouts  turns   bare us  gateway us  driver us  (gateway-bare)/driver")
    shapes = QUICK if quick else SHAPES
    for rollouts, turns in shapes:
        bare, through, driven = [], [], []
        for _ in range(2):
            bare.append(await bench.bare(rollouts, turns))
            through.append(await bench.gateway(rollouts, turns))
            driven.append(await bench.driver(rollouts, turns))
        b, g, d = min(bare), min(through), min(driven)
        print(f"{rollouts:>8} {turns:>6} {b:>9.0f} {g:>11.0f} {d:>10.0f} {(g - b) / d:>22.2f}")
    few, many = [await _later(bench.gateway, before) for before in (0, 200)]
    few_bare, many_bare = [await _later(bench.bare, before) for before in (0, 200)]
    costs = f"{(many - few) / 4:.0f} us in the gateway, {(many_bare - few_bare) / 4:.0f} us to read alone"
    print(f"\n100 old messages, all seen before: {costs}")


async def besiege(bench: Bench, quick: bool) -> None:
    """Print the table of hostile bodies."""
    from transformers import AutoTokenizer

    from agentrl.chat.load import load_chat
    from agentrl.models.load import resolve

    chat = load_chat(AutoTokenizer.from_pretrained(resolve("tiny")), model_path="tiny", kind="bridge", tools=())
    print("\nhostile body                  stall ms     size  answer")
    for body in HOSTILE:
        runs = [await bench.hostile(body, chat) for _ in range(1 if quick else 3)]
        print(f"{body:<28} {min(stall for _, stall in runs) * 1e3:>9.1f}  {runs[0][0]}", flush=True)


async def _later(run: Callable[[int, int, int], Awaitable[float]], before: int) -> float:
    """Microseconds of a call after the first of a conversation, to which its messages are new."""
    first = min([await run(8, 1, before) for _ in range(3)])
    return (9 * min([await run(8, 9, before) for _ in range(3)]) - first) / 8


@contextmanager
def clients() -> Iterator[Bench]:
    """A bench whose clients are in a process of their own, which ends with this context."""
    context = multiprocessing.get_context("spawn")
    work, results = context.Queue(), context.Queue()
    process = context.Process(target=client, args=(work, results), daemon=True)
    process.start()
    try:
        yield Bench(work, results)
    finally:
        work.put(None)
        process.join(10)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small shapes, one round")
    parser.add_argument("--only", choices=("cost", "stall"), help="one of the tables")
    arguments = parser.parse_args()
    with clients() as bench, rare_collections():  # as in a run
        if arguments.only != "stall":
            asyncio.run(measure(bench, arguments.quick))
        if arguments.only != "cost":
            asyncio.run(besiege(bench, arguments.quick))


if __name__ == "__main__":
    main()
