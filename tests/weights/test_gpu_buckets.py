"""Buckets of weights in memory of a GPU (CUDA IPC), without one: its memory is shared memory of the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from pretend_gpu import OnGpu, pretending
from sglang_weights_help import FaultyServer, Weights, channel_to, opened
from torch.multiprocessing import reductions
from transformers import AutoModelForCausalLM, Qwen2Config
from vllm_transfer import UUID, Exports, rebuilt

from agentrl.weights.source import buckets
from agentrl.weights.transports import shared_memory
from agentrl.weights.transports.shared_memory import GPU_BUCKET_BYTES, SharedMemoryTransport

RANKS = 2
TENSORS = [
    (f"layer.{i}", torch.arange(size).to(kind))
    for i, (size, kind) in enumerate([(10, torch.float32), (7, torch.bfloat16), (30, torch.float32), (5, torch.int8)])
]


class GpuServer(FaultyServer):
    """Each rank opens the bucket that is meant for it. loaded: bytes of each bucket."""

    def __init__(self, device: str = "cuda", faults: Any = None) -> None:
        super().__init__(faults)
        self.device = device
        self.loaded: list[int] = []

    def _do(self, path: str, body: Any) -> web.Response:
        if path == "/server_info":
            return web.json_response({"device": self.device, "dtype": "float32", "tp_size": RANKS, "version": "0"})
        if path != "/update_weights_from_tensor":
            return super()._do(path, body)
        first, *others = (opened(payload) for payload in body["serialized_named_tensors"])
        assert len(others) == RANKS - 1
        assert all(torch.equal(rank[name], tensor) for rank in others for name, tensor in first.items())
        self.tensors |= {name: tensor.clone() for name, tensor in first.items()}
        self.loaded.append(sum(tensor.nbytes for tensor in first.values()))
        return web.json_response({"success": True, "message": "done"})


def mapped(*arguments: Any) -> torch.Tensor:
    """What SGLang puts in the place of torch's `rebuild_cuda_tensor`: it looks the device up by its UUID."""
    assert arguments[6] == UUID
    return rebuilt(*arguments[:6], 0, *arguments[7:])


async def at_once(function: Any, *arguments: Any) -> Any:
    """In the thread that pretends."""
    return function(*arguments)


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exports]:
    """Buckets of 64 bytes on it, and of 32 on a CPU, until the block ends."""
    exports = Exports()
    mapped.__module__, mapped.__qualname__ = reductions.__name__, "rebuild_cuda_tensor"  # so that it is pickled as that
    with monkeypatch.context() as patch:
        patch.setattr(reductions, "reduce_tensor", exports)
        patch.setattr(reductions, "rebuild_cuda_tensor", mapped)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
        patch.setattr(shared_memory, "in_thread", at_once)
        patch.setattr(shared_memory, "GPU_BUCKET_BYTES", 64)
        patch.setattr(shared_memory, "BUCKET_BYTES", 32)
        with pretending(patch):
            yield exports


def there() -> Weights:
    return Weights([(name, OnGpu(tensor.clone())) for name, tensor in TENSORS])


@pytest.mark.parametrize(("device", "sizes"), [("cuda", [54, 120, 5]), ("cpu", [40, 14, 120, 5])])
async def test_buckets_stay_on_the_gpu_where_the_server_has_one(
    device: str, sizes: list[int], session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By larger buckets, each of which every rank opens by a handle of its own; none stays after the update."""
    async with GpuServer(device) as server:
        with gpu(monkeypatch) as exports:
            transport = SharedMemoryTransport()
            for version in (1, 2):
                done = await channel_to([server], session, transport).publish(version, there())
                assert done.good == (server.url,), done.failed
                assert {name: tensor.tolist() for name, tensor in server.tensors.items()} == {
                    name: tensor.tolist() for name, tensor in TENSORS
                }
            kept = [bucket._bytes.numel() for bucket in transport._buckets]
    assert server.loaded == 2 * sizes
    assert exports.count == (2 * len(sizes) * RANKS if device == "cuda" else 0)
    assert (kept == [0, 0]) is (device == "cuda")


async def test_a_server_that_fails_holds_no_memory_of_the_gpu(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with GpuServer(faults={"/update_weights_from_tensor": (1, 500)}) as bad, GpuServer() as good:
        with gpu(monkeypatch) as exports:
            transport = SharedMemoryTransport()
            done = await channel_to([bad, good], session, transport).publish(1, there())
            assert [bucket._bytes.numel() for bucket in transport._buckets] == [0, 0]
    assert (done.good, list(done.failed)) == ((good.url,), [bad.url])
    assert (len(bad.loaded), len(good.loaded)) == (1, 3)
    assert exports.count == RANKS * (1 + 3 + 1)  # one more was meant for the server that refused it


def test_a_model_of_seven_billion_is_thirty_requests() -> None:
    """By the shapes of Qwen2.5-7B; no bucket is larger than the limit, but for one tensor that is."""
    config = Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    sizes = [
        [tensor.nbytes for _, tensor in batch]
        for batch in buckets(((name, p) for name, p in model.named_parameters()), GPU_BUCKET_BYTES)
    ]
    assert 28 <= len(sizes) <= 31
    assert all(sum(batch) <= GPU_BUCKET_BYTES or len(batch) == 1 for batch in sizes)
    assert sum(map(sum, sizes)) == 2 * sum(p.numel() for p in model.parameters())
