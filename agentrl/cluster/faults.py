"""What is said of workers that died, do not answer, or raised: one line with the worker, its call and its log's end."""

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentrl.cluster.errors import ClusterError, WorkerLost
from agentrl.cluster.host import STACKS, Failure, Hello
from agentrl.cluster.tail import tail
from agentrl.errors import UserError

T = TypeVar("T")
QUOTED = 6
"""Lines of a log in a message."""
FRAMES = 4
STACK_SECONDS = 0.5
"""What a worker is given to write its stacks."""
REMOTE_SECONDS = 10.0
"""What a node is given to tell of a worker; a node that is gone tells nothing."""


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

    def last_lines(self) -> list[str]:
        """Of its log, read on its own node."""
        log, since = self.log, self.since
        return _on_node(self.hello.node_id, lambda: tail(log, QUOTED, since)) or []

    def stack(self) -> list[str]:
        """Where it stands, innermost call first. Empty when it cannot be asked."""
        log, since, pid = self.log, self.since, self.hello.pid

        def ask() -> list[str]:
            try:
                os.kill(pid, STACKS)
            except ProcessLookupError:
                return []
            time.sleep(STACK_SECONDS)
            return tail(log, 200, since)

        return main_stack(_on_node(self.hello.node_id, ask) or [])


def died(witness: Witness, method: str, cause: str) -> WorkerLost:
    """A process that ended in the middle of a call, or before it."""
    return WorkerLost(f"{witness} died in {method!r}: {cause}{_quoted(witness)}")


def hung(witnesses: list[Witness], method: str, seconds: float) -> WorkerLost:
    """Ranks that gave no answer in time, and where the first of them stands."""
    ranks = ", ".join(str(witness.rank) for witness in witnesses)
    stood = [f"{witness} stands at {' < '.join(stack)}" for witness in witnesses[:2] if (stack := witness.stack())]
    return WorkerLost(
        f"no answer to {method!r} from rank {ranks} of {witnesses[0].group!r} within {seconds:g} seconds "
        f"(cluster.timeout){'; ' + '; '.join(stood) if stood else ''}; see {witnesses[0].log}"
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


def main_stack(lines: list[str]) -> list[str]:
    """The innermost calls of the main thread, which comes last in a dump of faulthandler, from the log's last dump."""
    starts = [at for at, line in enumerate(lines) if "(most recent call first):" in line]
    if not starts:
        return []
    frames = [line.strip().removeprefix("File ") for line in lines[starts[-1] + 1 :] if line.startswith("  File ")]
    return frames[:FRAMES]


def _quoted(witness: Witness) -> str:
    lines = witness.last_lines()
    return f"; the end of {witness.log}: " + " | ".join(lines) if lines else f"; its log {witness.log} is empty"


def _on_node(node_id: str, work: Callable[[], T]) -> T | None:
    """Run something on a node, also this one; None when the node does not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if node_id == ray.get_runtime_context().get_node_id():
        return work()
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(work).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        return ray.get(task.remote(), timeout=REMOTE_SECONDS)
    except (ray.exceptions.RayError, TimeoutError):
        return None
