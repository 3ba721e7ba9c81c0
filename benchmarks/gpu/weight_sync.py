"""MB/s from a trainer's GPU to SGLang servers on GPUs: CUDA IPC, NCCL, and a folder, beside a copy on the device.

    AGENTRL_SGLANG_VENV=VENV python benchmarks/gpu/weight_sync.py                          synthetic weights, 3 GB
    AGENTRL_SGLANG_VENV=VENV python benchmarks/gpu/weight_sync.py --mb 16000 --tp 2

bfloat16, dummy weights. With one GPU the server shares it with the trainer: NCCL does not join two processes on one
device, so that transport wants a second one, as `--tp 2` wants two for the server. A row is as in
benchmarks/weight_sync.py."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from need import need

NAME = "weight_sync on GPUs"


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder, whose file has the same name
    import aiohttp
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from weight_sync import MB, best_of, plain_copy, show, synthetic

    from agentrl.weights.channel import WeightChannel
    from agentrl.weights.sglang import SglangServer
    from agentrl.weights.source import ModelWeights
    from agentrl.weights.transports.base import Transport
    from agentrl.weights.transports.disk import DiskTransport
    from agentrl.weights.transports.nccl import GroupTransport
    from agentrl.weights.transports.shared_memory import SharedMemoryTransport

    apart = torch.cuda.device_count() > options.tp
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        synthetic(options.mb, bytes_each=2).save_pretrained(folder)
        with torch.device("cuda:0"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        size = sum(tensor.nbytes for _, tensor in ModelWeights(model))
        copied = plain_copy(model, options.repeat, torch.cuda.synchronize)
        rows = [{"way": "copy on the device", "seconds": copied, "mb_s": size / MB / copied, "ratio": 1.0}]
        show({"model": "synthetic Qwen3", **rows[0]}, size)
        transports: dict[str, Transport] = {"from_tensor (CUDA IPC)": SharedMemoryTransport()}
        if apart:
            transports["from_distributed (nccl)"] = GroupTransport()
        else:
            print(f"from_distributed (nccl): left out, it needs {options.tp + 1} GPUs", flush=True)
        transports["from_disk, /dev/shm"] = DiskTransport(Path(memory))
        async with serving(Path(folder), options.tp, apart) as url, aiohttp.ClientSession() as session:
            for label, transport in transports.items():
                try:
                    seconds = await best_of(
                        WeightChannel([SglangServer(url, session)], transport), model, options.repeat
                    )
                except SystemExit as failed:  # NCCL wants one version on both sides; the other transports go on
                    print(f"{label}: {failed}", flush=True)
                    continue
                row = {"way": label, "seconds": seconds, "mb_s": size / MB / seconds, "ratio": copied / seconds}
                rows.append(row)
                show({"model": "synthetic Qwen3", **row}, size)
    return rows


@asynccontextmanager
async def serving(folder: Path, tp: int, apart: bool) -> AsyncIterator[str]:
    """A server on `tp` GPUs: from the second on where they are enough, else beside the trainer."""
    from agentrl.engine.servers.client import Sessions
    from agentrl.engine.servers.launch import launch_command
    from agentrl.engine.servers.server import Server
    from agentrl.engine.sglang.command import SGLANG, SglangPlan

    plan = SglangPlan(
        command=launch_command(None, None, SGLANG), model_path=str(folder), dtype="bfloat16", max_batch=8,
        token_bytes=1 << 16,
        flags={"load-format": "dummy", "skip-tokenizer-init": True, "tp-size": tp, "base-gpu-id": int(apart),
               "mem-fraction-static": 0.4, "disable-cuda-graph": True},
        context=1024, cpu=False,
    )  # fmt: skip
    sessions = Sessions()
    server = Server(plan, 0, Path(tempfile.gettempdir()) / "gpu_weight_sync_sglang.log", sessions)
    try:
        await server.start(900.0, lambda line: None)
        yield server.url
    finally:
        await server.stop()
        await sessions.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=3000, help="about the size of the model")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the server")
    parser.add_argument("--repeat", type=int, default=3, help="updates that count; the best is shown")
    parser.add_argument("--json", help="write the figures here")
    options = parser.parse_args(arguments)
    need(NAME, gpus=options.tp)
    rows = asyncio.run(run(options))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
