"""MB/s from the trainer to an SGLang server by each transport, compared with a copy of the same tensors in memory.

    AGENTRL_SGLANG_VENV=VENV python benchmarks/weight_sync.py             the embedded model, and one of 500 MB
    AGENTRL_SGLANG_VENV=VENV python benchmarks/weight_sync.py --mb 100    the second one of about 100 MB
    python benchmarks/weight_sync.py --url http://127.0.0.1:30000         the embedded model, on a running server

One real server per model (dummy weights, float32 on both sides). A row is one transport: from the pause to the resume,
the best of `--repeat` updates after a first one, which is checked bit for bit and not counted. The plain copy is one
`copy_` of all tensors in this process; `ratio` is the row's rate divided by that of the copy. The row
`from_disk, /dev/shm` writes the safetensors file to memory.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from agentrl.engine.servers.client import Sessions
from agentrl.engine.servers.launch import launch_command
from agentrl.engine.servers.server import Server
from agentrl.engine.sglang.command import SGLANG, SglangPlan
from agentrl.models import embedded_path
from agentrl.weights.channel import WeightChannel
from agentrl.weights.sglang import SglangServer
from agentrl.weights.source import ModelWeights
from agentrl.weights.transports.base import Transport
from agentrl.weights.transports.disk import DiskTransport
from agentrl.weights.transports.nccl import GroupTransport
from agentrl.weights.transports.shared_memory import SharedMemoryTransport

MB = 1_000_000


def synthetic(megabytes: int, bytes_each: int = 4) -> Qwen3Config:
    """The configuration of Qwen3-0.6B with as many layers as fill `megabytes`, at `bytes_each` per value."""
    config = Qwen3Config(
        vocab_size=16_384, hidden_size=1024, intermediate_size=3072, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    layer = 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072)
    config.num_hidden_layers = max(1, round((megabytes * MB / bytes_each - 16_384 * 1024) / layer))
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.architectures = ["Qwen3ForCausalLM"]
    return config


def plain_copy(model: Any, repeat: int, settle: Callable[[], object] = lambda: None) -> float:
    """The seconds of `copy_` for all tensors, the best of `repeat` after a warm-up.

    settle: waits until the copies are complete.
    """
    source = [tensor for _, tensor in ModelWeights(model)]
    target = [torch.empty_like(tensor) for tensor in source]
    best = float("inf")
    for _ in range(repeat + 1):
        began = time.perf_counter()
        for a, b in zip(target, source, strict=True):
            a.copy_(b)
        settle()
        best = min(best, time.perf_counter() - began)
    return best


@asynccontextmanager
async def serving(folder: Path, url: str | None) -> AsyncIterator[str]:
    """Start a server with the model in `folder`, unless `url` names one; yield its URL."""
    if url is not None:
        yield url
        return
    plan = SglangPlan(
        command=launch_command(None, None, SGLANG), model_path=str(folder), dtype="float32", max_batch=8,
        token_bytes=1 << 16,
        flags={"load-format": "dummy", "skip-tokenizer-init": True, "max-total-tokens": 1024}, context=1024, cpu=True,
    )  # fmt: skip
    sessions = Sessions()
    server = Server(plan, 0, Path(tempfile.gettempdir()) / "weight_sync_sglang.log", sessions)
    try:
        await server.start(600.0, lambda line: None)
        yield server.url
    finally:
        await server.stop()
        await sessions.close()


async def measure(name: str, model: Any, url: str, repeat: int) -> list[dict[str, Any]]:
    """The rows of one model."""
    size = sum(tensor.nbytes for _, tensor in ModelWeights(model))
    copied = plain_copy(model, repeat)
    rows = [{"model": name, "way": "plain copy", "seconds": copied, "mb_s": size / MB / copied, "ratio": 1.0}]
    show(rows[0], size)
    async with aiohttp.ClientSession() as session:
        with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            transports: dict[str, Transport] = {
                "from_tensor": SharedMemoryTransport(),
                "from_distributed (gloo)": GroupTransport(),
                "from_disk": DiskTransport(Path(disk)),
                "from_disk, /dev/shm": DiskTransport(Path(memory)),
            }
            for label, transport in transports.items():
                seconds = await best_of(WeightChannel([SglangServer(url, session)], transport), model, repeat)
                row = {"model": name, "way": label, "seconds": seconds, "mb_s": size / MB / seconds}
                rows.append({**row, "ratio": copied / seconds})
                show(rows[-1], size)
    return rows


async def best_of(channel: WeightChannel, model: Any, repeat: int) -> float:
    found = []
    for version in range(repeat + 1):
        done = await channel.publish(version, ModelWeights(model))
        if done.failed:
            raise SystemExit(f"weight_sync: {next(iter(done.failed.values()))}")
        found.append(done.seconds)
    await channel.close()
    return min(found[1:])


def show(row: dict[str, Any], size: int) -> None:
    print(
        f"{row['model']:>18} {size / MB:8.1f} MB  {row['way']:<24} {row['seconds'] * 1e3:9.1f} ms "
        f"{row['mb_s']:9.0f} MB/s {row['ratio']:7.3f}",
        flush=True,
    )


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    tiny = AutoModelForCausalLM.from_pretrained(embedded_path(), dtype=torch.float32)
    async with serving(embedded_path(), options.url) as url:
        rows += await measure("tiny", tiny, url, options.repeat)
    if options.url is None:
        with tempfile.TemporaryDirectory() as folder:
            synthetic(options.mb).save_pretrained(folder)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
            async with serving(Path(folder), None) as url:
                rows += await measure("synthetic Qwen3", model, url, options.repeat)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=500, help="about the size of the second model")
    parser.add_argument("--repeat", type=int, default=3, help="updates that count; the best is shown")
    parser.add_argument("--url", help="a server that runs already and has the embedded model: only that one")
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
