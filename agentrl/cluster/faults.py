"""What is said of workers that died, do not answer, or raised: one line with the worker, its call and its log's end."""

import pickle
from dataclasses import dataclass
from pathlib import Path

from agentrl.cluster.errors import ClusterError, WorkerLost
from agentrl.cluster.host import Failure, Hello
from agentrl.cluster.post_mortem import Scene, Suspect, visit
from agentrl.errors import UserError

KILLED = "it was killed (SIGKILL)"
UNREACHED = "Ray has lost touch with it"
STACKS_SHOWN = 2
_WAITING = "/torch/distributed/"
"""Where a rank stands that only waits for another."""


@dataclass
class Witness:
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
    def suspect(self) -> Suspect:
        return Suspect(self.hello.node_id, self.hello.pid, self.log, self.since)


def died(witness: Witness, method: str, cause: str) -> WorkerLost:
    """A process that ended in the middle of a call, or before it."""
    scene = visit([witness.suspect])[0]
    if scene is None:
        return WorkerLost(f"{witness} died in {method!r}: {cause}, and its machine does not answer")
    if cause == UNREACHED and not scene.alive:  # Ray's own account of the death came too late
        cause = KILLED
    if scene.crash:
        cause = f"it crashed ({scene.crash}) at {scene.where}"
    elif cause == KILLED and scene.oom_kills > witness.hello.oom_kills:
        cause = "the kernel killed a process of its machine since, for memory ran out"
    quoted = (
        f"the end of {witness.log}: " + " | ".join(scene.lines) if scene.lines else f"its log {witness.log} is empty"
    )
    return WorkerLost(f"{witness} died in {method!r}: {cause}; {quoted}")


def hung(witnesses: list[Witness], method: str, seconds: float) -> WorkerLost:
    """Ranks that gave no answer in time, and where some of them stand: first those that wait for nobody."""
    scenes = zip(witnesses, visit([witness.suspect for witness in witnesses], ask=True), strict=True)
    stood = sorted(((witness, scene) for witness, scene in scenes if scene and scene.stack), key=_waits)
    ranks = ", ".join(str(witness.rank) for witness in witnesses)
    said = [f"{witness} stands at {scene.where}" for witness, scene in stood[:STACKS_SHOWN]]
    first = stood[0][0] if stood else witnesses[0]
    return WorkerLost(
        f"no answer to {method!r} from rank {ranks} of {first.group!r} within {seconds:g} seconds (cluster.timeout); "
        + "; ".join([*said, f"all stacks are in the logs, such as {first.log}"])
    )


def raised(witness: Witness, method: str, failure: Failure, advice: str) -> Exception:
    """The error that a worker raised, as the controller raises it: a UserError as it was, memory as a ClusterError,
    anything else as what it is, with the worker's traceback as a note."""
    if failure.kind == "memory":
        return ClusterError(f"{witness} ran out of memory in {method!r} ({failure.line}); {advice}")
    error = pickle.loads(failure.error) if failure.error is not None else None
    if failure.kind == "user":
        return error if isinstance(error, UserError) else UserError(failure.line)
    if not isinstance(error, Exception):
        error = RuntimeError(failure.line)
    error.add_note(f"raised by {witness} in {method!r}:\n{failure.trace}")
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


def _waits(found: tuple[Witness, Scene]) -> bool:
    return any(_WAITING in frame for frame in found[1].stack)
