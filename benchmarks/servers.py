"""What a token that servers sample costs the run's own process: CPU time from the request to the batch.

    python benchmarks/servers.py                       both kinds of servers, as the engine asks them
    python benchmarks/servers.py --kind vllm           one kind
    python benchmarks/servers.py --interval 16         smaller pieces
    python benchmarks/servers.py --rate 100000         more tokens a second

Eight servers in another process answer with pieces that are made beforehand, in the form in which SGLang 0.5.23 and
vLLM 0.32 send them, so many a second that all answers together are `--rate` tokens a second. Answers have 500, 1,000,
2,000 and 4,000 tokens. Each row is the CPU time of this process for

- reading: the streams read and checked, and nothing else;
- engine: the same by `ServerEngine.generate`, with 2,000 tokens of prompt;
- turns: the same with answers of 200 tokens after 8,000, as late turns of an agent are;
- rollout: conversations of three turns by the driver: a tool's call, another one, an answer; each prompt holds what
  came before it, so that more is sent than is read. With trajectories, rewards and the journal of what is in flight;
- step: what comes on top at the end of the step: the file of trajectories, metrics, the batch.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from array import array
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from driver import Question, build_chat, history_text, multiply, qwen3_tokenizer
from transformers import AutoModelForCausalLM, Qwen3Config

from agentrl.compute.batch import Batch
from agentrl.engine.base import GenerationFinish, Sampling
from agentrl.engine.servers import answer as wire
from agentrl.engine.servers.answer import Answer, Features, Wanted
from agentrl.engine.servers.client import Client, Sessions
from agentrl.engine.servers.engine import ServerEngine
from agentrl.engine.sglang.kind import SglangEngine
from agentrl.engine.vllm.kind import VllmEngine
from agentrl.plugins.types import Task
from agentrl.recipe.sections.rollout import RolloutSection
from agentrl.recipe.sections.track import TrajectoriesSection
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import rare_collections, roll_out
from agentrl.rollout.journal import Journal
from agentrl.rollout.metrics import rollout_metrics
from agentrl.weights.request import WeightRequest, WeightResult

ENGINES: dict[str, type[ServerEngine]] = {"sglang": SglangEngine, "vllm": VllmEngine}
SERVERS = 8
LENGTHS = 500, 1000, 2000, 4000
PROMPT = 2000
TURNS = 3
VOCABULARY = 151_936
FEATURES = Features(incremental=True)
STAGES = "reading", "engine", "turns", "rollout", "step"
SHORT, SHORT_PROMPT, SHORT_ANSWER = 7, 8000, 200
"""First id of a prompt that is answered shortly, its tokens, and those of the answer."""


class Spoken:
    """What a kind of server says. ids: of an answer that calls the tool, by its length, and of one that does not."""

    def __init__(self, kind: str, interval: int) -> None:
        self._kind, self._interval = kind, interval
        tokenizer = qwen3_tokenizer()
        _, call, last = build_chat("bridge", PROMPT)
        words = tokenizer.encode(history_text(max(LENGTHS)), add_special_tokens=False)
        self._pieces: dict[tuple[int, bool], list[bytes]] = {}
        for length in (*LENGTHS, SHORT_ANSWER):
            for calls, end in ((True, call.ids), (False, last.ids)):
                self._pieces[length, calls] = self._spoken(tokenizer, words[: length - len(end)] + end)

    def of(self, body: Mapping[str, Any]) -> list[bytes]:
        """The pieces that answer a request, by the length of its prompt: the first turns call the tool."""
        ids = body["input_ids" if self._kind == "sglang" else "token_ids"]
        if ids[0] == SHORT:
            return self._pieces[SHORT_ANSWER, False]
        chance = random.Random(len(ids))
        turn = (len(ids) > PROMPT + 400) + (len(ids) > PROMPT + 3000)
        length = LENGTHS[chance.randrange(len(LENGTHS))] if not turn else LENGTHS[(len(ids) // 7) % len(LENGTHS)]
        return self._pieces[length, turn < TURNS - 1]

    def _spoken(self, tokenizer: Any, ids: list[int]) -> list[bytes]:
        pieces = []
        for start in range(0, len(ids), self._interval):
            end = min(start + self._interval, len(ids))
            made = (self._sglang if self._kind == "sglang" else self._vllm)(tokenizer, ids[start:end], end, len(ids))
            pieces.append(b"data: " + json.dumps(made, separators=(",", ":")).encode() + b"\n\n")
        return [*pieces, b"data: [DONE]\n\n"]

    def _sglang(self, tokenizer: Any, ids: list[int], end: int, total: int) -> dict[str, Any]:
        last = end == total
        pairs = [[-0.6931471824645996 - i % 7, i, None] for i in ids]
        spans = {"weight_versions": [{"version": "3", "start": 0, "end": total}]} if last else {}
        meta = {
            "id": "0123456789abcdef0123456789abcdef",
            "finish_reason": {"type": "stop", "matched": ids[-1]} if last else None,
            "prompt_tokens": PROMPT, "weight_version": "3", "num_retractions": 0, "input_token_logprobs": [],
            "output_token_logprobs": pairs, "output_token_logprobs_length": end, "reasoning_tokens": 0,
            "completion_tokens": end, "cached_tokens": 1984, **spans, "e2e_latency": 3.141592,
        }  # fmt: skip
        return {"text": tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}

    def _vllm(self, tokenizer: Any, ids: list[int], end: int, total: int) -> dict[str, Any]:
        last, content = end == total, []
        for i in ids:
            one = {"token_id": i, "logprob": -0.6931471824645996 - i % 7, "rank": 1 + i % 5}
            content.append({**one, "top_logprobs": [one]})
        choice = {
            "index": 0, "finish_reason": "stop" if last else None, "stop_reason": ids[-1] if last else None,
            "token_ids": ids, "routed_experts": None, "sampling_mask": None,
            "weight_versions": [{"version": "3", "start": 0, "end": total}] if last else None,
            "logprobs": {"content": content},
        }  # fmt: skip
        rid = "generate-tokens-0123456789abcdef0123456789abcdef"
        return {"request_id": rid, "usage": None, "output_mode": "tokens", "choices": [choice]}


def told(path: str, body: Any) -> tuple[int, Any]:
    """The status and the body with which a server answers whatever streams no tokens."""
    config = {
        "model_config": {"max_model_len": 1 << 20, "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True},
        "lora_config": None, "parallel_config": {},
    }  # fmt: skip
    answers: dict[str, Any] = {
        "/model_info": {"weight_version": "3", "model_path": "made-up"},
        "/server_info": {
            "max_req_input_len": 1 << 20, "incremental_streaming_output": True, "skip_tokenizer_init": True,
            "vllm_config": config, "vllm_env": {},
        },
        "/version": {"version": "made-up"}, "/weight_info": {"weight_version": "3"},
        "/v1/models": {"data": [{"root": "made-up"}]},
    }  # fmt: skip
    asked = (body or {}).get("token_ids_logprob") or (body or {}).get("sampling_params", {}).get("allowed_token_ids")
    if asked and asked[0] >= VOCABULARY:
        return 400, {"error": {"message": "outside of the vocabulary"}}
    return 200, answers.get(path.partition("?")[0], {})


def serve(said: Connection, kind: str, interval: int, pause: float) -> None:
    """Answer on `SERVERS` ports until the process is ended. pause: seconds between two pieces of an answer."""
    spoken = Spoken(kind, interval)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                header = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:  # it is closed
                return
            lines = header.split(b"\r\n")
            path = lines[0].split()[1].decode()
            lengths = [int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")]
            body = json.loads(await reader.readexactly(lengths[0])) if lengths and lengths[0] else {}
            if not body.get("stream"):
                status, found = told(path, body)
                data = json.dumps(found).encode()
                head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
                writer.write(head.encode() + data)
                continue
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            await asyncio.sleep(pause * random.random())
            for part in spoken.of(body):
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await asyncio.sleep(pause)
            writer.write(b"0\r\n\r\n")

    async def run() -> None:
        servers = [await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 24) for _ in range(SERVERS)]
        said.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(run())


class NoWeights:
    """A publisher of weights that every server has already."""

    repeatable = True

    def __init__(self) -> None:
        self.publisher = self

    def open(self, *given: Any) -> None:
        """Prepare nothing."""

    def publish(self, request: WeightRequest) -> WeightResult:
        """Send nothing."""
        return WeightResult({})

    close = make_room = open


class Measured:
    """CPU seconds of this process, and tokens, between entering and leaving."""

    def __init__(self) -> None:
        self.tokens, self.cpu, self._begun = 0, 0.0, 0.0

    def __enter__(self) -> "Measured":
        self._begun = time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.cpu = time.process_time() - self._begun


async def reading(kind: str, urls: Sequence[str], requests: int, at_once: int) -> Measured:
    """Read answers and do nothing else with them."""
    sessions, gate, speaks = Sessions(), asyncio.Semaphore(at_once), ENGINES[kind].kind
    clients, sampling = [Client(url, sessions) for url in urls], Sampling(1 << 16, stop_ids=(5,))

    async def one(i: int, first: int = 0) -> int:
        async with gate:
            answer, client = Answer(), clients[i % len(clients)]
            reader = speaks.reader(answer, client.url, 3, False)
            ids = [first, *range(PROMPT + i % 97)]
            body = speaks.body(Wanted(ids, sampling, 1 << 16, f"{i:032x}", interval=64), FEATURES)
            async for payload in client.stream(speaks.generate, body):
                reader.add(payload)
            assert len(answer.ids) == len(answer.logprobs)
            return len(answer.ids)

    await asyncio.gather(*(one(i, SHORT) for i in range(at_once)))  # connections are kept
    with rare_collections(), Measured() as found:
        found.tokens = sum(await asyncio.gather(*map(one, range(requests))))
    await sessions.close()
    return found


async def engine_of(kind: str, urls: Sequence[str], at_once: int) -> ServerEngine:
    """The engine over the servers, for a model of which there is only the shape."""
    with torch.device("meta"):
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=1 << 20,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    engine = ENGINES[kind](model, max_batch=at_once, urls=tuple(urls))
    await engine.update_weights(3, NoWeights())  # type: ignore[arg-type]
    return engine


async def through_engine(kind: str, urls: Sequence[str], requests: int, at_once: int, first: int = 0) -> Measured:
    """Have the engine sample answers. first: id with which prompts begin."""
    engine, gate = await engine_of(kind, urls, at_once), asyncio.Semaphore(at_once)
    _, call, last = build_chat("bridge", PROMPT)
    sampling = Sampling(1 << 16, stop_ids=(last.ids[-1], call.ids[-1]))

    prompts = {PROMPT: array("i", [0, *range(PROMPT + 97)]), SHORT: array("i", [SHORT, *range(SHORT_PROMPT + 97)])}

    async def one(i: int, first: int) -> int:
        async with gate:
            prompt = prompts[first or PROMPT]
            made = await engine.generate(prompt[: len(prompt) - i % 97], sampling, str(i))
            assert made.finish is GenerationFinish.STOP
            engine.finish(str(i))
            return len(made.ids)

    await asyncio.gather(*(one(i, SHORT) for i in range(at_once)))
    with rare_collections(), Measured() as found:
        found.tokens = sum(await asyncio.gather(*(one(i, first) for i in range(requests))))
    await engine.close()
    return found


async def rollout(kind: str, urls: Sequence[str], requests: int, at_once: int) -> tuple[Measured, Measured]:
    """Sample a step of conversations by the driver, then end it."""
    engine = await engine_of(kind, urls, at_once)
    chat, _, _ = build_chat("renderers", PROMPT)
    limits = RolloutSection(
        max_turns=TURNS, max_tokens=1 << 18, max_turn_tokens=1 << 16, concurrency=at_once, timeout=3600,
        turn_timeout=3600,
    )  # fmt: skip
    driver = Driver(
        engine=engine, chat=chat, limits=limits, environment=Question(history_text(PROMPT)), tools=[multiply]
    )
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(TrajectoriesSection(), lambda: Path(folder))
        tasks = [Task(str(i), {}) for i in range(max(1, requests // 8))]
        await roll_out(driver, tasks[: max(1, at_once // 8)], 8)
        with Measured() as sampled:
            groups = await roll_out(driver, tasks, 8, on_group=journal.finished)
            sampled.tokens = sum(t.sampled_tokens for group in groups for t in group.trajectories)
        assert not any(group.failed for group in groups), groups[0].failed[0].failure
        turns = [len(t.turns) for group in groups for t in group.trajectories]
        assert all(n == TURNS for n in turns), turns
        with Measured() as ended:
            ended.tokens = sampled.tokens
            rollout_metrics(groups)
            batch = Batch.from_groups(groups)
            journal.step(1, groups)
        assert int(batch.sampled.sum()) == sampled.tokens
    await engine.close()
    return sampled, ended


def measure(kind: str, interval: int, rate: int, at_once: int, tokens: int, stages: Sequence[str]) -> None:
    """Print the rows of one kind of servers."""
    mine, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(
        target=serve, args=(theirs, kind, interval, at_once * interval / rate), daemon=True
    )
    server.start()
    requests = max(at_once, tokens * len(LENGTHS) // sum(LENGTHS))
    try:
        urls = [f"http://127.0.0.1:{port}" for port in mine.recv()]
        if "reading" in stages:
            show(kind, "reading", asyncio.run(reading(kind, urls, requests, at_once)))
        if "engine" in stages:
            show(kind, "engine", asyncio.run(through_engine(kind, urls, requests, at_once)))
        if "turns" in stages:
            short = max(at_once, tokens // SHORT_ANSWER)
            show(kind, "turns", asyncio.run(through_engine(kind, urls, short, at_once, SHORT)))
        if "rollout" in stages or "step" in stages:
            sampled, ended = asyncio.run(rollout(kind, urls, max(at_once, requests // TURNS), at_once))
            show(kind, "rollout", sampled)
            show(kind, "step", ended)
    finally:
        server.kill()


def show(kind: str, stage: str, found: Measured) -> None:
    """Print one row."""
    each = found.cpu / found.tokens
    print(f"{kind:8}{stage:10}{1e6 * each:>14.2f}{1 / each:>16,.0f}{60_000 * each:>18.2f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*ENGINES], action="append", help="of servers; both without it")
    parser.add_argument("--stage", choices=STAGES, action="append", help="all without it")
    parser.add_argument("--interval", type=int, default=wire.INTERVAL, help="tokens of a piece")
    parser.add_argument("--rate", type=int, default=60_000, help="tokens a second of all answers together")
    parser.add_argument("--at-once", type=int, default=256, help="conversations in flight")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of each row, about")
    options = parser.parse_args(arguments)
    print(f"{'servers':8}{'stage':10}{'us a token':>14}{'tokens/s a core':>16}{'cores at 60k/s':>18}")
    for kind in options.kind or ENGINES:
        stages = options.stage or STAGES
        measure(kind, options.interval, options.rate, options.at_once, options.tokens, stages)


if __name__ == "__main__":
    main()
