"""`WorkerGroup`: many workers that are called like one object. Once a worker is lost, the group is over."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agentrl.cluster.dispatch import Arguments, Dispatch, Shape, registered
from agentrl.cluster.errors import ClusterError, WorkerLost
from agentrl.cluster.host import Answer, Failure, ProcessInfo
from agentrl.cluster.pool import ResourcePool
from agentrl.cluster.post_mortem import (
    WorkerReference,
    cause_of_death,
    silence,
    worker_died,
    worker_hung,
    worker_raised,
)
from agentrl.cluster.session import Session
from agentrl.cluster.spawn import pickled, spawn, starts, wait_for_processes

if TYPE_CHECKING:
    from ray import ObjectRef

GRACE_SECONDS = 2.0
"""Time for the other ranks to answer once one has raised: they may raise too, or wait for it for ever."""
START_SECONDS = 180.0
"""Minimum time allowed for starting workers, whatever the group's timeout: imports take long on a busy machine."""
CLOSE_SECONDS = 5.0
_PRECEDENCE = {"memory": 0, "user": 1, "error": 2}
"""The order in which failures of several ranks are reported: the others may be consequences of the first."""


class Future:
    """The result of a call in flight."""

    def __init__(
        self,
        group: "WorkerGroup",
        method: str,
        refs: "dict[ObjectRef[Answer], int]",
        gather: Callable[[list[object]], object],
    ) -> None:
        self._group, self._method, self._refs, self._gather = group, method, refs, gather

    def result(self) -> Any:
        """Wait for the result. May be called once, from any thread.

        Raises what the workers raised: UserError unchanged, ClusterError for memory, other exceptions with the worker's
        traceback as a note; WorkerLost if one died, or if none answered any call, or gave a sign of progress, within
        the group's timeout.
        """
        return self._gather(self._group.collect(self._method, self._refs))


class Method:
    """A registered method of the workers. A call goes to the workers that its dispatch selects."""

    def __init__(self, group: "WorkerGroup", name: str, dispatch: Dispatch, blocking: bool) -> None:
        self._group, self._name, self._dispatch, self._blocking = group, name, dispatch, blocking

    def __call__(self, *args: object, **kwargs: object) -> Any:
        future = self.future(*args, **kwargs)
        return future.result() if self._blocking else future

    def future(self, *args: object, **kwargs: object) -> Future:
        """Send the call and return at once."""
        shape, dispatch = self._group.shape, self._dispatch
        calls, context = dispatch.scatter(shape, args, kwargs)
        if len(calls) != shape.workers:
            raise ValueError(f"dispatch {dispatch.name!r} gave {len(calls)} calls for {shape.workers} workers")
        refs = self._group.send(self._name, calls)
        return Future(self._group, self._name, refs, lambda outputs: dispatch.gather(shape, outputs, context))


class WorkerGroup:
    """SPMD workers of one class, one for each slot of a pool. The class's registered methods are methods of the group.
    Every worker sees the calls in the same order, from however many threads they come.

    sharing: number of ranks that share a part of the data. timeout: seconds without an answer or a sign of
    progress (`Worker.heartbeat`) after which workers count as hung (START_SECONDS at least while they start). logs:
    folder on each worker's machine, for `<name>_<rank>.log`.

    Raises ClusterError if processes do not start, and what the workers' `__init__` raises.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker_class: type,
        *args: object,
        name: str,
        logs: Path,
        timeout: float = 600.0,
        sharing: int = 1,
        **kwargs: object,
    ) -> None:
        if pool.workers % sharing:
            raise ClusterError(f"{sharing} workers that share data have to divide the {pool.workers} of {name!r}")
        self.name, self.timeout = name, timeout
        self.shape = Shape(pool.workers, sharing)
        self._advice = getattr(worker_class, "memory_advice", "give it less at once")
        self._sending = threading.Lock()
        self._open: dict[ObjectRef[Answer], tuple[int, str]] = {}  # calls not answered yet, oldest first: rank, method
        self._alive = 0.0  # when a worker last answered, or gave a sign of progress as far as that was asked
        self._lost: WorkerLost | None = None
        self._references: list[WorkerReference] = []
        self._bind(worker_class)
        worker = pickled(worker_class, args, kwargs)
        self._pool, self._actors = pool.take(name), spawn(pool)
        try:
            self._start(worker, logs)
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
        """The workers' log files, by rank."""
        return [worker.log for worker in self._references]

    @property
    def workers(self) -> list[ProcessInfo]:
        """The workers' processes, by rank."""
        return [worker.process for worker in self._references]

    def send(self, method: str, calls: Sequence[Arguments | None]) -> "dict[ObjectRef[Answer], int]":
        """Start a call on every rank that has arguments. Returns object reference -> rank."""
        if self._lost is None and self._actors:
            payloads = self._payloads(calls)
            with self._sending:
                refs = {
                    actor.call.remote(method, payload): rank
                    for rank, (actor, payload) in enumerate(zip(self._actors, payloads, strict=False))
                    if payload is not None
                }
                self._open.update((ref, (rank, method)) for ref, rank in refs.items())
                return refs
        raise self._lost or ClusterError(f"the group {self.name!r} was closed")

    def collect(self, method: str, refs: "dict[ObjectRef[Answer], int]", timeout: float | None = None) -> list[Any]:
        """The outputs by rank, None for ranks that were not called. timeout: seconds, in place of the group's.
        Raises as `Future.result` does."""
        timeout = self.timeout if timeout is None else timeout
        outputs: list[Any] = [None] * self.shape.workers
        failures: dict[int, Failure] = {}
        waiting, began = dict(refs), time.monotonic()
        while waiting:
            until = max(began, self._alive) + (GRACE_SECONDS if failures else timeout)
            if (answered := self._next(method, waiting, until - time.monotonic())) is not None:
                rank, answer = answered
                outputs[rank] = answer.value
                if answer.failure is not None:
                    failures[rank] = answer.failure
            elif failures:
                break
            elif time.monotonic() > max(began, self._alive) + timeout:  # nor an answer to another thread's call
                silent = [self._references[rank] for rank in waiting.values()]
                self._alive = max(self._alive, time.monotonic() - silence(silent))
                if time.monotonic() > max(began, self._alive) + timeout:
                    raise self._end(worker_hung(silent, method, timeout))
        if failures:
            raise self._raised(method, failures, complete=not waiting)
        return outputs

    def close(self) -> None:
        """End the workers, after each has released its resources."""
        import ray

        if self._actors and self._lost is None and Session.reachable():
            closed = [actor.close.remote() for actor in self._actors]
            ray.wait(closed, num_returns=len(closed), timeout=CLOSE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the workers at once."""
        import ray

        with self._sending:
            actors, self._actors = self._actors, []
        if actors:
            self._pool.give()
        if Session.reachable():
            for actor in actors:
                ray.kill(actor)

    def _bind(self, worker_class: type) -> None:
        methods = registered(worker_class)
        if clash := sorted(name for name in methods if hasattr(type(self), name)):
            raise TypeError(f"{worker_class.__name__} registers {clash[0]!r}, which is a name of WorkerGroup itself")
        for name, (dispatch, blocking) in methods.items():
            setattr(self, name, Method(self, name, dispatch, blocking))

    def _start(self, worker: bytes, logs: Path) -> None:
        processes = wait_for_processes(self._actors, self.name)
        self._pool.check_devices([(process.node, process.gpus) for process in processes])
        settings = starts(processes, self._pool.by_node, worker, logs, self.name, gpu=self._pool.gpu)
        self._references = [
            WorkerReference(self.name, rank, process, Path(start.log))
            for rank, (process, start) in enumerate(zip(processes, settings, strict=True))
        ]
        refs = {actor.start.remote(settings[rank]): rank for rank, actor in enumerate(self._actors)}
        sizes = self.collect("__init__", refs, max(self.timeout, START_SECONDS))
        self._references = [replace(worker, since=since) for worker, since in zip(self._references, sizes, strict=True)]

    def _payloads(self, calls: Sequence[Arguments | None]) -> list[object]:
        """Put arguments that several ranks share into the object store, once."""
        import ray

        distinct = {id(call): call for call in calls if call is not None and any(call)}
        ids = [id(call) for call in calls]
        shared = {key: ray.put(call) for key, call in distinct.items() if ids.count(key) > 1}
        return [shared.get(id(call), call) for call in calls]

    def _next(self, method: str, waiting: "dict[ObjectRef[Answer], int]", seconds: float) -> tuple[int, Answer] | None:
        """Take the next answer off `waiting`; return its rank and it, None if none came in time. Raises WorkerLost."""
        import ray

        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(seconds, 0.0))
        if not ready:
            return None
        rank = waiting.pop(ready[0])
        try:
            answer = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            if self._lost is not None:  # another thread ended the group, with every call in flight
                raise self._lost from None
            cause = cause_of_death(error) if Session.reachable() else "Ray itself has ended on the controller's machine"
            raise self._end(worker_died(self._references[rank], self._running(rank) or method, cause)) from None
        self._alive = time.monotonic()
        with self._sending:
            self._open.pop(ready[0], None)
        return rank, answer

    def _running(self, rank: int) -> str | None:
        """The call in which a dead worker ended: its oldest without an answer, from whichever thread."""
        import ray

        with self._sending:
            calls = [(ref, method) for ref, (called, method) in self._open.items() if called == rank]
        for ref, method in calls:
            try:
                ray.get(ref, timeout=0)
            except (ray.exceptions.RayError, TimeoutError):
                return method
        return None

    def _raised(self, method: str, failures: dict[int, Failure], complete: bool) -> Exception:
        """The error for the caller when some ranks failed. If others gave no answer, the group ends."""
        rank = min(failures, key=lambda rank: _PRECEDENCE[failures[rank].kind])  # the first of equals
        worker, failure = self._references[rank], failures[rank]
        if not complete:
            self._end(WorkerLost(f"the group {self.name!r} ended when {worker} failed: {failure.line}"))
        return worker_raised(worker, method, failure, self._advice)

    def _end(self, lost: WorkerLost) -> WorkerLost:
        self._lost = lost
        self.kill()
        return lost
