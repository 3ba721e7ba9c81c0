"""A Python interpreter in a sandbox, which keeps its variables over the turns of a request and is seen by no other."""

import re
from collections.abc import Sequence

from agentrl import Session, Tool, ToolResponse, UserError
from agentrl.plugins.types import Json
from agentrl_tools.sandbox.base import MIB, Execution, Limits, SandboxSession, Stop
from agentrl_tools.sandbox.make import make_sandbox

MAX_CODE = 200_000  # characters of one call
_FENCED = re.compile(r"\s*```[\w+-]*[ \t]*\n(.*?)\n?[ \t]*```\s*", re.S)
_STOPPED = {
    Stop.WALL: "it ran for more than {wall_seconds:g} seconds",
    Stop.CPU: "it used more than {cpu_seconds:g} seconds of CPU time",
    Stop.MEMORY: "its processes used more than {memory_mib} MiB of memory",
    Stop.PROCESSES: "it started more than {processes} processes and threads",
    Stop.FILES: "it made more than {files} files",
    Stop.OUTPUT: "it printed far too much",
    Stop.ENDED: "the interpreter's process ended",
}


class Python(Tool):
    """backend: `auto`, `bwrap` or `e2b`. seconds, cpu_seconds: of one call. memory_mb, disk_mb, processes: of all that
    one request's code runs and writes. output: characters kept of each of its outputs. packages: `bwrap` shows the
    standard library; a list of folders adds the packages in them, read-only. pool: interpreters started ahead."""

    name = "python"
    description = (
        "Runs Python code and returns what it prints and the value of its last expression. Variables, imports and "
        "files in the current folder are kept from call to call. There is no network."
    )

    def __init__(
        self,
        backend: str = "auto",
        seconds: float = 20.0,
        cpu_seconds: float = 10.0,
        memory_mb: int = 512,
        disk_mb: int = 64,
        processes: int = 32,
        output: int = 20_000,
        packages: Sequence[str] = (),
        pool: int = 4,
    ) -> None:
        try:
            self.limits = Limits(
                wall_seconds=seconds, cpu_seconds=cpu_seconds, memory=memory_mb * MIB, disk=disk_mb * MIB,
                processes=processes, output=output,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(f"tool 'python': {error}") from None
        self.sandbox = make_sandbox(backend, limits=self.limits, pool=pool, packages=packages)
        code = {"type": "string", "description": "Python source; end it with the expression to be shown, or print"}
        self.parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}

    async def create(self, session: Session, **create_kwargs: Json) -> None:
        session.state = await self.sandbox.open()

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        code = arguments["code"]
        if len(code) > MAX_CODE:
            return ToolResponse(text=f"Error: the code has more than {MAX_CODE} characters", error=True)
        interpreter: SandboxSession = session.state
        execution = await interpreter.run(unfenced(code))
        metrics = {
            "exceptions": float(execution.error is not None),
            "timeouts": float(execution.stop in (Stop.WALL, Stop.CPU)),
            "stops": float(execution.stop is not None),
            "restarts": float(execution.lost) + float(execution.lost_before),
        }
        text = execution_text(execution, self.limits)
        return ToolResponse(text=text, images=execution.images, metrics=metrics, error=not execution.ok)

    async def release(self, session: Session, **kwargs: Json) -> None:
        if session.state is not None:
            interpreter: SandboxSession = session.state
            session.state = None
            await interpreter.close()

    async def close(self) -> None:
        await self.sandbox.close()


def unfenced(code: str) -> str:
    """The code without the Markdown fence that some models put around it."""
    match = _FENCED.fullmatch(code)
    return match.group(1) if match else code


def execution_text(execution: Execution, limits: Limits) -> str:
    """An execution as the model reads it: what was printed, the value, then what went wrong."""
    parts = []
    if execution.lost_before:
        parts.append("[The former call was cut off and the interpreter started anew: earlier variables are gone.]")
    parts.append(execution.stdout.rstrip("\n"))
    if execution.stderr.strip():
        parts.append(f"[stderr]\n{execution.stderr.rstrip()}")
    parts += [execution.value or "", execution.error or ""]
    if execution.images:
        parts.append("[1 image]" if len(execution.images) == 1 else f"[{len(execution.images)} images]")
    if execution.stop is not None:
        parts.append(_stopped(execution, limits))
    if execution.cut:
        parts.append("[Some of the output was left out.]")
    return "\n".join(part for part in parts if part) or "[no output]"


def _stopped(execution: Execution, limits: Limits) -> str:
    assert execution.stop is not None
    why = _STOPPED[execution.stop].format(
        wall_seconds=limits.wall_seconds, cpu_seconds=limits.cpu_seconds, memory_mib=limits.memory // MIB,
        processes=limits.processes, files=limits.files,
    )  # fmt: skip
    after = "the interpreter was started anew: variables are gone" if execution.lost else "variables are kept"
    return f"[Stopped: {why}; {after}.]"
