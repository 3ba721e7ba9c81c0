"""Process 1 of the sandbox of a program: runs it, sees to its limits, and carries its connections to the gateway.

A sandbox has no network but a loopback of its own: what connects to a port there is connected to the gateway's socket.
Nothing inside can kill, trace or stop process 1. It measures what all processes use together, since the kernel's own
limits are of one process each. When the program ends it exits with its code, and the kernel kills the rest.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from measure import confine, files, kernel_memory, proportional_memory, quick_memory, usage

_CHUNK = 1 << 16
_LOOK, _CLOSE_LOOK = 0.05, 0.5  # seconds between two measurements, at least, and between two that look at everything
_PAUSE = 50  # times as long as a measurement took, before the next one: programs mostly wait for the model
_ENDED = 137  # our exit code where a limit was passed, as of a program that was killed
_PR_SET_DUMPABLE = 4


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def _carry(socket: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        there, back = await asyncio.open_unix_connection(socket)
        await asyncio.gather(_pump(reader, back), _pump(there, writer))
        back.close()
    except OSError:
        pass  # the client sees that its connection is closed
    finally:
        writer.close()


def _over(limits: dict[str, int], closely: bool) -> str:
    """What the processes use more of than they may, as one says it; nothing where they keep to it. closely: look
    also at what takes milliseconds, their mappings and descriptors."""
    _, memory, tasks = usage()
    if tasks > limits["processes"]:
        return f"it started more than {limits['processes']} processes and threads"
    most = limits["memory"]
    sockets = limits["socket_bytes"]
    left = most - (kernel_memory(sockets, limits["descriptors"], most) if closely else quick_memory(sockets))
    if left < 0 or (memory > left and proportional_memory() > left):
        return f"its processes used more than {most >> 20} MiB of memory"
    if files() > limits["files"]:
        return f"it made more than {limits['files']} files in /tmp, /dev/shm and /run"
    return ""


async def _watch(limits: dict[str, int]) -> None:
    """End everything with a line on standard error once a limit is passed."""
    closely = 0.0
    while True:
        began = time.monotonic()
        if why := _over(limits, began >= closely):
            os.write(2, f"\nThe sandbox ended the program: {why}.\n".encode())
            os._exit(_ENDED)
        took = time.monotonic() - began
        if began >= closely:
            closely = began + _CLOSE_LOOK
        await asyncio.sleep(min(_CLOSE_LOOK, max(_LOOK, _PAUSE * took)))


def _reap(program: int) -> None:
    """Reap what has ended, and exit where that is the program."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
            if pid == 0:
                return


async def _serve(limits: dict[str, int], port: int, socket: str, words: list[str]) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _carry(socket, reader, writer)

    async with await asyncio.start_server(carry, "127.0.0.1", port, backlog=1024):
        try:
            program = subprocess.Popen(words, start_new_session=True).pid
        except OSError as error:
            os.write(2, f"{words[0]}: {error.strerror}\n".encode())
            os._exit(127)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _reap, program)
        _reap(program)  # it may have been faster
        await _watch(limits)


def main(limits: dict[str, int], port: int, socket: str) -> None:
    """Run the command of our arguments. limits: of `_over`, and of each process by RLIMIT's names. socket: the
    gateway's, which is reached at `port`."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 does not hear, and asyncio would
    confine({name: value for name, value in limits.items() if name.isupper()})
    asyncio.run(_serve(limits, port, socket, sys.argv[1:]))
