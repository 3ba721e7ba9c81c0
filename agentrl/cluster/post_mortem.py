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
class Suspect:
    """A worker to be looked at."""

    node_id: str
    pid: int
    log: Path
    since: int


@dataclass(frozen=True)
class Scene:
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


def visit(suspects: list[Suspect], ask: bool = False) -> list[Scene | None]:
    """Look at workers, each on its machine, all machines at once. ask: for their stacks. None for those on a machine
    that does not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    by_node: dict[str, list[Suspect]] = {}
    for suspect in suspects:
        by_node.setdefault(suspect.node_id, []).append(suspect)
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
    return [found.get(suspect) for suspect in suspects]


def look(suspects: list[Suspect], ask: bool) -> list[Scene]:
    """At workers of this machine."""
    said = [tail(suspect.log, _READ, suspect.since) for suspect in suspects]
    if ask:
        for suspect in suspects:
            try:
                os.kill(suspect.pid, STACKS)
            except ProcessLookupError:
                continue
        time.sleep(STACK_SECONDS)
    return [
        _scene(lines, tail(suspect.log, _READ, suspect.since) if ask else [], _alive(suspect.pid))
        for suspect, lines in zip(suspects, said, strict=True)
    ]


def _scene(said: list[str], asked: list[str], alive: bool) -> Scene:
    crashes = [at for at, line in enumerate(said) if line.startswith(_CRASH)]
    if crashes:
        own, dump = said[: crashes[-1]], said[crashes[-1] :]
        own = own[: next((at for at, line in enumerate(own) if _RAYS_OWN.match(line)), len(own))]
        return Scene(own[-QUOTED:], dump[0].removeprefix(_CRASH), stack(dump, "Current thread"), oom_kills(), alive)
    return Scene(said[-QUOTED:], "", stack(asked), oom_kills(), alive)


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
