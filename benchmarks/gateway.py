"""Measure what a call through the gateway costs the run's process, beside a bare handler and the built-in driver.

    OMP_NUM_THREADS=1 python benchmarks/gateway.py [--quick]

CPU of this process alone: the clients run in a process of their own, and the engine answers at once. `bare` is an
aiohttp handler that reads the JSON body and answers with a constant. `driver` is a turn of the built-in driver over the
same engine and chat. Last, what 100 further messages cost that a call before held already.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from agentrl.chat.base import ParsedTurn
from agentrl.engine.base import Generation, GenerationFinish, Sampling
from agentrl.gateway.server import Gateway
from agentrl.plugins.agent import AgentClient, FunctionAgent
from agentrl.plugins.environment import Environment
from agentrl.plugins.types import Message, Reply, Session, Task
from agentrl.recipe.schema import AgentSection, RolloutSection
from agentrl.rollout.agent import AgentDriver
from agentrl.rollout.driver import Driver

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
LIMITS = RolloutSection(max_tokens=1 << 29, max_turn_tokens=4096, max_turns=1 << 20, timeout=3600, turn_timeout=3600)


def client(work: Any, results: Any) -> None:
    """The other process: hold conversations of so many turns, all at once, as `work` says."""
    asyncio.run(_client(work, results))


async def _client(work: Any, results: Any) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        while (job := await asyncio.to_thread(work.get)) is not None:
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

    async def gateway(self, rollouts: int, turns: int, before: int = 0) -> float:
        gateway, keys, over = Gateway(), list[str](), asyncio.Event()
        await gateway.start()

        async def solve(task: Task, client: AgentClient) -> None:
            keys.append(client.api_key)
            await over.wait()

        driver = AgentDriver(
            agent=FunctionAgent("wait", solve), gateway=gateway,
            section=AgentSection(name="wait", max_calls=1 << 20, max_total_tokens=1 << 30),
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


async def _later(run: Callable[[int, int, int], Awaitable[float]], before: int) -> float:
    """Microseconds of a call after the first of a conversation, to which its messages are new."""
    first = min([await run(8, 1, before) for _ in range(3)])
    return (9 * min([await run(8, 9, before) for _ in range(3)]) - first) / 8


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small shapes")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    work, results = context.Queue(), context.Queue()
    process = context.Process(target=client, args=(work, results), daemon=True)
    process.start()
    try:
        asyncio.run(measure(Bench(work, results), arguments.quick))
    finally:
        work.put(None)
        process.join(10)


if __name__ == "__main__":
    main()
