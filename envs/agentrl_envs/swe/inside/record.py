"""Run a package's own tests and doctests, and note the arguments of each call of a function at the top of a module:
`python3 record.py ROOT TESTS SECONDS FOLDER`; FOLDER has `replay.py`. Prints JSON: a list of
`[file, module, function, positional, named]`.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import io
import json
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_CALLS, _TEXT = 40, 600
_SKIPPED = ("__main__", "setup", "conftest")


class Recorder:
    """The calls that were seen. written: from `replay.py`."""

    def __init__(self, root: str, written: Callable[[Any], str], none: type[Exception]) -> None:
        self.root, self.written, self.none = root, written, none
        self.found: dict[
            Any, dict[Any, Any] | None
        ] = {}  # by code object: a dictionary of calls, or None for what is no function of a module
        self.busy = False

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        """Hear of an event of `sys.setprofile`."""
        if event != "call" or self.busy:
            return
        code = frame.f_code
        if code not in self.found:
            module = frame.f_globals.get("__name__", "")
            file = os.path.abspath(code.co_filename)
            fits = file.startswith(self.root + "/") and module and module not in _SKIPPED
            fits = fits and not code.co_filename.startswith("<")
            fits = fits and code.co_qualname == code.co_name and not code.co_name.startswith(("<", "__", "test"))
            self.found[code] = {"where": (os.path.relpath(file, self.root), module)} if fits else None
        seen = self.found[code]
        if seen is None or len(seen) > _CALLS:
            return
        self.busy = True
        try:
            call = self.arguments(code, frame.f_locals)
            if sum(map(len, call)) <= _TEXT:
                seen[call] = True
        except self.none:
            pass
        finally:
            self.busy = False

    def arguments(self, code: Any, values: dict[str, Any]) -> tuple[str, str]:
        """Positional and named arguments as literals. Raises NoLiteralError."""
        names, count, named = code.co_varnames, code.co_argcount, code.co_kwonlyargcount
        positional = [values[name] for name in names[:count]]
        rest = count + named
        if code.co_flags & 4:  # *args
            positional += values[names[rest]]
            rest += 1
        given = {name: values[name] for name in names[count : count + named]}
        if code.co_flags & 8:  # **kwargs
            given.update(values[names[rest]])
        texts = self.written(positional), self.written(given)
        try:
            for text in texts:
                ast.literal_eval(text)
        except ValueError:
            raise self.none from None
        return texts

    def report(self) -> list[list[str]]:
        """All calls, for functions that can be reached by their name."""
        calls = []
        for code, seen in self.found.items():
            if seen is None:
                continue
            file, module = seen.pop("where")
            calls += [[file, module, code.co_name, *call] for call in seen]
        return calls


def modules(root: str) -> Iterator[str]:
    """Dotted names of the modules of a package."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name.isidentifier() and name not in ("tests", "test", "__pycache__")]
        below = os.path.relpath(folder, root).replace("/", ".")
        for name in files:
            if name.endswith(".py") and name != "__main__.py":
                path = name[:-3] if below == "." else f"{below}.{name[:-3]}"
                yield path.removesuffix(".__init__")


def examples(root: str) -> None:
    """Run the doctests of all modules, and call nothing else."""
    for name in sorted(modules(root)):
        with contextlib.suppress(BaseException):
            doctest.testmod(importlib.import_module(name), report=False)


def tests(folder: str) -> None:
    """Run the tests of a folder: by pytest where it is installed."""
    try:
        import pytest
    except ImportError:
        import unittest

        unittest.main(None, argv=["unittest", "discover", "-s", folder], exit=False)
        return
    pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-o", "addopts=", folder])


def main() -> None:
    """Run all, within the time."""
    root, folder, seconds, own = sys.argv[1:5]
    sys.path[:0] = [root]
    sys.path.append(own)
    sys.dont_write_bytecode = True
    from replay import NoLiteralError, written

    recorder = Recorder(os.path.abspath(root), written, NoLiteralError)
    output = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for place in range(3):
        os.dup2(null, place)

    def say(*given: object) -> None:
        sys.setprofile(None)
        data = json.dumps(recorder.report()).encode()
        while data:
            data = data[os.write(output, data) :]
        os._exit(0)

    signal.signal(signal.SIGALRM, say)
    signal.alarm(int(seconds))
    os.chdir(os.path.dirname(os.path.abspath(folder)) if folder else root)
    sys.stdout = sys.stderr = io.StringIO()
    sys.setprofile(recorder)
    examples(root)
    with contextlib.suppress(BaseException):
        if folder:
            tests(folder)
    say()


if __name__ == "__main__":
    main()
