"""Runs the text of tests inside a sandbox of their own, where no solution ever is. Its source runs there.

The function under test is a stand-in: a call of it stops the tests and goes out by `step`; what the solution, in
another sandbox, is said to have returned comes in by the next `step`. Wants the names of `wire.py` beside it.
"""

import builtins
import queue
import threading

from agentrl_envs.code.wire import WireError, read, write  # left out inside, where they are there already


class Director:
    """setup: run before the tests. tests: the text of one. name: the function's."""

    def __init__(self, setup, tests, name):
        self.asked = queue.SimpleQueue()
        self.answered = queue.SimpleQueue()
        self.unfit = None
        thread = threading.Thread(target=self._run, args=(setup, tests, name), daemon=True)
        thread.start()

    def step(self, value=None, error=None):
        """Answer the call that waits, if one does, and go on to the next: ("call", its arguments), or how it ended:
        ("passed", ""), ("failed", why) or ("unfit", what cannot be sent)."""
        if value is not None or error is not None:
            self.answered.put((value, error))
        return write(self.asked.get())

    def _stand_in(self, *positional, **named):
        try:
            arguments = write((positional, named))
        except WireError as error:
            self.unfit = str(error)
            raise
        self.asked.put(("call", arguments))
        value, raised = self.answered.get()
        if raised is not None:
            raise _known(raised)
        return read(value)

    def _run(self, setup, tests, name):
        names = {"__name__": "tests"}
        try:
            exec(setup, names)
            names[name] = self._stand_in
            exec(tests, names)
            ended = "passed", ""
        except BaseException as error:  # noqa: BLE001 - whatever a test raises is its verdict
            ended = "failed", f"{type(error).__name__}: {error}"[:200]
        self.asked.put(("unfit", self.unfit) if self.unfit else ended)


def _known(name):
    """An exception of that name, as tests may expect one; RuntimeError for any but those of Python."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind("raised by the solution")
        except TypeError:  # some want more
            pass
    return RuntimeError(name)
