"""What can be seen of a worker from its own machine: the end of its log, and the stack it stands at."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.cluster.host import STACKS, oom_kills
from agentrl.cluster.tail import tail

QUOTED = 6
"""Lines of a log in a message."""
FRAMES = 4
STACK_SECONDS = 0.5
"""What workers are given to write their stacks."""
NODE_SECONDS = 15.0
"""What the other machines are given, together; one that is gone tells nothing."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_AROUND = ("/agentrl/cluster/host.py", "/ray/_private/", "/ray/util/tracing/")
"""Frames below a worker's own."""
_CRASH = "Fatal Python error: "
_RAYS_OWN = re.compile(r"\*\*\* SIG\w+ received")
"""Where Ray's account of a crash begins; it knows addresses only."""
_READ = 400


@dataclass(frozen=True)
class LostProcess:
    """A worker to be looked at."""

    node_id: str
    pid: int
    log: Path
    since: int


@dataclass(frozen=True)
class PostMortem:
    lines: list[str]
    """The last that it said itself."""
    crash: str
    """What the interpreter called the crash, such as `Segmentation fault`; empty without one."""
    stack: list[str]
    """Frames as `file:line name`, innermost first, of the thread that crashed, or else of the main thread where it was
    asked; empty where it said nothing."""
    oom_kills: int
    alive: bool
    """Whether its process is still there."""

    @property
    def where(self) -> str:
        """The innermost frames, in a line."""
        shown = [f"{name} ({Path(place).name})" for place, _, name in (frame.rpartition(" ") for frame in self.stack)]
        return " < ".join(shown[:FRAMES])


def examine(processes: list[LostProcess], ask: bool = False) -> list[PostMortem | None]:
    """Look at workers, each on its machine, all machines at once. ask: for their stacks. None for those on a machine
    that does not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    by_node: dict[str, list[LostProcess]] = {}
    for process in processes:
        by_node.setdefault(process.node_id, []).append(process)
    tasks: dict[str, Any] = {
        node_id: ray.remote(look)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(there, ask)
        for node_id, there in by_node.items()
        if node_id != here
    }
    found = dict(zip(by_node.get(here, []), look(by_node[here], ask), strict=True)) if here in by_node else {}
    ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=NODE_SECONDS) if tasks else None
    for node_id, task in tasks.items():
        try:
            found.update(zip(by_node[node_id], ray.get(task, timeout=0.1), strict=True))
        except (ray.exceptions.RayError, TimeoutError):
            continue
    return [found.get(process) for process in processes]


def look(processes: list[LostProcess], ask: bool) -> list[PostMortem]:
    """At workers of this machine."""
    said = [tail(process.log, _READ, process.since) for process in processes]
    if ask:
        for process in processes:
            try:
                os.kill(process.pid, STACKS)
            except ProcessLookupError:
                continue
        time.sleep(STACK_SECONDS)
    return [
        _post_mortem(lines, tail(process.log, _READ, process.since) if ask else [], _alive(process.pid))
        for process, lines in zip(processes, said, strict=True)
    ]


def _post_mortem(said: list[str], asked: list[str], alive: bool) -> PostMortem:
    crashes = [at for at, line in enumerate(said) if line.startswith(_CRASH)]
    if crashes:
        own, dump = said[: crashes[-1]], said[crashes[-1] :]
        own = own[: next((at for at, line in enumerate(own) if _RAYS_OWN.match(line)), len(own))]
        return PostMortem(
            own[-QUOTED:], dump[0].removeprefix(_CRASH), stack(dump, "Current thread"), oom_kills(), alive
        )
    return PostMortem(said[-QUOTED:], "", stack(asked), oom_kills(), alive)


def _alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stack(lines: list[str], thread: str = "") -> list[str]:
    """The frames of the last thread in lines with dumps of faulthandler: the main one, which comes last in a dump.
    thread: how its line begins, if another is meant."""
    begins = [
        at for at, line in enumerate(lines) if line.startswith(thread) and line.endswith("(most recent call first):")
    ]
    if not begins:
        return []
    after = lines[begins[-1] + 1 :]
    end = next((at for at, line in enumerate(after) if not line.startswith("  ")), len(after))
    frames = filter(None, map(_FRAME.match, after[:end]))
    return [
        f"{frame['file']}:{frame['line']} {frame['name']}"
        for frame in frames
        if not any(place in frame["file"] for place in _AROUND)
    ]
