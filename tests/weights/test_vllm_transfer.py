"""vLLM's weight transfer engines `ipc` and `nccl`, without a GPU: the bytes arrive, and failures hold up nobody."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from pretend_gpu import OnGpu, pretending
from serving import serving
from sglang_weights_help import Weights
from torch.distributed import HashStore
from vllm_transfer import UUID, Exports, GlooNccl, RealWorker, StandInWorker

from agentrl.engine.servers.settings import Settings
from agentrl.engine.vllm.kind import VllmEngine, VllmKind
from agentrl.recipe.schema import Recipe
from agentrl.weights import group, vllm
from agentrl.weights.channel import WeightChannel, open_channel
from agentrl.weights.feed import Feed
from agentrl.weights.request import WeightUpdateError
from agentrl.weights.transports.handles import HandleTransport
from agentrl.weights.transports.nccl import GroupTransport
from agentrl.weights.vllm import VllmServer

BUCKET = 64
GPUS = (UUID, "GPU-4567")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of several types, whose sizes are no multiples of one another."""
    made = torch.Generator().manual_seed(seed)
    kinds = (torch.bfloat16, torch.float32, torch.int8, torch.float32, torch.bfloat16, torch.float64)
    shapes = ((3, 5), (1,), (7,), (5, 5), (1, 1), (2, 3))
    return {
        f"layer.{i}": (50 * torch.randn(shape, generator=made)).to(kind)
        for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    }


def there(tensors: dict[str, torch.Tensor], before: Any = lambda i: None) -> Weights:
    """On the GPU that is none."""
    return Weights([(name, OnGpu(tensor.clone())) for name, tensor in tensors.items()], before)


class TransferServer:
    """The routes of vLLM 0.32 over a worker. fails: (path, n): its n-th call answers 500 before it reaches the worker.
    asleep: paths whose calls never end."""

    def __init__(self, worker: Any, backend: str | None, packages: str | None = None) -> None:
        self.worker, self.backend, self.packages = worker, backend, packages
        self.fails: set[tuple[str, int]] = set()
        self.calls: list[str] = []
        self.version, self.machines = "", 1

    async def info(self, request: web.Request) -> web.Response:
        config = {
            "model_config": {"dtype": "torch.float16"}, "lora_config": None,
            "parallel_config": {"world_size": self.worker.ranks, "nnodes": self.machines},
            "device_config": {"device": "cuda"}, "weight_transfer_config": self.backend and {"backend": self.backend},
        }  # fmt: skip
        return web.json_response({"vllm_config": config, "system_env": {"pip_packages": self.packages}})

    async def post(self, request: web.Request) -> web.Response:
        nth = self.calls.count(request.path)
        self.calls.append(request.path)
        body = await request.json()
        try:
            if (request.path, nth) in self.fails:
                raise RuntimeError("told to fail")
            if request.path == "/update_weight_version":
                self.version = body["new_version"]
            elif "weight" in request.path:
                await asyncio.to_thread(self.worker.call, request.path[1:], body)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            return web.json_response({"error": {"message": f"{type(error).__name__}: {error}"}}, status=500)
        return web.json_response({"message": "done"})


@asynccontextmanager
async def served(*servers: TransferServer) -> Any:
    """Their URLs."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(serving({"GET /server_info": s.info, "POST /{path:.*}": s.post}))
            for s in servers
        ]
        for server in servers:
            server.worker.close()


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GlooNccl, Exports]]:
    """NCCL over gloo, and GPU memory in shared memory, until the block ends."""
    nccl, exports = GlooNccl(), Exports()
    with monkeypatch.context() as patch:
        patch.setattr(group, "nccl", nccl)
        patch.setattr(vllm, "nccl", nccl)
        patch.setattr(group, "nccl_library", lambda: nccl)
        patch.setattr("torch.multiprocessing.reductions.reduce_tensor", exports)
        patch.setattr(torch.cuda, "device", lambda device: patch.context())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *size, device=None, **more: zeros(*size, **more).to("cpu"))
        with pretending(patch):
            yield nccl, exports


def channel_to(urls: list[str], session: Any, transport: Any) -> WeightChannel:
    return WeightChannel([VllmServer(url, session, 20.0) for url in urls], transport, check_every=0)


def same(found: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


async def twice(name: str, workers: list[Any], session: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Two updates in several buckets, both of which arrive; the fakes."""
    backend = "ipc" if name == "from_tensor" else "nccl"
    servers = [TransferServer(worker, backend) for worker in workers]
    transport: Any = HandleTransport(BUCKET) if backend == "ipc" else GroupTransport(20.0, BUCKET)
    async with served(*servers) as urls:
        with gpu(monkeypatch) as (nccl, exports):
            channel = channel_to(urls, session, transport)
            for version in (1, 2):
                done = await channel.publish(version, there(weights(version)))
                assert (done.failed, sorted(done.good), done.transport) == ({}, sorted(urls), name)
                for server in servers:
                    same(server.worker.held(), weights(version))
                    assert server.version == str(version)
            await channel.close()
    (calls,) = {tuple(c for c in server.calls if "engine" in c) for server in servers}
    init = "/init_weight_transfer_engine"
    assert calls == ((init, init) if backend == "ipc" else (init, "/shutdown_weight_transfer_engine"))
    return nccl, exports


async def test_memory_of_a_gpu_is_opened_once_by_each_server(session: Any, monkeypatch: Any) -> None:
    workers = [StandInWorker("ipc"), StandInWorker("ipc")]
    _, exports = await twice("from_tensor", workers, session, monkeypatch)
    assert exports.count == sum(worker.opened for worker in workers)  # each opens what was given away for it alone
    assert workers[0].opened < 2 * 4  # fewer than there are buckets


async def test_a_communicator_serves_every_update(session: Any, monkeypatch: Any) -> None:
    nccl, _ = await twice("from_distributed", [StandInWorker("nccl"), StandInWorker("nccl")], session, monkeypatch)
    assert (len(nccl.groups), nccl.aborted) == (1, 1)


class Both:
    """Two ranks of one server, each on a GPU of its own; what both hold."""

    ranks = 2

    def __init__(self, make: Any) -> None:
        self.workers = [make(uuid) for uuid in GPUS]

    def call(self, method: str, body: dict[str, Any]) -> None:
        for worker in self.workers:
            worker.call(method, body)

    def held(self) -> dict[str, torch.Tensor]:
        first, second = (worker.held() for worker in self.workers)
        same(first, second)
        return first

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def gpu_of_thread(device: Any) -> SimpleNamespace:
    """The first one of the sender, the second one of the rank that feeds."""
    return SimpleNamespace(uuid=GPUS[threading.current_thread().name == "feeder"])


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_each_rank_of_a_server_opens_memory_of_its_own_gpu(
    real: bool, session: Any, monkeypatch: Any, request: Any
) -> None:
    python = f"{request.getfixturevalue('vllm_venv')}/bin/python" if real else ""
    workers = Both(lambda uuid: RealWorker(python, "ipc", uuid) if real else StandInWorker("ipc", uuid))
    store, transport = HashStore(), HandleTransport(BUCKET)
    async with served(TransferServer(workers, "ipc")) as urls:
        with gpu(monkeypatch) as (_, exports):
            monkeypatch.setattr(torch.cuda, "get_device_properties", gpu_of_thread)
            for version in (1, 2):
                feeds = [Feed(store, version, rank, {urls[0]: (0, 1)}) for rank in range(2)]
                feeding = (HandleTransport().fill, there(weights(version)), feeds[1])
                feeder = threading.Thread(target=feeding[0], args=feeding[1:], name="feeder")
                feeder.start()
                sent = there(weights(version))
                sent.feed = feeds[0]
                done = await channel_to(urls, session, transport).publish(version, sent)
                feeds[0].close()
                feeder.join(10)
                assert not feeder.is_alive()
                assert (done.failed, done.good) == ({}, tuple(urls))
                same(workers.held(), weights(version))
            unfed = await channel_to(urls, session, transport).publish(3, there(weights()))
    assert "it takes a rank of the trainer on the GPU of each of its ranks" in unfed.failed[urls[0]]
    assert exports.count == 2 * 2 * 2  # by each rank, in each update once, and again when the buffer had to grow


@pytest.mark.long
@pytest.mark.parametrize("name", ["from_tensor", "from_distributed"])
async def test_vllms_own_code_reads_it(name: str, vllm_venv: str, session: Any, monkeypatch: Any) -> None:
    worker = RealWorker(f"{vllm_venv}/bin/python", "ipc" if name == "from_tensor" else "nccl")
    await twice(name, [worker], session, monkeypatch)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights"])
@pytest.mark.parametrize("backend", ["ipc", "nccl"])
async def test_a_server_that_fails_is_bad_and_nobody_waits(
    backend: str, path: str, session: Any, monkeypatch: Any
) -> None:
    """What another one got a part of by NCCL is lost with the communicator: a second time would load it twice."""
    monkeypatch.setattr("agentrl.weights.transports.nccl.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("vllm_transfer.SECONDS", timedelta(seconds=1))  # in which the other server's worker gives up
    bad, good = (TransferServer(StandInWorker(backend), backend) for _ in range(2))
    bad.fails.add((path, 0))
    read: list[int] = []
    transport: Any = HandleTransport(BUCKET) if backend == "ipc" else GroupTransport(20.0, BUCKET)
    async with served(bad, good) as urls:
        with gpu(monkeypatch) as (nccl, _):
            done = await channel_to(urls, session, transport).publish(1, there(weights(), read.append))
    assert f"{path} answered 500: RuntimeError: told to fail" in done.failed[urls[0]]
    assert bad.version == "partial-1"
    assert set(read) == set(range(len(weights())))
    alone = backend == "ipc" or path == "/start_weight_update"
    assert done.good == ((urls[1],) if alone else ())
    if alone:
        same(good.worker.held(), weights())
    elif path == "/update_weights":
        assert nccl.aborted == 1
        assert len(good.worker.loaded) == len(set(good.worker.loaded))


async def test_a_communicator_is_ended_once() -> None:
    nccl = GlooNccl()
    ended: list[Any] = []
    nccl.groups.append((SimpleNamespace(abort=lambda: ended.append(1)), None))
    capsule = __import__("vllm_transfer").PYTHON.PyCapsule_New(1, b"a communicator", None)
    made = group.NcclGroup("g", (), capsule, None, "nccl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "nccl_library", lambda: nccl)
        made.abort()
        made.abort()
    assert ended == [1]


NCCL = "[pip3] nvidia-nccl-cu13=="


@pytest.mark.parametrize(
    ("backend", "packages", "near", "chosen"),
    [
        (None, None, True, "from_disk (through a folder"),
        ("ipc of two ranks", None, True, "from_disk (through a folder"),
        ("ipc", None, True, "from_tensor (servers open memory of the trainer's GPU; not tried on a GPU by us)"),
        ("nccl", NCCL + "2.29.7\n", False, "from_distributed (servers were started with the weight transfer engine"),
        ("nccl", None, True, "from_distributed (servers were started with"),
        ("nccl", NCCL + "2.30.7", True, "from_disk (through a folder"),
        ("nccl", NCCL + "2.30.7", False, WeightUpdateError("NCCL is 2.30.7 there and 2.29.7 here, which do not conn")),
        ("ipc", None, False, WeightUpdateError("does not see this machine's files: start it with --weight-transfer-")),
    ],
)
async def test_how_weights_travel(
    backend: Any, packages: Any, near: Any, chosen: Any, session: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("agentrl.weights.channel.same_host", lambda url: near)
    said: list[str] = []
    worker = StandInWorker("")
    if backend == "ipc of two ranks":
        backend, worker.ranks = "ipc", 2
    async with served(TransferServer(worker, backend, packages)) as urls:
        with gpu(monkeypatch):
            opening = open_channel(urls, session, folder=tmp_path, kind="vllm", say=said.append)
            if isinstance(chosen, Exception):
                with pytest.raises(WeightUpdateError, match=str(chosen)):
                    await opening
                return
            await (await opening).close()
    assert said[0].startswith(f"weights: {chosen}")


@pytest.mark.parametrize(
    ("backend", "fed", "chosen"),
    [(None, False, None), ("ipc", False, None), ("ipc", True, "from_tensor"), ("nccl", False, "from_distributed")],
)
async def test_how_weights_travel_to_a_server_over_machines(
    backend: Any, fed: bool, chosen: Any, session: Any, monkeypatch: Any
) -> None:
    """Not all of them read this machine's folder, or open its memory, although the first one does."""
    server = TransferServer(StandInWorker(""), backend, NCCL + "2.29.7")
    server.machines = 2
    async with served(server) as urls:
        with gpu(monkeypatch):
            asked = VllmServer(urls[0], session).transport(near=True, fed=fed)
            if chosen is not None:
                assert (await asked)[0] == chosen
                return
            with pytest.raises(WeightUpdateError, match="computes on 2 machines: start it with --weight-transfer-"):
                await asked


async def test_versions_of_nccl_that_do_not_connect_are_named_where_the_recipe_asks(
    session: Any, monkeypatch: Any, tmp_path: Any
) -> None:
    server = TransferServer(StandInWorker("nccl"), "nccl", NCCL + "2.30.7")
    async with served(server) as urls:
        with gpu(monkeypatch):
            channel = await open_channel(urls, session, folder=tmp_path, kind="vllm", transport="from_distributed")
            done = await channel.publish(1, there(weights()))
    assert (
        "NCCL is 2.30.7 there and 2.29.7 here, which do not connect; set engine.args.weights=from"
        in done.failed[urls[0]]
    )
    assert "/init_weight_transfer_engine" not in server.calls


@pytest.mark.parametrize(
    ("given", "sleep", "workers", "refused"),
    [
        ({}, True, 1, False),
        ({}, False, 2, True),
        ({"servers": 2}, True, 1, True),
        ({"servers": 2}, True, 2, False),
        ({"flags": {"tensor_parallel_size": 2}}, True, 1, True),
        ({"flags": {"tensor_parallel_size": 2}}, True, 2, False),
    ],
)
def test_what_check_refuses_of_memory_that_one_gpu_opens(given: Any, sleep: bool, workers: int, refused: bool) -> None:
    settings = Settings(weights="from_tensor", **given)
    found = VllmKind().refused(settings, sleep=sleep, lora=False, gpus=True, workers=workers)
    assert [line.startswith("engine.args.weights=from_tensor: vLLM opens memory") for line in found] == [True] * refused
    assert VllmKind().refused(settings, sleep=sleep, lora=False, gpus=False) == []


@pytest.mark.parametrize("cluster", [{"gpus": 2}, {"workers": 2}, {"gpus": 1}])
def test_workers_are_counted_however_the_recipe_says_how_many(cluster: Any, monkeypatch: Any) -> None:
    args = {"command": "true", "weights": "from_tensor", "flags": {"tensor-parallel-size": 2}}
    engine = {"name": "vllm", "sleep": True, "args": args}
    recipe = Recipe.model_validate({"env": {"name": "gsm8k"}, "engine": engine, "cluster": cluster})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert any("vLLM opens memory" in line for line in VllmEngine.missing(recipe)) == (cluster == {"gpus": 1})
