"""`WorkerGroup`: many workers that are called like one object. Once a worker is lost, the group is over."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from agentrl.cluster import faults
from agentrl.cluster.dispatch import Arguments, Dispatch, Shape, registered
from agentrl.cluster.errors import ClusterError, WorkerLost
from agentrl.cluster.faults import Witness
from agentrl.cluster.host import Answer, Failure, Hello
from agentrl.cluster.pool import ResourcePool
from agentrl.cluster.spawn import environments, spawn, starts

SPAWN_SECONDS = 180.0
"""Until the processes run; what their workers load comes after it."""
GRACE_SECONDS = 2.0
"""What the other ranks are given once one has raised: they may say more, or wait for it for ever."""
CLOSE_SECONDS = 5.0


class Future:
    """The result of a call that is under way."""

    def __init__(
        self, group: "WorkerGroup", method: str, refs: dict[Any, int], gather: Callable[[list[Any]], Any]
    ) -> None:
        self._group, self._method, self._refs, self._gather = group, method, refs, gather

    def result(self) -> Any:
        """Wait for it, at most the group's timeout from now or from the last answer on. May be called once.

        Raises what the workers raised: UserError as it was, ClusterError for memory, other exceptions with the
        worker's traceback as a note; WorkerLost when one died or gave no answer.
        """
        return self._gather(self._group.collect(self._method, self._refs))


class Method:
    """A registered method of the workers: called, it goes to all that its dispatch names."""

    def __init__(self, group: "WorkerGroup", name: str, dispatch: Dispatch, blocking: bool) -> None:
        self._group, self._name, self._dispatch, self._blocking = group, name, dispatch, blocking

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        future = self.future(*args, **kwargs)
        return future.result() if self._blocking else future

    def future(self, *args: Any, **kwargs: Any) -> Future:
        """Send the call and come back at once."""
        shape, dispatch = self._group.shape, self._dispatch
        calls, kept = dispatch.scatter(shape, args, kwargs)
        if len(calls) != shape.workers:
            raise ValueError(f"dispatch {dispatch.name!r} gave {len(calls)} calls for {shape.workers} workers")
        refs = self._group.send(self._name, calls)
        return Future(self._group, self._name, refs, lambda outputs: dispatch.gather(shape, outputs, kept))


class WorkerGroup:
    """SPMD workers of one class in a pool, one a place. The class's registered methods are methods of the group.

    sequence_parallel: how many ranks share a part of the data. timeout: seconds without an answer after which workers
    count as hung, the making of them included. logs: folder on each worker's machine for `<name>_<rank>.log`.

    Raises ClusterError when processes do not start, and what the workers' `__init__` raises.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker_class: type,
        *args: Any,
        name: str,
        logs: Path,
        timeout: float = 600.0,
        sequence_parallel: int = 1,
        **kwargs: Any,
    ) -> None:
        if pool.workers % sequence_parallel:
            raise ClusterError(
                f"{pool.workers} workers cannot be grouped by cluster.sequence_parallel={sequence_parallel}; "
                f"it has to divide them"
            )
        self.name, self.timeout = name, timeout
        self.shape = Shape(pool.workers, sequence_parallel)
        self._advice = getattr(worker_class, "memory_advice", "give it less at once")
        self._lost: WorkerLost | None = None
        self._witnesses: list[Witness] = []
        self._bind(worker_class)
        self._actors = spawn(pool)
        try:
            self._start(pool, _pickled(worker_class, args, kwargs), logs)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close() if kind is None else self.kill()

    def __len__(self) -> int:
        return self.shape.workers

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the workers of {self.__dict__.get('name')!r} have no registered method {name!r}")

    @property
    def logs(self) -> list[Path]:
        """By rank."""
        return [witness.log for witness in self._witnesses]

    @property
    def workers(self) -> list[Hello]:
        """Who they are, by rank."""
        return [witness.hello for witness in self._witnesses]

    def send(self, method: str, calls: Sequence[Arguments | None]) -> dict[Any, int]:
        """Start a call on every rank that has arguments; object reference -> rank."""
        if self._lost is not None:
            raise self._lost
        if not self._actors:
            raise ClusterError(f"the group {self.name!r} was closed")
        payloads = self._payloads(calls)
        return {
            actor.call.remote(method, payload): rank
            for rank, (actor, payload) in enumerate(zip(self._actors, payloads, strict=True))
            if payload is not None
        }

    def collect(self, method: str, refs: dict[Any, int]) -> list[Any]:
        """The outputs by rank, None of those not called. See `Future.result` for what it raises."""
        outputs: list[Any] = [None] * self.shape.workers
        failures: dict[int, Failure] = {}
        waiting = dict(refs)
        while waiting:
            answers = self._next(method, waiting, GRACE_SECONDS if failures else self.timeout)
            if not answers:
                if not failures:
                    raise self._end(
                        faults.hung([self._witnesses[rank] for rank in waiting.values()], method, self.timeout)
                    )
                break
            for rank, answer in answers.items():
                outputs[rank] = answer.value
                if answer.failure is not None:
                    failures[rank] = answer.failure
        if failures:
            raise self._raised(method, failures, complete=not waiting)
        return outputs

    def close(self) -> None:
        """End the workers, after each has let go of what it holds."""
        import ray

        if self._actors and self._lost is None and ray.is_initialized():
            ray.wait(
                [actor.close.remote() for actor in self._actors], num_returns=len(self._actors), timeout=CLOSE_SECONDS
            )
        self.kill()

    def kill(self) -> None:
        """End the workers as they are."""
        import ray

        actors, self._actors = self._actors, []
        if ray.is_initialized():
            for actor in actors:
                ray.kill(actor)

    def _bind(self, worker_class: type) -> None:
        methods = registered(worker_class)
        if clash := sorted(name for name in methods if hasattr(type(self), name)):
            raise TypeError(f"{worker_class.__name__} registers {clash[0]!r}, which is a name of WorkerGroup itself")
        for name, (dispatch, blocking) in methods.items():
            setattr(self, name, Method(self, name, dispatch, blocking))

    def _start(self, pool: ResourcePool, worker: bytes, logs: Path) -> None:
        hellos = self._hellos()
        told = starts(environments(hellos, pool.by_node), worker, logs, self.name)
        self._witnesses = [
            Witness(self.name, rank, hello, Path(start.log))
            for rank, (hello, start) in enumerate(zip(hellos, told, strict=True))
        ]
        refs = {
            actor.start.remote(start): rank for rank, (actor, start) in enumerate(zip(self._actors, told, strict=True))
        }
        for witness, since in zip(self._witnesses, self.collect("__init__", refs), strict=True):
            witness.since = since

    def _hellos(self) -> list[Hello]:
        import ray

        refs = [actor.hello.remote() for actor in self._actors]
        ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=SPAWN_SECONDS)
        if waiting:
            raise ClusterError(
                f"{len(waiting)} of the {len(refs)} processes of {self.name!r} did not start within "
                f"{SPAWN_SECONDS:.0f} seconds; see `ray status`, and whether every machine has agentrl"
            )
        try:
            return ray.get(ready)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"a process of {self.name!r} did not start: {_cause(error)}") from None

    def _payloads(self, calls: Sequence[Arguments | None]) -> list[Any]:
        """What several ranks are given alike is put into the object store once."""
        import ray

        ids = [id(call) for call in calls]
        shared = {
            id(call): ray.put(call)
            for call in calls
            if call is not None and call != ((), {}) and ids.count(id(call)) > 1
        }
        return [shared.get(id(call), call) for call in calls]

    def _next(self, method: str, waiting: dict[Any, int], seconds: float) -> dict[int, Answer]:
        """The next answers, taken from `waiting`; none when nothing came in time. Raises WorkerLost."""
        import ray

        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=seconds)
        answers = {}
        for ref in ready:
            rank = waiting.pop(ref)
            try:
                answers[rank] = ray.get(ref)
            except ray.exceptions.RayError as error:
                raise self._end(faults.died(self._witnesses[rank], method, _cause(error))) from None
        return answers

    def _raised(self, method: str, failures: dict[int, Failure], complete: bool) -> Exception:
        """The one that says most: of the first to answer, memory before anything else."""
        order = {"memory": 0, "user": 1, "error": 2}
        rank = min(failures, key=lambda rank: order[failures[rank].kind])
        error = faults.raised(self._witnesses[rank], method, failures[rank], self._advice)
        if not complete:
            self._end(
                WorkerLost(f"the group {self.name!r} ended when {self._witnesses[rank]} failed: {failures[rank].line}")
            )
        return error

    def _end(self, lost: WorkerLost) -> WorkerLost:
        self._lost = lost
        self.kill()
        return lost


def _pickled(worker_class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    from ray import cloudpickle

    try:
        return cloudpickle.dumps((worker_class, args, kwargs))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise TypeError(
            f"what {worker_class.__name__} is made of cannot be sent to another process: {error}"
        ) from error


def _cause(error: Exception) -> str:
    """What Ray says of a process that is gone, in a line."""
    said = str(error)
    if "running low on memory" in said or type(error).__name__ == "OutOfMemoryError":
        return "Ray ended it, because the machine ran low on memory"
    if "node" in said and ("died" in said or "dead" in said) and type(error).__name__ == "NodeDiedError":
        return "its machine left the cluster"
    if "connection error code 2" in said or "SYSTEM_ERROR" in said:
        return "it was killed (SIGKILL, as the kernel does when memory runs out) or crashed"
    return next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
