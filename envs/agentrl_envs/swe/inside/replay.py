"""Call functions of a package, and say what they give: `python3 -I -S replay.py`, jobs as JSON on standard input.

A job is `{file, text, calls, seconds}`: where `file` is not empty, it holds `text` meanwhile; a call is
`[module, function, positional, named]`, the last two as literals. A line of standard output is the list of results of a
job, as texts; null where it does not come to an end. What is expected is not known here.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import decimal
import fractions
import importlib
import itertools
import json
import os
import select
import signal
import sys
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_EXACT = (bool, int, float, complex, str, bytes, type(None), type(...))
_WRITTEN = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction, range)
_LAZY = (types.GeneratorType, map, filter, zip, itertools.chain, itertools.islice, reversed, enumerate)
_DEPTH, _LENGTH, _ITEMS = 8, 4000, 1000


class NoLiteralError(Exception):
    """A value has no text that is equal for equal values."""


def written(value: Any, depth: int = 0) -> str:
    """A value as text: equal where the values are. Raises NoLiteralError."""
    if depth > _DEPTH:
        raise NoLiteralError
    kind = type(value)
    if kind in _EXACT:
        return repr(value)
    if kind in (list, tuple):
        inner = ", ".join(written(item, depth + 1) for item in value)
        return f"[{inner}]" if kind is list else f"({inner},)" if len(value) == 1 else f"({inner})"
    if kind in (set, frozenset):
        inner = ", ".join(sorted(written(item, depth + 1) for item in value))
        return ("{" + inner + "}" if value else "set()") if kind is set else f"frozenset([{inner}])"
    if kind is dict:
        pairs = (f"{written(key, depth + 1)}: {written(item, depth + 1)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, _WRITTEN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"{kind.__name__}({', '.join(written(item, depth + 1) for item in value)})"
    if isinstance(value, (str, int, float, dict)) and kind.__module__ != "builtins":
        base: Any = next(base for base in (str, int, float, dict) if isinstance(value, base))
        return f"{kind.__name__}({written(base(value), depth + 1)})"
    if isinstance(value, _LAZY):
        return f"iter({written(list(itertools.islice(value, _ITEMS)), depth + 1)})"
    raise NoLiteralError


def outcome(module: str, function: str, positional: str, named: str) -> str:
    """The result of a call as text, or `!` and the exception; `?` where it has no text."""
    try:
        target = getattr(importlib.import_module(module), function)
        text = written(target(*ast.literal_eval(positional), **ast.literal_eval(named)))
        return text if len(text) <= _LENGTH else "?"
    except NoLiteralError:
        return "?"
    except BaseException as error:  # noqa: BLE001 - boundary: a package may raise anything
        return f"!{type(error).__name__}"


def run(root: str, calls: list[list[str]], seconds: float) -> Any:
    """The results of calls in a process of their own; None where it does not end."""
    source, target = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.close(source)
        null = os.open(os.devnull, os.O_RDWR)
        for place in range(3):
            os.dup2(null, place)
        sys.path.insert(0, root)
        data = json.dumps([outcome(*call) for call in calls]).encode()
        while data:
            data = data[os.write(target, data) :]
        os._exit(0)
    os.close(target)
    said, last = b"", time.monotonic() + seconds
    while select.select([source], [], [], max(0.0, last - time.monotonic()))[0]:
        part = os.read(source, 1 << 16)
        if not part:
            break
        said += part
    for number in (pid, -pid):
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(source)
    try:
        return json.loads(said)
    except ValueError:
        return None


def main() -> None:
    """Serve all jobs."""
    asked = json.load(sys.stdin)
    sys.dont_write_bytecode = True
    for job in asked["jobs"]:
        path = os.path.join(asked["root"], job["file"])
        before = None
        if job["file"]:
            with open(path, encoding="utf-8", newline="") as file:
                before = file.read()
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(job["text"])
        result = run(asked["root"], job["calls"], job["seconds"])
        if before is not None:
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(before)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
