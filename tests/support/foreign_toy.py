"""A guessing game as a foreign environment's adapter, and what such an adapter may do wrong: `fault` says it.

It runs in another interpreter, so it imports nothing of the tests.
"""

import asyncio
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time

GUESS = {
    "name": "guess",
    "description": "Guess the number.",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
}


class Adapter:
    """fault: `where:what`, such as `step:exit`. marker: a file by which only its first maker misbehaves."""

    def __init__(self, most=10, fault="", marker="", answers=None):
        self.answers = answers or {}
        self.most = most
        self.fault = fault
        self.marker = marker
        self.fail("init")

    def fail(self, where):
        at, _, what = self.fault.partition(":")
        if at != where or (self.marker and os.path.exists(self.marker)):
            return
        if self.marker:
            open(self.marker, "w").close()
        FAULTS[what]()

    def describe(self):
        self.fail("describe")
        return {
            "name": "guessing",
            "splits": {"train": 100, "test": 10},
            "tools": [GUESS],
            "reward_parts": ["right", "quick"],
            "solved": {"right": 1.0},
            "cannot": {"images": "the number is told in words"},
        }

    def task(self, split, index):
        return {"secret": random.Random(f"{split}{index}").randint(1, self.most), "version": [*sys.version_info[:2]]}

    def open(self, task, seed):
        self.fail("open")
        return Game(self, task["secret"])

    def demonstrate(self, task, seed, style):
        call = {"type": "function", "function": {"name": "guess", "arguments": {"number": task["secret"]}}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "guess", "content": "right"},
            {"role": "assistant", "content": "done"},
        ]


class Keeping(Adapter):
    """Keeps between rollouts what it should not."""

    opened = 0

    def open(self, task, seed):
        self.opened += 1
        self.answers = {"grade": {"right": 0.0, "quick": float(self.opened)}}
        return Game(self, task["secret"])


class AsyncAdapter(Adapter):
    async def open(self, task, seed):
        return AsyncGame(self, task["secret"])


class Game:
    def __init__(self, adapter, secret):
        self.adapter = adapter
        self.secret = secret
        self.guesses = 0
        self.right = False
        self.messages = f"Guess a number from 1 to {adapter.most}."

    @property
    def state(self):
        return f"{self.guesses}"

    def call(self, name, arguments):
        print("a line on standard output", arguments)
        self.adapter.fail("call")
        self.guesses += 1
        self.right = arguments["number"] == self.secret
        if "call" in self.adapter.answers:
            return self.adapter.answers["call"]
        said = "right" if self.right else "higher" if arguments["number"] < self.secret else "lower"
        return {"text": said, "reward": 0.125, "metrics": {"distance": abs(arguments["number"] - self.secret)}}

    def step(self, message):
        self.adapter.fail("step")
        if "step" in self.adapter.answers:
            return self.adapter.answers["step"]
        return "Call guess." if not self.guesses else None

    def grade(self, messages):
        self.adapter.fail("grade")
        if "grade" in self.adapter.answers:
            return self.adapter.answers["grade"]
        return {"right": float(self.right), "quick": 1.0 / max(1, self.guesses)}

    def close(self):
        self.adapter.fail("close")


class AsyncGame(Game):
    async def call(self, name, arguments):
        await asyncio.sleep(0.5)
        return super().call(name, arguments)


def _garbage():
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}") and "socket" in os.readlink(f"/proc/self/fd/{fd}"):
            os.write(int(fd), b"no answer\n")


def _flood():
    for _ in range(200):
        sys.stdout.write("x" * (1 << 20))
    sys.stdout.flush()


def _endless_line():
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}") and "socket" in os.readlink(f"/proc/self/fd/{fd}"):
            while True:
                os.write(int(fd), b"x" * (1 << 20))


def _orphan():
    """Start a process in a session of its own, which nobody but a supervisor ends."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    raise RuntimeError(f"started {started.pid}.")


def _raise(error):
    raise error


class UnreadableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


FAULTS = {
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(4),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(600),
    "garbage": _garbage,
    "flood": _flood,
    "endless": _endless_line,
    "hold": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "stop": lambda: (os.kill(os.getpid(), signal.SIGSTOP), time.sleep(600)),  # this thread may run on for a moment
    "orphan": _orphan,
    "memory": lambda: bytearray(4 << 30),
    "raise": lambda: _raise(ValueError("no such thing")),
    "unreadable": lambda: _raise(UnreadableError()),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
}
