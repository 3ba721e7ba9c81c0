"""Players of `agentrl try ENV`: a person at the terminal, or a file of replies."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import UserError
from agentrl.plugins.types import Json

HINT = "One line is one turn; end it with \\ to continue on the next. Ctrl-D quits; ? shows this again."
HINT_CALL = " A call is /{tool} {example}"


class Person:
    """A person who types the turns. hint: shown for `?`, through say."""

    def __init__(self, hint: str, say: Callable[[str], None]) -> None:
        self._hint, self._say = hint, say

    async def turn(self, number: int) -> str | None:
        """The next turn's text; None at the end of the input."""
        lines: list[str] = []
        while True:
            line = await _read_line("you> " if not lines else "...> ")
            if line is None:
                return None
            if line.strip() == "?" and not lines:
                self._say(self._hint)
                continue
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)


async def _read_line(prompt: str) -> str | None:
    """A line of stdin without its end, None at the end of the input. It is read in a daemon thread, so that
    Ctrl-C ends the command at once."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()

    def deliver(line: str) -> None:
        if not future.done():
            future.set_result(line)

    def read() -> None:
        try:
            line = sys.stdin.readline()
        except (ValueError, OSError):  # closed, or not text
            line = ""
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, line)

    sys.stdout.write(prompt)
    sys.stdout.flush()
    threading.Thread(target=read, daemon=True, name="agentrl-stdin").start()
    line = await future
    return line.rstrip("\r\n") if line else None


def read_replies(path: str) -> list[str]:
    """The turns of a reply file. Raises UserError with file and line.

    .jsonl: each line is a text, or an object with `content` and `tool_calls` (each `name` and `arguments`). Any other
    file is text, with a line `---` between turns and calls as `/name {...}` lines.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--replies {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--replies {path}: not a text file in UTF-8: {error.reason}") from error
    if path.endswith(".jsonl"):
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        turns = [_turn(line, f"--replies {path}, line {number}") for number, line in lines]
    else:
        turns = _parts(text)
    if not turns:
        raise UserError(f"--replies {path}: contains no reply")
    return turns


def _parts(text: str) -> list[str]:
    turns: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip() == "---":
            turns.append([])
        else:
            turns[-1].append(line)
    if len(turns) > 1 and not any(line.strip() for line in turns[-1]):
        turns.pop()
    joined = ["\n".join(lines).strip("\n") for lines in turns]
    return joined if any(text.strip() for text in joined) else []


def _turn(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: is not JSON: {error}") from None
    from agentrl.testing.agent import plain_text

    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or (unknown := sorted(value.keys() - {"role", "content", "tool_calls"})):
        what = f"has no field {unknown[0]!r}" if isinstance(value, dict) else "is not a reply"
        raise UserError(f"{where}: {what}; expected a text, or an object with content and tool_calls")
    content = value.get("content") or ""
    if not isinstance(content, str) or not isinstance(value.get("tool_calls") or [], list):
        raise UserError(f"{where}: content must be text, tool_calls a list")
    lines = [plain_text(content)] if content else []
    return "\n".join(lines + [_call(call, where) for call in value.get("tool_calls") or []])


def _call(value: Json, where: str) -> str:
    from agentrl.testing.agent import call

    inner = value.get("function", value) if isinstance(value, dict) else {}
    name, arguments = inner.get("name"), inner.get("arguments", {})
    if not isinstance(name, str):
        raise UserError(f"{where}: a tool call needs name and arguments, got {value!r:.60}")
    return f"/{name} {arguments}" if isinstance(arguments, str) else call(name, **arguments)
