"""What is said of workers that died, do not answer, or raised: one line with the worker, its call and its log's end."""

import pickle
from dataclasses import dataclass
from pathlib import Path

from agentrl.cluster.errors import ClusterError, WorkerLost
from agentrl.cluster.host import Failure, Hello
from agentrl.cluster.post_mortem import LostProcess, PostMortem, examine
from agentrl.errors import UserError

KILLED = "it was killed (SIGKILL)"
UNREACHED = "Ray has lost touch with it"
STACKS_SHOWN = 2
_WAITING = "/torch/distributed/"
"""Where a rank stands that only waits for another."""


@dataclass
class WorkerReference:
    """One worker as its controller knows it."""

    group: str
    rank: int
    hello: Hello
    log: Path
    since: int = 0
    """The byte from which on its log is its own."""

    def __str__(self) -> str:
        return f"worker {self.rank} of {self.group!r} (pid {self.hello.pid}, node {self.hello.node})"

    @property
    def process(self) -> LostProcess:
        return LostProcess(self.hello.node_id, self.hello.pid, self.log, self.since)


def worker_died(worker: WorkerReference, method: str, cause: str) -> WorkerLost:
    """A process that ended in the middle of a call, or before it."""
    post_mortem = examine([worker.process])[0]
    if post_mortem is None:
        return WorkerLost(f"{worker} died in {method!r}: {cause}, and its machine does not answer")
    if cause == UNREACHED and not post_mortem.alive:  # Ray's own account of the death came too late
        cause = KILLED
    if post_mortem.crash:
        cause = f"it crashed ({post_mortem.crash}) at {post_mortem.where}"
    elif cause == KILLED and post_mortem.oom_kills > worker.hello.oom_kills:
        cause = "the kernel killed a process of its machine since, for memory ran out"
    quoted = (
        f"the end of {worker.log}: " + " | ".join(post_mortem.lines)
        if post_mortem.lines
        else f"its log {worker.log} is empty"
    )
    return WorkerLost(f"{worker} died in {method!r}: {cause}; {quoted}")


def worker_hung(workers: list[WorkerReference], method: str, seconds: float) -> WorkerLost:
    """Ranks that gave no answer in time, and where some of them stand: first those that wait for nobody."""
    post_mortems = zip(workers, examine([worker.process for worker in workers], ask=True), strict=True)
    stood = sorted(
        ((worker, post_mortem) for worker, post_mortem in post_mortems if post_mortem and post_mortem.stack), key=_waits
    )
    ranks = ", ".join(str(worker.rank) for worker in workers)
    said = [f"{worker} stands at {post_mortem.where}" for worker, post_mortem in stood[:STACKS_SHOWN]]
    first = stood[0][0] if stood else workers[0]
    return WorkerLost(
        f"no answer to {method!r} from rank {ranks} of {first.group!r} within {seconds:g} seconds (cluster.timeout); "
        + "; ".join([*said, f"all stacks are in the logs, such as {first.log}"])
    )


def raised(worker: WorkerReference, method: str, failure: Failure, advice: str) -> Exception:
    """The error that a worker raised, as the controller raises it: a UserError as it was, memory as a ClusterError,
    anything else as what it is, with the worker's traceback as a note."""
    if failure.kind == "memory":
        return ClusterError(f"{worker} ran out of memory in {method!r} ({failure.line}); {advice}")
    error = pickle.loads(failure.error) if failure.error is not None else None
    if failure.kind == "user":
        return error if isinstance(error, UserError) else UserError(failure.line)
    if not isinstance(error, Exception):
        error = RuntimeError(failure.line)
    error.add_note(f"raised by {worker} in {method!r}:\n{failure.trace}")
    return error


def cause(error: Exception) -> str:
    """What Ray says of a process that is gone, in a line."""
    said = str(error)
    if "running low on memory" in said or type(error).__name__ == "OutOfMemoryError":
        return "Ray ended it, because its machine ran low on memory"
    if type(error).__name__ == "NodeDiedError" or "node is dead" in said or "node died" in said:
        return "its machine left the cluster"
    if type(error).__name__ == "ActorUnavailableError":
        return UNREACHED
    if "connection error code 2" in said or "SYSTEM_ERROR" in said:
        return KILLED
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if type(error).__name__.startswith("RayTaskError") else 0]  # a traceback ends with what it is about


def _waits(found: tuple[WorkerReference, PostMortem]) -> bool:
    return any(_WAITING in frame for frame in found[1].stack)
