"""`ScannerProcess`: a stranger's scanner in a process of its own, with a deadline for each sample; and its program."""

import json
import os
import select
import time
from collections.abc import Mapping
from typing import Any

from agentrl.containment.worker_process import SIZE, WorkerProcess, beginning, begun, connected, framed, stream_of
from agentrl.errors import UserError, describe
from agentrl.plugins.registry import load
from agentrl.plugins.scanner import Scanned, Scanner
from agentrl.plugins.types import Json

NOTE = 300
"""Characters that are kept of what a scanner found."""
_IMPORT = 60.0  # seconds for the import of a scanner
_REPLY = 4 * NOTE + 1000  # bytes of a reply, at most


class ScannerProcess:
    """A scanner by its name; its process starts when it is first needed, and anew after it was killed.

    seconds: of one sample, at most; a minute more to be imported.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self._seconds = name, seconds
        self._process: WorkerProcess | None = None

    def __call__(self, sample: Mapping[str, Json]) -> str | None:
        """What it found. sample: the fields of a Scanned. Raises UserError: it raised, ended, or took too long."""
        if self._process is None:
            self._process = WorkerProcess("agentrl.plugins.scanner_process")
            self._ask(beginning(name=self.name), self._seconds + _IMPORT)
        found = self._ask(json.dumps(sample).encode(), self._seconds)
        return None if found is None else str(found)

    def _ask(self, payload: bytes, seconds: float) -> Json:
        process = self._process
        assert process is not None
        until = time.monotonic() + seconds
        try:
            process.channel.settimeout(seconds)
            process.channel.sendall(framed(payload))
            size = int.from_bytes(self._read(SIZE, until), "big")
            if not 0 < size <= _REPLY:
                raise ValueError(f"a reply of {size} bytes")
            reply = json.loads(self._read(size, until))
        except TimeoutError as error:
            self.close()
            raise UserError(f"scanner {self.name!r} took longer than {seconds:g} s over a sample") from error
        except (EOFError, OSError) as error:
            how = process.how_it_ended(1.0)
            self.close()
            raise UserError(f"scanner {self.name!r}: {how}") from error
        except ValueError as error:
            self.close()
            raise UserError(f"scanner {self.name!r} wrote into the channel of its process: {error}") from error
        if "error" in reply:
            raise UserError(f"scanner {self.name!r}: {reply['error']}")
        return reply["value"]

    def _read(self, count: int, until: float) -> bytes:
        assert self._process is not None
        channel, found = self._process.channel, b""
        while len(found) < count:
            if not select.select([channel], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            piece = channel.recv(count - len(found))
            if not piece:
                raise EOFError
            found += piece
        return found

    def close(self) -> None:
        """Kill the process, and free what belongs to it."""
        if self._process is not None:
            self._process.end()
            self._process = None


def found_of(value: object) -> str | None:
    """What a scanner gave as a text; False and None are nothing. Raises TypeError: it is neither text nor truth."""
    if value is None or value is False:
        return None
    if value is True:
        return "found"
    if not isinstance(value, str):
        raise TypeError(f"it gave {type(value).__name__}, not a text, None, True or False")
    return value[:NOTE].encode(errors="replace").decode()


def main() -> None:
    """Serve until requests end. What the scanner prints goes nowhere: only replies are read."""
    channel = connected()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    stream = stream_of(channel)

    def write(reply: Mapping[str, Json]) -> None:
        stream.write(framed(json.dumps(reply).encode()))
        stream.flush()

    def read() -> bytes:
        size = stream.read(SIZE)
        return stream.read(int.from_bytes(size, "big")) if len(size) == SIZE else b""

    try:
        scanner: Scanner = begun(read(), lambda facts: load("scanners", facts["name"]))
    except BaseException as error:  # noqa: BLE001 - the boundary of the process: a module may raise anything
        write({"error": describe(error)[:NOTE]})
        return
    write({"value": None})
    while payload := read():
        write(_scanned(scanner, payload))


def _scanned(scanner: Any, payload: bytes) -> dict[str, Json]:
    try:
        return {"value": found_of(scanner(Scanned(**json.loads(payload))))}
    except BaseException as error:  # noqa: BLE001 - the boundary of the process
        return {"error": describe(error)[:NOTE]}


if __name__ == "__main__":
    main()
