"""A worker of vLLM's weight transfer engines without a GPU: NCCL is gloo, and GPU memory is shared memory of the CPU.

As a module of the tests: what the trainer's side is given for NCCL and CUDA, and servers over `StandInWorker`, which
reads calls by the rules of vLLM 0.32. As a program, run by the Python of a vLLM installation: the same calls, as lines
of JSON, to vLLM's own engines (`RealWorker`). It imports nothing of agentrl's there.
"""

import base64
import ctypes
import json
import pickle
import socket
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroupGloo

UUID = "GPU-0123"
SECONDS = timedelta(seconds=20)
PYTHON = ctypes.pythonapi
PYTHON.PyCapsule_New.restype = ctypes.py_object
PYTHON.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
PYTHON.PyCapsule_GetPointer.restype = ctypes.c_void_p
NAME = b"a communicator"


def gloo(unique_id: bytes, rank: int, world: int) -> Any:
    """The group whose store listens at the port that the id begins with."""
    port = int.from_bytes(unique_id[:2], "big")
    store = TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=SECONDS, wait_for_workers=False)
    return ProcessGroupGloo(store, rank, world, SECONDS), store


def plain(tensor: Tensor) -> Tensor:
    return getattr(tensor, "values", tensor) if not callable(getattr(tensor, "values", None)) else tensor


def add_up(group: Any) -> None:
    """What every member does first."""
    group.allreduce([torch.zeros(1)]).wait()


def to_memory(handle: bytes, size: int) -> Tensor:
    """Open what `share` gave away."""
    manager, name, total = pickle.loads(handle[2:])
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, name, total)
    return torch.empty(0, dtype=torch.uint8).set_(storage)[:size]


class GlooNccl:
    """In the place of torch.cuda.nccl. aborted: how many communicators were ended. stuck: broadcasts never return,
    until theirs is ended."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.aborted = 0

    def version(self) -> tuple[int, int, int]:
        return 2, 29, 7

    def unique_id(self) -> bytes:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1]).to_bytes(2, "big") + bytes(126)

    def init_rank(self, world: int, unique_id: bytes, rank: int) -> Any:
        self.groups.append(gloo(unique_id, rank, world))
        return PYTHON.PyCapsule_New(len(self.groups), NAME, None)

    def all_reduce(self, tensors: list[Tensor], comms: list[Any]) -> None:
        self._of(comms[0]).allreduce([plain(tensors[0])]).wait()

    def broadcast(self, tensors: list[Tensor], root: int, comms: list[Any]) -> None:
        assert tensors[0].is_contiguous()
        self._of(comms[0]).broadcast([plain(tensors[0])]).wait()

    def ncclCommAbort(self, pointer: ctypes.c_void_p) -> None:  # noqa: N802
        """Of the library."""
        assert pointer.value is not None
        self.groups[pointer.value - 1][0].abort()
        self.aborted += 1

    def _of(self, capsule: Any) -> Any:
        pointer = PYTHON.PyCapsule_GetPointer(ctypes.py_object(capsule), NAME)
        return self.groups[pointer - 1][0]


class Exports:
    """In the place of torch's `reduce_tensor`; count: how often memory was given away."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        self.count += 1
        storage: Any = plain(tensor).untyped_storage()
        manager, name, size = storage._share_filename_cpu_()
        storage._shared_incref()
        handle = b"\x03c" + pickle.dumps((manager, name, size))  # the third layout, of plain memory
        shape = tensor.size(), tensor.stride(), tensor.storage_offset()
        end = (handle, size, 0, b"counter", 0, b"event", True)
        return None, (torch.Tensor, *shape, torch.storage.TypedStorage, tensor.dtype, 0, *end)


def rebuilt(*arguments: Any) -> Tensor:
    """In the place of torch's `rebuild_cuda_tensor`."""
    assert arguments[6] == 0, "the device is the reader's own"
    assert arguments[7][:2] == b"\x02c", "older versions of torch read it too"
    assert len(arguments) == 14
    return to_memory(arguments[7], arguments[1].numel())


@dataclass
class StandInWorker:
    """Reads calls by the rules of vLLM 0.32. backend: `nccl` or `ipc`. tensors: what was loaded, as references until an
    update ends, as vLLM keeps the parts of a layer."""

    backend: str
    uuid: str = UUID
    tensors: dict[str, Tensor] = field(default_factory=dict)
    opened: int = 0
    active: bool = False
    packed: bool = False
    loaded: list[str] = field(default_factory=list)
    ranks = 1

    def call(self, method: str, body: dict[str, Any]) -> None:
        """Raises ValueError or RuntimeError, as vLLM does."""
        getattr(self, method)(**body)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if self.backend == "ipc":
            assert init_info.keys() <= {"packed"}
            self.packed = bool(init_info["packed"])
            return
        assert init_info.keys() <= {"nccl_unique_id_b64", "rank_offset", "world_size", "packed"}
        assert not init_info["packed"]
        unique_id = base64.b64decode(init_info["nccl_unique_id_b64"], validate=True)
        assert len(unique_id) == 128
        self.group, self.store = gloo(unique_id, init_info["rank_offset"], init_info["world_size"])
        add_up(self.group)

    def start_weight_update(self) -> None:
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.active, self.loaded = True, []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self._receive(**update_info)
        except BaseException:
            self.active = False
            raise

    def finish_weight_update(self) -> None:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.active = False
        self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.entry: Any = None

    def shutdown_weight_transfer_engine(self) -> None:
        self.group = None

    def _receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]], **more: Any) -> None:
        assert len(names) == len(dtype_names) == len(shapes)
        kinds = [getattr(torch, name) for name in dtype_names]
        self.loaded += names
        if self.backend == "nccl":
            assert not more
            for name, dtype, shape in zip(names, kinds, shapes, strict=True):
                weight = torch.empty(shape, dtype=dtype)
                self.group.broadcast([weight]).wait()
                self.tensors[name] = weight
            return
        assert self.packed
        assert more.keys() == {"tensor_sizes", "ipc_handles_pickled"}
        arguments = pickle.loads(base64.b64decode(more["ipc_handles_pickled"]))[self.uuid]
        key = tuple(arguments)
        if getattr(self, "entry", None) is None or self.entry[0] != key:
            self.entry = key, rebuilt(*[0 if i == 6 else value for i, value in enumerate(arguments)])
            self.opened += 1
        memory = self.entry[1][: sum(more["tensor_sizes"])].split(more["tensor_sizes"])
        for name, dtype, shape, part in zip(names, kinds, shapes, memory, strict=True):
            self.tensors[name] = part.view(dtype).view(shape).clone()

    def held(self) -> dict[str, Tensor]:
        return self.tensors

    def close(self) -> None:
        pass


class RealWorker:
    """vLLM's own engine in a process of its installation. uuid: of its GPU."""

    ranks = 1

    def __init__(self, python: str, backend: str, uuid: str = UUID) -> None:
        import os
        import subprocess

        environment = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [python, __file__, backend, uuid], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()  # once it has imported everything

    def call(self, method: str, body: dict[str, Any]) -> None:
        if (error := self._ask(method, body)) is not None:
            raise RuntimeError(error)

    def held(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = pickle.loads(base64.b64decode(self._ask("held", {})))
        return found

    def close(self) -> None:
        self._process.kill()  # its exit takes long
        self._process.wait()

    def _ask(self, method: str, body: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps([method, body]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        while not (line := self._process.stdout.readline()).startswith("answer "):
            assert line, "the worker ended"
        return json.loads(line.removeprefix("answer "))


def main(backend: str, gpu: str) -> None:
    """Answer calls from standard input by vLLM's own code, but for CUDA and NCCL."""
    from types import SimpleNamespace

    from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine
    from vllm.v1.worker.gpu_worker import Worker

    class Model(torch.nn.Module):
        """Keeps references to what it is given until an update ends."""

        given: dict[str, Tensor]

        def load_weights(self, weights: Any) -> None:
            self.given = {**getattr(self, "given", {}), **dict(weights)}

    class Joined:
        def __init__(self, unique_id: bytes, rank: int, world: int, device: Any) -> None:
            self.group, self.store = gloo(unique_id, rank, world)
            add_up(self.group)

        def broadcast(self, tensor: Tensor, src: int, stream: Any) -> None:
            self.group.broadcast([tensor]).wait()

        def destroy(self) -> None:
            self.group.abort()

    torch.multiprocessing.reductions.rebuild_cuda_tensor = rebuilt
    ipc_engine.rebuild_cuda_tensor = rebuilt
    nccl_common.uid_init_process_group = Joined
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=gpu)  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,misc,return-value]
    torch.accelerator.synchronize = lambda: None  # type: ignore[assignment,misc]
    torch.accelerator.current_device_index = lambda: 0
    model = Model()
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    kind = ipc_engine.IPCWeightTransferEngine if backend == "ipc" else nccl_engine.NCCLWeightTransferEngine
    device = SimpleNamespace(index=0) if backend == "ipc" else torch.device("cpu")
    worker = object.__new__(Worker)
    worker.vllm_config, worker.rank = config, 0
    worker._weight_update_active = worker._weight_update_is_draft = False
    worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
    worker.weight_transfer_engine = kind(None, config, device, model)
    from contextlib import nullcontext

    import vllm.v1.worker.gpu_worker as module

    module.set_current_vllm_config = lambda config: nullcontext()
    print("answer null", flush=True)
    for line in sys.stdin:
        method, body = json.loads(line)
        answer: Any = None
        try:
            if method == "held":
                kept = {name: tensor.clone() for name, tensor in model.given.items()}
                answer = base64.b64encode(pickle.dumps(kept)).decode()
            else:
                getattr(worker, method)(**body)
        except Exception as error:  # noqa: BLE001 - the server's routes answer 500
            answer = f"{type(error).__name__}: {error}"
        print("answer", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
