"""Errors of workers that died, hang or raised: one line with the worker, its call, the end of its log or its stack."""

import math
import os
import pickle
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from agentrl.cluster.errors import ClusterError, WorkerLost, tail
from agentrl.cluster.host import STACKS, Failure, ProcessInfo, oom_kills
from agentrl.cluster.worker import last_heartbeat
from agentrl.errors import UserError

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")
KILLED = "it was killed (SIGKILL)"
DISCONNECTED = "Ray has lost touch with it"
STACKS_SHOWN = 2
"""Stacks in a message."""
LINES_SHOWN = 6
"""Lines of a log in a message."""
FRAMES_SHOWN = 4
STACK_SECONDS = 0.5
"""Time for workers to write their stacks."""
NODE_SECONDS = 15.0
"""Time for the other machines, all together, to answer; one that is gone never does."""
_LINES_READ = 400
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_FRAMEWORK = ("/agentrl/cluster/host.py", "/ray/_private/", "/ray/util/tracing/")
"""Files of the frames around a worker's own."""
_WAITING = "/torch/distributed/"
"""Files of the frames of a rank that only waits for another."""
_CRASH = "Fatal Python error: "
_RAY_CRASH_REPORT = re.compile(r"\*\*\* SIG\w+ received")
"""The first line of Ray's account of a crash, which knows addresses only."""


@dataclass(frozen=True)
class WorkerReference:
    """One worker as its controller knows it."""

    group: str
    """Name of its group."""
    rank: int
    """Its rank in the group."""
    process: ProcessInfo
    """Its process."""
    log: Path
    """Its log, on its machine."""
    since: int = 0
    """Size of the log in bytes when the worker started."""

    def __str__(self) -> str:
        return f"worker {self.rank} of {self.group!r} (pid {self.process.pid}, node {self.process.node})"


@dataclass(frozen=True)
class PostMortem:
    """What the machine of a worker shows about it."""

    lines: list[str]
    """The last lines of its log that are its own."""
    crash: str
    """The interpreter's name for the crash, such as `Segmentation fault`; empty without one."""
    stack: list[str]
    """Frames as `file:line name`, innermost first: of the thread that crashed, or of the main thread if stacks were
    asked for; empty if the log has none."""
    oom_kills: int
    """Processes that the kernel of its machine has killed for memory so far."""
    alive: bool
    """Whether its process still runs."""

    @property
    def where(self) -> str:
        """The innermost frames, in a line."""
        shown = [f"{name} ({Path(place).name})" for place, _, name in (frame.rpartition(" ") for frame in self.stack)]
        return " < ".join(shown[:FRAMES_SHOWN])

    @property
    def waits(self) -> bool:
        """Whether it stands in a collective, that is waits for other ranks."""
        return any(_WAITING in frame for frame in self.stack)


def worker_died(worker: WorkerReference, method: str, cause: str) -> WorkerLost:
    """The error for a process that ended in or before the call of `method`."""
    post_mortem = examine([worker])[0]
    if post_mortem is None:
        return WorkerLost(f"{worker} died in {method!r}: {cause}, and its machine does not answer")
    if cause == DISCONNECTED and not post_mortem.alive:  # Ray's own account of the death came too late
        cause = KILLED
    if post_mortem.crash:
        cause = f"it crashed ({post_mortem.crash}) at {post_mortem.where}"
    elif cause == KILLED and post_mortem.oom_kills > worker.process.oom_kills:
        cause = "the kernel killed a process of its machine since, for memory ran out"
    quoted = " | ".join(post_mortem.lines)
    ending = f"the end of {worker.log}: {quoted}" if quoted else f"its log {worker.log} is empty"
    return WorkerLost(f"{worker} died in {method!r}: {cause}; {ending}")


def worker_hung(workers: list[WorkerReference], method: str, seconds: float) -> WorkerLost:
    """The error for ranks that did not answer in time, with the stacks of some: first of those that wait for no
    other rank."""
    examined = zip(workers, examine(workers, ask=True), strict=True)
    stacks = sorted(((worker, found) for worker, found in examined if found and found.stack), key=lambda s: s[1].waits)
    ranks = ", ".join(str(worker.rank) for worker in workers)
    shown = [f"{worker} stands at {found.where}" for worker, found in stacks[:STACKS_SHOWN]]
    first = stacks[0][0] if stacks else workers[0]
    return WorkerLost(
        f"no answer to {method!r} from rank {ranks} of {first.group!r} within {seconds:g} seconds (cluster.timeout); "
        + "; ".join([*shown, f"all stacks are in the logs, such as {first.log}"])
    )


def worker_raised(worker: WorkerReference, method: str, failure: Failure, advice: str) -> Exception:
    """The error that a worker raised, as the controller raises it: a UserError unchanged, memory as a
    ClusterError, any other error with the worker's traceback as a note."""
    if failure.kind == "memory":
        return ClusterError(f"{worker} ran out of memory in {method!r} ({failure.line}); {advice}")
    error = pickle.loads(failure.error) if failure.error is not None else None
    if failure.kind == "user":
        return error if isinstance(error, UserError) else UserError(failure.line)
    if not isinstance(error, Exception):
        error = RuntimeError(failure.line)
    error.add_note(f"raised by {worker} in {method!r}:\n{failure.trace}")
    return error


def cause_of_death(error: Exception) -> str:
    """Ray's reason why a process is gone, in a line."""
    text = str(error)
    if "running low on memory" in text or type(error).__name__ == "OutOfMemoryError":
        return "Ray ended it, because its machine ran low on memory"
    if type(error).__name__ == "NodeDiedError" or "node is dead" in text or "node died" in text:
        return "its machine left the cluster"
    if type(error).__name__ == "ActorUnavailableError":
        return DISCONNECTED
    if "connection error code 2" in text or "SYSTEM_ERROR" in text:
        return KILLED
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if type(error).__name__.startswith("RayTaskError") else 0]  # a traceback ends with its error


def examine(workers: list[WorkerReference], ask: bool = False) -> list[PostMortem | None]:
    """Look at workers, each on its machine, all machines at once. ask: make them write their stacks first. None for
    those on a machine that does not answer."""
    return _on_machines(workers, examine_here, ask)


def silence(workers: list[WorkerReference]) -> float:
    """For how many seconds the worker that has been silent the longest has given no sign of progress (see
    `Worker.heartbeat`); infinity where one has never given any, or its machine does not answer."""
    found = _on_machines(workers, silence_here)
    return max((math.inf if seconds is None else seconds for seconds in found), default=math.inf)


def silence_here(workers: list[WorkerReference]) -> list[float]:
    """The seconds of each worker of this machine since its last sign of progress."""
    return [time.time() - at if (at := last_heartbeat(worker.log)) is not None else math.inf for worker in workers]


def _on_machines(workers: list[WorkerReference], look: Callable[..., list[T]], *arguments: object) -> list[T | None]:
    """Call `look(workers, *arguments)` with the workers of each machine on that machine, all at once; return what it
    gives for each worker, None for those on a machine that does not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own_node = ray.get_runtime_context().get_node_id()
    by_node: dict[str, list[WorkerReference]] = {}
    for worker in workers:
        by_node.setdefault(worker.process.node_id, []).append(worker)
    tasks: dict[str, ObjectRef[Iterable[T]]] = {
        node_id: ray.remote(look)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(there, *arguments)
        for node_id, there in by_node.items()
        if node_id != own_node
    }
    found: dict[WorkerReference, T] = {}
    if own := by_node.get(own_node):
        found.update(zip(own, look(own, *arguments), strict=True))
    if tasks:
        ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=NODE_SECONDS)
    for node_id, task in tasks.items():
        try:
            found.update(zip(by_node[node_id], ray.get(task, timeout=0.1), strict=True))
        except (ray.exceptions.RayError, TimeoutError):
            continue
    return [found.get(worker) for worker in workers]


def examine_here(workers: list[WorkerReference], ask: bool) -> list[PostMortem]:
    """Look at workers of this machine."""
    logs = [tail(worker.log, _LINES_READ, worker.since) for worker in workers]
    if ask:
        for worker in workers:
            try:
                os.kill(worker.process.pid, STACKS)
            except ProcessLookupError:
                continue
        time.sleep(STACK_SECONDS)
    return [
        _post_mortem(log, tail(worker.log, _LINES_READ, worker.since) if ask else [], _alive(worker.process.pid))
        for worker, log in zip(workers, logs, strict=True)
    ]


def _post_mortem(log: list[str], stacks: list[str], alive: bool) -> PostMortem:
    """log: before stacks were asked for; stacks: after."""
    crashes = [index for index, line in enumerate(log) if line.startswith(_CRASH)]
    if not crashes:
        return PostMortem(log[-LINES_SHOWN:], "", last_stack(stacks), oom_kills(), alive)
    own, dump = log[: crashes[-1]], log[crashes[-1] :]
    own = own[: next((index for index, line in enumerate(own) if _RAY_CRASH_REPORT.match(line)), len(own))]
    crash = dump[0].removeprefix(_CRASH)
    return PostMortem(own[-LINES_SHOWN:], crash, last_stack(dump, "Current thread"), oom_kills(), alive)


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def last_stack(lines: list[str], thread: str = "") -> list[str]:
    """The frames of the last thread in lines with dumps of faulthandler: the main one, which comes last in a
    dump. thread: the beginning of its line, if another is meant."""
    starts = [
        index
        for index, line in enumerate(lines)
        if line.startswith(thread) and line.endswith("(most recent call first):")
    ]
    if not starts:
        return []
    after = lines[starts[-1] + 1 :]
    end = next((index for index, line in enumerate(after) if not line.startswith("  ")), len(after))
    return [
        f"{frame['file']}:{frame['line']} {frame['name']}"
        for frame in filter(None, map(_FRAME.match, after[:end]))
        if not any(part in frame["file"] for part in _FRAMEWORK)
    ]
