"""What a sampled token costs the run's own process, where SGLang servers sample: CPU time of reading their streams.

    python benchmarks/sglang_client.py                     as the engine asks for it
    python benchmarks/sglang_client.py --interval 16       smaller pieces

One server in another process answers every request with pieces that are made beforehand, each a while after the other.
The rate is what one process could take in that does nothing else: tools, rewards and rendering are not in it. 2,000
tokens of prompt are sent with each request.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from agentrl.engine.base import Sampling
from agentrl.engine.servers.answer import INTERVAL, Answer, Features
from agentrl.engine.servers.client import Client, Sessions
from agentrl.engine.sglang.wire import Reader, request_body

PROMPT = list(range(1000, 3000))
SAMPLING = Sampling(1 << 20, stop_ids=(5,))
PAUSE = 0.02
"""Seconds between two pieces of an answer, so that each comes alone, as from a server."""


def piece(start: int, end: int, last: bool) -> bytes:
    """What a server sends of an answer's ids from `start` to `end`."""
    ids = [(7919 * i) % 150_000 for i in range(start, end)]
    meta = {
        "id": "0123456789abcdef0123456789abcdef", "finish_reason": {"type": "length", "length": end} if last else None,
        "prompt_tokens": len(PROMPT), "weight_version": "3", "total_retractions": 0, "completion_tokens": end,
        "cached_tokens": 1984, "output_token_logprobs": [[-0.6931471824645996 - i % 7, i, None] for i in ids],
    }  # fmt: skip
    return b"data: " + json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


def serve(said: Connection, tokens: int, interval: int) -> None:
    """Answer every request with the same pieces, until the process is ended."""
    ends = [*range(interval, tokens, interval), tokens]
    pieces = [piece(a, b, b == tokens) for a, b in zip([0, *ends], ends, strict=False)]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while header := await reader.readuntil(b"\r\n\r\n"):
            lines = header.lower().split(b"\r\n")
            await reader.readexactly(next(int(x[15:]) for x in lines if x.startswith(b"content-length:")))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for part in (*pieces, b"data: [DONE]\n\n"):
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await asyncio.sleep(PAUSE)
            writer.write(b"0\r\n\r\n")

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        said.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def read(port: int, requests: int, at_once: int, tokens: int) -> tuple[float, float]:
    """Return (CPU seconds, seconds) that the answers took this process."""
    sessions = Sessions()
    client, gate = Client(f"http://127.0.0.1:{port}", sessions), asyncio.Semaphore(at_once)

    async def one(i: int) -> None:
        async with gate:
            answer = Answer()
            reader = Reader(answer, client.url, 3)
            body = request_body(PROMPT, SAMPLING, tokens, f"{i:032x}", Features(incremental=True))
            async for payload in client.stream("/generate", body):
                reader.add(payload)
            assert len(answer.ids) == len(answer.logprobs) == tokens

    await one(0)  # what is made once
    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*map(one, range(requests)))
    used = time.process_time() - cpu, time.perf_counter() - start
    await sessions.close()
    return used


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=int, default=INTERVAL, help="tokens of a piece")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    options = parser.parse_args(arguments)
    mine, theirs = multiprocessing.Pipe()

    server = multiprocessing.Process(target=serve, args=(theirs, options.tokens, options.interval), daemon=True)
    server.start()
    try:
        cpu, _ = asyncio.run(read(mine.recv(), options.requests, options.at_once, options.tokens))
    finally:
        server.kill()
    each = cpu / (options.requests * options.tokens)
    print(f"pieces of {options.interval} tokens: {1e6 * each:.2f} us of CPU a token, {1 / each:,.0f} tokens/s at most")


if __name__ == "__main__":
    main()
