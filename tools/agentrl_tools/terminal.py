"""A shell in the request's workspace, which lives from call to call."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from agentrl import ArgumentError, Session, ToolResponse, UserError
from agentrl.errors import PathError
from agentrl.plugins.types import Json
from agentrl.workspace.workspace import Workspace
from agentrl_tools.screen import Output, clean_text, cut_middle
from agentrl_tools.shell import Ending, Ran, Shell
from agentrl_tools.workspace_tool import WorkspaceTool

MAX_COMMAND = 100_000
"""Characters of one command."""
_KEYS = {"C-c": b"\x03", "C-d": b"\x04", "C-z": b"\x1a", "C-\\": b"\x1c"}
_APPEND = 'cat >>"$0" || { rm -f "$0"; exit 1; }'
_RUNNING = (
    "a program is still running and waits for input: answer it by `input`, end it with the input C-c, or `restart`"
)
_TOLD = {
    Ending.WAITING: "[still running, waiting for input: answer by `input`, or end it with the input C-c]",
    Ending.TIME: "[it ran for more than {seconds:g} seconds and was ended]",
    Ending.FLOOD: "[it printed far too much and was ended]",
    Ending.ENDED: "[the shell ended: the next command runs in a new one, without its variables, in {home}]",
    Ending.LOST: "[the shell did not answer any more and was ended, with what it had started: the next command runs in "
    "a new one, without its variables, in {home}]",
}


@dataclass(slots=True)
class _State:
    """What one request's terminal is."""

    shell: Shell
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a call: a shell runs one command at a time."""
    saved: int = 0
    """Long outputs that were written to files."""


class Terminal(WorkspaceTool):
    """seconds: that a command may take, after which it is ended, and not the shell. output: characters that the model
    reads of one output; of longer ones it reads the beginning and the end, and a file in the workspace has it all."""

    name = "terminal"
    description = (
        "Runs a command in a shell. Variables, the current folder and background jobs are kept from call to call."
    )

    def __init__(self, seconds: float = 20.0, output: int = 16_000) -> None:
        if not (seconds > 0 and output >= 100):
            raise UserError(f"tool 'terminal': seconds ({seconds}) must be above 0, output ({output}) at least 100")
        self.seconds, self.output = seconds, output
        self.parameters = {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "what the shell is to run, of one line or more"},
                "input": {
                    "type": "string",
                    "description": "a line for the program that waits, or a key: C-c, C-d, C-z; empty: wait on",
                },
                "restart": {"type": "boolean", "description": "true ends the shell and starts it anew"},
            },
        }

    async def create(self, session: Session, **create_kwargs: Json) -> None:
        session.state = _State(Shell(self.workspace(session), self.seconds))

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        """Run a command, type a line, or start anew: one of the three."""
        command, line, restart = (arguments.get(name) for name in ("command", "input", "restart"))
        if (command is not None) + (line is not None) + bool(restart) != 1:
            raise ArgumentError("give one of `command`, `input` and `restart: true`")
        state: _State = session.state
        async with state.lock:
            if restart:
                await state.shell.end()
                return ToolResponse("[the shell was started anew]")
            with Output() as output:
                said, do = (line, self._typed) if command is None else (command, self._ran)
                ran = await do(state.shell, str(said), output)
                return await self._response(session, ran, output)

    async def _ran(self, shell: Shell, command: str, output: Output) -> Ran:
        if len(command) > MAX_COMMAND:
            raise ArgumentError(f"the command has more than {MAX_COMMAND} characters")
        if "\0" in command:
            raise ArgumentError("the command holds a NUL character, which no shell takes")
        if shell.running and shell.waiting:
            raise ArgumentError(_RUNNING)
        if shell.running:  # a call of it was cut off
            with Output() as unread:
                await shell.interrupt(unread)
        return await shell.run(command, output)

    async def _typed(self, shell: Shell, text: str, output: Output) -> Ran:
        if not shell.running:
            raise ArgumentError("nothing is running that could read `input`: give a `command`")
        if text.strip() == "C-c":
            return await shell.interrupt(output)
        key = _KEYS.get(text.strip())
        if key is not None or not text:
            return await shell.type(key or b"", output)
        line = text.encode(errors="replace")
        return await shell.type(line if line.endswith((b"\n", *_KEYS.values())) else line + b"\n", output)

    async def _response(self, session: Session, ran: Ran, output: Output) -> ToolResponse:
        workspace: Workspace = self.workspace(session)
        text, pieces = "", _cleaned(ran.printed)
        async for piece in pieces:
            text += piece
            if len(text) > self.output + 1:  # the last end of line is not shown
                text = await self._shortened(workspace, session.state, text, pieces, output.dropped)
                break
        text = text.rstrip("\n")
        told = _TOLD.get(ran.ending, f"[exit code {ran.code}]" if ran.code else "")
        told = told.format(seconds=self.seconds, home=workspace.home)
        metrics = {
            "nonzero": float(ran.ending is Ending.DONE and ran.code != 0),
            "timeouts": float(ran.ending is Ending.TIME),
            "waiting": float(ran.ending is Ending.WAITING),
            "restarts": float(ran.ending in (Ending.ENDED, Ending.LOST)),
        }
        return ToolResponse("\n".join(part for part in (text, told) if part) or "[no output]", metrics=metrics)

    async def _shortened(
        self, workspace: Workspace, state: _State, text: str, more: AsyncIterator[str], dropped: int
    ) -> str:
        """The beginning and the end of a long output, of which `text` is printed first, and between them where to read
        all of it."""
        state.saved += 1
        path = f"/tmp/output-{state.saved}.txt"
        saved = await _saved(workspace, path, text)
        head, tail, left = text[: self.output], text[-self.output :], len(text)
        async for piece in more:
            saved = saved and await _saved(workspace, path, piece, more=True)
            tail, left = (tail + piece)[-self.output :], left + len(piece)
        head, tail = cut_middle(head + tail, self.output) or (head, tail)
        left -= len(head) + len(tail)
        whole = f"all but {dropped} bytes of it are" if dropped else "all of it is"
        where = f"; {whole} in {path}" if saved else ""
        return f"{head.rstrip(chr(10))}\n[... {left} characters are left out{where} ...]\n{tail}"

    async def release(self, session: Session, **kwargs: Json) -> None:
        if session.state is not None:
            state: _State = session.state
            session.state = None
            await state.shell.close()


async def _cleaned(printed: Iterator[bytes]) -> AsyncIterator[str]:
    """Yield an output as text, and let others go on between its pieces."""
    for piece in printed:
        yield clean_text(piece)
        await asyncio.sleep(0)


async def _saved(workspace: Workspace, path: str, text: str, *, more: bool = False) -> bool:
    """Write a text to a file, or add it to its end, and say whether that was done: the disk may be full, in which case
    the file is removed, or something else may stand there."""
    data = text.encode(errors="replace")
    try:
        if more:
            return (await workspace.exec(["sh", "-c", _APPEND, path], cwd="/", stdin=data)).ok
        await workspace.write(path, data)
    except PathError:
        return False
    return True
